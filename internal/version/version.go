// SPDX-License-Identifier: Apache-2.0

package version

import (
	"cmp"
	"runtime/debug"
)

// linked is set by the linker, or empty.
var linked string

// String is the version of this program.
func String() string {
	built := ""
	if bi, ok := debug.ReadBuildInfo(); ok {
		built = bi.Main.Version
	}
	return choose(linked, built)
}

func choose(linked, built string) string { return cmp.Or(linked, built, "unknown") }
