// SPDX-License-Identifier: Apache-2.0

package files

import (
	"os"
	"syscall"
)

// Unlinked tells whether the directory at a path was removed, and only a mount still shows
// it: whatever is made at its former place since then is not seen there. A process in a
// container sees the new directory once the container starts again.
func Unlinked(dir string) bool {
	st, err := os.Stat(dir)
	if err != nil {
		return false
	}
	sys, ok := st.Sys().(*syscall.Stat_t)
	return ok && st.IsDir() && sys.Nlink == 0
}
