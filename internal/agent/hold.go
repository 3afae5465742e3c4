// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"maps"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/linux"
	"github.com/smcr-io/kube-smcr/internal/synqueue"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
)

// # Held SYNs
//
// The SYN of an application to a selected destination waits in a queue of the pod's namespace until
// the agent's own connection to the destination says where it goes (docs/design/0012):
//
//	application         agent                                   destination
//	SYN, held
//	                    SYN with the option ------------------>
//	                    <------------------------------ SYN-ACK
//	                    no option: RST, nothing was accepted -->
//	let go: SYN ----------------------------------------------->
//	                    with the option: rendezvous <---------->
//	diverted: SYN ----> accepts, and relays on SMC-R
//
// So connect() ends as the destination ends it, and what is not on SMC-R passes no agent. What the
// agent cannot decide in holdPatience is let go.

// holder is *linux.Holder.
type holder interface {
	Run(ctx context.Context) error
	Answer(c synqueue.Conn, d synqueue.Decision, f synqueue.Finding) (wasHeld bool, err error)
	Where(c synqueue.Conn) (waits, bound bool, err error)
	Forget()
	Counters() linux.HolderCounters
	Number() uint16
	Keep(k *linux.Keeper) (number uint32, err error)
	Close() error
}

// holding is how a proxy holds its pod's SYNs.
type holding struct {
	hold   atomic.Pointer[hold]   // nil: SYNs are not held
	unheld atomic.Pointer[string] // why not, or not any more, although the agent holds those of pods

	repairAt    time.Time     // the hold is not opened again before; of the pod's job
	repairPause time.Duration // between the last two tries
}

// hold holds the SYNs of one pod.
type hold struct {
	px     *proxy
	holder holder
	stop   context.CancelFunc // ends run
	ended  chan struct{}      // closed when run returns
	once   sync.Once          // of close

	mu         sync.Mutex // guards what is below
	arrivals   map[way][]*arrival
	shortSince time.Time // the last SYNs found no pending place since then
	shortLast  time.Time // until then; zero: the last one did
}

// arrival is the wait of a session for the application's connection, whose SYN was diverted.
type arrival struct {
	srcPort uint16            // of the application
	app     chan *net.TCPConn // has room for the connection
}

// way is the way of a pod's connections to one destination. Which of its connections a session on
// SMC-R gets does not matter, as all of them are new. And it is not always known: connection
// tracking gives a diverted connection another source port if the application's is still
// remembered with the agent's listener, since another connection from there was diverted within the
// last two minutes:
//
//	10.0.0.1:40000 to 10.0.0.2:80   ended a minute ago    the agent saw 10.0.0.1:40000
//	10.0.0.1:40000 to 10.0.0.3:80   the same port again   the agent sees 10.0.0.1:52111
type way struct {
	src netip.Addr
	dst netip.AddrPort
}

func wayOf(c synqueue.Conn) way { return way{c.Src.Addr(), c.Dst} }

// openHold binds a queue in the pod's namespace. If that is not possible, the pod's connections are
// diverted before it is known where they can go.
func (px *proxy) openHold() {
	if !px.agent.holds.on {
		return
	}
	h := &hold{px: px, ended: make(chan struct{}), arrivals: map[way][]*arrival{}}
	var err error
	h.holder, err = px.net.hold(linux.HolderConfig{
		Marks: holdMarks,
		Table: synqueue.Config{MaxQuestions: min(synqueue.DefaultMaxQuestions, px.account.limit[pending]/2)}, // one pending connection each
		Late: func(c synqueue.Conn) synqueue.Decision {
			if px.agent.node.Load().Decide(px.identity(c.Src.Addr()), c.Dst).Required {
				return synqueue.Drop // TCP repeats it, and it is asked for again
			}
			return synqueue.Pass
		},
		Ask: func(_ *linux.Holder, c synqueue.Conn, held bool) { h.ask(c, held) },
	})
	if err != nil {
		px.hold.Store(nil)
		const what = "SYNs not held: connect() of the pod's programs succeeds before their destination answers"
		before := px.whyUnheld()
		if px.noteUnheld(what, err); px.whyUnheld() != before { // the same error comes back with each try
			px.log.Warn(what, "err", err)
		}
		return
	}
	if err := px.agent.holds.keeper.add(h.holder); err != nil {
		px.log.Warn("queue not kept: what it holds waits for a second if the agent is killed", "err", err)
	}
	px.hold.Store(h)
	px.unheld.Store(nil)
	px.agent.holds.opened(h)
}

