// SPDX-License-Identifier: Apache-2.0

package cpio

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// The kernel itself reads the archives in package lab; this is the layout of one.
func TestWriter(t *testing.T) {
	var w Writer
	w.Dir("d")
	w.File("d/f", 0o755, []byte("hello"))
	header := func(inode, mode, size, name string) string {
		return "070701" + inode + mode + strings.Repeat("0", 16) + "00000001" + strings.Repeat("0", 8) + size + strings.Repeat("0", 32) + name + strings.Repeat("0", 8)
	}
	want := header("00000001", "000041ED", "00000000", "00000002") + "d\x00" +
		header("00000002", "000081ED", "00000005", "00000004") + "d/f\x00\x00\x00" + "hello\x00\x00\x00" +
		header("00000003", "00000000", "00000000", "0000000B") + "TRAILER!!!\x00\x00\x00\x00"
	if diff := cmp.Diff(want, string(w.Part())); diff != "" {
		t.Errorf("archive (-want +got):\n%q", diff)
	}
}
