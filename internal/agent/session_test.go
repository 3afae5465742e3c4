// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"net/netip"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/config"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
)

// TestSession_peer: policies are asked about the other side's address with the port of the service.
func TestSession_peer(t *testing.T) {
	src, dst := netip.MustParseAddrPort("10.0.0.1:40000"), netip.MustParseAddrPort("10.0.0.2:6379")
	for dir, want := range map[agentapi.Direction]string{agentapi.Outbound: "10.0.0.2:6379", agentapi.Inbound: "10.0.0.1:6379"} {
		if got := (&session{dir: dir, src: src, dst: dst}).peer().String(); got != want {
			t.Errorf("%s: %s, want %s", dir, got, want)
		}
	}
}

// TestSession_abort: abort resets both sides once, ends the session's context, and nothing can be
// entered into the session after it.
func TestSession_abort(t *testing.T) {
	app, appFar := loopback(t)
	tcp, tcpFar := loopback(t)
	ctx, cancel := context.WithCancelCause(t.Context())
	s := &session{cancel: cancel, app: app}
	if !s.setPeerConn(plainTCP{tcp, time.Now()}, smcr.ModeTCP.String(), agentapi.CodeNoPolicy) || s.info().Mode != smcr.ModeTCP.String() {
		t.Fatal("the peerConn of a live session was refused")
	}
	if s.endedBy() != "" {
		t.Errorf("ended by %q before abort", s.endedBy())
	}
	s.abort(agentapi.CodePolicyChange)
	s.abort(agentapi.CodeDraining)
	wantReset(t, appFar)
	wantReset(t, tcpFar)
	if s.endedBy() != agentapi.CodePolicyChange || !errors.Is(context.Cause(ctx), errEnded) {
		t.Errorf("ended by %q, cause %v, want the first abort", s.endedBy(), context.Cause(ctx))
	}
	late, lateFar := loopback(t)
	if s.setApp(late) || s.setPeerConn(plainTCP{late, time.Now()}, smcr.ModeSMCR.String(), "") {
		t.Error("a connection was entered into a session that is over")
	}
	wantLive(t, lateFar)
	if s.info().Mode != smcr.ModeTCP.String() {
		t.Errorf("mode %s", s.info().Mode)
	}
}

// TestSessions_list: sessions are listed from the oldest on, those of one proxy or all.
func TestSessions_list(t *testing.T) {
	var ss sessions
	a, b := &proxy{}, &proxy{}
	var all []*session
	for i := range 20 {
		s := &session{proxy: a}
		if i%2 == 1 {
			s.proxy = b
		}
		ss.add(s)
		all = append(all, s)
	}
	ss.remove(all[3])
	ss.remove(all[3]) // once more
	ids := func(of *proxy) (out []uint64) {
		for _, s := range ss.list(of) {
			out = append(out, s.id)
		}
		return out
	}
	for _, tt := range []struct {
		name string
		of   *proxy
		want []uint64
	}{
		{"one proxy", b, []uint64{2, 6, 8, 10, 12, 14, 16, 18, 20}},
		{"all", nil, []uint64{1, 2, 3, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20}},
		{"none", &proxy{}, nil},
	} {
		if d := cmp.Diff(tt.want, ids(tt.of)); d != "" {
			t.Errorf("%s (-want +got):\n%s", tt.name, d)
		}
		if n := ss.count(tt.of); n != len(tt.want) {
			t.Errorf("%s: %d are counted, want %d", tt.name, n, len(tt.want))
		}
	}
	for _, s := range all {
		ss.remove(s)
	}
	if len(ss.of) != 0 || ss.count(nil) != 0 || len(ss.list(nil)) != 0 {
		t.Errorf("after all are gone: %v, %d counted", ss.of, ss.count(nil))
	}
}

// BenchmarkSessions_list lists the sessions of one pod of 250 with 200 sessions each.
func BenchmarkSessions_list(b *testing.B) {
	var ss sessions
	var pods [250]proxy
	for i := range pods {
		for range 200 {
			ss.add(&session{proxy: &pods[i]})
		}
	}
	for b.Loop() {
		if n := len(ss.list(&pods[7])); n != 200 {
			b.Fatalf("%d sessions", n)
		}
	}
}

