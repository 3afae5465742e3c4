// SPDX-License-Identifier: Apache-2.0

package report

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/config"
)

// stateNothing is the state of a pod without an annotation.
const stateNothing = ""

// planner turns snapshots into wanted objects and into events. It has no clock and
// belongs to the goroutine of [Reporter.Run].
type planner struct {
	id    identity
	owner types.UID // of the core Node
	queue *queue
	news  *events

	drains         time.Time              // since when the agent drains
	uninstalled    bool                   // the last write of the SMCRNode is in the queue, or done
	toldOfEnd      bool                   // the last write of the SMCRNode is done
	nodeConditions []metav1.Condition     // as last planned, or as the API server had them
	nodeDevices    []v1alpha1.NodeDevice  // as last planned
	nodeUID        types.UID              // of the SMCRNode
	links          map[string]*linkPlan   // by the name of the object
	uids           map[string]types.UID   // of SMCRLinks
	others         map[string]observation // SMCRLinks of other agents of the node
	pods           map[types.NamespacedName]*podPlan
}

// linkPlan is what a link group was planned to be.
type linkPlan struct {
	status   v1alpha1.SMCRLinkStatus
	degraded bool // a link was lost and has not come back
}

// podPlan is what the planner remembers of a pod.
type podPlan struct {
	uid        string
	seen       time.Time
	told       podStatus // the status that the last event told of
	traffic    traffic
	annotation string // the annotation smcr.io/status that the API server had last
	rules      string // which policies judge the pod's connections
	required   bool   // one of them requires SMC-R
}

func newPlanner(id identity, q *queue, news *events) *planner {
	return &planner{
		id: id, queue: q, news: news,
		links: map[string]*linkPlan{}, uids: map[string]types.UID{}, others: map[string]observation{}, pods: map[types.NamespacedName]*podPlan{},
	}
}

// plan brings the queue and the events in line with a snapshot.
func (p *planner) plan(s *Snapshot, now time.Time) {
	if s.Reconciled {
		p.planLinks(s, now)
		if !p.id.linksOnly && !p.leavesPods(s, now) {
			p.planPods(s, now)
		}
	}
	if !p.id.linksOnly {
		p.planNode(s, now)
	}
}

// leavesPods says whether the pods' annotations are not written for now, because the agent has just
// begun to drain: without long connections it ends at once, and its successor writes them.
func (p *planner) leavesPods(s *Snapshot, now time.Time) bool {
	if !s.Status.Draining || s.Uninstalled {
		p.drains = time.Time{}
		return false
	}
	if p.drains.IsZero() {
		p.drains = now
	}
	return now.Sub(p.drains) < drainGrace
}

func (p *planner) planNode(s *Snapshot, now time.Time) {
	if p.uninstalled {
		return // the SMCRNode may be deleted already: a write would make it again
	}
	if (s.Early || s.Status.Started.IsZero()) && !s.Uninstalled {
		return // an agent that has not begun has no devices yet, which says nothing about them
	}
	// If the agent left the node, the SMCRNode is written first: there may be more pods than there
	// is time for, and the controller writes the rest. If the product is uninstalled, the SMCRNode
	// is written last: the controller waits for it before it ends, and only the agent takes the
	// annotations off the pods.
	clean := s.Left != "" || !p.queue.dirty()
	p.uninstalled = s.Uninstalled && clean
	status := nodeStatus(&p.id, s, clean)
	status.CountedAt = metav1.Time{Time: now.Truncate(secondOfAPI)}
	stamp(status.Conditions, p.nodeConditions, now)
	p.nodeConditions = status.Conditions
	for _, e := range deviceEvents(p.reference(), p.nodeDevices, status.Devices, now) {
		p.news.add(e)
	}
	p.nodeDevices = status.Devices
	object := &v1alpha1.SMCRNode{
		TypeMeta:   metav1.TypeMeta{APIVersion: v1alpha1.GroupVersion().String(), Kind: "SMCRNode"},
		ObjectMeta: p.owned(p.id.node),
		Status:     status,
	}
	p.queue.want(key{kind: kindNode, name: p.id.node}, nodeTarget(object), now)
}

