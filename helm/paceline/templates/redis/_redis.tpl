{{- define "paceline.redisConf" -}}
{{- if .Values.security.enabled -}}
port 0
tls-port 6379
tls-cert-file /etc/redis/tls/tls.crt
tls-key-file /etc/redis/tls/tls.key
tls-ca-cert-file /etc/redis/tls/ca.crt
# Replay logs in with a password.
tls-auth-clients no
{{- else -}}
port 6379
{{- end }}
aclfile /etc/redis/login/users.acl
dir /data
# Every write is in the log before it is acknowledged, or within a second, and nothing is ever evicted: a full Redis
# refuses, and collectors wait.
appendonly yes
appendfsync {{ .Values.redis.appendfsync }}
save ""
maxmemory {{ .Values.redis.maxmemory }}
maxmemory-policy noeviction
{{- end -}}

{{/* Replay may do what its log needs, on its keys, as `paceline certs` has it; the probes may look, and hand in a
     renewed certificate. */}}
{{- define "paceline.redisUsers" -}}
user default on #{{ sha256sum .password }} resetchannels ~paceline:* +ping +info +time +select +multi +exec +get +set +unlink +strlen +rename +hget +hset +hsetnx +hdel +hgetall +hlen +hincrby +hscan +xadd +xtrim +xrange +xlen +mget +eval +evalsha +scan +config|get
user probe on #{{ sha256sum .probe }} resetchannels +ping +info +config|set
{{ end -}}

{{/* Of this pod, so nobody else can answer; and a certificate that is being replaced must not stop its replacement. */}}
{{- define "paceline.redisCli" -}}
redis-cli -p 6379 --user probe{{ if .Values.security.enabled }} --tls --insecure{{ end }}
{{- end -}}