// repairHold opens the pod's hold again if its queue ended by itself (no memory for a verdict is enough),
// or could not be bound. What is required to be on SMC-R depends on it: the table sends its SYNs to the
// queue still, and drops what comes out without a verdict, so that connect() would wait for nobody. What
// goes on is none of it: sessions stay, and the table is changed in place. If there is no queue, the table
// diverts without one, as in a pod that never had one.
func (px *proxy) repairHold(now time.Time) {
	old := px.hold.Load()
	if !px.agent.holds.on || old != nil && !old.hasEnded() || now.Before(px.repairAt) {
		return
	}
	if now.Sub(px.repairAt) > retryMost { // it was good for long
		px.repairPause = 0
	}
	px.repairPause = min(max(2*px.repairPause, retryFirst), retryMost)
	px.repairAt = now.Add(px.repairPause)
	px.openHold()
	if h := px.hold.Load(); h != nil {
		h.start()
		px.log.Info("SYNs are held again")
	}
	if err := px.updateTable(); err != nil {
		px.log.Warn("redirection not updated; the old one stays in force until that works", "err", err)
		px.tableStale.Store(true) // the manager's next round tries again
	}
	if err := old.close(); err != nil {
		px.log.Debug("queue that ended not closed in order", "err", err)
	}
}

// noteUnheld keeps for the API why the pod's SYNs are not held.
func (px *proxy) noteUnheld(what string, err error) {
	text := what + ": " + err.Error()
	px.unheld.Store(&text)
}

// whyUnheld is why the pod's SYNs are not held although the agent holds those of pods; "" if they
// are. The proxy may be nil.
func (px *proxy) whyUnheld() string {
	if px == nil {
		return ""
	}
	why := px.unheld.Load() // the pod's job may open the hold again meanwhile
	if why == nil {
		return ""
	}
	return *why
}

// start serves the queue.
func (h *hold) start() {
	ctx, stop := context.WithCancel(context.Background())
	h.stop = stop
	go func() {
		defer close(h.ended)
		if err := h.holder.Run(ctx); err != nil && ctx.Err() == nil {
			const what = "SYNs not held until the queue is opened again: the pod's new connections go directly, and are dropped where SMC-R is required"
			h.px.log.Error(what, "err", err)
			h.px.noteUnheld(what, err)
		}
	}()
}

// hasEnded tells whether the queue is served no more.
func (h *hold) hasEnded() bool {
	select {
	case <-h.ended:
		return true
	default:
		return false
	}
}

// close lets go what is held, and unbinds the queue. h may be nil.
func (h *hold) close() error {
	if h == nil {
		return nil
	}
	var err error
	h.once.Do(func() {
		if h.stop != nil {
			h.stop()
			<-h.ended
		}
		h.px.agent.holds.closed(h)
		err = errors.Join(h.px.agent.holds.keeper.remove(h.holder), h.holder.Close())
	})
	return err
}

// forget forgets what was found out about destinations. h may be nil.
func (h *hold) forget() {
	if h != nil {
		h.holder.Forget()
	}
}

// ask starts to find out where a connection can go. held says that the connection's SYN waits for the
// answer. If held is false, the SYN has gone on already, and only what is learned of the destination counts.
func (h *hold) ask(c synqueue.Conn, held bool) {
	if h.px.draining.Load() || h.px.released.Load() {
		h.answer(c, synqueue.Pass, synqueue.Finding{})
		return
	}
	h.px.sessionTasks.Go(func() { h.decide(c, held) })
}

