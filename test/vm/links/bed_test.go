// SPDX-License-Identifier: Apache-2.0

package links

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/smcr-io/kube-smcr/internal/smcnl"
	"github.com/smcr-io/kube-smcr/test/vm/lab"
	"github.com/smcr-io/kube-smcr/test/vm/peer/drive"
	"github.com/smcr-io/kube-smcr/test/vm/peer/report"
)

const (
	port = 5000
	// roundTimeout ends a round that hangs.
	roundTimeout = 11 * time.Minute
	// changeTimeout is for what both sides do about a link that came or went.
	changeTimeout = 2 * time.Minute
	// endTimeout is for what the kernel does after the programs have ended.
	endTimeout = 2 * time.Minute
	// replaceTime is how long the kernel may take for another link. It was seen to take 3.5 s,
	// also on a machine with nothing else to do.
	replaceTime = 8 * time.Second
	// aliveTime is how long connections are watched that must not end.
	aliveTime = 300 * time.Millisecond
	// explainTimeout is for asking what may explain a failure.
	explainTimeout = 30 * time.Second
	// testLinkSeconds is the kernel's smcr_testlink_time here; its default of 30
	// would make tests long.
	testLinkSeconds = 3
)

// bed is the two guests.
type bed struct {
	lab            *lab.Lab
	kernel, engine *lab.Guest
}

// provider is what the engine has its devices from.
type provider string

const (
	soft  provider = "soft"
	verbs provider = "verbs"
)

// devices names the engine's devices on these NICs.
func (b *bed) devices(p provider, nics ...int) string {
	var names []string
	for _, n := range nics {
		if p == verbs {
			names = append(names, fmt.Sprintf("verbs:rxe%d", n))
		} else {
			names = append(names, "soft:"+b.engine.Addr(n).String())
		}
	}
	return strings.Join(names, ",")
}

// role is the engine's.
type role string

const (
	dials  role = "engineDials"
	serves role = "engineServes"
)

var both = []role{dials, serves}

// plan is connections between the two sides that are under load until they have
// been told that it is enough.
type plan struct {
	engine  role
	devices string // of the engine
	do      string // script of each connection; "": load
	conns   int    // 0: 3
	ours    string // more flags of the engine
	// broken: the connections do not end well.
	broken bool
	// attacked: there are connections of others on our side.
	attacked bool
	// forgotten: the kernel forgets its counters.
	forgotten bool
}

// load is echoes of more than one packet and less than a buffer: both directions
// have something under way nearly always, and each answer shows how long the
// connection stood still.
const load = "echo:size=24K:for=" + loadTime

// drips is messages of both ends with little time between them.
const drips = "drip:every=2ms:for=" + loadTime

// loadTime ends a load that nobody ends: less than roundTimeout.
const loadTime = "10m"

// round is a plan at work.
type round struct {
	t              *testing.T
	b              *bed
	p              plan
	ctx            context.Context //nolint:containedctx // a round is part of one test
	before         smcnl.Counters
	began          time.Time
	server, client *drive.Run
	ours, theirs   *drive.Run
}

