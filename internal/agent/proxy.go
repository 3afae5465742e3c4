// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/smcr-io/kube-smcr/internal/agent/rnics"
	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/cni"
	"github.com/smcr-io/kube-smcr/internal/config"
	"github.com/smcr-io/kube-smcr/internal/linux"
	"github.com/smcr-io/kube-smcr/internal/undo"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
)

// proxy is what serves one pod: its namespace handle, stack, listeners, redirection and goroutines.
// The pod's job calls startProxy, and the job or drainFor calls stop. Any goroutine may call the
// other methods.
type proxy struct {
	agent *agent
	// settings do not change; other settings need another proxy.
	settings config.Settings
	log      *slog.Logger
	net      podNet
	stack    stack
	// account is the pod's. memory is the account of the stack's memory and queue pairs: the pod's
	// or, if pods share the stack, theirs.
	account, memory *account
	resigned        bool // the stack is others' to close; owned by whoever drains and stops the proxy
	// set are the stack's devices. It is the proxy's from startProxy to stop.
	set *rnics.Set

	atts        atomic.Pointer[[]cni.Attachment] // of this namespace, at least one
	out, in     *listenerSet
	redirect    redirect
	tableMu     sync.Mutex                           // held during changes of the table
	tableConfig atomic.Pointer[linux.RedirectConfig] // the table as installed
	policies    [][]config.Policy                    // of each attachment, at the last update; owned by the pod's job
	holding
	surroundings atomic.Pointer[surroundings]
	tableStale   atomic.Bool            // the surroundings changed, or an update failed: update again
	pausing      atomic.Pointer[pause]  // nil: no pause
	greedy       atomic.Pointer[greedy] // nil: there was no greedy client yet
	budgetUsed   chan struct{}          // wakes watchBudget

	// kill ends life, and with life the goroutines. draining ends the renewal of the diversion;
	// closing, once nothing is diverted any more, the accept loops, when their backlogs are empty.
	life         context.Context //nolint:containedctx // from startProxy to stop
	kill         context.CancelFunc
	draining     atomic.Bool
	closing      atomic.Bool
	leaving      sync.Mutex     // held while the namespace is left, and while released is set
	released     atomic.Bool    // another agent manages the pod: change nothing in it
	tasks        sync.WaitGroup // accept loops, heartbeat, watchBudget
	sessionTasks sync.WaitGroup
}

// startProxy sets a pod up, or leaves nothing behind. The error is errDetached if the pod was
// detached before the set-up was complete.
func (a *agent) startProxy(ctx context.Context, n podNet, atts []cni.Attachment, set *rnics.Set) (_ *proxy, err error) {
	settings := a.node.Load().SettingsFor(podOf(atts[0]))
	px := &proxy{
		agent: a, net: n, settings: settings, set: set,
		log:        a.cfg.Log.With("pod", podOf(atts[0]).String(), "netns", atts[0].NetNS),
		budgetUsed: make(chan struct{}, 1),
	}
	px.atts.Store(&atts)
	px.life, px.kill = context.WithCancel(context.WithoutCancel(ctx))
	var u undo.Stack
	err = u.Run(whileAttached(ctx,
		undo.Step{Name: "open account", Do: px.openAccount, Undo: func() error {
			px.account.close()
			return nil
		}},
		undo.Step{Name: "start SMC-R stack", Do: func() (err error) {
			px.stack, err = px.openStack()
			return err
		}, Undo: func() error { return px.stack.Close() }},
		undo.Step{Name: "listen for outbound connections", Do: func() (err error) {
			px.out, err = px.openListeners(ctx, agentapi.Outbound, linux.ControlMark(markPlain), outboundPort(n.id()))
			if err == nil {
				px.out.dst, px.out.handle = n.originalDst, px.outbound
			}
			return err
		}, Undo: func() error { return px.out.close() }},
		undo.Step{Name: "listen for inbound connections", Do: func() (err error) {
			control := linux.ControlMark(markPlain)
			if a.option != nil {
				control = a.option.ControlListen
			}
			px.in, err = px.openListeners(ctx, agentapi.Inbound, linux.Controls(linux.ControlTransparent, control), 0)
			if err == nil {
				px.in.dst = func(c *net.TCPConn) (netip.AddrPort, error) { return n.transparentDst(c, px.in.port) }
				px.in.handle = px.inbound
			}
			return err
		}, Undo: func() error { return px.in.close() }},
		undo.Step{Name: "look for other redirectors", Do: px.findRedirectors},
		undo.Step{Name: "hold SYNs", Do: func() error { px.openHold(); return nil }, Undo: func() error { return px.hold.Load().close() }},
		undo.Step{Name: "install redirection", Do: func() (err error) {
			cfg := px.redirectConfig()
			px.policies = px.policiesNow()
			px.tableConfig.Store(&cfg)
			px.redirect, err = n.install(cfg)
			return err
		}, Undo: func() error { return px.redirect.Remove() }},
		// whileAttached checks before each step, so this empty one notices a detach during the step
		// before.
		undo.Step{Name: "serve the pod", Do: func() error { return nil }},
	)...)
	if err != nil {
		px.kill()
		return nil, fmt.Errorf("set up pod %v in %s: %w", podOf(atts[0]), atts[0].NetNS, err)
	}
	u.Keep()
	a.proxies.add(px)
	for _, d := range []*listenerSet{px.out, px.in} {
		for i := range d.listeners {
			px.tasks.Go(func() { px.accept(d, i) })
		}
	}
	if h := px.hold.Load(); h != nil {
		h.start()
	}
	px.tasks.Go(px.heartbeat)
	px.tasks.Go(px.watchBudget)
	return px, nil
}

