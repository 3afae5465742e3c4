// SPDX-License-Identifier: Apache-2.0

package testenv

import (
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
)

// What another thread of the process may do says nothing about the calling one: a test of
// another user's rights once ran on the first thread, and the tests after it were refused.
func TestHaveCaps_thread(t *testing.T) {
	Need(t, NetAdmin)
	got := make(chan error)
	go func() {
		runtime.LockOSThread() // and the thread ends with the goroutine
		hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
		var none [2]unix.CapUserData
		if err := unix.Capset(&hdr, &none[0]); err != nil {
			got <- nil
			return
		}
		got <- haveCaps(capNetAdmin)
	}()
	if err := <-got; err == nil {
		t.Error("a thread without capabilities has them")
	}
	if err := haveCaps(capNetAdmin); err != nil {
		t.Errorf("the thread of the test: %v", err)
	}
}
