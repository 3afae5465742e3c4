// SPDX-License-Identifier: Apache-2.0

package report

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
	"github.com/smcr-io/kube-smcr/internal/preflight"
)

// component is the source of events.
const component = "kube-smcr-agent"

// kindOfPods is the kind of objects that an event names only as related, see
// [Reporter.object].
const kindOfPods = "Pod"

// Config is what a reporter needs.
type Config struct {
	// Client says how to reach the API server. Its limits are not used.
	Client *rest.Config
	// Node is the name of the node.
	Node string
	// AgentPod is NAMESPACE/NAME of the agent's pod, and AgentVersion its
	// version.
	AgentPod, AgentVersion string
	// LinksOnly is for an agent that handed its node over: it goes on reporting
	// the link groups that it has, and nothing else.
	LinksOnly bool
	// Source takes a snapshot of the agent. It is called by one goroutine, about once a
	// second and after Poke, and must not block.
	Source func() Snapshot
	// Preflight finds out what the node can do; Run calls it once. nil: preflight.Examine.
	Preflight func(context.Context) preflight.Report
	// Recheck makes a check of Preflight again that may have another result while the agent runs. Run calls it from
	// a goroutine of its own. nil: none does.
	Recheck func() preflight.Check
	Log     *slog.Logger
}

// Reporter tells Kubernetes what the agent of one node does.
type Reporter struct {
	cfg          Config
	server       server
	poked        chan struct{}
	observations chan observation
	rechecked    chan preflight.Check

	owner atomic.Pointer[types.UID] // of the core Node, once it was read
	clean atomic.Bool               // the agent left the node clean: its Lease is not renewed

	contact contact // what is known of the API server

	running  sync.Mutex // held by Run, for its whole time; guards what is below
	plan     *planner
	queue    *queue
	news     *events
	lookedAt time.Time
	loaded   bool
	seed     *rand.Rand
	logged   map[kind]time.Time // refusals
	isAway   bool
	lostAt   time.Time // of the last call without an answer, or whose answer is about the API server as a whole

	left     chan struct{} // closed when the last reports of a node that was left are written
	leftOnce sync.Once
}

// New makes a reporter. It connects to nothing before Run.
func New(cfg Config) (*Reporter, error) {
	c, err := newClient(cfg.Client)
	if err != nil {
		return nil, err
	}
	return newReporter(cfg, c), nil
}

func newReporter(cfg Config, s server) *Reporter {
	if cfg.Preflight == nil {
		cfg.Preflight = func(ctx context.Context) preflight.Report { return preflight.Examine(ctx, preflight.Agent()) }
	}
	return &Reporter{
		cfg: cfg, server: s, poked: make(chan struct{}, 1), observations: make(chan observation), rechecked: make(chan preflight.Check),
		left: make(chan struct{}),
	}
}

// Poke makes the reporter take a snapshot now. It never blocks.
func (r *Reporter) Poke() {
	select {
	case r.poked <- struct{}{}:
	default:
	}
}

// Left is closed when all reports are written of a node that was left, and last that it is clean.
func (r *Reporter) Left() <-chan struct{} { return r.left }

// Run reports until ctx ends, whatever the API server does. What was not written when
// ctx ends is left to the next agent. Run may be called again; it begins anew then.
func (r *Reporter) Run(ctx context.Context) {
	r.running.Lock()
	defer r.running.Unlock()
	r.begin(ctx)
	timer := time.NewTimer(0)
	defer timer.Stop()
	var wg sync.WaitGroup
	defer wg.Wait()
	if r.cfg.Recheck != nil && !r.cfg.LinksOnly {
		wg.Go(func() { r.recheck(ctx) })
	}
	watching, unwatch := "", func() {}
	defer func() { unwatch() }()
	poked := false
	for ctx.Err() == nil {
		now := time.Now()
		if since := now.Sub(r.lookedAt); since >= collectEvery || poked && since >= collectPause {
			r.look(now)
			poked = false
		}
		again, busy := r.act(ctx, now)
		if label := v1alpha1.NodeLabel(r.cfg.Node, r.plan.owner); r.loaded && watching != label {
			if watching == "" && !r.cfg.LinksOnly {
				wg.Go(func() { r.renew(ctx) })
			}
			unwatch() // a Node with a long name that was made anew has another label
			watching, unwatch = label, r.watch(ctx, &wg, label)
		}
		if busy {
			continue
		}
		wake := r.lookedAt.Add(collectEvery)
		if poked {
			wake = r.lookedAt.Add(collectPause)
		}
		if !again.IsZero() && again.Before(wake) {
			wake = again
		}
		timer.Reset(time.Until(wake))
		select {
		case <-ctx.Done():
		case <-timer.C:
		case <-r.poked:
			poked = true
		case c := <-r.rechecked:
			r.plan.id.become(c.Capability()) // the next look sees it
		case s := <-r.observations:
			if r.plan.seen(s, time.Now()) {
				r.loaded = false
			}
		}
	}
}

