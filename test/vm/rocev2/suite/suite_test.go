// SPDX-License-Identifier: Apache-2.0

//go:build linux && cgo

package suite

import (
	"net/netip"
	"os"
	"testing"

	"go.uber.org/goleak"

	"github.com/smcr-io/kube-smcr/internal/linux"
	"github.com/smcr-io/kube-smcr/internal/testenv"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/rdmatest"
	"github.com/smcr-io/kube-smcr/pkg/rdma/soft"
	"github.com/smcr-io/kube-smcr/pkg/rdma/verbs"
)

const (
	// netNSEnv is the file of the software device's network namespace.
	netNSEnv = "ROCEV2_SOFT_NETNS"
	// softAddrEnv and rxeAddrEnv are the devices' addresses, of one IP version.
	softAddrEnv = "ROCEV2_SOFT_ADDR"
	rxeAddrEnv  = "ROCEV2_RXE_ADDR"
	// packetsEnv is set if faults are to hit single packets: the software device
	// then sends and receives them one by one.
	packetsEnv = "ROCEV2_PACKETS"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func addr(t *testing.T, env string) netip.Addr {
	t.Helper()
	a, err := netip.ParseAddr(os.Getenv(env))
	if err != nil {
		t.Fatalf("%s: %v", env, err)
	}
	return a
}

// openSoft opens the software device in its namespace.
func openSoft(t *testing.T) *soft.Device {
	t.Helper()
	testenv.Need(t, testenv.RDMADevice)
	ns, err := linux.OpenNetNS(os.Getenv(netNSEnv))
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	var d *soft.Device
	err = ns.Do(func() (err error) {
		d, err = soft.Open(soft.Config{Name: "soft0", Addr: addr(t, softAddrEnv), NoSegmentation: os.Getenv(packetsEnv) != ""})
		return err
	})
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

// openRXE opens the other one.
func openRXE(t *testing.T) *verbs.Device {
	t.Helper()
	testenv.Need(t, testenv.RDMADevice)
	d, err := verbs.Open(verbs.Config{Name: os.Getenv(testenv.RDMADeviceEnv), Addr: addr(t, rxeAddrEnv)})
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

// bothWays runs f with the software device as the first and as the second one.
func bothWays(t *testing.T, f func(t *testing.T, a, b rdma.Device)) {
	t.Run("softToRXE", func(t *testing.T) { f(t, openSoft(t), openRXE(t)) })
	t.Run("rxeToSoft", func(t *testing.T) { f(t, openRXE(t), openSoft(t)) })
}

// emulated is the ACK timeout of both devices, 268 ms. With the default of 67 ms a READ from rxe through a lossy network ended
// once in four runs, without an answer to eight tries; why is not known, and an emulated guest stands still at times.
const emulated = 16

func TestConformance(t *testing.T) {
	for _, c := range rdmatest.Cases() {
		t.Run(c.Name, func(t *testing.T) {
			bothWays(t, func(t *testing.T, a, b rdma.Device) { c.Run(t, rdmatest.Net{A: a, B: b, Timeout: emulated}) })
		})
	}
}
