// SPDX-License-Identifier: Apache-2.0

package report

import (
	"encoding/json"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/cni/install"
	"github.com/smcr-io/kube-smcr/internal/config"
)

// busy is an agent with something in each list, and one link group more than there are SMCRLinks. The
// newest link group is the first one.
func busy() Snapshot {
	s := healthy()
	for i := range maxLinkObjects + 1 {
		s.Links = append(s.Links, group("shop/web", uint32(maxLinkObjects+1-i), 2))
	}
	s.Verdicts = []config.Verdict{verdict("web"), verdict("db")}
	s.Attachments = []agentapi.Attachment{attachment("shop/web", agentapi.StateReady), attachment("shop/db", agentapi.StateFailed)}
	s.PodDevices = []agentapi.PodDevice{{ID: "0000:01:10.2", RDMA: []string{"rxe0"}, Pods: []string{"shop/web"}}, {ID: "0000:01:10.0"}}
	s.Decisions = []agentapi.Decision{{Pod: "shop/web", Mode: "TCP", Last: began()}}
	s.Annotations = map[string]string{"uid-web": "Enabled", "uid-db": "Pending: NOT_ATTACHED"}
	s.Nodes = nodesOfTheTests()
	return s
}

// planned is everything that a planner wants in Kubernetes, as text.
func planned(t *testing.T, p *planner) string {
	t.Helper()
	objects := map[string]any{}
	for k, e := range p.queue.entries {
		objects[k.String()] = e.want.body
	}
	text, err := json.Marshal(objects)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// TestSnapshot_belongsToItsMaker: the reporter changes nothing in a snapshot, and what it plans stays as
// it is when the maker uses the memory again.
func TestSnapshot_belongsToItsMaker(t *testing.T) {
	p, s := newTestPlanner(), busy()
	p.plan(&s, began())
	if diff := cmp.Diff(busy(), s, cmpopts.EquateComparable(netip.Addr{}, netip.AddrPort{})); diff != "" {
		t.Errorf("the reporter changed the snapshot (-was +is):\n%s", diff)
	}
	before := planned(t, p)
	for i := range s.Links {
		clear(s.Links[i].Links)
	}
	clear(s.Links)
	clear(s.Status.Devices)
	clear(s.Verdicts)
	clear(s.Attachments)
	for i := range s.PodDevices {
		clear(s.PodDevices[i].Pods)
		clear(s.PodDevices[i].RDMA)
	}
	clear(s.PodDevices)
	clear(s.Decisions)
	clear(s.Annotations)
	clear(s.Versions)
	clear(s.Nodes)
	if diff := cmp.Diff(before, planned(t, p)); diff != "" {
		t.Errorf("the plan changed with the snapshot (-was +is):\n%s", diff)
	}
}

// TestCNI_states: the reporter knows the states of the plugin's installation by their names there. Those
// that it has no text for are shown as they are, and mean that the plugin is not in the chain.
func TestCNI_states(t *testing.T) {
	for state, want := range map[install.State]metav1.ConditionStatus{
		install.StateInstalled: metav1.ConditionTrue,
		install.StateStandby:   metav1.ConditionUnknown,
		install.StateContested: metav1.ConditionFalse,
		install.StateStarting:  metav1.ConditionFalse,
		install.StateWaiting:   metav1.ConditionFalse,
		install.StateBroken:    metav1.ConditionFalse,
		install.StateAbsent:    metav1.ConditionFalse,
	} {
		s := healthy()
		s.CNI.State = string(state)
		if c := nodeCNI(&s); c.Status != want || c.Reason != string(state) {
			t.Errorf("%s: CNIInstalled is %s %s, want %s %s", state, c.Status, c.Reason, want, state)
		}
		// While another program takes the plugin out of the chain, it is there most of the time.
		attaches := slices.Contains([]install.State{install.StateInstalled, install.StateStandby, install.StateContested}, state)
		if c := nodeReady(&s); (c.Status == metav1.ConditionTrue) != attaches {
			t.Errorf("%s: Ready is %s %s", state, c.Status, c.Reason)
		}
	}
}

// TestSnapshot_stages: what is said of a node while the agent starts, runs and leaves.
func TestSnapshot_stages(t *testing.T) {
	for name, tt := range map[string]struct {
		change func(*Snapshot)
		ready  string // "Status Reason"; "": the SMCRNode is not written
	}{
		"the agent is not up":   {func(s *Snapshot) { s.Status.Started = time.Time{} }, ""},
		"not reconciled":        {func(s *Snapshot) { s.Reconciled = false }, "False " + reasonStarting},
		"reconciled":            {func(*Snapshot) {}, "True " + reasonAgentReady},
		"draining":              {func(s *Snapshot) { s.Status.Draining = true }, "False " + reasonDraining},
		"uninstalled":           {func(s *Snapshot) { s.Uninstalled = true }, "False " + reasonUninstalled},
		"left":                  {func(s *Snapshot) { s.Uninstalled, s.Left = true, "x" }, "False " + v1alpha1.ReasonAgentGone},
		"left before it was up": {func(s *Snapshot) { s.Status.Started, s.Uninstalled, s.Left = time.Time{}, true, "x" }, "False " + v1alpha1.ReasonAgentGone},
	} {
		t.Run(name, func(t *testing.T) {
			p, s := newTestPlanner(), healthy()
			tt.change(&s)
			p.plan(&s, began())
			got := ""
			for k, e := range p.queue.entries {
				if k.kind != kindNode {
					continue
				}
				for _, c := range e.want.body.(*v1alpha1.SMCRNode).Status.Conditions {
					if c.Type == v1alpha1.ConditionReady {
						got = string(c.Status) + " " + c.Reason
					}
				}
			}
			if got != tt.ready {
				t.Errorf("Ready is %q, want %q", got, tt.ready)
			}
		})
	}
}
