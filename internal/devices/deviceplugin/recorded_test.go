// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"encoding/json"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/smcr-io/kube-smcr/internal/config"
	"github.com/smcr-io/kube-smcr/internal/devices/deviceinfo"
)

// recording is what the real sriov-network-device-plugin said: see the README
// beside the files.
type recording struct {
	Registered []*pluginapi.RegisterRequest
	Devices    map[string][]*pluginapi.Device `json:"listAndWatch"`
	Allocate   []struct {
		Resource  string
		DeviceIDs []string
		Answer    *pluginapi.ContainerAllocateResponse
		Files     map[string]json.RawMessage `json:"deviceInfoFiles"`
	}
}

func recordings(t *testing.T) map[string]recording {
	t.Helper()
	names, err := filepath.Glob("testdata/sriov-network-device-plugin/*.json")
	if err != nil || len(names) == 0 {
		t.Fatalf("no recordings: %v", err)
	}
	out := map[string]recording{}
	for _, name := range names {
		b, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		var r recording
		if err := json.Unmarshal(b, &r); err != nil || len(r.Registered) == 0 || len(r.Allocate) == 0 {
			t.Fatalf("%s: %d calls, %v", name, len(r.Allocate), err)
		}
		out[filepath.Base(name)] = r
	}
	return out
}

// TestRecorded_allocate: what containers get with VFs of ours has the names and
// forms of the real plugin, for programs that look for those.
func TestRecorded_allocate(t *testing.T) {
	for name, r := range recordings(t) {
		for _, call := range r.Allocate {
			t.Run(name+" "+call.Resource, func(t *testing.T) {
				var keys []string
				for _, suffix := range []string{"", "_INFO"} {
					keys = append(keys, envName("PCIDEVICE_", call.Resource)+suffix)
				}
				if diff := cmp.Diff(keys, slices.Sorted(maps.Keys(call.Answer.GetEnvs()))); diff != "" {
					t.Errorf("names (-ours +real)\n%s", diff)
				}
				if diff := cmp.Diff(strings.Join(call.DeviceIDs, ","), call.Answer.GetEnvs()[keys[0]]); diff != "" {
					t.Errorf("devices (-ours +real)\n%s", diff)
				}
				ours, err := vfInfo(call.DeviceIDs)
				if err != nil {
					t.Fatal(err)
				}
				if diff := cmp.Diff(generic(t, ours), generic(t, call.Answer.GetEnvs()[keys[1]])); diff != "" {
					t.Errorf("generic information (-ours +real)\n%s", diff)
				}
			})
		}
	}
}

// generic is the part of ..._INFO that every kind of device has.
func generic(t *testing.T, env string) map[string]any {
	t.Helper()
	var all map[string]map[string]any
	if err := json.Unmarshal([]byte(env), &all); err != nil {
		t.Fatal(err)
	}
	out := map[string]any{}
	for id, info := range all {
		out[id] = info["generic"]
	}
	return out
}

// TestRecorded_deviceInfo: our device-info files are the real plugin's, to the
// byte, but that we name the PF.
func TestRecorded_deviceInfo(t *testing.T) {
	for name, r := range recordings(t) {
		for _, call := range r.Allocate {
			t.Run(name+" "+call.Resource, func(t *testing.T) {
				dir := t.TempDir()
				for _, id := range call.DeviceIDs {
					var real deviceinfo.Info
					b := call.Files[filepath.Base(deviceinfo.Path("", call.Resource, id))]
					if err := json.Unmarshal(b, &real); err != nil {
						t.Fatalf("no file for %s among %v: %v", id, slices.Sorted(maps.Keys(call.Files)), err)
					}
					if err := deviceinfo.Write(deviceinfo.Path(dir, call.Resource, id), deviceinfo.PCI{Address: id, RDMA: real.PCI.RDMA}); err != nil {
						t.Fatal(err)
					}
					var ours, theirs any
					text, err := os.ReadFile(deviceinfo.Path(dir, call.Resource, id))
					if err != nil {
						t.Fatal(err)
					}
					if err := json.Unmarshal(text, &ours); err != nil {
						t.Fatal(err)
					}
					if err := json.Unmarshal(b, &theirs); err != nil {
						t.Fatal(err)
					}
					if diff := cmp.Diff(theirs, ours); diff != "" {
						t.Errorf("%s (-real +ours)\n%s", id, diff)
					}
				}
			})
		}
	}
}

// TestRecorded_assignments: the agent finds the pods' devices by the resources and
// IDs that the real plugin has.
func TestRecorded_assignments(t *testing.T) {
	for name, r := range recordings(t) {
		k := newKubelet(t)
		var vendors []string
		want := map[config.PodName][]string{}
		for resource, devices := range r.Devices {
			vendor, short, _ := strings.Cut(resource, "/")
			vendors = append(vendors, vendor+"/*")
			pod := config.PodName{Namespace: "shop", Name: short}
			c := &podresources.ContainerResources{Name: "c"}
			for _, d := range devices { // as kubelet has it: an entry for each NUMA node
				c.Devices = append(c.Devices, &podresources.ContainerDevices{ResourceName: resource, DeviceIds: []string{d.ID}})
				want[pod] = append(want[pod], d.ID)
			}
			k.pods = append(k.pods, &podresources.PodResources{Namespace: pod.Namespace, Name: pod.Name, Containers: []*podresources.ContainerResources{c}})
		}
		k.start()
		a := NewAssignments(t.TempDir(), k.socket(), vendors, slog.New(slog.DiscardHandler))
		got := map[config.PodName][]string{}
		for pod := range want {
			got[pod] = a.Devices(pod)
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s (-want +got)\n%s", name, diff)
		}
	}
}
