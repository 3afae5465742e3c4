// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	ctrl "sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/devices/deviceplugin"
	"github.com/smcr-io/kube-smcr/internal/testenv"
	"github.com/smcr-io/kube-smcr/test/cluster/lab/guest"
	vm "github.com/smcr-io/kube-smcr/test/vm/lab"
	"github.com/smcr-io/kube-smcr/test/vm/vf/report"
)

// vfScenarios are about pods with VFs.
var vfScenarios = []scenario{
	{name: "pluginExclusive", run: pluginExclusive, patience: later},
	{name: "pluginShared", run: pluginShared, patience: later},
	{name: "claim", run: claim, patience: later},
	{name: "twoRails", run: twoRails, patience: later},
	{name: "restartedBetween", run: restartedBetween, patience: later},
	{name: "pfDown", run: pfDown, patience: later},
	{name: "churn", run: churn, patience: later},
}

const (
	// vfsPerPF is how many VFs each of a guest's two NICs with VFs has.
	vfsPerPF = 2

	// vfsPerNode is how many it has.
	vfsPerNode = 2 * vfsPerPF

	// vfNetwork is where VFs have their addresses in pods.
	vfNetwork = "10.1.0.0/24"
)

// TestVFs is about pods with VFs of their own, by the device plugin and a second network, and by claims.
func TestVFs(t *testing.T) {
	testenv.Builds("...")
	testenv.Need(t, testenv.Root, testenv.NetAdmin, testenv.ClusterTools, testenv.VM)
	b := bed{guests: guest.Config{VFs: vfsPerPF}, logs: logDir("test-cluster-vfs"), values: slices.Concat(installed, withVFs()), prepare: secondNetwork}
	c, p := b.setUp(t)
	firstPods(newSuite(t, c, p))
	for _, s := range vfScenarios {
		s.play(t, c, p)
	}
}

// firstPods runs a pod with a VF on each guest to its end, at the same time. The first one makes what stays: the bridge of the pods'
// first network.
func firstPods(s *suite) {
	s.patience = later
	ns := s.namespace("test-first")
	for _, n := range s.hw {
		s.must(s.p.Client.Create(s.Context(), on(asking(ns, "on-"+n.Name, deviceplugin.ResourceVF, 1), n)))
	}
	for _, n := range s.hw {
		s.running(pod{ns: ns, name: "on-" + n.Name, node: n.Name})
	}
	s.endPods(ns)
	s.endNamespaces(ns)
}

// withVFs are the chart's values for VFs. No scenario has pods with claims beside pods that have VFs by the device plugin.
func withVFs() []string {
	values := []string{"kernelPath.enabled=false", "devicePlugin.enabled=true", "devicePlugin.vfs=true", "dra.enabled=true"}
	for i, node := range []string{"n2", "n3"} {
		of := "dra.ipamOfNode." + node
		first, last := ipamRange(byte(i), 0)
		values = append(values, of+".type=host-local", of+".dataDir=/run/ipam/claims", of+".ranges[0][0].subnet="+vfNetwork,
			of+".ranges[0][0].rangeStart="+first.String(), of+".ranges[0][0].rangeEnd="+last.String())
	}
	return values
}

// ipamRange are the addresses that a guest, 0 or 1, gives pods by claims, 0, or in a second network, 1.
func ipamRange(guest, network byte) (first, last netip.Addr) {
	from := 10 + 100*guest + 50*network
	return netip.AddrFrom4([4]byte{10, 1, 0, from}), netip.AddrFrom4([4]byte{10, 1, 0, from + 39})
}

