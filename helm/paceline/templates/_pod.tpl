{{/* What the pods of all components share: pod security `restricted`, no service links, no token, writable places. */}}

{{/* Annotations that make a pod start anew when what it reads at its start changes. */}}
{{- define "paceline.podMetadata" -}}
labels:
  {{- /* Not the chart's version: a new one restarts only the pods that it changes. */}}
  {{- include "paceline.selector" . | nindent 2 }}
  app.kubernetes.io/part-of: paceline
annotations:
  checksum/config: {{ .checksum }}
  {{- with .values.podAnnotations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{/* dict "root" . "component" name "values" the component's values: the pod's spec down to its containers. */}}
{{- define "paceline.podSpec" -}}
serviceAccountName: {{ include "paceline.name" . }}
automountServiceAccountToken: false
# Or a service named redis would come in as REDIS_PORT.
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- $secrets := concat .root.Values.images.pullSecrets .root.Values.global.imagePullSecrets | uniq }}
{{- with $secrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with .values }}
{{- with .terminationGracePeriodSeconds }}
terminationGracePeriodSeconds: {{ . }}
{{- end }}
{{- with .runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with .priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- with .values.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- range . }}
  - labelSelector:
      matchLabels:
        {{- include "paceline.selector" $ | nindent 8 }}
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}
{{- end -}}

{{- define "paceline.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end -}}

{{/* Image, variables and resources of a container: dict as above, and "image" key of images. */}}
{{- define "paceline.container" -}}
image: {{ include "paceline.image" . }}
imagePullPolicy: {{ .root.Values.images.pullPolicy }}
{{ include "paceline.containerSecurity" . }}
env:
  # Libraries that write a cache find no home otherwise: the root is read-only.
  - {name: HOME, value: /tmp}
  {{- with .env }}
  {{- . | nindent 2 }}
  {{- end }}
  {{- with .values.extraEnv }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
resources:
  {{- $resources := deepCopy .values.resources }}
  {{- if (.values.gpu | default dict).count }}
  {{- $gpu := dict .values.gpu.resource .values.gpu.count }}
  {{- $resources = mergeOverwrite $resources (dict "limits" $gpu "requests" $gpu) }}
  {{- end }}
  {{- toYaml $resources | nindent 2 }}
{{- end -}}

{{/* Probes over plain HTTP, beside the gRPC port: dict "metrics" port name, "ready" port name, "startupSeconds".
     Start-up and liveness ask only whether this process goes on; what it depends on shows in readiness. */}}
{{- define "paceline.probes" -}}
startupProbe:
  httpGet: {path: /healthz, port: {{ .metrics }}}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: {{ div (add (int .startupSeconds) 4) 5 }}
livenessProbe:
  httpGet: {path: /healthz, port: {{ .metrics }}}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
readinessProbe:
  httpGet: {path: /readyz, port: {{ .ready | default .metrics }}}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 3
{{- end -}}

{{/* Mounts and volumes that every role of Paceline has: run file, certificates, tokens, writable places. "tokens" lists
     the roles whose tokens the component needs: a server all that it accepts, a client its own. */}}
{{- define "paceline.mounts" -}}
- {name: run-file, mountPath: /etc/paceline/run.yaml, subPath: run.yaml, readOnly: true}
- {name: tmp, mountPath: /tmp}
- {name: data, mountPath: /var/lib/paceline}
{{- if .root.Values.security.enabled }}
- {name: tls, mountPath: /etc/paceline/tls, readOnly: true}
- {name: tokens, mountPath: /etc/paceline/tokens, readOnly: true}
{{- end }}
{{- if .values.sharedMemory }}
- {name: shared-memory, mountPath: /dev/shm}
{{- end }}
{{- with .values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "paceline.volumes" -}}
- name: run-file
  configMap: {name: {{ include "paceline.fullname" .root }}-run}
- name: tmp
  emptyDir: {}
{{- if not .persistent }}
- name: data
  emptyDir: {}
{{- end }}
{{- if .root.Values.security.enabled }}
- name: tls
  secret: {secretName: {{ include "paceline.tlsSecret" . }}, defaultMode: 0440}
- name: tokens
  secret:
    secretName: {{ include "paceline.tokensSecret" .root }}
    defaultMode: 0440
    items:
      {{- range .tokens }}
      - {key: {{ . }}, path: {{ . }}}
      {{- end }}
{{- end }}
{{- with .values.sharedMemory }}
- name: shared-memory
  emptyDir: {medium: Memory, sizeLimit: {{ . }}}
{{- end }}
{{- with .values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* dict "persistence" values of it "scope" as above: a claim template named data. */}}
{{- define "paceline.claim" -}}
metadata:
  name: data
  labels:
    {{- include "paceline.selector" .scope | nindent 4 }}
spec:
  accessModes: [ReadWriteOnce]
  {{- with .persistence.storageClass }}
  storageClassName: {{ . }}
  {{- end }}
  resources:
    requests: {storage: {{ .persistence.size }}}
{{- end -}}

{{/* dict as "paceline.metadata", and "ports" of name: number. Without an address of its own, the name leads to the pods,
     and to where a replaced one is now. Pods that are not ready are named, too: clients wait for them by themselves. */}}
{{- define "paceline.headless" -}}
apiVersion: v1
kind: Service
metadata:
  {{- include "paceline.metadata" . | nindent 2 }}
spec:
  clusterIP: None
  publishNotReadyAddresses: true
  selector:
    {{- include "paceline.selector" . | nindent 4 }}
  ports:
    {{- range $name, $port := .ports }}
    - {name: {{ $name }}, port: {{ $port }}, targetPort: {{ $name }}}
    {{- end }}
{{- end -}}

{{/* dict as "paceline.metadata", and "maxUnavailable". */}}
{{- define "paceline.budget" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  {{- include "paceline.metadata" . | nindent 2 }}
spec:
  maxUnavailable: {{ .maxUnavailable }}
  # A pod that is not ready anyway must not keep a node from being drained.
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels:
      {{- include "paceline.selector" . | nindent 6 }}
{{- end -}}
