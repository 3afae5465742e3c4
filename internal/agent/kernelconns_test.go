// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/cni"
	"github.com/smcr-io/kube-smcr/internal/kernelpath"
	"github.com/smcr-io/kube-smcr/internal/smcnl"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
)

// fakeWitness is what a fakeSMC tells of its connections.
type fakeWitness struct {
	all    map[uint64][]kernelpath.Conn // by the namespace
	shared []smcnl.Group
	failed error
	count  map[uint64]smcnl.Counters

	noCookie error
	told     func(kernelpath.Fallback) // who wants to know of fallbacks
	watchErr error
}

func (s *fakeSMC) counters(n podNet) (smcnl.Counters, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.witness.count[n.id()], s.witness.failed
}

// cookie is the inode of a namespace, as others has it.
func (s *fakeSMC) cookie(n podNet) (uint64, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return n.id(), s.witness.noCookie
}

func (s *fakeSMC) conns(n podNet) ([]kernelpath.Conn, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.witness.all[n.id()], s.witness.failed
}

func (s *fakeSMC) groups() ([]smcnl.Group, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.witness.shared, s.witness.failed
}

var (
	gidOfNode, gidOfPeer = netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.0.2")
	groupOfNode          = smcnl.Group{
		ID: 0x300, Role: smcnl.Server, Redundancy: "SINGLE", Conns: 1, Version: 2, Release: 1, EID: "KUBE-SMCR", PeerHost: "g2", RMBBytes: 65536,
		Links: []smcnl.Link{{ID: 1, Device: "rxe0", GID: gidOfNode, PeerGID: gidOfPeer, Conns: 1, State: "ACTIVE", UserID: 9}},
	}
)

// kernelConn is a connection of the pod 127.0.0.1 with a peer's port, on SMC-R.
func kernelConn(cookie uint64, role smcnl.Side, local, peer string) kernelpath.Conn {
	return kernelpath.Conn{Inbound: role == smcnl.Server, Socket: smcnl.Socket{
		State: smcnl.StateActive, Mode: smcnl.ModeSMCR, Local: netip.MustParseAddrPort(local), Peer: netip.MustParseAddrPort(peer),
		Cookie: cookie, Token: 24, SendBufBytes: 1, RMBEBytes: 2, PeerRMBEBytes: 3, LinkID: 1, Device: "rxe0", GID: gidOfNode, PeerGID: gidOfPeer, Role: role,
	}}
}

// fellBack is such a connection that is TCP.
func fellBack(local, peer string, why, peers clc.Reason) kernelpath.Conn {
	c := kernelConn(5, smcnl.Client, local, peer)
	c.Mode, c.Role, c.Reason, c.PeerReason, c.LinkID = smcnl.ModeTCP, "", why, peers, 0
	return c
}

