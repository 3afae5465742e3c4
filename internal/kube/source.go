// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
	"github.com/smcr-io/kube-smcr/internal/config"
)

// Config says what a Source watches. All fields but Pod and Claimed are required.
type Config struct {
	// REST is how to reach the API server.
	REST *rest.Config
	// Node is the name of the node.
	Node string
	// Pod is NAMESPACE/NAME of the agent's pod, as the SMCRNode has it.
	Pod string
	// Base reads the configuration file, to which the objects are added.
	Base func() (*config.Node, error)
	// StateFile is the path of the file that keeps the last objects.
	StateFile string
	// Claimed says whether a pod, by its UID, has a device of the node by a
	// claim; nil: none has. When its answers change, call [Source.Reconsider].
	Claimed func(podUID string) bool
	Log     *slog.Logger
}

// Source is the configuration of an agent as the objects want it. Its methods
// may be called by any goroutine.
type Source struct {
	cfg       Config
	informers informers
	dirty     chan struct{}                          // an object changed
	changed   chan struct{}                          // node differs from the one that First or Load returned last
	uninstall chan struct{}                          // closed when the node is to be left clean
	takeBack  chan struct{}                          // outdated was set
	nodes     cache.ResourceEventHandlerRegistration // of noteUninstall
	complain  complaints

	file sync.Mutex // held while the state file is written or removed; taken before mu

	mu       sync.Mutex // guards what is below
	base     *config.Node
	node     *config.Node
	verdicts []config.Verdict
	bad      map[string]string
	waiting  map[string]int64 // policies that are not in force yet, because their peers are not resolved, with their generation
	live     bool             // node is made of objects of the API server, not of a file
	first    chan struct{}
	leaving  bool   // uninstall is closed
	outdated bool   // the SMCRNode has the annotation of an earlier uninstallation
	saved    []byte // what is in the state file
}

// New makes a source. It does not ask the API server yet.
func New(cfg Config) (*Source, error) {
	base, err := cfg.Base()
	if err != nil {
		return nil, err
	}
	rc := rest.CopyConfig(cfg.REST)
	rc.UserAgent = "kube-smcr-agent"
	pods := rc
	if base.PodsAsNode {
		pods = asNode(rc, cfg.Node)
	}
	inf, err := newInformers(rc, pods, cfg.Node)
	if err != nil {
		return nil, err
	}
	s := &Source{
		cfg: cfg, informers: inf, base: base, node: base,
		dirty: make(chan struct{}, 1), changed: make(chan struct{}, 1), first: make(chan struct{}), uninstall: make(chan struct{}), takeBack: make(chan struct{}, 1),
		bad: map[string]string{}, complain: complaints{log: cfg.Log, last: map[string]time.Time{}, watches: map[string]error{}},
	}
	for name, i := range inf.needed() {
		handler := s.handler()
		if i == inf.nodes {
			handler = s.nodeHandler()
		}
		registration, err := s.watch(name, i, handler)
		if err != nil {
			return nil, fmt.Errorf("watch %s: %w", name, err)
		}
		if i == inf.nodes {
			s.nodes = registration
		}
	}
	return s, nil
}

// watch sets an informer up; name is that of its objects.
func (s *Source) watch(name string, i cache.SharedIndexInformer, h cache.ResourceEventHandler) (cache.ResourceEventHandlerRegistration, error) {
	if err := i.SetTransform(trim); err != nil {
		return nil, err
	}
	err := i.SetWatchErrorHandlerWithContext(func(_ context.Context, _ *cache.Reflector, err error) {
		s.complain.watch(name, err, time.Now())
	})
	if err != nil {
		return nil, err
	}
	return i.AddEventHandler(h)
}

// handler notes that an object came, changed or went.
func (s *Source) handler() cache.ResourceEventHandler {
	return cache.ResourceEventHandlerDetailedFuncs{
		AddFunc:    func(any, bool) { poke(s.dirty) },
		UpdateFunc: s.noteUpdate,
		DeleteFunc: func(any) { poke(s.dirty) },
	}
}

