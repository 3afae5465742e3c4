// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/config"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
)

// session is one connection that the agent carries, on SMC-R or as plain TCP. The fields above mu
// do not change after register.
type session struct {
	id          uint64
	proxy       *proxy
	pod         config.Pod
	dir         agentapi.Direction
	src, dst    netip.AddrPort
	decision    config.Decision
	opened      time.Time
	reservation *reservation // of the goroutine that connects the session; nil: the budget is full
	// users are that goroutine and then the relay, the last of which ends the session.
	users atomic.Int32

	mu       sync.Mutex // guards what is below
	app      *net.TCPConn
	peerConn peerConn // nil until the rendezvous is over
	relay    *relay   // nil until there is something to relay
	mode     string
	code     agentapi.Code
	ended    agentapi.Code // the code of abort
	// version is that of the policy that selected the session last; "" if that has no peer selectors.
	version string
	// cancel ends the context of the session's set-up; nil: it has ended, and holds no memory any more.
	cancel context.CancelCauseFunc
}

// errEnded is the cause of the context of a session that abort ended.
var errEnded = errors.New("ended by the agent")

// peer is the other side's address, with the port of the service.
func (s *session) peer() netip.AddrPort {
	if s.dir == agentapi.Inbound {
		return netip.AddrPortFrom(s.src.Addr(), s.dst.Port())
	}
	return s.dst
}

// abort resets both sides of the session.
func (s *session) abort(code agentapi.Code) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended != "" {
		return
	}
	s.ended = code
	s.endSetup(errEnded)
	reset(s.app)
	if s.peerConn != nil {
		_ = s.peerConn.Abort() // an error says no more than that the connection is over
	}
	s.relay.wake()
}

// isForbidden says whether the policies in force do not allow the session. A session on SMC-R goes on while the policy that selected
// it last says the same as then, though its peer selectors do not find the peer any more: the peer has ended, mostly, and may have left
// bytes to read.
func (s *session) isForbidden() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := s.proxy.agent.node.Load() // with mu held, so that no older node has the last word about version
	is := n.Decide(s.pod, s.peer())
	switch {
	case s.mode == smcr.ModeTCP.String():
		return is.Required
	case is.Accelerate:
		s.version = n.VersionOf(s.pod, is.Policy)
		return false
	}
	return s.decision.Accelerate && !n.HasVersion(s.pod, s.version)
}

// setApp enters the application's connection of an inbound session. It returns false if the session
// was aborted before; then abort has not reset app.
func (s *session) setApp(app *net.TCPConn) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended != "" {
		return false
	}
	s.app = app
	return true
}

// setPeerConn enters what carries the session after the rendezvous. It returns false if the session
// was aborted before; then abort has not reset c.
func (s *session) setPeerConn(c peerConn, mode string, code agentapi.Code) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended != "" {
		return false
	}
	s.peerConn, s.mode, s.code = c, mode, code
	return true
}

// endSetup ends the context of the set-up. The caller holds mu.
func (s *session) endSetup(why error) {
	if s.cancel != nil {
		s.cancel(why)
		s.cancel = nil
	}
}

// setRelay enters the relay of the session before it starts, which ends the set-up. If the session was aborted before, the
// relay sees that its connections are closed.
func (s *session) setRelay(r *relay) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.relay = r
	s.endSetup(nil)
}

// endedBy is the code of abort; empty if the session was not aborted.
func (s *session) endedBy() agentapi.Code {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.ended
}