// nodeTarget is the target for an SMCRNode.
func nodeTarget(object *v1alpha1.SMCRNode) target {
	state, n := object.Status, &object.Status
	counters := []int64{
		n.Budget.MemoryUsedBytes, int64(n.Budget.ConnectionsUsed),
		int64(n.Pods.Attached), int64(n.Pods.Ready), int64(n.Pods.Failed), int64(n.LinkGroups),
		n.Wire.DroppedPackets,
	}
	state.Budget.MemoryUsedBytes, state.Budget.ConnectionsUsed = 0, 0
	state.Pods, state.LinkGroups, state.Wire.DroppedPackets = v1alpha1.NodePods{}, 0, 0
	state.CountedAt = metav1.Time{} // alone no reason to write
	return target{present: true, state: state, counters: counters, body: object}
}

// reference names the SMCRNode in events.
func (p *planner) reference() corev1.ObjectReference {
	return corev1.ObjectReference{APIVersion: v1alpha1.GroupVersion().String(), Kind: "SMCRNode", Name: p.id.node, UID: p.nodeUID}
}

// outage makes the event about an outage that is over.
func (p *planner) outage(o *pastOutage, now time.Time) {
	if !p.id.linksOnly {
		p.news.add(outageEvent(p.reference(), o, now))
	}
}

// owned are the metadata of an object that is deleted together with the Node.
func (p *planner) owned(name string) metav1.ObjectMeta {
	return metav1.ObjectMeta{
		Name:            name,
		Labels:          map[string]string{v1alpha1.LabelNode: v1alpha1.NodeLabel(p.id.node, p.owner)},
		OwnerReferences: []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: p.id.node, UID: p.owner}},
	}
}

// takeLink takes over an SMCRLink that this agent wrote before it was started again. An
// SMCRLink of another agent is only remembered, in others.
func (p *planner) takeLink(s observation, now time.Time) {
	if s.agent != p.id.agentLabel() {
		p.others[s.key.name] = s
		return
	}
	p.uids[s.key.name] = s.uid
	p.queue.known(s.key, s.target, now)
}

// inherit takes over the SMCRLinks of other agents whose pods are gone. An agent that
// handed the node over and still has a pod keeps its SMCRLinks.
func (p *planner) inherit(s *Snapshot, now time.Time) {
	namespace, _, _ := strings.Cut(p.id.agentPod, "/")
	alive := map[string]bool{}
	for i := range s.Verdicts {
		if v := &s.Verdicts[i]; v.Namespace == namespace && !s.Uninstalled {
			alive[podLabel(v.Name)] = true
		}
	}
	for name, o := range p.others {
		if !alive[o.agent] {
			delete(p.others, name)
			p.queue.known(o.key, o.target, now)
		}
	}
}

func (p *planner) planLinks(s *Snapshot, now time.Time) {
	label := v1alpha1.NodeLabel(p.id.node, p.owner)
	if label == "" {
		return // the node was not read yet
	}
	if !p.id.linksOnly {
		p.inherit(s, now)
	}
	policies := policiesOf(s.Verdicts)
	var groups []agentapi.LinkGroup
	if !s.Uninstalled {
		groups = slices.Clone(s.Links)
	}
	if p.id.linksOnly { // the agent that manages the node reports those of the kernel
		groups = slices.DeleteFunc(groups, func(g agentapi.LinkGroup) bool { return g.Datapath != "" })
	}
	if len(groups) > maxLinkObjects {
		slices.SortStableFunc(groups, func(a, b agentapi.LinkGroup) int { // the kernel's last: they have no times
			return cmp.Or(cmp.Compare(a.Datapath, b.Datapath), a.Opened.Compare(b.Opened))
		})
		groups = groups[:maxLinkObjects]
	}
	seen := map[string]bool{}
	for i := range groups {
		g := &groups[i]
		name := linkName(label, g)
		seen[name] = true
		p.planLink(name, linkStatus(p.id.node, g, policies[g.Pod], s.Nodes), now)
	}
	for k := range p.queue.entries {
		if k.kind == kindLink && !seen[k.name] && !p.isUnread(s, k) {
			p.queue.unwant(k, now)
			delete(p.links, k.name)
			delete(p.uids, k.name)
		}
	}
}

