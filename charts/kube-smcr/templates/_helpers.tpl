{{- /* SPDX-License-Identifier: Apache-2.0 */ -}}

{{- /* Gives .Values what the release does not have, as after helm upgrade --reuse-values from a
chart that did not know it: the defaults. Every template begins with it. */ -}}
{{- define "smcr.fill" -}}
{{- include "smcr.fillFrom" (dict "at" "" "into" .Values "from" (include "smcr.defaults" . | fromYaml)) -}}
{{- end -}}

{{- define "smcr.fillFrom" -}}
{{- $in := . -}}
{{- /* Of these a part that is not there is one that nobody wants. */ -}}
{{- $whole := list ".controller.resources" ".hooks.resources" ".monitoring.dashboard.labels" -}}
{{- range $key, $value := $in.from -}}
{{- $at := printf "%s.%s" $in.at $key -}}
{{- $has := index $in.into $key -}}
{{- if kindIs "invalid" $has -}}
{{- $_ := set $in.into $key $value -}}
{{- else if and (kindIs "map" $value) (kindIs "map" $has) (not (has $at $whole)) -}}
{{- include "smcr.fillFrom" (dict "at" $at "into" $has "from" $value) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "smcr.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- /* The prefix of all names: the release's, and the chart's where it is not in that. */ -}}
{{- define "smcr.fullname" -}}
{{- $name := include "smcr.name" . -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" | trimSuffix "." -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" | trimSuffix "." -}}
{{- end -}}
{{- end -}}

{{- define "smcr.agent" -}}{{ include "smcr.fullname" . }}-agent{{- end -}}
{{- define "smcr.controller" -}}{{ include "smcr.fullname" . }}-controller{{- end -}}
{{- define "smcr.metricsReader" -}}{{ include "smcr.fullname" . }}-metrics-reader{{- end -}}
{{- define "smcr.hookCRDs" -}}{{ include "smcr.fullname" . }}-crds{{- end -}}
{{- define "smcr.hookCheck" -}}{{ include "smcr.fullname" . }}-check{{- end -}}
{{- define "smcr.hookUninstall" -}}{{ include "smcr.fullname" . }}-uninstall{{- end -}}

{{- /* Directories of the node inside the agent's container, and the agent's own one. */ -}}
{{- define "smcr.podsAsNode" -}}
{{- if eq (toString .Values.podsAsNode) "auto" -}}
{{- if semverCompare ">=1.36.0-0" .Capabilities.KubeVersion.Version }}true{{ end -}}
{{- else if .Values.podsAsNode -}}true{{- end -}}
{{- end -}}

{{- define "smcr.runDir" -}}/run/kube-smcr{{- end -}}
{{- define "smcr.binDir" -}}/host/opt/cni/bin{{- end -}}
{{- define "smcr.confDir" -}}/host/etc/cni/net.d{{- end -}}

{{- define "smcr.tlsDir" -}}/etc/kube-smcr-tls{{- end -}}
{{- define "smcr.kubeletDir" -}}/host/kubelet{{- end -}}
{{- define "smcr.infoDir" -}}/host/devinfo{{- end -}}

{{- /* Whether the agent asks kubelet which devices pods have. */ -}}
{{- define "smcr.asksKubelet" -}}
{{- if or .Values.devicePlugin.enabled .Values.devicePlugin.otherResources -}}true{{- end -}}
{{- end -}}

{{- /* The image of the chart's release unless values name another one. Its digest is no default of a value, which helm upgrade
--reuse-values would keep with a later chart. */ -}}
{{- define "smcr.image" -}}
{{- $release := index .Chart.Annotations "smcr.io/image-digest" -}}
{{- with .Values.image -}}
{{- if .digest -}}
{{ .repository }}@{{ .digest }}
{{- else if and $release (not .tag) -}}
{{ .repository }}@{{ $release }}
{{- else -}}
{{ .repository }}:{{ .tag | default $.Chart.AppVersion }}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* toYaml puts a text into quotes where YAML would read a number or a switch. */ -}}
{{- define "smcr.selector" -}}
app.kubernetes.io/name: {{ include "smcr.name" .root | toYaml }}
app.kubernetes.io/instance: {{ toYaml .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- /* Labels of an object: {root, component}. */ -}}
{{- define "smcr.labels" -}}
{{ include "smcr.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: kube-smcr
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" | trunc 63 }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- /* Labels of a pod: {root, component, extra}. No version: a change of labels restarts pods. */ -}}
{{- define "smcr.podLabels" -}}
{{ include "smcr.selector" . }}
app.kubernetes.io/part-of: kube-smcr
{{- with mergeOverwrite (dict) .root.Values.commonLabels (.extra | default dict) }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- /* What every container that is not the agent has. Without a fixed user the platform sets one: the image's is root. */ -}}
{{- define "smcr.restricted" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
{{- if .Values.fixedUser }}
runAsUser: 65532
runAsGroup: 65532
{{- end }}
capabilities:
  drop: [ALL]
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- /* A size of the agent's file (256KiB, 1GiB, 4096) or a quantity of Kubernetes (1536Mi, 1.5Gi, 2G, 1e9) in
bytes, rounded up. Values of the schema's pattern only. */ -}}
{{- define "smcr.bytes" -}}
{{- $s := toString . -}}
{{- $number := regexFind "^([0-9]+\\.?[0-9]*|\\.[0-9]+)([eE][+-]?[0-9]+)?" $s -}}
{{- $unit := trimPrefix $number $s | trim | trimSuffix "B" -}}
{{- $factors := dict "" 1.0 "m" 0.001 "k" 1000.0 "M" 1000000.0 "G" 1000000000.0 "T" 1000000000000.0 "Ki" 1024.0 "Mi" 1048576.0 "Gi" 1073741824.0 "Ti" 1099511627776.0 -}}
{{- if or (not $number) (not (hasKey $factors $unit)) -}}
{{- fail (printf "%q is not a size: want a number with Mi, Gi or the like" $s) -}}
{{- end -}}
{{- mulf (float64 $number) (get $factors $unit) | ceil | int64 -}}
{{- end -}}

{{- /* A duration such as 1m30s in whole seconds, rounded up. */ -}}
{{- define "smcr.seconds" -}}
{{- $ms := 0 -}}
{{- $ns := 0 -}}
{{- range regexFindAll "[0-9.]+(ns|us|µs|ms|s|m|h)" (toString .) -1 -}}
{{- $n := regexFind "^[0-9.]+" . | float64 -}}
{{- $unit := regexReplaceAll "^[0-9.]+" . "" -}}
{{- $factor := get (dict "ns" 0.000001 "us" 0.001 "µs" 0.001 "ms" 1.0 "s" 1000.0 "m" 60000.0 "h" 3600000.0) $unit -}}
{{- $ms = addf $ms (mulf $n $factor) -}}
{{- end -}}
{{- divf $ms 1000 | ceil | int64 -}}
{{- end -}}

{{- /* The agent's grace period: it drains, and then resets what is left. */ -}}
{{- define "smcr.graceSeconds" -}}
{{- add 15 (include "smcr.seconds" .Values.agent.drainTimeout | int64) -}}
{{- end -}}

{{- /* How many connections on SMC-R a budget has room for: {budget, a, rmbes}, where rmbes is how many RMBEs a connection
has: 1, or 2 for the first one with a peer. On devices in software those have four times the largest buffers, of a quarter of the
memory. */ -}}
{{- define "smcr.room" -}}
{{- $each := add (mul .rmbes (include "smcr.bytes" .a.rmbe | int64)) (include "smcr.bytes" .a.sendBuffer | int64) -}}
{{- $memory := include "smcr.bytes" .budget.memory | int64 -}}
{{- if and (eq (int .rmbes) 2) (eq (int64 $each) 1572864) -}}{{- $memory = div (mul 13 $memory) 16 -}}{{- end -}}
{{- min .budget.connections (div $memory $each) (div (include "smcr.bytes" .budget.sockets | int64) 262144) -}}
{{- end -}}

{{- /* What the agent itself needs at most besides registered memory and sockets' buffers, in bytes, as docs/operations.md has it under
Budgets: 64 MiB, 16 KiB for each connection, and 128 KiB more for each relay that moves data. Connections are as many as memory, with
the smallest buffers, and sockets have room for, relays as many as sockets has. Never less than 256 MiB. */ -}}
{{- define "smcr.spare" -}}
{{- $budget := .budgets.node -}}
{{- $each := max 32768 (add (min 131072 (include "smcr.bytes" .rmbe | int64)) (min 131072 (include "smcr.bytes" .sendBuffer | int64))) -}}
{{- $sockets := include "smcr.bytes" $budget.sockets | int64 -}}
{{- $conns := min $budget.connections (div (include "smcr.bytes" $budget.memory | int64) $each) (div $sockets 262144) -}}
{{- $relays := min $budget.relays (div $sockets 524288) -}}
{{- max 268435456 (add 67108864 (mul 16384 $conns) (mul 147456 $relays)) -}}
{{- end -}}

{{- /* Of which nodes the image is. */ -}}
{{- define "smcr.architectures" -}}
{{- with .Values.image.architectures -}}
{{ toYaml (list (dict "key" "kubernetes.io/arch" "operator" "In" "values" .)) }}
{{- end -}}
{{- end -}}

{{- /* agent.affinity, and no node that has the label smcr.io/leave: kubectl smcr leave. */ -}}
{{- define "smcr.agentAffinity" -}}
{{- $stay := dict "key" "smcr.io/leave" "operator" "NotIn" "values" (list "true") -}}
{{- include "smcr.affinity" (dict "affinity" .Values.agent.affinity "nodes" (append (include "smcr.architectures" . | fromYamlArray) $stay)) -}}
{{- end -}}

{{- /* An affinity, and what each node must match besides, or nothing: {affinity, nodes}. Of several terms one is
enough, so that each of them says it; one without expressions selects no node and stays so. */ -}}
{{- define "smcr.affinity" -}}
{{- $in := . -}}
{{- $affinity := deepCopy .affinity -}}
{{- if .nodes -}}
{{- $node := $affinity.nodeAffinity | default dict -}}
{{- $terms := list -}}
{{- range (($node.requiredDuringSchedulingIgnoredDuringExecution | default dict).nodeSelectorTerms | default list) -}}
{{- if or .matchExpressions .matchFields -}}
{{- $terms = append $terms (merge (dict "matchExpressions" (concat (.matchExpressions | default list) $in.nodes)) .) -}}
{{- else -}}
{{- $terms = append $terms . -}}
{{- end -}}
{{- end -}}
{{- if not $terms -}}
{{- $terms = list (dict "matchExpressions" .nodes) -}}
{{- end -}}
{{- $_ := set $node "requiredDuringSchedulingIgnoredDuringExecution" (dict "nodeSelectorTerms" $terms) -}}
{{- $_ := set $affinity "nodeAffinity" $node -}}
{{- end -}}
{{- with $affinity -}}
{{ toYaml . }}
{{- end -}}
{{- end -}}

{{- /* Port of the agent's metrics, or nothing. */ -}}
{{- define "smcr.metricsPort" -}}
{{- if ne .Values.agent.metricsAddress "none" -}}
{{- splitList ":" .Values.agent.metricsAddress | last -}}
{{- end -}}
{{- end -}}

{{- /* Refuses a second release in the cluster. Helm asks the cluster; helm template does not, and finds nobody. Anybody's
DaemonSet may have the labels: one counts that has agents, which are in their node's network, as the controller has it. */ -}}
{{- define "smcr.single" -}}
{{- range (lookup "apps/v1" "DaemonSet" "" "").items -}}
{{- $l := .metadata.labels | default dict -}}
{{- if and (eq (index $l "app.kubernetes.io/part-of" | default "") "kube-smcr") (eq (index $l "app.kubernetes.io/component" | default "") "agent") (not .metadata.deletionTimestamp) -}}
{{- if or (ne .metadata.namespace $.Release.Namespace) (ne (index $l "app.kubernetes.io/instance" | default "") $.Release.Name) -}}
{{- $ds := .metadata -}}
{{- range (lookup "v1" "Pod" $ds.namespace "").items -}}
{{- $hostNetwork := .spec.hostNetwork -}}
{{- range .metadata.ownerReferences -}}
{{- if and $hostNetwork .controller (eq .uid $ds.uid) -}}
{{- fail (printf "kube-smcr is in this cluster already: release %s in namespace %s. Two would write the same objects and take the nodes from each other: upgrade that one, or uninstall it first." (index $l "app.kubernetes.io/instance" | default "?") $ds.namespace) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* Refuses labels and annotations that the chart sets itself: the keys would be there twice, which some tools do not
read, and the last one, which the others take, is not what selectors, the controller and kubectl smcr look for. Likewise
environment variables, which server-side apply does not take twice. */ -}}
{{- define "smcr.reserved" -}}
{{- $selector := list "app.kubernetes.io/name" "app.kubernetes.io/instance" "app.kubernetes.io/component" "app.kubernetes.io/part-of" -}}
{{- $labels := concat $selector (list "app.kubernetes.io/version" "app.kubernetes.io/managed-by" "helm.sh/chart") -}}
{{- $container := "kubectl.kubernetes.io/default-container" -}}
{{- range (list
      (list "commonLabels" .Values.commonLabels "a label" $labels)
      (list "agent.podLabels" .Values.agent.podLabels "a label" $selector)
      (list "controller.podLabels" .Values.controller.podLabels "a label" $selector)
      (list "agent.podAnnotations" .Values.agent.podAnnotations "an annotation" (list $container "checksum/config"))
      (list "controller.podAnnotations" .Values.controller.podAnnotations "an annotation" (list $container))) -}}
{{- $in := . -}}
{{- range $key := index $in 3 -}}
{{- if hasKey (index $in 1) $key -}}
{{- fail (printf "%s: %s is %s that the chart sets, and needs as it is: use another key." (index $in 0) $key (index $in 2)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $names := list -}}
{{- range .Values.agent.extraEnv -}}
{{- if has .name (list "NODE_NAME" "NODE_IP" "POD_NAME" "POD_NAMESPACE" "DAEMONSET") -}}
{{- fail (printf "agent.extraEnv: %s is a variable that the chart sets, and the agent needs as it is: leave it out." .name) -}}
{{- end -}}
{{- if has .name $names -}}
{{- fail (printf "agent.extraEnv: %s is there twice: leave one of the two out." .name) -}}
{{- end -}}
{{- $names = append $names .name -}}
{{- end -}}
{{- end -}}

{{- /* Contradictions between values that a schema cannot see, and with what is in the cluster. */ -}}
{{- define "smcr.check" -}}
{{- include "smcr.single" . -}}
{{- include "smcr.reserved" . -}}
{{- $a := .Values.agent -}}
{{- $spare := include "smcr.spare" $a | int64 -}}
{{- $memory := include "smcr.bytes" $a.resources.memory | int64 -}}
{{- $node := include "smcr.bytes" $a.budgets.node.memory | int64 -}}
{{- $pod := include "smcr.bytes" $a.budgets.pod.memory | int64 -}}
{{- $sockets := include "smcr.bytes" $a.budgets.node.sockets | int64 -}}
{{- if gt (add $node $sockets $spare) $memory -}}
{{- fail (printf "agent.budgets.node.memory (%v), agent.budgets.node.sockets (%v) and %dMiB for the agent itself do not fit into agent.resources.memory (%v): the agent would be killed for want of memory. Raise the one or lower the others." $a.budgets.node.memory $a.budgets.node.sockets (div (add $spare 1048575) 1048576) $a.resources.memory) -}}
{{- end -}}
{{- if gt $pod $node -}}
{{- fail (printf "agent.budgets.pod.memory (%v) is more than agent.budgets.node.memory (%v): one pod cannot have more than all together." $a.budgets.pod.memory $a.budgets.node.memory) -}}
{{- end -}}
{{- with $a.budgets.podMax.memory -}}
{{- $most := include "smcr.bytes" . | int64 -}}
{{- if and $most (or (gt $most $node) (gt $pod $most)) -}}
{{- fail (printf "agent.budgets.podMax.memory (%v) is not between those of agent.budgets.pod (%v) and agent.budgets.node (%v): it is the most that a policy may give to a pod." . $a.budgets.pod.memory $a.budgets.node.memory) -}}
{{- end -}}
{{- end -}}
{{- $conn := mul 8 (add (include "smcr.bytes" $a.rmbe | int64) (include "smcr.bytes" $a.sendBuffer | int64)) -}}
{{- if not $conn -}}
{{- fail "agent.rmbe and agent.sendBuffer are both 0: connections on SMC-R have buffers, of a power of two from 16KiB to 512KiB." -}}
{{- end -}}
{{- if gt $conn $pod -}}
{{- fail (printf "agent.budgets.pod.memory (%v) is less than the agent.rmbe and agent.sendBuffer of 8 connections, which are registered together: every connection would be plain TCP." $a.budgets.pod.memory) -}}
{{- end -}}
{{- if and (eq (toString $a.update.maxSurge) "0") (eq (toString $a.update.maxUnavailable) "0") -}}
{{- fail "agent.update: maxSurge and maxUnavailable are both 0: no agent could ever be replaced. Set one of them to 1." -}}
{{- end -}}
{{- if and (ne (toString $a.update.maxSurge) "0") (ne (toString $a.update.maxUnavailable) "0") -}}
{{- fail "agent.update: maxSurge and maxUnavailable are both set: Kubernetes allows one of them. With maxSurge: 1 set maxUnavailable: 0." -}}
{{- end -}}
{{- if and .Values.metrics.tlsSecret (not .Values.metrics.auth) -}}
{{- fail "metrics.tlsSecret, but metrics.auth is false: metrics are plain http then. Leave one of the two out." -}}
{{- end -}}
{{- if dig "podMonitor" "enabled" false .Values.monitoring -}}
{{- fail "monitoring.podMonitor is monitoring.serviceMonitor now, since metrics are given by https to who may read them. Move enabled, interval and labels there, and see that your Prometheus selects ServiceMonitors with these labels; then remove it: --set monitoring.podMonitor=null." -}}
{{- end -}}
{{- if .Values.monitoring.serviceMonitor.enabled -}}
{{- if eq $a.metricsAddress "none" -}}
{{- fail "monitoring.serviceMonitor.enabled, but agent.metricsAddress is none: give the agent an address such as 0.0.0.0:9464." -}}
{{- end -}}
{{- if or (hasPrefix "127." $a.metricsAddress) (hasPrefix "[::1]" $a.metricsAddress) -}}
{{- fail (printf "monitoring.serviceMonitor.enabled, but Prometheus cannot reach agent.metricsAddress %s, which is loopback: use 0.0.0.0:9464." $a.metricsAddress) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.multus.enabled (not .Values.multus.resourceName) -}}
{{- fail "multus.enabled, but multus.resourceName is empty: name the resource of sriov-network-device-plugin, such as vendor.com/rdma_vf." -}}
{{- end -}}
{{- if and .Values.devicePlugin.vfs (not .Values.devicePlugin.enabled) -}}
{{- fail "devicePlugin.vfs, but devicePlugin.enabled is false: enable both, or neither." -}}
{{- end -}}
{{- if and .Values.devicePlugin.vfs (not .Values.hardware.enabled) -}}
{{- fail "devicePlugin.vfs, but hardware.enabled is false: the agent could not open the RDMA devices of VFs, and the connections of pods that have one would be plain TCP. Set hardware.enabled." -}}
{{- end -}}
{{- if and .Values.kernelPath.veth (not .Values.kernelPath.enabled) -}}
{{- fail "kernelPath.veth, but kernelPath.enabled is false: no pod can have the kernel's datapath. Enable both, or leave veth out." -}}
{{- end -}}
{{- if and .Values.hardware.resource (not .Values.hardware.enabled) -}}
{{- fail "hardware.resource, but hardware.enabled is false: the agent would not ask for the resource, and could not open RDMA devices. Set hardware.enabled, or leave resource out." -}}
{{- end -}}
{{- range list "required" "reportStatus" -}}
{{- if and (index $a.cni .) (not $a.cni.install) -}}
{{- fail (printf "agent.cni.%s, but agent.cni.install is false: whoever puts smcr-cni into the CNI chain has to set %s in its entry. Leave it out here." . .) -}}
{{- end -}}
{{- end -}}
{{- $ipams := dict "dra.ipam" .Values.dra.ipam -}}
{{- range $name, $ipam := .Values.dra.ipamOfNode -}}{{- $_ := set $ipams (printf "dra.ipamOfNode.%s" $name) $ipam -}}{{- end -}}
{{- range $at, $ipam := merge (dict "multus.ipam" .Values.multus.ipam) $ipams -}}
{{- if and $ipam (not $ipam.type) -}}
{{- fail (printf "%s has no type: name the IPAM plugin, as in {type: whereabouts, range: 192.0.2.0/24}." $at) -}}
{{- end -}}
{{- end -}}
{{- range $at, $ipam := $ipams -}}
{{- if and $ipam (not $a.cni.install) -}}
{{- fail (printf "%s, but agent.cni.install is false: whoever puts smcr-cni into the CNI chain has to put this section into its entry." $at) -}}
{{- end -}}
{{- if and $ipam (not $.Values.dra.enabled) -}}
{{- fail (printf "%s, but dra.enabled is false: no pod can claim a VF. Networks of Multus have their own: multus.ipam." $at) -}}
{{- end -}}
{{- end -}}
{{- $lists := dict "agent.devices" $a.devices -}}
{{- range $nodes, $devices := $a.devicesOfNode -}}{{- $_ := set $lists (printf "agent.devicesOfNode.%s" $nodes) $devices -}}{{- end -}}
{{- range $at, $devices := $lists -}}
{{- $seen := dict -}}
{{- range $d := $devices -}}
{{- range $kind, $_ := $d -}}{{- $_ := set $seen $kind true -}}{{- end -}}
{{- end -}}
{{- if gt (len $seen) 1 -}}
{{- fail (printf "%s: soft and rdma devices together: all devices of a node must be of one kind. Nodes that differ: agent.devicesOfNode." $at) -}}
{{- end -}}
{{- if and (hasKey $seen "rdma") (not $.Values.hardware.enabled) -}}
{{- fail (printf "%s has rdma devices, but hardware.enabled is false: the agent could not open them." $at) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* The agent's configuration file: values by the same names, and what the chart decides. */ -}}
{{- define "smcr.agentConfig" -}}
{{- $own := list "cni" "resources" "update" "priorityClassName" "resourceQuota" "nodeSelector" "tolerations" "affinity" "podAnnotations" "podLabels" "seLinuxOptions" "appArmorProfile" "extraEnv" -}}
{{- $node := omit .Values.agent "cni" -}}
{{- range $own -}}{{- $node = omit $node . -}}{{- end -}}
{{- $_ := set $node "dataDir" (include "smcr.runDir" .) -}}
{{- $_ := set $node "apiSocket" (printf "%s/agent.sock" (include "smcr.runDir" .)) -}}
{{- $_ := set $node "takeover" true -}}
{{- $_ := set $node "cni" (dict
      "install" .Values.agent.cni.install
      "binDir" (include "smcr.binDir" .)
      "confDir" (include "smcr.confDir" .)
      "required" .Values.agent.cni.required
      "reportStatus" .Values.agent.cni.reportStatus) -}}
{{- $_ := set $node "podsAsNode" (eq "true" (include "smcr.podsAsNode" .)) -}}
{{- $_ := set $node "metricsAuth" .Values.metrics.auth -}}
{{- if .Values.metrics.tlsSecret -}}
{{- $_ := set $node "metricsTLS" (include "smcr.tlsDir" .) -}}
{{- end -}}
{{- with .Values.devicePlugin -}}
{{- if include "smcr.asksKubelet" $ -}}
{{- $_ := set $node "devicePlugin" (dict
      "enabled" .enabled
      "vfs" .vfs
      "slots" .slots
      "dir" (printf "%s/device-plugins" (include "smcr.kubeletDir" $))
      "podResources" (printf "%s/pod-resources/kubelet.sock" (include "smcr.kubeletDir" $))
      "infoDir" (include "smcr.infoDir" $)
      "otherResources" .otherResources) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.kernelPath.enabled .Values.kernelPath.veth -}}
{{- $_ := set $node "kernelPath" (dict "veth" true) -}}
{{- end -}}
{{- if .Values.dra.enabled -}}
{{- $dra := dict "enabled" true "kubeletDir" .Values.devicePlugin.kubeletDir -}}
{{- with .Values.dra.ipam -}}{{- $_ := set $dra "ipam" . -}}{{- end -}}
{{- with .Values.dra.ipamOfNode -}}{{- $_ := set $dra "ipamOfNode" . -}}{{- end -}}
{{- $_ := set $node "dra" $dra -}}
{{- end -}}
{{- if not $node.defaultPeers.except -}}
{{- $_ := set $node "defaultPeers" (omit $node.defaultPeers "except") -}}
{{- end -}}
{{ toYaml (dict "node" $node) }}
{{- end -}}

{{- /* Variables of an admission policy: labels and annotations before and after. */ -}}
{{- define "smcr.metadataVariables" -}}
- name: labels
  expression: "oldObject == null || !has(oldObject.metadata.labels) ? {} : oldObject.metadata.labels"
- name: newLabels
  expression: "object == null || !has(object.metadata.labels) ? {} : object.metadata.labels"
- name: annotations
  expression: "oldObject == null || !has(oldObject.metadata.annotations) ? {} : oldObject.metadata.annotations"
- name: newAnnotations
  expression: "object == null || !has(object.metadata.annotations) ? {} : object.metadata.annotations"
{{- end -}}

{{- /* The rule of an admission policy that of a pod only the annotation smcr.io/status is changed. */ -}}
{{- define "smcr.onlyStatusAnnotation" -}}
- expression: >-
    request.resource.resource != "pods"
    || object.status == oldObject.status && variables.labels == variables.newLabels
    && (has(object.metadata.finalizers) ? object.metadata.finalizers : []) == (has(oldObject.metadata.finalizers) ? oldObject.metadata.finalizers : [])
    && variables.annotations.all(k, k == "smcr.io/status"
    || k in variables.newAnnotations && variables.newAnnotations[k] == variables.annotations[k])
    && variables.newAnnotations.all(k, k == "smcr.io/status" || k in variables.annotations)
  message: {{ .who }} may change only the annotation smcr.io/status of a pod
  reason: Forbidden
{{- end -}}
