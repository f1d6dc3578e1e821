{{/* The value of app.kubernetes.io/name. */}}
{{- define "proxy.name" -}}
{{ .Values.nameOverride | default .Chart.Name | trunc 52 | trimSuffix "-" }}
{{- end }}

{{/* The name of all objects; "-redis" and the suffixes of Kubernetes have room behind it. */}}
{{- define "proxy.fullname" -}}
{{- $name := include "proxy.name" . -}}
{{- $full := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{ .Values.fullnameOverride | default $full | trunc 52 | trimSuffix "-" }}
{{- end }}

{{- define "proxy.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "proxy.selector" -}}
app.kubernetes.io/name: {{ include "proxy.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "proxy.redis-selector" -}}
app.kubernetes.io/name: {{ include "proxy.name" . }}-redis
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "proxy.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}{{ with .Values.image.digest }}@{{ . }}{{ end }}
{{- end }}

{{- define "proxy.service-account" -}}
{{- if .Values.serviceAccount.create }}{{ .Values.serviceAccount.name | default (include "proxy.fullname" .) }}{{ else }}{{ .Values.serviceAccount.name | default "default" }}{{ end -}}
{{- end }}

{{/* http or https, and what stands before the proxy's own paths: the configuration says so. */}}
{{- define "proxy.scheme" -}}
{{ ternary "https" "http" (not (empty (dig "server" "tls_certificate" "" .Values.config))) }}
{{- end }}
{{- define "proxy.base-path" -}}
{{ dig "server" "base_path" "" .Values.config }}
{{- end }}

{{/* The smallest rights that a container can have. */}}
{{- define "proxy.rights" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "proxy.probe" -}}
httpGet: {path: {{ include "proxy.base-path" .root }}{{ .path }}, port: proxy{{ if eq (include "proxy.scheme" .root) "https" }}, scheme: HTTPS{{ end }}}
{{- end }}

{{- define "proxy.probes" -}}
startupProbe:
  {{- include "proxy.probe" (dict "root" . "path" "/readyz") | nindent 2 }}
  periodSeconds: 1
  failureThreshold: 30
readinessProbe: # does not depend on the store: requests flow without it
  {{- include "proxy.probe" (dict "root" . "path" "/readyz") | nindent 2 }}
  periodSeconds: 5
  failureThreshold: 2
livenessProbe:
  {{- include "proxy.probe" (dict "root" . "path" "/livez") | nindent 2 }}
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
