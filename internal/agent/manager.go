// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"maps"
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
)

// manager brings the pods in line with the attachment records and policies. Its goroutine compares;
// only a pod's job starts and stops the pod's proxy.
type manager struct {
	a         *agent
	hosts     hostPods
	syncs     chan *syncing
	handovers chan *handover
	jobs      jobs
	synced    atomic.Bool // a whole round was done

	applied atomic.Pointer[config.Node] // configuration of the last round that was done

	mu        sync.Mutex    // guards what is below
	ended     chan struct{} // closed when run returns
	closed    chan struct{} // closed when nobody takes a handover any more
	pods      map[string]*pod
	malformed []string
}

func (m *manager) init(a *agent) {
	m.a, m.hosts.m = a, m
	m.syncs = make(chan *syncing)
	m.handovers = make(chan *handover)
	m.ended, m.closed = make(chan struct{}), make(chan struct{})
	m.pods = map[string]*pod{}
	m.jobs.open()
}

// restart prepares the manager of an agent that handed over to run again.
func (m *manager) restart() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.ended, m.closed = make(chan struct{}), make(chan struct{})
	m.synced.Store(false)
	m.jobs.open()
}

// syncing is a request to start a round now.
type syncing struct {
	event cni.Event
	waits chan []<-chan struct{} // gets what to wait for, once
}

