// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/cni"
	"github.com/smcr-io/kube-smcr/internal/kernelpath"
	"github.com/smcr-io/kube-smcr/internal/linux"
	"github.com/smcr-io/kube-smcr/internal/records"
	"github.com/smcr-io/kube-smcr/internal/testenv"
)

// fakeSMC is a kernel with SMC, and the program that chooses it.
type fakeSMC struct {
	mu      sync.Mutex // guards what is below
	eids    []string
	opened  int // handles that are open
	pins    bool
	removed int

	openErr, fitErr, attachErr error
	addressesErr, mayHaveErr   error
	removeErr                  error
	sockets                    map[uint64]bool // by inode: namespaces with sockets of SMC
	pods                       map[uint64]kernelpath.PodConfig
	attached                   int                    // how often
	asked                      []kernelpath.PodConfig // of each time
	purged                     []uint64
	undone                     kernelpath.PodConfig // of the last detach or purge
	flushed                    bool                 // somebody removed the filters of options
	forgetErr                  error
	overtaken                  bool // by another program
	leads                      int  // how often it was asked to lead
	leadErr                    error
	keeps                      int // how often it was asked to keep what veths need
	keepErr                    error
	revoking                   fakeRevocations
	witness                    fakeWitness
}

func newFakeSMC() *fakeSMC {
	return &fakeSMC{sockets: map[uint64]bool{}, pods: map[uint64]kernelpath.PodConfig{}}
}

func (s *fakeSMC) change(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f()
}

func (s *fakeSMC) open(eids []string) (chooser, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.openErr != nil {
		return nil, s.openErr
	}
	s.eids, s.pins = eids, true
	s.opened++
	return s, nil
}

func (s *fakeSMC) pinned() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.pins
}

func (s *fakeSMC) remove() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.removed++
	if s.removeErr == nil {
		s.pins = false
	}
	return s.removeErr
}

func (s *fakeSMC) addresses() ([]netip.Addr, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return []netip.Addr{netip.MustParseAddr("192.0.2.1")}, s.addressesErr
}

func (s *fakeSMC) close() error {
	s.change(func() { s.opened-- })
	return nil
}

func (s *fakeSMC) fit(n podNet, _ kernelpath.PodConfig) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, ok := s.pods[n.id()]; ok { // of an earlier agent
		return nil
	}
	return s.fitErr
}

func (s *fakeSMC) attach(n podNet, cfg kernelpath.PodConfig) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := cmp.Or(s.attachErr, cfg.Filter.Validate()); err != nil {
		return err
	}
	s.pods[n.id()] = cfg
	s.asked = append(s.asked, cfg)
	s.attached++
	s.flushed = false
	return nil
}

func (s *fakeSMC) detach(n podNet, cfg kernelpath.PodConfig) (bool, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.undone = cfg
	delete(s.pods, n.id())
	return s.sockets[n.id()], nil
}

func (s *fakeSMC) purge(n podNet, cfg kernelpath.PodConfig) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.undone = cfg
	delete(s.pods, n.id())
	s.purged = append(s.purged, n.id())
	return nil
}

// firstCgroup is the first inode of cgroups. Those of namespaces are below.
const firstCgroup = 1000

// others takes the inode of a namespace for its cookie.
func (s *fakeSMC) others(known []podNet) (out []kernelpath.Choice, _ error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for id := range s.pods {
		if !slices.ContainsFunc(known, func(n podNet) bool { return n.id() == id }) {
			if id >= firstCgroup {
				out = append(out, kernelpath.Choice{Cgroup: id})
			} else {
				out = append(out, kernelpath.Choice{NetNS: id})
			}
		}
	}
	slices.SortFunc(out, func(a, b kernelpath.Choice) int { return cmp.Compare(a.NetNS+a.Cgroup, b.NetNS+b.Cgroup) })
	return out, nil
}

func (s *fakeSMC) filtered(podNet) (bool, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return !s.flushed, nil
}

func (s *fakeSMC) forget(x kernelpath.Choice) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.forgetErr != nil {
		return s.forgetErr
	}
	delete(s.pods, x.NetNS+x.Cgroup)
	return nil
}

func (s *fakeSMC) lead() (bool, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	was := s.overtaken
	s.overtaken = false
	s.leads++
	return was, s.leadErr
}

