{{/* Peers of this release: dict "root" . "components" list */}}
{{- define "paceline.peers" -}}
{{- range .components }}
- podSelector:
    matchLabels:
      {{- include "paceline.selector" (dict "root" $.root "component" .) | nindent 6 }}
{{- end }}
{{- end -}}

{{/* Who may open a port of a component: dict "root" "component" "port" name "from" components */}}
{{- define "paceline.ingress" -}}
- from:
    {{- include "paceline.peers" (dict "root" .root "components" .from) | nindent 4 }}
  ports: [{port: {{ .port }}}]
{{- end -}}

{{- define "paceline.egress" -}}
- to:
    {{- include "paceline.peers" (dict "root" .root "components" .to) | nindent 4 }}
  ports: [{port: {{ .port }}}]
{{- end -}}
