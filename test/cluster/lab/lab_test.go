// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/internal/testenv"
	"github.com/smcr-io/kube-smcr/internal/testenv/clustertools"
	"github.com/smcr-io/kube-smcr/test/cluster/lab/image"
)

func TestMain(m *testing.M) {
	testenv.Builds("tools/cluster", "tools/cluster/pause")
	goleak.VerifyTestMain(m)
}

// pods are on two nodes: nginx on n2, once in the pods' network and once in the
// node's; and on n1 curl, which sees the namespaces of n1's pods.
const pods = `
apiVersion: v1
kind: Pod
metadata: {name: web, labels: {app: web}}
spec:
  nodeName: n2
  containers:
  - name: nginx
    image: ` + image.Nginx + `
    ports: [{containerPort: 8080, hostPort: 18080}]
    readinessProbe: {httpGet: {path: /, port: 8080}, periodSeconds: 1}
    resources: {limits: {cpu: 500m, memory: 64Mi}}
---
apiVersion: v1
kind: Pod
metadata: {name: web-host}
spec:
  nodeName: n2
  hostNetwork: true
  containers:
  - name: nginx
    image: ` + image.Nginx + `
    readinessProbe: {httpGet: {path: /, port: 8080}, periodSeconds: 1}
---
apiVersion: v1
kind: Service
metadata: {name: web}
spec:
  selector: {app: web}
  ipFamilyPolicy: PreferDualStack
  ports: [{port: 80, targetPort: 8080}]
---
apiVersion: v1
kind: Pod
metadata: {name: client}
spec:
  nodeName: n1
  containers:
  - name: curl
    image: ` + image.Curl + `
    command: [sleep, "86400"]
    volumeMounts: [{name: netns, mountPath: /run/netns, mountPropagation: HostToContainer}]
  volumes: [{name: netns, hostPath: {path: /run/netns}}]
`

// latePod is made when the client runs already.
const latePod = `
apiVersion: v1
kind: Pod
metadata: {name: late}
spec: {nodeName: n1, containers: [{name: nginx, image: "` + image.Nginx + `"}]}
`

// TestCluster starts one cluster and does to it what the end-to-end tests of
// the product do.
func TestCluster(t *testing.T) {
	testenv.Need(t, testenv.Root, testenv.NetAdmin, testenv.ClusterTools, testenv.Program("nginx"), testenv.Program("curl"))
	ctx, cancel := context.WithTimeout(t.Context(), 16*time.Minute)
	defer cancel()
	images, err := image.Build(ctx, t.TempDir(), image.Nginx, image.Curl)
	if err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	c, err := Up(ctx, Config{Images: images[:1]})
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("the cluster was up after %v", time.Since(began).Round(time.Millisecond))
	u := &user{t: t, c: c}
	t.Cleanup(func() { u.end() })

	if err := c.LoadImage(ctx, images[1]); err != nil {
		t.Fatal(err)
	}
	if err := c.Apply(ctx, pods); err != nil {
		t.Fatal(err)
	}
	u.ready("web", "web-host", "client")

	t.Run("network", func(t *testing.T) { u.at(t).network() })
	t.Run("what an agent needs", func(t *testing.T) { u.at(t).agentNeeds() })
	t.Run("restarts", func(t *testing.T) { u.at(t).restarts() })
	t.Run("API server", func(t *testing.T) { u.at(t).apiServer() })
	t.Run("cable", func(t *testing.T) { u.at(t).cable() })
	t.Run("reboot", func(t *testing.T) { u.at(t).reboot() })
	t.Run("helm", func(t *testing.T) {
		if _, err := c.Helm(ctx, "list", "--all-namespaces"); err != nil {
			t.Error(err)
		}
	})
	t.Run("name in use", func(t *testing.T) {
		if _, err := Up(ctx, Config{Name: c.Name}); !errors.Is(err, errInUse) {
			t.Errorf("Up() of a name in use: %v, want %v", err, errInUse)
		}
	})
}

// A user does things to a cluster, for a test.
type user struct {
	t *testing.T
	c *Cluster
}

func (u user) at(t *testing.T) *user {
	u.t = t
	return &u
}

