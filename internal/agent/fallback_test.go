// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/cni"
	"github.com/smcr-io/kube-smcr/internal/config"
	"github.com/smcr-io/kube-smcr/internal/linux"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
)

// outboundTo is a session of the pod to dst, as far as the policies decide it.
func (p *barePod) outboundTo(dst string) *session {
	s := &session{dir: agentapi.Outbound, src: netip.MustParseAddrPort("127.0.0.1:40000"), dst: netip.MustParseAddrPort(dst)}
	p.px.decide(s)
	return s
}

// TestProxy_ineligible: of several reasons against SMC-R the first one counts, in the order policy,
// node, other redirector, mismatch.
func TestProxy_ineligible(t *testing.T) {
	const selected, other = "192.0.2.9:80", "192.0.2.9:81"
	b := newAbleBare(t, "", "policies:\n- {name: p, ports: [80]}\n")
	p := b.proxy("a")
	for _, tt := range []struct {
		name  string
		spoil func()
		want  agentapi.Code
	}{
		{"nothing is in the way", func() {}, agentapi.CodeOK},
		{"mismatch", func() { p.px.settings.Mismatch = config.MismatchTransport }, agentapi.CodeTransport},
		{"other redirector", func() { p.px.surroundings.Store(&surroundings{caught: true}) }, agentapi.CodeMesh},
		{"node", func() { b.a.unable = unable{"no BPF here", agentapi.CodeNoOption} }, agentapi.CodeNoOption},
	} {
		tt.spoil() // in addition to what the cases before did
		if got := p.px.ineligible(p.outboundTo(selected)); got != tt.want {
			t.Errorf("%s: %q, want %q", tt.name, got, tt.want)
		}
		if got := p.px.ineligible(p.outboundTo(other)); got != agentapi.CodeNoPolicy {
			t.Errorf("%s, not selected: %q, want %q", tt.name, got, agentapi.CodeNoPolicy)
		}
	}
}

// TestProxy_admitSMCR: a session that may be on SMC-R takes one of the budget's connections on SMC-R. If none is
// left, the session is told which budget is full. A session that may not be on SMC-R takes none.
func TestProxy_admitSMCR(t *testing.T) {
	b := newAbleBare(t, "  budgets: {pod: {connections: 1}}\n", "policies:\n- {name: p, ports: [80]}\n")
	p := b.proxy("a")
	admit := func(dst string) fallback {
		s := p.outboundTo(dst)
		s.reservation = p.reservation(t)
		return p.px.admitSMCR(s)
	}
	for _, tt := range []struct {
		name, dst string
		want      fallback
	}{
		{"not selected", "192.0.2.9:81", fallback{code: agentapi.CodeNoPolicy}},
		{"the only connection", "192.0.2.9:80", fallback{}},
		{"one too many", "192.0.2.9:80", fallback{code: agentapi.CodeBudgetConns, detail: podFull}},
	} {
		if got := admit(tt.dst); got != tt.want {
			t.Errorf("%s: %+v, want %+v", tt.name, got, tt.want)
		}
	}
	if got := b.a.ledger.info().ConnsUsed; got != 1 {
		t.Errorf("%d connections on SMC-R are taken, want 1", got)
	}
}

