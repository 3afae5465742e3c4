// SPDX-License-Identifier: Apache-2.0

package synqueue

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/internal/testenv"
)

var start = time.Unix(1000, 0)

// at is a time in milliseconds.
func at(ms int) time.Time { return start.Add(time.Duration(ms) * time.Millisecond) }

func syn(srcPort, dstPort uint16, seq uint32) SYN {
	return SYN{Seq: seq, Conn: Conn{
		Src: netip.AddrPortFrom(netip.MustParseAddr("10.0.0.1"), srcPort),
		Dst: netip.AddrPortFrom(netip.MustParseAddr("10.0.0.2"), dstPort),
	}}
}

// poll writes down what is to be done.
func poll(t *Table, now time.Time) string {
	var all []string
	for a, ok := t.Poll(now); ok; a, ok = t.Poll(now) {
		switch a.Kind {
		case Ask:
			all = append(all, fmt.Sprintf("ask %d to %d", a.Conn.Src.Port(), a.Conn.Dst.Port()))
		case Refresh:
			all = append(all, fmt.Sprintf("refresh %d", a.Conn.Dst.Port()))
		case GiveVerdict:
			all = append(all, fmt.Sprintf("%d %v", a.ID, a.Decision))
		}
	}
	return strings.Join(all, ", ")
}

func want(t *testing.T, got, want string) {
	t.Helper()
	if got != want {
		t.Fatalf("got %q, want %q", got, want)
	}
}

// Findings that count.
var (
	speaks = Finding{Speaks: true, For: time.Minute}
	plain  = Finding{For: time.Minute}
)

func conn(srcPort, dstPort uint16) Conn { return syn(srcPort, dstPort, 0).Conn }

// TestTable_answer: SYNs that wait for the same answer pass or are dropped with the one that was asked. A refusal
// is that one's own, and so is a place on SMC-R: the others are asked then.
func TestTable_answer(t *testing.T) {
	for d := range numDecisions {
		t.Run(d.String(), func(t *testing.T) {
			tb := NewTable(Config{})
			tb.HandleSYN(at(0), 1, syn(40001, 80, 11), Pass)
			want(t, poll(tb, at(0)), "ask 40001 to 80")
			tb.HandleSYN(at(1), 2, syn(40002, 80, 12), Pass)
			want(t, poll(tb, at(1)), "")
			tb.HandleSYN(at(2), 3, syn(40003, 81, 13), Pass)
			want(t, poll(tb, at(2)), "ask 40003 to 81")
			if !tb.Answer(at(200), conn(40001, 80), d, Finding{}) {
				t.Error("the SYN was held, and Answer says that it was not")
			}
			held := 2
			if d == Pass || d == Drop {
				want(t, poll(tb, at(200)), fmt.Sprintf("1 %v, 2 %v", d, d))
			} else {
				want(t, poll(tb, at(200)), fmt.Sprintf("1 %v, ask 40002 to 80", d))
				held++
			}
			if tb.Answer(at(200), conn(40001, 80), d, Finding{}) {
				t.Error("the SYN was not held any more, and Answer says that it was")
			}
			tb.HandleSYN(at(300), 4, syn(40004, 82, 14), Pass)
			want(t, poll(tb, at(300)), "ask 40004 to 82")
			if tb.Held() != held {
				t.Errorf("%d are held, want %d", tb.Held(), held)
			}
		})
	}
}