// isUnread tells whether a link group that is not in the snapshot may exist all the same: its
// SMCRLink says that it is the kernel's, and the kernel could not be asked.
func (p *planner) isUnread(s *Snapshot, k key) bool {
	was, ok := p.queue.entries[k].want.state.(v1alpha1.SMCRLinkStatus)
	return ok && was.Datapath == string(v1alpha1.DatapathKernel) && s.LinksProblem != "" && !s.Uninstalled && !p.id.linksOnly
}

func (p *planner) planLink(name string, status v1alpha1.SMCRLinkStatus, now time.Time) {
	was := p.links[name]
	if was == nil {
		was = &linkPlan{status: status}
		p.links[name] = was
	}
	if len(status.Links) == 0 {
		keepLinks(&status, &was.status)
	}
	status.CountedAt = metav1.Time{Time: now.Truncate(secondOfAPI)}
	stamp(status.Conditions, was.status.Conditions, now)
	about := corev1.ObjectReference{APIVersion: v1alpha1.GroupVersion().String(), Kind: "SMCRLink", Name: name, UID: p.uids[name]}
	var news []event
	news, was.degraded = linkEvents(about, &was.status, &status, was.degraded, now)
	for _, e := range news {
		p.news.add(e)
	}
	was.status = status
	object := &v1alpha1.SMCRLink{
		TypeMeta:   metav1.TypeMeta{APIVersion: v1alpha1.GroupVersion().String(), Kind: "SMCRLink"},
		ObjectMeta: p.owned(name),
		Status:     status,
	}
	if agent := p.id.agentLabel(); agent != "" {
		object.Labels[v1alpha1.LabelAgent] = agent
	}
	if status.Namespace != "" {
		object.Labels[v1alpha1.LabelNamespace] = status.Namespace
	}
	p.queue.want(key{kind: kindLink, name: name}, linkTarget(object), now)
}

// linkTarget is the target for an SMCRLink.
func linkTarget(object *v1alpha1.SMCRLink) target {
	state := object.Status
	counters := []int64{int64(state.Connections), state.RMBBytes}
	state.Connections, state.RMBBytes, state.CountedAt = 0, 0, metav1.Time{} // another time alone is no reason to write
	state.PeerPod = ""                                                       // the controller's
	return target{present: true, state: state, counters: counters, body: object}
}

func (p *planner) planPods(s *Snapshot, now time.Time) {
	atts := map[string][]*agentapi.Attachment{}
	for i := range s.Attachments {
		a := &s.Attachments[i]
		atts[a.Pod] = append(atts[a.Pod], a)
	}
	seen := make(map[types.NamespacedName]bool, len(s.Verdicts))
	optedIn := map[string]*podPlan{}
	for i := range s.Verdicts {
		v := &s.Verdicts[i]
		name := types.NamespacedName{Namespace: v.Namespace, Name: v.Name}
		seen[name] = true
		pp := p.pods[name]
		if pp == nil || pp.uid != v.UID {
			p.forget(name)
			pp = p.addPod(name, v, s.Annotations[v.UID], now)
		}
		if pp.rules != v.Rules {
			pp.rules = v.Rules
			pp.traffic.forget(now)
		}
		pp.required = v.Required
		if v.OptedIn {
			optedIn[name.String()] = pp
		}
	}
	for name := range maps.Keys(p.pods) {
		if !seen[name] {
			p.forget(name)
		}
	}
	p.noteTraffic(s, optedIn, now)
	noteLinks(s, optedIn, atts)
	for i := range s.Verdicts {
		v := &s.Verdicts[i]
		name := types.NamespacedName{Namespace: v.Namespace, Name: v.Name}
		p.planPod(s, v, p.pods[name], atts[name.String()], now)
	}
}

