// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/linux"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
)

const requireAll = "policies:\n- {name: p, mode: Required}\n"

// nowhere is an address at which nobody listens.
var nowhere = netip.MustParseAddrPort("127.0.0.1:1")

// carry lets the pod's proxy carry a connection to dst in the way of outbound or inbound, as the
// accept loop does. far is the other end of the connection; done is closed when the session is over.
func (p *barePod) carry(t testing.TB, way func(context.Context, *net.TCPConn, netip.AddrPort, *reservation), dst netip.AddrPort) (far *net.TCPConn, done <-chan struct{}) {
	t.Helper()
	p.mayRelay(t)
	near, far := loopback(t)
	must(t, resetOnClose(near))
	rv, over := p.reservation(t), make(chan struct{})
	go func() {
		defer close(over)
		way(p.px.life, near, dst, rv)
		p.px.sessionTasks.Wait()
	}()
	t.Cleanup(func() {
		p.px.abort(agentapi.CodeDraining)
		<-over
	})
	return far, over
}

// hookedStack is a fake stack that calls during in each rendezvous.
type hookedStack struct {
	*fakeStack
	during func()
}

func (s hookedStack) client(ctx context.Context, tcp *net.TCPConn) (peerConn, error) {
	s.during()
	return s.fakeStack.client(ctx, tcp)
}

func (s hookedStack) server(ctx context.Context, tcp *net.TCPConn, decline clc.Reason) (peerConn, error) {
	s.during()
	return s.fakeStack.server(ctx, tcp, decline)
}

// use is what a session uses of the node's budget: its pending connections, its connections on
// SMC-R, and its relays.
type use struct{ Pending, SMCR, Relays int }

func (b *bare) use() use {
	i := b.a.ledger.info()
	return use{i.PendingUsed, i.ConnsUsed, i.RelaysUsed}
}

// wantEnded wants what a session leaves behind: one decision, its metrics, and no part of the budget.
func (b *bare) wantEnded(mode string, code agentapi.Code, detail string) {
	b.t.Helper()
	if d := b.decided(); d.Mode != mode || d.Reason != code || !strings.Contains(d.Detail, detail) {
		b.t.Errorf("decision %+v, want %s %q (%s)", d, mode, code, detail)
	}
	want := totals{}
	switch mode {
	case agentapi.ModeReset:
		want.resets = 1
	case smcr.ModeSMCR.String():
		want.connsSMCR = 1
	default:
		want.connsTCP = 1
	}
	got := b.a.metrics.sum()
	if got.resets != want.resets || got.connsSMCR != want.connsSMCR || got.connsTCP != want.connsTCP {
		b.t.Errorf("metrics %+v, want %+v", got, want)
	}
	if ss := b.a.sessions.list(nil); len(ss) > 0 {
		b.t.Errorf("%d sessions are left", len(ss))
	}
	b.wantFree()
}

