// SPDX-License-Identifier: Apache-2.0

package portmapper_test

import (
	"context"
	"fmt"
	"net/netip"

	"github.com/smcr-io/kube-smcr/pkg/sdp/portmapper"
)

// A server says where a service listens for SDP, and a client asks it.
func Example() {
	s, err := portmapper.Listen(netip.MustParseAddrPort("127.0.0.1:0"), portmapper.ServerConfig{})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer func() { _ = s.Close() }()
	service := netip.MustParseAddrPort("127.0.0.1:5001")
	if err := s.Map(service, netip.MustParseAddrPort("127.0.0.1:35001")); err != nil {
		fmt.Println(err)
		return
	}

	c, err := portmapper.NewClient(portmapper.ClientConfig{MapperPort: s.Addr().Port()})
	if err != nil {
		fmt.Println(err)
		return
	}
	from := netip.MustParseAddrPort("127.0.0.1:40000") // where the connection will come from
	fmt.Println(c.Lookup(context.Background(), service, from))
	_, err = c.Lookup(context.Background(), netip.MustParseAddrPort("127.0.0.1:80"), from)
	fmt.Println(err) // so it is plain TCP
	// Output:
	// 127.0.0.1:35001 <nil>
	// look up the SDP address of 127.0.0.1:80: denied
}
