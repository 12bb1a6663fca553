{{- /* Names, labels, and what all pods have. Replicas are on port 7100, the server on 8000. */ -}}
{{- define "vllmx.name" -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{- define "vllmx.labels" -}}
app.kubernetes.io/name: vllmx
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{- define "vllmx.selector" -}}
app.kubernetes.io/name: vllmx
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "vllmx.image" -}}
image: "{{ .Values.image.repository }}:{{ .Values.image.tag }}"
imagePullPolicy: {{ .Values.image.pullPolicy | default "IfNotPresent" }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end -}}

{{- define "vllmx.pod" -}}
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with .Values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "vllmx.claim" -}}
accessModes: [ReadWriteOnce]
{{- with .storageClass }}
storageClassName: {{ . }}
{{- end }}
resources:
  requests: {storage: {{ .size }}}
{{- end -}}

{{- define "vllmx.rankSecret" -}}
{{- .Values.rankSecret | default (printf "%s-rank" (include "vllmx.name" .)) -}}
{{- end -}}

{{- define "vllmx.rankKey" -}}
- name: VLLMX_RANK_KEY
  valueFrom: {secretKeyRef: {name: {{ include "vllmx.rankSecret" . }}, key: key}}
{{- end -}}

{{- /* One address a line; the order is that of the pods' numbers. */ -}}
{{- define "vllmx.addresses" -}}
{{- $name := include "vllmx.name" . -}}
{{- range until (int .Values.replicas) }}
{{ $name }}-core-{{ . }}.{{ $name }}-core:7100
{{- end }}
{{- end -}}
