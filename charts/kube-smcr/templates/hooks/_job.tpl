{{- /* SPDX-License-Identifier: Apache-2.0 */ -}}

{{- /* A hook's Job with its own account: {root, name, component, hook, args, rules, namespaced, seconds}. */ -}}
{{- define "smcr.hook" -}}
{{- $labels := include "smcr.labels" (dict "root" .root "component" .component) -}}
apiVersion: v1
kind: ServiceAccount
metadata:
  name: {{ .name }}
  namespace: {{ toYaml .root.Release.Namespace }}
  labels: {{- $labels | nindent 4 }}
  annotations:
    helm.sh/hook: {{ .hook }}
    helm.sh/hook-weight: "-10"
    helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata:
  name: {{ .name }}
  labels: {{- $labels | nindent 4 }}
  annotations:
    helm.sh/hook: {{ .hook }}
    helm.sh/hook-weight: "-10"
    helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
rules:
{{ .rules }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata:
  name: {{ .name }}
  labels: {{- $labels | nindent 4 }}
  annotations:
    helm.sh/hook: {{ .hook }}
    helm.sh/hook-weight: "-9"
    helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
roleRef:
  apiGroup: rbac.authorization.k8s.io
  kind: ClusterRole
  name: {{ .name }}
subjects:
- kind: ServiceAccount
  name: {{ .name }}
  namespace: {{ toYaml .root.Release.Namespace }}
{{- with .namespaced }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata:
  name: {{ $.name }}
  namespace: {{ toYaml $.root.Release.Namespace }}
  labels: {{- $labels | nindent 4 }}
  annotations:
    helm.sh/hook: {{ $.hook }}
    helm.sh/hook-weight: "-10"
    helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
rules:
{{ . }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata:
  name: {{ $.name }}
  namespace: {{ toYaml $.root.Release.Namespace }}
  labels: {{- $labels | nindent 4 }}
  annotations:
    helm.sh/hook: {{ $.hook }}
    helm.sh/hook-weight: "-9"
    helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
roleRef:
  apiGroup: rbac.authorization.k8s.io
  kind: Role
  name: {{ $.name }}
subjects:
- kind: ServiceAccount
  name: {{ $.name }}
  namespace: {{ toYaml $.root.Release.Namespace }}
{{- end }}
---
{{ include "smcr.hookJob" (merge (dict "account" .name "command" "controller" "weight" 0 "retries" 2) . (dict "log" "hook-failed")) }}
{{- end -}}

{{- /* The Job of a hook: {root, name, component, hook, weight, command, args, seconds, retries, log}, and {account},
without which it has no rights, and {config}, a ConfigMap. */ -}}
{{- define "smcr.hookJob" -}}
{{- $labels := include "smcr.labels" (dict "root" .root "component" .component) -}}
apiVersion: batch/v1
kind: Job
metadata:
  name: {{ .name }}
  namespace: {{ toYaml .root.Release.Namespace }}
  labels: {{- $labels | nindent 4 }}
  annotations:
    helm.sh/hook: {{ .hook }}
    helm.sh/hook-weight: {{ .weight | quote }}
    # A Job that did not succeed stays, with its log, until the next try.
    helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
    # Helm prints it.
    helm.sh/hook-output-log-policy: {{ .log }}
spec:
  backoffLimit: {{ .retries }}
  activeDeadlineSeconds: {{ .seconds }}
  template:
    metadata:
      labels: {{- include "smcr.podLabels" (dict "root" .root "component" .component) | nindent 8 }}
    spec:
      {{- if .account }}
      serviceAccountName: {{ .account }}
      {{- else }}
      automountServiceAccountToken: false
      {{- end }}
      restartPolicy: Never
      enableServiceLinks: false
      {{- with .root.Values.imagePullSecrets }}
      imagePullSecrets: {{- toYaml . | nindent 6 }}
      {{- end }}
      {{- with .root.Values.hooks.nodeSelector }}
      nodeSelector: {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with include "smcr.affinity" (dict "affinity" (dict) "nodes" (include "smcr.architectures" .root | fromYamlArray)) }}
      affinity: {{- . | nindent 8 }}
      {{- end }}
      tolerations:
      # Before the first agent all nodes may have it.
      - key: smcr.io/agent-not-ready
        operator: Exists
      {{- with .root.Values.hooks.tolerations }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
      containers:
      - name: {{ .component }}
        image: {{ include "smcr.image" .root }}
        imagePullPolicy: {{ .root.Values.image.pullPolicy }}
        command: [/usr/bin/{{ .command }}]
        args: {{ .args | toJson }}
        securityContext: {{- include "smcr.restricted" .root | nindent 10 }}
        resources: {{- toYaml .root.Values.hooks.resources | nindent 10 }}
        terminationMessagePolicy: FallbackToLogsOnError
        {{- with .config }}
        volumeMounts:
        - name: config
          mountPath: /etc/kube-smcr
          readOnly: true
      volumes:
      - name: config
        configMap:
          name: {{ . }}
        {{- end }}
{{- end -}}

{{- define "smcr.crdRules" -}}
# The CRDs of this group by their names; the API server cannot restrict create
# to names, so that is for CRDs of any name.
- apiGroups: [apiextensions.k8s.io]
  resources: [customresourcedefinitions]
  verbs: [create]
- apiGroups: [apiextensions.k8s.io]
  resources: [customresourcedefinitions]
  resourceNames:
  - smcrlinks.smcr.io
  - smcrnodes.smcr.io
  - smcrpeerslices.smcr.io
  - smcrpolicies.smcr.io
  verbs: [get, patch]
{{- end -}}

{{- define "smcr.uninstallRules" -}}
# Which nodes exist: the Job waits for none that is gone or does not answer.
- apiGroups: [""]
  resources: [nodes]
  verbs: [list]
# Which nodes are not clean.
- apiGroups: [""]
  resources: [events]
  verbs: [create]
# Which nodes have an agent that can be waited for, and the annotation smcr.io/status of
# the pods of others, by way of the status. The admission policy of the controller keeps
# it to that.
- apiGroups: [""]
  resources: [pods]
  verbs: [list]
- apiGroups: [""]
  resources: [pods/status]
  verbs: [patch]
# The word to the agents, their answer, and then the objects.
- apiGroups: [smcr.io]
  resources: [smcrnodes]
  verbs: [list, patch, deletecollection]
- apiGroups: [smcr.io]
  resources: [smcrlinks]
  verbs: [deletecollection]
- apiGroups: [smcr.io]
  resources: [smcrpeerslices]
  verbs: [list, deletecollection]
{{- end -}}

{{- define "smcr.uninstallNamespacedRules" -}}
# The controller's Lease: who holds it writes, and that is now this Job.
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  resourceNames: [kube-smcr-controller]
  verbs: [get, update]
# And those of the agents.
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  verbs: [deletecollection]
{{- end -}}
