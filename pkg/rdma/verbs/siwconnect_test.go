// SPDX-License-Identifier: Apache-2.0

//go:build linux && cgo && smcrsiw

package verbs_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync/atomic"
	"testing"

	"github.com/smcr-io/kube-smcr/internal/testenv"
	"github.com/smcr-io/kube-smcr/pkg/rdma/rdmatest"
	"github.com/smcr-io/kube-smcr/pkg/rdma/softiwarp"
	"github.com/smcr-io/kube-smcr/test/vm/rdmacm"
)

// siwData is the most private data that siw sends: it counts it, with the four bytes of RFC 6581, in eight bits.
const siwData = 251

// TestSIW_connect is what programs on siw and softiwarp say to each other while they connect; test/vm/siw runs
// it in a guest.
func TestSIW_connect(t *testing.T) {
	testenv.Need(t, testenv.RDMADevice)
	var ports atomic.Uint32
	next := func() netip.AddrPort {
		return netip.AddrPortFrom(address(t, siwAddrEnv), uint16(firstPort+1000+ports.Add(1)))
	}
	for _, n := range []int{0, 1, siwData} {
		t.Run(fmt.Sprintf("Request with %d bytes", n), func(t *testing.T) { requestWith(t, n) })
		t.Run(fmt.Sprintf("Reply with %d bytes", n), func(t *testing.T) { replyWith(t, next(), n) })
	}
	for _, n := range []int{0, 20} {
		t.Run(fmt.Sprintf("rejected with %d bytes", n), func(t *testing.T) { rejectedWith(t, next(), n) })
	}
}

func data(n int) []byte { return bytes.Repeat([]byte{0xa5}, n) }

func newCM(t *testing.T) *rdmacm.CM {
	t.Helper()
	cm, err := rdmacm.New()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := cm.Close(); err != nil {
			t.Error(err)
		}
	})
	return cm
}

// requestWith has siw ask with private data.
func requestWith(t *testing.T, n int) {
	x, y := rdmatest.NewEnd(t, openSIW(t), rdmatest.Options{}), rdmatest.NewEnd(t, openSoft(t), rdmatest.Options{})
	x.Init(t)
	y.Init(t)
	cm := newCM(t)
	l, err := y.Dev.(*softiwarp.Device).Listen(":0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	connected := make(chan error, 1)
	go func() {
		_, err := cm.Connect(x.QP.Num(), address(t, siwAddrEnv), netip.MustParseAddrPort(l.Addr().String()), data(n))
		connected <- err
	}()
	r, err := l.Accept(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	if got := r.PrivateData(); !bytes.Equal(got, data(n)) {
		t.Errorf("siw asks with %d bytes %x, want %d", len(got), got, n)
	}
	finish(t, r.Accept(context.Background(), y.QP, softiwarp.ConnectOptions{}), <-connected, x.QP)
}

// replyWith has siw accept with private data.
func replyWith(t *testing.T, at netip.AddrPort, n int) {
	x, y := rdmatest.NewEnd(t, openSoft(t), rdmatest.Options{}), rdmatest.NewEnd(t, openSIW(t), rdmatest.Options{})
	x.Init(t)
	y.Init(t)
	cm := newCM(t)
	if err := cm.Listen(at); err != nil {
		t.Fatal(err)
	}
	connected := make(chan error, 1)
	go func() {
		_, err := cm.Await(cmTimeout)
		if err == nil {
			err = cm.Accept(y.QP.Num(), data(n))
		}
		connected <- err
	}()
	got, err := x.Dev.(*softiwarp.Device).Dial(context.Background(), x.QP, at.String(), softiwarp.ConnectOptions{})
	finish(t, err, <-connected, y.QP)
	if !bytes.Equal(got, data(n)) {
		t.Errorf("siw accepts with %d bytes %x, want %d", len(got), got, n)
	}
}

// rejectedWith has a program on siw reject what softiwarp asks.
func rejectedWith(t *testing.T, at netip.AddrPort, n int) {
	x := rdmatest.NewEnd(t, openSoft(t), rdmatest.Options{})
	x.Init(t)
	cm := newCM(t)
	if err := cm.Listen(at); err != nil {
		t.Fatal(err)
	}
	rejected := make(chan error, 1)
	go func() {
		_, err := cm.Await(cmTimeout)
		if err == nil {
			err = cm.Reject(data(n))
		}
		rejected <- err
	}()
	_, err := x.Dev.(*softiwarp.Device).Dial(context.Background(), x.QP, at.String(), softiwarp.ConnectOptions{})
	if err := <-rejected; err != nil {
		t.Fatal(err)
	}
	var e *softiwarp.ConnectError
	if !errors.As(err, &e) || e.Reason != softiwarp.Rejected || !bytes.Equal(e.PrivateData, data(n)) {
		t.Errorf("dial: %v, want that it was rejected with %d bytes", err, n)
	}
}