func (s *fakeSMC) watch(f func(kernelpath.Fallback)) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.witness.told = f
	return s.witness.watchErr
}

// pod is how a pod is attached.
func (s *fakeSMC) pod(inode uint64) (kernelpath.PodConfig, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	cfg, ok := s.pods[inode]
	return cfg, ok
}

const kernelAll = "policies:\n- {name: all, datapath: Kernel, ports: [80]}\n"

func newKernelBench(t *testing.T, policies string) (*bench, *fakeSMC) {
	t.Helper()
	b, s := newBench(t, "", policies), newFakeSMC()
	b.cfg.smc = s
	return b, s
}

func TestKernelPath_podComesAndGoes(t *testing.T) {
	b, s := newKernelBench(t, kernelAll)
	p := b.attach("a", 1)
	b.start()
	if a := b.attachment("a"); a.State != agentapi.StateReady || a.Datapath != "Kernel" || a.Detail != "" || a.Policies[0] != "all" {
		t.Errorf("attachment %+v", a)
	}
	if st := b.status(); st.Pods.Ready != 1 || st.Pods.Failed != 0 {
		t.Errorf("status %+v", st.Pods)
	}
	cfg, ok := s.pod(1)
	if want := (linux.OutboundRule{Prefix: netip.MustParsePrefix("0.0.0.0/0"), Ports: []linux.PortRange{{First: 80, Last: 80}}}); !ok || len(cfg.Filter.Peers) != 2 || cfg.Filter.Peers[0].Prefix != want.Prefix || !slices.Equal(cfg.Filter.Peers[0].Ports, want.Ports) {
		t.Errorf("attached %t: %+v", ok, cfg)
	}
	n := b.cfg.Node
	if cfg.SendBufferBytes != n.SendBufferBytes || cfg.RMBEBytes != n.RMBEBytes || s.eids[0] != n.EIDs[0].String() {
		t.Errorf("buffers %+v, enterprise IDs %q", cfg, s.eids)
	}
	p.k.change(func() {
		if p.redir != nil || p.sweeps != 1 {
			t.Errorf("the agent's own redirection is in the pod, or %d sweeps", p.sweeps)
		}
	})
	e := value(b.client.Explain(t.Context(), "test/a", "198.51.100.1:80"))(t)
	if e.Code != agentapi.CodeUnseen || !strings.Contains(e.Verdict, "the pod's kernel carries it: no such connection is open") {
		t.Errorf("explanation %+v", e)
	}
	if e := value(b.client.Explain(t.Context(), "test/a", "192.0.2.1:80"))(t); e.Code != agentapi.CodeSameNode {
		t.Errorf("explanation of a peer on the node: %+v", e)
	}
	must(t, b.store.Delete("a", "eth0"))
	b.sync()
	s.change(func() {
		if !slices.Equal(s.purged, []uint64{1}) || s.pins || s.removed != 1 || s.opened != 0 {
			t.Errorf("the last pod went: %+v", s)
		}
	})
}

// A pod that an earlier agent attached stays attached while this one cannot look at it: nothing is taken from the node.
func TestKernelPath_leftAndNotAttached(t *testing.T) {
	b, s := newKernelBench(t, kernelAll)
	s.pins, s.pods[1], s.attachErr = true, kernelpath.PodConfig{}, errors.New("no memory")
	b.attach("a", 1)
	b.start()
	b.sync()
	if a := b.attachment("a"); a.State != agentapi.StateFailed {
		t.Errorf("attachment %+v", a)
	}
	s.change(func() {
		if _, is := s.pods[1]; !is || !s.pins || s.removed != 0 {
			t.Errorf("what an earlier agent attached is gone: %+v", s)
		}
		s.attachErr = nil
	})
	eventually(t, func() string {
		b.sync()
		if a := b.attachment("a"); a.State != agentapi.StateReady || a.Datapath != "Kernel" {
			return fmt.Sprintf("attachment %+v", a)
		}
		return ""
	})
}

// What could not be taken from the node when the last pod went is tried again later.
func TestKernelPath_removedLater(t *testing.T) {
	b, s := newKernelBench(t, kernelAll)
	a := newBare(t, b).a
	a.manager.hosts.settled.Store(true)
	k := &a.kernelPath
	k.chooser = s
	s.opened, s.pins, s.removeErr = 1, true, errors.New("netlink: no memory")
	for i, want := range []int{1, 1, 2, 2} {
		if i == 2 {
			k.lookAt, s.removeErr = time.Now(), nil
		}
		if k.tidy(); s.removed != want || s.pins != (i < 2) {
			t.Errorf("step %d: %d tries, want %d; something is left: %t", i, s.removed, want, s.pins)
		}
	}
}

