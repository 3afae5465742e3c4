// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"reflect"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/cni"
	"github.com/smcr-io/kube-smcr/internal/config"
	"github.com/smcr-io/kube-smcr/internal/linux"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
)

// run is one pod's working set. It is made by start and ended by stop, both
// called by the manager; its other methods may be called by any goroutine.
type run struct {
	agent *agent
	// settings are the pod's, for the life of the run.
	settings config.Settings
	log      *slog.Logger
	net      podNet
	stack    stack
	// account is the pod's, memory the one that its stack is charged to: the same,
	// or one that the stack's pods share.
	account, memory *account
	// set are the devices of the stack; nil: the node's. The run has it until
	// its end.
	set *deviceSet

	atts     atomic.Pointer[[]cni.Attachment] // of this namespace, at least one
	out, in  *door
	redirect redirect
	tabling  sync.Mutex                           // held while redirect is brought in line
	install  atomic.Pointer[linux.RedirectConfig] // in force
	policies []config.Policy                      // that install was made of; the manager's
	around   atomic.Pointer[surroundings]
	moved    atomic.Bool           // around changed since update
	pausing  atomic.Pointer[pause] // nil: connections are diverted
	pressed  chan struct{}         // wakes govern
	refused  atomic.Uint64         // by a device, for want of its resources

	// life ends the goroutines; draining makes the doors close once nobody
	// is waiting.
	life     context.Context //nolint:containedctx // it is the run's life, ended by stop
	kill     context.CancelFunc
	draining atomic.Bool
	released atomic.Bool    // another agent manages the pod: nothing in it is touched
	tasks    sync.WaitGroup // doors and heartbeat
	flows    sync.WaitGroup
}

// door is one kind of listener, on both address families.
type door struct {
	name      string
	port      uint16
	listeners []*net.TCPListener
	// dst tells where a connection was going, or that it was not diverted; handle
	// carries it there.
	dst    func(*net.TCPConn) (netip.AddrPort, error)
	handle func(context.Context, *net.TCPConn, netip.AddrPort, *place)
	// progress is when each listener's loop last came round, in nanoseconds
	// since the run's start.
	progress []atomic.Int64
}