// whileAttached makes each step fail with errDetached if the pod was detached.
func whileAttached(ctx context.Context, steps ...undo.Step) []undo.Step {
	for i := range steps {
		do := steps[i].Do
		steps[i].Do = func() error {
			if err := context.Cause(ctx); errors.Is(err, errDetached) {
				return err
			}
			return do()
		}
	}
	return steps
}

// openAccount opens the pod's account. If pods share the stack, the account has no memory and queue
// pairs, and openStack finds the account that has.
func (px *proxy) openAccount() error {
	open := px.agent.ledger.open
	if px.sharesStack() {
		open = px.agent.ledger.openMember
	}
	px.account = open(px.settings.Budget)
	px.memory = px.account
	return nil
}

// outboundPort is the port that every agent wants for a pod's outbound listener. It is always the
// same since connection tracking remembers a diverted connection for two minutes after its end: a
// new connection with the same addresses and ports is still diverted to the old port.
func outboundPort(netnsID uint64) uint16 {
	return firstOutboundPort + uint16(netnsID*outboundPortFactor>>32%numOutboundPorts)
}

func (px *proxy) openListeners(ctx context.Context, dir agentapi.Direction, control linux.Control, wanted uint16) (*listenerSet, error) {
	ls, port, err := px.net.listen(ctx, control, wanted)
	if err != nil {
		return nil, err
	}
	return &listenerSet{dir: dir, port: port, control: control, wanted: wanted, listeners: ls, progress: make([]atomic.Int64, mostListeners)}, nil
}

// stackBudget is the budget of the pod's stack, which is larger if pods share the stack.
func (px *proxy) stackBudget() config.Budget {
	b, most := px.settings.Budget, &px.agent.ledger.limit
	if px.sharesStack() {
		b.MemoryBytes, b.Conns = sharedPods*b.MemoryBytes, sharedPods*b.Conns
	}
	b.MemoryBytes, b.Conns = min(b.MemoryBytes, most[memory]), min(b.Conns, most[conns])
	return b
}

// stackConfig is the configuration of the pod's stack, whose memory and queue pairs are charged to
// the account memory.
func (px *proxy) stackConfig(memory *account) smcr.Config {
	n, s, budget := px.agent.node.Load(), px.settings, px.stackBudget()
	// The stack makes its queues for MaxConns, so that must be no more than the memory allows. If
	// the memory is less than a whole region of the largest buffers, regions are smaller.
	fit := budget.MemoryBytes / smcr.LeastConnBytes(s.RMBEBytes, s.SendBufferBytes)
	region := budget.MemoryBytes / (s.RMBEBytes + s.SendBufferBytes)
	cfg := smcr.Config{
		Option:        px.agent.option,
		RMBESizeBytes: s.RMBEBytes, SendBufferBytes: s.SendBufferBytes, RMBEsPerRMB: max(1, min(region, config.ConnsPerRegion)),
		MemoryBytes: max(1, budget.MemoryBytes), Account: memory, QueuePairs: memory, MaxConns: max(1, min(budget.Conns, fit)), AnyPrefix: n.AnyPrefix,
		Versions: smcr.VersionSet(s.Versions), EIDs: n.EIDs, Hostname: n.Name, Route: px.route,
		Hooks: px.stackHooks(memory),
	}
	if cfg.AnswerPoll = n.AnswerPoll; cfg.AnswerPoll == 0 {
		cfg.AnswerPoll = -1
	}
	cfg.Devices, _ = px.set.Usable()
	cfg.Rail = px.set.RailOf()
	if n.Dialects == config.DialectsLinux {
		cfg.Dialects = smcr.DialectsLinux
	}
	if s.SingleLink {
		cfg.LinksPerGroup = 1
	}
	if px.sharesStack() {
		return cfg // the pods have different prefixes: the stack goes by each connection's addresses
	}
	for _, att := range *px.atts.Load() {
		cfg.Prefixes = append(cfg.Prefixes, att.Addresses()...)
	}
	return cfg
}

