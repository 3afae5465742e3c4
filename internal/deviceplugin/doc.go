// SPDX-License-Identifier: Apache-2.0

// Package deviceplugin tells kubelet which RDMA devices a node has for pods, and
// learns from it which pods got which.
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
// are DEVICE/NUMBER: soft0/17. smcr.io/roce_vf are VFs, if wanted, each for one
// pod; their IDs are PCI addresses. A pod that asks for one gets no device file:
// its connections are carried on the device by the agent. What its container
// gets are environment variables that name the devices, and those of VFs also by
// the names and in the files of sriov-network-device-plugin, so that Multus
// hands a VF to smcr-cni.
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
//	sees either, listens, registers again
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
// A pod that came while the agent was away, and whose devices no agent has seen when
// kubelet is away too, is taken to have none until kubelet answers: then its link
// groups begin anew on what it has. All others have what the record says.
//
// With rails that do not reach each other a pod with one device reaches only
// pods on the same rail over SMC-R: let pods ask for one device per rail.
package deviceplugin
