// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"cmp"
	"context"
	"errors"
	"net"
	"net/netip"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/config"
	"github.com/smcr-io/kube-smcr/internal/linux"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
)

// flow is one connection that the agent carries. The fields above mu do not
// change after it was registered.
type flow struct {
	id       uint64
	run      *run
	pod      config.Pod
	dir      config.Direction
	src, dst netip.AddrPort
	decision config.Decision
	opened   time.Time
	cancel   context.CancelCauseFunc
	place    *place // of the goroutine that carries the connection

	mu      sync.Mutex // guards what is below
	app     *net.TCPConn
	carrier carrier // once the rendezvous is over
	mode    string
	code    agentapi.Code
	ended   agentapi.Code // why the agent ended it
}

// errEnded is why flows end that the agent itself ends.
var errEnded = errors.New("ended by the agent")

// peer is the other side's address with the port of the service.
func (f *flow) peer() netip.AddrPort {
	if f.dir == config.Inbound {
		return netip.AddrPortFrom(f.src.Addr(), f.dst.Port())
	}
	return f.dst
}

// abort ends the flow: both sides see a reset.
func (f *flow) abort(code agentapi.Code) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.ended != "" {
		return
	}
	f.ended = code
	f.cancel(errEnded)
	reset(f.app)
	if f.carrier != nil {
		_ = f.carrier.Abort() // it may be over already
	}
}

// accepted enters the application's side of an inbound flow, which was the
// network's so far; false if the flow was ended meanwhile.
func (f *flow) accepted(app *net.TCPConn) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.ended != "" {
		return false
	}
	f.app = app
	return true
}

// carry enters what the rendezvous gave; false if the flow was ended
// meanwhile.
func (f *flow) carry(c carrier, mode string, code agentapi.Code) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.ended != "" {
		return false
	}
	f.carrier, f.mode, f.code = c, mode, code
	return true
}

func (f *flow) endedBy() agentapi.Code {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.ended
}

func (f *flow) modeNow() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.mode
}

func (f *flow) info() agentapi.Conn {
	f.mu.Lock()
	defer f.mu.Unlock()
	c := agentapi.Conn{
		ID: f.id, Pod: f.pod.String(), Direction: f.dir.String(), Source: f.src, Dest: f.dst,
		Mode: f.mode, Reason: f.code, Policy: f.decision.Policy, Opened: f.opened,
	}
	if f.carrier == nil {
		return c
	}
	i := f.carrier.Info()
	c.SetupUS = i.Setup.Microseconds()
	c.BytesSent, c.BytesRecv = i.BytesSent, i.BytesRecv
	if i.Mode == smcr.ModeSMCR {
		c.Version = i.Version
		c.LinkGroup, c.Link, c.FirstContact, c.Token, c.State = i.GroupID, i.LinkID, i.FirstContact, i.Token, i.State
		c.SendBuffer, c.RMBE, c.PeerRMBE = i.SendBuffer, i.RMBE, i.PeerRMBE
		c.RDMAWrites, c.CDCSent, c.CDCRecv = i.RDMAWrites, i.CDCSent, i.CDCRecv
	}
	return c
}

// flows are the live flows of the agent.
type flows struct {
	mu   sync.Mutex // guards what is below
	last uint64
	all  map[uint64]*flow
}

func (fs *flows) add(f *flow) {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	fs.last++
	f.id = fs.last
	fs.all[f.id] = f
}

func (fs *flows) remove(f *flow) {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	delete(fs.all, f.id)
}

// list returns the live flows of a run, or of all if it is nil, the oldest
// first.
func (fs *flows) list(r *run) []*flow {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	out := make([]*flow, 0, len(fs.all))
	for _, f := range fs.all {
		if r == nil || f.run == r {
			out = append(out, f)
		}
	}
	slices.SortFunc(out, func(a, b *flow) int { return cmp.Compare(a.id, b.id) })
	return out
}

// begin registers a connection that was accepted in the pod. end takes it off
// again.
func (r *run) begin(ctx context.Context, app *net.TCPConn, f *flow) (_ *flow, flowCtx context.Context, end func()) {
	flowCtx, f.cancel = context.WithCancelCause(ctx)
	f.run, f.app, f.mode, f.opened = r, app, agentapi.ModeConnecting, time.Now()
	local := f.src.Addr()
	if f.dir == config.Inbound {
		local = f.dst.Addr()
	}
	f.pod = r.identity(local)
	f.decision = r.agent.node.Load().Decide(f.pod, f.peer(), f.dir)
	r.agent.flows.add(f)
	if ctx.Err() != nil {
		// abort ended the run's life before it looked for flows, so one of the
		// two sees the other.
		f.abort(agentapi.CodeDraining)
	}
	return f, flowCtx, func() {
		r.agent.flows.remove(f)
		f.cancel(nil)
	}
}