// Another program on the hook is overtaken, which the log says, and looked for once in a while only.
func TestKernelPath_lead(t *testing.T) {
	b, s := newKernelBench(t, kernelAll)
	var log bytes.Buffer
	k := kernelPath{a: &agent{cfg: b.cfg}}
	k.a.cfg.Log = slog.New(slog.NewTextHandler(&log, nil))
	k.looked = true
	now := time.Now()
	k.leadLocked(now)
	if s.leads != 0 {
		t.Error("no pod wants the program, and it was asked to lead")
	}
	k.chooser, k.pods = s, 1
	for i, tt := range []struct {
		overtaken bool
		err       error
		after     time.Duration
		leads     int
		log       string
	}{
		{leads: 1},
		{after: leadEvery - 1, overtaken: true, leads: 1},
		{after: 1, overtaken: true, leads: 2, log: "ours was put before it"},
		{after: leadEvery, leads: 3},
		{after: leadEvery, err: errors.New("no rights"), leads: 4, log: "no rights"},
		{after: leadEvery, err: errors.New("no rights"), leads: 5},
		{after: leadEvery, leads: 6},
		{after: leadEvery, err: errors.New("no rights"), leads: 7, log: "no rights"},
	} {
		log.Reset()
		now = now.Add(tt.after)
		s.overtaken, s.leadErr = tt.overtaken, tt.err
		k.leadLocked(now)
		if text := log.String(); s.leads != tt.leads || (text != "") != (tt.log != "") || !strings.Contains(text, tt.log) {
			t.Errorf("%d: asked %d times, want %d; log %q, want %q", i, s.leads, tt.leads, text, tt.log)
		}
	}
}

// An agent with a pod asks the program to lead.
func TestKernelPath_leads(t *testing.T) {
	b, s := newKernelBench(t, kernelAll)
	b.attach("a", 1)
	b.start()
	b.sync()
	eventually(t, func() string {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.leads == 0 {
			return "it was not asked"
		}
		return ""
	})
}

// A namespace that ends leaves its pod on plain TCP with the reason, and the one that takes its place is attached.
func TestKernelPath_namespaceGone(t *testing.T) {
	b, s := newKernelBench(t, kernelAll)
	p := b.attach("a", 1)
	s.attachErr = fmt.Errorf("filter the option: %w", linux.ErrGone) // while it is attached
	b.start()
	if a := b.attachment("a"); a.State != agentapi.StateFailed || !strings.Contains(a.Detail, linux.ErrGone.Error()) {
		t.Errorf("attachment %+v", a)
	}
	if n := b.kernel.handles(); n != 0 {
		t.Errorf("%d handles left", n)
	}
	s.change(func() { s.attachErr = nil })
	eventually(t, func() string {
		return map[bool]string{false: "not attached"}[b.attachment("a").State == agentapi.StateReady]
	})
	p.k.change(func() { p.isGone = true }) // later
	b.sync()
	eventually(t, func() string {
		s.mu.Lock()
		defer s.mu.Unlock()
		if len(s.purged) == 0 {
			return "the agent has not noticed"
		}
		return ""
	})
	if n := b.kernel.handles(); n > 1 {
		t.Errorf("%d handles of one namespace", n)
	}
}

