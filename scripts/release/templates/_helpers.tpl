{{/* The operator's image, by tag and digest. */}}
{{- define "lockstep.image" -}}
{{- if not (regexMatch "^sha256:[0-9a-f]{64}$" .Values.image.digest) -}}
{{- fail (printf "image.digest is %q, and the operator's image is pulled by its digest only: set it to sha256: and 64 digits, as images.txt of the release has it" .Values.image.digest) -}}
{{- end -}}
{{ .Values.image.repository }}{{ with .Values.image.tag }}:{{ . }}{{ end }}@{{ .Values.image.digest }}
{{- end }}

{{/* Fields of the schema on the cluster (index 1) that this chart's (index 0) lacks, each with ", " behind it; index 2 is their path. */}}
{{- define "lockstep.lost" -}}
{{- $own := index . 0 -}}
{{- $there := index . 1 -}}
{{- $path := index . 2 -}}
{{- range $name, $field := $there.properties -}}
{{- $at := printf "%s.%s" $path $name -}}
{{- if hasKey ($own.properties | default dict) $name -}}
{{- include "lockstep.lost" (list (get $own.properties $name) $field $at) -}}
{{- else -}}
{{- $at }}, {{ end -}}
{{- end -}}
{{- range $key := list "items" "additionalProperties" -}}
{{- if and (kindIs "map" (get $there $key)) (kindIs "map" (get $own $key)) -}}
{{- include "lockstep.lost" (list (get $own $key) (get $there $key) (printf "%s[]" $path)) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* The same for a whole CustomResourceDefinition of this chart; "" where there is none on the cluster. */}}
{{- define "lockstep.newer" -}}
{{- $own := dict -}}
{{- range .spec.versions }}{{ $_ := set $own .name .schema.openAPIV3Schema }}{{ end -}}
{{- range dig "spec" "versions" list (lookup "apiextensions.k8s.io/v1" "CustomResourceDefinition" "" .metadata.name) -}}
{{- if hasKey $own .name -}}
{{- include "lockstep.lost" (list (get $own .name) .schema.openAPIV3Schema .name) -}}
{{- else -}}
{{- .name }}, {{ end -}}
{{- end -}}
{{- end }}