// nodeHandler is handler for SMCRNodes: it also looks whether the node is to be left clean.
func (s *Source) nodeHandler() cache.ResourceEventHandler {
	return cache.ResourceEventHandlerDetailedFuncs{
		AddFunc: func(is any, first bool) {
			poke(s.dirty)
			s.noteUninstall(is.(*v1alpha1.SMCRNode), first)
		},
		UpdateFunc: func(was, is any) {
			old, now := was.(*v1alpha1.SMCRNode), is.(*v1alpha1.SMCRNode)
			if !reflect.DeepEqual(old.Status, now.Status) { // most changes are of counters
				poke(s.dirty)
			}
			s.noteUninstall(now, false)
		},
		DeleteFunc: func(was any) {
			poke(s.dirty)
			s.noteGone(was)
		},
	}
}

// noteUpdate notes that an object changed, if what trim kept of it did. Most changes are of
// other fields, for example of the counts in the status of a policy.
func (s *Source) noteUpdate(was, is any) {
	if !sameButVersion(was, is) {
		poke(s.dirty)
	}
}

// poke sends without waiting: if a value is in the channel already, that one is enough.
func poke(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// Run watches until ctx ends.
func (s *Source) Run(ctx context.Context) {
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() { s.takeBackUninstall(ctx) })
	for _, i := range s.informers.needed() {
		wg.Go(func() { i.RunWithContext(ctx) })
		// A first list without objects causes no event: look when it has arrived.
		wg.Go(func() {
			if cache.WaitForCacheSync(ctx.Done(), i.HasSynced) {
				poke(s.dirty)
			}
		})
	}
	var (
		unsaved *config.Objects
		saved   time.Time
		timer   = time.NewTimer(0)
	)
	defer timer.Stop()
	// A policy that the controller has not resolved yet stays as the agent before this one had it.
	inForce, _ := s.restore() // First logs the error
	save := func() {
		if unsaved == nil {
			return
		}
		saved = time.Now()
		if err := s.save(*unsaved); err != nil {
			s.complain.say(notSaved, err, saved)
			timer.Reset(saveEvery)
			return
		}
		unsaved = nil
	}
	defer save()
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
			save()
			continue
		case <-s.dirty:
		}
		if !s.awaitQuiet(ctx) {
			return
		}
		if s.synced() {
			o := config.Resolved(s.objects(), inForce)
			inForce = o
			s.rebuild(o, true)
			unsaved = &o
			timer.Reset(time.Until(saved.Add(saveEvery)))
		}
	}
}

// awaitQuiet waits until no object has changed for debounce, but maxDebounce at most.
// It returns false when ctx ends.
func (s *Source) awaitQuiet(ctx context.Context) bool {
	end := time.NewTimer(maxDebounce)
	defer end.Stop()
	quiet := time.NewTimer(debounce)
	defer quiet.Stop()
	for {
		select {
		case <-ctx.Done():
			return false
		case <-end.C:
			return true
		case <-quiet.C:
			return true
		case <-s.dirty:
			quiet.Reset(debounce)
		}
	}
}

func (s *Source) synced() bool {
	for _, i := range s.informers.needed() {
		if !i.HasSynced() {
			return false
		}
	}
	return true
}

// First returns the configuration to start with: of the API server if it
// answers in time, else of the file with the last objects, else one without any
// pod. Run must be running.
func (s *Source) First(ctx context.Context) *config.Node {
	wait := time.NewTimer(firstWait)
	defer wait.Stop()
	select {
	case <-s.first:
	case <-ctx.Done():
	case <-wait.C:
		o, err := s.restore()
		if err != nil {
			s.cfg.Log.Warn("API server does not answer, and there is no last configuration; all connections are plain TCP until it answers", "err", err)
			break
		}
		s.cfg.Log.Warn("API server does not answer; the last configuration is used", "pods", len(o.Pods), "policies", len(o.Policies))
		s.rebuild(o, false)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	select { // the caller gets this configuration now: it needs no signal
	case <-s.changed:
	default:
	}
	return s.node
}

// Changed gets a value when Load has something new; what First returned is not
// new.
func (s *Source) Changed() <-chan struct{} { return s.changed }

// Load returns the configuration.
func (s *Source) Load() (*config.Node, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.node, nil
}

// Verdicts returns what was decided about each pod of the node, without the pods that
// have finished.
func (s *Source) Verdicts() []config.Verdict {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.verdicts)
}

