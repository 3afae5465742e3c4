// SPDX-License-Identifier: Apache-2.0

// Command smcr-cni is the chained CNI plugin of kube-smcr: it records which
// pods the node agent carries. See package internal/cni.
package main

import (
	"os"
	"runtime"
	"runtime/debug"

	"github.com/smcr-io/kube-smcr/internal/cni"
)

// init keeps main on the thread that the runtime's namespaces belong to, as
// CNI plugins do.
func init() { runtime.LockOSThread() }

func main() {
	version := "(devel)"
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" {
		version = info.Main.Version
	}
	os.Exit(cni.Main("CNI plugin smcr-cni " + version))
}
