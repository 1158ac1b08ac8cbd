{{/* Combinations that cannot work, each refused with a sentence. Included once, by the run file. */}}

{{- define "paceline.checks" -}}
{{- $values := .Values -}}
{{- $run := include "paceline.run" . | fromYaml -}}
{{- $shards := include "paceline.shards" . | int -}}
{{- $count := include "paceline.collectorCount" . | int -}}
{{- $auto := $values.collectors.autoscaling -}}
{{- $redis := $values.redis -}}

{{- if ne (int $values.learner.replicas) 1 }}
{{- fail (printf "learner.replicas is %d: a run has exactly 1 learner; for more runs, install more releases" (int $values.learner.replicas)) }}
{{- end }}

{{- if and $values.preset (not (.Files.Get (printf "files/presets/%s.yaml" $values.preset))) }}
{{- fail (printf "preset is %q: expected pendulum-sac, halfcheetah-sac, or nothing" $values.preset) }}
{{- end }}

{{- $given := include "paceline.given" . | fromYaml }}
{{- range $section, $keys := (include "paceline.owned" . | fromYaml) }}
{{- $said := index $given $section | default dict }}
{{- range $key, $value := $keys }}
{{- if and (hasKey $said $key) (ne (toString (index $said $key)) (toString $value)) }}
{{- if eq $key "redis_url" }}
{{- fail "config.replay.redis_url is set: the chart sets it; leave it out, and say under `redis` whether the record is in the bundled Redis or in redis.external.url" }}
{{- end }}
{{- $instead := eq $key "count" | ternary "; collectors.replicas says how many there are" "" }}
{{- fail (printf "config.%s.%s is %s: the chart sets it to %s; leave it out%s" $section $key (toString (index $said $key)) (toString $value) $instead) }}
{{- end }}
{{- end }}
{{- end }}
{{- range $section, $keys := (dict "security" (list "certificates" "client_certificates" "tokens" "allow_insecure") "collector" (list "snapshots_address") "evaluator" (list "snapshots_address") "relay" (list "listen" "metrics_listen") "replay" (list "redis_url" "redis_password_file")) }}
{{- $said := index $given $section | default dict }}
{{- range $keys }}
{{- if and (hasKey $said .) (not (hasKey (index (include "paceline.owned" $ | fromYaml) $section | default dict) .)) }}
{{- fail (printf "config.%s.%s is set: the chart decides it by its own values (security, relay, redis); leave it out" $section .) }}
{{- end }}
{{- end }}
{{- end }}

{{- if gt $shards $count }}
{{- fail (printf "config.replay.shards is %d and there are %d collectors: expected at least one collector for each shard, or a shard gets no rows; raise %s" $shards $count (eq $auto.kind "none" | ternary "collectors.replicas" "collectors.autoscaling.minReplicas")) }}
{{- end }}
{{- $most := dig "max_count" 256 $run.collector | int }}
{{- if gt (eq $auto.kind "none" | ternary $count (int $auto.maxReplicas)) $most }}
{{- fail (printf "there may be up to %d collectors and config.collector.max_count is %d: raise it, or lower collectors.replicas or collectors.autoscaling.maxReplicas" (eq $auto.kind "none" | ternary $count (int $auto.maxReplicas)) $most) }}
{{- end }}
{{- if and (ne $auto.kind "none") (gt (int $auto.minReplicas) (int $auto.maxReplicas)) }}
{{- fail (printf "collectors.autoscaling.minReplicas is %d: expected at most maxReplicas, %d" (int $auto.minReplicas) (int $auto.maxReplicas)) }}
{{- end }}
{{- if and (eq $auto.kind "keda") (not $auto.keda.prometheusAddress) }}
{{- fail "collectors.autoscaling.kind is keda and keda.prometheusAddress is empty: expected the address of Prometheus, such as http://prometheus.monitoring:9090" }}
{{- end }}

{{- $device := dig "device" "cpu" $run.learner }}
{{- if and (eq $device "cuda") (not (int $values.learner.gpu.count)) }}
{{- fail "config.learner.device is cuda and learner.gpu.count is 0: the learner would find no device; set learner.gpu.count to 1" }}
{{- end }}
{{- if and (ne $device "cuda") (int $values.learner.gpu.count) }}
{{- fail (printf "learner.gpu.count is %d and config.learner.device is %s: the GPU would be idle; set config.learner.device to cuda" (int $values.learner.gpu.count) $device) }}
{{- end }}

{{- if eq $redis.mode "external" }}
{{- $external := $redis.external }}
{{- if and (not $external.url) (not (and $external.existingSecret $external.urlKey)) }}
{{- fail "redis.mode is external and there is no redis.external.url: expected one, such as rediss://redis.example:6379/0, or existingSecret and urlKey" }}
{{- end }}
{{- if and $external.url $external.urlKey }}
{{- fail "redis.external.url and redis.external.urlKey are both set: expected one of them" }}
{{- end }}
{{- if contains "@" $external.url }}
{{- fail "redis.external.url holds a password or a user: expected one without, and the password in a secret named by redis.external.existingSecret; or the whole URL there, under urlKey" }}
{{- end }}
{{- if and $external.caSecret (not (hasPrefix "rediss://" $external.url)) }}
{{- fail "redis.external.caSecret is set and redis.external.url does not begin with rediss://: a CA is for TLS only" }}
{{- end }}
{{- if $redis.perShard }}
{{- fail "redis.perShard is for the bundled Redis: with an external one, put {shard} into redis.external.url" }}
{{- end }}
{{- end }}

{{- $certificates := $values.security.certificates }}
{{- if and $values.security.enabled (eq $certificates.source "existing") }}
{{- range splitList "," (include "paceline.components" .) }}
{{- if not (index $certificates.existingSecrets .) }}
{{- fail (printf "security.certificates.source is existing and security.certificates.existingSecrets.%s is empty: expected the name of a secret with tls.crt, tls.key and ca.crt" .) }}
{{- end }}
{{- end }}
{{- end }}

{{- $drain := dig "rpc" "drain_seconds" 5 $run | int }}
{{- range $role := list "learner" "collectors" "replay" "evaluator" "relay" }}
{{- $grace := int (index $values $role).terminationGracePeriodSeconds }}
{{- if lt $grace (add $drain 20 | int) }}
{{- fail (printf "%s.terminationGracePeriodSeconds is %d: expected at least %d, config.rpc.drain_seconds and 20 seconds to end in order" $role $grace (add $drain 20)) }}
{{- end }}
{{- end }}
{{- end -}}
