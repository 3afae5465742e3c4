// SPDX-License-Identifier: Apache-2.0

package report

import (
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
	"github.com/smcr-io/kube-smcr/internal/agentapi"
)

func TestLinkStatus(t *testing.T) {
	tests := []struct {
		name       string
		change     func(*agentapi.LinkGroup)
		state      v1alpha1.LinkState
		redundancy v1alpha1.Redundancy
		peer       string
		links      int
		ready      string // reason
	}{
		{"two links", func(*agentapi.LinkGroup) {}, v1alpha1.LinkActive, v1alpha1.RedundancySymmetric, "node-b", 2, reasonLinkActive},
		{"asymmetric", func(g *agentapi.LinkGroup) { g.Redundancy = "ASYMMETRIC PEER" }, v1alpha1.LinkActive, v1alpha1.RedundancyAsymmetric, "node-b", 2, reasonLinkActive},
		{"one link", func(g *agentapi.LinkGroup) { g.Redundancy, g.Links = "SINGLE", g.Links[:1] }, v1alpha1.LinkActive, v1alpha1.RedundancySingle, "node-b", 1, reasonLinkActive},
		{"peer without a name", func(g *agentapi.LinkGroup) { g.PeerClaimedName = "" }, v1alpha1.LinkActive, v1alpha1.RedundancySymmetric, "node-b", 2, reasonLinkActive},
		{"a peer that no node has", func(g *agentapi.LinkGroup) {
			g.Links[0].PeerGID, g.Links[1].PeerGID = "::ffff:192.0.2.9", "::ffff:192.0.2.9"
		}, v1alpha1.LinkActive, v1alpha1.RedundancySymmetric, "192.0.2.9", 2, reasonLinkActive},
		{"links to two nodes", func(g *agentapi.LinkGroup) { g.Links[1].PeerGID = "::ffff:192.0.2.3" }, v1alpha1.LinkActive, v1alpha1.RedundancySymmetric, "192.0.2.2", 2, reasonLinkActive},
		{"first contact", func(g *agentapi.LinkGroup) {
			g.State, g.Redundancy, g.Links, g.PeerClaimedName = "FORMING", "SINGLE", nil, ""
		}, v1alpha1.LinkEstablishing, v1alpha1.RedundancyNone, "peer-1", 0, reasonEstablishing},
		{"links without a number yet", func(g *agentapi.LinkGroup) {
			g.Links[0].ID, g.Links[1].ID, g.Links[1].State = 0, 0, "FORMING"
		}, v1alpha1.LinkActive, v1alpha1.RedundancySymmetric, "node-b", 1, reasonLinkActive},
		{"no link is up", func(g *agentapi.LinkGroup) { g.Links = nil }, v1alpha1.LinkDown, v1alpha1.RedundancyNone, "peer-1", 0, reasonNoLink},
		{"ending", func(g *agentapi.LinkGroup) { g.State = "DRAINING" }, v1alpha1.LinkDown, v1alpha1.RedundancySymmetric, "node-b", 2, v1alpha1.ReasonEnding},
		{"lost", func(g *agentapi.LinkGroup) { g.State, g.Error = "DEAD", "timeout" }, v1alpha1.LinkDown, v1alpha1.RedundancySymmetric, "node-b", 2, reasonLost},
		{"many links", func(g *agentapi.LinkGroup) {
			for i := range 20 {
				g.Links = append(g.Links, agentapi.Link{ID: uint8(i + 10), State: "ACTIVE", PeerGID: "::ffff:192.0.2.2"})
			}
		}, v1alpha1.LinkActive, v1alpha1.RedundancySymmetric, "node-b", maxLinks, reasonLinkActive},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			g := group("shop/web", 1, 2)
			tt.change(&g)
			s := linkStatus(node, &g, "cache", nodesOfTheTests())
			if s.State != tt.state || s.Redundancy != tt.redundancy || s.Peer != tt.peer || len(s.Links) != tt.links || s.Conditions[0].Reason != tt.ready {
				t.Errorf("state %s, redundancy %s, peer %s, %d links, %+v", s.State, s.Redundancy, s.Peer, len(s.Links), s.Conditions)
			}
		})
	}
}

