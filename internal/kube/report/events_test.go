// SPDX-License-Identifier: Apache-2.0

package report

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
)

func TestDeviceEvents(t *testing.T) {
	at := func(port, detail string) []v1alpha1.NodeDevice {
		return []v1alpha1.NodeDevice{{Name: "mlx5_0", Interface: "eth2", Address: "192.0.2.1", Port: port, Detail: detail}}
	}
	tests := []struct {
		name    string
		was, is []v1alpha1.NodeDevice
		want    string // reason and note
		warning bool
	}{
		{"new", nil, at(nodePortDown, ""), "", false},
		{"the same", at(nodePortActive, "GID 3"), at(nodePortActive, "GID 5"), "", false},
		{"down", at(nodePortActive, ""), at(nodePortDown, ""), "DeviceDown: the port of RDMA device mlx5_0 is down: check the interface eth2, its address and the cable", true},
		{"away", at(nodePortDown, ""), at(nodePortMissing, "it was removed"), "DeviceDown: it was removed", true},
		{"back", at(nodePortMissing, "it was removed"), at(nodePortActive, ""), "DeviceUp: RDMA device mlx5_0 is up, with the address 192.0.2.1 on eth2", false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var got string
			warning := false
			for _, e := range deviceEvents(corev1.ObjectReference{Name: node}, tt.was, tt.is, time.Unix(1, 0)) {
				got += e.reason + ": " + e.note
				warning = e.warning
			}
			if got != tt.want || warning != tt.warning {
				t.Errorf("event %q, warning %t; want %q, %t", got, warning, tt.want, tt.warning)
			}
		})
	}
}

func TestLinkEvents(t *testing.T) {
	type state struct {
		links      int
		redundancy string
		err        string
		group      string
	}
	two, one := state{2, "SYMMETRIC", "", "ACTIVE"}, state{1, "SINGLE", "", "ACTIVE"}
	tests := []struct {
		name  string
		steps []state
		want  []string
	}{
		{"a second link at the beginning", []state{{0, "SINGLE", "", "FORMING"}, one, two}, nil},
		{"a link is lost", []state{two, one}, []string{eventLinkDown, eventRedundancyLost}},
		{"and comes back", []state{two, one, one, two}, []string{eventLinkDown, eventRedundancyLost, eventLinkUp, eventRedundancyRestored}},
		{"a port moves", []state{two, {2, "ASYMMETRIC PEER", "", "ACTIVE"}, two}, []string{eventRedundancyLost, eventRedundancyRestored}},
		{"the group is lost", []state{one, {0, "SINGLE", "timeout", "DEAD"}}, []string{eventLinkDown}},
		{"the group ends", []state{one, {0, "SINGLE", "", "DRAINING"}}, nil},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var (
				got      []string
				was      *v1alpha1.SMCRLinkStatus
				degraded bool
			)
			for _, s := range tt.steps {
				g := group("shop/web", 1, s.links)
				g.Redundancy, g.Error, g.State = s.redundancy, s.err, s.group
				is := linkStatus(node, &g, "", nil)
				if was != nil {
					var news []event
					news, degraded = linkEvents(corev1.ObjectReference{}, was, &is, degraded, began())
					for _, e := range news {
						got = append(got, e.reason)
					}
				}
				was = &is
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("events (-want +got):\n%s", diff)
			}
		})
	}
}

// TestLinkEvents_kernel: a link group of the kernel is its node's, and is lost without an error of its own.
func TestLinkEvents_kernel(t *testing.T) {
	state := func(links int, state, redundancy string) *v1alpha1.SMCRLinkStatus {
		g := group("", 1, links)
		g.Datapath, g.State, g.Redundancy = string(v1alpha1.DatapathKernel), state, redundancy
		is := linkStatus(node, &g, "", nodesOfTheTests())
		return &is
	}
	two, one, none := state(2, "ACTIVE", "SYMMETRIC"), state(1, "ACTIVE", "SINGLE"), state(0, "CLOSED", "SINGLE")
	keepLinks(none, one)
	forming := state(0, "FORMING", "SINGLE")
	of := "node " + node + "'s kernel with node-b"
	for _, tt := range []struct {
		name    string
		was, is *v1alpha1.SMCRLinkStatus
		want    []string
	}{
		{"a link is lost", two, one, []string{
			"link 2 of " + of + " on device soft1 (192.0.2.1 to 192.0.2.2) is down; its connections moved to another link",
			"the link group of " + of + " can no longer lose any one RNIC: it is Single",
		}},
		{"the group is lost", one, none, []string{"the link group of " + of + " is lost: none of its links is active"}},
		{"it is lost still", none, none, nil},
		{"it never worked", forming, none, nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			news, _ := linkEvents(corev1.ObjectReference{}, tt.was, tt.is, false, began())
			var got []string
			for _, e := range news {
				got = append(got, e.note)
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("events (-want +got):\n%s", diff)
			}
		})
	}
}