// TestProxy_outbound: what becomes of a connection that the application makes, for everything that
// policies, budget, destination and peer may say.
func TestProxy_outbound(t *testing.T) {
	noConns := "  budgets: {pod: {connections: 0}}\n"
	relayed, onSMCR := use{Relays: 1}, use{SMCR: 1}
	for _, tt := range []struct {
		name            string
		extra, policies string
		mode            smcr.Mode
		reason          clc.Reason
		err             error
		deaf            bool // nobody listens at the destination
		meshed          bool // another program redirects connections in the pod
		bypErr          error
		dialErr         error // of the agent's connection

		want     string // mode
		code     agentapi.Code
		detail   string
		uses     use // while it is carried
		bypassed agentapi.Code
		lasting  bool // the reason for that does not pass by itself
		dials    int
	}{
		{name: "smcr", mode: smcr.ModeSMCR, want: "SMC-R", uses: onSMCR, dials: 1},
		{name: "peer without", reason: clc.ReasonPeerNoSMC, want: "TCP", code: "PEERNOSMC", uses: relayed, bypassed: "PEERNOSMC", lasting: true, dials: 1},
		{name: "passing reason", reason: clc.ReasonMem, want: "TCP", code: agentapi.CodeBudgetMemory, uses: relayed, bypassed: agentapi.CodeBudgetMemory, dials: 1},
		{name: "no cache", extra: "  negativeCacheTTL: 0s\n", reason: clc.ReasonPeerNoSMC, want: "TCP", code: "PEERNOSMC", uses: relayed, dials: 1},
		{name: "required", policies: requireAll, reason: clc.ReasonPeerNoSMC, want: "reset", code: agentapi.CodeRequired, detail: "PEERNOSMC: ", dials: 1},
		{name: "required, a reason without a name", policies: requireAll, reason: 0x7a000000, want: "reset", code: agentapi.CodeRequired, detail: "UNKNOWN_REASON: unknown diagnosis code 0x7a000000", dials: 1},
		{name: "no connections left", extra: noConns, want: "TCP", code: agentapi.CodeBudgetConns, detail: podFull, uses: relayed, bypassed: agentapi.CodeBudgetConns, dials: 1},
		{name: "no connections left and required", extra: noConns, policies: requireAll, want: "reset", code: agentapi.CodeRequired, detail: "BUDGET_CONNS: "},
		{name: "not selected", policies: "policies:\n- {name: p, ports: [9]}\n", want: "TCP", code: agentapi.CodeNoPolicy, detail: "port", uses: relayed, dials: 1},
		{name: "refused", deaf: true, want: "reset", code: agentapi.CodeConnect, detail: "connection refused", dials: 1},
		{name: "refused and not selected", policies: "policies:\n- {name: p, ports: [9]}\n", deaf: true, want: "reset", code: agentapi.CodeConnect, dials: 1},
		{name: "no way for the agent", dialErr: errors.Join(syscall.ENETUNREACH, linux.ErrUnsent), want: "reset", code: agentapi.CodeUndiverted, detail: "no packet was sent", bypassed: agentapi.CodeUndiverted, dials: 1},
		{name: "no way for the agent and required", policies: requireAll, dialErr: errors.Join(syscall.EPERM, linux.ErrUnsent), want: "reset", code: agentapi.CodeUndiverted, dials: 1},
		{name: "no socket", dialErr: errors.Join(syscall.EMFILE, linux.ErrUnsent), want: "reset", code: agentapi.CodeConnect, dials: 1},
		{name: "no way from a router on", dialErr: syscall.ENETUNREACH, want: "reset", code: agentapi.CodeConnect, dials: 1},
		{name: "rendezvous breaks", err: errors.New("no CLC"), want: "reset", code: agentapi.CodeRendezvous, detail: "no CLC", bypassed: agentapi.CodeRendezvous, dials: 1},
		{name: "peer resets in the rendezvous", err: syscall.ECONNRESET, want: "reset", code: agentapi.CodeRendezvous, dials: 1},
		{name: "other redirector", meshed: true, want: "TCP", code: agentapi.CodeMesh, uses: relayed, bypassed: agentapi.CodeMesh, dials: 1},
		{name: "other redirector and required", meshed: true, policies: requireAll, want: "reset", code: agentapi.CodeRequired, detail: "MESH: "},
		{name: "could come back", meshed: true, bypErr: errors.New("no memory for the set"), want: "reset", code: agentapi.CodeMesh, detail: "could come back here"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if tt.policies == "" {
				tt.policies = preferAll
			}
			if !strings.Contains(tt.extra, "negativeCacheTTL") {
				tt.extra += "  negativeCacheTTL: 100s\n"
			}
			b := newAbleBare(t, tt.extra, tt.policies)
			b.stack.set(tt.mode, tt.reason, tt.err)
			p := b.proxy("a")
			p.redir.bypErr = tt.bypErr
			p.px.surroundings.Store(&surroundings{caught: tt.meshed})
			dials := 0
			p.px.net = hookedNet{podNet: p.fakePod, out: func(ctx context.Context, _ linux.Control, _ netip.Addr, dst netip.AddrPort) (*net.TCPConn, error) {
				if dials++; tt.dialErr != nil {
					return nil, tt.dialErr
				}
				return dialTCP(ctx, dst)
			}}
			dst := b.server()
			if tt.deaf {
				dst = nowhere
			}
			far, done := p.carry(t, p.px.outbound, dst)
			if tt.want == agentapi.ModeReset {
				wantReset(t, far)
			} else {
				pingOnce(t, far)
				if s := b.a.sessions.list(p.px); len(s) != 1 || s[0].info().Mode != tt.want {
					t.Errorf("sessions %v, want one on %s", s, tt.want)
				}
				if d := cmp.Diff(tt.uses, b.use()); d != "" {
					t.Errorf("uses (-want +got):\n%s", d)
				}
				exchange(t, far, 100_000)
			}
			<-done
			b.wantEnded(tt.want, tt.code, tt.detail)
			if dials != tt.dials {
				t.Errorf("dialed %d times, want %d", dials, tt.dials)
			}
			var bypassed agentapi.Code
			if x := b.a.bypasses.get("test/a", dst, b.a.started); x != nil {
				bypassed = x.Reason
			}
			if bypassed != tt.bypassed || (tt.bypassed != "") != (len(p.redir.bypassed) == 1) {
				t.Errorf("left alone because of %q, %v; want %q", bypassed, p.redir.bypassed, tt.bypassed)
			}
			if want := map[bool]time.Duration{true: 100 * time.Second, false: 100 * time.Second / tempShare}[tt.lasting || tt.err != nil]; tt.bypassed != "" && p.redir.ttl != want {
				t.Errorf("left alone for %v, want %v", p.redir.ttl, want)
			}
		})
	}
}