// The addresses of the node and of its pods are never on SMC-R, and a pod that comes is one more.
func TestKernelPath_sameNode(t *testing.T) {
	b, s := newKernelBench(t, kernelAll)
	b.attach("a", 1)
	b.start()
	want := []netip.Addr{netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("192.0.2.1")}
	eventually(t, func() string {
		if cfg, _ := s.pod(1); !slices.Equal(cfg.Filter.Never, want) {
			return cfg.Filter.Never[0].String()
		}
		return ""
	})
	other := netip.MustParsePrefix("192.0.2.4/24")
	b.kernel.add("/netns/b", 2)
	must(t, b.store.Write(cni.Attachment{
		ContainerID: "b", IfName: "eth0", NetNS: "/netns/b", NetNSID: 2, Network: "n",
		Pod: records.Pod{Namespace: "test", Name: "b"}, IPs: []netip.Prefix{other},
	}))
	b.sync()
	eventually(t, func() string { // the round after the one that attached it
		for _, inode := range []uint64{1, 2} {
			if cfg, _ := s.pod(inode); !slices.Contains(cfg.Filter.Never, other.Addr()) {
				return "a pod that does not know the other one"
			}
		}
		return ""
	})
	// In a network that the pod is not in, an address of its own subnet may be another node's pod's. Others it reaches by a route.
	far := netip.MustParsePrefix("192.0.2.6/24")
	b.kernel.add("/netns/d", 4)
	must(t, b.store.Write(cni.Attachment{
		ContainerID: "d", IfName: "eth0", NetNS: "/netns/d", NetNSID: 4, Network: "n",
		Pod: records.Pod{Namespace: "test", Name: "d"}, IPs: []netip.Prefix{netip.MustParsePrefix("192.0.2.8/24")},
	}))
	must(t, b.store.Write(cni.Attachment{
		ContainerID: "d", IfName: "net1", NetNS: "/netns/d", NetNSID: 4, Network: "storage",
		Pod: records.Pod{Namespace: "test", Name: "d"}, IPs: []netip.Prefix{far},
	}))
	b.sync()
	eventually(t, func() string {
		b.sync()
		if cfg, _ := s.pod(4); !slices.Contains(cfg.Filter.Never, far.Addr()) || !slices.Contains(cfg.Filter.Never, other.Addr()) {
			return fmt.Sprintf("never on SMC-R of the pod with two networks: %v", cfg.Filter.Never)
		}
		if cfg, _ := s.pod(2); slices.Contains(cfg.Filter.Never, far.Addr()) || !slices.Contains(cfg.Filter.Never, netip.MustParseAddr("192.0.2.8")) {
			return fmt.Sprintf("never on SMC-R of the pod with one network: %v", cfg.Filter.Never)
		}
		if cfg, _ := s.pod(1); !slices.Contains(cfg.Filter.Never, far.Addr()) {
			return fmt.Sprintf("never on SMC-R of the pod in another subnet: %v", cfg.Filter.Never)
		}
		return ""
	})
	// A record that its CNI DEL left is of no pod, and its address may be another node's pod's by now.
	left := netip.MustParsePrefix("192.0.2.5/24")
	must(t, b.store.Write(cni.Attachment{
		ContainerID: "c", IfName: "eth0", NetNS: "/netns/c", NetNSID: 3, Network: "n",
		Pod: records.Pod{Namespace: "test", Name: "c"}, IPs: []netip.Prefix{left},
	}))
	b.sync()
	eventually(t, func() string {
		b.sync()
		if cfg, _ := s.pod(1); b.attachment("c").State != agentapi.StateFailed || slices.Contains(cfg.Filter.Never, left.Addr()) {
			return "the address of a pod that is gone is never on SMC-R"
		}
		return ""
	})
	var times int
	s.change(func() { times = s.attached })
	b.sync()
	s.change(func() {
		if s.attached != times {
			t.Error("the filter was replaced, and nothing had changed")
		}
	})
}

// The addresses of Services, which kube-proxy or kube-router give to an interface of their own, are none of the node's:
// pods have SMC-R with what is behind, and there is room for the node's only.
func TestLinuxSMC_addresses(t *testing.T) {
	testenv.Need(t, testenv.Root, testenv.NetAdmin)
	ns := value(linux.ScratchNetNS())(t)
	defer func() { must(t, ns.Close()) }()
	must(t, ns.Do(func() error {
		for name, addrs := range map[string][]string{
			"eth1": {"192.0.2.1/24", "2001:db8::1/64"}, "kube-ipvs0": {"10.96.0.1/32", "10.96.0.10/32", "fd00:96::1/128"}, "kube-dummy-if": {"10.97.0.1/32"},
		} {
			l := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: name}, PeerName: name + "-"}
			if err := netlink.LinkAdd(l); err != nil {
				return err
			}
			for _, a := range addrs {
				if err := netlink.AddrAdd(l, value(netlink.ParseAddr(a))(t)); err != nil {
					return err
				}
			}
		}
		got, err := linuxSMC{}.addresses()
		slices.SortFunc(got, netip.Addr.Compare)
		if want := []netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")}; !slices.Equal(got, want) {
			t.Errorf("addresses %v, want %v", got, want)
		}
		return err
	}))
}

