// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import "testing"

func TestIsPCIAddress(t *testing.T) {
	for s, want := range map[string]bool{
		"0000:01:10.2": true, "0000:3B:02.1": true, "10000:e1:00.0": false, "0000:01:10": false, "0000:01:10.g": false, "": false, "0000.01:10.2": false,
	} {
		if isPCIAddress(s) != want {
			t.Errorf("isPCIAddress(%q) = %v", s, !want)
		}
	}
}
