{{/* The run file: what the user says, over a preset if one is named, and under it what only the chart can know. */}}

{{- define "paceline.given" -}}
{{- $given := deepCopy .Values.config -}}
{{- $preset := .Values.preset | default (empty $given | ternary "pendulum-sac" "") -}}
{{- with $preset -}}
{{- $file := printf "files/presets/%s.yaml" . -}}
{{- $given = mergeOverwrite ($.Files.Get $file | fromYaml) $given -}}
{{- end -}}
{{- toYaml $given -}}
{{- end -}}

{{- define "paceline.shards" -}}
{{- (include "paceline.given" . | fromYaml).replay | default dict | dig "shards" 1 | int -}}
{{- end -}}

{{- define "paceline.collectorCount" -}}
{{- $auto := .Values.collectors.autoscaling -}}
{{- eq $auto.kind "none" | ternary .Values.collectors.replicas $auto.minReplicas | int -}}
{{- end -}}

{{- define "paceline.redisUrl" -}}
{{- $redis := .Values.redis -}}
{{- if eq $redis.mode "bundled" -}}
{{- $pod := printf "%s-%s" (include "paceline.name" (dict "root" . "component" "redis")) ($redis.perShard | ternary "{shard}" "0") -}}
{{- $scheme := .Values.security.enabled | ternary "rediss" "redis" -}}
{{ $scheme }}://{{ $pod }}.{{ include "paceline.host" (dict "root" . "component" "redis") }}:6379/0
{{- if .Values.security.enabled }}?ssl_ca_certs=/etc/paceline/tls/ca.crt{{ end }}
{{- else -}}
{{ $redis.external.url }}
{{- if $redis.external.caSecret }}{{ contains "?" $redis.external.url | ternary "&" "?" }}ssl_ca_certs=/etc/paceline/redis-tls/ca.crt{{ end }}
{{- end -}}
{{- end -}}

{{/* Section, key and value of each setting that the chart decides. */}}
{{- define "paceline.owned" -}}
{{- $host := .Values.listenHost -}}
{{- $learner := include "paceline.host" (dict "root" . "component" "learner") -}}
{{- $replay := include "paceline.host" (dict "root" . "component" "replay") -}}
run:
  directory: /var/lib/paceline/runs
replay:
  address: {{ include "paceline.name" (dict "root" . "component" "replay") }}-{shard}.{{ $replay }}:50051
  listen: {{ printf "%s:50051" $host | quote }}
  metrics_listen: {{ printf "%s:9101" $host | quote }}
  {{- if not (and (eq .Values.redis.mode "external") .Values.redis.external.urlKey) }}
  redis_url: {{ include "paceline.redisUrl" . | quote }}
  {{- end }}
  {{- if or (eq .Values.redis.mode "bundled") (and .Values.redis.external.existingSecret .Values.redis.external.passwordKey (not .Values.redis.external.urlKey)) }}
  redis_password_file: /etc/paceline/redis/password
  {{- end }}
learner:
  address: {{ $learner }}:50052
  listen: {{ printf "%s:50052" $host | quote }}
  metrics_listen: {{ printf "%s:9102" $host | quote }}
  endpoint_metrics_listen: {{ printf "%s:9103" $host | quote }}
collector:
  count: {{ include "paceline.collectorCount" . }}
  metrics_listen: {{ printf "%s:9104" $host | quote }}
  {{- if .Values.relay.enabled }}
  snapshots_address: {{ include "paceline.host" (dict "root" . "component" "relay") }}:50053
  {{- end }}
evaluator:
  metrics_listen: {{ printf "%s:9105" $host | quote }}
{{- if .Values.relay.enabled }}
relay:
  listen: {{ printf "%s:50053" $host | quote }}
  metrics_listen: {{ printf "%s:9106" $host | quote }}
{{- end }}
security:
  {{- if .Values.security.enabled }}
  certificates: /etc/paceline/tls
  client_certificates: {{ .Values.security.clientCertificates }}
  tokens: /etc/paceline/tokens
  {{- else }}
  allow_insecure: true
  {{- end }}
{{- end -}}

{{- define "paceline.run" -}}
{{- $given := include "paceline.given" . | fromYaml -}}
{{- $defaults := dict "run" (dict "id" .Release.Name) "evaluator" (dict "enabled" true) -}}
{{- toYaml (mergeOverwrite $defaults $given (include "paceline.owned" . | fromYaml)) -}}
{{- end -}}

{{/* A change of the number of collectors changes the file and restarts nobody: only the warm-up of a new run asks for
     it. */}}
{{- define "paceline.runChecksum" -}}
{{- $run := include "paceline.run" . | fromYaml -}}
{{- $_ := unset $run.collector "count" -}}
{{- toYaml $run | sha256sum -}}
{{- end -}}