// The connections and link groups of pods' kernels are among the agent's, and explained.
func TestKernelConns(t *testing.T) {
	b, s := newKernelBench(t, kernelAll)
	s.witness = fakeWitness{shared: []smcnl.Group{groupOfNode}, all: map[uint64][]kernelpath.Conn{1: {
		kernelConn(7, smcnl.Server, "127.0.0.1:80", "198.51.100.1:40000"),
		fellBack("127.0.0.1:40001", "198.51.100.1:80", clc.ReasonPeerNoSMC, clc.ReasonNone),
	}}}
	b.attach("a", 1)
	b.start()
	want := []agentapi.Conn{{
		ID: 7, Pod: "test/a", Datapath: "Kernel", Direction: agentapi.Inbound, Mode: "SMC-R", Policy: "all", LinkGroup: 0x300, Link: 1, Version: 2,
		Source: netip.MustParseAddrPort("198.51.100.1:40000"), Dest: netip.MustParseAddrPort("127.0.0.1:80"),
		Token: 24, State: "ACTIVE", SendBuffer: 1, RMBE: 2, PeerRMBE: 3,
	}, {
		ID: 5, Pod: "test/a", Datapath: "Kernel", Direction: agentapi.Outbound, Mode: "TCP", Policy: "all",
		Source: netip.MustParseAddrPort("127.0.0.1:40001"), Dest: netip.MustParseAddrPort("198.51.100.1:80"),
		Reason: "PEERNOSMC", Detail: "the kernel says 0x03010000 PEERNOSMC", Token: 24, State: "ACTIVE", SendBuffer: 1, RMBE: 2, PeerRMBE: 3,
	}}
	same := cmp.Comparer(func(x, y netip.AddrPort) bool { return x == y })
	if diff := cmp.Diff(want, value(b.client.Conns(t.Context()))(t).Conns, same); diff != "" {
		t.Errorf("connections: -want +got:\n%s", diff)
	}
	if of := value(b.client.ConnsOf(t.Context(), "test/a"))(t).Conns; len(of) != len(want) {
		t.Errorf("of the pod: %+v", of)
	}
	if code, body := b.get("/v1/conns?pod=test/b"); code != 200 || !strings.Contains(body, `"conns":[]`) {
		t.Errorf("of another pod: %d, %s", code, body)
	}
	groups := value(b.client.Links(t.Context()))(t)
	if len(groups.LinkGroups) != 1 {
		t.Fatalf("link groups %+v", groups)
	}
	if g := groups.LinkGroups[0]; g.Datapath != "Kernel" || g.ID != 0x300 || g.Pod != "" || g.Role != "server" || g.State != "ACTIVE" || g.EID != "KUBE-SMCR" ||
		len(g.Links) != 1 || g.Links[0].Device != "rxe0" || g.Links[0].LocalGID != "10.0.0.1" || g.Links[0].PeerGID != "10.0.0.2" {
		t.Errorf("link group %+v", g)
	}
	for _, tt := range []struct {
		source, destination string
		code                agentapi.Code
		verdict             string
		live                int
	}{
		{"198.51.100.1", "127.0.0.1:80", agentapi.CodeOK, "on SMC-R of the pod's kernel: 1 connection now", 1},
		{"test/a", "198.51.100.1:80", "PEERNOSMC", "0x03010000", 1},
		{"test/a", "198.51.100.2:80", agentapi.CodeUnseen, "no such connection is open", 0},
		{"test/a", "192.0.2.1:80", agentapi.CodeSameNode, "on this node", 0},
	} {
		e := value(b.client.Explain(t.Context(), tt.source, tt.destination))(t)
		if e.Code != tt.code || !strings.Contains(e.Verdict, tt.verdict) || len(e.Live) != tt.live || e.Problem != "" {
			t.Errorf("%s to %s: %+v", tt.source, tt.destination, e)
		}
	}
	s.change(func() { s.witness.failed = errors.New("no module smc_diag") })
	for what, problem := range map[string]string{
		"connections": value(b.client.Conns(t.Context()))(t).Problem,
		"link groups": value(b.client.Links(t.Context()))(t).Problem,
		"explanation": value(b.client.Explain(t.Context(), "test/a", "198.51.100.1:80"))(t).Problem,
	} {
		if !strings.Contains(problem, "no module smc_diag") {
			t.Errorf("%s: problem %q", what, problem)
		}
	}
}