// secondNetwork has the guests' pods with VFs by the device plugin get them by a second network, as Multus would.
func secondNetwork(s *suite) error {
	_, err := s.c.Machines().Build(s.Context(), "github.com/smcr-io/kube-smcr/test/cluster/rdma/secondnet", vm.BuildOptions{})
	if err != nil {
		return err
	}
	if _, err := s.c.Machines().Build(s.Context(), "github.com/smcr-io/kube-smcr/test/vm/vf/driver", vm.BuildOptions{}); err != nil {
		return err
	}
	bin, err := s.c.Machines().BuildCNIPlugins(s.Context())
	if err != nil {
		return err
	}
	for i, n := range s.hw {
		const file = "/etc/cni/net.d/10-cluster.conflist"
		text, err := n.Guest.Shell(s.Context(), fmt.Sprintf("cp %[1]s/secondnet %[1]s/macvlan /opt/cni/bin/; cat %[2]s", bin, file))
		if err != nil {
			return err
		}
		var list map[string]any
		if err := json.Unmarshal([]byte(text), &list); err != nil {
			return err
		}
		plugins := slices.DeleteFunc(list["plugins"].([]any), func(p any) bool { return p.(map[string]any)["type"] == "secondnet" })
		list["plugins"] = append(plugins, map[string]any{"type": "secondnet", "networks": networks(byte(i))})
		changed, err := json.MarshalIndent(list, "", "  ")
		if err != nil {
			return err
		}
		if _, err := n.Guest.Shell(s.Context(), fmt.Sprintf("cat >%[1]s.tmp <<'EOF'\n%[2]s\nEOF\nmv %[1]s.tmp %[1]s", file, changed)); err != nil {
			return err
		}
	}
	return nil
}

// networks are the further networks of a guest's pods, 0 or 1: two for VFs, and one for shares of other devices.
func networks(guest byte) []any {
	ipam := func(subnet, from, to string) string {
		return fmt.Sprintf(`"ipam": {"type": "host-local", "dataDir": "/run/ipam/networks", "ranges": [[{"subnet": %q, "rangeStart": %q, "rangeEnd": %q}]]}`, subnet, from, to)
	}
	first, last := ipamRange(guest, 1)
	vf := fmt.Sprintf(`{"cniVersion": "1.0.0", "name": "roce", "plugins": [{"type": "smcr-cni", "capabilities": {"deviceID": true}, %s}]}`,
		ipam(vfNetwork, first.String(), last.String()))
	from := 10 + 100*int(guest)
	share := fmt.Sprintf(`{"cniVersion": "1.0.0", "name": "shared", "plugins": [{"type": "macvlan", "master": "eth1", "mode": "bridge", %s},
		{"type": "smcr-cni", "capabilities": {"deviceID": true}}]}`, ipam("10.1.1.0/24", fmt.Sprintf("10.1.1.%d", from), fmt.Sprintf("10.1.1.%d", from+89)))
	network := func(resource, list string) any {
		return map[string]any{"resource": resource, "list": json.RawMessage(list)}
	}
	return []any{network(deviceplugin.ResourceVF, vf), network(deviceplugin.ResourceVF, vf), network(deviceplugin.ResourceShared, share)}
}

// host is the state of a node that must be the same when its pods with VFs have ended, as its kernel says it.
func (s *suite) host(n *guest.Node) report.Host {
	s.Helper()
	h, err := s.tryHost(n)
	s.must(err)
	return h
}

func (s *suite) tryHost(n *guest.Node) (h report.Host, err error) {
	out, err := n.Guest.Run(s.Context(), "driver", "host", "-data-dir", "/run/kube-smcr")
	if err == nil {
		err = json.Unmarshal([]byte(out), &h)
	}
	// The agent asks kubelet for a pod's devices, and records what kubelet says, if it looks at the pod between the first network and the
	// one that brings the VF. So this one file comes to be at some time or never, and stays.
	h.Files = slices.DeleteFunc(h.Files, func(f string) bool { return f == "/run/kube-smcr/assignments/kubelet.json" })
	return h, err
}

// unchanged remembers the state of the guests. What it returns waits until it is that again.
func (s *suite) unchanged() (again func()) {
	s.Helper()
	var before [2]report.Host
	for i, n := range s.hw {
		before[i] = s.host(n)
	}
	return func() {
		s.Helper()
		for i, n := range s.hw {
			s.eventually("the former state of "+n.Name, func() error {
				now, err := s.tryHost(n)
				if d := before[i].Differences(now); err == nil && len(d) > 0 {
					err = errors.New(strings.Join(d, "; "))
				}
				return err
			})
		}
	}
}

