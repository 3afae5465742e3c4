// SPDX-License-Identifier: Apache-2.0

package ssp

import (
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/smcr-io/kube-smcr/internal/testenv"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/iwarp"
)

func request(pd string) []byte {
	f := iwarp.Frame{CRC: true, Rev: iwarp.Rev2, IsEnhanced: true, PrivateData: []byte(pd)}
	return f.Append(nil)
}

// in brings a point into a state.
func in(t testing.TB, s State) *Point {
	t.Helper()
	p := New(nil)
	switch s {
	case Waiting:
	case Down:
		p.HandleHead(nil, io.EOF)
	case Freed:
		_, _ = p.Free()
	default:
		p.HandleHead(request(""), nil)
		if s == Accepted {
			_, _ = p.Accept()
		}
		if s == Rejected {
			_, _ = p.Reject(nil)
		}
	}
	if p.State() != s {
		t.Fatalf("state %v, want %v", p.State(), s)
	}
	return &p
}

// TestPoint_table: what each event does in each state, and whose the connection is then.
func TestPoint_table(t *testing.T) {
	whole := func(p *Point) error { p.HandleHead(request(""), nil); return nil }
	part := func(p *Point) error { p.HandleHead(request("")[:7], nil); return nil }
	end := func(p *Point) error { p.HandleHead(request("")[:7], io.EOF); return nil }
	other := func(p *Point) error { p.HandleHead([]byte("QUIT\r\n"), nil); return nil }
	accept := func(p *Point) error { _, err := p.Accept(); return err }
	takeBack := func(p *Point) error { p.TakeBack(); return nil }
	reject := func(p *Point) error { _, err := p.Reject(nil); return err }
	free := func(p *Point) error { _, err := p.Free(); return err }
	shut := func(p *Point) error { p.Shut(); return nil }
	names := []string{"whole", "part", "end", "other", "accept", "take back", "reject", "free", "shut"}
	events := []func(*Point) error{whole, part, end, other, accept, takeBack, reject, free, shut}

	type row struct {
		to  State
		err error
	}
	same := func(s State) row { return row{to: s} }
	no := func(s State, err error) row { return row{s, err} }
	for from, rows := range map[State][]row{
		Waiting: {
			same(Asked), same(Waiting), same(Down), same(Down), no(Waiting, rdma.ErrState), same(Waiting), no(Waiting, rdma.ErrState), same(Freed), same(Freed),
		},
		Asked: {
			same(Asked), same(Asked), same(Asked), same(Asked), same(Accepted), same(Asked), same(Rejected), same(Asked), same(Freed),
		},
		Accepted: {
			same(Accepted), same(Accepted), same(Accepted), same(Accepted), no(Accepted, rdma.ErrState), same(Asked), no(Accepted, rdma.ErrState),
			same(Accepted), same(Accepted),
		},
		Rejected: {
			same(Rejected), same(Rejected), same(Rejected), same(Rejected), no(Rejected, rdma.ErrState), same(Rejected), no(Rejected, rdma.ErrState),
			same(Rejected), same(Rejected),
		},
		Down: {
			same(Down), same(Down), same(Down), same(Down), no(Down, ErrDown), same(Down), no(Down, ErrDown), same(Freed), same(Freed),
		},
		Freed: {
			same(Freed), same(Freed), same(Freed), same(Freed), no(Freed, rdma.ErrClosed), same(Freed), no(Freed, rdma.ErrClosed), no(Freed, rdma.ErrClosed), same(Freed),
		},
	} {
		for i, want := range rows {
			p := in(t, from)
			if err := events[i](p); !errors.Is(err, want.err) || err != nil && want.err == nil || p.State() != want.to {
				t.Errorf("%v, %s: %v and %v, want %v and %v", from, names[i], p.State(), err, want.to, want.err)
			}
			owner := map[State]Owner{Waiting: ServicePoint, Down: ServicePoint, Asked: Request, Accepted: QueuePair, Rejected: Program, Freed: Program}
			if p.Owner() != owner[want.to] {
				t.Errorf("%v, %s: the connection is the %v's, want the %v's", from, names[i], p.Owner(), owner[want.to])
			}
		}
	}
}

