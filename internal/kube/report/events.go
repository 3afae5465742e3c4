// SPDX-License-Identifier: Apache-2.0

package report

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
	"github.com/smcr-io/kube-smcr/internal/agentapi"
)

// Reasons of events.
const (
	eventEnabled            = "SMCREnabled"
	eventFallback           = "SMCRFallback"
	eventBadAnnotation      = "SMCRBadAnnotation"
	eventBudgetLimited      = "SMCRBudgetLimited"
	eventRefused            = "SMCRRefused"
	eventAgentDatapath      = "SMCRAgentDatapath"
	eventHostNetwork        = "SMCRHostNetwork"
	eventLinkDown           = "LinkDown"
	eventLinkUp             = "LinkUp"
	eventRedundancyLost     = "RedundancyLost"
	eventRedundancyRestored = "RedundancyRestored"
	eventDeviceDown         = "DeviceDown"
	eventDeviceUp           = "DeviceUp"
	eventWithoutAPIServer   = "WithoutAPIServer"
)

// event is an event to be sent.
type event struct {
	about   corev1.ObjectReference
	reason  string
	variant string // of events with the same reason: those with different variants are all sent
	warning bool
	note    string
	at      time.Time
}

func (e *event) subject() string {
	return cmp.Or(string(e.about.UID), e.about.Namespace+"/"+e.about.Name)
}

// events are the events that wait to be sent. They belong to the goroutine of
// [Reporter.Run].
type events struct {
	waiting []event
	tokens  bucket
	objects map[string]*bucket   // by subject
	sent    map[string]time.Time // by subject, reason and variant
	lost    uint64
	pause   time.Duration // after an error of the API server's own
	after   time.Time     // nothing is sent before
}

func newEvents() *events {
	return &events{
		tokens:  bucket{every: time.Second / eventsPerSecond, burst: eventsBurst},
		objects: map[string]*bucket{}, sent: map[string]time.Time{},
	}
}

// add takes an event, unless it was sent not long ago or its object has had too
// many.
func (q *events) add(e event) {
	q.forget(e.at)
	id := strings.Join([]string{e.subject(), e.reason, e.variant}, "\n")
	if last, ok := q.sent[id]; ok && e.at.Sub(last) < eventAgain {
		return
	}
	b := q.objects[e.subject()]
	if b == nil {
		b = &bucket{every: objectEventsPer, burst: objectEventsBurst}
		q.objects[e.subject()] = b
	}
	if b.take(e.at).After(e.at) || len(q.waiting) >= maxEvents {
		q.lost++
		return
	}
	q.sent[id] = e.at
	e.note = clip(strings.ReplaceAll(e.note, "\n", "; "), maxEventNote)
	q.waiting = append(q.waiting, e)
}

// forget bounds the maps: it drops the entries that no longer limit anything and, if
// that is not enough, all entries. In the latter case an event may be sent again too soon.
func (q *events) forget(now time.Time) {
	if len(q.sent) < maxRememberedEvent && len(q.objects) < maxRememberedEvent {
		return
	}
	for id, at := range q.sent {
		if now.Sub(at) >= eventAgain {
			delete(q.sent, id)
		}
	}
	for id, b := range q.objects {
		if !b.full.After(now) {
			delete(q.objects, id)
		}
	}
	if len(q.sent) >= maxRememberedEvent {
		clear(q.sent)
	}
	if len(q.objects) >= maxRememberedEvent {
		clear(q.objects)
	}
}

// next is the event to send now, or when to ask again.
func (q *events) next(now time.Time) (e *event, again time.Time) {
	q.waiting = slices.DeleteFunc(q.waiting, func(e event) bool { return now.Sub(e.at) > maxEventAge })
	if len(q.waiting) == 0 {
		return nil, time.Time{}
	}
	if q.after.After(now) {
		return nil, q.after
	}
	if at := q.tokens.take(now); at.After(now) {
		return nil, at
	}
	return &q.waiting[0], time.Time{}
}

// done removes the event that next returned.
func (q *events) done() { q.waiting, q.pause = q.waiting[1:], 0 }

// broke notes that the API server answered the event that next returned with an internal error,
// see [isInternal]. All events wait, and that event goes to the end of the line. Writes of objects
// do not wait.
func (q *events) broke(now time.Time, jittered func(time.Duration) time.Duration) (pause time.Duration) {
	q.waiting = append(q.waiting[1:], q.waiting[0])
	q.pause = min(max(2*q.pause, awayFirst), awayMost)
	q.after = now.Add(jittered(q.pause))
	return q.pause
}

