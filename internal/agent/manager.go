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

// manager brings the pods in line with the attachment records. Its goroutine
// looks what is wanted; the job of a pod alone starts and stops the pod's run.
type manager struct {
	a         *agent
	syncs     chan *syncing
	handovers chan *handover
	jobs      jobs
	synced    atomic.Bool // all records were looked at

	applied atomic.Pointer[config.Node] // what the pods were last brought in line with

	mu        sync.Mutex    // guards what is below
	ended     chan struct{} // closed when run returned
	pods      map[string]*pod
	malformed []string
}

// pod is one network namespace with attachments. Its job replaces it in the map
// and never changes one that is there, so a snapshot may be read without a lock.
type pod struct {
	atts  []cni.Attachment
	state string // agentapi.State...
	err   error  // of the last try
	run   *run   // StateReady only
	// set are the devices that the pod has for itself, while it is selected;
	// nil: it uses the node's. A run has it until its end.
	set   *deviceSet
	swept bool // leftovers of an earlier agent are gone

	equipped uint64 // devices that came, and that the stack has
	equipErr string // why it has not all

	retryAt time.Time
	pause   time.Duration
}

func (m *manager) init(a *agent) {
	m.a = a
	m.syncs = make(chan *syncing)
	m.handovers = make(chan *handover)
	m.ended = make(chan struct{})
	m.pods = map[string]*pod{}
	m.jobs.begin()
}

// restart prepares a manager that handed over to run again.
func (m *manager) restart() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.ended = make(chan struct{})
	m.synced.Store(false)
	m.jobs.begin()
}

// syncing is a request to look at the records now.
type syncing struct {
	container string                 // whose pod is waited for; "": all
	jobs      chan []<-chan struct{} // gets what to wait for, once
}

