{{- /* SPDX-License-Identifier: Apache-2.0 */ -}}
{{- /* values.yaml, by: go test ./test/chart -update */ -}}
{{- define "smcr.defaults" -}}
agent:
  affinity: {}
  answerPoll: 75us
  anyPrefix: false
  appArmorProfile:
    type: Unconfined
  budgets:
    node:
      connections: 65536
      memory: 1GiB
      pending: 16384
      relays: 4096
      sockets: 256MiB
    pod:
      connections: 4096
      memory: 256MiB
      pending: 1024
      relays: 1024
      sockets: 64MiB
    podMax:
      connections: 0
      memory: 0
  cni:
    binDir: /opt/cni/bin
    confDir: /etc/cni/net.d
    install: true
    reportStatus: false
    required: false
  defaultPeers:
    cidrs:
    - 10.0.0.0/8
    - 172.16.0.0/12
    - 192.168.0.0/16
    - 100.64.0.0/10
    - fc00::/7
    except: []
  devices:
  - soft:
      address: node
  devicesOfNode: {}
  dialects: both
  drainTimeout: 30s
  eids:
  - KUBE-SMCR
  extraEnv: []
  holdSYNs: true
  logLevel: info
  metricsAddress: 0.0.0.0:9464
  negativeCacheTTL: 1m
  nodeSelector:
    kubernetes.io/os: linux
  podAnnotations: {}
  podLabels: {}
  priorityClassName: system-node-critical
  redirectTTL: 2s
  resourceQuota: false
  resources:
    cpu: "1"
    memory: 1536Mi
  rmbe: 512KiB
  seLinuxOptions: {}
  sendBuffer: 512KiB
  tolerations:
  - operator: Exists
  update:
    maxSurge: 1
    maxUnavailable: 0
  versions: both
  wire:
    filter: true
    interfaces: []
    peers: []
commonLabels: {}
confineAgents: true
controller:
  affinity: {}
  logLevel: info
  nodeSelector:
    kubernetes.io/os: linux
  podAnnotations: {}
  podDisruptionBudget: true
  podLabels: {}
  priorityClassName: system-cluster-critical
  replicas: 2
  resources:
    limits:
      memory: 512Mi
    requests:
      cpu: 50m
      memory: 128Mi
  tolerations: []
crds:
  install: Hook
devicePlugin:
  enabled: false
  infoDir: /var/run/k8s.cni.cncf.io/devinfo/dp
  kubeletDir: /var/lib/kubelet
  otherResources: []
  slots: 100
  vfs: false
dra:
  enabled: false
  ipam: {}
  ipamOfNode: {}
fixedUser: true
fullnameOverride: ""
hardware:
  enabled: false
  resource: ""
hooks:
  check: true
  nodeSelector:
    kubernetes.io/os: linux
  resources:
    limits:
      memory: 256Mi
    requests:
      cpu: 10m
      memory: 64Mi
  tolerations: []
  uninstall: true
  uninstallTimeout: 2m
image:
  architectures:
  - amd64
  - arm64
  digest: ""
  pullPolicy: IfNotPresent
  repository: ghcr.io/smcr-io/kube-smcr
  tag: ""
imagePullSecrets: []
kernelPath:
  enabled: false
  revoke: true
  veth: false
metrics:
  auth: true
  tlsSecret: ""
monitoring:
  dashboard:
    annotations: {}
    enabled: false
    labels:
      grafana_dashboard: "1"
    namespace: ""
  prometheusRule:
    budgetRatio: 0.9
    enabled: false
    fallbackRatio: 0.5
    labels: {}
  serviceMonitor:
    enabled: false
    interval: 30s
    labels: {}
multus:
  enabled: false
  ipam: {}
  name: smcr-sriov
  namespace: ""
  resourceName: ""
  settings: {}
  wiring: sriov
nameOverride: ""
podsAsNode: auto
startupTaint: false
{{- end -}}
