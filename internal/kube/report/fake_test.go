// SPDX-License-Identifier: Apache-2.0

package report

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/config"
	"github.com/smcr-io/kube-smcr/internal/preflight"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
)

const node = "node-a"

var errAway = errors.New("connection refused")

// fakeServer is an API server that remembers what was written.
type fakeServer struct {
	observations chan observation // what the watch tells

	mu      sync.Mutex // guards what is below
	found   found
	err     error           // of everything, while set
	refuse  map[key]error   // of one object
	noEvent error           // of events, while set
	writes  []string        // in their order
	counts  map[string]int  // by verb and kind
	objects map[key]any     // as applied
	version int             // the last resource version
	events  []*corev1.Event // accepted
	hang    time.Duration   // of each call
	at      []time.Time     // of the writes

	renewals []coordinationv1.Lease
}

func newFakeServer() *fakeServer {
	return &fakeServer{observations: make(chan observation), found: found{owner: "uid-of-node"}, refuse: map[key]error{}, counts: map[string]int{}, objects: map[key]any{}}
}

func (s *fakeServer) call(ctx context.Context) error {
	s.mu.Lock()
	s.counts["call"]++
	hang, err := s.hang, s.err
	s.mu.Unlock()
	if hang > 0 {
		select {
		case <-time.After(hang):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return err
}

func (s *fakeServer) load(ctx context.Context, _ string) (*found, error) {
	if err := s.call(ctx); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.counts["load"]++
	return &s.found, nil
}

func (s *fakeServer) apply(ctx context.Context, k key, body any) (metav1.ObjectMeta, error) {
	if err := s.call(ctx); err != nil {
		return metav1.ObjectMeta{}, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.refuse[k]; err != nil {
		s.counts["refuse"]++
		return metav1.ObjectMeta{}, err
	}
	s.note("apply " + k.String())
	s.counts["write"]++
	s.objects[k] = body
	s.version++
	return metav1.ObjectMeta{UID: types.UID("uid-" + k.name), ResourceVersion: fmt.Sprint(s.version)}, nil
}

func (s *fakeServer) remove(ctx context.Context, name string) error {
	if err := s.call(ctx); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.note("delete SMCRLink " + name)
	s.counts["write"]++
	delete(s.objects, key{kind: kindLink, name: name})
	return nil
}

func (s *fakeServer) watch(ctx context.Context, _, label string, see func(observation)) {
	s.watched(label, 1)
	defer s.watched(label, -1)
	for {
		select {
		case x := <-s.observations:
			see(x)
		case <-ctx.Done():
			return
		}
	}
}

// watched counts the watches of a label.
func (s *fakeServer) watched(label string, n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.counts["watch "+label] += n
}

func (s *fakeServer) note(what string) {
	s.writes = append(s.writes, what)
	s.at = append(s.at, time.Now())
}

func (s *fakeServer) event(ctx context.Context, e *corev1.Event) error {
	if err := s.call(ctx); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.noEvent != nil {
		s.counts["noEvent"]++
		return s.noEvent
	}
	s.counts["event"]++
	s.events = append(s.events, e)
	return nil
}

func (s *fakeServer) renew(_ context.Context, lease *coordinationv1.Lease) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.counts["renew"]++
	if s.err != nil {
		return s.err
	}
	s.renewals = append(s.renewals, *lease)
	return nil
}

func (s *fakeServer) fail(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.err = err
}

func (s *fakeServer) count(what string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.counts[what]
}

// taken returns the writes since the last call.
func (s *fakeServer) taken() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := s.writes
	s.writes, s.at = nil, nil
	return out
}

func (s *fakeServer) reasons() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []string
	for _, e := range s.events {
		out = append(out, e.Reason)
	}
	return out
}

// source is the agent: a snapshot that tests change.
type source struct {
	mu   sync.Mutex // guards snap
	snap Snapshot
	each func(*Snapshot, time.Time) // before each look, if set
}

func (s *source) get() Snapshot {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.each != nil {
		s.each(&s.snap, time.Now())
	}
	// Tests change elements in place.
	out := s.snap
	out.Links, out.Verdicts, out.Attachments = slices.Clone(out.Links), slices.Clone(out.Verdicts), slices.Clone(out.Attachments)
	out.Decisions, out.Status.Devices = slices.Clone(out.Decisions), slices.Clone(out.Status.Devices)
	return out
}