// TestPoint_HandleHead: exactly the Request is taken, wherever TCP has cut it, and nothing of what is none.
func TestPoint_HandleHead(t *testing.T) {
	req := request("private")
	old := iwarp.Frame{Rev: iwarp.Rev1, PrivateData: []byte("old")}
	next := iwarp.Frame{Rev: 3, CRC: true}
	reply := iwarp.Frame{Reply: true, Rev: iwarp.Rev2}
	long := append(request("")[:18], 2, 1)
	for _, c := range []struct {
		name   string
		stream []byte
		state  State
		take   int
		err    error
		from   int // bytes that are needed to tell
	}{
		{"request", req, Asked, len(req), nil, len(req)},
		{"revision 1", old.Append(nil), Asked, 23, nil, 23},
		{"and more behind it", append(request("private"), "more"...), Asked, len(req), nil, len(req)},
		{"another protocol", []byte("GET / HTTP/1.1\r\n"), Down, 0, iwarp.ErrKey, 1},
		{"a reply", reply.Append(nil), Down, 0, iwarp.ErrKey, 10},
		{"long private data", long, Down, 0, iwarp.ErrPrivateData, 20},
		{"no room for IRD and ORD", append(request("")[:18], 0, 1, 0), Down, 0, iwarp.ErrPrivateData, 21},
		{"revision 3", next.Append(nil), Down, 20, iwarp.ErrRevision, 20},
	} {
		for early := range min(c.from, len(c.stream)) + 1 {
			p := New(c.stream[:early])
			head := c.stream[early:]
			take, answer := 0, []byte(nil)
			n := 0
			for ; n <= len(head) && p.State() == Waiting; n++ {
				take, answer = p.HandleHead(head[:n], nil)
			}
			wantTake := max(c.take-early, 0)
			if p.State() != c.state || !errors.Is(p.Err(), c.err) || take != wantTake || c.err != nil && !errors.Is(p.Err(), ErrDown) {
				t.Fatalf("%s, %d bytes before: %v, %v, %d bytes taken, want %v, %v, %d", c.name, early, p.State(), p.Err(), take, c.state, c.err, wantTake)
			}
			if got := max(early+n-1, 0); got != max(c.from, early) {
				t.Errorf("%s, %d bytes before: told after %d bytes, want %d", c.name, early, got, max(c.from, early))
			}
			if (answer != nil) != errors.Is(c.err, iwarp.ErrRevision) {
				t.Errorf("%s: answer %q", c.name, answer)
			}
			if raw, err := p.Accept(); err == nil && string(raw) != string(c.stream[:c.take]) {
				t.Errorf("%s: Request %q", c.name, raw)
			}
		}
	}
	if p := New(append(request(""), 1)); true {
		if take, _ := p.HandleHead(nil, nil); take != 0 || p.State() != Down || !errors.Is(p.Err(), rdma.ErrInvalid) {
			t.Errorf("a byte behind the Request: %v, %v", p.State(), p.Err())
		}
	}
}

// TestPoint_end: a stream that ends says how far it came; a whole Request counts all the same.
func TestPoint_end(t *testing.T) {
	p := New([]byte("MPA"))
	p.HandleHead([]byte(" ID"), io.EOF)
	if err := p.Err(); !errors.Is(err, io.EOF) || !strings.Contains(err.Error(), "6 bytes") {
		t.Error(err)
	}
	p = New(nil)
	if p.HandleHead(request(""), io.EOF); p.State() != Asked {
		t.Errorf("%v, %v", p.State(), p.Err())
	}
}

// TestPoint_replies: a refusal fits the Request, and has the program's private data.
func TestPoint_replies(t *testing.T) {
	for _, c := range []struct {
		frame iwarp.Frame
		room  int
	}{
		{iwarp.Frame{Rev: iwarp.Rev2, IsEnhanced: true, CRC: true}, iwarp.MaxPrivateData - 4},
		{iwarp.Frame{Rev: iwarp.Rev2}, iwarp.MaxPrivateData},
		{iwarp.Frame{Rev: iwarp.Rev1, CRC: true}, iwarp.MaxPrivateData},
	} {
		p := New(c.frame.Append(nil))
		p.HandleHead(nil, nil)
		if _, err := p.Reject(make([]byte, c.room+1)); !errors.Is(err, rdma.ErrInvalid) || p.State() != Asked {
			t.Errorf("%+v: %v, %v", c.frame, err, p.State())
		}
		if err := p.CheckReply(make([]byte, c.room)); err != nil {
			t.Error(err)
		}
		b, err := p.Reject(make([]byte, c.room))
		if err != nil {
			t.Fatal(err)
		}
		f, err := iwarp.ParseFrame(b)
		if err != nil || !f.Reply || !f.Reject || f.Rev != c.frame.Rev || f.CRC != c.frame.CRC || f.IsEnhanced != c.frame.IsEnhanced || len(f.PrivateData) != c.room {
			t.Errorf("%+v: %+v, %v", c.frame, f, err)
		}
	}
}