// A pod that cannot be attached is on plain TCP, says why, and is tried again.
func TestKernelPath_fails(t *testing.T) {
	for _, step := range []string{"open", "fit", "attach"} {
		t.Run(step, func(t *testing.T) {
			t.Parallel() // each waits for a retry
			b, s := newKernelBench(t, kernelAll)
			set := map[string]*error{"open": &s.openErr, "fit": &s.fitErr, "attach": &s.attachErr}[step]
			*set = errors.New("missing " + step)
			b.attach("a", 1)
			b.start()
			if a := b.attachment("a"); a.State != agentapi.StateFailed || !strings.Contains(a.Detail, "missing "+step) || a.Datapath != "" {
				t.Errorf("attachment %+v", a)
			}
			if n := b.kernel.handles(); n != 0 {
				t.Errorf("%d handles left", n)
			}
			if e := value(b.client.Explain(t.Context(), "test/a", "198.51.100.1:80"))(t); e.Code != agentapi.CodePodFailed {
				t.Errorf("explanation %+v", e)
			}
			s.change(func() { *set = nil })
			eventually(t, func() string {
				if st := b.attachment("a").State; st != agentapi.StateReady {
					return st
				}
				return ""
			})
		})
	}
}

// A pod stays on its kernel's SMC-R if its filter cannot be changed, and says that.
func TestKernelPath_updateFails(t *testing.T) {
	b, s := newKernelBench(t, kernelAll)
	b.attach("a", 1)
	s.sockets[1] = true
	b.start()
	b.sync()
	s.change(func() { s.attachErr = errors.New("no memory for the table") })
	b.policies("policies:\n- {name: all, datapath: Kernel, ports: [80, 81]}\n")
	eventually(t, func() string {
		if a := b.attachment("a"); a.State != agentapi.StateFailed || a.Datapath != "Kernel" || !strings.Contains(a.Detail, "no memory") {
			return fmt.Sprintf("%+v", a)
		}
		return ""
	})
	e := value(b.client.Explain(t.Context(), "test/a", "198.51.100.1:80"))(t)
	if e.Code != agentapi.CodeUnseen || !strings.Contains(e.Verdict, "the pod's kernel carries it") || !strings.Contains(e.Verdict, "not in force in the pod, and it is tried again: no memory") {
		t.Errorf("explanation %+v", e)
	}
	b.policies(preferAll)
	b.policies(kernelAll) // before its sockets are gone
	eventually(t, func() string {
		if a := b.attachment("a"); a.State != agentapi.StateFailed || a.Datapath != "" {
			return fmt.Sprintf("%+v", a)
		}
		return ""
	})
}

// policies puts others in force.
func (b *bench) policies(text string) {
	b.configure("", text)
	b.reload <- struct{}{}
	b.sync()
}

// With another datapath, or none, a pod is the agent's when its sockets of SMC are gone.
func TestKernelPath_datapathChanges(t *testing.T) {
	b, s := newKernelBench(t, kernelAll)
	p := b.attach("a", 1)
	s.sockets[1] = true
	b.start()
	awaitPath := func(state, datapath, detail string) {
		t.Helper()
		eventually(t, func() string {
			if a := b.attachment("a"); a.State != state || a.Datapath != datapath || !strings.Contains(a.Detail, detail) {
				return a.State + " " + a.Datapath + " " + a.Detail
			}
			return ""
		})
	}
	awaitPath(agentapi.StateReady, "Kernel", "")
	b.policies(preferAll)
	awaitPath(agentapi.StateIdle, "Kernel", "restart them")
	if a := b.attachment("a"); a.Reason != agentapi.CodeOldSockets {
		t.Errorf("attachment %+v", a)
	}
	if e := value(b.client.Explain(t.Context(), "test/a", "198.51.100.1:80"))(t); e.Code != agentapi.CodeOldSockets || !strings.Contains(e.Verdict, "restart them") {
		t.Errorf("explanation %+v", e)
	}
	if _, ok := s.pod(1); ok {
		t.Error("the pod is attached")
	}
	s.change(func() { s.sockets[1] = false })
	b.sync()
	awaitPath(agentapi.StateReady, "", "")
	eventually(t, func() string {
		if s.pinned() {
			return "the program is there, and no pod uses it"
		}
		return ""
	})
	b.policies(kernelAll)
	awaitPath(agentapi.StateReady, "Kernel", "")
	p.redir.look(func() {
		if !p.redir.removed {
			t.Error("the agent's redirection is left beside the kernel's")
		}
	})
}