// A nic is an interface of a pod, as its kernel says it.
type nic struct {
	IfName    string `json:"ifname"`
	ParentDev string `json:"parentdev"` // PCI address
	Addresses []struct {
		Family string `json:"family"`
		Local  string `json:"local"`
	} `json:"addr_info"`
}

func (n nic) ip() string {
	for _, a := range n.Addresses {
		if a.Family == "inet" {
			return a.Local
		}
	}
	return ""
}

// nics are the VFs that a pod has, by the kernel of its node.
func (s *suite) nics(n *guest.Node, p pod) []nic {
	s.Helper()
	return slices.DeleteFunc(s.interfaces(n, p), func(n nic) bool { return n.ParentDev == "" })
}

// interfaces are all that a pod has.
func (s *suite) interfaces(n *guest.Node, p pod) (all []nic) {
	s.Helper()
	out, err := n.Guest.Shell(s.Context(), fmt.Sprintf(`for ns in $(ls /run/netns); do
		if ip -n $ns -4 -o address | grep -q ' %s/'; then ip -n $ns -j -d address; exit; fi; done; exit 1`, p.ip))
	s.must(err)
	s.must(json.Unmarshal([]byte(out), &all))
	return all
}

// withVF waits until the kernel and the agent of a pod's node say that it has that many VFs, and returns the pod with the
// address of the first one instead of its own.
func (s *suite) withVF(n *guest.Node, p pod, want int) (pod, []nic) {
	s.Helper()
	vfs := s.nics(n, p)
	if len(vfs) != want {
		s.Fatalf("pod %s has the VFs %+v, want %d", p, vfs, want)
	}
	var ids []string
	for _, v := range vfs {
		if v.ip() == "" {
			s.Fatalf("VF %+v of pod %s has no address", v, p)
		}
		ids = append(ids, v.ParentDev)
	}
	s.attached(p, ids...)
	p.ip = vfs[0].ip()
	return p, vfs
}

// attached waits until the agent of a pod's node has the pod's connections on exactly these devices.
func (s *suite) attached(p pod, ids ...string) {
	s.Helper()
	slices.Sort(ids)
	s.eventually(fmt.Sprintf("the agent's connections of %s on %q", p, ids), func() error {
		var all agentapi.Attachments
		if err := s.p.Ask(s.Context(), p.node, &all, "attachments"); err != nil {
			return err
		}
		for _, a := range all.Attachments {
			if a.Pod == p.String() && a.State == agentapi.StateReady && slices.Equal(slices.Sorted(slices.Values(a.Devices)), ids) {
				return nil
			}
		}
		return fmt.Errorf("there are %+v", all.Attachments)
	})
}

// vfObject is a pod whose object is there until its node has ended it, as pods' are that are not deleted by force.
func vfObject(ns, name string, args ...string) *corev1.Pod {
	o := podObject(ns, name, args...)
	*o.Spec.TerminationGracePeriodSeconds = 1
	return o
}

// asking is a pod that asks kubelet for devices.
func asking(ns, name, what string, n int64, args ...string) *corev1.Pod {
	o := vfObject(ns, name, args...)
	o.Spec.Containers[0].Resources.Limits = corev1.ResourceList{corev1.ResourceName(what): *resource.NewQuantity(n, resource.DecimalSI)}
	return o
}

// on has the scheduler put a pod on a node.
func on(o *corev1.Pod, n *guest.Node) *corev1.Pod {
	o.Spec.NodeSelector = map[string]string{corev1.LabelHostname: n.Name}
	return o
}