// What a pod's kernel made TCP is known when it is over, too, with why; that of others is not the agent's to tell. Who
// cannot watch that goes on without.
func TestKernelFallbacks(t *testing.T) {
	for _, watchErr := range []error{nil, errors.New("no such tracepoint")} {
		b, s := newKernelBench(t, kernelAll)
		s.witness.watchErr = watchErr
		b.attach("a", 1)
		b.start()
		at := netip.MustParseAddrPort
		for _, f := range []kernelpath.Fallback{
			{NetNS: 1, Local: at("127.0.0.1:40001"), Peer: at("198.51.100.1:80"), Reason: clc.ReasonPeerNoSMC},
			{NetNS: 1, Local: at("127.0.0.1:40002"), Peer: at("198.51.100.1:81"), Reason: clc.ReasonPeerNoSMC}, // no policy has that port
			{NetNS: 1, Local: at("127.0.0.1:40003"), Peer: at("192.0.2.1:80"), Reason: clc.ReasonPeerNoSMC},
			{NetNS: 1, Local: at("127.0.0.1:80"), Peer: at("198.51.100.2:40004"), Inbound: true, Reason: clc.ReasonPeerDecl, PeerReason: clc.ReasonNoDev},
			{NetNS: 1, Local: at("127.0.0.1:40005"), Peer: at("198.51.100.5:80"), IPv6: true, Reason: clc.ReasonNoDev},
			{NetNS: 1, Local: at("127.0.0.9:40006"), Peer: at("198.51.100.6:80"), Reason: clc.ReasonPeerNoSMC}, // of nobody
			{NetNS: 3, Local: at("127.0.0.1:40007"), Peer: at("198.51.100.7:80"), Reason: clc.ReasonPeerNoSMC}, // of nobody's namespace
		} {
			s.witness.told(f)
		}
		for _, tt := range []struct {
			source, destination string
			code                agentapi.Code
			declined            bool
			verdict, detail     string
		}{
			{"test/a", "198.51.100.1:80", "PEERNOSMC", false, "plain TCP, as the pod's kernel found", "0x03010000"},
			{"test/a", "198.51.100.1:81", agentapi.CodeNoPolicy, false, "plain TCP", "0x03010000"},
			{"test/a", "192.0.2.1:80", agentapi.CodeSameNode, false, "on this node", "0x03010000"},
			{"198.51.100.2", "127.0.0.1:80", "NOSMCDEV", true, "plain TCP, as the pod's kernel found", "the peer 0x03030000"},
			{"test/a", "198.51.100.5:80", "NOSMCDEV", false, "plain TCP, as the pod's kernel found", "one of IPv6"},
		} {
			e := value(b.client.Explain(t.Context(), tt.source, tt.destination))(t)
			if e.Code != tt.code || !strings.Contains(e.Verdict, tt.verdict) || len(e.Recent) != 1 {
				t.Errorf("%s to %s: %+v", tt.source, tt.destination, e)
				continue
			}
			if d := e.Recent[0]; d.Pod != "test/a" || d.Mode != "TCP" || d.Reason != tt.code || d.PeerDeclined != tt.declined || !strings.Contains(d.Detail, tt.detail) {
				t.Errorf("%s to %s: %+v", tt.source, tt.destination, d)
			}
		}
		if e := value(b.client.Explain(t.Context(), "127.0.0.9", "198.51.100.6:80"))(t); len(e.Recent) > 0 {
			t.Errorf("of nobody's pod: %+v", e.Recent)
		}
	}
}

// TestKernelFallbacks_sameAddress: of two pods in two networks that have one address, the namespace tells whose connection fell back.
func TestKernelFallbacks_sameAddress(t *testing.T) {
	b, s := newKernelBench(t, kernelAll)
	b.attach("a", 1)
	b.attach("b", 2)
	b.start()
	local, peer := netip.MustParseAddrPort("127.0.0.1:40001"), netip.MustParseAddrPort("198.51.100.1:80")
	for netns, want := range map[uint64]string{1: "test/a", 2: "test/b"} {
		peer = netip.AddrPortFrom(peer.Addr().Next(), 80)
		s.witness.told(kernelpath.Fallback{NetNS: netns, Local: local, Peer: peer, Reason: clc.ReasonPeerNoSMC})
		if e := value(b.client.Explain(t.Context(), want, peer.String()))(t); len(e.Recent) != 1 || e.Recent[0].Pod != want {
			t.Errorf("%s: %+v", want, e.Recent)
		}
	}
}

// TestKernelPath_noCookie: a pod whose namespace does not tell its cookie is not attached, and leaves nothing open.
func TestKernelPath_noCookie(t *testing.T) {
	b, s := newKernelBench(t, kernelAll)
	s.witness.noCookie = errors.New("no cookie here")
	b.attach("a", 1)
	b.start()
	if a := b.attachment("a"); a.State != agentapi.StateFailed || !strings.Contains(a.Detail, "no cookie here") {
		t.Errorf("attachment %+v", a)
	}
	must(t, b.store.Delete("a", "eth0"))
	b.sync()
	s.change(func() {
		if s.opened != 0 || len(s.pods) > 0 {
			t.Errorf("%d open, pods %v", s.opened, s.pods)
		}
	})
}

// What fell back a while ago says nothing of the next connection.
func TestKernelVerdict_longAgo(t *testing.T) {
	for _, tt := range []struct {
		ago  time.Duration
		code agentapi.Code
		text string
	}{
		{fellBackLately - time.Second, "PEERNOSMC", "plain TCP, as the pod's kernel found 59s ago"},
		{fellBackLately + time.Second, agentapi.CodeUnseen, "1m1s ago one was plain TCP"},
	} {
		e := agentapi.Explanation{Recent: []agentapi.Decision{{Mode: "TCP", Reason: "PEERNOSMC", Last: time.Now().Add(-tt.ago)}}}
		if code, text := kernelVerdict(&e, false); code != tt.code || !strings.Contains(text, tt.text) {
			t.Errorf("%s: %s", code, text)
		}
	}
}

