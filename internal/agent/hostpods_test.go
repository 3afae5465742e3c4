// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/nftables"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/cni"
	"github.com/smcr-io/kube-smcr/internal/config"
	"github.com/smcr-io/kube-smcr/internal/kernelpath"
	"github.com/smcr-io/kube-smcr/internal/linux"
	"github.com/smcr-io/kube-smcr/internal/smcnl"
	"github.com/smcr-io/kube-smcr/internal/testenv"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
)

const (
	dbCgroup = "/system.slice/db.service"
	dbID     = firstCgroup + 7
	dbHost   = "  hostPods:\n  - {namespace: shop, name: db, cgroup: " + dbCgroup + "}\n"
)

// newHostBench is a node with a pod in its network, whose cgroup is there.
func newHostBench(t *testing.T, policies string) (*bench, *fakeSMC, *fakePod) {
	t.Helper()
	b, s := newBench(t, dbHost, policies), newFakeSMC()
	b.cfg.smc = s
	return b, s, b.kernel.add(cgroupPrefix+dbCgroup, dbID)
}

// hostAttachment is that of a pod in the node's network.
func (b *bench) hostAttachment(pod string) agentapi.Attachment {
	b.t.Helper()
	all := value(b.client.Attachments(b.t.Context()))(b.t).Attachments
	i := slices.IndexFunc(all, func(a agentapi.Attachment) bool { return a.Pod == pod })
	if i < 0 {
		return agentapi.Attachment{}
	}
	return all[i]
}

func (b *bench) awaitHost(pod, state string) {
	b.t.Helper()
	eventually(b.t, func() string {
		if a := b.hostAttachment(pod); a.State != state {
			return "state " + a.State + ": " + a.Detail
		}
		return ""
	})
}

func TestHostPods_comesAndGoes(t *testing.T) {
	b, s, p := newHostBench(t, kernelAll)
	b.start()
	a := b.hostAttachment("shop/db")
	if a.State != agentapi.StateReady || a.Datapath != "Kernel" || a.NetNS != cgroupPrefix+dbCgroup || len(a.Addresses) != 0 || a.Policies[0] != "all" {
		t.Errorf("attachment %+v", a)
	}
	if cfg, ok := s.pod(dbID); !ok || len(cfg.Filter.Peers) != 2 || !slices.Equal(cfg.Filter.Never, []netip.Addr{netip.MustParseAddr("192.0.2.1")}) {
		t.Errorf("attached %t: %+v", ok, cfg)
	}
	p.k.change(func() {
		if p.redir != nil {
			t.Error("the agent diverts in the node's network")
		}
	})

	// The service starts anew, in another cgroup of the same name.
	b.kernel.change(func() { p.isGone = true })
	b.sync()
	eventually(t, func() string { return map[bool]string{false: "it is there"}[b.hostAttachment("shop/db").State == ""] })
	b.kernel.add(cgroupPrefix+dbCgroup, dbID+1)
	b.sync()
	b.awaitHost("shop/db", agentapi.StateReady)
	s.change(func() {
		if _, was := s.pods[dbID]; was || !slices.Equal(s.purged, []uint64{dbID}) {
			t.Errorf("of the cgroup before: attached %t, given up %d", was, s.purged)
		}
		if _, is := s.pods[dbID+1]; !is {
			t.Error("the new one is not attached")
		}
	})
}

// Whoever leaves the configuration leaves the kernel's SMC-R in order: while its programs have sockets of SMC, nothing of it may be on
// SMC-R; that a policy still selects its name changes nothing.
func TestHostPods_notWanted(t *testing.T) {
	b, s, _ := newHostBench(t, kernelAll)
	b.start()
	b.awaitHost("shop/db", agentapi.StateReady)
	s.change(func() { s.sockets[dbID] = true })
	b.configure("", kernelAll)
	b.reload <- struct{}{}
	b.awaitHost("shop/db", agentapi.StateIdle)
	if a := b.hostAttachment("shop/db"); a.Reason != agentapi.CodeOldSockets {
		t.Errorf("attachment %+v", a)
	}
	if _, is := s.pod(dbID); is {
		t.Error("its new sockets are SMC")
	}
	s.change(func() { s.sockets[dbID] = false })
	eventually(t, func() string {
		b.sync()
		if a := b.hostAttachment("shop/db"); a.State != "" {
			return "it is there: " + a.State
		}
		return ""
	})
	s.change(func() {
		if len(s.purged) != 0 || s.pins {
			t.Errorf("given up %d, pinned %t", s.purged, s.pins)
		}
	})
}