// stackless reports whether the proxy was started when there was no device.
func (px *proxy) stackless() bool {
	_, ok := px.stack.(noStack)
	return ok
}

// redirectConfig is the table that the policies want in the pod now.
func (px *proxy) redirectConfig() linux.RedirectConfig {
	n := px.agent.node.Load()
	cfg := linux.RedirectConfig{
		Mark: markWire, AppMark: markApp, PlainMark: markPlain,
		OutboundPort: px.out.port, InboundPort: px.in.port, FailOpenTTL: n.RedirectTTL, Untracked: px.surroundings.Load().plain,
	}
	if h := px.hold.Load(); h != nil {
		cfg.Hold = &linux.HoldConfig{Queue: h.holder.Number(), Form: px.agent.holds.form, Marks: holdMarks}
	}
	mesh := px.meshed().code != ""
	pods := podsOf(*px.atts.Load())
	if must := n.OutboundRequired(pods...); len(must) > 0 && mesh {
		cfg.WhenCaught = linux.CaughtDivert
	} else if len(must) > 0 {
		cfg.WhenCaught = linux.CaughtDrop // until the look at others' rules says more
		cfg.Required = outboundRules(must)
	}
	cfg.Outbound = outboundRules(px.selections(n, pods))
	if cfg.IPv4Only = lacksIPv6(px); cfg.IPv4Only {
		cfg.Outbound = withoutIPv6(cfg.Outbound, outboundRules(n.OutboundRequired(pods...)))
	}
	if px.agent.option != nil && px.mismatch() == config.MismatchNone && !mesh { // else a SYN-ACK could not answer the option, or must not
		px.divertInbound(&cfg, n, pods)
	}
	if cfg.InboundExcept = px.greedySources(); len(cfg.InboundExcept) == 0 {
		cfg.InboundAlways = nil // InboundAlways only makes exceptions from InboundExcept
	}
	if cfg.InboundAll {
		cfg.Inbound = nil
	}
	return cfg
}

func outboundRules(selections []config.Selection) (out []linux.OutboundRule) {
	for _, s := range selections {
		out = append(out, linux.OutboundRule{Prefix: s.Prefix, Ports: portRanges(s.Ports), Exclude: s.Exclude})
	}
	return out
}

func portRanges(ps []config.PortRange) []linux.PortRange {
	out := make([]linux.PortRange, len(ps))
	for i, p := range ps {
		out[i] = linux.PortRange(p)
	}
	return out
}

// update brings the table and the sessions in line with the policies and addresses in force.
func (px *proxy) update(atts []cni.Attachment) (err error) {
	px.atts.Store(&atts)
	px.tableStale.Store(false)
	defer func() {
		if err != nil {
			px.tableStale.Store(true) // the manager's next round tries again
		}
	}()
	now := px.policiesNow()
	if !slices.EqualFunc(px.policies, now, config.OnlyPeersMoved) {
		// A destination in the negative cache may be one that must be on SMC-R now.
		if err := px.forgetDestinations(); err != nil {
			return err
		}
	}
	px.policies = now
	listenIPv6(px) // the interface of a further network may have brought it
	if err := px.updateTable(); err != nil {
		return err
	}
	px.enforcePolicies()
	return nil
}

// policiesNow are the policies in force, of each attachment.
func (px *proxy) policiesNow() (out [][]config.Policy) {
	n := px.agent.node.Load()
	for _, att := range *px.atts.Load() {
		out = append(out, n.PoliciesFor(podOf(att)))
	}
	return out
}

// requires reports whether the policies in force require SMC-R to peer, from any interface of the pod.
func (px *proxy) requires(peer netip.AddrPort) bool {
	n := px.agent.node.Load()
	return slices.ContainsFunc(*px.atts.Load(), func(att cni.Attachment) bool { return n.Decide(podOf(att), peer).Required })
}