// TestTable_answerOfOneInterface: an answer for a connection that may be plain TCP is none for one that must be on SMC-R, to the
// same destination from another interface, and the other way round; late, too.
func TestTable_answerOfOneInterface(t *testing.T) {
	tb := NewTable(Config{})
	tb.HandleSYN(at(0), 1, syn(40001, 80, 11), Pass)
	tb.HandleSYN(at(1), 2, syn(40002, 80, 12), Drop)
	tb.HandleSYN(at(2), 3, syn(40003, 80, 13), Pass)
	tb.HandleSYN(at(3), 4, syn(40004, 80, 14), Drop)
	want(t, poll(tb, at(3)), "ask 40001 to 80, ask 40002 to 80")
	tb.Answer(at(4), conn(40001, 80), Pass, plain)
	want(t, poll(tb, at(4)), "1 pass, 3 pass")
	tb.Answer(at(5), conn(40002, 80), Drop, Finding{})
	want(t, poll(tb, at(5)), "2 drop, 4 drop")
	tb.Forget()
	tb.HandleSYN(at(1000), 5, syn(40005, 80, 15), Drop)
	tb.HandleSYN(at(1100), 6, syn(40006, 80, 16), Pass)
	tb.HandleSYN(at(1200), 7, syn(40007, 80, 17), Drop)
	want(t, poll(tb, at(1200)), "ask 40005 to 80, ask 40006 to 80")
	want(t, poll(tb, at(1650)), "5 drop")
	tb.Answer(at(1651), conn(40005, 80), Reset, Finding{})
	want(t, poll(tb, at(1651)), "ask 40007 to 80")
	tb.Answer(at(1651), conn(40007, 80), Reset, Finding{})
	want(t, poll(tb, at(1651)), "7 reset")
	tb.Answer(at(1652), conn(40006, 80), Divert, speaks)
	want(t, poll(tb, at(1652)), "6 divert")
}

// TestTable_refusedAlone: an ICMP error to one connection says nothing about another one, from another address of the
// pod's or to another endpoint of a Service. Each gets its own answer, in the time that it has.
func TestTable_refusedAlone(t *testing.T) {
	tb := NewTable(Config{})
	b := syn(40002, 80, 12)
	b.Src = netip.MustParseAddrPort("10.1.0.1:40002")
	tb.HandleSYN(at(0), 1, syn(40001, 80, 11), Pass)
	tb.HandleSYN(at(100), 2, b, Pass)
	tb.HandleSYN(at(100), 3, syn(40003, 80, 13), Pass)
	want(t, poll(tb, at(100)), "ask 40001 to 80")
	tb.Answer(at(200), conn(40001, 80), HostUnreachable, Finding{})
	want(t, poll(tb, at(200)), "1 host unreachable, ask 40002 to 80, ask 40003 to 80")
	tb.Answer(at(300), b.Conn, Pass, Finding{})
	want(t, poll(tb, at(300)), "2 pass")
	want(t, poll(tb, at(699)), "")
	want(t, poll(tb, at(700)), "3 pass")
}

// TestTable_questionsOfWaiting: SYNs whose answer is to be their own, and for whose questions there is no room, do not wait.
func TestTable_questionsOfWaiting(t *testing.T) {
	for _, c := range []struct {
		name string
		d    Decision
		f    Finding
		want string
	}{
		{"refused", HostUnreachable, Finding{}, "1 host unreachable, ask 40002 to 80, 3 pass, 4 pass"},
		{"speaks", Divert, speaks, "1 divert, ask 40002 to 80, ask 40003 to 80, 4 pass"},
	} {
		t.Run(c.name, func(t *testing.T) {
			tb := NewTable(Config{MaxQuestions: 2, ExtraSpeaking: 1})
			for i := range uint16(4) {
				tb.HandleSYN(at(0), uint32(1+i), syn(40001+i, 80, 11), Pass)
			}
			tb.HandleSYN(at(0), 9, syn(40009, 81, 11), Pass)
			want(t, poll(tb, at(0)), "ask 40001 to 80, ask 40009 to 81")
			tb.Answer(at(1), conn(40001, 80), c.d, c.f)
			want(t, poll(tb, at(1)), c.want)
			if full, late := tb.Counters().Full, strings.Count(c.want, "pass"); full != uint64(late) {
				t.Errorf("%d found no room, want %d", full, late)
			}
		})
	}
}

