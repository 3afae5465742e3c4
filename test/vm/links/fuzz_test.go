// SPDX-License-Identifier: Apache-2.0

package links

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/test/vm/lab"
	"github.com/smcr-io/kube-smcr/test/vm/peer/report"
)

var (
	fuzzSeed   = flag.Uint64("seed", 1, "seed of the peer that breaks the protocol")
	fuzzRounds = flag.Int("rounds", 15, "how many attacks it tries")
)

const fuzzTimeout = 5 * time.Minute

// A peer makes correct rendezvous with our engine and then breaks the protocol. Beside it the kernel carries
// connections to the same engine: they go on undisturbed, and nothing is left of the attacks.
func (b *bed) testFuzz(t *testing.T) {
	building, built := context.WithTimeout(t.Context(), setUpTimeout)
	defer built()
	if _, err := b.lab.Build(building, "github.com/smcr-io/kube-smcr/test/vm/links/fuzzer", lab.BuildOptions{CGO: true}); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeoutCause(t.Context(), fuzzTimeout, fmt.Errorf("no end after %v", fuzzTimeout))
	defer cancel()
	r := b.start(t, plan{engine: serves, devices: b.devices(soft, 0, 1), attacked: true, ours: "-close-timeout 2s"})
	r.awaitOurs("SYMMETRIC")
	to := fmt.Sprintf("%v:%d", b.engine.Addr(0), port)
	t.Logf("the seed is %d", *fuzzSeed)
	out, err := b.kernel.Run(ctx, "fuzzer", "-device", "verbs:rxe0", "-to", to, "-seed", fmt.Sprint(*fuzzSeed), "-rounds", fmt.Sprint(*fuzzRounds))
	var tried []attackLine
	for line := range strings.Lines(out) {
		t.Log(strings.TrimSpace(line))
		var a attackLine
		if err := json.Unmarshal([]byte(line), &a); err != nil {
			t.Fatalf("read a line of the fuzzer: %v", err)
		}
		tried = append(tried, a)
	}
	if err != nil {
		t.Errorf("the attacks: %v", err)
	}
	r.note("the attacks are over")
	r.wantAlive()
	ours, theirs := r.enough()
	r.wantStall(cutStall)(ours, theirs)
	b.judgeAttacked(t, ours)
	judgeAttacks(t, tried, ours)
}

// attackLine is the fuzzer's report of a round.
type attackLine struct {
	Attack        string
	Groups        int // link groups that our engine made for the fuzzer; the last one is attacked
	Done, Refused int
}

// Our engine ends a link group because of a message of the peer, or because the engine's device refused a
// write of the peer.
const (
	byMessage = "llc: parse|protocol violation"
	byWrite   = "link failed: queue pair went to ERR"
)

// outcomes say what our engine does about an attack. The connection is reset in every case, because the peer
// closes TCP at once.
var outcomes = map[string]struct {
	ends    string // one of these is why the link group ended
	lives   bool   // the attack does not end the link group, the end of the peer does
	refused int    // writes
}{
	// The seed decides which part of these messages is damaged, and so what they mean.
	"damaged LLC messages":       {},
	"damaged CDC messages":       {},
	"random bytes":               {},
	"wrong lengths":              {ends: byMessage},
	"requests at the wrong time": {ends: byMessage},
	// A CDC message is about one connection, and its link is sound.
	"CDC messages with wrong lengths": {lives: true},
	"answers that nobody asked for":   {ends: byMessage},
	"unknown connections":             {lives: true},
	"impossible cursors":              {lives: true},
	"wrong rkey":                      {ends: byWrite, refused: 1},
	"writes outside the RMB":          {ends: byWrite, refused: 1},
	// The peer has the RKeys of the elements of its own link group, and no others.
	"writes into the next elements of its RMB": {lives: true},
	// Each link group has a protection domain of its own.
	"writes into the RMB of another link group": {ends: byWrite, refused: 1},
	"storm of messages":                         {lives: true},
	"storm without taking the answers":          {ends: "LLC answers wait for the peer to take them"},
}

// judgeAttacks compares the fate of each attack's link group and connection with the expected one.
func judgeAttacks(t *testing.T, tried []attackLine, ours *report.Report) {
	t.Helper()
	why := map[uint32]string{} // link groups ended
	for _, g := range ours.Groups {
		why[g.ID] = g.Err
	}
	groups := slices.Sorted(maps.Keys(why))
	want := 1 // the kernel's
	for _, a := range tried {
		want += a.Groups
	}
	if len(groups) != want {
		t.Fatalf("our engine had the link groups %v, want %d for the kernel and %d attacks", groups, want, len(tried))
	}
	conns := map[uint32]report.Conn{}
	for _, c := range ours.Conns {
		conns[c.Engine.GroupID] = c
	}
	last := 0
	for _, a := range tried {
		of := groups[last+1 : last+1+a.Groups]
		last += a.Groups
		if len(of) == 0 {
			t.Errorf("%s: it has not begun", a.Attack)
			continue
		}
		got := why[of[len(of)-1]]
		want, known := outcomes[a.Attack]
		ended := slices.ContainsFunc(strings.Split(byMessage+"|"+byWrite, "|"), func(s string) bool { return strings.Contains(got, s) })
		switch {
		case !known:
			t.Errorf("%s: nobody has said what must become of it", a.Attack)
		case want.lives && ended:
			t.Errorf("%s: the link group ended because of %q, want it to live", a.Attack, got)
		case want.ends != "" && !slices.ContainsFunc(strings.Split(want.ends, "|"), func(s string) bool { return strings.Contains(got, s) }):
			t.Errorf("%s: the link group ended because of %q, want %q", a.Attack, got, want.ends)
		}
		if a.Refused < want.refused {
			t.Errorf("%s: %d writes were refused, want %d", a.Attack, a.Refused, want.refused)
		}
		for _, g := range of {
			// A connection whose group ended at once was never handed over.
			if c, opened := conns[g]; opened && (c.Received != 0 || !strings.Contains(c.Err, "connection reset by peer")) {
				t.Errorf("%s: the connection received %d bytes and ended by %q, want a reset", a.Attack, c.Received, c.Err)
			}
		}
	}
}

func (b *bed) judgeAttacked(t *testing.T, ours *report.Report) {
	t.Helper()
	for _, c := range ours.Conns {
		if c.Err != "" && strings.HasPrefix(c.Script, "echo") {
			t.Errorf("an honest connection of %s: %s", c.Peer, c.Err)
		}
	}
	e := ours.End
	if e == nil {
		t.Fatal("our engine's program printed no end")
	}
	if e.Stats == nil || e.Stats.MessagesBad == 0 || len(ours.Malformed) == 0 {
		t.Errorf("our engine counts %+v, and says of malformed messages %q", e.Stats, ours.Malformed)
	}
	if e.Left != 0 || e.Closed == nil || e.Closed.MemoryBytes != 0 || e.Closed.Conns != 0 || e.Closed.Groups != 0 {
		t.Errorf("in the end our engine has %+v, %+v", e, e.Closed)
	}
	t.Logf("our engine refused %d messages", e.Stats.MessagesBad)
}