// TestLinkStatus_pci: the SMCRLink names the VFs of a pod that has some.
func TestLinkStatus_pci(t *testing.T) {
	g := group("shop/web", 1, 3)
	g.Links[0].PCI, g.Links[1].PCI, g.Links[2].PCI = "0000:02:10.2", "0000:01:10.0", "0000:01:10.0"
	s := linkStatus(node, &g, "cache", nil)
	if s.PCIAddresses != "0000:01:10.0,0000:02:10.2" || s.Links[0].PCI != "0000:02:10.2" {
		t.Errorf("PCI addresses %s, links %+v", s.PCIAddresses, s.Links)
	}
}

// A link group of the node's kernel says so, and nothing that the kernel does not tell.
func TestLinkStatus_ofKernel(t *testing.T) {
	g := group("", 1, 2)
	g.Datapath, g.Opened = "Kernel", time.Time{}
	for i := range g.Links {
		g.Links[i].LocalQPN, g.Links[i].PeerQPN, g.Links[i].MTU = 0, 0, 0
	}
	s := linkStatus(node, &g, "", nodesOfTheTests())
	if s.Datapath != string(v1alpha1.DatapathKernel) || s.State != v1alpha1.LinkActive || s.Peer != "node-b" || s.QPNs != "" || !s.OpenedAt.IsZero() || s.Pod != "" || s.Namespace != "" {
		t.Errorf("%+v", s)
	}
	g = group("shop/web", 1, 2)
	if s := linkStatus(node, &g, "", nodesOfTheTests()); s.Datapath != string(v1alpha1.DatapathAgent) || s.QPNs == "" {
		t.Errorf("of an agent: %+v", s)
	}
}

func TestLinkName(t *testing.T) {
	g := group("shop/web", 1, 1)
	name := linkName(node, &g)
	if !strings.HasPrefix(name, "node-a-") || len(name) != len("node-a-01234567") {
		t.Errorf("name %s, want one like node-a-01234567", name)
	}
	again := g
	again.Conns, again.State, again.PeerClaimedName = 17, "DRAINING", ""
	if linkName(node, &again) != name {
		t.Error("the name changes with the state")
	}
	for what, change := range map[string]func(*agentapi.LinkGroup){
		"pod":    func(g *agentapi.LinkGroup) { g.Pod = "shop/db" },
		"peer":   func(g *agentapi.LinkGroup) { g.PeerID = "other" },
		"number": func(g *agentapi.LinkGroup) { g.ID++ },
		"time":   func(g *agentapi.LinkGroup) { g.Opened = g.Opened.Add(1) },
	} {
		other := g
		if change(&other); linkName(node, &other) == name {
			t.Errorf("another %s has the same name", what)
		}
	}
}

func TestNodeLabel(t *testing.T) {
	const uid = "7c1f6f0a-8f60-4a55-9ad0-6b1f9f3d6f3e"
	for _, tt := range []struct{ name, node, want string }{
		{"short", node, node},
		{"as long as a label", strings.Repeat("a", 63), strings.Repeat("a", 63)},
		{"longer", strings.Repeat("a", 64), uid},
		{"as long as a name", strings.Repeat("a", 60) + "." + strings.Repeat("b", 192), uid},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := v1alpha1.NodeLabel(tt.node, uid); got != tt.want {
				t.Errorf("label %s, want %s", got, tt.want)
			}
		})
	}
	long := strings.Repeat("a", 53) + "." + strings.Repeat("b", 190)
	if v := podLabel(long); len(v) > maxLabelValue || strings.Contains(v, ".-") || podLabel("agent-x") != "agent-x" {
		t.Errorf("label of an agent's pod %s", v)
	}
}

// TestLinkTarget: what the controller writes, and the time of the counters, is no reason to
// write an SMCRLink.
func TestLinkTarget(t *testing.T) {
	g := group("shop/web", 1, 1)
	mine := &v1alpha1.SMCRLink{Status: linkStatus(node, &g, "", nil)}
	seen := mine.DeepCopy()
	seen.Status.PeerPod, seen.Status.CountedAt = "shop/redis", metav1.Time{Time: began()}
	want, wrote := linkTarget(mine), linkTarget(seen)
	if d := want.difference(&wrote); d != inNothing {
		t.Errorf("the difference is %v", d)
	}
	seen.Status.LastError = "x"
	wrote = linkTarget(seen)
	if d := want.difference(&wrote); d != inState {
		t.Errorf("with another state the difference is %v", d)
	}
}