// The sizes of buffers stay those with which a pod was attached, whatever policies say later, and are what is
// taken back: the kernel's variables have them, and another value there is somebody else's.
func TestKernelPath_buffersChange(t *testing.T) {
	sized := func(path v1alpha1.Datapath, size v1alpha1.BufferSize) v1alpha1.SMCRPolicy {
		return testPolicy(func(s *v1alpha1.SMCRPolicySpec) {
			s.Datapath, s.Isolation = path, v1alpha1.IsolationNode
			s.Buffers = &v1alpha1.PolicyBuffers{RMBE: size, Send: size}
		})
	}
	for _, leaves := range []bool{false, true} { // and comes back before its sockets are gone
		t.Run(fmt.Sprintf("left between %t", leaves), func(t *testing.T) {
			b, s := newClusterBench(t, "a", sized(v1alpha1.DatapathKernel, "64Ki")), newFakeSMC()
			b.cfg.smc = s
			b.attach("a", 1)
			s.sockets[1] = true
			b.start()
			first, _ := s.pod(1)
			if first.RMBEBytes != 64<<10 || first.SendBufferBytes != 64<<10 {
				t.Fatalf("attached with %+v", first)
			}
			if leaves {
				b.apply("a", sized(v1alpha1.DatapathAgent, "64Ki"))
				b.waitState("a", agentapi.StateIdle, "restart them")
			}
			b.apply("a", sized(v1alpha1.DatapathKernel, "128Ki"))
			b.sync()
			b.waitState("a", agentapi.StateReady, "")
			times := 0
			s.change(func() { times = s.attached })
			b.sync()
			s.change(func() {
				if s.attached != times {
					t.Error("the filter was replaced, and nothing had changed")
				}
			})
			b.apply("a", sized(v1alpha1.DatapathAgent, "128Ki"))
			b.waitState("a", agentapi.StateIdle, "restart them")
			s.change(func() {
				if s.undone.RMBEBytes != 64<<10 || s.undone.SendBufferBytes != 64<<10 {
					t.Errorf("taken back as %+v", s.undone)
				}
			})
		})
	}
}

// What an agent attached works on when it ends, and the next one takes it over; a pod that is not to be on
// it any more is detached by that.
func TestKernelPath_nextAgent(t *testing.T) {
	b, s := newKernelBench(t, "policies:\n- {name: p, datapath: Kernel, pods: {names: [a, b]}}\n")
	b.attach("a", 1)
	b.attach("b", 2)
	b.start()
	b.stop()
	if _, ok := s.pod(1); !ok || !s.pinned() || len(s.purged) != 0 {
		t.Fatalf("the end of the agent was that of the datapath: %+v", s)
	}
	b.configure("", "policies:\n- {name: p, datapath: Kernel, pods: {names: [a]}}\n")
	b.cfg.Node = value(b.cfg.Load())(t)
	b.start()
	if a := b.attachment("a"); a.State != agentapi.StateReady || a.Datapath != "Kernel" {
		t.Errorf("attachment %+v", a)
	}
	if _, ok := s.pod(2); ok {
		t.Error("a pod that no policy selects is attached")
	}
	if !s.pinned() {
		t.Error("the program was removed while a pod uses it")
	}
}

// An agent without such pods takes away what an earlier one left.
func TestKernelPath_leftByEarlierAgent(t *testing.T) {
	b, s := newKernelBench(t, preferAll)
	s.pins = true
	b.attach("a", 1)
	b.start()
	eventually(t, func() string {
		if s.pinned() {
			return "the program is there"
		}
		return ""
	})
	if a := b.attachment("a"); a.State != agentapi.StateReady || a.Datapath != "" {
		t.Errorf("attachment %+v", a)
	}
}

// An agent that leaves the node takes everything away, whoever listens.
func TestKernelPath_leave(t *testing.T) {
	leave := make(chan struct{})
	b, s := newKernelBench(t, kernelAll)
	b.cfg.Leave = leave
	p := b.attach("a", 1)
	s.sockets[1] = true
	b.start()
	close(leave)
	if err := <-b.done; err != nil {
		t.Errorf("Run = %v", err)
	}
	b.done = nil
	if !slices.Equal(s.purged, []uint64{1}) || s.pins || s.opened != 0 || p.optionSweeps == 0 {
		t.Errorf("left: %+v, %d sweeps", s, p.optionSweeps)
	}
}