// A connection that the kernel finds no device for because of its socket's family says so; a device that is missing is
// not taken for that.
func TestWhyOfKernel_family(t *testing.T) {
	for _, tt := range []struct {
		six    bool
		reason clc.Reason
		hint   bool
	}{
		{true, clc.ReasonNoDev, true},
		{false, clc.ReasonNoDev, false},
		{true, clc.ReasonPeerNoSMC, false},
	} {
		why := whyOfKernel(&smcnl.Socket{IPv6: tt.six, Reason: tt.reason})
		if why.code != agentapi.CodeOf(tt.reason) || strings.Contains(why.detail, "one of IPv6") != tt.hint {
			t.Errorf("IPv6 %t, %v: %+v", tt.six, tt.reason, why)
		}
	}
}

// A connection that the kernel finds no device for says by which of the pod's interfaces it is, where there are several.
func TestWrongInterface(t *testing.T) {
	ips := func(all ...string) (out []netip.Prefix) {
		for _, a := range all {
			out = append(out, netip.MustParsePrefix(a))
		}
		return out
	}
	first := cni.Attachment{IfName: "eth0", IPs: ips("10.244.1.2/24")}
	second := cni.Attachment{IfName: "net1", IPs: ips("192.0.2.2/24"), Devices: []cni.AttachedDevice{{ID: "0000:41:10.2", IfName: "net1", IPs: ips("192.0.2.2/24")}}}
	claimed := cni.Attachment{IfName: "eth0", IPs: ips("10.244.1.2/24"), Devices: []cni.AttachedDevice{{ID: "0000:41:10.2", IfName: "smcr0", IPs: ips("192.0.2.2/24")}}}
	for _, tt := range []struct {
		name   string
		atts   []cni.Attachment
		local  string
		reason clc.Reason
		want   string
	}{
		{"by the first network", []cni.Attachment{first, second}, "10.244.1.2", clc.ReasonNoDev, "by eth0, and the kernel uses no RDMA device but that of the interface which a connection is by: the pod has net1, too"},
		{"by that of the VF, whose port is down", []cni.Attachment{first, second}, "192.0.2.2", clc.ReasonNoDev, "by net1"},
		{"beside a claimed VF", []cni.Attachment{claimed}, "10.244.1.2", clc.ReasonNoDev, "the pod has smcr0, too"},
		{"for another reason", []cni.Attachment{first, second}, "10.244.1.2", clc.ReasonPeerNoSMC, ""},
		{"of a pod with one interface", []cni.Attachment{first}, "10.244.1.2", clc.ReasonNoDev, ""},
		{"by an address that no record has", []cni.Attachment{first, second}, "10.9.9.9", clc.ReasonNoDev, ""},
	} {
		got := wrongInterface(tt.atts, netip.MustParseAddr(tt.local), tt.reason)
		if tt.want == "" && got != "" || !strings.Contains(got, tt.want) {
			t.Errorf("%s: %q, want %q in it", tt.name, got, tt.want)
		}
	}
}

// An agent without such pods does not show what others do with the kernel's SMC-R.
func TestKernelConns_unused(t *testing.T) {
	b, s := newKernelBench(t, preferAll)
	s.witness.shared = []smcnl.Group{groupOfNode}
	b.attach("a", 1)
	b.start()
	if l := value(b.client.Links(t.Context()))(t); slices.ContainsFunc(l.LinkGroups, func(g agentapi.LinkGroup) bool { return g.Datapath != "" }) || l.Problem != "" {
		t.Errorf("link groups %+v", l)
	}
}