// addPod makes the podPlan of a new pod, which may have a status from an earlier agent.
func (p *planner) addPod(name types.NamespacedName, v *config.Verdict, annotation string, now time.Time) *podPlan {
	pp := &podPlan{uid: v.UID, seen: now, annotation: annotation, rules: v.Rules}
	if annotation != stateNothing {
		pp.told = parsePodStatus(annotation)
		p.queue.known(podKey(name), podTarget(name, v.UID, annotation), now)
	}
	p.pods[name] = pp
	return pp
}

func (p *planner) forget(name types.NamespacedName) {
	delete(p.pods, name)
	p.queue.drop(podKey(name))
}

func podKey(name types.NamespacedName) key {
	return key{kind: kindPod, namespace: name.Namespace, name: name.Name}
}

// podTarget is the target for the annotation of a pod.
func podTarget(name types.NamespacedName, uid, annotation string) target {
	object := &corev1.Pod{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"},
		ObjectMeta: metav1.ObjectMeta{Namespace: name.Namespace, Name: name.Name, UID: types.UID(uid)},
	}
	if annotation != stateNothing {
		object.Annotations = map[string]string{v1alpha1.AnnotationStatus: annotation}
	}
	return target{present: annotation != stateNothing, state: annotation, body: object}
}

// noteTraffic notes what became of the connections of the opted-in pods.
func (p *planner) noteTraffic(s *Snapshot, optedIn map[string]*podPlan, now time.Time) {
	var fresh []*agentapi.Decision
	for i := range s.Decisions {
		d := &s.Decisions[i]
		// A decision from before the pod was seen may be about an earlier pod of the
		// same name.
		if pp := optedIn[d.Pod]; pp != nil && d.Last.After(pp.traffic.latest) && d.Last.After(pp.seen.Add(-attachGrace)) {
			fresh = append(fresh, d)
		}
	}
	slices.SortStableFunc(fresh, func(a, b *agentapi.Decision) int { return a.Last.Compare(b.Last) })
	for _, d := range fresh {
		pp := optedIn[d.Pod]
		pp.traffic.note(d)
		namespace, name, _ := strings.Cut(d.Pod, "/")
		if e, ok := decisionEvent(podReference(namespace, name, pp.uid), d, now); ok {
			p.news.add(e)
		}
	}
}

// noteLinks notes which opted-in pods have link groups. A link group lives on for minutes
// after its last connection.
func noteLinks(s *Snapshot, optedIn map[string]*podPlan, atts map[string][]*agentapi.Attachment) {
	for _, pp := range optedIn {
		pp.traffic.older = false
	}
	for i := range s.Links {
		g := &s.Links[i]
		if g.State != groupActive {
			continue
		}
		if namespace, ok := strings.CutSuffix(g.Pod, "/*"); ok {
			for name, pp := range optedIn {
				if strings.HasPrefix(name, namespace+"/") {
					pp.traffic.alive(usesConns(atts[name]), pp.required) // the group may be another pod's
				}
			}
		} else if pp := optedIn[g.Pod]; pp != nil {
			pp.traffic.alive(g.Conns > 0, pp.required)
		}
	}
}

// usesConns tells whether a pod with the attachments has connections on SMC-R, or about to be.
func usesConns(atts []*agentapi.Attachment) bool {
	return slices.ContainsFunc(atts, func(a *agentapi.Attachment) bool { return a.Budget.ConnsUsed > 0 })
}