// answer gives the verdict on a connection's SYN, and reports whether the SYN was held until now.
func (h *hold) answer(c synqueue.Conn, d synqueue.Decision, f synqueue.Finding) (wasHeld bool) {
	wasHeld, err := h.holder.Answer(c, d, f)
	if err != nil {
		h.px.log.Debug("verdict not given", "peer", c.Dst, "err", err) // the queue ends
	}
	return wasHeld
}

// decide finds out where a connection can go, answers its SYN, and carries the connection if the
// agent is to.
func (h *hold) decide(c synqueue.Conn, held bool) {
	px := h.px
	rv, _ := px.account.reserve(netip.Addr{}, true)
	px.notifyBudget()
	s, ctx, end := px.register(px.life, nil, &session{dir: agentapi.Outbound, src: c.Src, dst: c.Dst, reservation: rv})
	defer end()
	d := synqueue.Drop
	if rv != nil || s.decision.Required { // others are let go at once, and do not come again
		d = h.withoutPlace(rv == nil, time.Now())
	}
	if rv == nil {
		h.leave(s, fallback{code: agentapi.CodeBudgetPending}, d, rememberPassing)
		return
	}
	why := px.admitSMCR(s)
	if why.code == agentapi.CodeOK && !s.decision.Required && px.agent.attached(having(*px.atts.Load(), c.Src.Addr()), c.Dst.Addr()) {
		why.code = agentapi.CodeSameNode
	}
	if why.code != agentapi.CodeOK {
		h.leave(s, why, synqueue.Reset, rememberPassing)
		return
	}
	if held && h.isBound(c) {
		h.leave(s, fallback{code: agentapi.CodeUndiverted, detail: boundDetail}, synqueue.Reset, rememberSpeaking)
		return
	}
	tcp := h.dial(ctx, s)
	if tcp == nil {
		return
	}
	if !held {
		reset(tcp) // the application's own connection is on its way already
		h.answer(c, synqueue.Pass, speaking)
		return
	}
	if peerConn := h.rendezvous(ctx, s, tcp); peerConn != nil {
		h.carry(ctx, s, c, peerConn, tcp)
	}
}

// withoutPlace is what becomes of a SYN that finds no pending place, if SMC-R is required: TCP is to repeat it, as it does
// after a second, until none was there for pendingPatience. A shortage that no SYN met for twice as long may have ended meanwhile.
func (h *hold) withoutPlace(none bool, now time.Time) synqueue.Decision {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !none {
		h.shortLast = time.Time{}
		return synqueue.Drop
	}
	if now.Sub(h.shortLast) >= 2*pendingPatience {
		h.shortSince = now
	}
	h.shortLast = now
	if now.Sub(h.shortSince) >= pendingPatience {
		return synqueue.Reset
	}
	return synqueue.Drop
}

// boundDetail says why a connection cannot be diverted.
const boundDetail = "its socket is bound to a network interface"

// isBound reports whether a connection's socket is bound to an interface, so that the connection cannot be diverted.
func (h *hold) isBound(c synqueue.Conn) bool {
	_, bound, err := h.holder.Where(c)
	if err != nil {
		h.px.log.Debug("not known whether a socket is bound to an interface", "peer", c.Dst, "err", err)
	}
	return bound
}

// speaking is the finding about a destination that speaks SMC-R.
var speaking = synqueue.Finding{Speaks: true, For: speaksFor}

// remember is how long a destination counts as one that does not speak SMC-R.
type remember uint8

const (
	rememberNever   remember = iota // the next connection asks the destination again
	rememberPassing                 // the reason passes by itself
	rememberLasting
	rememberSpeaking // nothing but that each of its connections is asked for by itself
)

