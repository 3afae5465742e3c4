// SPDX-License-Identifier: Apache-2.0

package softvi_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/internal/streamfault"
	"github.com/smcr-io/kube-smcr/pkg/rdma/rdmatest"
	"github.com/smcr-io/kube-smcr/pkg/rdma/softvi"
)

// faulty has the connections to a device go through a proxy with faults, and returns its port. They come
// from another address than their callers'.
func faulty(t testing.TB, seed uint64, d *softvi.Device, f streamfault.Faults) uint16 {
	t.Helper()
	p := streamfault.Listen(t, seed, net.JoinHostPort(d.Addr().Addr().String(), "0"), d.Addr().String(), f)
	return netip.MustParseAddrPort(p.Addr()).Port()
}

// TestProvider_faultyStreams: the conformance suite however a stream is cut into pieces, and whenever they come.
func TestProvider_faultyStreams(t *testing.T) {
	for name, f := range map[string]streamfault.Faults{
		"Small": {Piece: 1500},
		"Large": {Piece: 20_000, Stall: 200 * time.Microsecond},
	} {
		t.Run(name, func(t *testing.T) {
			seed := uint64(11)
			rdmatest.TestProvider(t, func(t *testing.T) rdmatest.Net {
				a, b := devices(t)
				return rdmatest.Net{A: a, B: b, Connect: func(t testing.TB, x, y *rdmatest.End) {
					t.Helper()
					seed++
					x.Init(t)
					y.Init(t)
					to := at(device(y), "test")
					to.Port = faulty(t, seed, device(y), f)
					connectTo(t, x, y, to, softvi.Options{}, softvi.Options{})
				}}
			})
		})
	}
}

const (
	cutMessage  = 5000 // bytes of a message
	flipMessage = 24   // so few that most of the stream are headers
	faultDepth  = 16
	callBytes   = 200 // that a call has in each direction, at most
)

// TestFaults_cuts: wherever a TCP connection ends or breaks, in a call or later, everything completes, what
// completed with success is at the peer, and nothing is there that was not sent.
func TestFaults_cuts(t *testing.T) {
	rounds := 80
	if testing.Short() {
		rounds = 10
	}
	for seed := range uint64(rounds) {
		rng := rand.New(rand.NewPCG(seed, 7))
		f := streamfault.Faults{
			Piece: 2000, Damage: streamfault.Cut + streamfault.Damage(rng.IntN(2)), Back: rng.IntN(4) == 0, From: rng.IntN(1 << (5 + rng.IntN(13))),
		}
		t.Run(fmt.Sprintf("seed%d", seed), func(t *testing.T) {
			w := callThrough(t, seed, f)
			if w == nil {
				return
			}
			w.post(t, rng, cutMessage)
			done := map[uint64]bool{}
			for _, c := range rdmatest.Await(t, w.x.SendCQ, faultDepth) {
				done[c.ID] = c.Status == rdma.StatusSuccess
			}
			if err := w.x.QP.Close(); err != nil { // the end, if nothing was cut
				t.Error(err)
			}
			w.check(t, f, done)
		})
	}
}