// What an earlier agent chose is found by its cgroup, and detached in order; what is gone is forgotten.
func TestHostPods_earlierAgent(t *testing.T) {
	const gone = dbID + 1
	b, s, _ := newHostBench(t, kernelAll)
	b.configure("", "")
	b.cfg.Node = value(config.Parse("test", []byte(b.text)))(t)
	s.pins = true
	s.pods[dbID], s.pods[gone] = kernelpath.PodConfig{}, kernelpath.PodConfig{}
	s.sockets[dbID] = true
	b.start()
	b.awaitHost("/"+dbCgroup, agentapi.StateIdle)
	s.change(func() {
		if len(s.pods) != 0 || len(s.purged) != 0 || !s.pins {
			t.Errorf("chosen %v, given up %d, pinned %t", s.pods, s.purged, s.pins)
		}
		s.sockets[dbID] = false
	})
	eventually(t, func() string {
		b.sync()
		return map[bool]string{true: "pinned"}[s.pinned()]
	})
}

// The pod that an earlier agent chose stays on it if the configuration has it, and is never off it.
func TestHostPods_restart(t *testing.T) {
	b, s, _ := newHostBench(t, kernelAll)
	s.pins, s.pods[dbID] = true, kernelpath.PodConfig{}
	b.start()
	b.awaitHost("shop/db", agentapi.StateReady)
	s.change(func() {
		if s.attached != 1 || len(s.purged) != 0 || s.undone.RMBEBytes != 0 {
			t.Errorf("attached %d times, given up %d, undone %+v", s.attached, s.purged, s.undone)
		}
	})
}

// In a cluster kubelet makes the cgroup. One that does not come is said.
func TestHostPods_cgroupOfKubelet(t *testing.T) {
	b, _, _ := newHostBench(t, kernelAll)
	h := hostPodsOf(b)
	n := &config.Node{KernelPath: config.KernelPath{HostPods: []config.HostPod{{Namespace: "shop", Name: "db", UID: "u1", CgroupUID: "u1"}}}}
	now := time.Now()
	if got := h.attachments(n, nil, now); len(got) != 0 {
		t.Errorf("before it is there: %+v", got)
	}
	now = now.Add(cgroupPatience)
	got := h.attachments(n, nil, now)
	if len(got) != 1 || !isHostPod(got) || got[0].NetNS != lostPrefix+"u1" || podOf(got[0]).String() != "shop/db" {
		t.Errorf("it does not come: %+v", got)
	}
	if _, err := (linuxKernel{}).open(got[0].NetNS); err == nil || !strings.Contains(err.Error(), "hostPID: true") {
		t.Errorf("open: %v", err)
	}
	b.kernel.add(cgroupPrefix+"/kubepods/podu1", dbID)
	if got := h.attachments(n, nil, now); len(got) != 1 || got[0].NetNS != cgroupPrefix+"/kubepods/podu1" || got[0].NetNSID != dbID || got[0].Pod.UID != "u1" {
		t.Errorf("it is there: %+v", got)
	}
	if err := h.close(); err != nil || b.kernel.handles() != 0 {
		t.Errorf("%v, %d handles left", err, b.kernel.handles())
	}
}

func hostPodsOf(b *bench) *hostPods {
	m := &manager{}
	m.init(&agent{cfg: b.cfg})
	m.a.kernelPath.a = m.a
	return &m.hosts
}

// A service that is not there, or whose path is mistyped, is said: first that it may come, then that it did not.
func TestHostPods_serviceMissing(t *testing.T) {
	b, _, p := newHostBench(t, kernelAll)
	p.isGone = true
	b.start()
	if e := value(b.client.Explain(t.Context(), "shop/db", "198.51.100.1:80"))(t); e.Code != agentapi.CodePodFailed || !strings.Contains(e.Verdict, "not there yet") {
		t.Errorf("explanation %+v", e)
	}
	h := hostPodsOf(b)
	now := time.Now()
	if got := h.attachments(b.cfg.Node, nil, now); len(got) != 0 {
		t.Errorf("at once: %+v", got)
	}
	if got := h.attachments(b.cfg.Node, nil, now.Add(cgroupPatience)); len(got) != 1 || got[0].NetNS != cgroupPrefix+dbCgroup || got[0].NetNSID != 0 {
		t.Errorf("later: %+v", got)
	}
	if err := h.close(); err != nil {
		t.Error(err)
	}
}

