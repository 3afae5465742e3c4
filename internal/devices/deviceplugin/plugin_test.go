// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

func soft(id string, rail int, why string) Device {
	return Device{ID: id, Rail: rail, NUMANode: -1, Why: why}
}

func vf(id string, rail, numa int) Device {
	return Device{ID: id, VF: true, Rail: rail, NUMANode: numa, PF: "0000:01:00.0", RDMA: "rxe_" + id[len(id)-1:]}
}

// TestPlugin: registered, and up to date with what happens to devices.
func TestPlugin(t *testing.T) {
	k := newKubelet(t)
	p, n := k.plugin(3, soft("soft0", 0, ""), soft("soft1", 1, "its port is down"), vf("0000:01:10.0", 0, 1))
	k.start()
	stop := run(t, p)
	k.awaits(ResourceShared, 3, 6)
	k.awaits(ResourceVF, 1, 1)
	k.mu.Lock()
	d := k.clients[ResourceVF].devices["0000:01:10.0"]
	preferred := k.clients[ResourceShared].options.GetGetPreferredAllocationAvailable()
	k.mu.Unlock()
	if got := d.GetTopology().GetNodes(); len(got) != 1 || got[0].GetID() != 1 || !preferred {
		t.Errorf("topology %v, preferred allocation %v", got, preferred)
	}

	n.set(nil, soft("soft0", 0, "its port is down"), soft("soft1", 1, "its port is down"))
	k.awaits(ResourceShared, 0, 6)
	k.awaits(ResourceVF, 0, 0)
	n.set(errors.New("sysfs is not there"))
	n.set(nil, soft("soft0", 0, ""))
	k.awaits(ResourceShared, 3, 3)

	stop()
	eventually(t, func() error {
		if h, _ := k.healthy(ResourceShared); h >= 0 {
			return errors.New("kubelet still has the plugin")
		}
		return nil
	})
	if names, err := filepath.Glob(filepath.Join(k.dir, "smcr*")); err != nil || len(names) > 0 {
		t.Errorf("sockets %v are left, %v", names, err)
	}
}

// TestPlugin_polls: no event tells of the change.
func TestPlugin_polls(t *testing.T) {
	k := newKubelet(t)
	p, n := k.plugin(1, soft("soft0", 0, ""))
	p.cfg.Changed = nil
	k.start()
	run(t, p)
	k.awaits(ResourceShared, 1, 1)
	n.set(nil, soft("soft0", 0, "its port is down"))
	k.awaits(ResourceShared, 0, 1)
}

// TestPlugin_kubeletRestarts: also one that is not there at first, and one that
// only lost the connection.
func TestPlugin_kubeletRestarts(t *testing.T) {
	k := newKubelet(t)
	p, _ := k.plugin(2, soft("soft0", 0, ""))
	run(t, p)
	k.start()
	for range 3 {
		k.awaits(ResourceShared, 2, 2)
		k.awaits(ResourceVF, 0, 0)
		k.stop()
		k.start()
	}
	k.awaits(ResourceShared, 2, 2)
	k.mu.Lock()
	before := k.came
	_ = k.clients[ResourceShared].conn.Close()
	k.mu.Unlock()
	eventually(t, func() error {
		k.mu.Lock()
		defer k.mu.Unlock()
		if k.came == before {
			return errors.New("not registered again")
		}
		return nil
	})
	k.awaits(ResourceShared, 2, 2)
}

// TestPlugin_oneAtATime: the second agent's plugin waits for the first one's end,
// and kubelet's mistake about that end does not last.
func TestPlugin_oneAtATime(t *testing.T) {
	k := newKubelet(t)
	first, _ := k.plugin(1, soft("old", 0, ""))
	second, _ := k.plugin(2, soft("new", 0, ""))
	second.cfg.Lock = first.cfg.Lock
	k.start()
	stop := run(t, first)
	k.awaits(ResourceShared, 1, 1)
	stopSecond := run(t, second)
	if h, all := k.healthy(ResourceShared); h != 1 || all != 1 {
		t.Errorf("%d of %d devices, want those of the first plugin", h, all)
	}
	stop()
	k.awaits(ResourceShared, 2, 2)
	stop = run(t, first) // has to wait
	k.mu.Lock()
	if _, ok := k.clients[ResourceShared].devices["new/1"]; !ok {
		t.Errorf("the devices are %v", k.clients[ResourceShared].devices)
	}
	k.mu.Unlock()
	stopSecond()
	k.awaits(ResourceShared, 1, 1)
	stop()
	if _, err := os.Stat(first.cfg.Lock); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the lock is left: %v", err)
	}
}