// TestProxy_fallbackOf: a rendezvous that the stack itself declined with MEM may have several reasons. The counters
// before and after the rendezvous tell which one; if several were short, memory is the reason. Every other reason is
// taken as it is.
func TestProxy_fallbackOf(t *testing.T) {
	lackMemory := func(px *proxy) { _ = px.memory.Take(netip.Addr{}, 11) }
	lackQueuePair := func(px *proxy) {
		for px.memory.TakeQP(netip.Addr{}, "soft0") == nil {
		}
	}
	lackDevice := func(px *proxy) { px.memory.deviceRefused.Add(1) }
	both := func(fs ...func(*proxy)) func(*proxy) {
		return func(px *proxy) {
			for _, f := range fs {
				f(px)
			}
		}
	}
	mem := smcr.Info{Reason: clc.ReasonMem}
	for _, tt := range []struct {
		name          string
		info          smcr.Info
		before, after func(*proxy)
		want          fallback
	}{
		{"memory", mem, nil, lackMemory, fallback{code: agentapi.CodeBudgetMemory, detail: podFull}},
		{"queue pairs", mem, nil, lackQueuePair, fallback{code: agentapi.CodeQueuePairs}},
		{"memory and queue pairs", mem, nil, both(lackMemory, lackQueuePair), fallback{code: agentapi.CodeBudgetMemory, detail: podFull}},
		{"device", mem, nil, lackDevice, fallback{code: agentapi.CodeOf(clc.ReasonMem)}},
		{"nothing was counted", mem, nil, nil, fallback{code: agentapi.CodeBudgetMemory, detail: podFull}},
		{"only before", mem, both(lackMemory, lackQueuePair), lackDevice, fallback{code: agentapi.CodeOf(clc.ReasonMem)}},
		{"the peer's", smcr.Info{Reason: clc.ReasonMem, PeerDeclined: true}, nil, lackMemory, fallback{code: agentapi.CodeOf(clc.ReasonMem), peerDeclined: true}},
		{"another reason", smcr.Info{Reason: clc.ReasonPeerNoSMC}, nil, lackMemory, fallback{code: agentapi.CodeOf(clc.ReasonPeerNoSMC)}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			l := newLedger(budget(10))
			a := l.open(budget(10))
			l.setQueuePairs("soft0", 1)
			px := &proxy{account: a, memory: a}
			if tt.before != nil {
				tt.before(px)
			}
			before := px.shortage()
			if tt.after != nil {
				tt.after(px)
			}
			if got := px.fallbackOf(tt.info, before); got != tt.want {
				t.Errorf("%+v, want %+v", got, tt.want)
			}
		})
	}
}

// TestAttack_declineReasons: a peer declines with a thousand diagnosis codes that nobody has given a name. The status,
// the metrics and the decisions have one code for all of them, and the decisions' details what the peer said.
func TestAttack_declineReasons(t *testing.T) {
	b := newAbleBare(t, "", preferAll)
	p := b.proxy("a")
	for i := range 1000 {
		r := clc.Reason(0x7a000000 + i)
		why := p.px.fallbackOf(smcr.Info{Reason: r, PeerDeclined: true}, shortage{})
		if want := (fallback{code: agentapi.CodeUnknownReason, peerDeclined: true, detail: r.Text()}); why != want {
			t.Fatalf("%+v, want %+v", why, want)
		}
		b.a.metrics.fallback(why.code)
	}
	if why := p.px.fallbackOf(smcr.Info{PeerDeclined: true}, shortage{}); why.code != agentapi.CodeUnknownReason || why.detail != "no reason given" {
		t.Errorf("a Decline without a reason: %+v", why)
	}
	if all := b.a.metrics.sum().reasons; len(all) != 1 || all[agentapi.CodeUnknownReason] != 1000 {
		t.Errorf("the status has the reasons %v", all)
	}
	series := 0
	for _, f := range value(b.a.metrics.registry.Gather())(t) {
		if f.GetName() == namespace+"_fallbacks_total" {
			series += len(f.GetMetric())
		}
	}
	if series != 1 {
		t.Errorf("%d series", series)
	}
}

// TestDeclineReason: the client hears whether to come back when something is free again (MEM), that
// there is no device, or that SMC-R is not configured here.
func TestDeclineReason(t *testing.T) {
	for code, want := range map[agentapi.Code]clc.Reason{
		agentapi.CodeOK:                      clc.ReasonNone,
		agentapi.CodeBudgetConns:             clc.ReasonMem,
		agentapi.CodeBudgetMemory:            clc.ReasonMem,
		agentapi.CodePodDevice:               clc.ReasonNoDev,
		agentapi.CodeOf(clc.ReasonNoDev):     clc.ReasonNoDev,
		agentapi.CodeNoPolicy:                clc.ReasonConfigErr,
		agentapi.CodeOptedOut:                clc.ReasonConfigErr,
		agentapi.CodeMesh:                    clc.ReasonConfigErr,
		agentapi.CodeTransport:               clc.ReasonConfigErr,
		agentapi.CodeNoOption:                clc.ReasonConfigErr,
		agentapi.CodeOf(clc.ReasonConfigErr): clc.ReasonConfigErr,
	} {
		if got := declineReason(code); got != want {
			t.Errorf("%q: %v, want %v", code, got, want)
		}
	}
}

