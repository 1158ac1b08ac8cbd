{{/* Names, labels and images. A component is one of learner, collector, replay, evaluator, relay, redis, test. */}}

{{- define "paceline.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- (contains $name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name $name)) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* dict "root" . "component" name */}}
{{- define "paceline.name" -}}
{{ include "paceline.fullname" .root }}-{{ .component }}
{{- end -}}

{{/* The name of a service that resolves in every namespace. A wildcard certificate needs the dots: *.SERVICE alone
     matches nothing in gRPC. */}}
{{- define "paceline.host" -}}
{{ include "paceline.name" . }}.{{ .root.Release.Namespace }}.svc
{{- end -}}

{{- define "paceline.selector" -}}
app.kubernetes.io/name: {{ default .root.Chart.Name .root.Values.nameOverride | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- with .component }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- end -}}

{{- define "paceline.labels" -}}
{{ include "paceline.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: paceline
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* name, namespace and labels of what belongs to a component; `name` replaces the component's own. */}}
{{- define "paceline.metadata" -}}
name: {{ .name | default (include "paceline.name" .) }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "paceline.labels" . | nindent 2 }}
{{- end -}}

{{/* dict "root" . "image" key of images */}}
{{- define "paceline.image" -}}
{{- $image := index .root.Values.images .image -}}
{{- $registry := .root.Values.global.imageRegistry | default .root.Values.images.registry -}}
{{- $tag := $image.tag | default .root.Values.images.tag | default .root.Chart.AppVersion -}}
{{- with $registry }}{{ . }}/{{ end }}{{ $image.repository }}
{{- if $image.digest }}@{{ $image.digest }}{{ else }}:{{ $tag }}{{ end }}
{{- end -}}

{{/* dict "root" . "when" auto|always|never "api" group/version: "true" or nothing */}}
{{- define "paceline.wanted" -}}
{{- if or (eq .when "always") (and (eq .when "auto") (.root.Capabilities.APIVersions.Has .api)) }}true{{ end }}
{{- end -}}

{{- define "paceline.components" -}}
{{- $names := list "learner" "collector" "replay" -}}
{{- $run := include "paceline.run" . | fromYaml -}}
{{- if $run.evaluator.enabled }}{{ $names = append $names "evaluator" }}{{ end -}}
{{- if .Values.relay.enabled }}{{ $names = append $names "relay" }}{{ end -}}
{{- if eq .Values.redis.mode "bundled" }}{{ $names = append $names "redis" }}{{ end -}}
{{- join "," $names -}}
{{- end -}}
