// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/test/cluster/lab/machine"
)

const (
	toolsDir = "/opt/tools"          // where a machine sees the tools
	pkiDir   = "/etc/kubernetes/pki" // and its certificates

	etcd              = "etcd"
	apiServer         = "kube-apiserver"
	controllerManager = "kube-controller-manager"
	scheduler         = "kube-scheduler"
	containerd        = "containerd"
	kubelet           = "kubelet"
	kubeProxy         = "kube-proxy"

	containerdSocket = "/run/containerd/containerd.sock"

	// PauseImage is the image of pod sandboxes, which a cluster always has.
	PauseImage = "kube-smcr.local/pause:1"
)

func server() string {
	return "https://" + net.JoinHostPort(address4(0, controlPlaneHost).Addr().String(), apiServerPort)
}

// families joins what belongs to IPv4 and to IPv6.
func families(ipv6 bool, v4, v6 string) string {
	if ipv6 {
		return v4 + "," + v6
	}
	return v4
}

// controlPlaneServices are the programs of the control plane, in the order in
// which they start; the API server needs the first, and the others need it.
func controlPlaneServices(s settings) []machine.Service {
	own, ipv6 := address4(0, controlPlaneHost).Addr().String(), s.ipv6
	return []machine.Service{
		{Name: etcd, Args: []string{
			etcd, "--data-dir=/var/lib/etcd", "--unsafe-no-fsync",
			"--listen-client-urls=http://127.0.0.1:2379", "--advertise-client-urls=http://127.0.0.1:2379",
			"--listen-peer-urls=http://127.0.0.1:2380", "--log-level=warn",
		}},
		{Name: apiServer, Args: []string{
			apiServer, "--etcd-servers=http://127.0.0.1:2379",
			"--bind-address=0.0.0.0", "--advertise-address=" + own, "--secure-port=" + apiServerPort,
			"--tls-cert-file=" + pkiDir + "/apiserver.crt", "--tls-private-key-file=" + pkiDir + "/apiserver.key",
			"--client-ca-file=" + pkiDir + "/ca.crt", "--kubelet-certificate-authority=" + pkiDir + "/ca.crt",
			"--kubelet-client-certificate=" + pkiDir + "/apiserver-kubelet.crt",
			"--kubelet-client-key=" + pkiDir + "/apiserver-kubelet.key",
			"--kubelet-preferred-address-types=InternalIP",
			"--service-account-key-file=" + pkiDir + "/sa.pub", "--service-account-signing-key-file=" + pkiDir + "/sa.key",
			"--service-account-issuer=https://kubernetes.default.svc",
			"--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction", "--allow-privileged=true",
			"--service-cluster-ip-range=" + families(ipv6, serviceCIDR4, serviceCIDR6),
		}},
		{Name: controllerManager, Args: []string{
			controllerManager, "--kubeconfig=/etc/kubernetes/" + controllerManager + ".conf",
			"--service-account-private-key-file=" + pkiDir + "/sa.key", "--root-ca-file=" + pkiDir + "/ca.crt",
			"--use-service-account-credentials", "--leader-elect=false", "--bind-address=127.0.0.1",
			"--cluster-cidr=" + families(ipv6, podCIDR4, podCIDR6),
			"--node-monitor-grace-period=" + s.grace.String(),
			// It makes 40 service accounts first, which the usual 20 requests a
			// second would stretch to 4 s.
			"--kube-api-qps=200", "--kube-api-burst=400",
		}},
		{Name: scheduler, Args: []string{
			scheduler, "--kubeconfig=/etc/kubernetes/" + scheduler + ".conf",
			"--leader-elect=false", "--bind-address=127.0.0.1",
		}},
	}
}

// prepareControlPlane writes the certificates and kubeconfigs of the control
// plane into its root, and returns the administrator's kubeconfig for the
// API server at a URL.
func prepareControlPlane(root string, url string) (*authority, []byte, error) {
	ca, err := newAuthority(filepath.Join(root, pkiDir))
	if err != nil {
		return nil, nil, err
	}
	for _, s := range []subject{
		{file: "apiserver", name: apiServer, hosts: []string{
			address4(0, controlPlaneHost).Addr().String(), apiServerVIP, "127.0.0.1",
			"kubernetes", "kubernetes.default", "kubernetes.default.svc",
		}},
		{file: "apiserver-kubelet", name: "apiserver-kubelet-client", groups: []string{"system:masters"}},
	} {
		if _, _, err := ca.issue(s); err != nil {
			return nil, nil, err
		}
	}
	for _, name := range []string{controllerManager, scheduler} {
		text, err := ca.kubeconfig(server(), subject{file: name, name: "system:" + name})
		if err != nil {
			return nil, nil, err
		}
		if err := writeFile(root, "/etc/kubernetes/"+name+".conf", text); err != nil {
			return nil, nil, err
		}
	}
	admin, err := ca.kubeconfig(url, subject{file: "admin", name: "admin", groups: []string{"system:masters"}})
	return ca, admin, err
}

