// SPDX-License-Identifier: Apache-2.0

//go:build !(linux && cgo && smcrsiw)

package main

import (
	"errors"
	"net/netip"
)

// openSIW is that of the program that guests with siw run.
func openSIW(netip.Addr) (way, error) {
	return nil, errors.New("this program was built without siw: it takes cgo and the tag smcrsiw")
}

func unlockMemory() error { return nil }
