// SPDX-License-Identifier: Apache-2.0

package vf

import (
	"testing"

	"github.com/smcr-io/kube-smcr/internal/records"
)

// The error about a device that a pod has names that pod, which may have the name of the one that wants it, and
// the interface that it has of the device, which is another one than the attachment's.
func TestBusyError(t *testing.T) {
	owner := Owner{ContainerID: "c1", IfName: "eth0", Pod: records.Pod{Namespace: "ns", Name: "pod-1", UID: "u1"}}
	j := journal{Wiring: Wiring{Device: Device{ID: "0000:41:10.0"}, Owner: owner, Mode: ModeMove, IfName: "smcr0"}}
	err := j.device(j.Wiring.Device).Usable()
	if want := "device 0000:41:10.0 belongs to interface smcr0 of container c1 (pod ns/pod-1, UID u1)"; err == nil || err.Error() != want {
		t.Errorf("a claimed device: %v, want %s", err, want)
	}
	err = &BusyError{Device: "eth1", Owner: Owner{ContainerID: "c2", IfName: "net1", Pod: records.Pod{Namespace: "ns", Name: "pod-2"}}}
	if want := "device eth1 belongs to interface net1 of container c2 (pod ns/pod-2)"; err.Error() != want {
		t.Errorf("of a runtime that tells no UIDs: %v, want %s", err, want)
	}
	err = &BusyError{Device: "eth1", Owner: Owner{ContainerID: "c2", IfName: "net1"}}
	if want := "device eth1 belongs to interface net1 of container c2"; err.Error() != want {
		t.Errorf("outside of Kubernetes: %v, want %s", err, want)
	}
}