func TestCodeOfDecision(t *testing.T) {
	for r, want := range map[config.DecisionReason]agentapi.Code{
		config.ReasonOptedOut: agentapi.CodeOptedOut,
		config.ReasonNoPolicy: agentapi.CodeNoPolicy,
		config.ReasonPeer:     agentapi.CodeNoPolicy,
		config.ReasonExcluded: agentapi.CodeNoPolicy,
		config.ReasonPort:     agentapi.CodeNoPolicy,
	} {
		if got := codeOfDecision(config.Decision{Reason: r}); got != want {
			t.Errorf("%v: %q, want %q", r, got, want)
		}
	}
}

// TestTemporary: a destination is tried again soon if the reason for the fallback passes by itself, and not soon if
// the reason is a property of the peer or the network.
func TestTemporary(t *testing.T) {
	for r, want := range map[clc.Reason]bool{
		clc.ReasonMem: true, clc.ReasonSyncErr: true, clc.ReasonNoActLink: true, clc.ReasonNoSrvLink: true, clc.ReasonInternal: true,
		clc.ReasonErrRToken: true, clc.ReasonErrReadyLnk: true, clc.ReasonErrRegBuf: true,
		clc.ReasonNone: false, clc.ReasonConfigErr: false, clc.ReasonPeerNoSMC: false, clc.ReasonNoDev: false, clc.ReasonDiffPrefix: false,
		clc.ReasonVersMismat: false, clc.ReasonNoRoute: false, clc.ReasonNoUEID: false, clc.ReasonPeerDecl: false,
	} {
		if got := temporary(r); got != want {
			t.Errorf("%v: %t, want %t", r, got, want)
		}
	}
}

// TestProxy_bypass: how long a destination is left alone, and when it is not to be.
func TestProxy_bypass(t *testing.T) {
	const dst = "192.0.2.9:80"
	required := "policies:\n- {name: p, mode: Required}\n"
	for _, tt := range []struct {
		name            string
		extra, policies string
		later           string // policies that come while the session is under way
		code            agentapi.Code
		passing         bool
		err             error
		want            time.Duration // 0: it is not left alone
	}{
		{name: "lasting", policies: preferAll, code: agentapi.CodeOf(clc.ReasonPeerNoSMC), want: 100 * time.Second},
		{name: "passing", policies: preferAll, code: agentapi.CodeOf(clc.ReasonMem), passing: true, want: 10 * time.Second},
		{name: "other redirector", policies: preferAll, code: agentapi.CodeMesh, passing: true, want: 10 * time.Second},
		{name: "other redirector, short cache", extra: "  negativeCacheTTL: 1s\n", policies: preferAll, code: agentapi.CodeMesh, passing: true, want: leastMeshBypass},
		{name: "other redirector, no cache", extra: "  negativeCacheTTL: 0s\n", policies: preferAll, code: agentapi.CodeMesh, want: leastMeshBypass},
		{name: "no cache", extra: "  negativeCacheTTL: 0s\n", policies: preferAll, code: agentapi.CodeOf(clc.ReasonPeerNoSMC)},
		{name: "required", policies: required, code: agentapi.CodeMesh},
		{name: "required by now", policies: preferAll, later: required, code: agentapi.CodeMesh},
		{name: "required before", policies: required, later: preferAll, code: agentapi.CodeMesh},
		{name: "the kernel refuses", policies: preferAll, code: agentapi.CodeMesh, err: errors.New("no memory for the set")},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if tt.extra == "" {
				tt.extra = "  negativeCacheTTL: 100s\n"
			}
			b := newAbleBare(t, tt.extra, tt.policies)
			p := b.proxy("a")
			p.redir.bypErr = tt.err
			s := p.outboundTo(dst)
			if tt.later != "" {
				b.put(tt.extra, tt.later)
			}
			before := time.Now()
			if got := p.px.bypass(s, tt.code, tt.passing); got != (tt.want > 0) {
				t.Errorf("reports %t", got)
			}
			shown := b.a.bypasses.get("test/a", s.dst, before)
			if tt.want == 0 {
				if len(p.redir.bypassed) > 0 || shown != nil {
					t.Errorf("left alone: %v, %+v", p.redir.bypassed, shown)
				}
				return
			}
			if len(p.redir.bypassed) != 1 || p.redir.bypassed[0] != s.dst || p.redir.ttl != tt.want {
				t.Errorf("%v left alone for %v, want %v for %v", p.redir.bypassed, p.redir.ttl, s.dst, tt.want)
			}
			if shown == nil || shown.Reason != tt.code || shown.Until.Before(before.Add(tt.want)) || shown.Until.After(time.Now().Add(tt.want)) {
				t.Errorf("shown: %+v, want %s for %v", shown, tt.code, tt.want)
			}
		})
	}
}