func (s *source) change(f func(*Snapshot)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f(&s.snap)
}

// start runs a reporter until the end of the test, or until stop is called.
func start(t *testing.T, srv server, src *source) (r *Reporter, stop func()) {
	t.Helper()
	return startWith(t, srv, src, false)
}

func startWith(t *testing.T, srv server, src *source, linksOnly bool) (r *Reporter, stop func()) {
	t.Helper()
	r = newReporter(Config{
		Node: node, AgentPod: "kube-smcr/agent-x", AgentVersion: "v0.4.0", LinksOnly: linksOnly, Source: src.get,
		Preflight: noPreflight, Log: slog.New(slog.DiscardHandler),
	}, srv)
	return r, run(t, r)
}

// run runs a reporter until the end of the test, or until stop is called.
func run(t *testing.T, r *Reporter) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		r.Run(ctx)
	}()
	stop = func() { cancel(); <-done }
	t.Cleanup(stop)
	return stop
}

func noPreflight(context.Context) preflight.Report {
	return preflight.Report{Kernel: "6.12.0", Checks: []preflight.Check{{Name: "kernel", Result: preflight.OK, Detail: "Linux 6.12.0"}}}
}

// nodesOfTheTests are two nodes with a device each.
func nodesOfTheTests() map[netip.Addr]string {
	return map[netip.Addr]string{netip.MustParseAddr("192.0.2.2"): "node-b", netip.MustParseAddr("192.0.2.3"): "node-c"}
}

// began is a time that objects hold exactly.
func began() time.Time { return time.Date(2026, 11, 21, 8, 0, 0, 0, time.UTC) }

// healthy is an agent without pods.
func healthy() Snapshot {
	return Snapshot{
		Status: agentapi.Status{
			Node: node, Started: began(), Devices: []agentapi.Device{device("soft0", "ACTIVE")},
			NodeBudget: agentapi.Budget{MemoryBytes: 1 << 30, Conns: 4096},
		},
		CNI: CNI{State: cniInstalled}, Reconciled: true,
	}
}

func device(name, port string) agentapi.Device {
	return agentapi.Device{Name: name, Provider: "soft", Address: "192.0.2.1", Interface: "eth0", MTU: 1024, Port: port}
}

// group is a link group of a pod with so many links.
func group(pod string, id uint32, links int) agentapi.LinkGroup {
	g := agentapi.LinkGroup{
		ID: id, Pod: pod, Role: "client", PeerID: fmt.Sprintf("peer-%d", id), State: groupActive, Version: 2, PeerClaimedName: "node-b",
		Redundancy: "SINGLE", Conns: 1, RMBBytes: 1 << 20, Opened: began().Add(time.Duration(id) * time.Second),
	}
	for i := range links {
		g.Links = append(g.Links, agentapi.Link{
			ID: uint8(i + 1), State: "ACTIVE", Device: fmt.Sprintf("soft%d", i), LocalGID: "::ffff:192.0.2.1", PeerGID: "::ffff:192.0.2.2",
			LocalQPN: 17, PeerQPN: 18, MTU: 1024,
		})
	}
	if links > 1 {
		g.Redundancy = "SYMMETRIC"
	}
	return g
}

func verdict(name string) config.Verdict {
	return config.Verdict{Namespace: "shop", Name: name, UID: "uid-" + name, OptedIn: true, Policies: []string{"cache"}}
}

func attachment(pod, state string) agentapi.Attachment {
	return agentapi.Attachment{Pod: pod, State: state}
}

func decided(pod, mode string, code agentapi.Code, at time.Time) agentapi.Decision {
	return agentapi.Decision{Pod: pod, Direction: agentapi.Outbound, Mode: mode, Reason: code, Last: at, Policy: "cache"}
}

// pod is the annotation that was applied to a pod.
func (s *fakeServer) pod(name string) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	p, ok := s.objects[key{kind: kindPod, namespace: "shop", name: name}].(*corev1.Pod)
	if !ok {
		return ""
	}
	return p.Annotations[v1alpha1.AnnotationStatus]
}

var smcrMode = smcr.ModeSMCR.String()