func podReference(namespace, name, uid string) corev1.ObjectReference {
	return corev1.ObjectReference{APIVersion: "v1", Kind: kindOfPods, Namespace: namespace, Name: name, UID: types.UID(uid)}
}

// podEvent is the event about a new status of a pod. ok is false if there is none.
func podEvent(pod corev1.ObjectReference, was, is podStatus, policy string, now time.Time) (_ event, ok bool) {
	e := event{about: pod, variant: string(is.code), at: now}
	switch {
	case was.word == is.word && was.code == is.code && was.kernel == is.kernel:
		return event{}, false
	case is.word == v1alpha1.PodStatusEnabled:
		e.reason = eventEnabled
		e.note = "connections of this pod try SMC-R: " + governed(policy)
		if is.kernel {
			e.note = "connections of this pod try the SMC-R of its kernel: " + governed(policy)
		}
	case is.word == v1alpha1.PodStatusFallback, is.word == v1alpha1.PodStatusPending:
		e.reason, e.warning = eventFallback, true
		e.note = fmt.Sprintf("connections of this pod are plain TCP: %s", explained(is.code))
	case is.word == v1alpha1.PodStatusRefused:
		e.reason, e.warning = eventRefused, true
		e.note = fmt.Sprintf("new connections of this pod are refused, because a policy requires SMC-R: %s", explained(is.code))
	default:
		return event{}, false
	}
	return e, true
}

func governed(policy string) string {
	if policy == "" {
		return "the built-in policy decides"
	}
	return fmt.Sprintf("SMCRPolicy %s decides first", policy)
}

// explained is a reason with what to do about it.
func explained(c agentapi.Code) string {
	s := fmt.Sprintf("%s (%s)", c.Text(), c)
	if advice := c.Advice(); advice != "" {
		s += ": " + advice
	}
	return s
}

// decisionEvent is the event about a connection that was not on SMC-R. ok is false if
// there is none.
func decisionEvent(pod corev1.ObjectReference, d *agentapi.Decision, now time.Time) (_ event, ok bool) {
	e := event{about: pod, variant: string(d.Reason), warning: true, at: now}
	switch {
	case d.Mode == agentapi.ModeReset && d.Reason == agentapi.CodeRequired:
		e.reason = eventRefused
		e.note = fmt.Sprintf("connection with %s refused, because SMCRPolicy %s requires SMC-R: %s", peerOf(d), d.Policy, cmp.Or(d.Detail, d.Reason.Text()))
	case d.Mode == agentapi.ModeReset || !saysWhyNot(d.Reason):
		return event{}, false
	case d.Mode == agentapi.ModeConnecting:
		e.reason = eventFallback
		e.note = fmt.Sprintf("a connection with %s hangs, and the next ones are plain TCP: %s", peerOf(d), explained(d.Reason))
	default:
		e.reason = eventFallback
		e.note = fmt.Sprintf("connections with %s are plain TCP: %s", peerOf(d), explained(d.Reason))
		if d.PeerDeclined {
			e.note = fmt.Sprintf("connections with %s are plain TCP, the peer declined: %s", peerOf(d), explained(d.Reason))
		}
	}
	return e, true
}

// peerOf is the other side of a connection.
func peerOf(d *agentapi.Decision) string {
	if d.Direction == agentapi.Inbound {
		return fmt.Sprintf("client %s", d.Source)
	}
	return d.Dest.String()
}