func (p *planner) planPod(s *Snapshot, v *config.Verdict, pp *podPlan, atts []*agentapi.Attachment, now time.Time) {
	name := types.NamespacedName{Namespace: v.Namespace, Name: v.Name}
	about := podReference(v.Namespace, v.Name, v.UID)
	p.tellOfSettings(about, v, pp, atts, now)
	p.observe(s, v, pp, now)
	status := statusOf(s, v, atts, &pp.traffic, now)
	if status.code == agentapi.CodeDraining && pp.told.kernel {
		status = pp.told // the kernel carries on without an agent
	}
	if len(atts) == 0 && status.word != "" && s.Left == "" && now.Sub(pp.seen) < attachGrace {
		return // the pod's network is being made
	}
	var policy string
	if len(v.Policies) > 0 && v.Policies[0] != config.DefaultPolicy {
		policy = v.Policies[0]
	}
	if status.code != agentapi.CodeNotAttached || now.Sub(pp.seen) >= attachWarn {
		if e, ok := podEvent(about, pp.told, status, policy, now); ok {
			if v.HostNetwork {
				e.note = hostNote(e.note, status.code, atts)
			}
			p.news.add(e)
		}
		pp.told = status
	}
	if status.word != "" || p.queue.entries[podKey(name)] != nil {
		p.queue.want(podKey(name), podTarget(name, v.UID, status.String()), now)
	}
}

// tellOfSettings makes the events about what a pod's annotation and policies want and do not get.
func (p *planner) tellOfSettings(about corev1.ObjectReference, v *config.Verdict, pp *podPlan, atts []*agentapi.Attachment, now time.Time) {
	if v.Limited != "" {
		p.news.add(event{about: about, reason: eventBudgetLimited, warning: true, at: now, note: v.Limited})
	}
	if i := slices.IndexFunc(atts, func(a *agentapi.Attachment) bool { return a.NotKernel != "" }); i >= 0 && v.OptedIn && !v.HostNetwork {
		p.news.add(event{about: about, reason: eventAgentDatapath, at: now, note: "the agent carries the connections of this pod, whose policy wants its kernel's SMC-R: " + atts[i].NotKernel})
	}
	if v.BadAnnotation {
		p.news.add(event{about: about, reason: eventBadAnnotation, warning: true, at: now, note: v.Because + "; the pod is not opted in"})
	}
	if v.Ineffective && now.Sub(pp.seen) >= attachWarn { // its policy may come a moment later
		p.news.add(event{about: about, reason: eventHostNetwork, warning: true, at: now, note: "the annotation of this pod has no effect: " + v.Because})
	}
}

// hostNote is the note of an event about a pod in the node's network. If the kernel does not carry
// the pod's connections, it says what the kernel lacks; else it is the given note.
func hostNote(note string, code agentapi.Code, atts []*agentapi.Attachment) string {
	switch code {
	case agentapi.CodeNotAttached:
		return noCgroup
	case agentapi.CodePodFailed:
		for _, a := range atts {
			if lacks := cmp.Or(a.NotKernel, a.Detail); lacks != "" {
				return fmt.Sprintf("connections of this pod, which is in the node's network, are plain TCP, as its kernel does not carry them (%s): %s", code, lacks)
			}
		}
	}
	return note
}

// noCgroup is the note of the event about a pod in the node's network whose cgroup the agent has not
// found.
const noCgroup = "connections of this pod, which is in the node's network, are plain TCP: the agent has not found its cgroup (NOT_ATTACHED): " +
	"see kubectl smcr attachments, and whether the agent may look at the node's processes (the chart's kernelPath.revoke)"

// observe has an annotation written again that somebody else changed. But if the pod is to have no
// annotation, and one appears after it was removed, it is somebody else's, and stays.
//
// Not every change shows as a difference between two snapshots: somebody who writes right after this
// agent may put back what the last snapshot had, as a controller does that has not seen the agent
// yet. So observe also compares: a snapshot that is newer than the agent's last write must have
// what the agent wrote.
func (p *planner) observe(s *Snapshot, v *config.Verdict, pp *podPlan, now time.Time) {
	has, version := s.Annotations[v.UID], s.Versions[v.UID]
	name := types.NamespacedName{Namespace: v.Namespace, Name: v.Name}
	e := p.queue.entries[podKey(name)]
	putBack := e != nil && e.version != "" && version != "" && !older(version, e.version) && e.differs == inNothing && e.wrote.state != has
	if has == pp.annotation && !putBack {
		return
	}
	pp.annotation = has
	switch {
	case e == nil && has == stateNothing:
	case e == nil, e.want.present && e.wrote.state != has:
		p.queue.known(podKey(name), podTarget(name, v.UID, has), now)
	}
}
