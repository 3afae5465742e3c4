// SPDX-License-Identifier: Apache-2.0

package softiwarp_test

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"net"
	"slices"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/internal/streamfault"
	"github.com/smcr-io/kube-smcr/pkg/rdma/iwarp"
	"github.com/smcr-io/kube-smcr/pkg/rdma/rdmatest"
	"github.com/smcr-io/kube-smcr/pkg/rdma/softiwarp"
)

var (
	faultSeed = flag.Uint64("softiwarp.seed", 0, "repeat the schedule of faults of this seed; 0: those that there are")
	faultRuns = flag.Int("softiwarp.runs", 40, "schedules of faults")
)

// faulty returns what leads a connection through a proxy with faults.
func faulty(t testing.TB, seed uint64, f streamfault.Faults) func(addr string) string {
	return func(addr string) string {
		return streamfault.Listen(t, seed, net.JoinHostPort(loopB.String(), "0"), addr, f).Addr()
	}
}

// TestProvider_pieces: the suite holds however a stream is cut into pieces, and whenever they come.
func TestProvider_pieces(t *testing.T) {
	for _, c := range []struct {
		name   string
		o      softiwarp.ConnectOptions
		faults streamfault.Faults
	}{
		{"CRC", softiwarp.ConnectOptions{}, streamfault.Faults{Piece: 1500, Stall: 200 * time.Microsecond}},
		{"NoCRC", softiwarp.ConnectOptions{NoCRC: true}, streamfault.Faults{Piece: 20_000, Stall: 200 * time.Microsecond}},
	} {
		t.Run(c.name, func(t *testing.T) {
			seed := uint64(7)
			rdmatest.TestProvider(t, func(t *testing.T) rdmatest.Net {
				return rdmatest.Net{A: open(t, "a", loopA), B: open(t, "b", loopB), Connect: func(tb testing.TB, x, y *rdmatest.End) {
					tb.Helper()
					seed++
					x.Init(tb)
					y.Init(tb)
					errDial, errAccept := tryConnect(tb, within(tb), x, y, c.o, c.o, faulty(tb, seed, c.faults))
					if errDial != nil || errAccept != nil {
						tb.Fatalf("dial: %v, accept: %v", errDial, errAccept)
					}
				}}
			})
		})
	}
}

// TestFault_flip: a bit that is turned in a payload makes a Terminate of both sides, and nothing of the
// FPDU is placed.
func TestFault_flip(t *testing.T) {
	a, b := open(t, "a", loopA), open(t, "b", loopB)
	x, y := rdmatest.NewEnd(t, a, rdmatest.Options{}), rdmatest.NewEnd(t, b, rdmatest.Options{})
	x.Init(t)
	y.Init(t)
	o := softiwarp.ConnectOptions{MaxULPDU: iwarp.MaxOwnULPDU}
	faults := streamfault.Faults{Piece: 5000, Damage: streamfault.Flip, From: 10_000}
	if errDial, errAccept := tryConnect(t, within(t), x, y, o, o, faulty(t, 1, faults)); errDial != nil || errAccept != nil {
		t.Fatalf("dial: %v, accept: %v", errDial, errAccept)
	}
	const n = 50_000
	y.Recv(t, 1, 0, n)
	fillWith(x.MR.Bytes()[:n], 3)
	x.Send(t, rdma.SendWR{ID: 2, Op: rdma.OpSend, Flags: rdma.SendSignaled, SGL: []rdma.SGE{x.SGE(0, n)}})
	for _, e := range []struct {
		*rdmatest.End
		sent bool
	}{{y, true}, {x, false}} {
		var te *iwarp.TerminateError
		if ev := rdmatest.AwaitEvent(t, e.Ctx, rdma.EventQPFatal); !errors.As(ev.Err, &te) || te.Sent != e.sent || te.Terminate.Code != iwarp.CodeCRC {
			t.Errorf("%s: event %v, want a Terminate for the CRC, sent %t", e.Dev.Name(), ev.Err, e.sent)
		}
	}
	rdmatest.AwaitOne(t, y.RecvCQ, 1, rdma.StatusFlushed)
	if i := slices.IndexFunc(y.MR.Bytes()[:n], func(c byte) bool { return c != 0 }); i >= 0 {
		t.Errorf("byte %d of the receive was written", i)
	}
}

