// SPDX-License-Identifier: Apache-2.0

package clc_test

import (
	"fmt"
	"net/netip"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
)

// Two pods on nodes with different subnets: version 1 cannot connect them,
// version 2 does, because their configurations have an enterprise ID in common.
func Example() {
	now := time.Unix(0, 0)
	uid, err := clc.ParseUEID("POD-NETWORK")
	if err != nil {
		fmt.Println(err)
		return
	}
	settings := func(subnet string) clc.Config {
		return clc.Config{
			Hostname: "node", OS: clc.OSLinux,
			Support: clc.Support{
				V1: true, Subnets: []netip.Prefix{netip.MustParsePrefix(subnet)},
				V2: true, EIDs: []clc.EID{uid}, Release: clc.Release1,
			},
		}
	}
	gid := rdma.GIDFromAddr(netip.MustParseAddr("192.0.2.7"))

	cfg := settings("10.1.0.0/24")
	client := clc.NewClient(cfg)
	server := clc.NewServer(now, settings("10.2.0.0/24"))
	proposal, err := cfg.Proposal(clc.Offer{GIDv2: gid})
	if err != nil {
		fmt.Println(err)
		return
	}
	client.Propose(now, proposal)

	// The shell's part: carry the bytes over TCP, set up RDMA, answer.
	deliver := func(b []byte, want func() int, handle func(time.Time, []byte) error) {
		for len(b) > 0 {
			n := want()
			if err := handle(now, b[:n]); err != nil {
				fmt.Println(err)
			}
			b = b[n:]
		}
	}
	endpoint := clc.Endpoint{FirstContact: true, GID: gid, QPN: 17, RMBEIndex: 1, AlertToken: 1, MTU: rdma.MTU1024}
	endpoint.Ext.Direct = true
	for range 4 {
		for _, o := range client.Poll(nil) {
			switch o.Kind {
			case clc.OutputSend:
				deliver(o.Data, server.Want, server.HandleData)
			case clc.OutputAccepted:
				fmt.Println("client:", o.Selected.Version, o.Selected.EID, "connections:", o.Selected.MaxConns)
				client.Confirm(now, clc.Confirm{Endpoint: endpoint}, o.Accept.FirstContact)
			}
		}
		for _, o := range server.Poll(nil) {
			switch o.Kind {
			case clc.OutputSend:
				deliver(o.Data, client.Want, client.HandleData)
			case clc.OutputProposed:
				fmt.Println("server:", o.Selected.Version, o.Selected.EID, "connections:", o.Selected.MaxConns)
				server.Accept(now, clc.Accept{Endpoint: endpoint})
			case clc.OutputConfirmed:
				fmt.Println("links may also end at", o.Confirm.GIDs)
			}
		}
	}
	fmt.Println(client.State(), server.State())
	// Output:
	// server: 2 POD-NETWORK connections: 255
	// client: 2 POD-NETWORK connections: 255
	// links may also end at [::ffff:192.0.2.7]
	// LinkSetup LinkSetup
}
