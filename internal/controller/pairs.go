// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/types"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
)

// pairs finds the two SMCRLinks of each link group, and writes into each of them the pod of the
// other one. An agent cannot know the pod of its peer: it sees the pods of its own node, and a client may
// have connected to the address of a Service. But a link has two ends, each a GID and a queue
// pair number, and both sides have both:
//
//	SMCRLink of the client  192.0.2.1 qp 17 - 192.0.2.2 qp 40  pod shop/web-0
//	SMCRLink of the server  192.0.2.2 qp 40 - 192.0.2.1 qp 17  pod shop/redis-0
//
// Each side must be on the node that the other one names as its peer: an agent can write
// what it wants into the SMCRLinks of its node, and is not to be taken for another one.
type pairs struct {
	client client.Client
}

func (r *pairs) setUp(mgr ctrl.Manager) error {
	return ctrl.NewControllerManagedBy(mgr).Named("pairs").WithOptions(options(1)).
		Watches(&v1alpha1.SMCRLink{}, mark(coalesce, func(old, now *v1alpha1.SMCRLink) []types.NamespacedName {
			if now == nil || old != nil && sameForPairs(old, now) {
				return nil
			}
			return key(now.Name)
		})).
		Complete(r)
}

// sameForPairs says whether two states are of one SMCRLink, and equal in all that the peer's pod
// depends on. An SMCRLink that was deleted and made anew has lost its peer's pod.
func sameForPairs(old, now *v1alpha1.SMCRLink) bool {
	return old.UID == now.UID && old.Status.Pod == now.Status.Pod && old.Status.Peer == now.Status.Peer &&
		equality.Semantic.DeepEqual(old.Status.Links, now.Status.Links)
}

// Reconcile writes the peer's pod into an SMCRLink and into that of the other side.
func (r *pairs) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	var l v1alpha1.SMCRLink
	if err := r.client.Get(ctx, req.NamespacedName, &l); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	var found []v1alpha1.SMCRLink
	for _, end := range peerEnds(&l) {
		var list v1alpha1.SMCRLinkList
		if err := r.client.List(ctx, &list, client.MatchingFields{indexLinkEnd: end}); err != nil {
			return ctrl.Result{}, fmt.Errorf("list the links with the end %s: %w", end, err)
		}
		found = append(found, list.Items...)
	}
	other := otherSide(&l, found)
	if other == nil {
		return ctrl.Result{}, nil // its event comes, if it is one of the cluster
	}
	return ctrl.Result{}, errors.Join(r.write(ctx, &l, other.Status.Pod), r.write(ctx, other, l.Status.Pod))
}

func (r *pairs) write(ctx context.Context, l *v1alpha1.SMCRLink, pod string) error {
	if l.Status.PeerPod == pod {
		return nil
	}
	config, err := statusOf("SMCRLink", l, map[string]any{"peerPod": pod}, "")
	if err != nil {
		return err
	}
	err = r.client.Apply(ctx, config, client.FieldOwner(v1alpha1.ManagerController), client.ForceOwnership)
	if err == nil || isReplaced(err) {
		return nil
	}
	return fmt.Errorf("write the peer's pod into SMCRLink %s: %w", l.Name, err)
}

// otherSide returns which of the links is the other side of a link group, nil if none is, or
// more than one could be.
func otherSide(l *v1alpha1.SMCRLink, links []v1alpha1.SMCRLink) *v1alpha1.SMCRLink {
	var other *v1alpha1.SMCRLink
	for i := range links {
		o := &links[i]
		if o.Name == l.Name || o.Status.Peer != l.Status.Node || l.Status.Peer != o.Status.Node || !haveLink(l, o) {
			continue
		}
		if other != nil && other.Name != o.Name {
			return nil
		}
		other = o
	}
	return other
}

// haveLink tells whether two sides have a link in common.
func haveLink(a, b *v1alpha1.SMCRLink) bool {
	return slices.ContainsFunc(a.Status.Links, func(x v1alpha1.LinkStatus) bool {
		return slices.ContainsFunc(b.Status.Links, func(y v1alpha1.LinkStatus) bool {
			return linkEnd(x.LocalGID, x.LocalQPN) != "" && linkEnd(x.PeerGID, x.PeerQPN) != "" &&
				x.LocalGID == y.PeerGID && x.LocalQPN == y.PeerQPN && x.PeerGID == y.LocalGID && x.PeerQPN == y.LocalQPN
		})
	})
}

// linkEnd is one end of a link; "" if it is not known yet.
func linkEnd(gid string, qpn int64) string {
	if gid == "" || qpn == 0 {
		return ""
	}
	return fmt.Sprintf("%s %d", gid, qpn)
}

func localEnds(l *v1alpha1.SMCRLink) []string {
	return endsOf(l, func(s *v1alpha1.LinkStatus) string { return linkEnd(s.LocalGID, s.LocalQPN) })
}

func peerEnds(l *v1alpha1.SMCRLink) []string {
	return endsOf(l, func(s *v1alpha1.LinkStatus) string { return linkEnd(s.PeerGID, s.PeerQPN) })
}

func endsOf(l *v1alpha1.SMCRLink, end func(*v1alpha1.LinkStatus) string) (out []string) {
	for i := range l.Status.Links {
		if e := end(&l.Status.Links[i]); e != "" {
			out = append(out, e)
		}
	}
	return out
}