// leave lets a connection go without SMC-R or, if a policy requires SMC-R, refuses it as d says. What
// was refused by an ICMP error is refused so: if the application's SYN went there, too, a router that
// sends one ICMP error a second would not answer it. What the destination reset is let go: it resets as
// many, and if its program connects to the application's port at the same time (simultaneous open), it
// resets the agent's connection only.
func (h *hold) leave(s *session, why fallback, d synqueue.Decision, r remember) {
	px, f := h.px, synqueue.Finding{}
	if s.decision.Required {
		switch {
		case d != synqueue.Drop:
			px.refuse(s, nil, why)
		case why.code != agentapi.CodeConnect: // it waits for TCP to repeat the SYN, perhaps in vain
			px.recordRequired(s, why)
			px.agent.metrics.pendingWaits.Inc()
		}
	} else {
		if why.code == agentapi.CodeNoPolicy {
			why.detail = s.decision.Reason.String()
		}
		if d == synqueue.Drop || why.code != agentapi.CodeConnect {
			d = synqueue.Pass
		}
		if r == rememberPassing || r == rememberLasting {
			f.For = staleFor * px.bypassFor(s, why.code, r == rememberPassing)
		}
		px.record(s, smcr.ModeTCP.String(), why)
		px.agent.metrics.fallback(why.code)
	}
	if r == rememberSpeaking {
		f = speaking
	}
	h.answer(synqueue.Conn{Src: s.src, Dst: s.dst}, d, f)
}

// dial connects to the destination with the option. If the destination does not answer, or answers
// without the option, dial gives the SYN its answer with leave and returns nil.
func (h *hold) dial(ctx context.Context, s *session) *net.TCPConn {
	px, wait := h.px, holdPatience
	if s.decision.Required {
		wait = requiredPatience
	}
	dctx, stop := context.WithTimeout(ctx, wait)
	tcp, err := px.net.dialOut(dctx, linux.Controls(px.agent.option.ControlDial, linux.ControlDelayACK, linux.ControlRecvErr), s.src.Addr(), s.dst)
	stop()
	if err != nil {
		d, code := refusalOf(err), connectCode(err)
		if (errors.Is(err, linux.ErrByReset) || code != agentapi.CodeConnect) && !s.decision.Required {
			d = synqueue.Pass
		}
		h.leave(s, fallback{code: code, detail: err.Error()}, d, rememberNever)
		return nil
	}
	offered, err := px.agent.option.PeerOffered(tcp)
	if err == nil && offered {
		err = resetOnClose(tcp)
	}
	if err != nil || !offered {
		reset(tcp)
		why, r := fallback{code: agentapi.CodeOf(clc.ReasonPeerNoSMC)}, rememberLasting
		if err != nil { // an error of this node says nothing about the peer
			why, r = fallback{code: agentapi.CodeOf(clc.ReasonInternal), detail: err.Error()}, rememberPassing
		}
		h.leave(s, why, synqueue.Reset, r)
		return nil
	}
	return tcp
}

// connectCode is why a dial failed with err. If the agent's own SYN was refused before it was sent, the application's went where
// the agent's cannot: by a route for its user, for example.
func connectCode(err error) agentapi.Code {
	if errors.Is(err, linux.ErrUnsent) && refusalOf(err) != synqueue.Drop {
		return agentapi.CodeUndiverted
	}
	return agentapi.CodeConnect
}

// refusalOf is how a connection ends like the agent's own, which failed with err.
func refusalOf(err error) synqueue.Decision {
	switch {
	case errors.Is(err, syscall.ECONNREFUSED), errors.Is(err, syscall.ECONNRESET):
		return synqueue.Reset
	case errors.Is(err, syscall.EHOSTUNREACH):
		return synqueue.HostUnreachable
	case errors.Is(err, syscall.ENETUNREACH):
		return synqueue.NetUnreachable
	case errors.Is(err, syscall.EACCES), errors.Is(err, syscall.EPERM):
		return synqueue.Prohibited
	}
	return synqueue.Drop // no answer, or not the destination's
}

