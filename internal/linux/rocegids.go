// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

const (
	// rdmaClass is where the kernel shows RDMA devices.
	rdmaClass = "/sys/class/infiniband"
	// maxGIDs bounds the look through the GIDs of a port, whose tables have 16 to 1024 places.
	maxGIDs = 1024
)

// RoCEv2GIDs returns the IPv4 addresses that are GIDs of RoCE v2 at a port of an RDMA device, in the order of their index.
func RoCEv2GIDs(device string, port uint8) []netip.Addr {
	return roceV2GIDs(filepath.Join(rdmaClass, device, "ports", strconv.Itoa(int(port))))
}

func roceV2GIDs(dir string) (out []netip.Addr) {
	text := func(kind string, i int) (string, bool) {
		b, err := os.ReadFile(filepath.Join(dir, kind, strconv.Itoa(i)))
		return strings.TrimSpace(string(b)), err == nil // the kernel refuses to tell of a place that is free
	}
	for i := range maxGIDs {
		t, ok := text("gids", i)
		if !ok {
			break
		}
		a, err := netip.ParseAddr(t)
		if err != nil || !a.Is4In6() {
			continue
		}
		if typ, ok := text("gid_attrs/types", i); ok && typ == "RoCE v2" {
			out = append(out, a.Unmap())
		}
	}
	return out
}
