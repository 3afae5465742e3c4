// SPDX-License-Identifier: Apache-2.0

package report

import (
	"cmp"
	"slices"
	"strings"
	"time"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/config"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
)

// podStatus is the annotation smcr.io/status of a pod.
type podStatus struct {
	word string // v1alpha1.PodStatus..., empty for none
	code agentapi.Code
	// older says that new connections of the pod are refused, while older ones are still on SMC-R.
	older bool
	// kernel says that the pod is enabled, and that its kernel carries the connections.
	kernel bool
}

// String is the annotation's value.
func (p podStatus) String() string {
	switch {
	case p.kernel:
		return v1alpha1.PodStatusKernel
	case p.code == agentapi.CodeOK:
		return p.word
	case p.older:
		return p.word + ": " + string(p.code) + v1alpha1.PodStatusOlder
	}
	return p.word + ": " + string(p.code)
}

// parsePodStatus is the reverse of String. Other texts are no status, with one exception: what the
// controller writes for a pod whose kernel carries on without an agent.
func parsePodStatus(s string) podStatus {
	if s == v1alpha1.PodStatusKernel || s == v1alpha1.PodStatusKernelNoAgent {
		return podStatus{word: v1alpha1.PodStatusEnabled, kernel: true}
	}
	s, older := strings.CutSuffix(s, v1alpha1.PodStatusOlder)
	word, code, _ := strings.Cut(s, ":")
	switch word {
	case v1alpha1.PodStatusEnabled, v1alpha1.PodStatusPending, v1alpha1.PodStatusFallback, v1alpha1.PodStatusRefused:
		return podStatus{word: word, code: agentapi.Code(strings.TrimSpace(code)), older: older}
	}
	return podStatus{}
}

// traffic is what became of the connections of a pod.
type traffic struct {
	lastSMCR time.Time
	// firstPlain and lastPlain are the first and the last connection since lastSMCR that
	// was plain TCP or refused.
	firstPlain, lastPlain time.Time
	last                  agentapi.Decision
	older                 bool      // connections from before the last decision are on SMC-R
	latest                time.Time // of all decisions noted
	since                 time.Time // decisions until then were made by other policies
}

// note takes a decision into account. Decisions come in the order of their times.
func (t *traffic) note(d *agentapi.Decision) {
	t.latest = d.Last
	switch {
	case !d.Last.After(t.since):
	case d.Mode == smcr.ModeSMCR.String():
		t.carried(d.Last)
	case d.Direction == agentapi.Outbound && saysWhyNot(d.Reason) && d.Last.After(t.lastSMCR):
		if t.firstPlain.IsZero() {
			t.firstPlain = d.Last
		}
		t.lastPlain, t.last = d.Last, *d
	}
}

// alive notes that the pod has a link group, and whether connections of the pod are on it.
// That says nothing about new connections if the last one was refused.
func (t *traffic) alive(conns, required bool) {
	if !t.firstPlain.IsZero() && t.isRefusal(required) {
		t.older = t.older || conns
		return
	}
	t.firstPlain, t.lastPlain = time.Time{}, time.Time{}
}

// carried notes that a new connection is on SMC-R.
func (t *traffic) carried(at time.Time) {
	if at.After(t.lastSMCR) {
		t.lastSMCR = at
	}
	if !t.lastPlain.After(t.lastSMCR) {
		t.firstPlain, t.lastPlain = time.Time{}, time.Time{}
	}
}

// forget forgets what became of connections before now, because they were judged by other policies.
// New connections are also left out for as long as the new policies may take to be in force. Events
// tell of these connections all the same.
func (t *traffic) forget(now time.Time) { *t = traffic{latest: t.latest, since: now.Add(policyDelay)} }

// refused tells whether connections of the pod are refused now.
func (t *traffic) refused(now time.Time, required bool) bool {
	return t.reason(now) != agentapi.CodeOK && t.isRefusal(required)
}

// isRefusal tells whether the last connection that was not on SMC-R was reset because a policy
// requires SMC-R. A reset alone does not say so: a connection whose rendezvous broke is reset under
// any policy, and the next one is plain TCP unless a policy requires SMC-R.
func (t *traffic) isRefusal(required bool) bool {
	return t.last.Reason == agentapi.CodeRequired || required && t.last.Mode == agentapi.ModeReset
}

// reason is why all connections of the pod are plain TCP or refused, or CodeOK.
func (t *traffic) reason(now time.Time) agentapi.Code {
	if t == nil || t.firstPlain.IsZero() || now.Sub(t.firstPlain) < fallbackAfter || now.Sub(t.lastPlain) > fallbackMemory {
		return agentapi.CodeOK
	}
	return t.last.Reason
}

// saysWhyNot tells whether a reason is one for which a connection is plain TCP. Other reasons also
// occur without SMC-R, such as a destination that does not answer, or are on purpose, as for two
// pods on one node.
func saysWhyNot(c agentapi.Code) bool {
	switch c {
	case agentapi.CodeOK, agentapi.CodeNoPolicy, agentapi.CodeConnect, agentapi.CodeApplication,
		agentapi.CodePolicyChange, agentapi.CodeDraining, agentapi.CodeGroupLost, agentapi.CodeUnseen, agentapi.CodeNotAttached, agentapi.CodeSameNode:
		return false
	}
	return true
}