// TestFaults_flips: a bit that is turned, of a header mostly, may make a message another one, since VI/TCP has
// nothing to tell by. All the same everything completes once and in order, and no byte is written that the peer
// has no right to.
func TestFaults_flips(t *testing.T) {
	rounds := 120
	if testing.Short() {
		rounds = 15
	}
	for seed := range uint64(rounds) {
		rng := rand.New(rand.NewPCG(seed, 8))
		f := streamfault.Faults{Piece: 500, Damage: streamfault.Flip, Back: rng.IntN(4) == 0, From: rng.IntN(200), Within: 600}
		t.Run(fmt.Sprintf("seed%d", seed), func(t *testing.T) {
			t.Parallel()
			w := callThrough(t, seed, f)
			if w == nil {
				return
			}
			secret, err := w.y.PD.AllocMR(4096, rdma.LocalWrite)
			if err != nil {
				t.Fatal(err)
			}
			fillMessage(secret.Bytes(), 99)
			w.post(t, rng, flipMessage)
			before := bytes.Clone(w.x.MR.Bytes())
			for _, q := range []struct {
				*rdmatest.End
				cq rdma.CQ
			}{{w.x, w.x.SendCQ}, {w.y, w.y.RecvCQ}} {
				for i, c := range drain(t, q.End, q.cq, faultDepth) {
					if c.ID != uint64(i) {
						t.Errorf("%+v: %s: completion %d is %+v (%v)", f, q.Dev.Name(), i, c, c.Status)
					}
				}
			}
			after := w.x.MR.Bytes()
			if sinks := w.part(3, 0); !bytes.Equal(before[:sinks], after[:sinks]) {
				t.Errorf("%+v: memory of the caller that nobody reads into was written", f)
			}
			want := make([]byte, 4096)
			if fillMessage(want, 99); !bytes.Equal(want, secret.Bytes()) {
				t.Errorf("%+v: a region without rights was written", f)
			}
		})
	}
}

// faultWork is what the caller x posts: message i has the slot i of each part of both ends' memory.
type faultWork struct {
	x, y *rdmatest.End
	size int
	ops  [faultDepth]rdma.Opcode
}

// part returns where a slot is. In part 0 is what is sent or read from, in 1 are the receives, 2 is written to, and 3
// read into.
func (w *faultWork) part(part, slot int) int { return (part*faultDepth + slot) * w.size }

// callThrough calls through a proxy with faults. It returns nil if there is no connection for that.
func callThrough(t *testing.T, seed uint64, f streamfault.Faults) *faultWork {
	t.Helper()
	a, b := devices(t)
	l := listen(t, b, "x")
	ctx, cancel := context.WithTimeout(within(t), 10*time.Second)
	defer cancel()
	accepted := make(chan *rdmatest.End, 64)
	go func() { // each call has a queue pair of its own
		defer close(accepted)
		for {
			r, err := l.Accept(ctx)
			if err != nil {
				return
			}
			y := end(t, b)
			for i := range uint64(faultDepth) {
				y.Recv(t, i, (faultDepth+int(i))*cutMessage, cutMessage)
			}
			if _, err := r.Accept(y.QP, softvi.Options{}); err == nil {
				accepted <- y
			}
		}
	}()
	x := end(t, a)
	to := at(b, "x")
	to.Port = faulty(t, seed, b, f)
	patient, stop := ctx, func() {}
	if f.From < callBytes { // it may be that no call gets through
		patient, stop = context.WithTimeout(ctx, 200*time.Millisecond)
	}
	_, err := a.Dial(patient, x.QP, to, softvi.Options{})
	stop()
	cancel()
	var y *rdmatest.End
	for e := range accepted { // the last one is x's, if x is connected
		y = e
	}
	if err != nil {
		states(t, rdma.QPInit, x)
		if f.From >= callBytes {
			t.Errorf("%+v: no connection: %v", f, err)
		}
		return nil
	}
	return &faultWork{x: x, y: y, size: cutMessage}
}

// post posts messages of all kinds, each of which says which one it is.
func (w *faultWork) post(t *testing.T, rng *rand.Rand, n int) {
	t.Helper()
	for i := range w.ops {
		w.ops[i] = []rdma.Opcode{rdma.OpSend, rdma.OpWrite, rdma.OpWriteImm, rdma.OpRead}[rng.IntN(4)]
		fillMessage(w.x.MR.Bytes()[w.part(0, i):][:n], uint64(i))
		fillMessage(w.y.MR.Bytes()[w.part(0, i):][:n], uint64(i))
		wr := rdma.SendWR{
			ID: uint64(i), Op: w.ops[i], Flags: rdma.SendSignaled, SGL: []rdma.SGE{w.x.SGE(w.part(0, i), n)},
			RemoteAddr: w.y.MR.Addr() + uint64(w.part(2, i)), RKey: w.y.MR.RKey(),
		}
		switch wr.Op {
		case rdma.OpRead:
			wr.SGL, wr.RemoteAddr = []rdma.SGE{w.x.SGE(w.part(3, i), n)}, w.y.MR.Addr()+uint64(w.part(0, i))
		case rdma.OpSend:
			wr.RemoteAddr, wr.RKey = 0, 0
		default:
		}
		w.x.Send(t, wr)
	}
}

