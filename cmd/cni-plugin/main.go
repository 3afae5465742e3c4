// SPDX-License-Identifier: Apache-2.0

// Command smcr-cni is the CNI plugin of kube-smcr: it writes the records by which the node
// agent finds pods, and wires RDMA devices into pods. See package internal/cni.
package main

import (
	"os"
	"runtime"

	"github.com/smcr-io/kube-smcr/internal/cni"
	"github.com/smcr-io/kube-smcr/internal/version"
)

// init keeps main on one thread, as CNI plugins must: a network namespace is a property of
// a thread.
func init() { runtime.LockOSThread() }

// about is printed when the plugin is called by hand.
const about = `smcr-cni attaches pods to the node agent of kube-smcr, and wires RDMA devices
into them. Container runtimes and Multus execute it with a network configuration
on its standard input:

  {"type": "smcr-cni"}                                   behind the plugin that makes the interface
  {"type": "smcr-cni", "deviceID": "0000:41:10.2",       makes the interface of a VF
   "vlan": 100, "ipam": {"type": "host-local", ...}}

Every field, and what each error means: docs/vf.md of kube-smcr.

CNI plugin smcr-cni `

func main() {
	os.Exit(cni.Main(about + version.String()))
}
