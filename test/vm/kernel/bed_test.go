// SPDX-License-Identifier: Apache-2.0

package kernel

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
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
	"github.com/smcr-io/kube-smcr/test/vm/lab"
	"github.com/smcr-io/kube-smcr/test/vm/peer/drive"
	"github.com/smcr-io/kube-smcr/test/vm/peer/report"
)

const (
	port = 5000
	// roundTimeout ends a round that hangs.
	roundTimeout = 6 * time.Minute
	// endTimeout is for what a kernel does after the programs have ended:
	// its part in the end of connections and link groups.
	endTimeout = 90 * time.Second
)

// bed is two guests: the kernel's side and ours.
type bed struct {
	lab            *lab.Lab
	kernel, engine *lab.Guest
	device         string // of the engine
	// last is what the kernel had counted after the round before, nil if there was
	// none: asking takes as long as a short round.
	last *smcnl.Counters
}

// role is which side the engine has.
type role bool

const (
	engineDials  role = false
	engineServes role = true
)

func (r role) String() string {
	if r == engineDials {
		return "engineDials"
	}
	return "engineServes"
}

var roles = []role{engineDials, engineServes}

// plan is a round of connections between the two sides.
type plan struct {
	engine role
	do     string // scripts
	dial   string // more flags of the client, whoever it is
	ours   string // more flags of the engine
	theirs string // more flags of the kernel's side
	// addr is the server's address; the zero value is that of its first NIC.
	addr netip.Addr
	// during is called when the script hold only waits.
	during func(t *testing.T, r *round)
	// declines: our engine has something to say against SMC-R.
	declines bool
	// fails: the client's connections do not come about or do not end well.
	fails bool
	// more is time beyond roundTimeout.
	more time.Duration
}

// round is what happened.
type round struct {
	server, client *drive.Run
	ours, theirs   *report.Report
	kernel         smcnl.Counters // the difference
}

// play plays a round and judges what must hold in any.
func (b *bed) play(t *testing.T, p plan) *round {
	t.Helper()
	ctx, cancel := context.WithTimeoutCause(context.Background(), roundTimeout+p.more, fmt.Errorf("no end after %v", roundTimeout+p.more))
	defer cancel()
	before := b.last
	b.last = nil // of a round that fails on the way nobody knows
	if before == nil {
		k := b.ask(t).Counters
		before = &k
	}
	r := &round{}
	ours, theirs := strings.Fields("-stack engine -device "+b.device+" "+p.ours), strings.Fields("-stack kernel "+p.theirs)
	server, serves, client, dials := b.kernel, theirs, b.engine, ours
	if p.engine == engineServes {
		server, serves, client, dials = b.engine, ours, b.kernel, theirs
	}
	addr := p.addr
	if !addr.IsValid() {
		addr = server.Addr(0)
	}
	to := netip.AddrPortFrom(addr, port).String()
	var err error
	if r.server, err = drive.Serve(ctx, server, to, serves...); err != nil {
		t.Fatal(err)
	}
	dials = slices.Concat([]string{"dial", "-to", to, "-do", p.do}, dials, strings.Fields(p.dial))
	if r.client, err = drive.Start(ctx, client, dials...); err != nil {
		t.Fatal(err)
	}
	if p.during != nil {
		if err := r.client.Held(ctx); err != nil {
			t.Fatal(err)
		}
		p.during(t, r)
	}
	c, err := r.client.Wait()
	if err != nil && !p.fails {
		t.Errorf("client: %v", err)
	}
	s, err := r.server.Stop()
	if err != nil && !p.fails {
		t.Errorf("server: %v", err)
	}
	r.ours, r.theirs = c, s
	if p.engine == engineServes {
		r.ours, r.theirs = s, c
	}
	if !p.fails {
		check(t, "our side", r.ours)
		check(t, "the kernel's side", r.theirs)
	}
	if !p.fails && !p.declines {
		for _, m := range r.ours.Malformed {
			t.Errorf("our engine says of the kernel: %s", m)
		}
	}
	now := b.quiesce(t).Counters
	r.kernel = now.Sub(*before)
	b.last = &now
	return r
}

func check(t *testing.T, side string, r *report.Report) {
	t.Helper()
	if err := r.Check(); err != nil {
		t.Errorf("%s: %v", side, err)
	}
}

// shell runs a script of the shell in a guest.
func (b *bed) shell(t *testing.T, g *lab.Guest, script string) {
	t.Helper()
	if _, err := g.Shell(context.Background(), script); err != nil {
		t.Fatal(err)
	}
}