// pairOfVFs makes a server and a client with VFs, the client of which holds a connection between their VFs on SMC-R.
func (s *suite) pairOfVFs(vfs int, object func(name string, args ...string) *corev1.Pod) (server, client pod, of [2][]nic) {
	s.Helper()
	server = s.run(on(object("server"), s.hw[0]), s.hw[0].Node)
	s.status(server, v1alpha1.PodStatusEnabled)
	server, of[0] = s.withVF(s.hw[0], server, vfs)
	there := false
	s.eventually("a client of "+server.String()+" on SMC-R", func() error {
		if !there {
			o := on(object("client", hold, server.address(), "--interval="+interval[hold], "--bytes=16384", "--workers=1"), s.hw[1])
			client, of[1] = s.withVF(s.hw[1], s.run(o, s.hw[1].Node), vfs)
			there = true
		}
		err := s.onSMCR(client, server)
		if err != nil && !errors.Is(err, errNoLink) { // its one connection is plain TCP, or at its end
			s.delete(client)
			there = false
		}
		return err
	})
	s.status(client, v1alpha1.PodStatusEnabled)
	return server, client, of
}

// onlyOn waits for the SMCRLink of a pod with that redundancy, and fails the test if it is not on these VFs.
func (s *suite) onlyOn(p pod, want v1alpha1.Redundancy, vfs []nic) {
	s.Helper()
	l := s.link(p, want)
	for _, v := range vfs {
		if !strings.Contains(l.Status.GIDs, v.ip()) {
			s.Errorf("SMCRLink %s has the GIDs %s, want %s among them", l.Name, l.Status.GIDs, v.ip())
		}
	}
	if strings.Contains(l.Status.Devices, "rxe0") || strings.Contains(l.Status.Devices, "rxe1") {
		s.Errorf("SMCRLink %s is on %s, devices of the node", l.Name, l.Status.Devices)
	}
}

// allocatable waits until a node has so many devices for pods.
func (s *suite) allocatable(n *guest.Node, what string, want int64) {
	s.Helper()
	s.eventually(fmt.Sprintf("%d of %s on %s", want, what, n.Name), func() error {
		var o corev1.Node
		if err := s.get("", n.Name, &o); err != nil {
			return err
		}
		if q := o.Status.Allocatable[corev1.ResourceName(what)]; q.Value() != want {
			return fmt.Errorf("there are %v", q.String())
		}
		return nil
	})
}

// pluginExclusive: pods ask kubelet for a VF each, which is theirs alone and carries their connections. One too many
// waits, and has that of the one that ends.
func pluginExclusive(s *suite) {
	ns := s.namespace("test-exclusive")
	defer s.endNamespaces(ns)
	for _, n := range s.hw {
		s.allocatable(n, deviceplugin.ResourceVF, vfsPerNode)
	}
	again := s.unchanged()
	object := func(name string, args ...string) *corev1.Pod {
		return asking(ns, name, deviceplugin.ResourceVF, 1, args...)
	}
	server, client, of := s.pairOfVFs(1, object)
	for i, p := range []pod{server, client} {
		s.onlyOn(p, v1alpha1.RedundancySingle, of[i])
	}
	s.grows(client, sum{}, 20)
	s.verdict(s.running(client), s.running(server), agentapi.CodeOK) // by their first network, and their VFs all the same
	for i, p := range []pod{server, client} {
		s.onlyOn(p, v1alpha1.RedundancySingle, of[i])
	}

	pods, has := []pod{server}, []string{of[0][0].ParentDev}
	for i := range vfsPerNode - 1 {
		p := s.run(on(object(fmt.Sprintf("other-%d", i)), s.hw[0]), s.hw[0].Node)
		_, vfs := s.withVF(s.hw[0], p, 1)
		if slices.Contains(has, vfs[0].ParentDev) {
			s.Errorf("pod %s has the VF %s, which another one of %q has, too", p, vfs[0].ParentDev, pods)
		}
		pods, has = append(pods, p), append(has, vfs[0].ParentDev)
	}
	s.must(s.p.Client.Create(s.Context(), on(object("late"), s.hw[0])))
	s.unschedulable(ns, "late", "Insufficient "+deviceplugin.ResourceVF)
	s.delete(pods[1])
	late := s.running(pod{ns: ns, name: "late", node: s.hw[0].Name})
	if _, vfs := s.withVF(s.hw[0], late, 1); vfs[0].ParentDev != has[1] {
		s.Errorf("pod %s has the VF %s, want %s, which another one had", late, vfs[0].ParentDev, has[1])
	}
	s.grows(client, sum{}, 20)
	s.endPods(ns)
	again()
}