// nodeServices are the programs of a node, in the order in which they start.
func nodeServices(name string, number int, ipv6 bool) []machine.Service {
	addrs := families(ipv6, address4(0, nodeHost(number)).Addr().String(), address6(0, nodeHost(number)).Addr().String())
	return []machine.Service{
		{Name: containerd, Args: []string{containerd, "--config=/etc/containerd/config.toml"}},
		{Name: kubelet, Args: []string{
			kubelet, "--config=/etc/kubernetes/kubelet.yaml", "--kubeconfig=/etc/kubernetes/kubelet.conf",
			"--hostname-override=" + name, "--node-ip=" + addrs, "--v=2",
		}},
		{Name: kubeProxy, Args: []string{kubeProxy, "--config=/etc/kubernetes/kube-proxy.yaml"}},
	}
}

// prepareNode writes what a node has on its disk before its first boot.
func prepareNode(root, tools, name string, number int, cfg settings, ca *authority) error {
	kubeletConf, err := ca.kubeconfig(server(), subject{
		file: "node-" + name, name: "system:node:" + name, groups: []string{"system:nodes"},
	})
	if err != nil {
		return err
	}
	proxyConf, err := ca.kubeconfig(server(), subject{file: "proxy-" + name, name: "system:kube-proxy"})
	if err != nil {
		return err
	}
	cert, key, err := ca.issue(subject{
		file: "kubelet-" + name, name: name, hosts: []string{name, address4(0, nodeHost(number)).Addr().String()},
	})
	if err != nil {
		return err
	}
	for name, text := range map[string][]byte{
		"/etc/kubernetes/kubelet.conf":       kubeletConf,
		"/etc/kubernetes/kube-proxy.conf":    proxyConf,
		pkiDir + "/ca.crt":                   ca.pem,
		pkiDir + "/kubelet.crt":              cert,
		pkiDir + "/kubelet.key":              key,
		"/etc/kubernetes/kubelet.yaml":       []byte(kubeletConfig(number, cfg)),
		"/etc/kubernetes/kube-proxy.yaml":    []byte(proxyConfig(name, cfg)),
		"/etc/containerd/config.toml":        []byte(containerdConfig(cfg)),
		"/etc/cni/net.d/10-cluster.conflist": []byte(conflist(number, cfg)),
	} {
		if err := writeFile(root, name, text); err != nil {
			return err
		}
	}
	return copyPlugins(filepath.Join(tools, "cni"), filepath.Join(root, "/opt/cni/bin"))
}

func writeFile(root, name string, text []byte) error {
	full := filepath.Join(root, name)
	if err := os.MkdirAll(filepath.Dir(full), 0o755); err != nil {
		return fmt.Errorf("write %s: %w", name, err)
	}
	if err := os.WriteFile(full, text, 0o600); err != nil {
		return fmt.Errorf("write %s: %w", name, err)
	}
	return nil
}

// copyPlugins copies the CNI plugins: what installs others beside them must
// not meet files of the host.
func copyPlugins(from, to string) error {
	if err := os.CopyFS(to, os.DirFS(from)); err != nil {
		return fmt.Errorf("copy the CNI plugins: %w", err)
	}
	return nil
}

// A settings is what the machine allows and the configuration wants.
type settings struct {
	ipv6       bool
	proxyMode  string
	cniVersion string
	// restrictOOM: without CAP_SYS_RESOURCE nobody may lower an oom_score_adj,
	// and runc ends with an error if it cannot.
	restrictOOM bool
	// snapshotter is native where overlayfs does not build on the root's file system.
	snapshotter string
	// slow is for emulated machines with one processor: two pods that want most of it must find
	// room while one replaces the other, and each may take all of it; and the kubelet looks around
	// less often, which saves it a third of its time.
	slow bool
	// grace is how long a kubelet may be silent before its node is lost.
	grace time.Duration
}

// elsewhere are the settings of a node that is no part of this machine: it has all rights, and a
// disk of its own, and is slow.
func (s settings) elsewhere() settings {
	s.restrictOOM, s.snapshotter, s.slow = false, "overlayfs", true
	return s
}

