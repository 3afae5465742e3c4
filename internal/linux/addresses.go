// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
)

// Addresses returns the addresses of each network interface in ns, with the
// length of their prefix, but those of loopback and link-local ones.
func Addresses(ns *NetNS) (map[string][]netip.Prefix, error) {
	out := map[string][]netip.Prefix{}
	err := ns.Do(func() error {
		ifs, err := net.Interfaces()
		if err != nil {
			return err
		}
		var errs []error
		for _, i := range ifs {
			if i.Flags&net.FlagLoopback != 0 {
				continue
			}
			addrs, err := i.Addrs()
			errs = append(errs, err)
			for _, a := range addrs {
				p, err := netip.ParsePrefix(a.String())
				if err == nil && !p.Addr().IsLinkLocalUnicast() {
					out[i.Name] = append(out[i.Name], p)
				}
			}
		}
		return errors.Join(errs...)
	})
	if err != nil {
		return nil, fmt.Errorf("addresses in %s: %w", ns, err)
	}
	return out, nil
}
