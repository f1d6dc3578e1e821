{{- define "proxy.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 52 | trimSuffix "-" }}{{ else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 52 | trimSuffix "-" }}{{ end -}}
{{- end }}

{{- define "proxy.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "proxy.selector" -}}
app.kubernetes.io/name: compaction-proxy
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "proxy.redis-selector" -}}
app.kubernetes.io/name: compaction-proxy-redis
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "proxy.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{/* The smallest rights that a container can have. */}}
{{- define "proxy.rights" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "proxy.probes" -}}
startupProbe:
  httpGet: {path: /readyz, port: proxy}
  periodSeconds: 1
  failureThreshold: 30
readinessProbe: # does not depend on the store: requests flow without it
  httpGet: {path: /readyz, port: proxy}
  periodSeconds: 5
  failureThreshold: 2
livenessProbe:
  httpGet: {path: /livez, port: proxy}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
{{- end }}

{{/* What proxies are told in either mode. */}}
{{- define "proxy.environment" -}}
- {name: COMPACTION_PROXY__UPSTREAM__BASE_URL, value: {{ .Values.upstream.baseUrl | quote }}}
{{- with .Values.upstream.keySecret }}
{{- if .name }}
- name: COMPACTION_PROXY__UPSTREAM__API_KEY
  valueFrom:
    secretKeyRef: {name: {{ .name | quote }}, key: {{ .key | quote }}}
{{- end }}
{{- end }}
- {name: COMPACTION_PROXY__SERVER__ACCEPT_GRACE_S, value: "0"} # preStop has waited
- {name: COMPACTION_PROXY__SERVER__DRAIN_S, value: {{ .Values.drainSeconds | quote }}}
{{- if .Values.config }}
- {name: COMPACTION_PROXY_CONFIG, value: /etc/compaction-proxy/config.yaml}
{{- end }}
{{- with .Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}