// TestTable_speaks: each connection to a destination that speaks SMC-R is asked for itself, those
// that waited, too.
func TestTable_speaks(t *testing.T) {
	tb := NewTable(Config{})
	tb.HandleSYN(at(0), 1, syn(40001, 80, 11), Pass)
	tb.HandleSYN(at(1), 2, syn(40002, 80, 12), Pass)
	want(t, poll(tb, at(1)), "ask 40001 to 80")
	tb.Answer(at(2), conn(40001, 80), Divert, speaks)
	want(t, poll(tb, at(2)), "1 divert, ask 40002 to 80")
	tb.HandleSYN(at(3), 3, syn(40003, 80, 13), Pass)
	want(t, poll(tb, at(3)), "ask 40003 to 80")
	tb.Answer(at(4), conn(40003, 80), Pass, Finding{}) // refused: this one only
	want(t, poll(tb, at(4)), "3 pass")
	tb.Answer(at(5), conn(40002, 80), Divert, speaks)
	want(t, poll(tb, at(5)), "2 divert")
}

// TestTable_plain: nobody waits for a destination that is known as plain, and while somebody
// connects to it, it is asked again, once at a time.
func TestTable_plain(t *testing.T) {
	tb := NewTable(Config{})
	tb.HandleSYN(at(0), 1, syn(40001, 80, 11), Pass)
	tb.Answer(at(2), conn(40001, 80), Pass, plain)
	want(t, poll(tb, at(2)), "ask 40001 to 80, 1 pass")
	tb.HandleSYN(at(1000), 2, syn(40002, 80, 12), Pass)
	want(t, poll(tb, at(1000)), "refresh 80, 2 pass")
	tb.HandleSYN(at(1001), 3, syn(40003, 80, 13), Pass)
	want(t, poll(tb, at(1001)), "3 pass")
	tb.Answer(at(1002), conn(40002, 80), Pass, plain)
	tb.HandleSYN(at(60000), 4, syn(40004, 80, 14), Pass) // until 61,002
	want(t, poll(tb, at(60000)), "refresh 80, 4 pass")
	tb.Answer(at(60001), conn(40004, 80), Pass, speaks)
	tb.HandleSYN(at(60002), 5, syn(40005, 80, 15), Pass)
	want(t, poll(tb, at(60002)), "ask 40005 to 80")
	tb.Answer(at(60003), conn(40005, 80), Pass, plain)
	want(t, poll(tb, at(60003)), "5 pass")
	tb.HandleSYN(at(120100), 6, syn(40006, 80, 16), Pass) // nobody connected for a minute
	want(t, poll(tb, at(120100)), "ask 40006 to 80")
	tb.Answer(at(120101), conn(40006, 80), Pass, plain)
	tb.Forget()
	tb.HandleSYN(at(120102), 7, syn(40007, 80, 17), Pass)
	want(t, poll(tb, at(120102)), "6 pass, ask 40007 to 80")
	tb.Answer(at(120103), conn(40007, 80), Pass, plain)
	tb.HandleSYN(at(120104), 8, syn(40008, 80, 18), Drop) // must be on SMC-R
	want(t, poll(tb, at(120104)), "7 pass, ask 40008 to 80")
}

