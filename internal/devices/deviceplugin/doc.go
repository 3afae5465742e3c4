// SPDX-License-Identifier: Apache-2.0

// Package deviceplugin tells kubelet which RDMA devices a node has for pods, and
// learns from kubelet which pods got which devices.
//
//	p, err := deviceplugin.New(deviceplugin.Config{...})
//	go p.Run(ctx) // while the agent manages the node
//
//	a := deviceplugin.NewAssignments(dataDir, socket, []string{"vendor.com/*"}, log)
//	ids := a.Devices(pod)
//
// # Resources
//
// smcr.io/roce are the devices that plugins for PCI devices do not see: rxe, siw
// and software devices. Pods share them, so each is offered in slots, whose IDs
// are DEVICE/NUMBER, for example soft0/17. smcr.io/roce_vf are VFs, if configured, each
// for one pod; their IDs are PCI addresses. A pod that asks for a device gets no device
// file: the agent carries the pod's connections on the device. The container gets
// environment variables that name the devices. For VFs there are also the variables and
// files of sriov-network-device-plugin, so that Multus passes a VF on to smcr-cni.
//
// # The way of a registration
//
//	plugin                                  kubelet
//	lock file: the plugin of an agent
//	before this one has ended
//	listens on its socket
//	Register ------------------------------>
//	        <------------------------------ GetDevicePluginOptions
//	        <------------------------------ ListAndWatch: open for ever
//	all devices --------------------------->
//	a port goes down: all devices --------->
//	        <------------------------------ GetPreferredAllocation, Allocate
//	                                        restarts: removes our socket, makes
//	                                        its own one
//	sees that either socket changed, listens, registers again
//
// # Which devices a pod gets
//
// Several devices for one container are on different rails if possible, so that
// its link groups survive the loss of a rail; then on the same NUMA node; then
// the ones with the most slots left. Nodes whose topology manager has a policy
// have chosen the NUMA node before that.
//
// # Who owns what
//
// Run's goroutine owns the set of devices and replaces it; the gRPC calls read
// it. Each resource has a goroutine that owns its socket and its registration.
//
// # Limitations
//
// Between the end of one agent's plugin and the registration of the next one's,
// a fraction of a second, kubelet rejects pods that were scheduled to the node
// for a device; their controllers make new ones.
//
// If a pod starts while the agent is away, and kubelet is away when the agent comes back,
// the agent assumes that the pod has no devices. When kubelet answers, the pod's link
// groups begin anew on its devices. For all other pods the agent has the record.
//
// With rails that do not reach each other a pod with one device reaches only
// pods on the same rail over SMC-R: let pods ask for one device per rail.
package deviceplugin