// TestFault_damage: whatever is done to a connection, each work request completes once, those that
// succeed are right, and no byte anywhere is one that nobody meant.
func TestFault_damage(t *testing.T) {
	if *faultSeed != 0 {
		t.Run(fmt.Sprintf("seed=%d", *faultSeed), func(t *testing.T) { runDamaged(t, *faultSeed) })
		return
	}
	for seed := range uint64(*faultRuns) {
		t.Run(fmt.Sprintf("seed=%d", seed+1), func(t *testing.T) {
			t.Parallel()
			runDamaged(t, seed+1)
		})
	}
}

const (
	damagedOps  = 24
	damagedSlot = 64 << 10
	// damagedPatience is how long a connection may stand still: one whose FPDU never ends does
	// that for ever, and TCP has nothing to say.
	damagedPatience = time.Second
)

// damaged is one schedule. Operation i sends, writes or reads between the slots i of both ends.
type damaged struct {
	rng  *rand.Rand
	x, y *rdmatest.End
	ops  [damagedOps]rdma.Opcode
	size [damagedOps]int
}

func runDamaged(t *testing.T, seed uint64) {
	d := &damaged{rng: rand.New(rand.NewPCG(seed, 1))}
	faults := streamfault.Faults{
		Piece: 1 + d.rng.IntN(10_000), Stall: 100 * time.Microsecond,
		Damage: streamfault.Flip + streamfault.Damage(d.rng.IntN(3)),
		Back:   d.rng.IntN(2) == 0, From: 1000, Within: 400_000,
	}
	if d.rng.IntN(4) == 0 {
		faults.From, faults.Within = 0, 80 // start-up
	}
	o := softiwarp.ConnectOptions{NoCRC: faults.Damage != streamfault.Flip && d.rng.IntN(2) == 0, MaxULPDU: 1000 + d.rng.IntN(60_000)}
	opt := rdmatest.Options{MRBytes: damagedOps * damagedSlot}
	d.x = rdmatest.NewEnd(t, open(t, "a", loopA), opt)
	d.y = rdmatest.NewEnd(t, open(t, "b", loopB), opt)
	d.x.Init(t)
	d.y.Init(t)
	ctx, cancel := context.WithTimeout(context.Background(), damagedPatience)
	defer cancel()
	sends := d.prepare(t)
	errDial, errAccept := tryConnect(t, ctx, d.x, d.y, o, o, faulty(t, seed, faults))
	if errDial != nil || errAccept != nil {
		if faults.From > 0 {
			t.Fatalf("dial: %v, accept: %v", errDial, errAccept)
		}
		return
	}
	for i, op := range d.ops {
		wr := rdma.SendWR{ID: uint64(i), Op: op, Flags: rdma.SendSignaled, SGL: []rdma.SGE{d.x.SGE(i*damagedSlot, d.size[i])}}
		if op != rdma.OpSend {
			wr.RemoteAddr, wr.RKey = d.y.MR.Addr()+uint64(i*damagedSlot), d.y.MR.RKey()
		}
		if _, err := d.x.QP.PostSend([]rdma.SendWR{wr}); err != nil {
			t.Fatal(err)
		}
	}
	done := complete(t, d.x.SendCQ, damagedOps, func() { _ = d.x.QP.Modify(rdma.QPAttr{State: rdma.QPError}) })
	took := complete(t, d.y.RecvCQ, len(sends), func() { _ = d.y.QP.Modify(rdma.QPAttr{State: rdma.QPError}) })
	d.check(t, sends, done, took)
}