// StatusAnnotations returns the annotations smcr.io/status of the node's pods as
// the API server has them, and the resource versions of all of its pods, by UID of the pod.
func (s *Source) StatusAnnotations() (annotations, versions map[string]string) {
	annotations, versions = map[string]string{}, map[string]string{}
	for p := range stored[*corev1.Pod](s.informers.pods) {
		versions[string(p.UID)] = p.ResourceVersion
		if v, ok := p.Annotations[v1alpha1.AnnotationStatus]; ok {
			annotations[string(p.UID)] = v
		}
	}
	return annotations, versions
}

// Ending says whether a pod of the node is being deleted, has finished, or is not among the API
// server's pods any more. It is false while the API server's pods are not known. A static pod
// is found by the UID of its mirror, and by the UID that it has on the node.
func (s *Source) Ending(podUID string) bool {
	if !s.Live() {
		return false
	}
	var static *corev1.Pod
	for p := range stored[*corev1.Pod](s.informers.pods) {
		if string(p.UID) == podUID {
			return ends(p)
		}
		if podUID != "" && configHash(p) == podUID {
			static = p
		}
	}
	return static == nil || ends(static)
}

func ends(p *corev1.Pod) bool {
	return p.DeletionTimestamp != nil || p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed
}

// Gone says whether the API server does not have a pod of the node any more. It is false while the
// API server's pods are not known. A pod without UID is found by its name alone.
func (s *Source) Gone(pod config.Pod) bool {
	if !s.Live() {
		return false
	}
	for p := range stored[*corev1.Pod](s.informers.pods) {
		if p.Namespace == pod.Namespace && p.Name == pod.Name && (pod.UID == "" || string(p.UID) == pod.UID || configHash(p) == pod.UID) {
			return false
		}
	}
	return true
}

// stored yields the objects in the store of an informer, which are all of one type.
func stored[T any](i cache.SharedIndexInformer) iter.Seq[T] {
	return func(yield func(T) bool) {
		for _, x := range i.GetStore().List() {
			if !yield(x.(T)) {
				return
			}
		}
	}
}

// podIPs returns the addresses of the node's pods by their UID.
func (s *Source) podIPs() map[string][]netip.Addr {
	out := map[string][]netip.Addr{}
	for p := range stored[*corev1.Pod](s.informers.pods) {
		for _, ip := range p.Status.PodIPs {
			if a, err := netip.ParseAddr(ip.IP); err == nil && !p.Spec.HostNetwork {
				out[string(p.UID)] = append(out[string(p.UID)], a)
			}
		}
	}
	return out
}

// peerNodes returns the name of the node that has a device, by the device's address: of the
// node's own devices, and those that its pods have. If two nodes have an address in their
// status, the name is "".
func (s *Source) peerNodes() map[netip.Addr]string {
	out := map[netip.Addr]string{}
	for n := range stored[*v1alpha1.SMCRNode](s.informers.nodes) {
		add := func(address string) {
			a, err := netip.ParseAddr(address)
			if err != nil {
				return
			}
			a = a.Unmap()
			name := n.Name
			if other, ok := out[a]; ok && other != name {
				name = ""
			}
			out[a] = name
		}
		for _, d := range n.Status.Devices {
			add(d.Address)
			for _, a := range d.OtherAddresses {
				add(a)
			}
		}
		for _, d := range n.Status.PodDevices {
			add(d.Address)
		}
	}
	return out
}

// Live says whether the configuration is made of objects that the API server sent, and
// not of the file: then a pod that is not in it does not exist.
func (s *Source) Live() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.live
}

