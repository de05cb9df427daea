{{- define "kvrouter.labels" -}}
app.kubernetes.io/name: kvrouter
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "kvrouter.name" -}}
{{- .Values.fullnameOverride | default .Release.Name -}}
{{- end }}

{{- define "kvrouter.nats" -}}
{{- if .Values.nats.enabled -}}
{{- $servers := list -}}
{{- range $number := until (int .Values.nats.replicas) -}}
{{- $servers = append $servers (printf "nats://%s-nats-%d.%s-nats:4222" (include "kvrouter.name" $) $number (include "kvrouter.name" $)) -}}
{{- end -}}
{{- join "," $servers -}}
{{- else -}}
{{- required "nats.url: give the servers' URLs, or set nats.enabled" .Values.nats.url -}}
{{- end -}}
{{- end }}

{{/* What a cluster asks of pods: .pod is `frontend`, `agent` or an entry of `workers`; .selector: more of nodeSelector. */}}
{{- define "kvrouter.scheduling" -}}
{{- with .pod.serviceAccountName }}
serviceAccountName: {{ . }}
{{- end }}
{{- with .pod.imagePullSecrets }}
imagePullSecrets: {{- range . }}
  - name: {{ . }}
{{- end }}
{{- end }}
{{- with .pod.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .pod.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with merge (dict) (.selector | default dict) (.pod.nodeSelector | default dict) }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .pod.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .pod.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Environment of a container: .pod as above, .own: variables of the chart, .token: the secret of Hugging Face. */}}
{{- define "kvrouter.environment" -}}
{{- $env := concat (.own | default list) (.pod.env | default list) }}
{{- with .token }}
{{- $env = append $env (dict "name" "HF_TOKEN" "valueFrom" (dict "secretKeyRef" (dict "name" . "key" "token"))) }}
{{- end }}
{{- with $env }}
env: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .pod.envFrom }}
envFrom: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "kvrouter.container" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{- define "kvrouter.pod" -}}
automountServiceAccountToken: false
enableServiceLinks: false
{{- end }}

{{- define "kvrouter.user" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
seccompProfile: {type: RuntimeDefault}
{{- end }}