// info describes the session for the API.
func (s *session) info() agentapi.Conn {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := agentapi.Conn{
		ID: s.id, Pod: s.pod.String(), Direction: s.dir, Source: s.src, Dest: s.dst,
		Mode: s.mode, Reason: s.code, Policy: s.decision.Policy, Opened: s.opened,
	}
	if s.peerConn == nil {
		return c
	}
	i := s.peerConn.Info()
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

// sessions are the live sessions of the agent, those on plain TCP included. Each connection of the node takes its lock: what
// is asked for one proxy is not to look at the sessions of all.
type sessions struct {
	mu   sync.Mutex // guards what is below
	last uint64
	n    int
	of   map[*proxy]map[uint64]*session // by ID; a proxy has an entry while it has a session
}

func (ss *sessions) add(s *session) {
	ss.mu.Lock()
	defer ss.mu.Unlock()
	if ss.of == nil {
		ss.of = map[*proxy]map[uint64]*session{}
	}
	if ss.of[s.proxy] == nil {
		ss.of[s.proxy] = map[uint64]*session{}
	}
	ss.last++
	ss.n++
	s.id = ss.last
	ss.of[s.proxy][s.id] = s
}

// remove may be called for a session that was not added.
func (ss *sessions) remove(s *session) {
	ss.mu.Lock()
	defer ss.mu.Unlock()
	own := ss.of[s.proxy]
	if own[s.id] != s {
		return
	}
	ss.n--
	if delete(own, s.id); len(own) == 0 {
		delete(ss.of, s.proxy)
	}
}

// list returns the live sessions of a proxy, or all if that is nil, the oldest first.
func (ss *sessions) list(px *proxy) []*session {
	out := ss.copy(px)
	slices.SortFunc(out, func(a, b *session) int { return cmp.Compare(a.id, b.id) })
	return out
}

func (ss *sessions) copy(px *proxy) []*session {
	ss.mu.Lock()
	defer ss.mu.Unlock()
	if px != nil {
		return slices.AppendSeq(make([]*session, 0, len(ss.of[px])), maps.Values(ss.of[px]))
	}
	out := make([]*session, 0, ss.n)
	for _, own := range ss.of {
		out = slices.AppendSeq(out, maps.Values(own))
	}
	return out
}

// count is how many list returns.
func (ss *sessions) count(px *proxy) int {
	ss.mu.Lock()
	defer ss.mu.Unlock()
	if px == nil {
		return ss.n
	}
	return len(ss.of[px])
}

// register makes s a live session. The caller calls end, which ends the session if nothing is
// relayed.
func (px *proxy) register(ctx context.Context, app *net.TCPConn, s *session) (_ *session, flowCtx context.Context, end func()) {
	flowCtx, s.cancel = context.WithCancelCause(ctx)
	s.app, s.mode, s.opened = app, agentapi.ModeConnecting, time.Now()
	s.users.Store(1)
	px.decide(s)
	px.agent.sessions.add(s)
	px.enforcePolicy(s) // policies that changed since decide have not found the session
	if ctx.Err() != nil {
		// proxy.abort first ends the proxy's life, and then lists its sessions:
		//
		//	register                  proxy.abort
		//	sessions.add              kill ends life
		//	is ctx ended?             sessions.list
		//
		// Whichever comes first, the session is aborted: abort finds it in the list, or register
		// finds that ctx has ended.
		s.abort(agentapi.CodeDraining)
	}
	return s, flowCtx, s.leave
}

// leave ends the use of the session by one of its users, the last of which ends the session.
func (s *session) leave() {
	if s.users.Add(-1) > 0 {
		return
	}
	s.proxy.agent.sessions.remove(s)
	s.mu.Lock()
	s.endSetup(nil)
	s.mu.Unlock()
	if s.reservation != nil {
		s.reservation.release()
	}
}

// relay relays the session between app and c, below which is tcp. It returns at once; then is
// called when the session is over.
func (px *proxy) relay(s *session, c peerConn, tcp *net.TCPConn, then func(sent, recv int64, err error)) {
	s.users.Add(1)
	px.sessionTasks.Add(1)
	r := newRelay(px.agent.parker, s.app, c, tcp, func(sent, recv int64, err error) {
		defer px.sessionTasks.Done()
		defer s.leave()
		then(sent, recv, err)
	})
	s.setRelay(r)
	r.start()
}

// decide enters the session's pod, and what the policies say of the session, which nobody else knows yet.
func (px *proxy) decide(s *session) {
	local := s.src.Addr()
	if s.dir == agentapi.Inbound {
		local = s.dst.Addr()
	}
	s.proxy, s.pod = px, px.identity(local)
	n := px.agent.node.Load()
	s.decision = n.Decide(s.pod, s.peer())
	s.version = n.VersionOf(s.pod, s.decision.Policy)
}

// recordEnd records why the agent reset a session, if it did, or that its link group ended.
func (px *proxy) recordEnd(s *session, err error) {
	by := s.endedBy()
	if by == "" && errors.Is(err, smcr.ErrLinkGroupLost) {
		by = agentapi.CodeGroupLost
	}
	if by == "" {
		if err != nil {
			px.log.Debug("connection reset", "conn", s.id, "peer", s.peer(), "err", err)
		}
		return
	}
	px.record(s, agentapi.ModeReset, fallback{code: by})
	px.agent.metrics.reset(by)
}

// record keeps a decision for explain, and logs it if it is new.
func (px *proxy) record(s *session, mode string, why fallback) {
	news := px.agent.decisions.record(agentapi.Decision{
		Pod: s.pod.String(), Direction: s.dir, Source: s.src.Addr(), Dest: s.dst,
		Mode: mode, Reason: why.code, PeerDeclined: why.peerDeclined, Detail: why.detail, Policy: s.decision.Policy, Last: time.Now(),
	})
	if !news {
		return
	}
	ok, dropped := px.agent.logLimit.allow(time.Now())
	if !ok {
		return // too many records; explain still has the decision
	}
	log := px.log.Info
	if mode == agentapi.ModeReset {
		log = px.log.Warn
	}
	log("connection decided", "conn", s.id, "direction", s.dir, "peer", s.peer(), "mode", mode,
		"reason", why.code, "detail", cmp.Or(why.detail, why.code.Text()), "policy", s.decision.Policy, "leftOut", dropped)
}

func addrPort(a net.Addr) netip.AddrPort {
	ap := a.(*net.TCPAddr).AddrPort() // both sockets of a session are TCP
	return netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port())
}
