{{/*
homing.yaml, as the chart writes it: what Kubernetes needs, the store, the engines; then `config` over it.
Only names of variables go in here; secrets are in the environment.
*/}}
{{- define "homing.config" -}}
{{- $full := include "homing.fullname" . -}}
{{- $backends := list -}}
{{- if .Values.worker.enabled -}}
{{- range $number := until (int .Values.worker.replicas) -}}
{{- $pod := printf "%s-worker-%d" $full $number -}}
{{- $backends = append $backends (dict "id" $pod "url" (printf "http://%s.%s-worker.%s.svc:8000" $pod $full $.Release.Namespace) "engine" "torch") -}}
{{- end -}}
{{- end -}}
{{- $config := dict
  "listen" (dict "host" "0.0.0.0" "port" 8000)
  "admin" (dict "host" "0.0.0.0" "port" 8001)
  "drain_timeout_s" .Values.gateway.drainTimeoutSeconds
  "leaving_notice_s" 0
  "reload" (dict "watch" true)
  "sessions" (include "homing.sessions" . | fromYaml)
-}}
{{- $backends = concat $backends .Values.backends -}}
{{- if $backends -}}
{{- $_ := set $config "backends" $backends -}}
{{- end -}}
{{- if or .Values.discovery.kubernetes .Values.discovery.dns -}}
{{- $_ := set $config "fleet" (dict "discovery" (dict "kubernetes" .Values.discovery.kubernetes "dns" .Values.discovery.dns)) -}}
{{- end -}}
{{- mergeOverwrite $config (deepCopy .Values.config) | toYaml -}}
{{- end -}}

{{- define "homing.sessions" -}}
{{- $external := .Values.redis.external -}}
{{- if .Values.redis.bundled.enabled -}}
store: redis
redis: {url: {{ printf "redis://%s-redis:6379/0" (include "homing.fullname" .) | quote }}}
{{- else if or $external.url $external.sentinels $external.clusterNodes -}}
store: redis
redis:
  {{- if $external.url }}
  url: {{ $external.url | quote }}
  {{- end }}
  {{- if $external.sentinels }}
  sentinels: {{ toJson $external.sentinels }}
  sentinel_service: {{ $external.sentinelService | quote }}
  {{- end }}
  {{- if $external.clusterNodes }}
  cluster_nodes: {{ toJson $external.clusterNodes }}
  {{- end }}
  {{- if $external.username }}
  username: {{ $external.username | quote }}
  {{- end }}
  {{- if $external.tls.enabled }}
  tls:
    enabled: true
    {{- if $external.tls.caSecret }}
    ca_file: /etc/homing-redis/ca.crt
    {{- end }}
  {{- end }}
{{- else -}}
store: memory
{{- end -}}
{{- end -}}

{{/* Sections that a running gateway reloads do not roll the pods; all others do. */}}
{{- define "homing.configChecksum" -}}
{{- $config := include "homing.config" . | fromYaml -}}
{{- $fixed := omit $config "backends" "keys" "headers" "key_watch" "health" "failover" "log" "passthrough_paths" "reload" -}}
{{- toJson $fixed | sha256sum -}}
{{- end -}}

{{/* Refuse values that would render but fail later, or silently work badly. */}}
{{- define "homing.check" -}}
{{- $external := .Values.redis.external -}}
{{- $hasExternal := or $external.url $external.sentinels $external.clusterNodes -}}
{{- $hasEngine := or .Values.worker.enabled .Values.backends .Values.discovery.kubernetes .Values.discovery.dns .Values.config.backends -}}
{{- if not $hasEngine -}}
{{- fail "no engine to send requests to: enable worker, or add engines to backends or discovery" -}}
{{- end -}}
{{- if and .Values.redis.bundled.enabled $hasExternal -}}
{{- fail "redis.external and redis.bundled.enabled are both set: set redis.bundled.enabled to false" -}}
{{- end -}}
{{- if and (or .Values.autoscaling.enabled (gt (int .Values.gateway.replicas) 1)) (not .Values.redis.bundled.enabled) (not $hasExternal) -}}
{{- fail "several gateways need a shared session store: set redis.external or redis.bundled.enabled, or gateway.replicas: 1" -}}
{{- end -}}
{{- if and (or $external.username $external.passwordKey) $external.existingSecret (not $hasExternal) -}}
{{- fail "redis.external.existingSecret is set without a server: set url, sentinels or clusterNodes" -}}
{{- end -}}
{{- if and .Values.ingress.enabled (not .Values.ingress.hosts) -}}
{{- fail "ingress is enabled without hosts: set ingress.hosts" -}}
{{- end -}}
{{- if and .Values.httpRoute.enabled (not .Values.httpRoute.parentRefs) -}}
{{- fail "httpRoute is enabled without a gateway: set httpRoute.parentRefs" -}}
{{- end -}}
{{- end -}}