func TestPlugin_allocate(t *testing.T) {
	k := newKubelet(t)
	p, _ := k.plugin(4, soft("soft0", 0, ""), soft("soft1", 1, ""), vf("0000:01:10.0", 0, -1), vf("0000:01:10.2", 0, -1))
	k.start()
	run(t, p)
	k.awaits(ResourceShared, 8, 8)
	k.awaits(ResourceVF, 2, 2)
	tests := []struct {
		name, resource string
		ids            []string
		want           map[string]string
		code           codes.Code
	}{
		{"slots", ResourceShared, []string{"soft1/3", "soft0/1", "soft0/2"}, map[string]string{"SMCR_DEVICES_ROCE": "soft0,soft1"}, codes.OK},
		{"VFs", ResourceVF, []string{"0000:01:10.2", "0000:01:10.0"}, map[string]string{
			"SMCR_DEVICES_ROCE_VF":           "0000:01:10.0,0000:01:10.2",
			"PCIDEVICE_SMCR_IO_ROCE_VF":      "0000:01:10.0,0000:01:10.2",
			"PCIDEVICE_SMCR_IO_ROCE_VF_INFO": `{"0000:01:10.0":{"generic":{"deviceID":"0000:01:10.0"}},"0000:01:10.2":{"generic":{"deviceID":"0000:01:10.2"}}}`,
		}, codes.OK},
		{"gone", ResourceShared, []string{"soft9/0"}, nil, codes.NotFound},
		{"no slot", ResourceShared, []string{"soft0"}, nil, codes.NotFound},
		{"slot out of range", ResourceShared, []string{"soft0/4"}, nil, codes.NotFound},
		{"slot of a VF", ResourceVF, []string{"0000:01:10.0/0"}, nil, codes.NotFound},
		{"junk slot", ResourceShared, []string{"soft0/-1"}, nil, codes.NotFound},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, err := k.api(tt.resource).Allocate(t.Context(), &pluginapi.AllocateRequest{
				ContainerRequests: []*pluginapi.ContainerAllocateRequest{{DevicesIds: tt.ids}},
			})
			if status.Code(err) != tt.code {
				t.Fatalf("Allocate = %v, want %v", err, tt.code)
			}
			if err != nil {
				return
			}
			c := got.GetContainerResponses()[0]
			if diff := cmp.Diff(tt.want, c.GetEnvs()); diff != "" || len(c.GetDevices())+len(c.GetMounts()) > 0 {
				t.Errorf("environment (-want +got):\n%s, and %v %v", diff, c.GetDevices(), c.GetMounts())
			}
		})
	}
	got, err := k.api(ResourceShared).GetPreferredAllocation(t.Context(), &pluginapi.PreferredAllocationRequest{
		ContainerRequests: []*pluginapi.ContainerPreferredAllocationRequest{
			{AvailableDeviceIDs: []string{"soft0/0", "soft0/1", "soft1/0"}, AllocationSize: 2},
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"soft0/0", "soft1/0"}, got.GetContainerResponses()[0].GetDeviceIDs()); diff != "" {
		t.Errorf("preferred (-want +got):\n%s", diff)
	}
}

