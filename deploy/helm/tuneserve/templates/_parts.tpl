{{- define "tuneserve.store" -}}
{{- if .Values.redis.enabled }}
- name: REDIS_PASSWORD
  valueFrom: {secretKeyRef: {name: {{ .Values.secret }}, key: redis-password}}
- {name: TUNESERVE_STORE, value: "redis://:$(REDIS_PASSWORD)@{{ .Release.Name }}-redis:6379/0"}
{{- else }}
- name: TUNESERVE_STORE
  valueFrom: {secretKeyRef: {name: {{ .Values.secret }}, key: store}}
{{- end }}
{{- if .Values.files.bucket }}
- {name: TUNESERVE_FILES_URL, value: {{ .Values.files.bucket | quote }}}
{{- else }}
- {name: TUNESERVE_FILES_DIR, value: /files}
{{- end }}
{{- end }}

{{- define "tuneserve.env" }}
{{- range $name, $value := . }}
- {name: {{ $name }}, value: {{ $value | quote }}}
{{- end }}
{{- end }}

{{- define "tuneserve.pod" -}}
automountServiceAccountToken: false
securityContext: {runAsNonRoot: true, runAsUser: 10001, runAsGroup: 10001, fsGroup: 10001}
{{- with .Values.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - {name: {{ . }}}
  {{- end }}
{{- end }}
{{- end }}

{{- define "tuneserve.container" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- if and .Values.files.bucket .Values.files.bucketSecret }}
envFrom:
  - secretRef: {name: {{ .Values.files.bucketSecret }}}
{{- end }}
volumeMounts:
  - {name: data, mountPath: /data}
  {{- if not .Values.files.bucket }}
  - {name: files, mountPath: /files}
  {{- end }}
  - {name: tmp, mountPath: /tmp}
{{- end }}

{{- define "tuneserve.volumes" -}}
{{- if not .Values.files.bucket }}
- name: files
  persistentVolumeClaim: {claimName: {{ .Release.Name }}-files}
{{- end }}
- name: tmp
  emptyDir: {medium: Memory, sizeLimit: 256Mi}
{{- end }}