// statusOf is the status of a pod. A pod that is not opted in has none, and no pod of a
// node from which the product is uninstalled.
func statusOf(s *Snapshot, v *config.Verdict, atts []*agentapi.Attachment, t *traffic, now time.Time) podStatus {
	switch {
	case v.OptedIn && s.Left != "":
		return podStatus{word: v1alpha1.PodStatusFallback, code: agentapi.CodeNoAgent}
	case !v.OptedIn, s.Uninstalled:
		return podStatus{}
	case s.Status.Draining:
		return podStatus{word: v1alpha1.PodStatusFallback, code: agentapi.CodeDraining}
	}
	if v.HostNetwork {
		return hostStatusOf(atts)
	}
	if len(atts) == 0 {
		return podStatus{word: v1alpha1.PodStatusPending, code: agentapi.CodeNotAttached}
	}
	switch {
	case slices.ContainsFunc(atts, func(a *agentapi.Attachment) bool { return a.State == agentapi.StateFailed && a.Datapath == "" }):
		return podStatus{word: v1alpha1.PodStatusPending, code: agentapi.CodePodFailed}
	case !slices.ContainsFunc(atts, func(a *agentapi.Attachment) bool { return a.Datapath == "" || a.State == agentapi.StateIdle }): // failed: only to change its filter
		return podStatus{word: v1alpha1.PodStatusEnabled, kernel: true} // which needs no device of the agent's
	}
	switch why := whyPlain(s, v, atts, t, now); {
	case why == agentapi.CodeOK:
		return podStatus{word: v1alpha1.PodStatusEnabled}
	case t.refused(now, v.Required):
		return podStatus{word: v1alpha1.PodStatusRefused, code: why, older: t.older}
	default:
		return podStatus{word: v1alpha1.PodStatusFallback, code: why}
	}
}

// whyPlain is why all connections of an attached pod on datapath Agent are plain TCP or refused:
// first what the node or the pod lacks, then what became of its last connections. It is CodeOK if
// connections try SMC-R.
func whyPlain(s *Snapshot, v *config.Verdict, atts []*agentapi.Attachment, t *traffic, now time.Time) agentapi.Code {
	ready := slices.ContainsFunc(atts, func(a *agentapi.Attachment) bool { return a.State == agentapi.StateReady })
	lack, own := lackOf(atts, ready), ownDevices(atts)
	switch {
	case lack != agentapi.CodeOK:
		return lack
	case s.Status.Unable != "":
		return s.Status.UnableCode
	case len(own) == 0 && v.Settings.Mismatch != config.MismatchNone:
		return agentapi.Code(v.Settings.Mismatch.Code())
	case len(own) == 0 && !slices.ContainsFunc(s.Status.Devices, isUp):
		return agentapi.CodeOf(clc.ReasonNoDev)
	case !ready:
		return agentapi.CodeNoPolicy
	case ownDown(s, own):
		return agentapi.CodePodDevice
	}
	return cmp.Or(pausedOf(atts), t.reason(now))
}

// lackOf is why all connections of a pod are plain TCP, as the agent says of the pod's attachments.
// ready says that one of them is ready. Beside it, one that is idle, such as that of a former
// sandbox, counts only if its reason is that programs have old sockets.
func lackOf(atts []*agentapi.Attachment, ready bool) agentapi.Code {
	for _, a := range atts {
		if a.Reason != agentapi.CodeOK && (a.State == agentapi.StateReady || !ready || a.Reason == agentapi.CodeOldSockets) {
			return a.Reason
		}
	}
	return agentapi.CodeOK
}

// ownDevices are the IDs of the devices that the agent uses for a pod instead of the node's.
func ownDevices(atts []*agentapi.Attachment) (ids []string) {
	for _, a := range atts {
		if a.Datapath == "" {
			ids = append(ids, a.Devices...)
		}
	}
	return ids
}

// ownDown tells whether the ports of all devices that a pod has for itself are down. If the agent
// could not open the devices, lackOf has said so before.
func ownDown(s *Snapshot, own []string) bool {
	down := false
	for _, d := range s.PodDevices {
		if d.Used == nil || !slices.Contains(own, d.ID) {
			continue
		}
		if isUp(*d.Used) {
			return false
		}
		down = true
	}
	return down
}

func isUp(d agentapi.Device) bool { return d.Port == portActive }

// hostStatusOf is the status of a pod in the node's network, which its kernel carries or nobody. The
// agent's devices do not matter.
func hostStatusOf(atts []*agentapi.Attachment) podStatus {
	if len(atts) == 0 {
		return podStatus{word: v1alpha1.PodStatusPending, code: agentapi.CodeNotAttached}
	}
	for _, a := range atts {
		switch {
		case a.Datapath != "" && a.State != agentapi.StateIdle: // failed: only to change its filter
			return podStatus{word: v1alpha1.PodStatusEnabled, kernel: true}
		case a.Reason != agentapi.CodeOK:
			return podStatus{word: v1alpha1.PodStatusFallback, code: a.Reason}
		}
	}
	return podStatus{word: v1alpha1.PodStatusPending, code: agentapi.CodePodFailed}
}

// pausedOf is why the connections of a pod are not diverted for now.
func pausedOf(atts []*agentapi.Attachment) agentapi.Code {
	for _, a := range atts {
		if a.Paused != agentapi.CodeOK {
			return a.Paused
		}
	}
	return agentapi.CodeOK
}