// sync makes the manager start a round now, and waits until it is done: for the pod of the event's container
// or, if it has none, for all pods. If nothing happened, sync only waits until the manager could start one.
func (m *manager) sync(ctx context.Context, event cni.Event) error {
	s := &syncing{event: event, waits: make(chan []<-chan struct{}, 1)}
	m.mu.Lock()
	ended := m.ended
	m.mu.Unlock()
	if err := post(ctx, ended, m.syncs, s); err != nil {
		return err
	}
	for _, done := range <-s.waits {
		select {
		case <-done:
		case <-ended:
			return errStopping
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return nil
}

// requestHandover makes the manager return h from run or, if the agent drains already, gives h to
// what waits for that.
func (m *manager) requestHandover(ctx context.Context, h *handover) error {
	m.mu.Lock()
	closed := m.closed
	m.mu.Unlock()
	return post(ctx, closed, m.handovers, h)
}

// noHandover ends the time in which a handover can be asked for.
func (m *manager) noHandover() {
	m.mu.Lock()
	defer m.mu.Unlock()
	select {
	case <-m.closed:
	default:
		close(m.closed)
	}
}

// post sends v to the goroutine that takes such values until ended is closed.
func post[T any](ctx context.Context, ended <-chan struct{}, c chan<- T, v T) error {
	select {
	case c <- v:
		return nil
	case <-ended:
		return errStopping
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// run starts rounds until ctx ends, the agent is to leave the node or, with a result, the agent is
// to hand over.
func (m *manager) run(ctx context.Context) *handover {
	m.mu.Lock()
	ended := m.ended
	m.mu.Unlock()
	defer close(ended)
	defer func() {
		if err := m.hosts.close(); err != nil {
			m.a.cfg.Log.Warn("hierarchy of cgroups not closed in order", "err", err)
		}
	}()
	defer m.jobs.finish()
	tick := time.NewTicker(pollEvery)
	defer tick.Stop()
	m.a.wire.reconcile(time.Now(), true)
	m.reconcile(ctx, true)
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-m.a.cfg.Leave:
			return nil
		case h := <-m.handovers:
			return h
		case <-tick.C:
			m.reconcile(ctx, false)
			m.a.wire.reconcile(time.Now(), false)
			if m.succeeds(time.Now()) {
				m.a.legacies.closeListeners(time.Now())
			}
			m.a.legacies.stopFinished(time.Now())
			m.a.legacies.addNewDevices(m.a.rnics.Node())
			m.a.raiseQueuePairs()
		case s := <-m.syncs:
			s.waits <- m.syncNow(ctx, s.event)
		case <-m.a.cfg.Reload:
			m.a.reload()
			m.a.wire.reconcile(time.Now(), true) // another node joined, perhaps, and waits to be let in
			m.reconcile(ctx, true)
			m.a.legacies.enforcePolicies()
		}
	}
}

// syncNow starts a round because of an event, and returns what to wait for.
func (m *manager) syncNow(ctx context.Context, event cni.Event) []<-chan struct{} {
	if event.Verb == "STATUS" {
		return nil // one pod that is slow, or fails, does not keep new ones from being attached
	}
	jobs := m.reconcile(ctx, true)
	m.a.wire.reconcile(time.Now(), false)
	return jobs.of(event.ContainerID)
}

// succeeds reports whether nothing is diverted to the listeners of earlier proxies any more: each pod has its new table,
// or the earlier ones have expired. A pod whose set-up failed has the earlier one.
func (m *manager) succeeds(now time.Time) bool {
	if !m.synced.Load() {
		return false
	}
	for _, p := range m.snapshot() {
		if p.state == podFailed {
			return now.After(m.a.legacies.divertedUntil())
		}
	}
	return true
}

// podWait is the work of a round for one pod: when it is done, and for which containers.
type podWait struct {
	done       <-chan struct{}
	containers []string
}

// podWaits are those of all pods of a round.
type podWaits []podWait

// of returns what to wait for: the pods with a container or, if that is "", all pods.
func (ls podWaits) of(container string) (out []<-chan struct{}) {
	for _, l := range ls {
		if container == "" || slices.Contains(l.containers, container) {
			out = append(out, l.done)
		}
	}
	return out
}

// reconcile starts a round: it compares the pods with the records and policies, and submits work to
// the pods' jobs. With force, failed set-ups are tried again at once.
func (m *manager) reconcile(ctx context.Context, force bool) (out podWaits) {
	atts, junk, err := m.a.store.List()
	if err == nil {
		// If the directory is gone, that says nothing about the pods.
		_, err = os.Stat(m.a.store.Dir())
	}
	if err != nil {
		m.a.cfg.Log.Warn("attachment records not read; pods stay as they are", "err", err)
		return nil
	}
	wanted, stale := byNamespace(atts)
	m.noteJunk(append(junk, stale...))
	r := &round{node: m.a.node.Load()}
	r.left.Store(1)
	defer m.partDone(r)
	ask := func(key string, known, wanted []cni.Attachment) {
		r.left.Add(1)
		w := desired{atts: wanted, force: force, rounds: []*round{r}}
		l := podWait{done: m.jobs.submit(ctx, key, w, func(ctx context.Context, w desired) { m.reconcilePod(ctx, key, w) })}
		for _, att := range slices.Concat(known, wanted) {
			l.containers = append(l.containers, att.ContainerID)
		}
		out = append(out, l)
	}
	known := m.jobs.underWay() // before the snapshot: a pod whose job ends in between is then in the snapshot
	have := m.snapshot()
	for _, att := range m.hosts.attachments(r.node, have, time.Now()) {
		wanted[att.NetNS] = append(wanted[att.NetNS], att)
	}
	m.a.kernelPath.expected.Store(&expected{m: m, pods: maps.Clone(wanted)})
	for key, p := range have {
		known[key] = slices.Concat(known[key], p.atts)
	}
	for key, atts := range known {
		if _, ok := wanted[key]; !ok {
			ask(key, atts, nil)
		}
	}
	for _, key := range slices.Sorted(maps.Keys(wanted)) {
		ask(key, known[key], wanted[key])
	}
	return out
}

// byNamespace groups records by the path of their namespace. Where a pod went without its CNI DEL, its record is left, and
// container runtimes use paths again: of the namespaces that were at a path, only that of the newest record counts.
func byNamespace(atts []cni.Attachment) (groups map[string][]cni.Attachment, stale []*cni.JunkError) {
	newest := map[string]cni.Attachment{} // of those whose namespace is known
	for _, att := range atts {
		if n, ok := newest[att.NetNS]; att.NetNSID != 0 && (!ok || att.Created.After(n.Created)) {
			newest[att.NetNS] = att
		}
	}
	groups = map[string][]cni.Attachment{}
	for _, att := range atts {
		if n := newest[att.NetNS]; att.NetNSID != 0 && att.NetNSID != n.NetNSID {
			stale = append(stale, &cni.JunkError{Name: att.FileName(), Err: fmt.Errorf("is of an earlier namespace at %s than %s", att.NetNS, n.FileName())})
			continue
		}
		groups[att.NetNS] = append(groups[att.NetNS], att)
	}
	return groups, stale
}

// partDone notes that one of the round's parts is done. After the last part all pods are in line
// with the configuration of the round, or with a later one.
func (m *manager) partDone(r *round) {
	if r.left.Add(-1) == 0 {
		m.applied.Store(r.node)
		m.synced.Store(true)
		m.a.kernelPath.tidy()
	}
}

// reconcilePod brings one pod in line with w. It runs in the pod's job.
func (m *manager) reconcilePod(ctx context.Context, key string, w desired) {
	m.mu.Lock()
	p := m.pods[key]
	m.mu.Unlock()
	switch {
	case len(w.atts) > 0 && p == nil:
		p = &pod{set: m.a.rnics.Node()}
		fallthrough
	case len(w.atts) > 0:
		next := m.step(ctx, *p, w.atts, time.Now(), w.force)
		m.put(key, &next)
	case p != nil:
		gone := *p
		m.stopPod(&gone, agentapi.CodeDraining)
		m.put(key, nil)
	}
	for _, r := range w.rounds {
		m.partDone(r)
	}
}

// step brings a pod one step nearer to what is wanted, and returns the pod after that.
func (m *manager) step(ctx context.Context, p pod, atts []cni.Attachment, now time.Time, force bool) pod {
	changed := force || !reflect.DeepEqual(p.atts, atts)
	if p.proxy != nil && (p.proxy.net.gone() || replaced(p.atts, atts)) {
		m.stopPod(&p, agentapi.CodePodFailed)
		p.becomeNew(false)
		p.unavailable, changed = nil, true
	}
	if p.kernel != nil && (p.kernel.net.gone() || replaced(p.atts, atts)) {
		m.dropKernel(&p)
		p.becomeNew(false)
		changed = true
	}
	if p.unavailable != nil && !reflect.DeepEqual(p.atts, atts) && (p.proxy == nil || m.a.sessions.count(p.proxy) == 0) {
		p.unavailable = nil // the interface of a further network comes after the first one, and before the pod's programs: look again
	}
	p.atts = atts
	if m.stepKernel(&p, changed, now) {
		return p
	}
	if isHostPod(atts) { // the agent carries nothing there
		p.becomeIdle()
		return p
	}
	m.updateDevices(ctx, &p)
	able := m.a.unableWith(p.set).code == ""
	// A pod that is served stays served if its devices go: its connections are plain TCP until a
	// device is back, whereas an end of the proxy would reset them.
	want := m.a.diverts(atts, p.set.Hardware(), able || p.proxy != nil && m.a.option != nil)
	if p.proxy != nil && m.outdated(&p, want, able) {
		m.stopForRestart(&p, m.a.changeCode(podOf(atts[0])))
	}
	switch {
	case p.proxy != nil && !want:
		m.stopPod(&p, m.a.changeCode(podOf(atts[0])))
		p.becomeIdle()
	case p.proxy != nil:
		p.proxy.repairHold(now)
		if changed || p.proxy.tableStale.Load() {
			m.update(&p)
		}
	case p.state == podFailed && !changed && now.Before(p.retryAt):
	case want || m.mustClear(&p):
		m.setUp(ctx, &p, want, now)
	default:
		var was error
		if p.isGone() {
			was = p.err
		}
		p.becomeIdle()
		p.err = m.whyGone(&p, was, now)
	}
	if p.proxy != nil {
		m.addNewDevices(&p)
	}
	return p
}

// changeCode is why connections of a pod end that its configuration no longer allows. Of a pod that
// was deleted without grace the configuration is gone before the pod is; no policy changed, and they
// end as those of pods do whose records go.
func (a *agent) changeCode(pod config.Pod) agentapi.Code {
	if a.cfg.Gone != nil && a.cfg.Gone(pod) {
		return agentapi.CodeDraining
	}
	return agentapi.CodePolicyChange
}

// outdated reports whether a proxy must be replaced: it has no stack and there is a device now, or
// its link groups were made with other settings.
func (m *manager) outdated(p *pod, want, able bool) bool {
	return able && p.proxy.stackless() || want && p.proxy.settings != m.a.node.Load().SettingsFor(podOf(p.atts[0]))
}

// stopForRestart stops a pod's proxy, if there is one, so that step starts another.
func (m *manager) stopForRestart(p *pod, code agentapi.Code) {
	swept := p.swept || p.proxy != nil
	m.stopPod(p, code)
	p.becomeNew(swept)
}

// update brings a proxy in line with the pod's attachments and policies.
func (m *manager) update(p *pod) {
	if p.err = p.proxy.update(p.atts); p.err != nil {
		p.proxy.log.Warn("redirection not updated; the old one stays in force", "err", p.err)
	}
}

// setUp starts a pod's proxy or, if none is wanted, clears the pod.
func (m *manager) setUp(ctx context.Context, p *pod, want bool, now time.Time) {
	px, err := m.startPod(ctx, p, want)
	switch {
	case errors.Is(err, errDetached):
		p.becomeNew(true) // the removal of the pod follows
	case !want && errors.Is(err, linux.ErrGone):
		p.becomeIdle()
		p.swept = true // nothing of an earlier agent is left
		p.err, p.retryAt = err, now.Add(retryMost)
	case err != nil:
		m.a.metrics.podErrors.Inc()
		if p.state != podFailed {
			m.a.cfg.Log.Warn("pod not set up; its connections go directly, and it is tried again", "pod", podOf(p.atts[0]).String(), "netns", p.atts[0].NetNS, "err", err)
		}
		p.becomeFailed(err, now)
	case want:
		p.becomeReady(px)
		px.log.Info("pod attached", "addresses", addresses(p.atts))
	default:
		p.becomeIdle()
	}
}

// startPod opens the pod's namespace and starts a proxy in it or, if none is wanted, clears it.
func (m *manager) startPod(ctx context.Context, p *pod, want bool) (*proxy, error) {
	atts := p.atts
	n, err := m.openNet(atts[0])
	if err != nil {
		return nil, err
	}
	if !want {
		return nil, errors.Join(m.clear(p, n), n.close())
	}
	_, count := p.set.Usable()
	px, err := m.a.startProxy(ctx, n, atts, p.set)
	if errors.Is(err, errDetached) {
		err = errors.Join(err, n.sweep()) // also what an earlier agent left: nobody comes back for it
	}
	if err != nil {
		return nil, errors.Join(err, n.close())
	}
	if p.openCount, p.addErr = count, ""; lacksDevice(px.stack) {
		p.openCount-- // addNewDevices has something to do
	}
	return px, nil
}

// clear removes what an earlier agent left in a pod's namespace, which resets the connections that an agent that handed
// over carries on. If a policy selects the pod, they are to go on, though SMC-R is not possible at the moment: then the
// diversion ends, and the rest stays until there is a proxy, or no policy selects the pod any more.
func (m *manager) clear(p *pod, n podNet) error {
	if m.a.selects(p.atts) {
		err := n.endDiversion()
		p.swept, p.quiet = false, err == nil
		return err
	}
	if err := n.sweep(); err != nil {
		return err
	}
	p.swept = true
	return nil
}

// mustClear reports whether clear has something to do in a pod without a proxy.
func (m *manager) mustClear(p *pod) bool {
	return !p.swept && (!p.quiet || !m.a.selects(p.atts))
}

// openNet opens a pod's namespace.
func (m *manager) openNet(att cni.Attachment) (podNet, error) {
	n, err := m.a.cfg.kernel.open(att.NetNS)
	if err != nil {
		return nil, unseen(att.NetNS, err)
	}
	if id := att.NetNSID; id != 0 && id != n.id() {
		return nil, errors.Join(fmt.Errorf("%s is another namespace now: %w", att.NetNS, linux.ErrGone), n.close())
	}
	return n, nil
}

// whyGone looks now and then whether an idle pod's namespace is still there: nothing else would tell if its CNI DEL did
// not come. It returns an ErrGone if it is not; was is what it returned last.
func (m *manager) whyGone(p *pod, was error, now time.Time) error {
	if now.Before(p.retryAt) {
		return was
	}
	p.retryAt = now.Add(retryMost)
	n, err := m.openNet(p.atts[0])
	switch {
	case err == nil && was == nil:
		_ = n.close() // it was only looked at
		return nil
	case err == nil: // it was out of sight, with what an earlier agent left there
		if err := errors.Join(m.clear(p, n), n.close()); err != nil {
			return errors.Join(was, err)
		}
		return nil
	case errors.Is(err, linux.ErrGone):
		return err
	}
	return was // not known: there may be no descriptor left for it
}

// stopPod stops a pod's proxy, if it has one, and gives the pod's own devices back.
func (m *manager) stopPod(p *pod, code agentapi.Code) {
	if p.kernel != nil {
		m.dropKernel(p)
	}
	if p.proxy == nil {
		m.releaseDevices(p)
		return
	}
	gone := p.proxy.net.gone()
	if err := p.proxy.stop(code, gone); err != nil {
		p.proxy.log.Warn("pod not left clean", "err", err)
	}
	p.set = m.a.rnics.Node() // the proxy released the pod's own devices
	p.proxy.log.Info("pod detached", "gone", gone)
}

// shutdown starts to drain and stop the proxies of all pods, which it returns. ended gets the
// result, once.
func (m *manager) shutdown(ctx context.Context) (proxies []*proxy, ended <-chan error) {
	keys := map[*proxy]string{}
	m.a.draining.Store(true) // first: the pods' states, which change now, are not to be told as theirs
	proxies = m.a.legacies.take()
	for key, p := range m.snapshot() {
		if p.proxy != nil {
			proxies, keys[p.proxy] = append(proxies, p.proxy), key
			continue
		}
		rest := *p
		m.parkKernel(&rest)
		m.releaseDevices(&rest)
		m.put(key, &rest)
	}
	result := make(chan error, 1)
	go func() {
		result <- m.a.drainFor(ctx, proxies, m.a.node.Load().DrainTimeout, func(px *proxy) {
			if key, ok := keys[px]; ok {
				p := &pod{atts: *px.atts.Load(), set: m.a.rnics.Node()}
				p.becomeIdle()
				m.put(key, p)
			}
		})
	}()
	return proxies, result
}

// snapshot copies the map. The pods in it do not change.
func (m *manager) snapshot() map[string]*pod {
	m.mu.Lock()
	defer m.mu.Unlock()
	return maps.Clone(m.pods)
}

func (m *manager) put(key string, p *pod) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if p == nil {
		delete(m.pods, key)
		return
	}
	m.pods[key] = p
}

// noteJunk keeps the records that cannot be read for the API, and logs those that are new.
func (m *manager) noteJunk(junk []*cni.JunkError) {
	var texts []string
	for _, j := range junk[:min(len(junk), maxMalformed)] {
		texts = append(texts, j.Error())
	}
	m.mu.Lock()
	old := m.malformed
	m.malformed = texts
	m.mu.Unlock()
	for _, t := range texts {
		if !slices.Contains(old, t) {
			m.a.cfg.Log.Warn("attachment record ignored", "err", t)
		}
	}
}

func (m *manager) junk() []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.malformed
}

// diverts reports whether anything is to be diverted in a pod: a policy selects it, and either
// SMC-R is possible or the policy requires it. own says whether the pod has hardware of its own,
// able whether a device and the option are there.
func (a *agent) diverts(atts []cni.Attachment, own, able bool) bool {
	n := a.node.Load()
	for _, att := range atts {
		possible := able && mismatchOf(n.SettingsFor(podOf(att)), own) == config.MismatchNone
		for _, p := range n.PoliciesFor(podOf(att)) {
			if possible || p.Mode == config.ModeRequired {
				return true
			}
		}
	}
	return false
}

// selects reports whether a policy selects a pod.
func (a *agent) selects(atts []cni.Attachment) bool {
	n := a.node.Load()
	return slices.ContainsFunc(atts, func(att cni.Attachment) bool { return len(n.PoliciesFor(podOf(att))) > 0 })
}

// replaced reports whether another namespace is now at the path of a pod's.
func replaced(old, now []cni.Attachment) bool {
	return len(old) > 0 && old[0].NetNSID != now[0].NetNSID
}

func addresses(atts []cni.Attachment) []string {
	var out []string
	for _, att := range atts {
		for _, ip := range att.Addresses() {
			out = append(out, ip.String())
		}
	}
	return out
}