func (d *door) close() error {
	var errs []error
	for _, l := range d.listeners {
		if err := l.Close(); !errors.Is(err, net.ErrClosed) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// start sets a pod up, or leaves nothing behind.
func (a *agent) start(ctx context.Context, n podNet, atts []cni.Attachment, set *deviceSet) (_ *run, err error) {
	settings := a.node.Load().SettingsFor(podOf(atts[0]))
	r := &run{
		agent: a, net: n, settings: settings, set: set,
		log:     a.cfg.Log.With("pod", podOf(atts[0]).String(), "netns", atts[0].NetNS),
		pressed: make(chan struct{}, 1),
	}
	r.atts.Store(&atts)
	r.life, r.kill = context.WithCancel(context.WithoutCancel(ctx))
	var u linux.Undo
	err = u.Run(
		linux.Step{Name: "open account", Do: r.openAccount, Undo: func() error {
			r.account.close()
			return nil
		}},
		linux.Step{Name: "start SMC-R stack", Do: func() (err error) {
			r.stack, err = r.openStack()
			return err
		}, Undo: func() error { return r.stack.Close() }},
		linux.Step{Name: "listen for outbound connections", Do: func() (err error) {
			r.out, err = r.openDoor(ctx, "outbound", linux.ControlMark(markPlain), outboundPort(n.id()))
			if err == nil {
				r.out.dst, r.out.handle = n.originalDst, r.outbound
			}
			return err
		}, Undo: func() error { return r.out.close() }},
		linux.Step{Name: "listen for inbound connections", Do: func() (err error) {
			control := linux.ControlMark(markPlain)
			if a.option != nil {
				control = a.option.ControlListen
			}
			r.in, err = r.openDoor(ctx, "inbound", linux.Controls(linux.ControlTransparent, control), 0)
			if err == nil {
				r.in.dst = func(c *net.TCPConn) (netip.AddrPort, error) { return n.transparentDst(c, r.in.port) }
				r.in.handle = r.inbound
			}
			return err
		}, Undo: func() error { return r.in.close() }},
		linux.Step{Name: "look for other redirectors", Do: r.explore},
		linux.Step{Name: "install redirection", Do: func() (err error) {
			cfg := r.redirectConfig()
			r.policies = a.node.Load().PoliciesFor(podOf(atts[0]))
			r.install.Store(&cfg)
			r.redirect, err = n.install(cfg)
			return err
		}},
	)
	if err != nil {
		r.kill()
		return nil, fmt.Errorf("set up pod %v in %s: %w", podOf(atts[0]), atts[0].NetNS, err)
	}
	u.Keep()
	a.runs.add(r)
	for _, d := range []*door{r.out, r.in} {
		for i := range d.listeners {
			r.tasks.Go(func() { r.accept(d, i) })
		}
	}
	r.tasks.Go(r.heartbeat)
	r.tasks.Go(r.govern)
	return r, nil
}

// openAccount opens the pod's account, without memory if that is in one that the
// pod shares.
func (r *run) openAccount() error {
	b := r.settings.Budget
	if r.shares() {
		b.MemoryBytes = 0
	}
	r.account = r.agent.ledger.open(b)
	r.memory = r.account
	return nil
}

// outboundPort is the port that the agent wants for a pod's outbound listener:
// the same one for every agent. Connection tracking remembers for two minutes
// after its end where a connection was diverted, and a connection with the same
// addresses and ports may be diverted there again.
func outboundPort(netnsID uint64) uint16 {
	return firstDoorPort + uint16(netnsID*doorPortFactor>>32%numDoorPorts)
}

func (r *run) openDoor(ctx context.Context, name string, control linux.Control, wanted uint16) (*door, error) {
	ls, port, err := r.net.listen(ctx, control, wanted)
	if err != nil {
		return nil, err
	}
	return &door{name: name, port: port, listeners: ls, progress: make([]atomic.Int64, len(ls))}, nil
}

// stackBudget is what the pod's SMC-R stack may have, which may be others' too.
func (r *run) stackBudget() config.Budget {
	b, most := r.settings.Budget, r.agent.ledger.limit
	if r.shares() {
		b.MemoryBytes, b.Conns = sharedPods*b.MemoryBytes, sharedPods*b.Conns
	}
	b.MemoryBytes, b.Conns = min(b.MemoryBytes, most[memory]), min(b.Conns, most[conns])
	return b
}

// stackConfig is the configuration of the pod's SMC-R stack, whose memory is
// charged to an account.
func (r *run) stackConfig(memory *account) smcr.Config {
	n, s, budget := r.agent.node.Load(), r.settings, r.stackBudget()
	// The stack makes its queues for MaxConns, so it should not be told of
	// more than there is memory for; and where there is not even memory for a
	// whole region, regions are smaller.
	fit := budget.MemoryBytes / s.ConnBytes()
	cfg := smcr.Config{
		Option:        r.agent.option,
		RMBESizeBytes: s.RMBEBytes, SendBufferBytes: s.SendBufferBytes, RMBEsPerRMB: max(1, min(fit, config.ConnsPerRegion)),
		MemoryBytes: max(1, budget.MemoryBytes), Account: memory, MaxConns: max(1, min(budget.Conns, fit)), AnyPrefix: n.AnyPrefix,
		Versions: smcr.VersionSet(s.Versions), EIDs: n.EIDs, Hostname: n.Name, Route: r.route,
		Hooks: smcr.Hooks{Malformed: r.noteStack, Trespass: r.noteTrespass},
	}
	if cfg.AnswerPoll = n.AnswerPoll; cfg.AnswerPoll == 0 {
		cfg.AnswerPoll = -1
	}
	cfg.Devices, _ = r.agent.devices.usable(r.set)
	cfg.Rail = r.set.railOf()
	if n.Dialects == config.DialectsLinux {
		cfg.Dialects = smcr.DialectsLinux
	}
	if s.SingleLink {
		cfg.LinksPerGroup = 1
	}
	if r.shares() {
		return cfg // its pods have different prefixes: those of each connection's address count
	}
	for _, att := range *r.atts.Load() {
		cfg.Prefixes = append(cfg.Prefixes, att.IPs...)
	}
	return cfg
}

// bare says whether the run was made while there was no device.
func (r *run) bare() bool {
	_, ok := r.stack.(noStack)
	return ok
}

// redirectConfig says what the policies want diverted in the pod.
func (r *run) redirectConfig() linux.RedirectConfig {
	n := r.agent.node.Load()
	cfg := linux.RedirectConfig{
		Mark: markWire, AppMark: markApp, PlainMark: markPlain,
		OutboundPort: r.out.port, InboundPort: r.in.port, FailOpenTTL: n.RedirectTTL, Untracked: r.around.Load().plain,
	}
	mesh := r.meshed().code != ""
	for _, att := range *r.atts.Load() {
		pod := podOf(att)
		if slices.ContainsFunc(n.PoliciesFor(pod), func(p config.Policy) bool { return p.Mode == config.ModeRequired }) {
			cfg.WhenCaught = linux.CaughtDrop // until we know
			if mesh {
				cfg.WhenCaught = linux.CaughtDivert
			}
		}
		for _, s := range r.selections(n, pod) {
			cfg.Outbound = append(cfg.Outbound, linux.OutboundRule{Prefix: s.Prefix, Ports: portRanges(s.Ports), Exclude: s.Exclude})
		}
		if r.agent.option == nil || r.bar() != config.BarNone || mesh || r.paused() != agentapi.CodeOK {
			continue // a SYN-ACK could not, or must not, answer the option
		}
		ports, all := n.InboundPorts(pod)
		cfg.InboundAll = cfg.InboundAll || all
		cfg.Inbound = append(cfg.Inbound, portRanges(ports)...)
	}
	if cfg.InboundAll {
		cfg.Inbound = nil
	}
	return cfg
}

func portRanges(ps []config.PortRange) []linux.PortRange {
	out := make([]linux.PortRange, len(ps))
	for i, p := range ps {
		out[i] = linux.PortRange(p)
	}
	return out
}

// update brings the redirection and the live connections in line with the
// policies and addresses in force.
func (r *run) update(atts []cni.Attachment) (err error) {
	r.atts.Store(&atts)
	r.moved.Store(false)
	defer func() {
		if err != nil {
			r.moved.Store(true) // the next look tries again
		}
	}()
	pod := podOf(atts[0])
	if now := r.agent.node.Load().PoliciesFor(pod); !reflect.DeepEqual(now, r.policies) {
		// A destination that was left alone may be one that needs SMC-R now.
		if err := r.redirect.Forget(); err != nil {
			return err
		}
		r.agent.bypasses.forget(pod.String())
		r.policies = now
	}
	if err := r.retable(); err != nil {
		return err
	}
	r.judge()
	return nil
}

// judge ends the live connections that the policies in force do not allow.
func (r *run) judge() {
	n := r.agent.node.Load()
	for _, f := range r.agent.flows.list(r) {
		was, is := f.decision, n.Decide(f.pod, f.peer(), f.dir)
		mode := f.modeNow()
		switch {
		case was.Accelerate && !is.Accelerate && mode != smcr.ModeTCP.String(),
			is.Required && mode == smcr.ModeTCP.String():
			f.abort(agentapi.CodePolicyChange)
		}
	}
}

// identity is who the pod is on one of its addresses.
func (r *run) identity(local netip.Addr) config.Pod {
	atts := *r.atts.Load()
	for _, att := range atts {
		for _, ip := range att.IPs {
			if ip.Addr() == local {
				return podOf(att)
			}
		}
	}
	return podOf(atts[0])
}

func podOf(att cni.Attachment) config.Pod {
	p := config.Pod{Namespace: att.Pod.Namespace, Name: att.Pod.Name, Interface: att.IfName, UID: att.Pod.UID}
	if p.Name == "" {
		p.Name = att.ContainerID // outside Kubernetes
	}
	return p
}

// accept is the loop of one listener. It comes round at least beatsPerTTL
// times in a redirection's TTL, which is what heartbeat looks at.
func (r *run) accept(d *door, i int) {
	l := d.listeners[i]
	progress := func() { d.progress[i].Store(int64(time.Since(r.agent.started))) }
	progress()
	for {
		wait := r.beat()
		if r.draining.Load() {
			wait = drainAccept
		}
		// A listener that was closed says so in Accept.
		_ = l.SetDeadline(time.Now().Add(wait))
		c, err := l.AcceptTCP()
		switch {
		case err == nil:
			progress()
			r.admit(d, c)
		case errors.Is(err, os.ErrDeadlineExceeded):
			progress()
			if r.draining.Load() {
				return
			}
		case errors.Is(err, net.ErrClosed):
			return
		default: // no progress: if it lasts, the diversion ends
			r.agent.metrics.acceptErrors.Inc()
			if !r.pause(acceptPause) {
				return
			}
		}
	}
}

// admit lets a connection in that was diverted to the door, if the pod may have one
// more that is not settled. Another one is reset before anything is done for it:
// somebody in the pod connected to the door, and to go where it was going would
// lead here again. It is what an attacker can make most of.
func (r *run) admit(d *door, c *net.TCPConn) {
	dst, err := d.dst(c)
	if err != nil {
		r.turnAway(d, c, err)
		return
	}
	p, full := r.account.enter()
	r.press()
	if full != "" {
		reset(c)
		r.agent.metrics.reset(agentapi.CodeBudgetPending)
		return
	}
	r.flows.Go(func() {
		defer p.leave()
		d.handle(r.life, c, dst, p)
	})
}

// turnAway resets a connection that was not diverted to the door.
func (r *run) turnAway(d *door, c *net.TCPConn, err error) {
	reset(c)
	if !errors.Is(err, linux.ErrNotRedirected) {
		r.log.Debug("connection refused", "err", err) // it is gone already
		return
	}
	r.agent.metrics.undiverted.WithLabelValues(d.name).Inc()
	if ok, dropped := r.agent.strays.pass(time.Now()); ok {
		r.log.Warn("connection reset that was not diverted: a program in the pod connects to the agent's port", "door", d.name, "err", err, "leftOut", dropped)
	}
}

// pause waits, or returns false when the run ends.
func (r *run) pause(d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-r.life.Done():
		return false
	}
}

func (r *run) beat() time.Duration { return r.agent.node.Load().RedirectTTL / beatsPerTTL }

// heartbeat keeps the diversion in force while the pod is really served: all
// accept loops came round lately, and the stack answers. An agent that hangs,
// in whatever part, renews nothing, and new connections go directly to their
// destination after the TTL.
func (r *run) heartbeat() {
	looked := time.Now()
	for r.pause(r.beat()) {
		if r.draining.Load() || r.released.Load() {
			return
		}
		if now := time.Now(); now.Sub(looked) >= othersEvery {
			looked = now
			if err := r.lookAround(now); err != nil && !errors.Is(err, linux.ErrClosed) {
				r.log.Warn("other redirectors not looked for; the last finding counts", "err", err)
			}
		}
		r.stack.Stats() // takes the stack's turn: a stack that hangs never answers
		if late := r.late(); late != "" {
			r.log.Warn("diversion not renewed: accept loop is late", "door", late)
			continue
		}
		err := r.redirect.Renew()
		if errors.Is(err, linux.ErrNoTable) {
			r.log.Warn("redirection was deleted by somebody; it is put back")
			err = r.repair()
		}
		if err != nil && !errors.Is(err, linux.ErrClosed) {
			r.agent.metrics.renewErrors.Inc()
			r.log.Warn("diversion not renewed", "err", err)
		}
	}
}

// late names a door whose loop did not come round within a TTL.
func (r *run) late() string {
	oldest := int64(time.Since(r.agent.started) - r.agent.node.Load().RedirectTTL)
	for _, d := range []*door{r.out, r.in} {
		for i := range d.progress {
			if d.progress[i].Load() < oldest {
				return d.name
			}
		}
	}
	return ""
}

// release leaves the pod to another agent. What is diverted here for another
// while is still accepted.
func (r *run) release(hold time.Duration) error {
	r.released.Store(true)
	return r.redirect.Release(hold)
}

// drain ends the diversion, then takes what is queued and waits for the
// connections to end until ctx does.
func (r *run) drain(ctx context.Context) {
	r.draining.Store(true)
	if !r.released.Load() {
		if err := r.redirect.Remove(); err != nil {
			r.log.Warn("diversion not removed; it ends by itself", "err", err)
		}
	}
	done := make(chan struct{})
	go func() {
		r.closeDoors()
		r.flows.Wait()
		close(done)
	}()
	select {
	case <-done:
	case <-ctx.Done():
		r.abort(agentapi.CodeDraining)
		<-done
	}
}

// closeDoors takes what is queued and stops listening.
func (r *run) closeDoors() {
	r.draining.Store(true)
	r.press()
	r.tasks.Wait()
	_ = r.out.close() // closing listeners cannot leave anything behind
	_ = r.in.close()
}

// abort resets the live connections.
func (r *run) abort(code agentapi.Code) {
	_ = r.out.close() // closing listeners cannot leave anything behind
	_ = r.in.close()
	r.kill()
	for _, f := range r.agent.flows.list(r) {
		f.abort(code)
	}
}

// stop ends what is left, at once, and frees everything. With gone the
// namespace is not touched any more, and neither is that of a released run.
func (r *run) stop(code agentapi.Code, gone bool) error {
	r.draining.Store(true)
	var errs []error
	gone = gone || r.released.Load()
	if gone {
		errs = append(errs, r.redirect.Close())
	} else {
		errs = append(errs, r.redirect.Remove())
	}
	r.abort(code)
	r.tasks.Wait()
	r.agent.runs.remove(r)
	errs = append(errs, r.stack.Close())
	r.flows.Wait()
	r.account.close()
	errs = append(errs, r.set.release())
	if !gone {
		errs = append(errs, r.net.sweep())
	}
	if !r.released.Load() { // an agent that manages the pod again has its own
		r.agent.bypasses.forget(podOf((*r.atts.Load())[0]).String())
	}
	return errors.Join(append(errs, r.net.close())...)
}