// outbound carries a connection that the application made to dst. It owns app.
func (r *run) outbound(ctx context.Context, app *net.TCPConn, dst netip.AddrPort, p *place) {
	if err := mortal(app); err != nil {
		reset(app)
		return
	}
	f, ctx, end := r.begin(ctx, app, &flow{dir: config.Outbound, src: addrPort(app.RemoteAddr()), dst: dst, place: p})
	defer end()
	why := r.entitle(f)
	if why.code != agentapi.CodeOK && f.decision.Required {
		r.refuse(f, nil, why)
		return
	}
	code := why.code
	if code != agentapi.CodeOK && !r.setAside(f, code) {
		r.broken(f, nil, code, errors.New("the connection could come back here: its destination was not entered in the negative cache"))
		return
	}
	control := linux.ControlMark(markPlain)
	if code == agentapi.CodeOK && r.agent.option != nil {
		control = r.agent.option.ControlDial
	}
	dctx, stop := context.WithTimeout(ctx, dialTimeout)
	tcp, err := r.net.dialOut(dctx, control, f.src.Addr(), dst)
	stop()
	if err == nil {
		err = mortal(tcp)
	}
	if err != nil {
		r.broken(f, tcp, agentapi.CodeConnect, err)
		return
	}
	if code != agentapi.CodeOK {
		r.carryPlain(f, tcp, why)
		return
	}
	short := r.shortage()
	c, err := r.stack.client(ctx, tcp)
	if err != nil {
		if !errors.Is(err, syscall.ECONNRESET) && ctx.Err() == nil {
			r.bypass(f, agentapi.CodeRendezvous, false) // the next one goes without
		}
		r.broken(f, nil, agentapi.CodeRendezvous, err)
		return
	}
	r.settled(f, c, tcp, short)
}

// inbound carries a connection from the network to dst whose SYN had the option.
// It owns tcp. The application is asked first: if it refuses, the client learns
// it as it would without SMC-R, by a reset.
func (r *run) inbound(ctx context.Context, tcp *net.TCPConn, dst netip.AddrPort, p *place) {
	src := addrPort(tcp.RemoteAddr())
	if err := mortal(tcp); err != nil {
		reset(tcp)
		return
	}
	// Until there is the application's side the network's takes its place.
	f, ctx, end := r.begin(ctx, tcp, &flow{dir: config.Inbound, src: src, dst: dst, place: p})
	defer end()
	dctx, stop := context.WithTimeout(ctx, appTimeout)
	app, err := r.net.dialApp(dctx, src.Addr(), dst)
	stop()
	if err == nil {
		if err = mortal(app); err != nil {
			reset(app)
		}
	}
	if err == nil && !f.accepted(app) {
		reset(app)
		err = errEnded
	}
	if err != nil {
		r.broken(f, nil, agentapi.CodeApplication, err)
		return
	}
	why := r.entitle(f)
	short := r.shortage()
	c, err := r.stack.server(ctx, tcp, declineReason(why.code))
	if err != nil {
		r.broken(f, nil, agentapi.CodeRendezvous, err)
		return
	}
	if why.code != agentapi.CodeOK {
		r.tcpMode(f, c, tcp, why)
		return
	}
	r.settled(f, c, tcp, short)
}

// entitle says why a flow may not be on SMC-R, or gives it one of the places for
// those that are.
func (r *run) entitle(f *flow) fallback {
	why := fallback{code: r.accelerate(f)}
	if why.code != agentapi.CodeOK {
		return why
	}
	if full := f.place.take(conns); full != "" {
		return fallback{code: agentapi.CodeBudgetConns, detail: full}
	}
	return why
}

// fallback is why a connection is not on SMC-R.
type fallback struct {
	code         agentapi.Code
	peerDeclined bool
	detail       string // what there is to say beyond the code, or ""
}

// shortage is how often something was missing for connections of the pod.
type shortage struct {
	memory, device uint64
	full           string // the budget of memory that was full last
}

func (r *run) shortage() shortage {
	n, full := r.memory.memoryRefusals()
	return shortage{memory: n, device: r.refused.Load(), full: full}
}

// fallbackOf says why a rendezvous ended with TCP. A stack without memory
// declines with MEM, and so does one whose device has not what it needs.
func (r *run) fallbackOf(i smcr.Info, before shortage) fallback {
	why := fallback{code: agentapi.CodeOf(i.Reason), peerDeclined: i.PeerDeclined}
	if i.Reason != clc.ReasonMem || i.PeerDeclined {
		return why
	}
	switch now := r.shortage(); {
	case now.memory != before.memory:
		why.code, why.detail = agentapi.CodeBudgetMemory, now.full
	case now.device == before.device:
		why.code, why.detail = agentapi.CodeBudgetMemory, podFull // the stack asks for no more than the pod may have
	}
	return why
}

