// SPDX-License-Identifier: Apache-2.0

package report

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// renewed returns the renewals since the last call.
func (s *fakeServer) renewed() []coordinationv1.Lease {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := s.renewals
	s.renewals = nil
	return out
}

// TestReporter_renewsItsLease: the Lease is renewed while the agent manages its node, and no longer when
// the agent has left the node.
func TestReporter_renewsItsLease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		srv, src := newFakeServer(), &source{snap: healthy()}
		_, stop := start(t, srv, src)
		oneSecond()
		first := srv.renewed()
		if len(first) != 1 {
			t.Fatalf("%d renewals in the first second, want 1", len(first))
		}
		l := first[0]
		if l.Namespace != "kube-smcr" || l.Name != "kube-smcr-agent-node-a" || l.Labels["smcr.io/node"] != node || *l.Spec.HolderIdentity != "agent-x" ||
			len(l.OwnerReferences) != 1 || l.OwnerReferences[0].UID != "uid-of-node" {
			t.Errorf("the Lease is %+v", l)
		}
		pass(4 * renewEvery)
		if n := len(srv.renewed()); n != 4 {
			t.Errorf("%d renewals in %v, want 4", n, 4*renewEvery)
		}
		if w := srv.taken(); len(w) != 1 {
			t.Errorf("a renewal makes the reporter write: %v", w)
		}

		srv.fail(errAway)
		pass(time.Minute)
		if n := srv.count("renew"); n > 5+int(time.Minute/renewEvery)+3 {
			t.Errorf("%d calls in a minute of an API server that is away", n)
		}
		srv.fail(nil)
		pass(renewEvery)
		if n := len(srv.renewed()); n != 1 {
			t.Errorf("%d renewals as soon as the API server is back, want 1", n)
		}

		src.change(func(s *Snapshot) { s.Uninstalled = true })
		oneSecond()
		srv.renewed()
		pass(time.Minute)
		if n := len(srv.renewed()); n != 0 {
			t.Errorf("%d renewals after the agent left the node, want 0", n)
		}
		stop()
	})
}

// TestReporter_handedOverRenewsNothing: the Lease is that of the agent that manages the node.
func TestReporter_handedOverRenewsNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		srv := newFakeServer()
		startWith(t, srv, &source{snap: healthy()}, true)
		pass(time.Minute)
		if n := len(srv.renewed()); n != 0 {
			t.Errorf("%d renewals, want 0", n)
		}
	})
}

// slowWrites is an API server whose writes hang.
type slowWrites struct{ *fakeServer }

func (slowWrites) apply(ctx context.Context, _ key, _ any) (metav1.ObjectMeta, error) {
	<-ctx.Done()
	return metav1.ObjectMeta{}, context.Cause(ctx)
}

// TestReporter_renewsWhileOtherCallsHang: the Lease is renewed while a write of an object hangs.
func TestReporter_renewsWhileOtherCallsHang(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		srv := newFakeServer()
		start(t, slowWrites{srv}, &source{snap: healthy()})
		oneSecond()
		srv.renewed()
		pass(4 * renewEvery)
		if n := len(srv.renewed()); n != 4 {
			t.Errorf("%d renewals in %v, want 4", n, 4*renewEvery)
		}
	})
}