// The node's nftables are of many: a firewall that is loaded anew may remove the filter.
func TestHostPods_flushed(t *testing.T) {
	b, s, _ := newHostBench(t, kernelAll)
	b.start()
	b.awaitHost("shop/db", agentapi.StateReady)
	s.change(func() { s.flushed = true })
	eventually(t, func() string {
		s.mu.Lock()
		defer s.mu.Unlock()
		return map[bool]string{true: "the filter is not there"}[s.flushed]
	})
	b.awaitHost("shop/db", agentapi.StateReady)
	if !strings.Contains(b.log.String(), "nft flush ruleset") {
		t.Errorf("log %s", b.log.String())
	}
}

// A service that the configuration has in another cgroup leaves the one that it had.
func TestHostPods_otherCgroup(t *testing.T) {
	const newCgroup, newID = "/system.slice/db2.service", dbID + 1
	b, s, _ := newHostBench(t, kernelAll)
	b.start()
	b.awaitHost("shop/db", agentapi.StateReady)
	b.kernel.add(cgroupPrefix+newCgroup, newID)
	b.configure("  hostPods:\n  - {namespace: shop, name: db, cgroup: "+newCgroup+"}\n", kernelAll)
	b.reload <- struct{}{}
	eventually(t, func() string {
		_, old := s.pod(dbID)
		_, is := s.pod(newID)
		return map[bool]string{true: "the old one is chosen, or the new one is not"}[old || !is]
	})
}

// What an earlier agent chose stays as it is while the configuration's pods cannot be found, and nothing is taken from the node.
func TestHostPods_leftAndNotFound(t *testing.T) {
	b, s, _ := newHostBench(t, kernelAll)
	s.pins, s.pods[dbID] = true, kernelpath.PodConfig{}
	h := hostPodsOf(b)
	now := time.Now()
	none := &config.Node{}
	b.kernel.pathsErr = linux.ErrTooMuch
	h.m.a.node.Store(none)
	if got := h.attachments(none, nil, now); len(got) != 0 || h.settled.Load() {
		t.Errorf("not looked for: %+v, settled: %t", got, h.settled.Load())
	}
	h.m.a.kernelPath.tidy()
	b.kernel.pathsErr, b.kernel.findErr = nil, linux.ErrTooMuch
	wanted := &config.Node{KernelPath: config.KernelPath{HostPods: []config.HostPod{{Namespace: "shop", Name: "web", UID: "u2", CgroupUID: "u2"}}}}
	if got := h.attachments(wanted, nil, now); len(got) != 0 || h.settled.Load() {
		t.Errorf("not found: %+v, settled: %t", got, h.settled.Load())
	}
	h.m.a.kernelPath.tidy()
	if _, is := s.pod(dbID); !is || !s.pinned() || s.removed != 0 {
		t.Error("what was left is not there any more")
	}
	b.kernel.findErr = nil
	got := h.attachments(wanted, nil, now)
	if len(got) != 1 || got[0].NetNSID != dbID {
		t.Fatalf("found: %+v", got)
	}
	got = h.attachments(none, map[string]*pod{got[0].NetNS: {atts: got}}, now)
	if len(got) != 1 || !h.settled.Load() {
		t.Errorf("while nobody knows that it is off its kernel's SMC-R: %+v, settled: %t", got, h.settled.Load())
	}
	if err := errors.Join(h.close(), h.m.a.kernelPath.close()); err != nil {
		t.Error(err)
	}
}

// A pod whose cgroup is not found keeps nobody from forgetting the rules of pods that are gone.
func TestHostPods_lostAndForgetting(t *testing.T) {
	b, _, _ := newHostBench(t, kernelAll)
	b.cfg.kernel = linuxKernel{}
	h := hostPodsOf(b)
	h.m.put("lost", &pod{atts: []cni.Attachment{{NetNS: lostPrefix + "u1"}}})
	_, done, err := h.m.chosen()
	done()
	if err != nil {
		t.Error(err)
	}
}