// Rules of pods that ended while no agent was there are forgotten: a rule is when no pod had its namespace at two
// looks, and not that of a pod which an earlier agent attached, and ours cannot yet.
func TestKernelPath_forgets(t *testing.T) {
	b, s := newKernelBench(t, kernelAll)
	b.attach("a", 1)
	b.attach("b", 2)
	for _, id := range []uint64{1, 2, 7, 8} {
		s.pods[id] = kernelpath.PodConfig{}
	}
	a := &agent{cfg: b.cfg}
	a.manager.a, a.manager.pods = a, map[string]*pod{
		"a": {atts: []cni.Attachment{{NetNS: "/netns/a", NetNSID: 1}}, kernel: &kernelPod{net: value(b.kernel.open("/netns/a"))(t)}},
		"b": {atts: []cni.Attachment{{NetNS: "/netns/b", NetNSID: 2}}, state: podFailed},
		"c": {atts: []cni.Attachment{{NetNS: "/netns/gone", NetNSID: 3}}, state: podFailed},
		"d": {atts: []cni.Attachment{{NetNS: "/netns/agents"}}, noKernel: true},
	}
	k := kernelPath{a: a, chooser: s, pods: 1}
	before := b.kernel.handles()
	now := time.Now()
	chosen := func() (ids []uint64) {
		s.change(func() { ids = slices.Sorted(maps.Keys(s.pods)) })
		return ids
	}
	for i, tt := range []struct {
		after time.Duration
		err   error
		comes uint64 // is attached, and in no map yet
		want  []uint64
	}{
		{want: []uint64{1, 2, 7, 8}},
		{after: forgetEvery - 1, want: []uint64{1, 2, 7, 8}},
		{after: 1, err: errors.New("no rights"), want: []uint64{1, 2, 7, 8}},
		{after: forgetEvery, comes: 9, want: []uint64{1, 2, 9}},
		{after: forgetEvery - 1, want: []uint64{1, 2, 9}},
		{after: 1, want: []uint64{1, 2}},
	} {
		now = now.Add(tt.after)
		s.change(func() {
			if s.forgetErr = tt.err; tt.comes != 0 {
				s.pods[tt.comes] = kernelpath.PodConfig{}
			}
		})
		if err := k.forgetLocked(now); !errors.Is(err, tt.err) {
			t.Errorf("%d: %v, want %v", i, err, tt.err)
		}
		if got := chosen(); !slices.Equal(got, tt.want) {
			t.Errorf("%d: chosen are %d, want %d", i, got, tt.want)
		}
	}
	if n := b.kernel.handles(); n != before {
		t.Errorf("%d handles of namespaces, before %d", n, before)
	}
	must(t, a.manager.pods["a"].kernel.net.close())
}

// An agent that hands the node over leaves its pods to the next one as they are.
func TestKernelPath_handover(t *testing.T) {
	b := newHandoverBench(t, "old")
	s := newFakeSMC()
	b.cfg.smc = s
	p := b.attach("a", 1)
	b.configure("  takeover: true\n", kernelAll)
	b.cfg.Node = value(b.cfg.Load())(t)
	b.start()
	next := b.successor("new")
	if a := next.attachment("a"); a.State != agentapi.StateReady || a.Datapath != "Kernel" {
		t.Errorf("attachment %+v", a)
	}
	s.change(func() {
		if s.opened != 1 {
			t.Errorf("the program is open %d times, want that of the second agent: with it the first one would go on, if it gets the node back", s.opened)
		}
	})
	b.stop()
	s.change(func() {
		if _, ok := s.pods[1]; !ok || !s.pins || s.removed != 0 || len(s.purged) != 0 || s.opened != 1 {
			t.Errorf("after the end of the first agent: %+v", s)
		}
	})
	p.k.change(func() {
		if p.k.opened != 1 {
			t.Errorf("%d handles are open, want that of the second agent", p.k.opened)
		}
	})
	must(t, next.store.Delete("a", "eth0"))
	next.sync()
	if s.pinned() {
		t.Error("the program is there without a pod")
	}
}