// rendezvous runs the SMC-R rendezvous. If the rendezvous does not end on SMC-R, the SYN gets its answer
// with leave, and rendezvous returns nil.
func (h *hold) rendezvous(ctx context.Context, s *session, tcp *net.TCPConn) peerConn {
	px := h.px
	local := &atomic.Bool{}
	if !s.decision.Required {
		end := px.agent.holds.begin(addrPort(tcp.LocalAddr()), local)
		defer end()
	}
	before := px.shortage()
	c, err := px.stack.client(ctx, tcp)
	switch {
	case local.Load():
		if err == nil {
			_ = c.Abort()
		}
		h.leave(s, fallback{code: agentapi.CodeSameNode}, synqueue.Reset, rememberNever) // another endpoint may be on another node
		return nil
	case errors.Is(err, syscall.ECONNRESET) || err != nil && ctx.Err() != nil:
		h.leave(s, fallback{code: agentapi.CodeRendezvous, detail: err.Error()}, synqueue.Reset, rememberNever)
		return nil
	case err != nil:
		h.leave(s, fallback{code: agentapi.CodeRendezvous, detail: err.Error()}, synqueue.Reset, rememberLasting)
		return nil
	}
	i := c.Info()
	px.agent.metrics.setup.Observe(i.Setup.Seconds())
	if i.Mode == smcr.ModeSMCR {
		return c
	}
	_ = c.Abort() // an error says no more than that the connection is broken already
	r := rememberLasting
	if temporary(i.Reason) {
		r = rememberPassing
	}
	h.leave(s, px.fallbackOf(i, before), synqueue.Reset, r)
	return nil
}

// carry diverts the application's connection to the agent, and relays it.
func (h *hold) carry(ctx context.Context, s *session, conn synqueue.Conn, c peerConn, tcp *net.TCPConn) {
	wait := &arrival{srcPort: conn.Src.Port(), app: make(chan *net.TCPConn, 1)}
	h.mu.Lock()
	h.arrivals[wayOf(conn)] = append(h.arrivals[wayOf(conn)], wait)
	h.mu.Unlock()
	var app *net.TCPConn
	wasHeld := h.answer(conn, synqueue.Divert, speaking)
	if wasHeld {
		t := time.NewTimer(h.px.agent.cfg.arrivalPatience)
		select {
		case app = <-wait.app:
		case <-t.C:
		case <-ctx.Done():
		}
		t.Stop()
	}
	if app == nil {
		app = h.stopWaiting(wayOf(conn), wait)
	}
	switch {
	case app == nil: // the application gave up, or its SYN was let go before, or was lost
		_ = c.Abort()
		if wasHeld && ctx.Err() == nil {
			h.lost(s, conn)
		} else if !wasHeld && !s.decision.Required { // else the SYN was dropped, and comes again
			why := fallback{code: agentapi.CodeLate}
			h.px.record(s, smcr.ModeTCP.String(), why)
			h.px.agent.metrics.fallback(why.code)
		}
		return
	case !s.setApp(app):
		reset(app)
		_ = c.Abort()
		return
	}
	h.px.relaySMCR(s, c, tcp)
}

// lost ends a session whose application still waits, although its SYN was diverted: something in the pod drops what goes to
// the agent. That connection cannot be helped: connection tracking diverts its SYNs from now on. The next ones go directly.
func (h *hold) lost(s *session, conn synqueue.Conn) {
	waits, _, err := h.holder.Where(conn)
	if err != nil {
		h.px.log.Debug("not known whether an application waits still", "peer", conn.Dst, "err", err)
	}
	if !waits {
		return // the application gave up; or it is connected to a listener of the agent, from which the connection came too late
	}
	why := fallback{code: agentapi.CodeUndiverted, detail: "its SYN was diverted, and never came"}
	if s.decision.Required {
		h.px.recordRequired(s, why)
	} else {
		h.px.bypass(s, why.code, false)
		h.px.record(s, agentapi.ModeConnecting, why) // nobody resets it
	}
	h.px.agent.metrics.fallback(why.code)
}

// stopWaiting ends the wait for the application's connection, and returns the connection if it came in
// the last moment.
func (h *hold) stopWaiting(w way, wait *arrival) (app *net.TCPConn) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if i := slices.Index(h.arrivals[w], wait); i >= 0 {
		h.arrivedLocked(w, i)
	}
	select {
	case app = <-wait.app:
	default:
	}
	return app
}