// TestProxy_inbound: what becomes of a connection with the option from the network.
func TestProxy_inbound(t *testing.T) {
	for _, tt := range []struct {
		name            string
		extra, policies string
		mode            smcr.Mode
		reason          clc.Reason
		err             error
		deaf            bool // the application does not listen

		want    string // mode
		code    agentapi.Code
		uses    use          // while it is carried
		decline []clc.Reason // of each rendezvous
	}{
		{name: "smcr", policies: preferAll, mode: smcr.ModeSMCR, want: "SMC-R", uses: use{SMCR: 1}, decline: []clc.Reason{clc.ReasonNone}},
		{name: "the rendezvous gives TCP", policies: preferAll, reason: clc.ReasonDiffPrefix, want: "TCP", code: "DIFFPREFIX", uses: use{Relays: 1}, decline: []clc.Reason{clc.ReasonNone}},
		{name: "the rendezvous gives TCP and required", policies: requireAll, reason: clc.ReasonDiffPrefix, want: "reset", code: agentapi.CodeRequired, decline: []clc.Reason{clc.ReasonNone}},
		{name: "policy", policies: "policies:\n- {name: p, ports: [9]}\n", mode: smcr.ModeSMCR, want: "TCP", code: agentapi.CodeNoPolicy, uses: use{Relays: 1}, decline: []clc.Reason{clc.ReasonConfigErr}},
		{name: "budget", extra: "  budgets: {node: {connections: 1}, pod: {connections: 0}}\n", policies: preferAll, mode: smcr.ModeSMCR, want: "TCP", code: agentapi.CodeBudgetConns, uses: use{Relays: 1}, decline: []clc.Reason{clc.ReasonMem}},
		{name: "budget and required", extra: "  budgets: {node: {connections: 1}, pod: {connections: 0}}\n", policies: requireAll, mode: smcr.ModeSMCR, want: "reset", code: agentapi.CodeRequired, decline: []clc.Reason{clc.ReasonMem}},
		{name: "application refuses", policies: preferAll, deaf: true, want: "reset", code: agentapi.CodeApplication},
		{name: "rendezvous breaks", policies: preferAll, err: errors.New("no CLC"), want: "reset", code: agentapi.CodeRendezvous, decline: []clc.Reason{clc.ReasonNone}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b := newAbleBare(t, tt.extra, tt.policies)
			b.stack.set(tt.mode, tt.reason, tt.err)
			p := b.proxy("a")
			p.app = b.server()
			if tt.deaf {
				p.app = nowhere
			}
			far, done := p.carry(t, p.px.inbound, netip.MustParseAddrPort("127.0.0.1:80"))
			if tt.want == agentapi.ModeReset {
				wantReset(t, far)
			} else {
				pingOnce(t, far)
				if d := cmp.Diff(tt.uses, b.use()); d != "" {
					t.Errorf("uses (-want +got):\n%s", d)
				}
				exchange(t, far, 100_000)
			}
			<-done
			b.wantEnded(tt.want, tt.code, "")
			if d := b.decided(); d.Direction != agentapi.Inbound || d.Source != addrPort(far.LocalAddr()).Addr() {
				t.Errorf("decision %+v", d)
			}
			if d := cmp.Diff(tt.decline, b.stack.declined); d != "" {
				t.Errorf("declined (-want +got):\n%s", d)
			}
			if len(p.redir.bypassed) > 0 {
				t.Errorf("left alone: %v, which is of no use for connections that come in", p.redir.bypassed)
			}
		})
	}
}