// declineReason is what a client is told.
func declineReason(code agentapi.Code) clc.Reason {
	switch code {
	case agentapi.CodeOK:
		return clc.ReasonNone
	case agentapi.CodeBudgetConns, agentapi.CodeBudgetMemory:
		return clc.ReasonMem
	case agentapi.CodePodDevice, agentapi.CodeOf(clc.ReasonNoDev):
		return clc.ReasonNoDev
	}
	return clc.ReasonConfigErr
}

// accelerate says why a flow may not be on SMC-R, before the peer is asked.
func (r *run) accelerate(f *flow) agentapi.Code {
	if !f.decision.Accelerate {
		return codeOfDecision(f.decision)
	}
	if code := r.agent.incapable(r.set).code; code != "" {
		return code
	}
	if code := r.meshed().code; code != "" {
		return code
	}
	return codeOfBar(r.bar())
}

// codeOfBar is the code of what keeps a pod off SMC-R.
func codeOfBar(b config.Bar) agentapi.Code {
	switch b {
	case config.BarTransport:
		return agentapi.CodeTransport
	case config.BarVersion:
		return agentapi.CodeOf(clc.ReasonVersMismat)
	case config.BarNone:
	}
	return agentapi.CodeOK
}

// codeOfDecision is the code of a decision against SMC-R.
func codeOfDecision(d config.Decision) agentapi.Code {
	if d.Reason == config.ReasonOptedOut {
		return agentapi.CodeOptedOut
	}
	return agentapi.CodeNoPolicy
}

// settled goes on after the rendezvous.
func (r *run) settled(f *flow, c carrier, tcp *net.TCPConn, before shortage) {
	i := c.Info()
	r.agent.metrics.setup.Observe(i.Setup.Seconds())
	if i.Mode != smcr.ModeSMCR {
		why := r.fallbackOf(i, before)
		if f.dir == config.Outbound && !f.decision.Required {
			r.bypass(f, why.code, temporary(i.Reason))
		}
		r.tcpMode(f, c, tcp, why)
		return
	}
	f.place.settle(conns)
	if !f.carry(c, i.Mode.String(), agentapi.CodeOK) {
		_ = c.Abort() // the flow was ended during the rendezvous
		return
	}
	r.record(f, i.Mode.String(), fallback{})
	r.agent.metrics.opened(f.dir, i.Mode)
	sent, recv, err := relay(f.app, c, tcp)
	r.agent.metrics.relayed(smcr.ModeSMCR, uint64(sent+recv))
	r.finished(f, err)
}

// tcpMode relays a connection that stays TCP, or resets it if SMC-R is
// required.
func (r *run) tcpMode(f *flow, c carrier, tcp *net.TCPConn, why fallback) {
	if f.decision.Required {
		r.refuse(f, c, why)
		return
	}
	full := f.place.settle(relays)
	r.press()
	if full != "" {
		_ = c.Abort() // it is being reset anyway
		r.broken(f, nil, agentapi.CodeBudgetRelays, errors.New(full))
		return
	}
	if !f.carry(c, smcr.ModeTCP.String(), why.code) {
		_ = c.Abort() // the flow was ended during the rendezvous
		return
	}
	if why.code == agentapi.CodeNoPolicy {
		why.detail = f.decision.Reason.String()
	}
	r.record(f, smcr.ModeTCP.String(), why)
	r.agent.metrics.opened(f.dir, smcr.ModeTCP)
	r.agent.metrics.fallback(why.code)
	sent, recv, err := relay(f.app, c, tcp)
	r.agent.metrics.relayed(smcr.ModeTCP, uint64(sent+recv))
	r.finished(f, err)
}

// carryPlain relays without having asked the peer.
func (r *run) carryPlain(f *flow, tcp *net.TCPConn, why fallback) {
	r.tcpMode(f, plainTCP{tcp, f.opened}, tcp, why)
}

// refuse resets a connection that the policy does not want without SMC-R.
func (r *run) refuse(f *flow, c carrier, why fallback) {
	if c != nil {
		_ = c.Abort() // it is being reset anyway
	}
	reset(f.app)
	r.record(f, agentapi.ModeReset, fallback{agentapi.CodeRequired, why.peerDeclined, string(why.code) + ": " + why.code.Text()})
	r.agent.metrics.fallback(why.code)
	r.agent.metrics.reset(agentapi.CodeRequired)
}