// arrivedLocked takes a wait off the list.
func (h *hold) arrivedLocked(w way, i int) {
	if h.arrivals[w] = slices.Delete(h.arrivals[w], i, i+1); len(h.arrivals[w]) == 0 {
		delete(h.arrivals, w)
	}
}

// deliver gives an accepted connection to a session that waits for it, and reports whether there is
// such a session. h may be nil.
func (h *hold) deliver(conn synqueue.Conn, app *net.TCPConn) bool {
	if h == nil {
		return false
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	w := wayOf(conn)
	waits := h.arrivals[w]
	if len(waits) == 0 {
		return false
	}
	i := max(0, slices.IndexFunc(waits, func(a *arrival) bool { return a.srcPort == conn.Src.Port() }))
	waits[i].app <- app // the channel has room, and nobody else sends to it
	h.arrivedLocked(w, i)
	return true
}

// holds is what the pods' holds share.
type holds struct {
	on     bool // SYNs are held
	form   linux.QueueForm
	err    error // why SYNs are not held although the configuration wants it
	keeper keeper

	mu    sync.Mutex // guards what is below
	dials map[netip.AddrPort][]*atomic.Bool
	open  map[*hold]struct{}
	ended linux.HolderCounters // of the closed ones
}

// enable looks whether SYNs can be held.
func (hs *holds) enable(a *agent) {
	hs.dials, hs.open = map[netip.AddrPort][]*atomic.Bool{}, map[*hold]struct{}{}
	hs.keeper.log = a.cfg.Log
	if !a.cfg.Node.HoldSYNs || a.option == nil {
		return
	}
	hs.form, hs.err = a.cfg.probeQueue()
	if hs.err != nil {
		a.cfg.Log.Warn("SYNs cannot be held: connect() of pods' programs succeeds before their destination answers", "err", hs.err)
		return
	}
	hs.on = true
}

// opened notes a hold whose SYNs are counted.
func (hs *holds) opened(h *hold) {
	hs.mu.Lock()
	defer hs.mu.Unlock()
	hs.open[h] = struct{}{}
}

// closed keeps what an opened hold counted.
func (hs *holds) closed(h *hold) {
	c := h.holder.Counters()
	hs.mu.Lock()
	defer hs.mu.Unlock()
	delete(hs.open, h)
	hs.ended.Add(c)
}

// counters are those of all holds since the start. No pod's holder is asked under the lock, which connections of all pods take.
func (hs *holds) counters() linux.HolderCounters {
	hs.mu.Lock()
	sum, open := hs.ended, slices.Collect(maps.Keys(hs.open))
	hs.mu.Unlock()
	for _, h := range open {
		sum.Add(h.holder.Counters())
	}
	return sum
}

// begin notes the address from which a pod of this agent connects, until end is called. local
// becomes true if the server turns out to be a pod of this agent, too. Connections to several destinations
// may have one address: the kernel gives a port to as many as have different ones.
func (hs *holds) begin(from netip.AddrPort, local *atomic.Bool) (end func()) {
	hs.mu.Lock()
	defer hs.mu.Unlock()
	hs.dials[from] = append(hs.dials[from], local)
	return func() {
		hs.mu.Lock()
		defer hs.mu.Unlock()
		i := slices.Index(hs.dials[from], local)
		if hs.dials[from] = slices.Delete(hs.dials[from], i, i+1); len(hs.dials[from]) == 0 {
			delete(hs.dials, from)
		}
	}
}

// isLocal reports whether an inbound connection comes from a pod of this agent that does without
// SMC-R on its own node, and tells that pod's session: all of those that connect from this address, since
// behind a Service nobody knows which one has come here. What has gone elsewhere is plain TCP this once.
func (hs *holds) isLocal(from netip.AddrPort) bool {
	hs.mu.Lock()
	defer hs.mu.Unlock()
	for _, local := range hs.dials[from] {
		local.Store(true)
	}
	return len(hs.dials[from]) > 0
}
