// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"testing"

	"github.com/mdlayher/netlink"
)

func TestParseRDMA(t *testing.T) {
	e := netlink.NewAttributeEncoder()
	e.Uint32(rdmaAttrDevice, 7)
	e.String(rdmaAttrName, "rxe0")
	device, err := e.Encode()
	if err != nil {
		t.Fatal(err)
	}
	e.Uint32(rdmaAttrNetIndex, 2)
	port, err := e.Encode()
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		bytes []byte
		want  rdmaEntry
	}{{device, rdmaEntry{index: 7, name: "rxe0"}}, {port, rdmaEntry{index: 7, name: "rxe0", hasNetDev: true}}} {
		if got, err := parseRDMA(tt.bytes); err != nil || got != tt.want {
			t.Errorf("%+v, %v, want %+v", got, err, tt.want)
		}
	}
	if got, err := parseRDMA(port[:len(port)-3]); err == nil {
		t.Errorf("of a part: %+v", got)
	}
}

// A machine without RDMA has no such device, and that is no error.
func TestRDMADevicesIn_none(t *testing.T) {
	if got, err := RDMADevicesIn(newNS(t)); err != nil || len(got) != 0 {
		t.Errorf("%q, %v", got, err)
	}
}