// end ends the cluster as the death of the test would, and wants nothing left.
func (u *user) end() {
	u.c.Close()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(u.t.Context()), time.Minute)
	defer cancel()
	noLeftovers(ctx, u.t, u.c.Name)
}

func noLeftovers(ctx context.Context, t *testing.T, name string) {
	t.Helper()
	err := poll(ctx, "the end of the cluster", time.Minute, func() error {
		left, err := Leftovers(name)
		if err == nil && len(left) > 0 {
			err = fmt.Errorf("left behind:\n%s", strings.Join(left, "\n"))
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
}

func (u *user) kubectl(args ...string) string {
	u.t.Helper()
	out, err := u.c.Kubectl(u.t.Context(), args...)
	if err != nil {
		u.t.Fatal(err)
	}
	return out
}

func (u *user) ready(names ...string) {
	u.t.Helper()
	args := []string{"wait", "--for=condition=Ready", "--timeout=90s"}
	for _, n := range names {
		args = append(args, "pod/"+n)
	}
	if _, err := u.c.Kubectl(u.t.Context(), args...); err != nil {
		what, _ := u.c.Kubectl(u.t.Context(), "describe", "pods")
		u.t.Fatalf("%v\n%s", err, what)
	}
}

// fetch gets a page of nginx from the client pod.
func (u *user) fetch(url string) error {
	out, err := u.c.Kubectl(u.t.Context(), "exec", "client", "--", "curl", "-sS", "-g", "--max-time", "5", url)
	if err == nil && out != "hello from nginx\n" {
		err = fmt.Errorf("%s answers %q", url, out)
	}
	return err
}

func (u *user) network() {
	var urls []string
	for _, ip := range strings.Fields(u.kubectl("get", "service", "web", "-o", "jsonpath={.spec.clusterIPs[*]}")) {
		if strings.Contains(ip, ":") {
			ip = "[" + ip + "]"
		}
		urls = append(urls, "http://"+ip)
	}
	if u.c.IPv6() != (len(urls) == 2) {
		u.t.Errorf("the service has the addresses %q; IPv6 is %v", urls, u.c.IPv6())
	}
	pod := u.kubectl("get", "pod", "web", "-o", "jsonpath={.status.podIP}")
	if n2 := u.c.Nodes[1]; !strings.HasPrefix(pod, strings.TrimSuffix(n2.PodCIDR().Addr().String(), "0")) {
		u.t.Errorf("the address of a pod of %s is %s, not of %s", n2.Name, pod, n2.PodCIDR())
	}
	urls = append(
		urls, "http://"+pod+":8080",
		"http://"+u.c.Nodes[1].Address().String()+":18080", // hostPort
		"http://"+u.c.Nodes[1].Rail().String()+":8080",     // the second network
	)
	for _, url := range urls {
		// Rules of kube-proxy follow the pod's readiness.
		err := poll(u.t.Context(), url, time.Minute, func() error { return u.fetch(url) })
		if err != nil {
			u.t.Error(err)
		}
	}
}

func (u *user) run(n *Node, args ...string) string {
	u.t.Helper()
	out, err := n.Run(u.t.Context(), args...)
	if err != nil {
		u.t.Fatal(err)
	}
	return strings.TrimSpace(out)
}

// agentNeeds checks that a node has what a node agent works with.
func (u *user) agentNeeds() {
	n1 := u.c.Nodes[0]
	mounts := u.run(n1, "cat", "/proc/self/mountinfo")
	for _, kind := range []string{" - cgroup2 ", " - bpf "} {
		if !strings.Contains(mounts, kind) {
			u.t.Errorf("node %s has no mount of%s", n1.Name, kind)
		}
	}
	u.run(n1, "nft", "list", "ruleset")

	// The namespaces of pods made later appear in a pod that runs already.
	if err := u.c.Apply(u.t.Context(), latePod); err != nil {
		u.t.Fatal(err)
	}
	u.ready("late")
	inPod := strings.Count(u.kubectl("exec", "client", "--", "cat", "/proc/1/mountinfo"), " - nsfs ")
	onNode := strings.Count(u.run(n1, "cat", "/proc/1/mountinfo"), " - nsfs ")
	if inPod < 2 || inPod != onNode {
		u.t.Errorf("%d namespaces in the pod's /run/netns, %d on the node; want as many, client's and late's at least", inPod, onNode)
	}
}

// identity is what changes when a pod's containers are not the same ones.
func (u *user) identity(pod string) string {
	return u.kubectl("get", "pod", pod, "-o", "jsonpath={.status.podIP} {.status.containerStatuses[*].containerID}")
}

func (u *user) restarts() {
	n1 := u.c.Nodes[0]
	before := u.identity("client")
	if err := n1.RestartContainerd(u.t.Context()); err != nil {
		u.t.Fatal(err)
	}
	socket, err := n1.Path(u.t.Context(), containerdSocket)
	if err != nil {
		u.t.Fatal(err)
	}
	if conn, err := net.Dial("unix", socket); err != nil {
		u.t.Errorf("containerd after its restart: %v", err)
	} else {
		_ = conn.Close()
	}
	if err := n1.RestartKubelet(u.t.Context()); err != nil {
		u.t.Fatal(err)
	}
	if err := poll(u.t.Context(), "kubectl exec", time.Minute, func() error {
		_, err := u.c.Kubectl(u.t.Context(), "exec", "client", "--", "sh", "-c", ":")
		return err
	}); err != nil {
		u.t.Fatal(err)
	}
	u.ready("client")
	if after := u.identity("client"); after != before {
		u.t.Errorf("the pod is %s after the restarts, and was %s", after, before)
	}
}

func (u *user) apiServer() {
	if err := u.c.StopAPIServer(u.t.Context()); err != nil {
		u.t.Fatal(err)
	}
	if _, err := u.c.Kubectl(u.t.Context(), "get", "nodes"); err == nil {
		u.t.Error("kubectl works without an API server")
	}
	if err := u.c.StartAPIServer(u.t.Context()); err != nil {
		u.t.Fatal(err)
	}
	if err := u.c.PauseAPIServer(u.t.Context()); err != nil {
		u.t.Fatal(err)
	}
	if _, err := u.c.Kubectl(u.t.Context(), "get", "nodes", "--request-timeout=1s"); err == nil {
		u.t.Error("kubectl works with a paused API server")
	}
	if err := u.c.ResumeAPIServer(u.t.Context()); err != nil {
		u.t.Fatal(err)
	}
	u.kubectl("get", "nodes")
}

func (u *user) cable() {
	n1 := u.c.Nodes[0]
	for _, up := range []bool{false, true} {
		if err := n1.SetPort(u.t.Context(), "eth1", up); err != nil {
			u.t.Fatal(err)
		}
		want := map[bool]string{false: "0", true: "1"}[up]
		err := poll(u.t.Context(), "the carrier of eth1", 5*time.Second, func() error {
			if got := u.run(n1, "cat", "/sys/class/net/eth1/carrier"); got != want {
				return fmt.Errorf("it is %s, want %s", got, want)
			}
			return nil
		})
		if err != nil {
			u.t.Error(err)
		}
	}
}

func (u *user) reboot() {
	n2 := u.c.Nodes[1]
	u.run(n2, "touch", "/run/of-this-boot", "/var/lib/of-the-disk")
	before, boot := u.identity("web"), u.run(n2, "cat", "/proc/sys/kernel/random/boot_id")
	if err := n2.PowerOff(u.t.Context()); err != nil {
		u.t.Fatal(err)
	}
	if _, err := n2.PID(u.t.Context()); err == nil {
		u.t.Error("a node that is off has a process 1")
	}
	if err := n2.PowerOn(u.t.Context()); err != nil {
		u.t.Fatal(err)
	}
	err := poll(u.t.Context(), "the pod's restart", time.Minute, func() error {
		switch after := u.identity("web"); {
		case after == before:
			return fmt.Errorf("it is still %s", after)
		case len(strings.Fields(after)) != 2:
			return fmt.Errorf("it is only %q", after)
		}
		return nil
	})
	if err != nil {
		u.t.Fatal(err)
	}
	u.ready("web", "web-host")
	u.network()
	if after := u.run(n2, "cat", "/proc/sys/kernel/random/boot_id"); after == boot {
		u.t.Errorf("the boot id is %s before and after the reboot", boot)
	}
	if files := u.run(n2, "sh", "-c", "ls /run/of-this-boot /var/lib/of-the-disk 2>/dev/null || :"); files != "/var/lib/of-the-disk" {
		u.t.Errorf("after the reboot there are %q; want what was on the disk only", files)
	}
}

// inheritable opens a file that every child of this process inherits, as a
// shell's descriptors are, and returns its name.
func inheritable(t *testing.T) string {
	t.Helper()
	name := filepath.Join(t.TempDir(), "lock-of-somebody")
	fd, err := unix.Open(name, unix.O_CREAT|unix.O_RDWR, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Close(fd) })
	return name
}

// TestKilledSupervisor kills what owns a cluster: its machines must end, and
// Down must remove the rest. The cluster is another one than that of
// TestCluster in what a Config can say.
func TestKilledSupervisor(t *testing.T) {
	testenv.Need(t, testenv.Root, testenv.NetAdmin, testenv.ClusterTools)
	ctx, cancel := context.WithTimeout(t.Context(), 8*time.Minute)
	defer cancel()
	logs := t.TempDir()
	inherited := inheritable(t)
	c, err := Up(ctx, Config{
		Name: fmt.Sprintf("killed-%d", os.Getpid()), Nodes: 1, LogDir: logs, Detach: true,
		ProxyMode: "nftables", CNIVersion: "1.1.0", IPv4Only: true,
	})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := Down(context.WithoutCancel(ctx), c.Name); err != nil {
			t.Error(err)
		}
		noLeftovers(context.WithoutCancel(ctx), t, c.Name)
	}()
	open, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", c.info.Supervisor))
	if err != nil || len(open) == 0 {
		t.Errorf("the supervisor's descriptors: %q, %v", open, err)
	}
	for _, fd := range open {
		if target, _ := os.Readlink(fd); target == inherited {
			t.Errorf("the supervisor holds %s, which this process could not help handing on", target)
		}
	}
	if found, err := Open(ctx, c.Name); err != nil || len(found.Nodes) != 1 {
		t.Errorf("Open() = %v, %v; want a cluster of one node", found, err)
	}
	err = poll(ctx, "the table of kube-proxy", 30*time.Second, func() error {
		_, err := c.Nodes[0].Run(ctx, "nft", "list", "table", "ip", "kube-proxy")
		return err
	})
	if err != nil {
		t.Error(err)
	}
	node, err := c.Nodes[0].PID(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Kill(c.info.Supervisor, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	err = poll(ctx, "the end of the node", 20*time.Second, func() error {
		if err := unix.Kill(node, 0); err == nil {
			return fmt.Errorf("process %d is there", node)
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(filepath.Join(logs, "n1", "kubelet.log")); err != nil {
		t.Errorf("the log of kubelet: %v", err)
	}
}

// A cluster that cannot start says why and leaves nothing.
func TestUpFails(t *testing.T) {
	testenv.Need(t, testenv.Root, testenv.NetAdmin, testenv.ClusterTools)
	tools := brokenTools(t)
	name := fmt.Sprintf("broken-%d", os.Getpid())
	_, err := Up(t.Context(), Config{Name: name, Nodes: 1, Tools: tools})
	if err == nil || !strings.Contains(err.Error(), "etcd on control-plane ended") {
		t.Errorf("Up() with a broken etcd = %v, want an error that names it", err)
	}
	noLeftovers(t.Context(), t, name)
}

// brokenTools is a directory of tools whose etcd ends at once.
func brokenTools(t *testing.T) string {
	t.Helper()
	good, err := clustertools.Built()
	if err != nil {
		t.Fatal(err)
	}
	bad := t.TempDir()
	entries, err := os.ReadDir(good)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		from, to := filepath.Join(good, e.Name()), filepath.Join(bad, e.Name())
		switch {
		case e.Name() == etcd:
			err = os.WriteFile(to, []byte("#!/bin/sh\necho this etcd is broken\nexit 3\n"), 0o755)
		case e.IsDir():
			err = os.CopyFS(to, os.DirFS(from))
		case e.Type().IsRegular():
			err = os.Link(from, to)
		default:
			var target string
			if target, err = os.Readlink(from); err == nil {
				err = os.Symlink(target, to)
			}
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return bad
}
