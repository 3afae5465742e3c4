// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/smcr-io/kube-smcr/internal/agent/rnics"
	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/cni"
	"github.com/smcr-io/kube-smcr/internal/config"
	"github.com/smcr-io/kube-smcr/internal/linux"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
)

// manage makes a pod one of the manager's. The change, if given, comes before that.
func (b *bare) manage(px *proxy, change func(*pod)) *pod {
	b.t.Helper()
	p := &pod{atts: *px.atts.Load(), state: podReady, proxy: px, set: b.a.rnics.Node()}
	if change != nil {
		change(p)
	}
	b.a.manager.put(p.atts[0].NetNS, p)
	return p
}

// counted is a peerConn with the Info that a test gives it.
type counted struct {
	plainTCP
	info smcr.Info
}

func (c counted) Info() smcr.Info { return c.info }

// TestView_explainQuestions: the answer to a malformed question says what a question looks like.
func TestView_explainQuestions(t *testing.T) {
	v := View{newAbleBare(t, "", preferAll).a}
	for _, tt := range []struct{ source, destination, want string }{
		{"test/a", "192.0.2.9", `destination "192.0.2.9": want ADDRESS:PORT, IPv6 as [ADDRESS]:PORT`},
		{"test/a", "fd00::1:80", `destination "fd00::1:80": want ADDRESS:PORT`},
		{"test/a", "", `destination ""`},
		{"a", "192.0.2.9:80", `source "a": want an address, or NAMESPACE/NAME of a pod on this node`},
		{"", "192.0.2.9:80", `source ""`},
	} {
		if _, err := v.Explain(tt.source, tt.destination); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("Explain(%q, %q) = %v, want %q", tt.source, tt.destination, err, tt.want)
		}
	}
}

// TestView_explain: of several verdicts that apply, the first one of the list is given. Each case
// adds what leads to the verdict before it, counted from the end of the list.
func TestView_explain(t *testing.T) {
	const dst = "192.0.2.9:80"
	b := newAbleBare(t, "", preferAll)
	p := b.proxy("a")
	m := b.manage(p.px, nil)
	s := p.live(t, dst) // connecting
	decide := func(mode string, code agentapi.Code, declined bool) func() {
		return func() {
			p.px.record(s, mode, fallback{code: code, peerDeclined: declined})
		}
	}
	for _, tt := range []struct {
		name    string
		add     func()
		code    agentapi.Code
		verdict string
	}{
		{"nothing was seen", func() {}, agentapi.CodeUnseen, "selected by policy all, but no connection was seen yet"},
		{"carried before", decide("SMC-R", "", false), agentapi.CodeOK, "on SMC-R, the last time "},
		{"plain TCP before", decide("TCP", "NOSMCDEV", true), "NOSMCDEV", "plain TCP: the peer declined: " + agentapi.Code("NOSMCDEV").Text()},
		{"reset before", decide("reset", agentapi.CodeConnect, false), agentapi.CodeConnect, "reset: " + agentapi.CodeConnect.Text()},
		{"the diversion pauses", func() { p.px.pausing.Store(&pause{code: agentapi.CodeBudgetRelays}) }, agentapi.CodeBudgetRelays, "nothing of the pod is diverted for now"},
		{"left alone", func() { p.px.bypass(s, "PEERNOSMC", false) }, "PEERNOSMC", "not diverted for another "},
		{"on SMC-R now", func() { s.setPeerConn(counted{}, "SMC-R", "") }, agentapi.CodeOK, "on SMC-R: 1 connection now"},
		{"set-up failed", func() { m.state, m.err = podFailed, errors.New("no nftables") }, agentapi.CodePodFailed, "the pod could not be set up: no nftables"},
		{"node", func() { b.a.unable = unable{"no BPF here", agentapi.CodeNoOption} }, agentapi.CodeNoOption, "plain TCP: no BPF here"},
		{"required all the same", func() { b.put("", requireAll) }, agentapi.CodePodFailed, "the pod could not be set up"},
		{"not selected", func() { b.put("", "policies:\n- {name: p, ports: [9]}\n") }, agentapi.CodeNoPolicy, "plain TCP: "},
	} {
		tt.add()
		for _, source := range []string{"test/a", "127.0.0.1", "::ffff:127.0.0.1"} {
			e, err := View{b.a}.Explain(source, "[::ffff:192.0.2.9]:80")
			must(t, err)
			advice := tt.code.Advice()
			if tt.code == agentapi.CodeBudgetRelays { // the detail names the budget, and how much of it is used
				advice = "raise node.budgets.pod.relays of the agent's configuration file, or narrow the policies to peers that have SMC-R"
			}
			if e.Code != tt.code || !strings.Contains(e.Verdict, tt.verdict) || e.Pod != "test/a" || e.Advice != advice || len(e.Live) != 1 {
				t.Errorf("%s, from %s: %+v, want %q (%s)", tt.name, source, e, tt.code, tt.verdict)
			}
		}
	}
}