// begin forgets what an earlier Run knew: another agent may have written the objects
// since.
func (r *Reporter) begin(ctx context.Context) {
	checks := r.cfg.Preflight(ctx)
	r.seed = rand.New(rand.NewPCG(rand.Uint64(), rand.Uint64()))
	r.queue, r.news, r.logged = newQueue(r.seed), newEvents(), map[kind]time.Time{}
	r.lookedAt, r.loaded, r.isAway = time.Time{}, false, false
	r.contact.reset()
	r.plan = newPlanner(identity{
		node: r.cfg.Node, linksOnly: r.cfg.LinksOnly, agentPod: r.cfg.AgentPod, agentVersion: r.cfg.AgentVersion,
		kernel: checks.Kernel, capabilities: checks.Capabilities(),
	}, r.queue, r.news)
}

// watch has the goroutine of Run see the objects with the label of the node, until ctx ends or unwatch is called.
func (r *Reporter) watch(ctx context.Context, wg *sync.WaitGroup, label string) (unwatch func()) {
	ctx, unwatch = context.WithCancel(ctx)
	wg.Go(func() { r.server.watch(ctx, r.cfg.Node, label, func(s observation) { r.see(ctx, s) }) })
	return unwatch
}

// see hands an observation of the watch to the goroutine of Run.
func (r *Reporter) see(ctx context.Context, s observation) {
	select {
	case r.observations <- s:
	case <-ctx.Done():
	}
}

// recheck makes a check again and again.
func (r *Reporter) recheck(ctx context.Context) {
	ticker := time.NewTicker(recheckEvery)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		select {
		case <-ctx.Done():
			return
		case r.rechecked <- r.cfg.Recheck():
		}
	}
}

// look takes a snapshot and plans.
func (r *Reporter) look(now time.Time) {
	s := r.cfg.Source()
	r.clean.Store(s.Uninstalled)
	r.plan.plan(&s, now)
	if o := r.contact.past(); o != nil {
		r.plan.outage(o, now)
	}
	r.lookedAt = now
}

// act makes at most one write and sends at most one event. busy says that it did one of
// them; else again is when there will be something to do, zero if that is not known.
func (r *Reporter) act(ctx context.Context, now time.Time) (again time.Time, busy bool) {
	if at := r.queue.awayUntil; at.After(now) {
		return at, false
	}
	if !r.loaded {
		r.load(ctx)
		return time.Time{}, r.loaded
	}
	e, again := r.queue.next(now)
	if e != nil {
		r.write(ctx, e)
	}
	if at := r.queue.awayUntil; at.After(now) {
		return at, false
	}
	ev, later := r.news.next(now)
	if ev != nil {
		r.send(ctx, ev)
	}
	if again.IsZero() || !later.IsZero() && later.Before(again) {
		again = later
	}
	if busy = e != nil || ev != nil; !busy && again.IsZero() && r.isAway {
		// Nothing is to be written any more, as the pod is gone whose write failed. So the reports do not
		// know any more whether the API server is away.
		r.isAway = false
		r.contact.found(callerReports, now)
	}
	return again, busy
}

// load reads what the API server has of the node.
func (r *Reporter) load(ctx context.Context) {
	cctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	f, err := r.server.load(cctx, r.cfg.Node)
	now := time.Now()
	if err != nil {
		r.away(ctx, err, now)
		return
	}
	r.back()
	r.loaded, r.queue.blocked = true, false
	r.owner.Store(&f.owner)
	r.plan.begin(f, now)
	r.look(now) // the plan has now the owner and the times of the conditions
	if r.queue.written(key{kind: kindNode, name: r.cfg.Node}) {
		r.contact.tell()
	}
}

// write writes one object as it is wanted, or deletes it.
func (r *Reporter) write(ctx context.Context, e *entry) {
	k, t := e.key, e.want
	cctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	var (
		is  metav1.ObjectMeta
		err error
	)
	if k.kind == kindLink && !t.present {
		err = r.server.remove(cctx, k.name)
	} else {
		is, err = r.server.apply(cctx, k, t.body)
	}
	now := time.Now()
	switch {
	case err == nil:
		r.back()
		r.queue.wrote(k, t, is.ResourceVersion, now)
		if k.kind == kindLink && t.present {
			r.plan.uids[k.name] = is.UID
		}
		if k.kind == kindNode {
			r.plan.nodeUID, r.plan.toldOfEnd = is.UID, r.plan.uninstalled
			r.contact.tell()
		}
	case k.kind == kindPod && (isGone(err) || isAnother(err) || apierrors.IsConflict(err)):
		r.back()
		r.queue.wrote(k, t, "", now) // the pod is gone; the next snapshots will not have it
	case isAboutObject(err):
		r.back()
		r.refused(k, err, r.queue.refused(k, now), now)
	case isInternal(err): // it answers; perhaps so to every write
		r.replied(now)
		r.refused(k, err, r.queue.broke(k, now), now)
	default:
		r.queue.unsure(k, now)
		r.away(ctx, err, now)
	}
	if r.plan.toldOfEnd && !r.queue.dirty() {
		r.leftOnce.Do(func() { close(r.left) })
	}
}