// TestProxy_inboundBacklog: what becomes of a connection from the network whose application takes it late.
func TestProxy_inboundBacklog(t *testing.T) {
	refused := errors.New("refused")
	for _, tt := range []struct {
		name     string
		policies string
		said     error // by the application, at last
		err      error // of the rendezvous
		aborted  bool  // the session, while the application waits
		left     bool  // the client resets the connection then

		waits   use // what it uses meanwhile
		want    string
		code    agentapi.Code
		decline []clc.Reason
	}{
		{name: "tcp", policies: preferAll, waits: use{Relays: 1}, want: "TCP", code: agentapi.CodeBacklog, decline: []clc.Reason{clc.ReasonInternal}},
		{name: "refuses at last", policies: preferAll, said: refused, waits: use{Relays: 1}, want: "reset", code: agentapi.CodeApplication, decline: []clc.Reason{clc.ReasonInternal}},
		{name: "aborted", policies: preferAll, aborted: true, waits: use{Relays: 1}, want: "reset", code: agentapi.CodeDraining, decline: []clc.Reason{clc.ReasonInternal}},
		{name: "the client goes", policies: preferAll, left: true, waits: use{Relays: 1}, want: "TCP", code: agentapi.CodeBacklog, decline: []clc.Reason{clc.ReasonInternal}},
		{name: "the rendezvous breaks", policies: preferAll, err: errors.New("no CLC"), want: "reset", code: agentapi.CodeRendezvous, decline: []clc.Reason{clc.ReasonInternal}},
		{name: "required", policies: requireAll, waits: use{Pending: 1}, want: "SMC-R", decline: []clc.Reason{clc.ReasonNone}},
		{name: "required, refuses at last", policies: requireAll, said: refused, waits: use{Pending: 1}, want: "reset", code: agentapi.CodeApplication},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b := newAbleBare(t, "", tt.policies)
			b.stack.set(smcr.ModeSMCR, clc.ReasonNone, tt.err)
			b.a.cfg.appPatience, b.a.cfg.clientEvery = 10*time.Millisecond, 10*time.Millisecond
			p := b.proxy("a")
			p.app = b.server()
			takes := make(chan struct{})
			p.px.net = hookedNet{podNet: p.fakePod, app: func(ctx context.Context, client netip.Addr, dst netip.AddrPort) (*net.TCPConn, error) {
				select {
				case <-takes:
				case <-ctx.Done():
					return nil, ctx.Err()
				}
				if tt.said != nil {
					return nil, tt.said
				}
				return p.dialApp(ctx, client, dst)
			}}
			far, done := p.carry(t, p.px.inbound, netip.MustParseAddrPort("127.0.0.1:80"))
			<-time.After(5 * b.a.cfg.appPatience)
			if tt.err == nil {
				eventually(t, func() string { return cmp.Diff(tt.waits, b.use()) })
				wantLive(t, far)
			}
			switch {
			case tt.aborted:
				b.a.sessions.list(nil)[0].abort(agentapi.CodeDraining)
			case tt.left:
				reset(far)
			default:
				close(takes)
			}
			switch {
			case tt.want == agentapi.ModeReset:
				wantReset(t, far)
			case !tt.left:
				exchange(t, far, 100_000)
			}
			<-done
			if !tt.left {
				b.wantEnded(tt.want, tt.code, "")
			} else if d := b.decided(); d.Mode != tt.want || d.Reason != tt.code || b.a.metrics.sum().connsTCP != 0 {
				t.Errorf("decision %+v, want %s %q; and nothing was carried", d, tt.want, tt.code)
			}
			b.wantFree()
			if d := cmp.Diff(tt.decline, b.stack.declined); d != "" {
				t.Errorf("declined (-want +got):\n%s", d)
			}
		})
	}
}