// Lacks says which objects the API server has not given yet, and why if that is known; "" if it
// has given all that a configuration is made of. The reason is not known, for example, if the
// API server cannot be connected to: the watch reports no error then.
func (s *Source) Lacks() (objects string, why error) {
	if s.Live() {
		return "", nil
	}
	needed := s.informers.needed()
	for _, name := range slices.Sorted(maps.Keys(needed)) {
		if !needed[name].HasSynced() {
			s.complain.mu.Lock()
			defer s.complain.mu.Unlock()
			return name, s.complain.watches[name]
		}
	}
	return "objects", nil // all are there, and just being translated
}

// Reconsider makes the configuration anew, because an answer of Config.Claimed changed.
func (s *Source) Reconsider() { poke(s.dirty) }

// Rebase reads the base configuration again. If what changed in it needs a restart of the agent,
// Rebase does not take it over: the agent would refuse every configuration that is made with it,
// and so every later change of the cluster.
func (s *Source) Rebase() error {
	base, err := s.cfg.Base()
	if err != nil {
		return err
	}
	s.mu.Lock()
	fixed := s.base.Immutable(base)
	if len(fixed) == 0 {
		s.base = base
	}
	s.mu.Unlock()
	if len(fixed) > 0 {
		return fmt.Errorf("the configuration changes %v, which takes a restart of the agent; the old one stays in force", fixed)
	}
	poke(s.dirty)
	return nil
}

// rebuild makes a configuration of objects and tells the agent if it differs.
func (s *Source) rebuild(o config.Objects, live bool) {
	s.mu.Lock()
	if s.live && !live {
		s.mu.Unlock()
		return // the API server answered meanwhile
	}
	node, verdicts, bad := config.FromObjects(s.base, o)
	differs := !reflect.DeepEqual(node, s.node)
	if differs {
		s.node = node
		// With mu held: First empties the channel and returns node under mu, so a signal
		// for a node that First returns is never left behind.
		poke(s.changed)
	}
	s.verdicts = verdicts
	first := live && !s.live
	s.live = s.live || live
	news, waiting := s.noteBad(bad), s.noteUnresolved(o.Unresolved)
	s.mu.Unlock()

	for _, e := range news {
		s.cfg.Log.Warn("policy ignored; correct or delete it", "err", e)
	}
	for _, name := range waiting {
		s.cfg.Log.Info("policy waits for the controller to resolve its peers; until then its former form is in force, of a new one nothing if it selects a pod that ran before, else all but these peers", "policy", name)
	}
	if first {
		close(s.first)
	}
}

// noteBad remembers the policies that cannot be used and returns the errors that were
// not there the last time.
func (s *Source) noteBad(bad []*config.PolicyError) []error {
	var news []error
	now := map[string]string{}
	for _, e := range bad {
		key := e.Namespace + "/" + e.Name
		if now[key] = e.Error(); s.bad[key] != now[key] {
			news = append(news, e)
		}
	}
	s.bad = now
	return news
}

// noteUnresolved remembers the policies that wait for the controller, and returns those that did
// not wait the last time.
func (s *Source) noteUnresolved(unresolved []v1alpha1.SMCRPolicy) (news []string) {
	now := map[string]int64{}
	for i := range unresolved {
		p := &unresolved[i]
		key := p.Namespace + "/" + p.Name
		if now[key] = p.Generation; s.waiting[key] != p.Generation {
			news = append(news, key)
		}
	}
	s.waiting = now
	return news
}