// TestTable_fewPeers: the oldest finding makes room.
func TestTable_fewPeers(t *testing.T) {
	tb := NewTable(Config{MaxPeers: 2})
	for i := range uint16(3) {
		tb.HandleSYN(at(0), uint32(i), syn(40000+i, 80+i, 1), Pass)
		tb.Answer(at(0), conn(40000+i, 80+i), Pass, plain)
	}
	poll(tb, at(0))
	for i, want := range []string{"ask 41000 to 80", "refresh 81, 11 pass", "refresh 82, 12 pass"} {
		tb.HandleSYN(at(1), uint32(10+i), syn(41000+uint16(i), 80+uint16(i), 1), Pass)
		if got := poll(tb, at(1)); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}

// TestTable_deadline: nothing waits for longer, and what becomes of it then is each SYN's own.
func TestTable_deadline(t *testing.T) {
	tb := NewTable(Config{Deadline: time.Second})
	if _, ok := tb.Deadline(); ok {
		t.Fatal("an empty table has a deadline")
	}
	tb.HandleSYN(at(0), 1, syn(40001, 80, 11), Pass)
	tb.HandleSYN(at(300), 2, syn(40002, 80, 12), Reset)
	poll(tb, at(300))
	if end, ok := tb.Deadline(); !ok || end != at(1000) {
		t.Fatalf("deadline %v, %v, want 1 s after the first", end, ok)
	}
	want(t, poll(tb, at(999)), "")
	want(t, poll(tb, at(1000)), "1 pass")
	want(t, poll(tb, at(1300)), "2 reset")
	if tb.Answer(at(1400), conn(40001, 80), Divert, speaks) { // too late
		t.Error("Answer says that the SYN was held")
	}
	want(t, poll(tb, at(1400)), "")
	if got := tb.Counters(); got.Late != 2 || got.Held != 2 {
		t.Errorf("counters %+v, want 2 late of 2", got)
	}
}

// TestTable_repeated: the same SYN gets the decision of the first one at once.
func TestTable_repeated(t *testing.T) {
	tb := NewTable(Config{Deadline: 8 * time.Second, Remember: 10 * time.Second})
	tb.HandleSYN(at(0), 1, syn(40001, 80, 11), Pass)
	tb.Answer(at(100), conn(40001, 80), Divert, Finding{})
	want(t, poll(tb, at(100)), "ask 40001 to 80, 1 divert")
	tb.HandleSYN(at(1000), 2, syn(40001, 80, 11), Pass)
	want(t, poll(tb, at(1000)), "2 divert")
	tb.HandleSYN(at(3000), 3, syn(40001, 80, 12), Pass) // another connection of the same port
	want(t, poll(tb, at(3000)), "ask 40001 to 80")
	tb.HandleSYN(at(10100), 4, syn(40001, 80, 11), Pass) // forgotten; and 3 was of a connection that is no more
	want(t, poll(tb, at(10100)), "3 drop")
}

// TestTable_repeatedWhileHeld: the kernel emptied the queue, the copy takes the place and
// the time of the first one.
func TestTable_repeatedWhileHeld(t *testing.T) {
	tb := NewTable(Config{Deadline: time.Second})
	tb.HandleSYN(at(0), 1, syn(40001, 80, 11), Pass)
	poll(tb, at(0))
	tb.HandleSYN(at(700), 2, syn(40001, 80, 11), Pass)
	want(t, poll(tb, at(700)), "1 drop")
	want(t, poll(tb, at(1000)), "2 pass")
}

func TestTable_samePortAgain(t *testing.T) {
	tb := NewTable(Config{Deadline: time.Second})
	tb.HandleSYN(at(0), 1, syn(40001, 80, 11), Pass)
	poll(tb, at(0))
	tb.HandleSYN(at(700), 2, syn(40001, 80, 99), Pass)
	want(t, poll(tb, at(700)), "1 drop")
	want(t, poll(tb, at(1000)), "") // its time is its own
	want(t, poll(tb, at(1700)), "2 pass")
}

// TestTable_dropped: a SYN that was dropped because there was no answer is asked for again when
// TCP repeats it.
func TestTable_dropped(t *testing.T) {
	tb := NewTable(Config{})
	tb.HandleSYN(at(0), 1, syn(40001, 80, 11), Drop)
	poll(tb, at(0))
	want(t, poll(tb, at(600)), "1 drop")
	tb.HandleSYN(at(1000), 2, syn(40001, 80, 11), Drop)
	want(t, poll(tb, at(1000)), "ask 40001 to 80")
}

// TestTable_refusedLate: a refusal that comes when the SYN was dropped is for when TCP repeats it.
func TestTable_refusedLate(t *testing.T) {
	tb := NewTable(Config{})
	tb.HandleSYN(at(0), 1, syn(40001, 80, 11), Drop)
	poll(tb, at(0))
	want(t, poll(tb, at(600)), "1 drop")
	tb.Answer(at(900), conn(40001, 80), HostUnreachable, Finding{})
	tb.HandleSYN(at(1000), 2, syn(40001, 80, 11), Drop)
	want(t, poll(tb, at(1000)), "2 host unreachable")
	tb.HandleSYN(at(1001), 3, syn(40001, 80, 12), Drop) // another connection
	want(t, poll(tb, at(1001)), "ask 40001 to 80")
}

// TestTable_speakersLast: destinations that speak SMC-R are forgotten when there is no other one.
func TestTable_speakersLast(t *testing.T) {
	tb := NewTable(Config{MaxPeers: 3})
	tell := func(dstPort uint16, f Finding) {
		tb.HandleSYN(at(0), 1, syn(40000, dstPort, uint32(dstPort)), Pass)
		tb.Answer(at(0), conn(40000, dstPort), Pass, f)
		poll(tb, at(0))
	}
	knows := func(want ...uint16) {
		t.Helper()
		for i := range uint16(7) {
			if p := tb.peer(at(1), conn(1, 80+i).Dst); (p != nil) != slices.Contains(want, 80+i) {
				t.Errorf("destination %d: %+v, want that %v are known", 80+i, p, want)
			}
		}
	}
	tell(80, speaks)
	for port := uint16(81); port < 87; port++ {
		tell(port, plain)
	}
	knows(80, 85, 86)
	tell(81, speaks)
	tell(82, speaks)
	knows(80, 81, 82)
	tell(83, plain)
	knows(81, 82, 83)
}

// TestAttack_heldSYNs: SYNs to nowhere take the room of their destination only, and SYNs
// to everywhere let what has no room pass at once.
func TestAttack_heldSYNs(t *testing.T) {
	tb := NewTable(Config{MaxHeld: 8, MaxPerDestination: 3})
	for i := range uint32(1000) {
		tb.HandleSYN(at(0), i, syn(uint16(1000+i), 80, i), Pass)
	}
	if got := poll(tb, at(0)); tb.Held() != 3 || strings.Count(got, "pass") != 997 {
		t.Fatalf("%d are held, want 3; %d passed", tb.Held(), strings.Count(got, "pass"))
	}
	tb.HandleSYN(at(1), 5000, syn(40001, 81, 7), Pass)
	want(t, poll(tb, at(1)), "ask 40001 to 81")
	for i := range uint32(1000) {
		tb.HandleSYN(at(2), 6000+i, syn(40002, uint16(1000+i), i), Reset)
	}
	if got := poll(tb, at(2)); tb.Held() != 8 || strings.Count(got, "reset") != 996 {
		t.Fatalf("%d are held, want 8; %d were reset", tb.Held(), strings.Count(got, "reset"))
	}
	if tb.Counters().Full != 997+996 {
		t.Errorf("counters %+v", tb.Counters())
	}
}

// TestAttack_heldSYNs_knownPeer: while SYNs to everywhere take all room, a destination that is known
// to speak SMC-R is asked for each connection. Where SMC-R is required, questions go on when their
// SYNs were dropped, and these do not take the room either.
func TestAttack_heldSYNs_knownPeer(t *testing.T) {
	const places, questions, extra = 8, 20, 3
	for _, late := range []Decision{Pass, Drop} {
		t.Run(late.String(), func(t *testing.T) {
			tb := NewTable(Config{MaxHeld: places, MaxQuestions: questions, ExtraSpeaking: extra})
			tb.HandleSYN(at(0), 1, syn(40000, 443, 1), late)
			tb.Answer(at(0), conn(40000, 443), Divert, speaks)
			want(t, poll(tb, at(0)), "ask 40000 to 443, 1 divert")
			others, asked := uint32(1000), 0
			flood := func(now time.Time) {
				for range 100 {
					others++
					tb.HandleSYN(now, others, syn(41000, uint16(others), others), late)
				}
				asked += strings.Count(poll(tb, now), "ask")
			}
			for round := range 4 {
				now := at(1 + 600*round)
				flood(now)
				for i := range uint16(extra) {
					tb.HandleSYN(now, uint32(i), syn(50000+i, 443, others), late)
					want(t, poll(tb, now), fmt.Sprintf("ask %d to 443", 50000+i))
					flood(now)
				}
				for i := range uint16(extra) {
					tb.Answer(now, conn(50000+i, 443), Divert, speaks)
					want(t, poll(tb, now), fmt.Sprintf("%d divert", i))
				}
			}
			if asked != questions {
				t.Errorf("%d of the others were asked, want %d: none got an answer", asked, questions)
			}
			for i := range uint16(extra) {
				tb.HandleSYN(at(2000), 90000, syn(50000+i, 443, 9), late)
			}
			poll(tb, at(2000))
			tb.HandleSYN(at(2000), 90001, syn(50009, 443, 9), late)
			want(t, poll(tb, at(2000)), fmt.Sprintf("90001 %v", late)) // that room has an end, too
		})
	}
}

// TestTable_everyPacketHasOneVerdict plays random SYNs, repetitions and answers, and holds the table to its promise.
func TestTable_everyPacketHasOneVerdict(t *testing.T) {
	seed := testenv.Seed(t)
	r := rand.New(rand.NewPCG(seed, 0))
	for range 200 {
		tb := NewTable(Config{MaxHeld: 1 + r.IntN(6), MaxPerDestination: 1 + r.IntN(4), MaxRemembered: 1 + r.IntN(8), Remember: 3 * time.Second})
		now, given, waiting := start, uint32(0), map[uint32]time.Time{}
		runUntilQuiet := func() {
			for a, ok := tb.Poll(now); ok; a, ok = tb.Poll(now) {
				if a.Kind != GiveVerdict {
					continue
				}
				since, ok := waiting[a.ID]
				if !ok {
					t.Fatalf("seed %d: packet %d has a second verdict", seed, a.ID)
				}
				if now.Sub(since) > DefaultDeadline {
					t.Fatalf("seed %d: packet %d waited %v", seed, a.ID, now.Sub(since))
				}
				delete(waiting, a.ID)
			}
			if len(waiting) != tb.Held() {
				t.Fatalf("seed %d: %d packets wait, the table holds %d", seed, len(waiting), tb.Held())
			}
		}
		for range 300 {
			s := syn(uint16(r.IntN(4)), uint16(r.IntN(3)), uint32(r.IntN(3)))
			switch r.IntN(6) {
			case 0:
				f := Finding{Speaks: r.IntN(2) == 0, For: time.Duration(r.IntN(3)) * time.Second}
				tb.Answer(now, s.Conn, Decision(r.IntN(int(numDecisions))), f)
			case 1:
				if r.IntN(20) == 0 {
					tb.Forget()
				}
			case 2:
				next := now.Add(time.Duration(r.IntN(400)) * time.Millisecond)
				if end, ok := tb.Deadline(); ok && end.Before(next) {
					next = end // as the owner does, who waits no longer
				}
				now = next
			default:
				given++
				waiting[given] = now
				tb.HandleSYN(now, given, s, Pass)
			}
			runUntilQuiet()
		}
		now = now.Add(DefaultDeadline)
		for id, since := range waiting { // all at their end
			waiting[id] = now.Add(-min(now.Sub(since), DefaultDeadline))
		}
		runUntilQuiet()
		if len(waiting) != 0 {
			t.Fatalf("seed %d: %d packets have no verdict", seed, len(waiting))
		}
	}
}

func TestTable_allocatesNothing(t *testing.T) {
	tb := NewTable(Config{MaxHeld: 16, MaxRemembered: 16})
	id, now := uint32(0), start
	n := testing.AllocsPerRun(1000, func() {
		id++
		now = now.Add(time.Millisecond)
		tb.HandleSYN(now, id, syn(uint16(id), uint16(id%7), id), Pass)
		if id%3 == 0 {
			tb.Answer(now, conn(uint16(id), uint16(id%7)), Divert, Finding{Speaks: id%2 == 0, For: time.Second})
		}
		for _, ok := tb.Poll(now); ok; _, ok = tb.Poll(now) {
			continue
		}
	})
	if n != 0 {
		t.Errorf("%v allocations per SYN", n)
	}
}
