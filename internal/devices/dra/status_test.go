// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/smcr-io/kube-smcr/internal/cni"
	"github.com/smcr-io/kube-smcr/internal/records"
)

// TestStatus: the status of a claim says what the plugin made of its devices, as
// long as it is so, and leaves alone what other drivers say.
func TestStatus(t *testing.T) {
	b := newBench(t)
	d := b.driver("agent-1")
	c := b.claim("web", []string{"pod-1"}, "soft1", "0000-41-10-2", "0000-41-10-0")
	foreign := resourceapi.AllocatedDeviceStatus{Driver: "gpu.example.com", Pool: "p", Device: "gpu0"}
	c.Status.Devices = []resourceapi.AllocatedDeviceStatus{foreign}
	api := b.client.ResourceV1().ResourceClaims("ns")
	if _, err := api.UpdateStatus(t.Context(), c, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	result, err := d.PrepareResourceClaims(t.Context(), []*resourceapi.ResourceClaim{c})
	if err != nil || result[c.UID].Err != nil {
		t.Fatal(err, result[c.UID].Err)
	}
	store := cni.NewStore(d.cfg.DataDir)
	attach := func(containerID, pod string, devices ...cni.AttachedDevice) {
		t.Helper()
		err := store.Write(cni.Attachment{
			ContainerID: containerID, IfName: "eth0", NetNS: "/run/netns/x", Pod: records.Pod{Namespace: "ns", Name: pod, UID: "uid-" + pod}, Devices: devices,
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	ips := []netip.Prefix{netip.MustParsePrefix("10.0.2.7/24"), netip.MustParsePrefix("fd97::7/64")}
	attach("c0", "other", cni.AttachedDevice{ID: "0000:41:10.2", IfName: "smcr9", MAC: "02:00:00:00:00:09"}) // it had it before
	attach("c1", "pod-1",
		cni.AttachedDevice{ID: "0000:41:10.2", IfName: "smcr0", MAC: "02:00:00:00:00:07", IPs: ips},
		cni.AttachedDevice{ID: "0000:41:10.0", Mode: "chained"}, // another plugin's interface
		cni.AttachedDevice{ID: "soft1"})

	b.run(d)
	status := func(want ...resourceapi.AllocatedDeviceStatus) func() string {
		return func() string {
			got, err := api.Get(t.Context(), c.Name, metav1.GetOptions{})
			if err != nil {
				return err.Error()
			}
			if len(got.Status.ReservedFor) != 1 || got.Status.Allocation == nil {
				t.Fatalf("the rest of the status is %+v", got.Status)
			}
			return cmp.Diff(want, got.Status.Devices)
		}
	}
	ours := resourceapi.AllocatedDeviceStatus{
		Driver: DriverName, Pool: nodeName, Device: "0000-41-10-2", NetworkData: &resourceapi.NetworkDeviceData{
			InterfaceName: "smcr0", IPs: []string{"10.0.2.7/24", "fd97::7/64"}, HardwareAddress: "02:00:00:00:00:07",
		},
	}
	b.eventually("the device in the status", status(foreign, ours))

	attach("c1", "pod-1", cni.AttachedDevice{ID: "0000:41:10.2", IfName: "smcr0", MAC: "02:00:00:00:00:08"}) // a new sandbox
	ours.NetworkData.HardwareAddress, ours.NetworkData.IPs = "02:00:00:00:00:08", nil
	b.eventually("the device after a change", status(foreign, ours))

	if err := store.Delete("c1", "eth0"); err != nil {
		t.Fatal(err)
	}
	b.eventually("the device after DEL", status(foreign))
}