// TestView_explainCounts: the verdict counts the connections that are on SMC-R, and not those beside them that are plain
// TCP or being set up.
func TestView_explainCounts(t *testing.T) {
	const dst = "192.0.2.9:80"
	b := newAbleBare(t, "", preferAll)
	p := b.proxy("a")
	b.manage(p.px, nil)
	p.live(t, dst) // connecting
	p.live(t, dst).setPeerConn(counted{}, "TCP", agentapi.CodeBudgetConns)
	p.live(t, dst).setPeerConn(counted{}, "SMC-R", "")
	e := value(View{b.a}.Explain("test/a", dst))(t)
	if len(e.Live) != 3 || e.Verdict != "on SMC-R: 1 connection now" {
		t.Errorf("%d connections, %q", len(e.Live), e.Verdict)
	}
}

// TestView_explainDropped: where a link was not confirmed, the answer tells of packets that the agent's own filter
// dropped, of a peer that it does not know, perhaps; and only there.
func TestView_explainDropped(t *testing.T) {
	const dst = "192.0.2.9:80"
	b := newAbleBare(t, "", preferAll)
	p := b.proxy("a")
	b.manage(p.px, nil)
	s := p.live(t, dst)
	for _, tt := range []struct {
		code    agentapi.Code
		strange uint64
		says    bool
	}{
		{"TIMEOUT_CL", 0, false},
		{"TIMEOUT_CL", 52, true},
		{"TIMEOUT_AL", 52, true},
		{"NOSMCDEV", 52, false},
	} {
		b.a.wire.drops = linux.WireDrops{linux.WireUnknownSource: tt.strange, linux.WireMalformed: 9}
		p.px.record(s, "TCP", fallback{code: tt.code})
		e, err := View{b.a}.Explain("test/a", dst)
		must(t, err)
		if e.Code != tt.code || !strings.HasSuffix(e.Advice, tt.code.Advice()) || strings.Contains(e.Advice, "dropped 52 RoCE packets") != tt.says {
			t.Errorf("%s with %d packets dropped: %+v", tt.code, tt.strange, e)
		}
	}
}

// TestView_explainDropped_where: the setting that lets strangers send is named as whoever reads the answer finds it.
func TestView_explainDropped_where(t *testing.T) {
	b := newAbleBare(t, "", preferAll)
	p := b.proxy("a")
	b.manage(p.px, nil)
	b.a.wire.drops = linux.WireDrops{linux.WireUnknownSource: 52}
	p.px.record(p.live(t, "192.0.2.9:80"), "TCP", fallback{code: "TIMEOUT_CL"})
	inFile := *b.a.node.Load()
	inCluster := inFile
	inCluster.Pods = map[config.PodName]config.PodConfig{{Namespace: "test", Name: "a"}: {Policies: inFile.Policies}}
	for _, tt := range []struct {
		node *config.Node
		want string
	}{
		{&inFile, "add it to node.wire.peers of the agent's configuration file; else check that UDP"},
		{&inCluster, "add it to agent.wire.peers of the chart; else check that UDP"},
	} {
		b.a.node.Store(tt.node)
		if e := value(View{b.a}.Explain("test/a", "192.0.2.9:80"))(t); !strings.Contains(e.Advice, tt.want) {
			t.Errorf("advice %q, want %q", e.Advice, tt.want)
		}
	}
}