// TestProxy_register: a session is live from register to end; one that is registered after the end
// of its proxy is aborted at once.
func TestProxy_register(t *testing.T) {
	b := newAbleBare(t, "", preferAll)
	p := b.proxy("a")
	app, far := loopback(t)
	begin := func() (*session, context.Context, func()) {
		return p.px.register(p.px.life, app, &session{dir: agentapi.Outbound, src: addrPort(app.RemoteAddr()), dst: netip.MustParseAddrPort("192.0.2.9:80")})
	}
	s, ctx, end := begin()
	if i := s.info(); i.Mode != agentapi.ModeConnecting || i.Pod != "test/a" || i.Policy != "all" || i.ID != 1 || ctx.Err() != nil {
		t.Errorf("session %+v, context %v", i, ctx.Err())
	}
	if b.a.sessions.count(p.px) != 1 {
		t.Error("the session is not listed")
	}
	end()
	if b.a.sessions.count(p.px) != 0 || ctx.Err() == nil {
		t.Errorf("after its end the session is listed, or its context has not ended: %v", ctx.Err())
	}
	wantLive(t, far)

	s, ctx, end = begin()
	s.setRelay(nil)
	if ctx.Err() == nil || s.cancel != nil {
		t.Error("a session that is relayed has the context of its set-up")
	}
	end()

	p.px.kill()
	s, ctx, end = begin()
	defer end()
	if s.endedBy() != agentapi.CodeDraining || ctx.Err() == nil {
		t.Errorf("after the end of the proxy: ended by %q, context %v", s.endedBy(), ctx.Err())
	}
	wantReset(t, far)
}

// selecting is a policy that finds its peers by selectors, and the slice of the policy.
type selecting struct {
	generation, sliceOf int64
	port                int32
	peers               []string // none: no slice
}

// node is the configuration of a pod that the policy selects.
func (p selecting) node(t testing.TB, base *config.Node, datapath v1alpha1.Datapath) *config.Node {
	t.Helper()
	yes := "true"
	policy := testPolicy(func(s *v1alpha1.SMCRPolicySpec) {
		s.Peers = &v1alpha1.PolicyPeers{Selectors: []v1alpha1.PeerSelector{{PodSelector: &v1alpha1.LabelSelector{}}}}
		s.Ports, s.Datapath = []v1alpha1.PolicyPort{{Port: p.port}}, datapath
	})
	policy.Generation, policy.UID = p.generation, "u"
	o := config.Objects{
		Pods:     []config.PodObject{{Namespace: "test", Name: "a", Enabled: &yes}},
		Policies: []v1alpha1.SMCRPolicy{policy},
	}
	if len(p.peers) > 0 {
		o.PeerSlices = []v1alpha1.SMCRPeerSlice{{ObjectMeta: metav1.ObjectMeta{Namespace: "test", Name: "p-0"}, Policy: "p", PolicyGeneration: p.sliceOf, Addresses: p.peers}}
	}
	n, _, bad := config.FromObjects(base, o)
	if len(bad) > 0 {
		t.Fatal(bad)
	}
	return n
}

// TestSession_isForbidden: a session on SMC-R goes on when the selectors of its policy do not find its peer any more, and ends when
// the policy says something else.
func TestSession_isForbidden(t *testing.T) {
	both, other := []string{"192.0.2.8", "192.0.2.9"}, []string{"192.0.2.8"}
	for _, tt := range []struct {
		name  string
		mode  string
		steps []selecting
		ends  bool
	}{
		{"the peer leaves", "SMC-R", []selecting{{1, 1, 80, other}}, false},
		{"all peers leave", "SMC-R", []selecting{{1, 1, 80, nil}}, false},
		{"the peer leaves while the session connects", agentapi.ModeConnecting, []selecting{{1, 1, 80, other}}, false},
		{"it leaves, and the port does", "SMC-R", []selecting{{1, 1, 80, other}, {2, 1, 81, other}}, true},
		{"the port leaves", "SMC-R", []selecting{{2, 1, 81, both}}, true},
		{"other selectors", "SMC-R", []selecting{{2, 1, 80, both}, {2, 2, 80, other}}, true},
		{"other selectors that find nobody", "SMC-R", []selecting{{2, 1, 80, both}, {2, 2, 80, nil}}, true},
		{"other selectors, peers first", "SMC-R", []selecting{{1, 2, 80, other}}, true},
		{"the peer leaves a policy that changed", "SMC-R", []selecting{{2, 1, 80, both}, {2, 2, 80, both}, {2, 2, 80, other}}, false},
	} {
		b := newAbleBare(t, "", preferAll)
		base := b.a.node.Load()
		b.a.adopt(selecting{1, 1, 80, both}.node(t, base, v1alpha1.DatapathAgent))
		p := b.proxy("a")
		s := p.live(t, "192.0.2.9:80")
		s.mode = tt.mode
		for i, x := range tt.steps {
			if s.endedBy() != "" {
				t.Errorf("%s: ended before step %d", tt.name, i)
			}
			b.a.adopt(x.node(t, base, v1alpha1.DatapathAgent))
			p.px.enforcePolicies()
		}
		if want := map[bool]agentapi.Code{true: agentapi.CodePolicyChange}[tt.ends]; s.endedBy() != want {
			t.Errorf("%s: ended by %q, want %q", tt.name, s.endedBy(), want)
		}
	}
}