// TestProxy_bypassOfOneInterface: the negative cache is for all of a pod's interfaces, so none of them may leave a
// destination alone to which another one requires SMC-R.
func TestProxy_bypassOfOneInterface(t *testing.T) {
	b := newAbleBare(t, "  negativeCacheTTL: 100s\n",
		"policies:\n- {name: a, pods: {interfaces: [eth0]}}\n- {name: b, pods: {interfaces: [net1]}, ports: [80], mode: Required}\n")
	p := b.proxy("a")
	second := attachmentOf("a", "192.0.2.4/24")
	second.IfName = "net1"
	p.px.atts.Store(&[]cni.Attachment{(*p.px.atts.Load())[0], second})
	for dst, want := range map[string]bool{"192.0.2.9:80": false, "192.0.2.9:81": true} {
		if got := p.px.bypass(p.outboundTo(dst), agentapi.CodeOf(clc.ReasonPeerNoSMC), false); got != want {
			t.Errorf("%s left alone: %t, want %t", dst, got, want)
		}
	}
}

// lateRedirect enters a destination late: meanwhile the policies change.
type lateRedirect struct {
	*fakeRedirect
	meanwhile func()
}

func (r lateRedirect) Bypass(dst netip.AddrPort, ttl time.Duration) error {
	r.meanwhile()
	return r.fakeRedirect.Bypass(dst, ttl)
}

// TestProxy_bypassLate: a destination for which SMC-R is required by the time that it is entered into the negative cache does
// not stay there. The negative cache is emptied, and no other destination counts as one that is there.
func TestProxy_bypassLate(t *testing.T) {
	b := newAbleBare(t, "", preferAll)
	p := b.proxy("a")
	s, other := p.outboundTo("192.0.2.9:80"), p.outboundTo("192.0.2.9:81")
	p.px.redirect = lateRedirect{p.redir, func() {
		b.put("", requireAll)
		must(t, p.px.update(*p.px.atts.Load()))
		b.a.bypasses.add(agentapi.Bypass{Pod: "test/a", Dest: other.dst, Until: time.Now().Add(time.Hour)}) // of another session
	}}
	if p.px.bypass(s, agentapi.CodeRendezvous, false) {
		t.Error("the destination is left alone, though SMC-R is required")
	}
	if got := p.redir.forgot; got != 2 { // by update and, behind the entry, by bypass
		t.Errorf("the negative cache was emptied %d times, want 2", got)
	}
	if got := b.a.bypasses.list(time.Now()); len(got) > 0 {
		t.Errorf("the negative cache is empty, and %v counts as left alone", got)
	}
}

// slowRedirect takes the kernel long to change.
type slowRedirect struct {
	*fakeRedirect
	until chan struct{}
}

func (r slowRedirect) Bypass(dst netip.AddrPort, ttl time.Duration) error {
	<-r.until
	return r.fakeRedirect.Bypass(dst, ttl)
}