// TestPoint_frees: the connection goes back to the program once, from where the point has it.
func TestPoint_frees(t *testing.T) {
	for s, want := range map[State]bool{Waiting: true, Down: true, Asked: false, Accepted: false, Rejected: false} {
		p := in(t, s)
		if back, err := p.Free(); back != want || err != nil {
			t.Errorf("%v: free: %v, %v", s, back, err)
		}
		if back, err := p.Free(); back || !errors.Is(err, rdma.ErrClosed) {
			t.Errorf("%v: free again: %v, %v", s, back, err)
		}
		if p.Shut() != (s == Asked) {
			t.Errorf("%v: shut after free", s)
		}
	}
	for s, want := range map[State]bool{Waiting: true, Down: true, Asked: true, Accepted: false, Rejected: false, Freed: false} {
		p := in(t, s)
		if got := p.Shut(); got != want || p.Shut() {
			t.Errorf("%v: shut: %v", s, got)
		}
		if _, err := p.Free(); !errors.Is(err, rdma.ErrClosed) {
			t.Errorf("%v: free after shut: %v", s, err)
		}
		if _, err := p.Accept(); err == nil {
			t.Errorf("%v: accept after shut", s)
		}
	}
}

// TestPoint_atMostOneRequest: in whatever order events come, there is one owner, at most one request, and
// the program gets the connection at most once.
func TestPoint_atMostOneRequest(t *testing.T) {
	seed := testenv.Seed(t)
	rnd := rand.New(rand.NewPCG(seed, 0))
	for range 20_000 {
		p := New(nil)
		stream, asked, given := request("x"), 0, 0
		var trace []string
		for range 12 {
			before := p.State()
			switch e := rnd.IntN(7); e {
			case 0, 1:
				take, _ := p.HandleHead(stream[:rnd.IntN(len(stream)+1)], nil)
				if take > 0 {
					asked++
				}
			case 2:
				p.HandleHead(nil, io.EOF)
			case 3:
				if back, _ := p.Free(); back {
					given++
				}
			case 4:
				if _, err := p.Accept(); err == nil {
					given++
				}
			case 5:
				if _, err := p.Reject(nil); err == nil {
					given++
				}
			default:
				if rnd.IntN(4) == 0 && p.Shut() {
					given++
				}
			}
			trace = append(trace, fmt.Sprintf("%v to %v", before, p.State()))
			if asked > 1 || given > 1 || (given == 1) != (p.Owner() == Program || p.Owner() == QueuePair) {
				t.Fatalf("seed %d: %d requests, given away %d times, the %v's: %v", seed, asked, given, p.Owner(), trace)
			}
		}
	}
}

func FuzzPoint(f *testing.F) {
	f.Add(request("seed"), 3)
	f.Add([]byte("GET / HTTP/1.1\r\n"), 0)
	f.Add(append(request(""), "behind"...), 30)
	f.Fuzz(func(t *testing.T, stream []byte, early int) {
		early = max(min(early, len(stream), MaxRequest), 0)
		p := New(stream[:early])
		head := stream[early:]
		for n := range len(head) + 1 {
			take, _ := p.HandleHead(head[:n], nil)
			if take < 0 || take > n {
				t.Fatalf("%d of %d bytes taken", take, n)
			}
			if p.State() != Waiting {
				break
			}
		}
		if p.State() == Waiting && len(stream) >= MaxRequest {
			t.Fatalf("waits after %d bytes", len(stream))
		}
	})
}

func TestStrings(t *testing.T) {
	for got, want := range map[string]string{
		Waiting.String(): "WAITING", Freed.String(): "FREED", State(9).String(): "State(9)",
		Program.String(): "program", QueuePair.String(): "queue pair", Owner(9).String(): "Owner(9)",
	} {
		if got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}