// start opens the connections and returns when both sides say that they are
// SMC-R.
func (b *bed) start(t *testing.T, p plan) *round {
	t.Helper()
	ctx, cancel := context.WithTimeoutCause(context.Background(), roundTimeout, fmt.Errorf("no end after %v", roundTimeout))
	t.Cleanup(cancel)
	if p.conns == 0 {
		p.conns = 3
	}
	if p.do == "" {
		p.do = load
	}
	r := &round{t: t, b: b, p: p, ctx: ctx, before: b.ask(t).Counters, began: time.Now()}
	engine := strings.Fields("-stack engine -device " + p.devices + " " + p.ours)
	kernel := []string{"-stack", "kernel"}
	server, ofServer, client, ofClient := b.kernel, kernel, b.engine, engine
	if p.engine == serves {
		server, ofServer, client, ofClient = b.engine, engine, b.kernel, kernel
	}
	to := netip.AddrPortFrom(server.Addr(0), port).String()
	var err error
	if r.server, err = drive.Serve(ctx, server, to, append(ofServer, "-timeout", roundTimeout.String())...); err != nil {
		t.Fatal(err)
	}
	dial := slices.Concat([]string{"dial", "-to", to, "-do", p.do, "-conns", fmt.Sprint(p.conns), "-timeout", roundTimeout.String()}, ofClient)
	if r.client, err = drive.Start(ctx, client, dial...); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { // of a test that failed on the way
		if t.Failed() {
			r.b.explain(t)
		}
		_, _ = r.client.Kill()
		_, _ = r.server.Kill()
		if t.Failed() {
			r.ours.Log(t.Logf)
		}
	})
	r.ours, r.theirs = r.client, r.server
	if p.engine == serves {
		r.ours, r.theirs = r.server, r.client
	}
	if err := r.client.Opened(ctx); err != nil {
		t.Fatal(err)
	}
	r.note("the connections are open")
	return r
}

// enough ends the load and judges the connections.
func (r *round) enough() (ours, theirs *report.Report) {
	r.t.Helper()
	r.note("enough")
	if err := r.client.Enough(); err != nil {
		r.t.Fatal(err)
	}
	return r.wait()
}

// wait waits for the end of the scripts and judges.
func (r *round) wait() (ours, theirs *report.Report) {
	r.t.Helper()
	client, err := r.client.Wait()
	if err != nil && !r.p.broken {
		r.t.Errorf("client: %v", err)
	}
	server, err := r.server.Stop()
	if err != nil && !r.p.broken && !r.p.attacked {
		r.t.Errorf("server: %v", err)
	}
	ours, theirs = client, server
	if r.p.engine == serves {
		ours, theirs = server, client
	}
	r.note("the programs have ended")
	r.wantSMCR(ours, theirs)
	if !r.p.broken {
		r.wantOrder(theirs, "the kernel's side")
	}
	if !r.p.broken && !r.p.attacked {
		r.wantOrder(ours, "our side")
		for _, m := range ours.Malformed {
			r.t.Errorf("our engine says of the kernel: %s", m)
		}
	}
	r.b.quiesce(r.t)
	r.note("nothing is left")
	return ours, theirs
}

// note logs when something has happened.
func (r *round) note(what string) {
	r.t.Helper()
	r.t.Logf("after %.1f s: %s", time.Since(r.began).Seconds(), what)
}

func (r *round) wantOrder(rep *report.Report, side string) {
	r.t.Helper()
	if err := rep.Check(); err != nil {
		r.t.Errorf("%s: %v", side, err)
	}
}

// wantSMCR says that all connections were SMC-R, by the kernel's counters and by
// our engine.
func (r *round) wantSMCR(ours, theirs *report.Report) {
	r.t.Helper()
	n := uint64(r.p.conns)
	want := smcnl.Counters{ServerV2: n}
	if r.p.engine == serves {
		want = smcnl.Counters{ClientV2: n}
	}
	if r.p.forgotten {
		want, r.before = smcnl.Counters{}, smcnl.Counters{}
	}
	k := r.b.ask(r.t).Counters.Sub(r.before)
	got := smcnl.Counters{
		ClientV1: k.ClientV1, ClientV2: k.ClientV2, ServerV1: k.ServerV1, ServerV2: k.ServerV2,
		ClientErrors: k.ClientErrors, ServerErrors: k.ServerErrors, Fallbacks: k.Fallbacks,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		r.t.Errorf("the kernel's counters of rendezvous (-want +got):\n%s", diff)
	}
	for _, c := range ours.Conns {
		if !c.Engine.SMCR() {
			r.t.Errorf("our engine says of %s: %+v", c.Local, c.Engine)
		}
	}
	for _, c := range theirs.Conns {
		if r.p.engine == serves && (c.Kernel == nil || c.Kernel.Mode != "SMCR") {
			r.t.Errorf("the kernel says of %s: %+v", c.Local, c.Kernel)
		}
	}
}

