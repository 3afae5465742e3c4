// SPDX-License-Identifier: Apache-2.0

package twonodes

import (
	"encoding/json"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestLongestGap(t *testing.T) {
	arrivals := []time.Duration{10, 20, 30, 100, 110, 300}
	for _, tc := range []struct {
		name     string
		from, to time.Duration
		want     time.Duration
	}{
		{"in the middle", 25, 120, 70},
		{"begins before", 35, 105, 70},
		{"at an arrival", 30, 35, 10},
		{"still going on", 105, 250, 140},
		{"nothing arrives any more", 301, 1000, 700},
		{"before the first", 0, 15, 10},
		{"up to the last", 25, 300, 190},
	} {
		if got := longestGap(arrivals, tc.from, tc.to); got != tc.want {
			t.Errorf("%s: %d, want %d", tc.name, got, tc.want)
		}
	}
	if got := longestGap(nil, 5, 25); got != 20 {
		t.Errorf("no arrivals: %d", got)
	}
}

func TestFaultRow(t *testing.T) {
	stalls := []Millis{Millis(30 * time.Millisecond), Millis(5 * time.Millisecond), Millis(15 * time.Millisecond)}
	goal := target{20 * time.Millisecond, 50 * time.Millisecond}
	for _, tc := range []struct {
		name string
		row  FaultRow
		want bool
	}{
		{"good", FaultRow{Runs: 3, Stalls: stalls, target: goal}, true},
		{"one died", FaultRow{Runs: 3, Died: 1, Stalls: stalls, target: goal}, false},
		{"not redundant again", FaultRow{Runs: 3, Alone: 1, Stalls: stalls, target: goal}, false},
		{"median too long", FaultRow{Runs: 3, Stalls: stalls, target: target{10 * time.Millisecond, time.Second}}, false},
		{"worst too long", FaultRow{Runs: 3, Stalls: stalls, target: target{20 * time.Millisecond, 29 * time.Millisecond}}, false},
		{"without a target", FaultRow{Runs: 3, Stalls: stalls}, true},
		{"did not run", FaultRow{target: goal}, false},
	} {
		if got := tc.row.reached(); got != tc.want {
			t.Errorf("%s: %t: %s", tc.name, got, tc.row.stallText())
		}
	}
	good := &FaultRow{
		Fault: "port down", Runs: 3, Stalls: stalls, target: goal,
		Mended: []Millis{Millis(2 * time.Millisecond)}, Redundant: []Millis{Millis(40 * time.Millisecond)},
	}
	bad := &FaultRow{Fault: "silence", Runs: 3, Died: 2, Stalls: stalls, Alone: 2, target: goal}
	got := faultTable([]*FaultRow{good, bad, {Fault: "nothing", Runs: 1, Stalls: stalls[1:2]}, {Fault: "not run"}})
	want := strings.TrimPrefix(`
FAULT      RUNS  DIED  STALL MEDIAN  WORST   TARGET        REACHED  WHEN MENDED  TWO LINKS AFTER
port down  3     0     15 ms         30 ms   20 ms, 50 ms  yes      2.0 ms       40 ms
silence    3     2     15 ms         30 ms   20 ms, 50 ms  no       -            never
nothing    1     0     5.0 ms        5.0 ms  -             -        -            -
not run    0     -     -             -       -             no       -            -
`, "\n")
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	j, err := json.Marshal(good)
	if err != nil || !strings.Contains(string(j), `"stallMilliseconds":[30,5,15]`) {
		t.Errorf("%s, %v", j, err)
	}
}

func TestTarget_times(t *testing.T) {
	for slack, want := range map[int]target{0: targetSeen, 1: targetSeen, 8: {160 * time.Millisecond, 400 * time.Millisecond}} {
		if got := targetSeen.times(slack); got != want {
			t.Errorf("%d times: %v, want %v", slack, got, want)
		}
	}
	if got := (target{}).times(8); got != (target{}) {
		t.Errorf("no target became %v", got)
	}
}

// pipe is a connected pair of TCP sockets.
func pipe(t *testing.T) (a, b *net.TCPConn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	c, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	s, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = c.Close(), s.Close() })
	return c.(*net.TCPConn), s.(*net.TCPConn)
}

func TestProbe_records(t *testing.T) {
	c, s := pipe(t)
	go func() { _, _ = io.Copy(s, s) }()
	p := startProbe(c, time.Now())
	defer p.close()
	for range 2 {
		from := p.now()
		to, err := p.await(t.Context(), from+20*time.Millisecond, from+10*time.Second)
		if err != nil || to < from+20*time.Millisecond {
			t.Fatalf("await from %v: %v, %v", from, to, err)
		}
		if gap := p.gap(from, to); gap <= 0 || gap > to {
			t.Errorf("gap %v", gap)
		}
	}
	_ = s.Close()
	from := p.now()
	if _, err := p.await(t.Context(), from+time.Hour, from+2*time.Hour); err == nil {
		t.Error("a dead connection is not noticed")
	}
}

func TestProbe_noticesWrongData(t *testing.T) {
	for name, spoil := range map[string]func([]byte) []byte{
		"lost":    func(b []byte) []byte { return b[probeBytes:] },
		"doubled": func(b []byte) []byte { return append(append([]byte{}, b[:probeBytes]...), b...) },
		"changed": func(b []byte) []byte { b[9]++; return b },
	} {
		t.Run(name, func(t *testing.T) {
			c, s := pipe(t)
			go func() {
				b := make([]byte, 4*probeBytes)
				if _, err := io.ReadFull(s, b); err == nil {
					_, _ = s.Write(spoil(b))
				}
			}()
			p := startProbe(c, time.Now())
			defer p.close()
			if _, err := p.await(t.Context(), time.Hour, 2*time.Hour); err == nil || !strings.Contains(err.Error(), "want reply") {
				t.Errorf("%v", err)
			}
		})
	}
}

func TestProbe_givesUp(t *testing.T) {
	c, _ := pipe(t) // nobody answers
	p := startProbe(c, time.Now())
	defer p.close()
	from := p.now()
	to, err := p.await(t.Context(), from, from+30*time.Millisecond)
	if err != nil || to < from+30*time.Millisecond {
		t.Errorf("%v, %v", to, err)
	}
}