// linkEvents are the events about changes of a link group. degraded says that the group has lost
// a link before, and degradedNow that it has after these changes. A further link that comes up is
// an event only in a degraded group: that the second link of a new group comes up a moment after
// the first is none.
func linkEvents(link corev1.ObjectReference, was, is *v1alpha1.SMCRLinkStatus, degraded bool, now time.Time) (out []event, degradedNow bool) {
	say := func(reason, variant string, warning bool, format string, args ...any) {
		out = append(out, event{about: link, reason: reason, variant: variant, warning: warning, note: fmt.Sprintf(format, args...), at: now})
	}
	kernel := is.Pod == "" // the group is for all pods on the kernel's datapath
	with := fmt.Sprintf("pod %s with %s", is.Pod, is.Peer)
	if kernel {
		with = fmt.Sprintf("node %s's kernel with %s", is.Node, is.Peer)
	}
	switch {
	case was.State != v1alpha1.LinkDown && is.State == v1alpha1.LinkDown && is.LastError != "":
		say(eventLinkDown, "", true, "the link group of %s is lost: %s", with, is.LastError)
	case was.State == v1alpha1.LinkActive && is.State == v1alpha1.LinkDown && kernel: // a kernel reports neither errors nor that a group ends in good order
		say(eventLinkDown, "", true, "the link group of %s is lost: none of its links is active", with)
	case was.State == v1alpha1.LinkActive && is.State == v1alpha1.LinkActive:
		degraded = activeGroupEvents(was, is, degraded, with, say)
	}
	slices.SortFunc(out, func(a, b event) int {
		return cmp.Or(cmp.Compare(a.reason, b.reason), cmp.Compare(a.variant, b.variant))
	})
	return out, degraded
}

// activeGroupEvents is linkEvents for a group that was active and is.
func activeGroupEvents(was, is *v1alpha1.SMCRLinkStatus, degraded bool, with string, say func(reason, variant string, warning bool, format string, args ...any)) (degradedNow bool) {
	before, after := activeLinks(was), activeLinks(is)
	for id, l := range before {
		if _, ok := after[id]; !ok {
			degraded = true
			say(eventLinkDown, fmt.Sprint(id), true, "link %d of %s on device %s (%s to %s) is down; its connections moved to another link",
				id, with, l.Device, l.LocalGID, l.PeerGID)
		}
	}
	for id, l := range after {
		if _, ok := before[id]; !ok && degraded {
			say(eventLinkUp, fmt.Sprint(id), false, "link %d of %s on device %s (%s to %s) is up", id, with, l.Device, l.LocalGID, l.PeerGID)
		}
	}
	switch lost, restored := was.Redundancy == v1alpha1.RedundancySymmetric, is.Redundancy == v1alpha1.RedundancySymmetric; {
	case lost && !restored:
		degraded = true
		say(eventRedundancyLost, "", true, "the link group of %s can no longer lose any one RNIC: it is %s", with, is.Redundancy)
	case !lost && restored && degraded:
		degraded = false
		say(eventRedundancyRestored, "", false, "the link group of %s can lose any one RNIC", with)
	}
	return degraded
}

// deviceEvents are the events about devices that went down or away, or are up again.
// There is none about the first state of a device.
func deviceEvents(node corev1.ObjectReference, was, is []v1alpha1.NodeDevice, now time.Time) (out []event) {
	for _, d := range is {
		i := slices.IndexFunc(was, func(o v1alpha1.NodeDevice) bool { return o.Name == d.Name })
		if i < 0 || was[i].Port == d.Port {
			continue
		}
		e := event{about: node, reason: eventDeviceDown, variant: d.Name + " " + d.Port, warning: true, at: now}
		switch d.Port {
		case nodePortActive:
			e.reason, e.warning = eventDeviceUp, false
			e.note = fmt.Sprintf("RDMA device %s is up, with the address %s on %s", d.Name, cmp.Or(d.Address, "none"), cmp.Or(d.Interface, "no interface"))
		case nodePortMissing:
			e.note = cmp.Or(d.Detail, fmt.Sprintf("RDMA device %s is missing", d.Name))
		default:
			e.note = fmt.Sprintf("the port of RDMA device %s is down: check the interface %s, its address and the cable", d.Name, cmp.Or(d.Interface, "of the device"))
		}
		out = append(out, e)
	}
	return out
}

// outageEvent is the event about a time that is over, in which the agent did not reach the API
// server.
func outageEvent(node corev1.ObjectReference, o *pastOutage, now time.Time) event {
	return event{
		about: node, reason: eventWithoutAPIServer, warning: true, at: now,
		note: fmt.Sprintf("the agent did not reach the API server for %v, since %s; it served its pods, but pods that opted in and policies that changed meanwhile had to wait: %v",
			o.took.Round(time.Second), o.since.UTC().Format(time.RFC3339), o.err),
	}
}

func activeLinks(s *v1alpha1.SMCRLinkStatus) map[int32]v1alpha1.LinkStatus {
	out := map[int32]v1alpha1.LinkStatus{}
	for _, l := range s.Links {
		if l.State == v1alpha1.LinkActive {
			out[l.ID] = l
		}
	}
	return out
}