// stall is the longest time that a connection of a report stood still.
func stall(rep *report.Report) time.Duration {
	var longest float64
	for _, c := range rep.Conns {
		longest = max(longest, c.StallMS)
	}
	return time.Duration(longest * float64(time.Millisecond))
}

// wantStall says that no connection stood still for longer, and logs how long
// they did.
func (r *round) wantStall(bound time.Duration) func(ours, theirs *report.Report) {
	return func(ours, theirs *report.Report) {
		r.t.Helper()
		got := max(stall(ours), stall(theirs))
		r.t.Logf("the longest wait of a connection was %v", got.Round(time.Millisecond))
		if got > bound {
			r.t.Errorf("a connection stood still for %v, more than %v", got, bound)
		}
	}
}

// wantAlive says that no connection has ended yet.
func (r *round) wantAlive() {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(r.ctx, aliveTime)
	defer cancel()
	if l, err := r.client.Await(ctx, "a connection ended", func(l report.Line) bool { return l.Conn != nil }); err == nil {
		r.t.Errorf("a connection has ended: %+v", *l.Conn)
	}
}

// wantEnds says that all connections were reset.
func (r *round) wantEnds(rep *report.Report) {
	r.t.Helper()
	if len(rep.Conns) != r.p.conns {
		r.t.Errorf("%d connections have ended, want %d", len(rep.Conns), r.p.conns)
	}
	for _, c := range rep.Conns {
		if c.Err == "" {
			r.t.Errorf("the connection %s ended well", c.Local)
		}
	}
	if e := rep.End; e == nil || e.Left != 0 || e.Closed == nil || e.Closed.MemoryBytes != 0 {
		r.t.Errorf("in the end our side has %+v", e)
	}
}

// ask asks the kernel for the state of its SMC.
func (b *bed) ask(t *testing.T) report.Kernel {
	t.Helper()
	k, err := drive.Kernel(context.Background(), b.kernel)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// awaitKernel asks the kernel until is says that it is as it should be.
func (b *bed) awaitKernel(t *testing.T, what string, timeout time.Duration, is func(report.Kernel) bool) {
	t.Helper()
	for end := time.Now().Add(timeout); ; {
		k := b.ask(t)
		if is(k) {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("after %v not yet: the kernel has %s; it has the link groups %+v and the sockets %+v", timeout, what, k.Groups, k.Sockets)
		}
		time.Sleep(100 * time.Millisecond) // polls the kernel's link groups
	}
}

// explain logs what the kernel has, before a failed round's programs end, and has both
// guests print where tasks are blocked to their consoles.
func (b *bed) explain(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), explainTimeout)
	defer cancel()
	k, err := drive.Kernel(ctx, b.kernel)
	t.Logf("the kernel has the link groups %+v and the sockets %+v (error: %v)", k.Groups, k.Sockets, err)
	for _, g := range []*lab.Guest{b.kernel, b.engine} {
		out, err := g.Shell(ctx, "echo w >/proc/sysrq-trigger; nft list ruleset; rdma resource show qp")
		t.Logf("rules and queue pairs of %s (error: %v):\n%s", g.Name(), err, out)
	}
}

// quiesce waits until nothing is left in the kernel: no socket, and no link
// group, since our stack has ended it.
func (b *bed) quiesce(t *testing.T) {
	t.Helper()
	b.awaitKernel(t, "nothing left", endTimeout, func(k report.Kernel) bool { return len(k.Sockets) == 0 && len(k.Groups) == 0 })
}