// prepare draws the operations, fills the slots that bytes come from, and posts the receives. It returns
// the operations that are SENDs.
func (d *damaged) prepare(t *testing.T) (sends []int) {
	t.Helper()
	for i := range d.ops {
		d.ops[i] = []rdma.Opcode{rdma.OpSend, rdma.OpWrite, rdma.OpRead}[d.rng.IntN(3)]
		d.size[i] = 1 + d.rng.IntN(damagedSlot)
		from := d.x
		switch d.ops[i] {
		case rdma.OpRead:
			from = d.y
		case rdma.OpSend:
			sends = append(sends, i)
			d.y.Recv(t, uint64(i), i*damagedSlot, damagedSlot)
		default:
		}
		fillWith(from.MR.Bytes()[i*damagedSlot:][:d.size[i]], i)
	}
	return sends
}

// complete returns n completions. It calls end if there is none for a while, after which all must
// come.
func complete(t *testing.T, q rdma.CQ, n int, end func()) []rdma.WC {
	t.Helper()
	var all []rdma.WC
	wcs := make([]rdma.WC, damagedOps)
	for quiet := time.Now(); len(all) < n && time.Since(quiet) < damagedPatience; {
		k, err := q.Poll(wcs)
		if err != nil {
			t.Fatal(err)
		}
		if k > 0 {
			all, quiet = append(all, wcs[:k]...), time.Now()
			continue
		}
		if err := q.Arm(false); err != nil {
			t.Fatal(err)
		}
		select {
		case <-q.Notify():
		case <-time.After(20 * time.Millisecond):
		}
	}
	if len(all) < n {
		end()
		all = append(all, rdmatest.Await(t, q, n-len(all))...)
	}
	return all
}

func (d *damaged) check(t *testing.T, sends []int, done, took []rdma.WC) {
	t.Helper()
	// In the order of posting, and no success behind a failure.
	for i, wc := range done {
		if wc.ID != uint64(i) || i > 0 && wc.Status == rdma.StatusSuccess && done[i-1].Status != rdma.StatusSuccess {
			t.Fatalf("completion %d is %+v (%v)", i, wc, wc.Status)
		}
		if d.ops[i] == rdma.OpRead && wc.Status == rdma.StatusSuccess && !d.arrived(d.x, i, false) {
			t.Errorf("READ %d succeeded with wrong bytes", i)
		}
	}
	for k, wc := range took {
		i := sends[k]
		if wc.ID != uint64(i) || k > 0 && wc.Status == rdma.StatusSuccess && took[k-1].Status != rdma.StatusSuccess {
			t.Fatalf("receive %d is %+v (%v)", k, wc, wc.Status)
		}
		if wc.Status == rdma.StatusSuccess && (int(wc.Bytes) != d.size[i] || !d.arrived(d.y, i, false)) {
			t.Errorf("receive %d succeeded with %d bytes of %d, or wrong ones", k, wc.Bytes, d.size[i])
		}
	}
	for i, op := range d.ops {
		to := d.y
		if op == rdma.OpRead {
			to = d.x
		}
		if !d.arrived(to, i, true) {
			t.Errorf("%v %d: the slot has bytes that nobody sent", op, i)
		}
	}
}

// arrived reports whether a slot has the bytes of its operation, or, in part, those or none.
func (d *damaged) arrived(e *rdmatest.End, i int, inPart bool) bool {
	want := make([]byte, damagedSlot)
	fillWith(want[:d.size[i]], i)
	got := e.MR.Bytes()[i*damagedSlot:][:damagedSlot]
	if !inPart {
		return bytes.Equal(got, want)
	}
	for k := range got {
		if got[k] != want[k] && got[k] != 0 {
			return false
		}
	}
	return true
}

// fillWith fills b with bytes that are not 0.
func fillWith(b []byte, seed int) {
	for i := range b {
		b[i] = byte(1 + (i*31+i>>8+seed*7)%255)
	}
}
