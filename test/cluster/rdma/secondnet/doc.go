// SPDX-License-Identifier: Apache-2.0

// The secondnet command is a CNI plugin that gives pods further networks, as Multus does: it is in the
// configuration list of the pods' first network, asks kubelet by its pod resources API which devices a pod got,
// and has the plugins of a further network called with a device of the network's resource as deviceID. What it
// did it remembers, so that DEL needs neither kubelet nor the pod.
//
//	{"type": "secondnet", "networks": [{"resource": "smcr.io/roce_vf", "list": {"name": "roce", "plugins": [...]}}]}
//
// The interfaces are net1, net2 and so on. A network is for the pods that have a device of its resource left.
//
// # Limitations
//
// Unlike Multus it reads no objects, so a pod's annotation does not choose networks, and it writes none. While
// the file hold is in its directory no pod is made: ADD fails, and the runtime tries again.
package main