// broken resets the application's connection because the network's side, or
// the other way round, could not be had.
func (r *run) broken(f *flow, tcp *net.TCPConn, code agentapi.Code, err error) {
	if tcp != nil {
		reset(tcp)
	}
	reset(f.app)
	if by := f.endedBy(); by != "" {
		code = by
	}
	r.record(f, agentapi.ModeReset, fallback{code: code, detail: err.Error()})
	r.agent.metrics.reset(code)
}

// finished notes how a relay ended.
func (r *run) finished(f *flow, err error) {
	by := f.endedBy()
	if by == "" {
		if err != nil {
			r.log.Debug("connection reset", "conn", f.id, "peer", f.peer(), "err", err)
		}
		return
	}
	r.record(f, agentapi.ModeReset, fallback{code: by})
	r.agent.metrics.reset(by)
}

// record keeps a decision for explain, and logs it when it is news.
func (r *run) record(f *flow, mode string, why fallback) {
	news := r.agent.decisions.record(agentapi.Decision{
		Pod: f.pod.String(), Direction: f.dir.String(), Source: f.src.Addr(), Dest: f.dst,
		Mode: mode, Reason: why.code, PeerDeclined: why.peerDeclined, Detail: why.detail, Policy: f.decision.Policy, Last: time.Now(),
	})
	if !news {
		return
	}
	ok, dropped := r.agent.news.pass(time.Now())
	if !ok {
		return // explain has it all the same
	}
	log := r.log.Info
	if mode == agentapi.ModeReset {
		log = r.log.Warn
	}
	log("connection settled", "conn", f.id, "direction", f.dir, "peer", f.peer(), "mode", mode,
		"reason", why.code, "detail", cmp.Or(why.detail, why.code.Text()), "policy", f.decision.Policy, "leftOut", dropped)
}

// setAside has the next connections to a destination go straight there, before
// one is made that stays TCP, for reasons for which there can be many at a time or
// for which it may come back here. It reports whether this one may be made.
func (r *run) setAside(f *flow, code agentapi.Code) bool {
	switch code {
	case agentapi.CodeBudgetConns, agentapi.CodeBudgetMemory:
		r.bypass(f, code, true)
	case agentapi.CodeMesh:
		return r.bypass(f, code, true)
	}
	return true
}

// bypass lets the next connections to the flow's destination go straight
// there. It reports whether they do.
func (r *run) bypass(f *flow, code agentapi.Code, passing bool) bool {
	n := r.agent.node.Load()
	ttl := n.NegativeCacheTTL
	if passing {
		ttl /= tempShare
	}
	if code == agentapi.CodeMesh {
		ttl = max(ttl, leastMeshBypass)
	}
	if ttl < time.Millisecond || f.decision.Required || n.Decide(f.pod, f.peer(), f.dir).Required {
		return false // the policy may have changed since it was asked
	}
	if err := r.redirect.Bypass(f.dst, ttl); err != nil {
		r.log.Debug("destination not remembered", "peer", f.dst, "err", err) // costs one more rendezvous
		return false
	}
	r.agent.bypasses.add(agentapi.Bypass{Pod: f.pod.String(), Dest: f.dst, Reason: code, Until: time.Now().Add(ttl)}, time.Now())
	return true
}

// temporary says which reasons pass by themselves.
func temporary(r clc.Reason) bool {
	switch r {
	case clc.ReasonMem, clc.ReasonSyncErr, clc.ReasonNoActLink, clc.ReasonNoSrvLink, clc.ReasonInternal,
		clc.ReasonErrRToken, clc.ReasonErrReadyLnk, clc.ReasonErrRegBuf:
		return true
	}
	return false
}

func addrPort(a net.Addr) netip.AddrPort {
	ap := a.(*net.TCPAddr).AddrPort() // both sockets of a flow are TCP
	return netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port())
}

// plainTCP makes a TCP connection a carrier.
type plainTCP struct {
	*net.TCPConn
	opened time.Time
}

// Abort resets the connection.
func (p plainTCP) Abort() error {
	reset(p.TCPConn)
	return nil
}

// RelayTo writes what arrives to w.
func (p plainTCP) RelayTo(w *net.TCPConn) (int64, error) { return smcr.RelayTCP(w, p.TCPConn) }

// RelayFrom sends what arrives on r.
func (p plainTCP) RelayFrom(r *net.TCPConn) (int64, error) { return smcr.RelayTCP(p.TCPConn, r) }

// AwaitEnd waits for the end of both directions, or for a reset.
func (p plainTCP) AwaitEnd() error { return smcr.AwaitTCPEnd(p.TCPConn) }

// Info describes the connection.
func (p plainTCP) Info() smcr.Info {
	return smcr.Info{Local: p.LocalAddr(), Peer: p.RemoteAddr(), Mode: smcr.ModeTCP, Opened: p.opened}
}