func fillMessage(b []byte, number uint64) {
	for i := 0; i+8 <= len(b); i += 8 {
		binary.LittleEndian.PutUint64(b[i:], (number+1)<<32|uint64(i))
	}
}

// check waits for the end of y, and looks at what came.
func (w *faultWork) check(t *testing.T, f streamfault.Faults, done map[uint64]bool) {
	t.Helper()
	recvs := rdmatest.Await(t, w.y.RecvCQ, faultDepth)
	for i, r := range recvs {
		if r.ID != uint64(i) || r.Status != rdma.StatusSuccess && r.Status != rdma.StatusFlushed {
			t.Fatalf("%+v: receive %d: %+v (%v)", f, i, r, r.Status)
		}
	}
	taken := 0
	for i, op := range w.ops {
		whole := done[uint64(i)]
		place := w.y.MR.Bytes()[w.part(2, i):][:cutMessage]
		if op == rdma.OpRead {
			place = w.x.MR.Bytes()[w.part(3, i):][:cutMessage]
		}
		if op == rdma.OpSend || op == rdma.OpWriteImm {
			received := recvs[taken].Status == rdma.StatusSuccess
			if whole && !received {
				t.Errorf("%+v: message %d, %v, was acknowledged and not received", f, i, op)
			}
			whole = received
			if op == rdma.OpSend {
				place = w.y.MR.Bytes()[w.part(1, taken):][:cutMessage]
			}
			taken++
		}
		wantMessage(t, fmt.Sprintf("%+v: message %d, %v", f, i, op), place, uint64(i), whole)
	}
	awaitError(t, w.y)
}

// wantMessage looks at where a message goes: each byte is the message's, or, unless it is whole, none came.
func wantMessage(t *testing.T, what string, got []byte, number uint64, whole bool) {
	t.Helper()
	want := make([]byte, cutMessage)
	fillMessage(want, number)
	for i, c := range got {
		if c != want[i] && (whole || c != 0) {
			t.Errorf("%s, whole: %t: byte %d is %#x, want %#x", what, whole, i, c, want[i])
			return
		}
	}
}

// drain returns n completions. A queue pair that has none for a while, since it waits for bytes that nobody
// sends, is taken to ERR.
func drain(t *testing.T, e *rdmatest.End, q rdma.CQ, n int) (all []rdma.WC) {
	t.Helper()
	wcs := make([]rdma.WC, n)
	wait, ended := 300*time.Millisecond, false
	for quiet := time.Now(); len(all) < n; {
		k, err := q.Poll(wcs[:n-len(all)])
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, wcs[:k]...)
		switch {
		case k > 0:
			quiet = time.Now()
		case time.Since(quiet) < wait:
			time.Sleep(time.Millisecond) // polls for completions
		case ended:
			t.Fatalf("%d of %d completions of %s", len(all), n, e.Dev.Name())
		default:
			if err := e.QP.Modify(rdma.QPAttr{State: rdma.QPError}); err != nil {
				t.Fatal(err)
			}
			wait, ended, quiet = patience, true, time.Now()
		}
	}
	return all
}

// awaitError waits until a queue pair is in ERR.
func awaitError(t testing.TB, e *rdmatest.End) {
	t.Helper()
	for end := time.Now().Add(patience); e.QP.State() != rdma.QPError; time.Sleep(time.Millisecond) { // polls the state
		if time.Now().After(end) {
			t.Fatalf("queue pair of %s in %v, want ERR", e.Dev.Name(), e.QP.State())
		}
	}
}