// What the kernel says of a connection that fell back, in our codes.
func TestKernelConn_reasons(t *testing.T) {
	const local = "127.0.0.1:40001"
	b := newBare(t, newBench(t, "", kernelAll))
	b.a.cfg.smc = newFakeSMC()
	p := &pod{atts: []cni.Attachment{{}}}
	for _, tt := range []struct {
		name   string
		conn   kernelpath.Conn
		want   agentapi.Code
		detail string
	}{
		{"the peer has none", fellBack(local, "198.51.100.1:80", clc.ReasonPeerNoSMC, 0), "PEERNOSMC", "0x03010000"},
		{"no policy, so the filter erased the option", fellBack(local, "198.51.100.1:81", clc.ReasonPeerNoSMC, 0), agentapi.CodeNoPolicy, "0x03010000"},
		{"the same node", fellBack(local, "192.0.2.1:80", clc.ReasonPeerNoSMC, 0), agentapi.CodeSameNode, "0x03010000"},
		{"no policy, and it was not that", fellBack(local, "198.51.100.1:81", clc.ReasonNoDev, 0), "NOSMCDEV", "0x03030000"},
		{"the peer declined", fellBack(local, "198.51.100.1:80", clc.ReasonPeerDecl, clc.ReasonNoDevR), "NOSMCRDEV", "the peer 0x03030002 NOSMCRDEV"},
		{"the peer declined and said nothing", fellBack(local, "198.51.100.1:80", clc.ReasonPeerDecl, 0), "PEERDECL", "0x05000000"},
		{"a code of a newer kernel", fellBack(local, "198.51.100.1:80", 0x0a0b0c0d, 0), agentapi.CodeUnknownReason, "0x0a0b0c0d"},
		{"which of several is not known", fellBack("0.0.0.0:40001", "0.0.0.0:81", clc.ReasonPeerNoSMC, 0), "PEERNOSMC", "0x03010000"},
	} {
		c := b.a.kernelConn(b.a.node.Load(), p, &tt.conn, nil)
		if c.Mode != "TCP" || c.Reason != tt.want || !strings.Contains(c.Detail, tt.detail) {
			t.Errorf("%s: %s %q, want %s and %q", tt.name, c.Reason, c.Detail, tt.want, tt.detail)
		}
	}
}

// A connection is of the one link group that has a link between its GIDs, as client or as server.
func TestGroupOf(t *testing.T) {
	c := kernelConn(1, smcnl.Server, "127.0.0.1:80", "198.51.100.1:40000")
	other := groupOfNode
	other.ID = 0x400
	client := groupOfNode
	client.Role = smcnl.Client
	elsewhere := groupOfNode
	elsewhere.Links = []smcnl.Link{{ID: 1, Device: "rxe0", GID: gidOfNode, PeerGID: gidOfNode}}
	if g := groupOf(&c.Socket, []smcnl.Group{client, elsewhere, groupOfNode}); g == nil || g.ID != 0x300 || g.Role != smcnl.Server {
		t.Errorf("%+v", g)
	}
	if g := groupOf(&c.Socket, []smcnl.Group{groupOfNode, other}); g != nil {
		t.Errorf("of two that have it: %+v", g)
	}
}

func TestStateOfKernel(t *testing.T) {
	for want, states := range map[string][]string{"ACTIVE": {"ACTIVATING", "ACTIVE"}, "FORMING": {"ACTIVATING"}, "CLOSED": {"INACTIVE"}} {
		var g smcnl.Group
		for _, s := range states {
			g.Links = append(g.Links, smcnl.Link{State: s})
		}
		if got := stateOfKernel(&g); got != want {
			t.Errorf("%q: %s, want %s", states, got, want)
		}
	}
}

// There are no more than asked for, and it is said how many are left out, of this pod and of the next.
func TestKernelConns_most(t *testing.T) {
	b, s := newKernelBench(t, kernelAll)
	a := newBare(t, b).a
	for i := range uint64(5) {
		s.witness.all = map[uint64][]kernelpath.Conn{1: append(s.witness.all[1], kernelConn(i, smcnl.Server, "127.0.0.1:80", "198.51.100.1:40000"))}
	}
	s.witness.all[2] = s.witness.all[1][:2]
	for name, id := range map[string]uint64{"/netns/a": 1, "/netns/b": 2} {
		b.kernel.add(name, id)
		n := value(b.kernel.open(name))(t)
		defer func() { must(t, n.close()) }()
		a.manager.put(name, &pod{atts: []cni.Attachment{{}}, kernel: &kernelPod{net: n}})
	}
	got, more, err := a.kernelConns(3, func(*pod) bool { return true })
	if err != nil || len(got) != 3 || more != 4 || slices.ContainsFunc(got, func(c agentapi.Conn) bool { return c.Pod == "" }) {
		t.Errorf("%+v, and %d more, want 4; %v", got, more, err)
	}
}
