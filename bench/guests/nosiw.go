// SPDX-License-Identifier: Apache-2.0

//go:build !(linux && cgo && smcrsiw)

package main

import (
	"errors"
	"net/netip"
)

// openSIW is that of the program that the guests run.
func openSIW(netip.Addr) (siw, error) {
	return nil, errors.New("this program was built without siw: it takes cgo and the tag smcrsiw")
}