// sync makes the manager read the records now, and waits until it has done what
// they say about a container or, if it is "", about all.
func (m *manager) sync(ctx context.Context, container string) error {
	s := &syncing{container: container, jobs: make(chan []<-chan struct{}, 1)}
	m.mu.Lock()
	ended := m.ended
	m.mu.Unlock()
	if err := post(ctx, m, m.syncs, s); err != nil {
		return err
	}
	for _, done := range <-s.jobs {
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

// ask brings a handover to the manager, which then ends.
func (m *manager) ask(ctx context.Context, h *handover) error { return post(ctx, m, m.handovers, h) }

// post gives v to the manager, if it runs.
func post[T any](ctx context.Context, m *manager, c chan<- T, v T) error {
	m.mu.Lock()
	ended := m.ended
	m.mu.Unlock()
	select {
	case c <- v:
		return nil
	case <-ended:
		return errStopping
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// run reads the records until ctx ends, the agent is to leave the node or,
// with a result, to hand over.
func (m *manager) run(ctx context.Context) *handover {
	m.mu.Lock()
	ended := m.ended
	m.mu.Unlock()
	defer close(ended)
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
			if m.synced.Load() { // there are listeners in place of the earlier ones
				m.a.legacies.closeDoors(time.Now())
			}
			m.a.legacies.tidy(time.Now())
			m.a.legacies.equip(&m.a.devices)
		case s := <-m.syncs:
			jobs := m.reconcile(ctx, true)
			m.a.wire.reconcile(time.Now(), false)
			s.jobs <- jobs.of(s.container)
		case <-m.a.cfg.Reload:
			m.a.reload()
			m.a.wire.reconcile(time.Now(), true) // a node that joined waits for it
			m.reconcile(ctx, true)
			m.a.legacies.judge()
		}
	}
}

// looked is what was asked for each pod in a round.
type looked struct {
	done       <-chan struct{}
	containers []string
}

// looks are those of all pods.
type looks []looked

// of returns what ends when the wishes for the pods with a container were done,
// or for all pods if it is "".
func (ls looks) of(container string) (out []<-chan struct{}) {
	for _, l := range ls {
		if container == "" || slices.Contains(l.containers, container) {
			out = append(out, l.done)
		}
	}
	return out
}

// reconcile compares what is with what the records and policies want, and has
// the pods' jobs act. With force they do not wait for the pause after a failure.
func (m *manager) reconcile(ctx context.Context, force bool) (out looks) {
	atts, junk, err := m.a.store.List()
	if err == nil {
		// A directory that went away says nothing about pods.
		_, err = os.Stat(m.a.store.Dir())
	}
	if err != nil {
		m.a.cfg.Log.Warn("attachment records not read; pods stay as they are", "err", err)
		return nil
	}
	m.noteJunk(junk)
	r := &round{node: m.a.node.Load()}
	r.left.Store(1)
	defer m.part(r)
	ask := func(key string, known, wanted []cni.Attachment) {
		r.left.Add(1)
		w := wish{atts: wanted, force: force, rounds: []*round{r}}
		l := looked{done: m.jobs.ask(key, w, func(w wish) { m.bring(ctx, key, w) })}
		for _, att := range slices.Concat(known, wanted) {
			l.containers = append(l.containers, att.ContainerID)
		}
		out = append(out, l)
	}
	wanted := map[string][]cni.Attachment{}
	for _, att := range atts {
		wanted[att.NetNS] = append(wanted[att.NetNS], att)
	}
	have := m.snapshot()
	for key, p := range have {
		if _, ok := wanted[key]; !ok {
			ask(key, p.atts, nil)
		}
	}
	for _, key := range slices.Sorted(maps.Keys(wanted)) {
		var known []cni.Attachment
		if p := have[key]; p != nil {
			known = p.atts
		}
		ask(key, known, wanted[key])
	}
	return out
}

// part takes one part of a round as done. After the last one all pods are in line
// with the configuration of the round, or with a later one.
func (m *manager) part(r *round) {
	if r.left.Add(-1) == 0 {
		m.applied.Store(r.node)
		m.synced.Store(true)
	}
}

// bring does what is wanted of a pod. It is the pod's job.
func (m *manager) bring(ctx context.Context, key string, w wish) {
	m.mu.Lock()
	p := m.pods[key]
	m.mu.Unlock()
	switch {
	case len(w.atts) > 0 && p == nil:
		p = &pod{}
		fallthrough
	case len(w.atts) > 0:
		next := m.step(ctx, *p, w.atts, time.Now(), w.force)
		m.put(key, &next)
	case p != nil:
		gone := *p
		m.end(&gone, agentapi.CodeDraining)
		m.put(key, nil)
	}
	for _, r := range w.rounds {
		m.part(r)
	}
}

// step brings one pod nearer to what is wanted.
func (m *manager) step(ctx context.Context, p pod, atts []cni.Attachment, now time.Time, force bool) pod {
	changed := !reflect.DeepEqual(p.atts, atts)
	if p.run != nil && (p.run.net.gone() || replaced(p.atts, atts)) {
		m.end(&p, agentapi.CodePodFailed)
		p.run, p.state, p.swept, changed = nil, "", false, true
	}
	p.atts = atts
	m.provide(ctx, &p)
	able := m.a.incapable(p.set).code == ""
	// A pod that is served stays so without devices: its connections are plain
	// TCP until one is back, and to end them would be worse.
	want := m.a.diverts(atts, p.set.hardware(), able || p.run != nil && m.a.option != nil)
	if p.run != nil && able && p.run.bare() {
		m.end(&p, agentapi.CodePolicyChange)
		p.run, p.state, p.swept = nil, "", true
	}
	if p.run != nil && want && p.run.settings != m.a.node.Load().SettingsFor(podOf(atts[0])) {
		// Link groups are made with the settings, so they begin anew.
		m.end(&p, agentapi.CodePolicyChange)
		p.run, p.state, p.swept = nil, "", true
	}
	switch {
	case p.run != nil && !want:
		m.end(&p, agentapi.CodePolicyChange)
		p.run, p.state, p.err, p.swept = nil, agentapi.StateIdle, nil, true
	case p.run != nil:
		if force || changed || p.run.moved.Load() {
			if err := p.run.update(atts); err != nil {
				p.err = err
				p.run.log.Warn("redirection not updated; the old one stays in force", "err", err)
			} else {
				p.err = nil
			}
		}
	case p.state == agentapi.StateFailed && !changed && !force && now.Before(p.retryAt):
	case want || !p.swept:
		p.run, p.err = m.try(ctx, &p, want)
		switch {
		case p.err != nil:
			p = m.failed(p, now)
		case want:
			p.state, p.pause, p.swept = agentapi.StateReady, 0, true
			p.run.log.Info("pod attached", "addresses", addresses(atts))
		default:
			p.state, p.pause, p.swept = agentapi.StateIdle, 0, true
		}
	default:
		p.state = agentapi.StateIdle
	}
	if p.run != nil {
		m.equip(&p)
	}
	return p
}

// try opens the namespace and starts a run in it, or only removes what an
// earlier agent left there.
func (m *manager) try(ctx context.Context, p *pod, want bool) (*run, error) {
	atts := p.atts
	n, err := m.a.cfg.kernel.open(atts[0].NetNS)
	if err != nil {
		return nil, err
	}
	if id := atts[0].NetNSID; id != 0 && id != n.id() {
		return nil, errors.Join(fmt.Errorf("%s is another namespace now: %w", atts[0].NetNS, linux.ErrGone), n.close())
	}
	if !want {
		return nil, errors.Join(n.sweep(), n.close())
	}
	_, came := m.a.devices.usable(p.set)
	r, err := m.a.start(ctx, n, atts, p.set)
	if err != nil {
		return nil, errors.Join(err, n.close())
	}
	p.equipped, p.equipErr = came, ""
	return r, nil
}

// failed sets the pause before the next try, which doubles each time.
func (m *manager) failed(p pod, now time.Time) pod {
	first := p.state != agentapi.StateFailed
	p.state = agentapi.StateFailed
	p.pause = min(max(2*p.pause, retryFirst), retryMost)
	p.retryAt = now.Add(p.pause)
	m.a.metrics.podErrors.Inc()
	if first {
		m.a.cfg.Log.Warn("pod not set up; its connections go directly, and it is tried again", "pod", podOf(p.atts[0]).String(), "netns", p.atts[0].NetNS, "err", p.err)
	}
	return p
}

// end stops a pod's run, if it has one, and gives its devices back.
func (m *manager) end(p *pod, code agentapi.Code) {
	if p.run == nil {
		m.withdraw(p)
		return
	}
	gone := p.run.net.gone()
	if err := p.run.stop(code, gone); err != nil {
		p.run.log.Warn("pod not left clean", "err", err)
	}
	p.set = nil // it went with the run
	p.run.log.Info("pod detached", "gone", gone)
}

// shutdown drains all pods at once and stops them.
func (m *manager) shutdown(ctx context.Context) error {
	runs, keys := m.a.legacies.take(), map[*run]string{}
	for key, p := range m.snapshot() {
		if p.run != nil {
			runs, keys[p.run] = append(runs, p.run), key
			continue
		}
		rest := *p
		m.withdraw(&rest)
		m.put(key, &rest)
	}
	return m.a.drainFor(ctx, runs, m.a.node.Load().DrainTimeout, func(r *run) {
		if key, ok := keys[r]; ok {
			m.put(key, &pod{atts: *r.atts.Load(), state: agentapi.StateIdle})
		}
	})
}

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

// noteJunk keeps what cannot be read, and logs what is new in it.
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

// diverts says whether anything is to be diverted in a pod, with hardware of its
// own or without: a policy selects it, and either SMC-R is possible or the policy
// forbids to go without.
func (a *agent) diverts(atts []cni.Attachment, own, able bool) bool {
	n := a.node.Load()
	for _, att := range atts {
		possible := able && barOf(n.SettingsFor(podOf(att)), own) == config.BarNone
		for _, p := range n.PoliciesFor(podOf(att)) {
			if possible || p.Mode == config.ModeRequired {
				return true
			}
		}
	}
	return false
}

// replaced says whether the records now mean another namespace at the same
// path.
func replaced(old, now []cni.Attachment) bool {
	return len(old) > 0 && old[0].NetNSID != now[0].NetNSID
}

func addresses(atts []cni.Attachment) []string {
	var out []string
	for _, att := range atts {
		for _, ip := range att.IPs {
			out = append(out, ip.String())
		}
	}
	return out
}