// TestView_explainPausedRequired: connections for which a policy requires SMC-R are diverted in spite of a
// pause.
func TestView_explainPausedRequired(t *testing.T) {
	for policies, want := range map[string]agentapi.Code{preferAll: agentapi.CodeBudgetPending, requireAll: agentapi.CodeUnseen} {
		b := newAbleBare(t, "", policies)
		p := b.proxy("a")
		b.manage(p.px, nil)
		p.px.pausing.Store(&pause{code: agentapi.CodeBudgetPending})
		if e := value(View{b.a}.Explain("test/a", "192.0.2.9:80"))(t); e.Code != want || e.Required != (want == agentapi.CodeUnseen) {
			t.Errorf("%+v, want %s", e, want)
		}
	}
}

// TestView_explainInbound: if this node has the server of a connection, the policy is asked whether the
// client is a peer.
func TestView_explainInbound(t *testing.T) {
	b := newAbleBare(t, "", "policies:\n- {name: p, peers: {except: [192.0.2.8/32]}}\n")
	p := b.proxy("a")
	b.manage(p.px, nil)
	p.px.greedy.Store(&greedy{sources: addrs("192.0.2.7")})
	for _, tt := range []struct {
		source, destination string
		pod                 string
		code                agentapi.Code
	}{
		{"192.0.2.6", "127.0.0.1:80", "test/a", agentapi.CodeUnseen},
		{"192.0.2.7", "127.0.0.1:80", "test/a", agentapi.CodeBudgetSource},
		{"192.0.2.8", "127.0.0.1:80", "test/a", agentapi.CodeNoPolicy},
		{"127.0.0.1", "192.0.2.7:80", "test/a", agentapi.CodeUnseen}, // the pod's own connection to it
		{"192.0.2.6", "192.0.2.7:80", "", agentapi.CodeNotAttached},
		{"test/other", "127.0.0.1:80", "", agentapi.CodeNotAttached},
		{"test/other", "192.0.2.7:80", "", agentapi.CodeNotAttached},
	} {
		e := value(View{b.a}.Explain(tt.source, tt.destination))(t)
		if e.Code != tt.code || e.Pod != tt.pod {
			t.Errorf("%s to %s: %+v, want %s of pod %q", tt.source, tt.destination, e, tt.code, tt.pod)
		}
	}
}

// TestView_explainInterfaces: a pod named as source has the addresses of all its interfaces: of a second network, and of
// a VF that it claimed. Each of them is known to be the pod's.
func TestView_explainInterfaces(t *testing.T) {
	b := newAbleBare(t, "", preferAll)
	p := b.proxy("a")
	eth0, net1 := attachmentOf("a"), attachmentOf("a")
	eth0.Devices = []cni.AttachedDevice{{ID: "0000:41:10.0", IfName: "smcr0", IPs: []netip.Prefix{netip.MustParsePrefix("10.1.0.10/24")}}}
	net1.IfName, net1.IPs = "net1", []netip.Prefix{netip.MustParsePrefix("10.2.0.10/24")}
	b.manage(p.px, func(p *pod) { p.atts = []cni.Attachment{eth0, net1} })
	for i, source := range []string{"10.1.0.10", "10.2.0.10"} {
		dest := netip.AddrPortFrom(netip.MustParseAddr("192.0.2.9"), uint16(80+i))
		b.a.decisions.record(agentapi.Decision{
			Pod: "test/a", Direction: agentapi.Outbound, Source: netip.MustParseAddr(source), Dest: dest, Mode: "SMC-R",
		})
		for _, from := range []string{"test/a", source} {
			if e := value(View{b.a}.Explain(from, dest.String()))(t); e.Code != agentapi.CodeOK || e.Pod != "test/a" {
				t.Errorf("from %s to %s: %+v, want the connection of %s on SMC-R", from, dest, e, source)
			}
		}
	}
	var shown []string
	for _, x := range (View{b.a}).Attachments().Attachments {
		shown = append(shown, fmt.Sprint(x.Interface, x.Addresses))
	}
	if want := []string{"eth0[127.0.0.1/8 10.1.0.10/24]", "net1[10.2.0.10/24]"}; !slices.Equal(shown, want) {
		t.Errorf("the attachments are %q, want %q", shown, want)
	}
}

