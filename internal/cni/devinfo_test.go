// SPDX-License-Identifier: Apache-2.0

package cni

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/smcr-io/kube-smcr/internal/devices/deviceinfo"
)

// TestReadDeviceInfo_recorded reads the device-info files that the real
// sriov-network-device-plugin wrote: see the README beside the recordings.
func TestReadDeviceInfo_recorded(t *testing.T) {
	want := map[string][]string{ // the RDMA devices that the files name
		"plain.json intel.com/sriov_netdevice 0000:41:10.0":      nil,
		"plain.json intel.com/sriov_netdevice 0000:41:10.2":      nil,
		"plain.json example.com/roce_rail1 0000:81:10.0":         nil,
		"plain.json intel.com/vfio-dpdk 0000:81:10.2":            nil,
		"rdma.json nvidia.com/sriov_rdma 0000:41:10.0":           {"rxe100"},
		"rdma.json nvidia.com/sriov_rdma 0000:41:10.2":           {"rxe101"},
		"rdma.json intel.com/sriov_rdma_need_vhost 0000:81:10.0": nil,
	}
	names, err := filepath.Glob("../devices/deviceplugin/testdata/sriov-network-device-plugin/*.json")
	must(t, err)
	got := map[string][]string{}
	for _, name := range names {
		b, err := os.ReadFile(name)
		must(t, err)
		var recording struct {
			Allocate []struct {
				Resource  string
				DeviceIDs []string
				Files     map[string]json.RawMessage `json:"deviceInfoFiles"`
			}
		}
		must(t, json.Unmarshal(b, &recording))
		for _, call := range recording.Allocate {
			dir := t.TempDir()
			for file, text := range call.Files {
				must(t, os.WriteFile(filepath.Join(dir, file), text, 0o600))
			}
			for _, id := range call.DeviceIDs {
				info, file, err := readDeviceInfo(filepath.Join(dir, "none"), dir, id)
				if err != nil || info.Type != "pci" || info.Version != "1.1.0" || info.PCI == nil || info.PCI.Address != id || file == "" {
					t.Errorf("%s: %+v from %q, %v", id, info, file, err)
				}
				// Multus copies the file for the attachment.
				copied, from, err := readDeviceInfo(file, filepath.Join(dir, "none"), id)
				if diff := cmp.Diff(info, copied); diff != "" || from != file || err != nil {
					t.Errorf("%s: copy from %q, %v (-want +got)\n%s", id, from, err, diff)
				}
				got[strings.Join([]string{filepath.Base(name), call.Resource, id}, " ")] = info.RDMA()
				must(t, os.Remove(file)) // as the device plugin does when it ends
				if info, file, err := readDeviceInfo("", dir, id); info != (deviceinfo.Info{}) || file != "" || err != nil {
					t.Errorf("%s without its file: %+v from %q, %v", id, info, file, err)
				}
			}
		}
	}
	if diff := cmp.Diff(want, got, cmpopts.EquateEmpty()); diff != "" {
		t.Errorf("RDMA devices (-want +got)\n%s", diff)
	}
}
