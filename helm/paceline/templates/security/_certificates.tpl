{{- define "paceline.tlsSecret" -}}
{{- if eq .root.Values.security.certificates.source "existing" -}}
{{- index .root.Values.security.certificates.existingSecrets .component -}}
{{- else -}}
{{- include "paceline.name" . }}-tls
{{- end -}}
{{- end -}}

{{- define "paceline.tokensSecret" -}}
{{- .Values.security.tokens.existingSecret | default (printf "%s-tokens" (include "paceline.fullname" .)) -}}
{{- end -}}

{{- define "paceline.redisSecret" -}}
{{- .Values.redis.existingSecret | default (printf "%s-redis-password" (include "paceline.fullname" .)) -}}
{{- end -}}

{{/* Where certificates come from: certManager, chart, existing, none. Of `auto`, a release that has certificates of the
     chart keeps them, so that an upgrade after the arrival of cert-manager does not change the authority under way. */}}
{{- define "paceline.certificateSource" -}}
{{- $source := .Values.security.certificates.source -}}
{{- if not .Values.security.enabled -}}none
{{- else if ne $source "auto" -}}{{ $source }}
{{- else if lookup "v1" "Secret" .Release.Namespace (printf "%s-ca-key" (include "paceline.fullname" .)) -}}chart
{{- else if .Capabilities.APIVersions.Has "cert-manager.io/v1" -}}certManager
{{- else -}}chart
{{- end -}}
{{- end -}}

{{/* Names that a component's certificate is for, as a JSON list. */}}
{{- define "paceline.dnsNames" -}}
{{- $name := include "paceline.name" . -}}
{{- $namespace := .root.Release.Namespace -}}
{{- list $name (printf "%s.%s" $name $namespace) (printf "%s.%s.svc" $name $namespace) (printf "*.%s.%s.svc" $name $namespace) "localhost" | toJson -}}
{{- end -}}