// awaitGroup waits until the kernel's only link group has these links ACTIVE, on
// these devices of its own, and is as redundant as this.
func (r *round) awaitGroup(redundancy string, devices ...string) {
	r.t.Helper()
	r.b.awaitKernel(r.t, fmt.Sprintf("one link group, %s over %v", redundancy, devices), changeTimeout, func(k report.Kernel) bool {
		if len(k.Groups) != 1 || k.Groups[0].Redundancy != redundancy {
			return false
		}
		var active []string
		for _, l := range k.Groups[0].Links {
			if l.State == "ACTIVE" {
				active = append(active, l.Device)
			}
		}
		slices.Sort(active)
		return slices.Equal(active, devices)
	})
	r.note("the kernel's link group is " + redundancy)
}

// awaitWithout waits until the kernel's only link group has links, none of which
// ends at this address.
func (r *round) awaitWithout(addr netip.Addr) {
	r.t.Helper()
	r.b.awaitKernel(r.t, fmt.Sprintf("one link group, without links at %v", addr), changeTimeout, func(k report.Kernel) bool {
		return len(k.Groups) == 1 && len(k.Groups[0].Links) > 0 && !slices.ContainsFunc(k.Groups[0].Links, func(l smcnl.Link) bool {
			return l.State == "ACTIVE" && (l.GID.Unmap() == addr || l.PeerGID.Unmap() == addr)
		})
	})
	r.note(fmt.Sprintf("the kernel's link group is without %v", addr))
}

// awaitReplacement gives the kernel time for the asymmetric link that it adds in the
// place of a lost one, in most cases: the end of the cut is lost on it while it does.
func (r *round) awaitReplacement() {
	r.t.Helper()
	for end := time.Now().Add(replaceTime); time.Now().Before(end); {
		if k := r.b.ask(r.t); len(k.Groups) == 1 && strings.HasPrefix(k.Groups[0].Redundancy, "ASYMMETRIC") {
			r.note("the kernel's link group is " + k.Groups[0].Redundancy)
			return
		}
		time.Sleep(100 * time.Millisecond) // polls the kernel's link groups
	}
}

// awaitDead waits until our engine's group has ended, for a reason that has this
// text; none for an orderly end.
func (r *round) awaitDead(reason string) {
	r.t.Helper()
	ctx, cancel := context.WithTimeoutCause(r.ctx, changeTimeout, fmt.Errorf("not after %v", changeTimeout))
	defer cancel()
	l, err := r.ours.Await(ctx, "its link group had ended", func(l report.Line) bool { return l.Group != nil && l.Group.State == "DEAD" })
	if err != nil {
		r.t.Fatal(err)
	}
	if e := l.Group.Err; (e == "") != (reason == "") || !strings.Contains(e, reason) {
		r.t.Errorf("our link group ended because of %q, want %q", e, reason)
	}
	r.note("our link group has ended")
}

// awaitOurs waits until our engine's group has had these redundancies one after
// the other, since the program began, with all links of the last one ACTIVE.
func (r *round) awaitOurs(redundancies ...string) {
	r.t.Helper()
	ctx, cancel := context.WithTimeoutCause(r.ctx, changeTimeout, fmt.Errorf("not after %v", changeTimeout))
	defer cancel()
	at := 0
	if _, err := r.ours.Await(ctx, "its link group was "+strings.Join(redundancies, ", then "), func(l report.Line) bool {
		if g := l.Group; g != nil && g.State == "ACTIVE" && g.Redundancy == redundancies[at] && !forming(g) {
			at++
		}
		return at == len(redundancies)
	}); err != nil {
		r.t.Fatal(err)
	}
	r.note("our link group is " + redundancies[len(redundancies)-1])
}

// limited is a context for one step that somebody waits for, as long as for a change.
func limited(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), changeTimeout)
	t.Cleanup(cancel)
	return ctx
}

func forming(g *report.Group) bool {
	return slices.ContainsFunc(g.Links, func(l report.Link) bool { return l.State != "ACTIVE" })
}
