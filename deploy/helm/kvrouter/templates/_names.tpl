{{- define "kvrouter.labels" -}}
app.kubernetes.io/name: kvrouter
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "kvrouter.nats" -}}
{{- if .Values.nats.enabled -}}
{{- $servers := list -}}
{{- range $number := until (int .Values.nats.replicas) -}}
{{- $servers = append $servers (printf "nats://%s-nats-%d.%s-nats:4222" $.Release.Name $number $.Release.Name) -}}
{{- end -}}
{{- join "," $servers -}}
{{- else -}}
{{- required "nats.url: give the servers' URLs, or set nats.enabled" .Values.nats.url -}}
{{- end -}}
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