// enforcePolicies resets the sessions that the policies in force do not allow.
func (px *proxy) enforcePolicies() {
	for _, s := range px.agent.sessions.list(px) {
		px.enforcePolicy(s)
	}
}

// enforcePolicy resets a session if the policies in force do not allow it, by its mode. A session that
// connects may become SMC-R or TCP. So the session looks by itself when its mode is known, too:
//
//	session                    enforcePolicies
//	setPeerConn: mode is TCP   the policies require SMC-R
//	enforcePolicy              enforcePolicy
//
// Whichever comes first, the other one finds what it has to find.
func (px *proxy) enforcePolicy(s *session) {
	if s.isForbidden() {
		s.abort(px.agent.changeCode(s.pod))
	}
}

// identity is the pod, with the interface that has one of its addresses.
func (px *proxy) identity(local netip.Addr) config.Pod {
	atts := *px.atts.Load()
	for _, att := range atts {
		if slices.ContainsFunc(att.Addresses(), func(ip netip.Prefix) bool { return ip.Addr() == local }) {
			return podOf(att)
		}
	}
	return podOf(atts[0])
}

// podOf is the pod of an attachment.
func podOf(att cni.Attachment) config.Pod {
	p := config.Pod{Namespace: att.Pod.Namespace, Name: att.Pod.Name, Interface: att.IfName, UID: att.Pod.UID}
	if p.Name == "" {
		p.Name = att.ContainerID // outside Kubernetes
	}
	return p
}

// podsOf is the pod of the attachments, once for each.
func podsOf(atts []cni.Attachment) []config.Pod {
	out := make([]config.Pod, len(atts))
	for i, att := range atts {
		out[i] = podOf(att)
	}
	return out
}

// sleep waits for d and returns true, or returns false when the proxy ends.
func (px *proxy) sleep(d time.Duration) bool { return sleep(px.life, d) }

// renewEvery is the time between two renewals of the diversion.
func (px *proxy) renewEvery() time.Duration {
	return min(px.agent.node.Load().RedirectTTL/renewalsPerTTL, renewMost)
}

// heartbeat renews the diversion while the pod is really served: all accept loops came round within
// the last TTL, and the stack answers. If any part of the agent hangs, nothing is renewed, and
// after the TTL new connections go directly:
//
//	0 s       the diversion is renewed; the TTL is 3 s
//	0.5 s     an accept loop hangs
//	1, 2, 3 s the loop came round less than a TTL ago: renewed
//	4 s       the loop is late: not renewed
//	6 s       the diversion expires; new connections go directly
func (px *proxy) heartbeat() {
	renewed := time.Now()
	look := renewed.Add(lookPause(px.surroundings.Load().Cost))
	for px.sleep(px.renewEvery()) {
		if px.draining.Load() || px.released.Load() {
			return
		}
		if now := time.Now(); !now.Before(look) {
			if err := px.recheckRedirectors(now); err != nil && !errors.Is(err, linux.ErrClosed) {
				px.log.Warn("other redirectors not looked for; the last finding counts", "err", err)
			}
			divertIPv6(px)
			look = now.Add(lookPause(px.surroundings.Load().Cost))
		}
		px.stack.Stats() // locks the stack: if the stack hangs, so does heartbeat
		if late := px.late(); late != "" {
			px.log.Warn("diversion not renewed: accept loop is late", "door", late)
			continue
		}
		err := px.redirect.Renew()
		if errors.Is(err, linux.ErrNoTable) {
			px.log.Warn("redirection was deleted by somebody; it is put back")
			err = px.restoreTable()
		}
		if errors.Is(err, linux.ErrClosed) {
			continue
		}
		now := time.Now()
		if err != nil {
			px.agent.metrics.renewErrors.Inc()
			px.log.Warn("diversion not renewed", "err", err)
			continue
		}
		if late := now.Sub(renewed) - px.agent.node.Load().RedirectTTL; late > 0 {
			px.agent.metrics.renewErrors.Inc()
			px.log.Warn("diversion renewed too late: meanwhile new connections went past the agent", "for", late.Round(time.Millisecond))
		}
		renewed = now
	}
}

// late names a direction whose accept loop did not come round within the last TTL; "" if there is
// none.
func (px *proxy) late() string {
	oldest := int64(time.Since(px.agent.started) - px.agent.node.Load().RedirectTTL)
	for _, set := range []*listenerSet{px.out, px.in} {
		for i := range set.progress {
			if last := set.progress[i].Load(); last != 0 && last < oldest {
				return string(set.dir)
			}
		}
	}
	return ""
}