// refused notes that the API server does not take an object, which is written again after a pause.
func (r *Reporter) refused(k key, err error, pause time.Duration, now time.Time) {
	if k.kind == kindNode {
		r.contact.refuse(err)
	}
	if now.Sub(r.logged[k.kind]) >= refusalLogPause {
		r.logged[k.kind] = now
		r.cfg.Log.Warn("API server does not take what the agent reports; check the agent's ClusterRole, the version of the CRDs and, after an internal error, the webhooks",
			"object", k.String(), "err", err, "again", pause)
	}
}

// send sends one event.
func (r *Reporter) send(ctx context.Context, e *event) {
	cctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	err := r.server.event(cctx, r.object(e))
	switch {
	case err == nil:
		r.back()
		r.news.done()
	case isAboutObject(err): // for example, the namespace is being deleted
		r.news.done()
		r.cfg.Log.Debug("event not accepted", "err", err)
	case isInternal(err):
		now := time.Now()
		r.replied(now)
		r.cfg.Log.Debug("event not accepted yet", "err", err, "again", r.news.broke(now, r.queue.jittered))
	default:
		r.away(ctx, err, time.Now())
	}
}

// object is an event as Kubernetes has it.
//
// An agent has no right to write events in the namespaces of pods: the API server cannot
// see in an event on which node its pod runs, so one agent could write events about the
// pods of all nodes. Therefore an event about a pod is written as one about the agent's
// own pod, with the pod as the related object. The controller passes it on if that pod
// runs on the agent's node.
func (r *Reporter) object(e *event) *corev1.Event {
	kind := corev1.EventTypeNormal
	if e.warning {
		kind = corev1.EventTypeWarning
	}
	about, namespace := e.about, metav1.NamespaceDefault // where events of cluster-scoped objects are
	var related *corev1.ObjectReference
	if about.Kind == kindOfPods {
		var name string
		namespace, name, _ = strings.Cut(r.cfg.AgentPod, "/")
		about, related = podReference(namespace, name, ""), &e.about
	}
	at := metav1.Time{Time: e.at}
	return &corev1.Event{
		ObjectMeta:     metav1.ObjectMeta{Namespace: namespace, Name: r.eventName(about.Name)},
		InvolvedObject: about, Related: related, Reason: e.reason, Message: e.note, Type: kind,
		Source:         corev1.EventSource{Component: component, Host: r.cfg.Node},
		FirstTimestamp: at, LastTimestamp: at, Count: 1,
		ReportingController: v1alpha1.ReporterAgent, ReportingInstance: r.cfg.Node,
	}
}

// eventName makes a new name for an event.
func (r *Reporter) eventName(about string) string {
	tail := fmt.Sprintf(".%016x", r.seed.Uint64())
	return strings.TrimRight(about[:min(len(about), maxObjectName-len(tail))], ".-") + tail
}

// away notes that the API server did not answer, or answered with an error of its own.
func (r *Reporter) away(ctx context.Context, err error, now time.Time) {
	if ctx.Err() != nil {
		return
	}
	r.queue.failed(now)
	r.lostAt = now
	r.contact.lost(callerReports, err, now)
	if !r.isAway {
		r.isAway = true
		r.cfg.Log.Warn("API server not reached; reports wait and are tried again, connections are not affected", "err", err)
	}
}

// back notes that the API server works: it did what it was asked, or refused it.
func (r *Reporter) back() {
	r.queue.answered()
	r.contact.found(callerReports, time.Now())
	if r.isAway {
		r.isAway = false
		r.cfg.Log.Info("API server reached again; reports are written")
	}
}

// replied notes that the API server answered with an internal error. During an outage, such answers
// come between calls without an answer. So the outage is over only if there was no call without an
// answer for repliedOnly; it ended with the last one.
func (r *Reporter) replied(now time.Time) {
	if r.isAway && now.Sub(r.lostAt) >= repliedOnly {
		r.isAway = false
		r.contact.found(callerReports, r.lostAt)
		r.cfg.Log.Info("API server answers again, but with errors of its own to what is still to be written")
	}
}

// begin takes over the objects that the API server has of the node.
func (p *planner) begin(f *found, now time.Time) {
	p.owner = f.owner
	if f.node != nil {
		p.nodeConditions, p.nodeUID = ownConditions(f.node.Status.Conditions), f.node.UID
		p.queue.known(key{kind: kindNode, name: p.id.node}, readNode(f.node), now)
	}
	for i := range f.links {
		p.takeLink(observationOfLink(&f.links[i]), now)
	}
}

// ownConditions are the conditions that the agent writes, without the controller's.
func ownConditions(all []metav1.Condition) []metav1.Condition {
	var out []metav1.Condition
	for _, c := range all {
		if c.Type != v1alpha1.ConditionAgentAlive {
			out = append(out, c)
		}
	}
	return out
}
