// SPDX-License-Identifier: Apache-2.0

package vf

import (
	"errors"
	"testing"

	"github.com/vishvananda/netlink"
)

// TestHost_Check_changedInPod: the MAC address and the MTU of the interface are those of the wiring, of which no MTU means any.
func TestHost_Check_changedInPod(t *testing.T) {
	e := newEnv(t, 1, 1)
	w, err := e.h.Attach(t.Context(), e.request(0, 0))
	must(t, err)
	mac := []byte{2, 0, 0, 0, 7, 7}
	must(t, in(e.pods[0], func(h *netlink.Handle) error {
		l, err := h.LinkByName(w.IfName)
		if err != nil {
			return err
		}
		return errors.Join(h.LinkSetHardwareAddr(l, mac), h.LinkSetMTU(l, 1400))
	}))
	differs := func(property string) {
		t.Helper()
		var pe *PropertyError
		if err := e.h.Check(t.Context(), w); !errors.As(err, &pe) || pe.Property != property {
			t.Errorf("check: %v, want that the %s differs", err, property)
		}
	}
	differs("mac")
	w.MAC = "02:00:00:00:07:07"
	differs("mtu")
	w.MTU = 0
	must(t, e.h.Check(t.Context(), w))
	must(t, e.h.Detach(t.Context(), e.detachment(0, 0)))
}
