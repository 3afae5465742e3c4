// SPDX-License-Identifier: Apache-2.0

package preflight

import (
	"fmt"
	"strings"
)

// devicesForPods says which devices a pod can get for itself, and how. It is no failure if
// there are none: then pods share the node's devices.
func (m Machine) devicesForPods() Check {
	c := Check{Name: namePodDevices, Result: OK}
	if m.uid != 0 {
		c.Detail = "not tried: it takes root"
		return c
	}
	caps := m.podDevices()
	parts := []string{fmt.Sprintf("SR-IOV: PFs %d, VFs %d", caps.PFs, caps.VFs)}
	switch caps.RDMANetNS {
	case "":
		parts = append(parts, "the kernel has no RDMA")
	case "exclusive":
		parts = append(parts, "RDMA devices belong to one network namespace each (exclusive): that of a VF follows it into the pod")
	default:
		parts = append(parts, "all network namespaces see all RDMA devices ("+caps.RDMANetNS+"): that of a VF stays where it is")
	}
	switch {
	case !caps.SoftRoCE:
	case caps.SoftRoCEInPods:
		parts = append(parts, "soft RoCE carries traffic in pods: its interface moves there")
	case caps.IPVlan:
		parts = append(parts, "soft RoCE carries no traffic in pods on this kernel: its interface stays in the host, and the pod gets an ipvlan child")
	default:
		parts = append(parts, "soft RoCE carries no traffic in pods on this kernel, and there is no ipvlan")
		c.Result, c.Advice = Warn, "load the module ipvlan, or use a newer kernel"
	}
	if len(caps.Errors) > 0 {
		c.Result = Warn
		parts = append(parts, caps.Errors...)
	}
	c.Detail = strings.Join(parts, "; ")
	return c
}