// observed is a server whose connections' ends a test learns: nil for an orderly end.
func observed(t testing.TB) (addr netip.AddrPort, ends <-chan error) {
	t.Helper()
	l := value(net.ListenTCP("tcp4", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)}))(t)
	got := make(chan error, 1)
	serve(t, l, func(c *net.TCPConn) {
		_ = c.SetDeadline(time.Now().Add(waitLimit))
		_, err := c.Read(make([]byte, 1))
		got <- err
	})
	return addrPort(l.Addr()), got
}

// TestProxy_abortedMeanwhile: a session that is aborted while it is connected leaves no side open,
// whatever the agent was doing, and does not count as the destination's fault.
func TestProxy_abortedMeanwhile(t *testing.T) {
	type parts struct {
		*bare
		*barePod
	}
	abort := func(p parts) {
		for _, s := range p.a.sessions.list(p.px) {
			s.abort(agentapi.CodePolicyChange)
		}
	}
	inRendezvous := func(mode smcr.Mode, err error) func(parts) {
		return func(p parts) {
			p.bare.stack.set(mode, clc.ReasonPeerNoSMC, err)
			p.px.stack = hookedStack{p.bare.stack, func() { abort(p) }}
		}
	}
	for _, tt := range []struct {
		name    string
		inbound bool
		spoil   func(parts)
	}{
		{"outbound, dial", false, func(p parts) {
			p.px.net = hookedNet{podNet: p.fakePod, out: func(ctx context.Context, _ linux.Control, _ netip.Addr, dst netip.AddrPort) (*net.TCPConn, error) {
				c, err := dialTCP(ctx, dst)
				abort(p)
				return c, errors.Join(err, ctx.Err())
			}}
		}},
		{"outbound, rendezvous", false, inRendezvous(smcr.ModeSMCR, nil)},
		{"outbound, rendezvous gives TCP", false, inRendezvous(smcr.ModeTCP, nil)},
		{"outbound, rendezvous breaks", false, inRendezvous(smcr.ModeTCP, errors.New("no CLC"))},
		{"inbound, dial", true, func(p parts) {
			p.px.net = hookedNet{podNet: p.fakePod, app: func(ctx context.Context, _ netip.Addr, dst netip.AddrPort) (*net.TCPConn, error) {
				c, err := dialTCP(ctx, p.app)
				abort(p)
				return c, err
			}}
		}},
		{"inbound, rendezvous", true, inRendezvous(smcr.ModeSMCR, nil)},
		{"inbound, rendezvous gives TCP", true, inRendezvous(smcr.ModeTCP, nil)},
		{"inbound, rendezvous breaks", true, inRendezvous(smcr.ModeTCP, errors.New("no CLC"))},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b := newAbleBare(t, "  negativeCacheTTL: 0s\n", preferAll)
			p := b.proxy("a")
			server, ends := observed(t)
			p.app = server
			tt.spoil(parts{b, p})
			way, dst := p.px.outbound, server
			if tt.inbound {
				way, dst = p.px.inbound, netip.MustParseAddrPort("127.0.0.1:80")
			}
			far, done := p.carry(t, way, dst)
			wantReset(t, far)
			<-done
			if err := <-ends; !errors.Is(err, syscall.ECONNRESET) {
				t.Errorf("the other side reads %v, want a reset", err)
			}
			b.wantEnded(agentapi.ModeReset, agentapi.CodePolicyChange, "")
			if len(p.redir.bypassed) > 0 {
				t.Errorf("left alone: %v", p.redir.bypassed)
			}
			b.wantFree()
		})
	}
}

