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
	cutMessage = 5000 // bytes of a message
	cutDepth   = 16
	callBytes  = 200 // that a call has in each direction, at most
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
		t.Run(fmt.Sprintf("seed%d", seed), func(t *testing.T) { cutRound(t, seed, f) })
	}
}

func cutRound(t *testing.T, seed uint64, f streamfault.Faults) {
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
			for i := range uint64(cutDepth) {
				y.Recv(t, i, int(i)*cutMessage, cutMessage)
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
		return
	}
	sent := cutSend(t, x)
	done := map[uint64]bool{}
	for range sent {
		w := rdmatest.Await(t, x.SendCQ, 1)[0]
		done[w.ID] = w.Status == rdma.StatusSuccess
	}
	if err := x.QP.Close(); err != nil { // the end, if nothing was cut
		t.Error(err)
	}
	cutCheck(t, f, y, done)
}

// cutSend posts messages, each of which says which one it is.
func cutSend(t *testing.T, x *rdmatest.End) (posted int) {
	t.Helper()
	for i := range uint64(cutDepth) {
		at := int(i) * cutMessage
		fillMessage(x.MR.Bytes()[at:at+cutMessage], i)
		n, err := x.QP.PostSend([]rdma.SendWR{{ID: i, Op: rdma.OpSend, Flags: rdma.SendSignaled, SGL: []rdma.SGE{x.SGE(at, cutMessage)}}})
		if err != nil {
			t.Fatal(err)
		}
		posted += n
	}
	return posted
}

func fillMessage(b []byte, number uint64) {
	for i := 0; i+8 <= len(b); i += 8 {
		binary.LittleEndian.PutUint64(b[i:], number<<32|uint64(i))
	}
}

// cutCheck waits for the end of y, and looks at what came.
func cutCheck(t *testing.T, f streamfault.Faults, y *rdmatest.End, done map[uint64]bool) {
	t.Helper()
	want := make([]byte, cutMessage)
	for i, w := range rdmatest.Await(t, y.RecvCQ, cutDepth) {
		id := uint64(i)
		if w.ID != id || w.Status != rdma.StatusSuccess && w.Status != rdma.StatusFlushed {
			t.Fatalf("%+v: receive %d: %+v (%v)", f, i, w, w.Status)
		}
		if done[id] && w.Status != rdma.StatusSuccess {
			t.Errorf("%+v: message %d was acknowledged and not received", f, i)
		}
		fillMessage(want, id)
		if got := y.MR.Bytes()[i*cutMessage : (i+1)*cutMessage]; w.Status == rdma.StatusSuccess && !bytes.Equal(got, want) {
			t.Errorf("%+v: message %d has other bytes", f, i)
		}
	}
	awaitError(t, y)
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