// TestPlugin_info: device information files come and go with the VFs.
func TestPlugin_info(t *testing.T) {
	k := newKubelet(t)
	p, n := k.plugin(1, vf("0000:01:10.0", 0, -1), vf("0000:01:10.2", 0, -1), soft("soft0", 0, ""))
	k.start()
	if err := os.MkdirAll(p.cfg.InfoDir, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"smcr.io-roce_vf-0000:01:10.7-device.json", "vendor.com-vf-0000:01:10.7-device.json"} {
		if err := os.WriteFile(filepath.Join(p.cfg.InfoDir, name), []byte("{}"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	stop := run(t, p)
	k.awaits(ResourceVF, 2, 2)
	got, err := os.ReadFile(filepath.Join(p.cfg.InfoDir, "smcr.io-roce_vf-0000:01:10.2-device.json"))
	if err != nil {
		t.Fatal(err)
	}
	const want = `{"type":"pci","version":"1.1.0","pci":{"pci-address":"0000:01:10.2","rdma-device":"rxe_2","pf-pci-address":"0000:01:00.0"}}`
	if diff := cmp.Diff(want, string(got)); diff != "" {
		t.Errorf("file (-want +got):\n%s", diff)
	}
	files := func() []string {
		names, err := filepath.Glob(filepath.Join(p.cfg.InfoDir, "*"))
		if err != nil {
			t.Fatal(err)
		}
		for i := range names {
			names[i] = filepath.Base(names[i])
		}
		return names
	}
	others := "vendor.com-vf-0000:01:10.7-device.json"
	if diff := cmp.Diff([]string{"smcr.io-roce_vf-0000:01:10.0-device.json", "smcr.io-roce_vf-0000:01:10.2-device.json", others}, files()); diff != "" {
		t.Errorf("files (-want +got):\n%s", diff)
	}
	n.set(nil, vf("0000:01:10.0", 0, -1))
	k.awaits(ResourceVF, 1, 1)
	if diff := cmp.Diff([]string{"smcr.io-roce_vf-0000:01:10.0-device.json", others}, files()); diff != "" {
		t.Errorf("files without one VF (-want +got):\n%s", diff)
	}
	stop()
	if diff := cmp.Diff([]string{others}, files()); diff != "" {
		t.Errorf("files at the end (-want +got):\n%s", diff)
	}
}

// TestPlugin_infoLater: device information files that could not be written are, as soon as they can be. Meanwhile the
// log says so once.
func TestPlugin_infoLater(t *testing.T) {
	k := newKubelet(t)
	p, _ := k.plugin(1, vf("0000:01:10.0", 0, -1))
	var log strings.Builder
	p.cfg.Log = slog.New(slog.NewTextHandler(&log, nil))
	dir := filepath.Dir(p.cfg.InfoDir)
	p.cfg.InfoDir = filepath.Join(dir, "file", "info")
	if err := os.WriteFile(filepath.Join(dir, "file"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		p.update()
	}
	if n := strings.Count(log.String(), "device information not written"); n != 1 {
		t.Errorf("logged %d times", n)
	}
	if err := os.Remove(filepath.Join(dir, "file")); err != nil {
		t.Fatal(err)
	}
	p.update()
	name := filepath.Join(p.cfg.InfoDir, "smcr.io-roce_vf-0000:01:10.0-device.json")
	before, err := os.Stat(name)
	if err != nil {
		t.Fatal(err)
	}
	p.update()
	if after, err := os.Stat(name); err != nil || !os.SameFile(before, after) {
		t.Errorf("a file that was right is written again: %v", err)
	}
}

// TestPlugin_infoAgain: an agent that offers the devices again, as after a hand-over that did not come about, writes the files again.
func TestPlugin_infoAgain(t *testing.T) {
	k := newKubelet(t)
	p, _ := k.plugin(1, vf("0000:01:10.0", 0, -1))
	k.start()
	name := filepath.Join(p.cfg.InfoDir, "smcr.io-roce_vf-0000:01:10.0-device.json")
	for range 2 {
		stop := run(t, p)
		k.awaits(ResourceVF, 1, 1)
		if _, err := os.Stat(name); err != nil {
			t.Error(err)
		}
		stop()
		if _, err := os.Stat(name); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("the file is left: %v", err)
		}
		eventually(t, func() error {
			if h, _ := k.healthy(ResourceVF); h >= 0 {
				return errors.New("kubelet still has the plugin")
			}
			return nil
		})
	}
}

func TestNew_incomplete(t *testing.T) {
	if _, err := New(Config{Dir: "/x"}); err == nil {
		t.Error("New took an incomplete Config")
	}
}

func TestMetrics(t *testing.T) {
	m := NewMetrics()
	m.offered(ResourceShared, newOffer([]Device{soft("a", 0, ""), soft("b", 0, "no"), soft("c", 0, "no")}, false, 2))
	reg := prometheus.NewPedanticRegistry()
	reg.MustRegister(m)
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]float64{}
	for _, f := range families {
		for _, v := range f.GetMetric() {
			got[f.GetName()+" "+v.GetLabel()[0].GetValue()] = v.GetGauge().GetValue()
		}
	}
	want := map[string]float64{"kube_smcr_plugin_devices healthy": 1, "kube_smcr_plugin_devices unhealthy": 2}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("metrics (-want +got):\n%s", diff)
	}
}