// TestProxy_requiredMeanwhile: a session whose policy comes to require SMC-R while it is connected does not become
// a relay on plain TCP.
func TestProxy_requiredMeanwhile(t *testing.T) {
	for _, inbound := range []bool{false, true} {
		b := newAbleBare(t, "  negativeCacheTTL: 0s\n", preferAll)
		p := b.proxy("a")
		p.app = b.server()
		b.stack.set(smcr.ModeTCP, clc.ReasonPeerNoSMC, nil)
		p.px.stack = hookedStack{b.stack, func() {
			b.put("", requireAll)
			p.px.enforcePolicies() // it may still become SMC-R
		}}
		way, dst := p.px.outbound, p.app
		if inbound {
			way, dst = p.px.inbound, netip.MustParseAddrPort("127.0.0.1:80")
		}
		far, done := p.carry(t, way, dst)
		wantReset(t, far)
		<-done
		b.wantEnded(agentapi.ModeReset, agentapi.CodeRequired, "")
	}
}

// TestProxy_abortedRendezvousBypass: the destination of a rendezvous that broke because the session
// ended is tried again.
func TestProxy_abortedRendezvousBypass(t *testing.T) {
	b := newAbleBare(t, "", preferAll)
	p := b.proxy("a")
	b.stack.set(smcr.ModeTCP, clc.ReasonNone, context.Canceled)
	p.px.stack = hookedStack{b.stack, func() { p.px.abort(agentapi.CodeDraining) }}
	far, done := p.carry(t, p.px.outbound, b.server())
	wantReset(t, far)
	<-done
	b.wantEnded(agentapi.ModeReset, agentapi.CodeDraining, "")
	if len(p.redir.bypassed) > 0 {
		t.Errorf("left alone: %v", p.redir.bypassed)
	}
}

// errControl is what noConn's control returns: a control function wanted the socket.
var errControl = errors.New("the socket was to be changed")

// noConn is a socket that no control function can use.
type noConn struct{ syscall.RawConn }

func (noConn) Control(func(uintptr)) error { return errControl }

// TestProxy_dialsWithOption: a connection goes out from the application's address, with the option
// if it may be on SMC-R, and else with the mark for plain TCP.
func TestProxy_dialsWithOption(t *testing.T) {
	for _, tt := range []struct {
		name, policies string
		noOption       bool
		want           error // of the control function; fakeOption leaves the socket alone
	}{
		{"selected", preferAll, false, nil},
		{"not selected", "policies:\n- {name: p, ports: [9]}\n", false, errControl},
		{"no option", preferAll, true, errControl},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b := newAbleBare(t, "", tt.policies)
			if tt.noOption {
				b.a.option = nil
			}
			p := b.proxy("a")
			dialed := false
			p.px.net = hookedNet{podNet: p.fakePod, out: func(_ context.Context, control linux.Control, local netip.Addr, _ netip.AddrPort) (*net.TCPConn, error) {
				dialed = true
				if err := control("tcp4", "192.0.2.9:80", noConn{}); !errors.Is(err, tt.want) {
					t.Errorf("control = %v, want %v", err, tt.want)
				}
				if want := netip.MustParseAddr("127.0.0.1"); local != want {
					t.Errorf("dialed from %v, want %v", local, want)
				}
				return nil, syscall.ECONNREFUSED
			}}
			far, done := p.carry(t, p.px.outbound, netip.MustParseAddrPort("192.0.2.9:80"))
			wantReset(t, far)
			<-done
			if !dialed {
				t.Error("not dialed")
			}
		})
	}
}