// detect looks at what is different on this machine.
func detect(cfg Config, dir string) (settings, error) {
	s := settings{
		ipv6: haveIPv6() && !cfg.IPv4Only, proxyMode: cfg.ProxyMode, cniVersion: cfg.CNIVersion, snapshotter: "overlayfs",
		grace: lostAfter,
	}
	if cfg.External > 0 {
		s.grace = externalLostAfter
	}
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return s, fmt.Errorf("read capabilities: %w", err)
	}
	s.restrictOOM = !hasCapability(string(status), unix.CAP_SYS_RESOURCE)
	var fs unix.Statfs_t
	if err := unix.Statfs(dir, &fs); err != nil {
		return s, fmt.Errorf("look at the file system of %s: %w", dir, err)
	}
	if fs.Type == unix.OVERLAYFS_SUPER_MAGIC {
		s.snapshotter = "native"
	}
	return s, nil
}

func hasCapability(status string, capability uint) bool {
	for line := range strings.Lines(status) {
		if hex, ok := strings.CutPrefix(line, "CapEff:"); ok {
			var set uint64
			if _, err := fmt.Sscanf(strings.TrimSpace(hex), "%x", &set); err != nil {
				return false
			}
			return set&(1<<capability) != 0
		}
	}
	return false
}

func containerdConfig(s settings) string {
	return fmt.Sprintf(`version = 3
root = "/var/lib/containerd"
state = "/run/containerd"
[grpc]
  address = %q
[plugins.'io.containerd.cri.v1.images']
  snapshotter = %q
  [plugins.'io.containerd.cri.v1.images'.pinned_images]
    sandbox = %q
[plugins.'io.containerd.cri.v1.runtime']
  restrict_oom_score_adj = %t
  [plugins.'io.containerd.cri.v1.runtime'.cni]
    bin_dirs = ["/opt/cni/bin"]
    conf_dir = "/etc/cni/net.d"
  [plugins.'io.containerd.cri.v1.runtime'.containerd]
    default_runtime_name = "runc"
    [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
        BinaryName = "%s/runc"
        SystemdCgroup = false
`, containerdSocket, s.snapshotter, PauseImage, s.restrictOOM, toolsDir)
}

// kubeletConfig is the configuration of a node's kubelet. Images that no pod uses stay however full the
// machine's disk is: nobody has them to pull.
func kubeletConfig(number int, s settings) string {
	report, sync, measure := "4s", "5s", "1m"
	if s.slow {
		report, sync, measure = "10s", "1m", "-1s"
	}
	return fmt.Sprintf(`apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
failCgroupV1: false
cgroupDriver: cgroupfs
containerRuntimeEndpoint: unix://%s
authentication: {anonymous: {enabled: false}, webhook: {enabled: true}, x509: {clientCAFile: %s/ca.crt}}
authorization: {mode: Webhook}
tlsCertFile: %[2]s/kubelet.crt
tlsPrivateKeyFile: %[2]s/kubelet.key
address: %s
healthzBindAddress: 127.0.0.1
clusterDomain: cluster.local
resolvConf: /etc/resolv.conf
failSwapOn: false
evictionHard: {memory.available: "50Mi", nodefs.available: "1%%", imagefs.available: "1%%", nodefs.inodesFree: "1%%"}
imageGCHighThresholdPercent: 100
serializeImagePulls: false
cpuCFSQuota: %t
nodeStatusUpdateFrequency: %s
syncFrequency: %s
volumeStatsAggPeriod: %s
`, containerdSocket, pkiDir, address4(0, nodeHost(number)).Addr(), !s.slow, report, sync, measure)
}

// proxyConfig leaves the limits of connection tracking alone: they are the
// host's.
func proxyConfig(name string, s settings) string {
	return fmt.Sprintf(`apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: %s
clusterCIDR: %s
hostnameOverride: %s
clientConnection: {kubeconfig: /etc/kubernetes/kube-proxy.conf}
conntrack: {maxPerCore: 0, min: 0, tcpEstablishedTimeout: 0s, tcpCloseWaitTimeout: 0s}
`, s.proxyMode, families(s.ipv6, podCIDR4, podCIDR6), name)
}

func conflist(number int, s settings) string {
	ranges, routes := fmt.Sprintf(`[{"subnet": "%s"}]`, pods4(number)), `{"dst": "0.0.0.0/0"}`
	if s.ipv6 {
		ranges += fmt.Sprintf(`, [{"subnet": "%s"}]`, pods6(number))
		routes += `, {"dst": "::/0"}`
	}
	return fmt.Sprintf(`{
  "cniVersion": %q,
  "name": "cluster",
  "plugins": [
    {
      "type": "bridge", "bridge": "cni0", "isGateway": true, "ipMasq": false, "hairpinMode": true,
      "ipam": {"type": "host-local", "ranges": [%s], "routes": [%s]}
    },
    {"type": "portmap", "capabilities": {"portMappings": true}}
  ]
}
`, s.cniVersion, ranges, routes)
}
