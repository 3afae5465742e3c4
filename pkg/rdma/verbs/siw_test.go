// SPDX-License-Identifier: Apache-2.0

//go:build linux && cgo

package verbs_test

import (
	"context"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/internal/testenv"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/cm"
	"github.com/smcr-io/kube-smcr/pkg/rdma/rdmatest"
	"github.com/smcr-io/kube-smcr/pkg/rdma/softiwarp"
	"github.com/smcr-io/kube-smcr/pkg/rdma/verbs"
)

// The tests called TestSIW need a device of Linux' siw; test/vm/siw runs them in a guest.

const (
	// siwAddrEnv is the address of the interface of the device, and softAddrEnv another address of the same interface.
	siwAddrEnv, softAddrEnv = "VERBS_SIW_ADDR", "VERBS_SOFT_ADDR"

	patience = 5 * time.Second
	// replyPause is between the looks whether siw has heard of the first message, see settle.
	replyPause = 20 * time.Millisecond
)

func address(t testing.TB, env string) netip.Addr {
	t.Helper()
	a, err := netip.ParseAddr(os.Getenv(env))
	if err != nil {
		t.Fatalf("%s: %v", env, err)
	}
	return a
}

func within(t testing.TB) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return ctx
}

// TestSIW_conformance has siw at both ends, and at one of them, towards ours in software.
func TestSIW_conformance(t *testing.T) {
	testenv.Need(t, testenv.RDMADevice)
	for _, c := range rdmatest.Cases() {
		t.Run(c.Name, func(t *testing.T) {
			t.Run("siwToSIW", func(t *testing.T) {
				d := openSIW(t)
				c.Run(t, rdmatest.Net{A: d, B: d, Connect: connect})
			})
			t.Run("softToSIW", func(t *testing.T) {
				c.Run(t, rdmatest.Net{A: openSoft(t), B: openSIW(t), Connect: connect})
			})
			t.Run("siwToSoft", func(t *testing.T) {
				c.Run(t, rdmatest.Net{A: openSIW(t), B: openSoft(t), Connect: connect})
			})
		})
	}
}

func openSIW(t *testing.T) *verbs.IWARP {
	t.Helper()
	d, err := verbs.OpenIWARP(verbs.IWARPConfig{Name: name(t), Addr: address(t, siwAddrEnv)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	return d
}

func openSoft(t *testing.T) *softiwarp.Device {
	t.Helper()
	d, err := softiwarp.Open(softiwarp.Config{Name: "iw0", Addr: address(t, softAddrEnv)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	return d
}

// connect connects x with y.
func connect(t testing.TB, x, y *rdmatest.End) {
	t.Helper()
	tell(t, x, y, nil, nil)
	settle(t, x, y)
}

// tell connects x with y, and returns what they told each other.
func tell(t testing.TB, x, y *rdmatest.End, request, reply []byte) (asked, answered []byte) {
	t.Helper()
	x.Init(t)
	y.Init(t)
	at, accept := listen(t, y, reply)
	accepted := make(chan error, 1)
	go func() {
		var err error
		asked, err = accept()
		accepted <- err
	}()
	answered, err := dial(within(t), x, at, request)
	if e := <-accepted; err != nil || e != nil {
		t.Fatalf("dial: %v; accept: %v", err, e)
	}
	for _, e := range []*rdmatest.End{x, y} {
		if s := e.QP.State(); s != rdma.QPRTS {
			t.Fatalf("queue pair of %s in %v", e.Dev.Name(), s)
		}
	}
	return asked, answered
}

// listen has an end wait for the next request.
func listen(t testing.TB, y *rdmatest.End, reply []byte) (netip.AddrPort, func() (request []byte, err error)) {
	t.Helper()
	ctx := within(t)
	if soft, ok := y.Dev.(*softiwarp.Device); ok {
		l, err := soft.Listen(":0")
		if err != nil {
			t.Fatal(err)
		}
		return netip.MustParseAddrPort(l.Addr().String()), func() ([]byte, error) {
			defer func() { _ = l.Close() }()
			r, err := l.Accept(ctx)
			if err != nil {
				return nil, err
			}
			return r.PrivateData(), r.Accept(ctx, y.QP, softiwarp.ConnectOptions{PrivateData: reply})
		}
	}
	l, err := y.Dev.(cm.Device).Listen(netip.AddrPortFrom(address(t, siwAddrEnv), 0))
	if err != nil {
		t.Fatal(err)
	}
	return netip.MustParseAddrPort(l.Addr().String()), func() ([]byte, error) {
		defer func() { _ = l.Close() }()
		r, err := l.Accept(ctx)
		if err != nil {
			return nil, err
		}
		return r.PrivateData(), r.Accept(ctx, y.QP, cm.Options{PrivateData: reply})
	}
}

func dial(ctx context.Context, x *rdmatest.End, to netip.AddrPort, request []byte) (reply []byte, err error) {
	if soft, ok := x.Dev.(*softiwarp.Device); ok {
		return soft.Dial(ctx, x.QP, to.String(), softiwarp.ConnectOptions{PrivateData: request})
	}
	c, err := x.Dev.(cm.Device).Dial(ctx, x.QP, to, cm.Options{PrivateData: request})
	return c.PrivateData, err
}

// settle waits until siw, as the responder, looks at its connection: what comes right behind its Reply it sees when more
// comes. softiwarp deals with that itself.
func settle(t testing.TB, x, y *rdmatest.End) {
	t.Helper()
	_, initiator := x.Dev.(*verbs.IWARP)
	_, responder := y.Dev.(*verbs.IWARP)
	if !initiator || !responder {
		return
	}
	w := rdma.SendWR{Op: rdma.OpRead, Flags: rdma.SendSignaled, SGL: []rdma.SGE{x.SGE(0, 1)}, RemoteAddr: y.MR.Addr(), RKey: y.MR.RKey()}
	wcs := make([]rdma.WC, 1)
	for asked, ended := 0, 0; ended == 0 || ended < asked; {
		if ended == 0 {
			x.Send(t, w)
			asked++
		}
		tick := time.NewTimer(replyPause)
		<-tick.C // polls whether the READ is answered
		for {
			n, err := x.SendCQ.Poll(wcs)
			if err != nil || n > 0 && wcs[0].Status != rdma.StatusSuccess || asked > 100 {
				t.Fatalf("%d READs, %d were answered: %v, %+v", asked, ended, err, wcs[0])
			}
			if n == 0 {
				break
			}
			ended++
		}
	}
}