// objects copies from the stores the objects of the namespaces that have pods here, in a
// fixed order.
func (s *Source) objects() config.Objects {
	var o config.Objects
	here := map[string]bool{}
	for p := range stored[*corev1.Pod](s.informers.pods) {
		if p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed {
			continue
		}
		here[p.Namespace] = true
		o.Pods = append(o.Pods, config.PodObject{
			Namespace: p.Namespace, Name: p.Name, UID: string(p.UID), Labels: p.Labels,
			Enabled: annotation(p.Annotations, v1alpha1.AnnotationEnabled), HostNetwork: p.Spec.HostNetwork,
			ConfigHash: configHash(p), Claimed: s.cfg.Claimed != nil && s.cfg.Claimed(string(p.UID)),
		})
	}
	for ns := range stored[*metav1.PartialObjectMetadata](s.informers.namespaces) {
		if e := annotation(ns.Annotations, v1alpha1.AnnotationEnabled); e != nil && here[ns.Name] {
			o.Namespaces = append(o.Namespaces, config.NamespaceObject{Name: ns.Name, Enabled: e})
		}
	}
	for p := range stored[*v1alpha1.SMCRPolicy](s.informers.policies) {
		// A policy that is being deleted does not count, though somebody's finalizer keeps it: the
		// controller has deleted its slices.
		if here[p.Namespace] && p.DeletionTimestamp == nil {
			o.Policies = append(o.Policies, *p)
		}
	}
	for p := range stored[*v1alpha1.SMCRPeerSlice](s.informers.slices) {
		if here[p.Namespace] {
			o.PeerSlices = append(o.PeerSlices, *p)
		}
	}
	o.Nodes = s.otherNodes()
	slices.SortFunc(o.Pods, func(a, b config.PodObject) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	})
	slices.SortFunc(o.Namespaces, func(a, b config.NamespaceObject) int { return cmp.Compare(a.Name, b.Name) })
	byName := func(a, b metav1.Object) int {
		return cmp.Or(cmp.Compare(a.GetNamespace(), b.GetNamespace()), cmp.Compare(a.GetName(), b.GetName()))
	}
	slices.SortFunc(o.Policies, func(a, b v1alpha1.SMCRPolicy) int { return byName(&a, &b) })
	slices.SortFunc(o.PeerSlices, func(a, b v1alpha1.SMCRPeerSlice) int { return byName(&a, &b) })
	return o
}

// otherNodes copies from the store the addresses of the other nodes' devices. The result
// is never nil: nil would say that the nodes are not known.
func (s *Source) otherNodes() []config.NodeObject {
	out := []config.NodeObject{}
	for n := range stored[*v1alpha1.SMCRNode](s.informers.nodes) {
		if n.Name == s.cfg.Node {
			continue
		}
		o := config.NodeObject{Name: n.Name}
		for _, d := range n.Status.Devices {
			o.Addresses = append(append(o.Addresses, d.Address), d.OtherAddresses...)
		}
		for _, d := range n.Status.PodDevices {
			o.Addresses = append(o.Addresses, d.Address)
		}
		out = append(out, o)
	}
	slices.SortFunc(out, func(a, b config.NodeObject) int { return cmp.Compare(a.Name, b.Name) })
	return out
}

// configHash is the UID that a static pod has on the node, "" for any other pod. p is the pod's
// mirror in the API server, which has another UID.
func configHash(p *corev1.Pod) string {
	hash := p.Annotations[annotationHash]
	if hash != p.Annotations[corev1.MirrorPodAnnotationKey] {
		return "" // kubelet gives both the same value
	}
	return hash
}

func annotation(m map[string]string, key string) *string {
	if v, ok := m[key]; ok {
		return &v
	}
	return nil
}

// notSaved is the complaint when the objects could not be written.
const notSaved = "objects not saved, which is tried again: an agent that starts while the API server is away would not have them"

// complaints logs an error that comes again and again only every complainEvery.
type complaints struct {
	log *slog.Logger

	mu      sync.Mutex // guards what is below
	last    map[string]time.Time
	watches map[string]error // the last error of each list or watch, by the resource
}

// watch logs why a list or watch does not work.
func (c *complaints) watch(resource string, err error, now time.Time) {
	if errors.Is(err, context.Canceled) {
		return
	}
	c.mu.Lock()
	c.watches[resource] = err
	c.mu.Unlock()
	c.say("objects not read; the last ones stay in force", fmt.Errorf("watch %s: %w", resource, err), now)
}

func (c *complaints) say(msg string, err error, now time.Time) {
	key := msg + err.Error()
	c.mu.Lock()
	again := c.last[key].IsZero() || now.Sub(c.last[key]) >= complainEvery
	if again {
		for k, t := range c.last {
			if now.Sub(t) >= complainEvery {
				delete(c.last, k)
			}
		}
		c.last[key] = now
	}
	c.mu.Unlock()
	if again {
		c.log.Warn("not in line with the cluster", "what", msg, "err", err)
	}
}