// sysctl sets a variable of the kernel's side for the length of the test.
func (b *bed) sysctl(t *testing.T, name string, value int) {
	t.Helper()
	file := "/proc/sys/" + strings.ReplaceAll(name, ".", "/")
	was, err := b.kernel.Run(context.Background(), "cat", file)
	if err != nil {
		t.Fatal(err)
	}
	b.shell(t, b.kernel, fmt.Sprintf("echo %d >%s", value, file))
	t.Cleanup(func() { b.shell(t, b.kernel, fmt.Sprintf("echo %s >%s", strings.TrimSpace(was), file)) })
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

// quiesce waits until nothing is left in the kernel: no socket, and no link
// group, since our stack has ended it. It returns what the kernel said last.
func (b *bed) quiesce(t *testing.T) report.Kernel {
	t.Helper()
	for end := time.Now().Add(endTimeout); ; {
		k := b.ask(t)
		switch {
		case len(k.Sockets) == 0 && len(k.Groups) == 0:
			return k
		case time.Now().After(end):
			t.Errorf("%v after the end the kernel still has the sockets %+v and the link groups %+v", endTimeout, k.Sockets, k.Groups)
			return k
		}
		time.Sleep(100 * time.Millisecond) // polls the kernel's sockets and link groups
	}
}

// wantSMCR says that each of n connections was SMC-R, by the kernel's counters
// and by our engine.
func (r *round) wantSMCR(t *testing.T, p plan, n int) {
	t.Helper()
	want := smcnl.Counters{ServerV2: uint64(n)}
	if p.engine == engineServes {
		want = smcnl.Counters{ClientV2: uint64(n)}
	}
	if diff := cmp.Diff(want, r.rendezvous()); diff != "" {
		t.Errorf("the kernel's counters of rendezvous (-want +got):\n%s", diff)
	}
	if len(r.ours.Conns) != n || len(r.theirs.Conns) != n {
		t.Errorf("%d connections on our side and %d on the kernel's, want %d", len(r.ours.Conns), len(r.theirs.Conns), n)
	}
	for _, c := range r.ours.Conns {
		if e := c.Engine; !e.SMCR() || e.Version != 2 || e.Reason != 0 {
			t.Errorf("our engine says of %s, %s: %+v", c.Script, c.Local, e)
		}
	}
	for _, c := range r.theirs.Conns {
		if k := c.Kernel; k == nil || k.Mode != "SMCR" {
			t.Errorf("the kernel says of %s, %s: %+v", c.Script, c.Local, k)
		}
	}
	if s := r.ours.End.Stats; s.ConnsSMCR != uint64(n) || s.ConnsTCP != 0 || s.MessagesBad != 0 {
		t.Errorf("our stack's counters are %+v", *s)
	}
}

// wantTCP says that the one connection was TCP, why our engine thinks so, and
// what the kernel counted.
func (r *round) wantTCP(t *testing.T, want report.Engine, kernel map[smcnl.Fallback]uint64, peerReason clc.Reason) {
	t.Helper()
	if len(r.ours.Conns) != 1 || len(r.theirs.Conns) != 1 {
		t.Fatalf("%d connections on our side and %d on the kernel's, want 1", len(r.ours.Conns), len(r.theirs.Conns))
	}
	got := *r.ours.Conns[0].Engine
	t.Logf("fell back after %.0f ms; our engine: %+v; the kernel: %+v", got.SetupMS, got, r.theirs.Conns[0].Kernel)
	got.SetupMS = 0
	want.Mode, want.ReasonName = "TCP", want.Reason.String()
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("what our engine says (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(kernel, r.kernel.Fallbacks); diff != "" || r.kernel.Successes() != 0 {
		t.Errorf("the kernel counted %d connections of SMC-R and these fallbacks (-want +got):\n%s", r.kernel.Successes(), diff)
	}
	if k := r.theirs.Conns[0].Kernel; k == nil || k.Mode != "TCP" || k.PeerReason != peerReason {
		t.Errorf("the kernel says %+v, want TCP and the peer's reason %v", k, peerReason)
	}
}

// rendezvous is the part of the counters about how connections came about.
func (r *round) rendezvous() smcnl.Counters {
	k := r.kernel
	return smcnl.Counters{
		ClientV1: k.ClientV1, ClientV2: k.ClientV2, ServerV1: k.ServerV1, ServerV2: k.ServerV2,
		ClientErrors: k.ClientErrors, ServerErrors: k.ServerErrors,
		Fallbacks: k.Fallbacks, ClientFallbacks: k.ClientFallbacks, ServerFallbacks: k.ServerFallbacks,
	}
}

// firstContacts counts the link groups that our connections made.
func (r *round) firstContacts() int {
	n := 0
	for _, c := range r.ours.Conns {
		if c.Engine != nil && c.Engine.FirstContact {
			n++
		}
	}
	return n
}