// A pod that is on its kernel's SMC-R, and that the configuration has no more, stays until it is off it, or its cgroup is gone: also when
// nobody can look whether it is.
func TestHostPods_staysUntilGone(t *testing.T) {
	b, _, p := newHostBench(t, kernelAll)
	h := hostPodsOf(b)
	att := cni.Attachment{NetNS: cgroupPrefix + dbCgroup, NetNSID: dbID}
	have := map[string]*pod{att.NetNS: {atts: []cni.Attachment{att}, kernel: &kernelPod{net: p}}}
	is := func(what string, want int) {
		t.Helper()
		if got := h.attachments(&config.Node{}, have, time.Now()); len(got) != want {
			t.Errorf("%s: %+v, want %d", what, got, want)
		}
	}
	b.kernel.cgroupErr = errors.New("no cgroup v2")
	is("out of sight", 1)
	b.kernel.cgroupErr = nil
	is("there", 1)
	p.isGone = true
	is("gone", 0)
	p.isGone = false
	have[att.NetNS].noKernel = true
	is("off it", 0)
	if err := h.close(); err != nil || b.kernel.handles() != 0 {
		t.Errorf("%v, %d handles left", err, b.kernel.handles())
	}
}

// A node that cannot look at cgroups says so once, and of each such pod.
func TestHostPods_noCgroups(t *testing.T) {
	b, _, _ := newHostBench(t, kernelAll)
	b.kernel.cgroupErr = errors.New("no cgroup v2")
	b.start()
	b.sync()
	b.sync()
	if text := b.log.String(); strings.Count(text, "no cgroup v2") != 1 {
		t.Errorf("log %s", text)
	}
	b.kernel.change(func() { b.kernel.cgroupErr = nil })
	b.sync()
	b.awaitHost("shop/db", agentapi.StateReady)
}

// Where the kernel cannot carry such a pod nobody does, and explain says why.
func TestHostPods_unfit(t *testing.T) {
	for _, datapath := range []string{"Kernel", "KernelIfAvailable"} {
		t.Run(datapath, func(t *testing.T) {
			b, s, p := newHostBench(t, "policies:\n- {name: all, datapath: "+datapath+"}\n")
			s.fitErr = kernelpath.ErrUnfitHost
			b.start()
			a := b.hostAttachment("shop/db")
			if want := map[string]string{"Kernel": agentapi.StateFailed, "KernelIfAvailable": agentapi.StateIdle}[datapath]; a.State != want || !strings.Contains(a.Detail, "no active RDMA device") {
				t.Errorf("attachment %+v", a)
			}
			e := value(b.client.Explain(t.Context(), "shop/db", "198.51.100.1:80"))(t)
			if e.Code != agentapi.CodePodFailed || !strings.Contains(e.Verdict, "no active RDMA device") {
				t.Errorf("explanation %+v", e)
			}
			p.k.change(func() {
				if p.redir != nil {
					t.Error("the agent diverts")
				}
			})
		})
	}
}

