// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import "strings"

// isPCIAddress says whether s is a PCI address: domain, bus, device, function.
func isPCIAddress(s string) bool {
	const form = "hhhh:hh:hh.h"
	if len(s) != len(form) {
		return false
	}
	for i, c := range []byte(strings.ToLower(s)) {
		if hex := '0' <= c && c <= '9' || 'a' <= c && c <= 'f'; form[i] == 'h' && !hex || form[i] != 'h' && c != form[i] {
			return false
		}
	}
	return true
}