// release leaves the pod to another agent. The pod's table diverts to this proxy's listeners for
// ttl at most, and the proxy still accepts that.
func (px *proxy) release(ttl time.Duration) error {
	px.leaving.Lock()
	defer px.leaving.Unlock()
	px.released.Store(true)
	return px.redirect.Release(ttl)
}

// releaseDraining leaves the pod, from which nothing is diverted any more, to another agent.
func (px *proxy) releaseDraining() {
	px.endDiversion()
	px.leaving.Lock()
	defer px.leaving.Unlock()
	px.released.Store(true)
}

// endDiversion ends the diversion, unless another agent manages the pod. It returns for how long
// new connections still come.
func (px *proxy) endDiversion() time.Duration {
	px.leaving.Lock()
	defer px.leaving.Unlock()
	if px.released.Load() {
		return 0
	}
	if err := px.redirect.Remove(); err != nil {
		ttl := px.agent.node.Load().RedirectTTL
		px.log.Warn("diversion not removed; it ends by itself", "after", ttl, "err", err)
		return ttl
	}
	return 0
}

// drain ends the diversion, accepts what is in the listeners' backlogs, and waits for the sessions
// to end, and for their last bytes to be delivered. When ctx ends, it resets those that are left.
func (px *proxy) drain(ctx context.Context) {
	px.draining.Store(true)
	diverts := px.endDiversion()
	done := make(chan struct{})
	go func() {
		px.sleep(diverts)
		px.closeListeners()
		px.sessionTasks.Wait()
		for !px.resign() && px.sleep(drainPoll) {
			continue
		}
		close(done)
	}()
	select {
	case <-done:
	case <-ctx.Done():
		px.abort(agentapi.CodeDraining)
		<-done
	}
}

// resign ends the use of the stack, if others use it, by a proxy that has no sessions any more, and reports whether the proxy
// may stop. The last one stays while the stack has bytes of connections that ended in order: a session is over when its
// application has closed the connection, whose last bytes may still be here, since the peer's application reads slowly. Closing
// the stack would reset these connections.
func (px *proxy) resign() bool {
	if s, ok := px.stack.(*sharedStack); ok && !px.resigned {
		px.resigned = s.resign()
	}
	return px.resigned || px.stack.Stats().Closing == 0
}

// closeHold lets go what is held.
func (px *proxy) closeHold() {
	if err := px.hold.Load().close(); err != nil {
		px.log.Warn("queue of held SYNs not closed in order", "err", err)
	}
}

// closeListeners accepts what is in the backlogs, and then closes the listeners. Nothing is diverted
// to them any more.
func (px *proxy) closeListeners() {
	px.draining.Store(true)
	px.closeHold()
	px.closing.Store(true)
	px.notifyBudget()
	px.tasks.Wait()
	_ = px.out.close() // an error of Close leaves nothing behind
	_ = px.in.close()
}

// abort closes the listeners and resets the sessions.
func (px *proxy) abort(code agentapi.Code) {
	_ = px.out.close() // an error of Close leaves nothing behind
	_ = px.in.close()
	px.kill()
	for _, s := range px.agent.sessions.list(px) {
		s.abort(code)
	}
}

// stop resets what is left, at once, and frees everything. It changes nothing in the namespace if
// that is gone, or if the proxy was released.
func (px *proxy) stop(code agentapi.Code, gone bool) error {
	px.draining.Store(true)
	var errs []error
	if gone || px.released.Load() {
		errs = append(errs, px.redirect.Close())
	} else {
		errs = append(errs, px.redirect.Remove())
	}
	px.closeHold()
	px.abort(code)
	px.tasks.Wait()
	px.agent.proxies.remove(px)
	if !px.resigned {
		errs = append(errs, px.stack.Close())
	}
	px.sessionTasks.Wait()
	px.account.close()
	errs = append(errs, px.set.Release())
	errs = append(errs, px.leave(gone))
	return errors.Join(append(errs, px.net.close())...)
}

// leave removes from the namespace what is left there, unless that is gone or the proxy was
// released.
func (px *proxy) leave(gone bool) error {
	px.leaving.Lock()
	defer px.leaving.Unlock()
	if px.released.Load() {
		return nil // also the bypasses may be those of the agent that manages the pod now
	}
	px.agent.bypasses.forget(podOf((*px.atts.Load())[0]).String())
	if gone {
		return nil
	}
	return px.net.sweep()
}
