// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"fmt"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
)

// sideOf is one side of a link group with a link: the node and the queue pair of this side,
// and those of the other one. The GIDs are the nodes' names.
func sideOf(name, ns, pod, node string, qpn int64, peer string, peerQPN int64) *v1alpha1.SMCRLink {
	l := newLink(name, node, ns, pod)
	l.Status.Peer = peer
	l.Status.Links = []v1alpha1.LinkStatus{{ID: 1, State: v1alpha1.LinkActive, LocalGID: node, LocalQPN: qpn, PeerGID: peer, PeerQPN: peerQPN}}
	return l
}

func TestOtherSide(t *testing.T) {
	mine := sideOf("mine", "shop", "web-0", "a", 17, "b", 40)
	theirs := sideOf("theirs", "shop", "redis-0", "b", 40, "a", 17)
	for _, tt := range []struct {
		name  string
		links []*v1alpha1.SMCRLink
		want  string
	}{
		{"none", nil, ""},
		{"the other side", []*v1alpha1.SMCRLink{theirs}, "theirs"},
		{"the other side twice, by two links", []*v1alpha1.SMCRLink{theirs, theirs}, "theirs"},
		{"itself", []*v1alpha1.SMCRLink{mine}, ""},
		{"another queue pair of the same node", []*v1alpha1.SMCRLink{sideOf("x", "shop", "x", "b", 41, "a", 17)}, ""},
		{"the same queue pair, of another peer", []*v1alpha1.SMCRLink{sideOf("x", "shop", "x", "b", 40, "a", 18)}, ""},
		{"an agent of another node that says it has the link", []*v1alpha1.SMCRLink{func() *v1alpha1.SMCRLink {
			l := theirs.DeepCopy()
			l.Name, l.Status.Node = "forged", "c"
			return l
		}()}, ""},
		{"two that could be", []*v1alpha1.SMCRLink{theirs, sideOf("x", "shop", "x", "b", 40, "a", 17)}, ""},
		{"queue pairs that are not known yet", []*v1alpha1.SMCRLink{sideOf("x", "shop", "x", "b", 0, "a", 0)}, ""},
	} {
		var links []v1alpha1.SMCRLink
		for _, l := range tt.links {
			links = append(links, *l)
		}
		got := ""
		if o := otherSide(mine, links); o != nil {
			got = o.Name
		}
		if got != tt.want {
			t.Errorf("%s: %q, want %q", tt.name, got, tt.want)
		}
	}
	if o := otherSide(sideOf("x", "shop", "x", "a", 0, "b", 0), []v1alpha1.SMCRLink{*sideOf("y", "shop", "y", "b", 0, "a", 0)}); o != nil {
		t.Error("two links without queue pairs are one link group")
	}
}

// Each side of a link group gets the name of the pod at the other one, whichever is written
// first; what the agents write later leaves it alone.
func TestPeerPods(t *testing.T) {
	w := newWorld(t)
	a, b := "a-"+w.ns, "b-"+w.ns
	w.node(a)
	w.node(b)
	server := sideOf("server-"+w.ns, w.ns, "redis-0", b, 40, a, 17)
	w.create(server)
	w.run(w.asController())
	is := func(l *v1alpha1.SMCRLink, pod string) func() error {
		return func() error {
			if err := w.get(l); err != nil {
				return err
			}
			if l.Status.PeerPod != pod || l.Status.LastError != "kept" {
				return fmt.Errorf("the peer's pod of %s is %q (%+v), want %q", l.Name, l.Status.PeerPod, l.Status, pod)
			}
			return nil
		}
	}
	client := sideOf("client-"+w.ns, w.ns, "web-0", a, 17, b, 40)
	w.create(client)
	w.eventually("the server's peer", is(server, w.ns+"/web-0"))
	w.eventually("the client's peer", is(client, w.ns+"/redis-0"))
	w.applyAs("SMCRLink", client.Name, map[string]any{"node": a, "connections": int64(7)})
	w.never("a write of the agent", time.Second, is(client, w.ns+"/redis-0"))
	outside := sideOf("outside-"+w.ns, w.ns, "web-0", a, 18, "192.0.2.9", 77)
	w.create(outside)
	w.never("a peer outside of the cluster", 2*coalesce, is(outside, ""))
}

// TestSameForPairs: after a watch broke, one event may tell of an SMCRLink that was deleted and made anew under its name,
// without the pod of its peer.
func TestSameForPairs(t *testing.T) {
	was := sideOf("l", "shop", "web-0", "a", 17, "b", 40)
	was.UID, was.Status.PeerPod = "1", "shop/redis-0"
	for _, tt := range []struct {
		name   string
		change func(*v1alpha1.SMCRLink)
		want   bool
	}{
		{"counters", func(l *v1alpha1.SMCRLink) { l.Status.Connections = 7 }, true},
		{"the pod", func(l *v1alpha1.SMCRLink) { l.Status.Pod = "shop/web-1" }, false},
		{"the peer", func(l *v1alpha1.SMCRLink) { l.Status.Peer = "c" }, false},
		{"a link", func(l *v1alpha1.SMCRLink) { l.Status.Links[0].PeerQPN = 41 }, false},
		{"made anew", func(l *v1alpha1.SMCRLink) { l.UID, l.Status.PeerPod = "2", "" }, false},
	} {
		now := was.DeepCopy()
		tt.change(now)
		if got := sameForPairs(was, now); got != tt.want {
			t.Errorf("%s: %t, want %t", tt.name, got, tt.want)
		}
	}
}
