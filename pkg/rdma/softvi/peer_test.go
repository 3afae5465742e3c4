// SPDX-License-Identifier: Apache-2.0

package softvi_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/softvi"
	"github.com/smcr-io/kube-smcr/pkg/rdma/vitcp"
)

// TestSection4_PeersMeet: two programs that call each other have one connection, whoever was first and
// by however much.
func TestSection4_PeersMeet(t *testing.T) {
	rounds := 150
	if testing.Short() {
		rounds = 20
	}
	const seed = 41
	rng := rand.New(rand.NewPCG(seed, 0))
	a, b := devices(t)
	for round := range rounds {
		x, y := end(t, a), end(t, b)
		pause := time.Duration(rng.IntN(2000)) * time.Microsecond
		first, second := x, y
		names := [2]string{"x", "y"}
		if rng.IntN(2) == 0 {
			first, second = y, x
			names = [2]string{"y", "x"}
		}
		var terms [2]softvi.Terms
		var errs [2]error
		var wg sync.WaitGroup
		ctx := within(t)
		wg.Go(func() {
			terms[0], errs[0] = device(first).DialPeer(ctx, first.QP, at(device(second), names[1]), softvi.Options{Discriminator: names[0], Security: []byte(names[0])})
		})
		wg.Go(func() {
			<-time.After(pause) // the case: who calls later, by how much
			terms[1], errs[1] = device(second).DialPeer(ctx, second.QP, at(device(first), names[0]), softvi.Options{Discriminator: names[1], Security: []byte(names[1])})
		})
		wg.Wait()
		if err := errors.Join(errs[:]...); err != nil {
			t.Fatalf("round %d, seed %d, %v later: %v", round, seed, pause, err)
		}
		if string(terms[0].Security) != names[1] || string(terms[1].Security) != names[0] || !terms[0].Peer || !terms[1].Peer {
			t.Fatalf("round %d, seed %d: %+v and %+v", round, seed, terms[0], terms[1])
		}
		talk(t, x, y)
		if err := errors.Join(x.Ctx.Close(), y.Ctx.Close()); err != nil {
			t.Fatal(err)
		}
	}
	waitPending(t, a, 0)
	waitPending(t, b, 0)
}

// TestSection4_PeerNeverCalls: a peer that answers No Match is called until the program's patience ends.
func TestSection4_PeerNeverCalls(t *testing.T) {
	x, y, a, b := ends(t)
	ctx, cancel := context.WithTimeout(context.Background(), 150*time.Millisecond)
	defer cancel()
	start := time.Now()
	_, err := a.DialPeer(ctx, x.QP, at(b, "y"), softvi.Options{Discriminator: "x"})
	if took := time.Since(start); !errors.Is(err, vitcp.ErrTimeout) || took < 100*time.Millisecond {
		t.Errorf("after %v: %v", took, err)
	}
	states(t, rdma.QPInit, x)
	_, err = b.DialPeer(within(t), y.QP, softvi.Addr{IP: loopA, Port: 1, Discriminator: "x"}, softvi.Options{Discriminator: "y"})
	if !errors.Is(err, vitcp.ErrUnreachable) {
		t.Errorf("peer without the port: %v", err)
	}
}

// TestSection4_PeersDoNotFit: peers whose options differ learn why.
func TestSection4_PeersDoNotFit(t *testing.T) {
	x, y, a, b := ends(t)
	ctx := within(t)
	called := make(chan error, 1)
	go func() {
		_, err := a.DialPeer(ctx, x.QP, at(b, "y"), softvi.Options{Discriminator: "x", NoRDMARead: true})
		called <- err
	}()
	_, errY := b.DialPeer(ctx, y.QP, at(a, "x"), softvi.Options{Discriminator: "y"})
	errX := <-called
	for _, err := range []error{errX, errY} {
		if !errors.Is(err, vitcp.ErrRDMARead) && !errors.Is(err, vitcp.ErrRejected) {
			t.Errorf("%v", err)
		}
	}
	if !errors.Is(errX, vitcp.ErrRDMARead) && !errors.Is(errY, vitcp.ErrRDMARead) {
		t.Errorf("nobody says what does not fit: %v, %v", errX, errY)
	}
	states(t, rdma.QPInit, x, y)
}

// TestSection4_PeerAndServer: a peer's call goes to a listener where no call waits for it, and is busy with the
// same pair once.
func TestSection4_PeerAndServer(t *testing.T) {
	x, y, a, b := ends(t)
	ctx := within(t)
	called := make(chan error, 1)
	go func() {
		_, err := a.DialPeer(ctx, x.QP, at(b, "y"), softvi.Options{Discriminator: "x"})
		called <- err
	}()
	l := listen(t, b, "y")
	r := accept(t, l)
	z := end(t, a)
	if _, err := a.DialPeer(ctx, z.QP, at(b, "y"), softvi.Options{Discriminator: "x"}); !errors.Is(err, rdma.ErrBusy) {
		t.Errorf("a second call of the pair: %v", err)
	}
	if !r.Offer().Peer {
		t.Error("the call does not say what it is")
	}
	terms, err := r.Accept(y.QP, softvi.Options{})
	if errX := <-called; err != nil || errX != nil || terms.Peer {
		t.Fatalf("%+v, %v, %v", terms, err, errX)
	}
	talk(t, x, y)
}