// downDevice is a device whose port is down.
type downDevice struct{ fakeDevice }

func (downDevice) Port() rdma.PortAttr { return rdma.PortAttr{State: rdma.PortDown} }

// TestView_statusProblems: each problem of the node is shown once, with the words by which the cause is
// found.
func TestView_statusProblems(t *testing.T) {
	missing := func(b *bench, names string) {
		b.cfg.Stay = true
		b.cfg.Node.Devices = append(b.cfg.Node.Devices, config.Device{SoftAddress: netip.MustParseAddr("192.0.2.2")})
		open := b.cfg.openDevice
		b.cfg.openDevice = func(name string, d config.Device, share bool) (rdma.Device, func() error, error) {
			if strings.Contains(names, name) {
				return nil, nil, errors.New("not there")
			}
			return open(name, d, share)
		}
	}
	for _, tt := range []struct {
		name     string
		policies string
		before   func(b *bench)
		after    func(b *bare)
		want     []string // in this order
	}{
		{name: "none", policies: preferAll},
		{name: "no policies", want: []string{"the configuration has no policies"}},
		{name: "port down", policies: preferAll, before: func(b *bench) {
			b.cfg.openDevice = func(string, config.Device, bool) (rdma.Device, func() error, error) {
				return downDevice{}, func() error { return nil }, nil
			}
		}, want: []string{"device soft0: its port is DOWN: check the interface and its address 192.0.2.1"}},
		{name: "one of two devices", policies: preferAll, before: func(b *bench) { missing(b, "soft1") }, want: []string{"node.devices[1], 192.0.2.2: not there"}},
		{name: "all devices", policies: preferAll, before: func(b *bench) { missing(b, "soft0 soft1") }, want: []string{"node.devices[0], 192.0.2.1: not there"}},
		{name: "option", policies: preferAll, after: func(b *bare) { b.a.unable = unable{"no BPF here", agentapi.CodeNoOption} }, want: []string{"no BPF here"}},
		{name: "pod's device", policies: preferAll, before: func(b *bench) {
			b.cfg.openOwn = func(*rnics.Own, rnics.Namespace) (rdma.Device, func() error, error) {
				return nil, nil, errors.New("unplugged")
			}
		}, after: func(b *bare) {
			set := b.a.rnics.NewSet(nil)
			set.Update(b.t.Context(), nil, []rnics.Own{{Pod: "test/a", ID: "vf1"}})
			b.t.Cleanup(func() { must(b.t, set.Release()) })
		}, want: []string{"device vf1 of pod test/a cannot be used: unplugged"}},
		{name: "pods", policies: preferAll, after: func(b *bare) {
			meshed := b.proxy("a").px
			meshed.surroundings.Store(&surroundings{Others: linux.Others{Redirector: "table ip istio"}})
			b.manage(meshed, nil)
			unheld := b.proxy("d").px
			unheld.noteUnheld("SYNs not held", errors.New("no queues"))
			b.manage(unheld, nil)
			b.manage(b.proxy("b").px, func(p *pod) { p.proxy, p.state = nil, podFailed })
			b.manage(b.proxy("c").px, func(p *pod) { p.proxy, p.state = nil, podIdle })
		}, want: []string{"in 1 pods another program redirects connections", "in 1 pods SYNs are not held", "1 pods could not be set up"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bench := newBench(t, "", tt.policies)
			if tt.before != nil {
				tt.before(bench)
			}
			b := newBare(t, bench)
			b.openDevices()
			if tt.after != nil {
				tt.after(b)
			}
			got := View{b.a}.Status().Problems
			if len(got) != len(tt.want) {
				t.Fatalf("problems %q, want %q", got, tt.want)
			}
			for i, want := range tt.want {
				if !strings.Contains(got[i], want) {
					t.Errorf("problem %q, want %q", got[i], want)
				}
			}
		})
	}
}

