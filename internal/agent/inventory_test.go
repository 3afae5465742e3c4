// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/smcr-io/kube-smcr/internal/agent/rnics"
	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/config"
	"github.com/smcr-io/kube-smcr/internal/devices/vf"
)

// The host is looked at once in hostEvery, whether it answers with devices or with an error.
func TestHostDevices_cached(t *testing.T) {
	var h hostDevices
	looks, broken := 0, errors.New("no sysfs")
	look := func() ([]vf.Device, error) {
		if looks++; looks == 2 {
			return nil, broken
		}
		return []vf.Device{{ID: fmt.Sprint(looks)}}, nil
	}
	start := time.Unix(1000, 0)
	for _, step := range []struct {
		at    time.Duration
		looks int
		err   error
	}{
		{0, 1, nil},
		{hostEvery - 1, 1, nil},
		{hostEvery, 2, broken},
		{2*hostEvery - 1, 2, broken},
		{2 * hostEvery, 3, nil},
	} {
		found, err := h.list(look, start.Add(step.at))
		if looks != step.looks || !errors.Is(err, step.err) || (len(found) == 1) != (step.err == nil) {
			t.Errorf("after %v: %d looks, %v, %v", step.at, looks, found, err)
		}
	}
}

// Looks that take long are rarer.
func TestHostDevices_slow(t *testing.T) {
	for took, want := range map[time.Duration]time.Duration{
		time.Millisecond: hostEvery, hostMost / hostShare / 2: hostMost / 2, time.Second: hostMost,
	} {
		synctest.Test(t, func(t *testing.T) {
			var h hostDevices
			now := time.Now()
			_, err := h.list(func() ([]vf.Device, error) {
				<-time.After(took)
				return nil, nil
			}, now)
			if pause := h.next.Sub(now); pause != want || err != nil {
				t.Errorf("a look that took %v is followed by one after %v, want %v; %v", took, pause, want, err)
			}
		})
	}
}

// TestDeviceInfo_otherAddresses: of an RDMA device of the kernel its interface's other addresses are
// known, which the kernel's SMC-R may send from; software sends from its own address only.
func TestDeviceInfo_otherAddresses(t *testing.T) {
	all := addrs("192.0.2.9", "192.0.2.1", "10.0.0.7", "127.0.0.1", "169.254.0.1", "10.0.0.7")
	for _, tt := range []struct {
		name   string
		dev    wireDevice
		device config.Device
		want   []string
	}{
		{"of the kernel", wireDevice{addr: "192.0.2.1", netdev: "eth1"}, config.Device{RDMA: "there"}, []string{"10.0.0.7", "192.0.2.9"}},
		{"in software", wireDevice{addr: "192.0.2.1", netdev: "eth1"}, config.Device{SoftAddress: netip.MustParseAddr("192.0.2.1")}, nil},
		{"whose interface is gone", wireDevice{addr: "192.0.2.1", netdev: "eth2"}, config.Device{RDMA: "there"}, nil},
		{"without an interface", wireDevice{addr: "192.0.2.1"}, config.Device{RDMA: "there"}, nil},
		{"missing", wireDevice{addr: "192.0.2.1", netdev: "eth1"}, config.Device{RDMA: "missing"}, nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			a := &agent{cfg: Config{platform: platform{host: &fakeHost{addrs: map[string][]netip.Addr{"eth1": all}}}}}
			a.rnics = poolOf(t, tt.dev, nil, tt.device)
			got := a.deviceInfo()
			if len(got) != 1 || !slices.Equal(got[0].OtherAddresses, tt.want) {
				t.Errorf("devices %+v, want one with the other addresses %q", got, tt.want)
			}
		})
	}
}

// A device in the inventory shows how its pods use it. A device that the host no longer shows is listed with
// what its pod knows of the device.
func TestAddUse(t *testing.T) {
	own := &rnics.Own{ID: "d1"}
	own.PCI, own.NetDev, own.RDMA, own.Mode = "0000:01:00.1", "eth7", []string{"mlx5_7"}, "exclusive"
	missing := errors.New("is gone")
	for _, c := range []struct {
		name  string
		known *agentapi.PodDevice
		err   error
		want  agentapi.PodDevice
	}{
		{
			"known to the host", &agentapi.PodDevice{ID: "d1", Interface: "eth1", Mode: "shared", RDMA: []string{"mlx5_1"}, State: "free"}, nil,
			agentapi.PodDevice{ID: "d1", Interface: "eth1", Mode: "shared", RDMA: []string{"mlx5_1"}, State: agentapi.DevicePod, Pods: []string{"ns/p"}},
		},
		{
			"not known", nil, nil,
			agentapi.PodDevice{
				ID: "d1", PCI: "0000:01:00.1", Interface: "eth7", RDMA: []string{"mlx5_7"}, Mode: "exclusive", State: agentapi.DevicePod, Pods: []string{"ns/p"},
			},
		},
		{
			"missing", &agentapi.PodDevice{ID: "d1"}, missing,
			agentapi.PodDevice{ID: "d1", Mode: "exclusive", State: agentapi.DeviceMissing, Pods: []string{"ns/p"}},
		},
		{
			"claimed by the pod", &agentapi.PodDevice{ID: "d1", Pods: []string{"ns/p"}}, nil,
			agentapi.PodDevice{ID: "d1", Mode: "exclusive", State: agentapi.DevicePod, Pods: []string{"ns/p"}},
		},
		{
			"as many pods as are shown", &agentapi.PodDevice{ID: "d1", Pods: make([]string, maxShownPods)}, nil,
			agentapi.PodDevice{ID: "d1", Mode: "exclusive", State: agentapi.DevicePod, Pods: make([]string, maxShownPods)},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			all := map[string]*agentapi.PodDevice{}
			if c.known != nil {
				all["d1"] = c.known
			}
			addUse(all, "ns/p", &rnics.State{Name: "used", Own: own, Err: c.err})
			if d := cmp.Diff(map[string]*agentapi.PodDevice{"d1": &c.want}, all, cmpopts.IgnoreFields(agentapi.PodDevice{}, "Used", "NUMANode")); d != "" {
				t.Error(d)
			}
			if u := all["d1"].Used; u == nil || u.Name != "used" {
				t.Errorf("used as %+v", u)
			}
		})
	}
}
