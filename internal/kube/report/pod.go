// SPDX-License-Identifier: Apache-2.0

package report

import (
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
}

// String is the annotation's value.
func (p podStatus) String() string {
	if p.code == agentapi.CodeOK {
		return p.word
	}
	return p.word + ": " + string(p.code)
}

// parsePodStatus is the reverse of String. What nobody writes here is no
// status.
func parsePodStatus(s string) podStatus {
	word, code, _ := strings.Cut(s, ":")
	switch word {
	case v1alpha1.PodStatusEnabled, v1alpha1.PodStatusPending, v1alpha1.PodStatusFallback:
		return podStatus{word, agentapi.Code(strings.TrimSpace(code))}
	}
	return podStatus{}
}

// traffic is what became of the connections of a pod.
type traffic struct {
	lastSMCR            time.Time
	firstPlain, lastOne time.Time // since lastSMCR; plain or refused
	last                agentapi.Decision
	latest              time.Time // of all decisions noted
}

// note takes a decision into account. They come in the order of their times.
func (t *traffic) note(d *agentapi.Decision) {
	t.latest = d.Last
	switch {
	case d.Mode == smcr.ModeSMCR.String():
		t.carried(d.Last)
	case d.Direction == config.Outbound.String() && saysWhyNot(d.Reason) && d.Last.After(t.lastSMCR):
		if t.firstPlain.IsZero() {
			t.firstPlain = d.Last
		}
		t.lastOne, t.last = d.Last, *d
	}
}

// carried notes that SMC-R was in use.
func (t *traffic) carried(at time.Time) {
	if at.After(t.lastSMCR) {
		t.lastSMCR = at
	}
	if !t.lastOne.After(t.lastSMCR) {
		t.firstPlain, t.lastOne = time.Time{}, time.Time{}
	}
}

// reason is why everything is plain TCP, or CodeOK.
func (t *traffic) reason(now time.Time) agentapi.Code {
	if t == nil || t.firstPlain.IsZero() || now.Sub(t.firstPlain) < fallbackAfter || now.Sub(t.lastOne) > fallbackMemory {
		return agentapi.CodeOK
	}
	return t.last.Reason
}

// saysWhyNot tells the reasons that say something about SMC-R from those that
// a connection without it meets as well.
func saysWhyNot(c agentapi.Code) bool {
	switch c {
	case agentapi.CodeOK, agentapi.CodeNoPolicy, agentapi.CodeConnect, agentapi.CodeApplication,
		agentapi.CodePolicyChange, agentapi.CodeDraining, agentapi.CodeUnseen, agentapi.CodeNotAttached:
		return false
	}
	return true
}

// statusOf is the status of a pod. A pod that is not opted in has none.
func statusOf(s *Snapshot, v *config.Verdict, atts []*agentapi.Attachment, t *traffic, now time.Time) podStatus {
	if !v.OptedIn || s.Uninstalled {
		return podStatus{}
	}
	if len(atts) == 0 {
		return podStatus{v1alpha1.PodStatusPending, agentapi.CodeNotAttached}
	}
	has := func(state string) bool {
		return slices.ContainsFunc(atts, func(a *agentapi.Attachment) bool { return a.State == state })
	}
	up := slices.ContainsFunc(s.Status.Devices, func(d agentapi.Device) bool { return d.Port == portActive })
	var why agentapi.Code
	switch {
	case has(agentapi.StateFailed):
		return podStatus{v1alpha1.PodStatusPending, agentapi.CodePodFailed}
	case s.Status.Unable != "":
		why = s.Status.UnableCode
	case barCode(v.Settings.Bar) != agentapi.CodeOK:
		why = barCode(v.Settings.Bar)
	case !up:
		why = agentapi.CodeOf(clc.ReasonNoDev)
	case !has(agentapi.StateReady):
		why = agentapi.CodeNoPolicy
	case slices.ContainsFunc(atts, func(a *agentapi.Attachment) bool { return a.Reason == agentapi.CodeMesh }):
		why = agentapi.CodeMesh
	case pausedOf(atts) != agentapi.CodeOK:
		why = pausedOf(atts)
	default:
		why = t.reason(now)
	}
	if why == agentapi.CodeOK {
		return podStatus{word: v1alpha1.PodStatusEnabled}
	}
	return podStatus{v1alpha1.PodStatusFallback, why}
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

// barCode is the reason code of what keeps a pod off SMC-R.
func barCode(b config.Bar) agentapi.Code {
	switch b {
	case config.BarTransport:
		return "TRANSPORT"
	case config.BarVersion:
		return agentapi.CodeOf(clc.ReasonVersMismat)
	case config.BarNone:
	}
	return agentapi.CodeOK
}