// TestView_statusCounts: the bytes on SMC-R are those of the sessions that ended and of the live
// ones, and the node accelerates only if a pod is ready.
func TestView_statusCounts(t *testing.T) {
	b := newAbleBare(t, "", preferAll)
	p := b.proxy("a")
	if s := (View{b.a}).Status(); s.Accelerating || s.Pods.Attached != 0 {
		t.Errorf("without a pod: %+v", s)
	}
	b.manage(p.px, nil)
	b.a.metrics.relayed(smcr.ModeSMCR, 1000)
	for mode, n := range map[smcr.Mode]uint64{smcr.ModeSMCR: 10, smcr.ModeTCP: 100} {
		s := p.live(t, "192.0.2.9:80")
		s.setPeerConn(counted{info: smcr.Info{Mode: mode, BytesSent: n, BytesRecv: 2 * n}}, mode.String(), "")
	}
	p.live(t, "192.0.2.9:80") // connecting
	s := View{b.a}.Status()
	if !s.Accelerating || s.Pods.Ready != 1 || s.Conns.Live != 3 || s.Conns.LiveSMCR != 1 || s.Conns.BytesSMCR != 1030 || s.LinkGroups != 1 {
		t.Errorf("%+v", s)
	}
	if g := b.a.gauges(); g.sessionsSMCR != 1 || g.sessionsTCP != 1 { // the metric pending_connections has the other one
		t.Errorf("%+v", g)
	}
}

// TestView_statusKernel: a pod on its kernel's SMC-R needs nothing of the agent's, which says what it lacks all the same.
func TestView_statusKernel(t *testing.T) {
	b := newAbleBare(t, "", preferAll)
	b.a.unable = unable{"no BPF here", agentapi.CodeNoOption}
	p := b.manage(b.proxy("a").px, nil)
	if s := (View{b.a}).Status(); s.Accelerating || s.Pods.Ready != 1 {
		t.Errorf("a pod of the agent's: %+v", s)
	}
	p.proxy, p.kernel, p.state = nil, &kernelPod{}, podKernel
	if s := (View{b.a}).Status(); !s.Accelerating || s.UnableCode != agentapi.CodeNoOption || !slices.Contains(s.Problems, "no BPF here") {
		t.Errorf("a pod of its kernel's: %+v", s)
	}
}

// groupStack is a stack with these link groups.
type groupStack struct {
	*fakeStack
	groups []smcr.GroupInfo
	lost   []smcr.GroupInfo
}

func (s groupStack) LinkGroups() []smcr.GroupInfo { return s.groups }
func (s groupStack) LostGroups() []smcr.GroupInfo { return s.lost }

// TestView_lostLinks: link groups that were lost are told of with their reason, and are not among the present ones.
func TestView_lostLinks(t *testing.T) {
	b := newAbleBare(t, "", preferAll)
	b.proxy("a").px.stack = groupStack{b.stack, nil, []smcr.GroupInfo{{ID: 3, State: "DEAD", Err: errors.New("no path")}}}
	if got := (View{b.a}).LostLinks(); len(got) != 1 || got[0].Pod != "test/a" || got[0].ID != 3 || got[0].State != "DEAD" || got[0].Error != "no path" {
		t.Errorf("lost %+v", got)
	}
	if got := (View{b.a}).Links().LinkGroups; len(got) != 0 {
		t.Errorf("present %+v", got)
	}
}