// TestProxy_bypassSlow: no connection waits long for a kernel that is busy with other changes of nftables, the next ones not at all,
// and the entry comes when it comes.
func TestProxy_bypassSlow(t *testing.T) {
	b := newAbleBare(t, "", preferAll)
	b.a.cfg.bypassPatience = 20 * time.Millisecond
	p := b.proxy("a")
	slow := slowRedirect{p.redir, make(chan struct{})}
	p.px.redirect = slow
	first := p.outboundTo("192.0.2.9:80")
	for _, s := range []*session{first, p.outboundTo("192.0.2.9:81")} {
		if p.px.bypass(s, agentapi.CodeRendezvous, false) {
			t.Errorf("%v is left alone already", s.dst)
		}
	}
	if got := b.a.bypasses.list(time.Now()); len(got) > 0 {
		t.Errorf("%v counts as left alone", got)
	}
	mesh := make(chan bool)
	go func() { mesh <- p.px.bypassFirst(p.outboundTo("192.0.2.9:82"), agentapi.CodeMesh) }()
	select {
	case <-mesh:
		t.Error("dialed, or reset, before its destination is left alone, though another program redirects connections")
	case <-time.After(3 * b.a.cfg.bypassPatience):
	}
	close(slow.until)
	if !<-mesh {
		t.Error("not dialed, though its destination is left alone")
	}
	eventually(t, func() string {
		if got := b.a.bypasses.list(time.Now()); len(got) != 2 || got[0].Dest != first.dst && got[1].Dest != first.dst {
			return fmt.Sprintf("left alone are %v, want %v and another one", got, first.dst)
		}
		return ""
	})
}

// TestProxy_bypassFirst: for which reasons the destination is left alone before it is dialed, and
// when it must not be dialed at all.
func TestProxy_bypassFirst(t *testing.T) {
	broken := errors.New("no memory for the set")
	for _, tt := range []struct {
		code     agentapi.Code
		err      error
		dial     bool
		bypassed int
	}{
		{agentapi.CodeBudgetConns, nil, true, 1},
		{agentapi.CodeBudgetMemory, nil, true, 1},
		{agentapi.CodeBudgetConns, broken, true, 0},
		{agentapi.CodeMesh, nil, true, 1},
		{agentapi.CodeMesh, broken, false, 0}, // the connection could come back to the agent
		{agentapi.CodeNoPolicy, nil, true, 0},
		{agentapi.CodeNoOption, nil, true, 0},
	} {
		b := newAbleBare(t, "  negativeCacheTTL: 100s\n", preferAll)
		p := b.proxy("a")
		p.redir.bypErr = tt.err
		if got := p.px.bypassFirst(p.outboundTo("192.0.2.9:80"), tt.code); got != tt.dial || len(p.redir.bypassed) != tt.bypassed {
			t.Errorf("%s, error %v: dial %t, left alone %v; want %t and %d", tt.code, tt.err, got, p.redir.bypassed, tt.dial, tt.bypassed)
		}
		if want := 100 * time.Second / tempShare; tt.bypassed > 0 && p.redir.ttl != want {
			t.Errorf("%s: for %v, want %v, since it passes", tt.code, p.redir.ttl, want)
		}
	}
}

// TestProxy_meshedDial: in a pod with another redirector the agent carries a connection that is not to be on SMC-R:
// the destination is put into the negative cache before the agent dials it.
func TestProxy_meshedDial(t *testing.T) {
	b := newAbleBare(t, "  negativeCacheTTL: 1s\n", preferAll)
	p := b.proxy("a")
	p.mayRelay(t)
	p.px.surroundings.Store(&surroundings{Others: linux.Others{Redirector: "table ip istio"}})
	app, far := loopback(t)
	carried := make(chan struct{})
	go func() {
		defer close(carried)
		p.px.outbound(t.Context(), app, b.server(), p.reservation(t))
		p.px.sessionTasks.Wait()
	}()
	exchange(t, far, 10)
	<-carried
	if len(p.redir.bypassed) != 1 || p.redir.ttl != leastMeshBypass {
		t.Errorf("%v left alone for %v, want %v", p.redir.bypassed, p.redir.ttl, leastMeshBypass)
	}
}
