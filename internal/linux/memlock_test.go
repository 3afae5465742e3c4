// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"testing"

	"golang.org/x/sys/unix"
)

func TestLockLimit(t *testing.T) {
	var l unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_MEMLOCK, &l); err != nil {
		t.Fatal(err)
	}
	bytes, free := LockLimit()
	if l.Cur == unix.RLIM_INFINITY && !free || l.Cur != unix.RLIM_INFINITY && bytes != l.Cur {
		t.Errorf("LockLimit = %d, %t; the limit is %d", bytes, free, l.Cur)
	}
}