// endPods deletes the pods of a namespace and waits until they are gone.
func (s *suite) endPods(ns string) {
	s.Helper()
	out, err := s.c.Kubectl(s.Context(), "delete", "pods", "--all", "-n", ns, "--timeout="+soon.String())
	if err != nil {
		s.Fatal(out, err)
	}
}

// unschedulable waits until the scheduler says why a pod has no node.
func (s *suite) unschedulable(ns, name, why string) {
	s.Helper()
	s.eventually(fmt.Sprintf("no node for %s/%s: %s", ns, name, why), func() error {
		var o corev1.Pod
		if err := s.get(ns, name, &o); err != nil {
			return err
		}
		for _, c := range o.Status.Conditions {
			if c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse && strings.Contains(c.Message, why) {
				return nil
			}
		}
		return fmt.Errorf("its conditions are %+v", o.Status.Conditions)
	})
}

// vfTemplate makes a template of claims for VFs, one of each of these rails.
func (s *suite) vfTemplate(ns, name string, rails ...int) {
	s.Helper()
	var requests []string
	for _, rail := range rails {
		requests = append(requests, fmt.Sprintf(`{name: rail%[1]d, exactly: {deviceClassName: roce.smcr.io, selectors: [{cel: {expression:
			'device.attributes["roce.smcr.io"].kind == "vf" && device.attributes["roce.smcr.io"].rail == %[1]d'}}]}}`, rail))
	}
	s.must(s.c.Apply(s.Context(), fmt.Sprintf(`{apiVersion: resource.k8s.io/v1, kind: ResourceClaimTemplate, metadata: {name: %s, namespace: %s},
		spec: {spec: {devices: {requests: [%s]}}}}`, name, ns, strings.Join(requests, ", "))))
}

// claiming is a pod with a claim by a template.
func claiming(ns, name, template string, args ...string) *corev1.Pod {
	o := vfObject(ns, name, args...)
	o.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "nic", ResourceClaimTemplateName: &template}}
	o.Spec.Containers[0].Resources.Claims = []corev1.ResourceClaim{{Name: "nic"}}
	return o
}

// plainNamespace makes a namespace that is not opted in.
func (s *suite) plainNamespace(name string) string {
	s.Helper()
	s.must(s.p.Client.Create(s.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}))
	s.eventually("the service account of "+name, func() error { return s.get(name, "default", &corev1.ServiceAccount{}) })
	return name
}

// claim: pods claim a VF of a rail each, which opts them in. It has an address by the chart's values, and the claim's status says so.
func claim(s *suite) {
	ns := s.plainNamespace("test-claim")
	defer s.endNamespaces(ns)
	s.vfTemplate(ns, "vf", 1)
	for _, n := range s.hw {
		s.offered(n)
	}
	again := s.unchanged()
	server, client, of := s.pairOfVFs(1, func(name string, args ...string) *corev1.Pod { return claiming(ns, name, "vf", args...) })
	for i, p := range []pod{server, client} {
		s.onlyOn(p, v1alpha1.RedundancySingle, of[i])
		s.claimed(p, of[i])
	}
	s.grows(client, sum{}, 20)

	// Pods that are made anew under the same name, while the former ones still end on the node, get a VF as soon as it is back.
	for range 2 {
		s.must(s.p.Client.Delete(s.Context(), podObject(ns, client.name), ctrl.GracePeriodSeconds(0)))
		s.eventually("the end of "+client.String(), func() error { return gone(s.get(ns, client.name, &corev1.Pod{})) })
		s.withVF(s.hw[1], s.run(on(claiming(ns, client.name, "vf"), s.hw[1]), s.hw[1].Node), 1)
	}
	s.endPods(ns)
	again()
}