func TestDecisionEvent(t *testing.T) {
	required := decided("shop/web", agentapi.ModeReset, agentapi.CodeRequired, began())
	required.Detail = "PEERNOSMC: the peer does not speak SMC"
	declined := decided("shop/web", "TCP", agentapi.CodeOf(clc.ReasonMem), began())
	declined.PeerDeclined = true
	inbound := declined
	inbound.Direction = agentapi.Inbound
	tests := []struct {
		name   string
		d      agentapi.Decision
		reason string
		note   []string
	}{
		{"refused", required, eventRefused, []string{"SMCRPolicy cache requires", "the peer does not speak SMC"}},
		{"declined by the peer", declined, eventFallback, []string{"the peer declined", "raise the budgets"}},
		{"inbound", inbound, eventFallback, []string{"client "}},
		{"on SMC-R", decided("shop/web", smcrMode, "", began()), "", nil},
		{"no policy", decided("shop/web", "TCP", agentapi.CodeNoPolicy, began()), "", nil},
		{"never came", decided("shop/web", agentapi.ModeConnecting, agentapi.CodeUndiverted, began()), eventFallback, []string{"a connection with", "hangs, and the next ones are plain TCP"}},
		{"ended by a policy", decided("shop/web", agentapi.ModeReset, agentapi.CodePolicyChange, began()), "", nil},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			e, ok := decisionEvent(podReference("shop", "web", "1"), &tt.d, began())
			if ok != (tt.reason != "") || e.reason != tt.reason && ok {
				t.Errorf("event %v %+v", ok, e)
			}
			for _, n := range tt.note {
				if !strings.Contains(e.note, n) {
					t.Errorf("note %q, want %q in it", e.note, n)
				}
			}
		})
	}
}

func TestEvents_limits(t *testing.T) {
	now := began()
	q := newEvents()
	about := func(name string) corev1.ObjectReference { return podReference("shop", name, name) }
	q.add(event{about: about("web"), reason: eventFallback, variant: "A", at: now})
	q.add(event{about: about("web"), reason: eventFallback, variant: "A", at: now.Add(eventAgain - 1)})
	if n := len(q.waiting); n != 1 {
		t.Errorf("%d events wait, the same one twice", n)
	}
	now = now.Add(eventAgain)
	for i := range 100 {
		q.add(event{about: about("web"), reason: eventFallback, variant: fmt.Sprint(i), at: now})
	}
	if n := len(q.waiting); n != 1+objectEventsBurst {
		t.Errorf("%d events of one pod wait", n)
	}
	for i := range 2 * maxRememberedEvent {
		q.add(event{about: about(fmt.Sprint(i)), reason: eventEnabled, at: now, note: strings.Repeat("x", 2*maxEventNote)})
	}
	if len(q.waiting) > maxEvents || len(q.sent) > maxRememberedEvent || len(q.objects) > maxRememberedEvent {
		t.Errorf("%d wait, %d and %d are remembered", len(q.waiting), len(q.sent), len(q.objects))
	}
	if n := len(q.waiting[len(q.waiting)-1].note); n > maxEventNote {
		t.Errorf("a note of %d bytes", n)
	}
	sent := 0
	for ; ; sent++ {
		if e, _ := q.next(now); e == nil {
			break
		}
		q.done()
	}
	if sent != eventsBurst {
		t.Errorf("%d events at once", sent)
	}
	if e, again := q.next(now.Add(maxEventAge + 1)); e != nil || !again.IsZero() || len(q.waiting) != 0 {
		t.Errorf("old events: %+v, again %v", e, again)
	}
}
