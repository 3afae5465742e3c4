// SPDX-License-Identifier: Apache-2.0

//go:build linux && cgo && smcrsiw

package verbs_test

import (
	"context"
	"net/netip"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/internal/testenv"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/rdmatest"
	"github.com/smcr-io/kube-smcr/pkg/rdma/softiwarp"
	"github.com/smcr-io/kube-smcr/pkg/rdma/verbs"
	"github.com/smcr-io/kube-smcr/test/vm/rdmacm"
)

const (
	// siwAddrEnv is the address of the interface of the device, which is siw, and softAddrEnv
	// another address of the same interface.
	siwAddrEnv, softAddrEnv = "VERBS_SIW_ADDR", "VERBS_SOFT_ADDR"
	firstPort               = 20_000
	cmTimeout               = 10 * time.Second
)

func address(t testing.TB, env string) netip.Addr {
	t.Helper()
	a, err := netip.ParseAddr(os.Getenv(env))
	if err != nil {
		t.Fatalf("%s: %v", env, err)
	}
	return a
}

// TestSIW_conformance has Linux' siw as one device and ours in software as the other one;
// test/vm/siw runs it in a guest.
func TestSIW_conformance(t *testing.T) {
	testenv.Need(t, testenv.RDMADevice)
	var ports atomic.Uint32
	for _, c := range rdmatest.Cases() {
		t.Run(c.Name, func(t *testing.T) {
			t.Run("softToSIW", func(t *testing.T) {
				c.Run(t, rdmatest.Net{A: openSoft(t), B: openSIW(t), Connect: connector(&ports)})
			})
			t.Run("siwToSoft", func(t *testing.T) {
				c.Run(t, rdmatest.Net{A: openSIW(t), B: openSoft(t), Connect: connector(&ports)})
			})
		})
	}
}

func openSIW(t *testing.T) *verbs.SIW {
	t.Helper()
	d, err := verbs.OpenSIW(os.Getenv(testenv.RDMADeviceEnv), address(t, siwAddrEnv))
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

// connector connects x with y, one of which is siw's.
func connector(ports *atomic.Uint32) rdmatest.Connector {
	return func(t testing.TB, x, y *rdmatest.End) {
		t.Helper()
		x.Init(t)
		y.Init(t)
		cm, err := rdmacm.New()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { // the kernel ends the connection
			if err := cm.Close(); err != nil {
				t.Error(err)
			}
		})
		connected := make(chan error, 1)
		if soft, ok := x.Dev.(*softiwarp.Device); ok {
			at := netip.AddrPortFrom(address(t, siwAddrEnv), uint16(firstPort+ports.Add(1)))
			if err := cm.Listen(at); err != nil {
				t.Fatal(err)
			}
			go func() {
				_, err := cm.Await(cmTimeout)
				if err == nil {
					err = cm.Accept(y.QP.Num(), nil)
				}
				connected <- err
			}()
			_, err = soft.Dial(context.Background(), x.QP, at.String(), softiwarp.ConnectOptions{})
			finish(t, err, <-connected, y.QP)
			return
		}
		l, err := y.Dev.(*softiwarp.Device).Listen(":0")
		if err != nil {
			t.Fatal(err)
		}
		go func() {
			_, err := cm.Connect(x.QP.Num(), address(t, siwAddrEnv), netip.MustParseAddrPort(l.Addr().String()), nil)
			connected <- err
		}()
		r, err := l.Accept(context.Background())
		if err == nil {
			err = r.Accept(context.Background(), y.QP, softiwarp.ConnectOptions{})
		}
		finish(t, err, <-connected, x.QP)
		_ = l.Close()
	}
}

func finish(t testing.TB, soft, siw error, q rdma.QP) {
	t.Helper()
	if soft != nil || siw != nil {
		t.Fatalf("connect: softiwarp: %v; siw: %v", soft, siw)
	}
	verbs.Connected(q)
}