// TestView_links: link groups come in the order of their pods and numbers, with all that the stack
// says of them.
func TestView_links(t *testing.T) {
	b := newAbleBare(t, "", preferAll)
	gid := rdma.GIDFromAddr(netip.MustParseAddr("192.0.2.1"))
	full := smcr.GroupInfo{
		ID: 3, Role: smcr.RoleServer, State: "ACTIVE", Dialect: "RFC", Redundancy: "SYMMETRIC", Version: 2, EID: "ACME", Release: 1, PeerHost: "b", NoV2: clc.ReasonNoUEID,
		Conns: 4, RMBBytes: 5, Opened: time.Unix(1000, 0), Err: errors.New("the peer is gone"),
		Links: []smcr.LinkInfo{{ID: 1, State: "UP", Device: "soft0", LocalGID: gid, PeerGID: gid, LocalQPN: 6, PeerQPN: 7, MTU: rdma.MTU1024, UserID: 8, Conns: 9, BytesSent: 10, BytesRecv: 11}},
	}
	for name, groups := range map[string][]smcr.GroupInfo{"b": {{ID: 1}}, "a": {full, {ID: 2}}} {
		b.proxy(name).px.stack = groupStack{b.stack, groups, nil}
	}
	got := View{b.a}.Links().LinkGroups
	var order []string
	for _, g := range got {
		order = append(order, fmt.Sprint(g.Pod, " ", g.ID))
	}
	if d := cmp.Diff([]string{"test/a 2", "test/a 3", "test/b 1"}, order); d != "" {
		t.Fatalf("order (-want +got):\n%s", d)
	}
	want := agentapi.LinkGroup{
		ID: 3, Pod: "test/a", Role: full.Role.String(), PeerID: fmt.Sprint(full.PeerID), State: "ACTIVE", Dialect: "RFC", Redundancy: "SYMMETRIC",
		Version: 2, EID: "ACME", Release: 1, PeerClaimedName: "b", NoV2: "NOUEID", Conns: 4, RMBBytes: 5, Opened: time.Unix(1000, 0), Error: "the peer is gone",
		Links: []agentapi.Link{{
			ID: 1, State: "UP", Device: "soft0", LocalGID: fmt.Sprint(gid), PeerGID: fmt.Sprint(gid), LocalQPN: 6, PeerQPN: 7, MTU: 1024, UserID: 8,
			Conns: 9, BytesSent: 10, BytesRecv: 11,
		}},
	}
	if d := cmp.Diff(want, got[1]); d != "" {
		t.Errorf("link group (-want +got):\n%s", d)
	}
}

// TestView_conns: of very many sessions the oldest are shown.
func TestView_conns(t *testing.T) {
	b := newAbleBare(t, "", preferAll)
	if got := (View{b.a}).Conns(""); got.Conns == nil || len(got.Conns) != 0 || got.Problem != "" {
		t.Errorf("%+v, want an empty list", got)
	}
	for range maxShownConns + 10 {
		b.a.sessions.add(&session{})
	}
	last := config.Pod{Namespace: "shop", Name: "web"}
	b.a.sessions.add(&session{pod: last})
	all := View{b.a}.Conns("")
	got := all.Conns
	if len(got) != maxShownConns || got[0].ID != 1 || got[len(got)-1].ID != maxShownConns {
		t.Errorf("%d connections", len(got))
	}
	if !strings.Contains(all.Problem, "11 further ones are not shown") {
		t.Errorf("problem %q, and 11 connections are not shown", all.Problem)
	}
	if of := (View{b.a}).Conns(last.String()); len(of.Conns) != 1 || of.Conns[0].Pod != last.String() || of.Problem != "" {
		t.Errorf("of the pod: %d connections, problem %q", len(of.Conns), of.Problem)
	}
}

// TestView_attachmentsEmpty: a pod without addresses has an empty list of them.
func TestView_attachmentsEmpty(t *testing.T) {
	b := newAbleBare(t, "", preferAll)
	b.manage(b.proxy("a").px, func(p *pod) { p.atts[0].IPs = nil })
	got := value(json.Marshal(View{b.a}.Attachments()))(t)
	if !bytes.Contains(got, []byte(`"addresses":[]`)) || bytes.Contains(got, []byte("null")) {
		t.Errorf("%s", got)
	}
}