// Several pods have the node's addresses: of each its own connections are told, and what fell back.
func TestHostPods_explained(t *testing.T) {
	const webCgroup, webID = "/system.slice/web.service", dbID + 1
	b, s, _ := newHostBench(t, kernelAll)
	b.configure(dbHost+"  - {namespace: shop, name: web, cgroup: "+webCgroup+"}\n", kernelAll)
	b.cfg.Node = value(config.Parse("test", []byte(b.text)))(t)
	b.kernel.add(cgroupPrefix+webCgroup, webID)
	local, peer := netip.MustParseAddrPort("192.0.2.1:40000"), netip.MustParseAddrPort("198.51.100.1:80")
	conn := kernelpath.Conn{Socket: smcnl.Socket{State: "ACTIVE", Mode: smcnl.ModeSMCR, Role: smcnl.Client, Local: local, Peer: peer, Cookie: 5}}
	s.witness.all = map[uint64][]kernelpath.Conn{dbID: {conn}}
	b.start()
	s.witness.told(kernelpath.Fallback{Cgroup: webID, Local: local, Peer: peer, Reason: clc.ReasonPeerNoSMC})
	s.witness.told(kernelpath.Fallback{Cgroup: 99, Local: local, Peer: peer, Reason: clc.ReasonPeerNoSMC}) // of a pod that is gone
	if e := value(b.client.Explain(t.Context(), "shop/db", peer.String()))(t); e.Code != agentapi.CodeOK || len(e.Live) != 1 || len(e.Recent) != 0 {
		t.Errorf("of the one that is on it: %+v", e)
	}
	e := value(b.client.Explain(t.Context(), "shop/web", peer.String()))(t)
	if e.Code != agentapi.CodeOf(clc.ReasonPeerNoSMC) || len(e.Live) != 0 || len(e.Recent) != 1 || e.Recent[0].Pod != "shop/web" {
		t.Errorf("of the one that fell back: %+v", e)
	}
	// As the server's side: of the pod that has such a connection.
	s.change(func() { s.witness.all = nil })
	s.witness.told(kernelpath.Fallback{Cgroup: webID, Local: netip.MustParseAddrPort("192.0.2.1:80"), Peer: netip.MustParseAddrPort("198.51.100.1:999"), Inbound: true, Reason: clc.ReasonPeerNoSMC})
	if e := value(b.client.Explain(t.Context(), "198.51.100.1", "192.0.2.1:80"))(t); e.Pod != "shop/web" || e.Code != agentapi.CodeOf(clc.ReasonPeerNoSMC) {
		t.Errorf("of a server: %+v", e)
	}
	if e := value(b.client.Explain(t.Context(), "198.51.100.1", "192.0.2.1:81"))(t); e.Code != agentapi.CodeNotAttached {
		t.Errorf("of one of two: %+v", e)
	}
	s.change(func() { s.witness.all = map[uint64][]kernelpath.Conn{dbID: {conn}} })
	all := value(b.client.Conns(t.Context()))(t).Conns
	if len(all) != 1 || all[0].Pod != "shop/db" || all[0].Datapath != "Kernel" {
		t.Errorf("connections %+v", all)
	}
}

// fakeChoices are rules of cgroups.
type fakeChoices map[uint64]bool

func (c fakeChoices) Others([]linux.Place) (out []kernelpath.Choice, _ error) {
	for id := range c {
		out = append(out, kernelpath.Choice{Cgroup: id})
	}
	return out, nil
}

func (c fakeChoices) Forget(x kernelpath.Choice) error {
	delete(c, x.Cgroup)
	return nil
}

// A cgroup whose filter has no rule any more, or not yet, is known by the filter, and keeps it when another one is forgotten.
func TestLinuxChooser_filterWithoutRule(t *testing.T) {
	testenv.Need(t, testenv.Root, testenv.NetAdmin, testenv.Nftables)
	const gone, leaving = 7, 8
	ns := value(linux.ScratchNetNS())(t)
	defer func() { must(t, ns.Close()) }()
	must(t, ns.Do(func() error {
		nft := value(nftables.New())(t)
		for _, name := range []string{"kube-smcr-option-7", "kube-smcr-option-8", "kube-smcr-option", "kube-smcr-option-x", "kube-smcr-option-09"} {
			nft.AddTable(&nftables.Table{Family: nftables.TableFamilyINet, Name: name})
		}
		must(t, nft.Flush())
		rules := fakeChoices{gone: true}
		others := value(othersOf(rules, ns, nil))(t)
		if want := []kernelpath.Choice{{Cgroup: gone}, {Cgroup: leaving}}; !slices.Equal(others, want) {
			t.Errorf("others %v, want %v", others, want)
		}
		must(t, forgetOf(rules, ns, kernelpath.Choice{Cgroup: gone}))
		if left := value(linux.OptionFilters(ns))(t); !slices.Equal(left, []uint64{leaving}) || len(rules) != 0 {
			t.Errorf("filters of %d, rules of %v", left, rules)
		}
		must(t, sweepCgroups(ns))
		if left := value(nft.ListTablesOfFamily(nftables.TableFamilyINet))(t); len(left) != 3 {
			t.Errorf("%d tables are left", len(left))
		}
		return nil
	}))
}
