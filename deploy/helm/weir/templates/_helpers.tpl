{{- define "weir.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 52 | trimSuffix "-" -}}
{{- end -}}

{{/* Short enough for -headless and an ordinal behind it. */}}
{{- define "weir.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 52 | trimSuffix "-" -}}
{{- else if contains (include "weir.name" .) .Release.Name -}}
{{- .Release.Name | trunc 52 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "weir.name" .) | trunc 52 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "weir.selector" -}}
app.kubernetes.io/name: {{ include "weir.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "weir.labels" -}}
{{ include "weir.selector" . }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* Ports of a rule between nodes. */}}
{{- define "weir.nodePorts" -}}
- {port: gossip-tcp, protocol: TCP}
- {port: gossip-udp, protocol: UDP}
- {port: peer, protocol: TCP}
{{- end -}}

{{/* A probe of /healthz or /readyz. */}}
{{- define "weir.probe" -}}
httpGet:
  path: {{ .path }}
  port: http
  {{- if not .root.Values.insecure }}
  scheme: HTTPS
  {{- end }}
{{- end -}}

{{/* The name of a Secret: the one that is given, or what the chart calls it. */}}
{{- define "weir.secretName" -}}
{{- default (printf "%s-%s" (include "weir.fullname" .root) .name) .given -}}
{{- end -}}

{{/* The Secrets of the pods, with what each is mounted as: name: secretName. */}}
{{- define "weir.secrets" -}}
{{- if not .Values.insecure }}
access: {{ include "weir.secretName" (dict "root" . "given" .Values.access.secretName "name" "access") | quote }}
callers: {{ include "weir.secretName" (dict "root" . "given" .Values.tls.secretName "name" "callers-tls") | quote }}
nodes: {{ include "weir.secretName" (dict "root" . "given" .Values.peerTLS.secretName "name" "nodes-tls") | quote }}
cluster: {{ include "weir.secretName" (dict "root" . "given" .Values.cluster.secretName "name" "cluster") | quote }}
{{- end }}
{{- end -}}

{{/* What the chart sets, as flags. */}}
{{- define "weir.managed" -}}
bind: 0.0.0.0
join: {{ include "weir.fullname" . }}-headless:7946
http-port: "8080"
grpc-port: "8081"
gossip-port: "7946"
peer-port: "7947"
{{- if .Values.resp.enabled }}
resp-port: "6380"
{{- end }}
policies: /etc/weir/policies.yaml
{{- if .Values.envoy.files }}
envoy-config: /etc/weir-envoy
{{- end }}
{{- if .Values.persistence.enabled }}
data-dir: /var/lib/weir
{{- end }}
{{- if .Values.insecure }}
insecure: "true"
{{- else }}
access-file: /run/secrets/access/access.yaml
tls-cert-file: /run/secrets/callers/tls.crt
tls-key-file: /run/secrets/callers/tls.key
{{- if .Values.tls.clientCA }}
tls-client-ca-file: /run/secrets/callers/ca.crt
{{- end }}
peer-tls-cert-file: /run/secrets/nodes/tls.crt
peer-tls-key-file: /run/secrets/nodes/tls.key
peer-tls-ca-file: /run/secrets/nodes/ca.crt
peer-tls-name: {{ .Values.peerTLS.name | quote }}
gossip-key-file: /run/secrets/cluster/gossip-keys
cluster-secret-file: /run/secrets/cluster/secret
{{- end }}
{{- end -}}

{{/* A value as a text. Numbers arrive as floating point, and 10000000 is not to leave as 1e+07. */}}
{{- define "weir.text" -}}
{{- if and (kindIs "float64" .) (eq (floor .) .) -}}
{{- int64 . | toString | quote -}}
{{- else -}}
{{- toString . | quote -}}
{{- end -}}
{{- end -}}