// TestView_attachments: what is shown of a pod in each state. One element is shown for each
// attachment, in the order of the pods.
func TestView_attachments(t *testing.T) {
	cannot := unable{"no BPF here", agentapi.CodeNoOption}
	istio := &surroundings{Others: linux.Others{Redirector: "table ip istio"}}
	hidden := &surroundings{Others: linux.Others{Unknown: "iptables: permission denied"}}
	for _, tt := range []struct {
		name     string
		policies string
		change   func(*pod)
		unable   unable

		state, detail string
		reason        agentapi.Code
	}{
		{name: "ready", policies: preferAll, state: agentapi.StateReady},
		{name: "ready, and the update failed", policies: preferAll, change: func(p *pod) { p.err = errors.New("no memory") }, unable: cannot, state: agentapi.StateReady, detail: "no memory", reason: agentapi.CodeNoOption},
		{name: "ready, other redirector", policies: preferAll, change: func(p *pod) { p.proxy.surroundings.Store(istio) }, state: agentapi.StateReady, detail: "table ip istio", reason: agentapi.CodeMesh},
		{name: "ready, rules hidden", policies: preferAll, change: func(p *pod) { p.proxy.surroundings.Store(hidden) }, state: agentapi.StateReady, detail: "permission denied"},
		{name: "ready, node unable", policies: requireAll, unable: cannot, state: agentapi.StateReady, detail: "no BPF here", reason: agentapi.CodeNoOption},
		{name: "idle, not selected", policies: "policies:\n- {name: p, pods: {names: [other]}}\n", change: func(p *pod) { p.proxy, p.state = nil, podIdle }, state: agentapi.StateIdle, detail: "no policy selects the pod"},
		{name: "idle, not selected, node unable", policies: "policies:\n- {name: p, pods: {names: [other]}}\n", change: func(p *pod) { p.proxy, p.state = nil, podIdle }, unable: cannot, state: agentapi.StateIdle, detail: "no BPF here"},
		{name: "idle, node unable", policies: preferAll, change: func(p *pod) { p.proxy, p.state = nil, podIdle }, unable: cannot, state: agentapi.StateIdle, detail: "no BPF here", reason: agentapi.CodeNoOption},
		{name: "failed", policies: preferAll, change: func(p *pod) { p.proxy, p.state, p.err = nil, podFailed, errors.New("no nftables") }, state: agentapi.StateFailed, detail: "no nftables"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b := newAbleBare(t, "", tt.policies)
			b.a.unable = tt.unable
			b.manage(b.proxy("z").px, nil)
			b.manage(b.proxy("a").px, func(p *pod) {
				second := attachmentOf("a", "10.0.0.1/24")
				second.IfName = "net1"
				p.atts = []cni.Attachment{p.atts[0], second}
				if tt.change != nil {
					tt.change(p)
				}
			})
			got := View{b.a}.Attachments().Attachments
			if len(got) != 3 || got[0].Pod != "test/a" || got[1].Interface != "net1" || got[2].Pod != "test/z" {
				t.Fatalf("%+v", got)
			}
			for _, x := range got[:2] {
				if x.State != tt.state || x.Reason != tt.reason || (tt.detail == "") != (x.Detail == "") || !strings.Contains(x.Detail, tt.detail) {
					t.Errorf("%+v, want %s %q (%s)", x, tt.state, tt.reason, tt.detail)
				}
				if has := x.Budget.Conns > 0; has != (tt.state == agentapi.StateReady) {
					t.Errorf("budget %+v", x.Budget)
				}
			}
		})
	}
}

// TestIdleBecause_cluster: in a cluster a pod that no policy selects is one that is not opted in.
func TestIdleBecause_cluster(t *testing.T) {
	b := newAbleBare(t, "", preferAll)
	inCluster := value(config.ParseOn(config.Machine{Cluster: true}, "test", []byte(strings.Replace(b.text, preferAll, "", 1))))(t)
	inCluster, _, _ = config.FromObjects(inCluster, config.Objects{})
	pod := config.Pod{Namespace: "test", Name: "a"}
	if got, want := idleBecause("", inCluster, pod), config.ReasonOptedOut.String(); got != want {
		t.Errorf("%q, want %q", got, want)
	}
	if got := idleBecause("no BPF here", inCluster, pod); got != "no BPF here" {
		t.Errorf("%q", got)
	}
}
