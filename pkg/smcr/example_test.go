// SPDX-License-Identifier: Apache-2.0

package smcr_test

import (
	"context"
	"fmt"
	"io"
	"log"
	"net/netip"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/soft"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
)

// Two stacks on one machine, each on a software RoCE device of its own. Where
// the peer may be anybody, take the option from package synopt instead of
// BothSpeak.
func Example() {
	open := func(addr string) (*soft.Device, *smcr.Stack) {
		dev, err := soft.Open(soft.Config{Name: "soft-" + addr, Addr: netip.MustParseAddr(addr), Port: testPort})
		if err != nil {
			log.Fatal(err)
		}
		stack, err := smcr.NewStack(smcr.Config{Devices: []rdma.Device{dev}, Option: smcr.BothSpeak{}})
		if err != nil {
			log.Fatal(err)
		}
		return dev, stack
	}
	clientDev, client := open("127.93.0.1")
	serverDev, server := open("127.93.0.2")

	ctx := context.Background()
	l, err := smcr.Listen(ctx, server, "tcp", "127.0.0.1:0")
	if err != nil {
		log.Fatal(err)
	}
	served := make(chan struct{})
	go func() { // an echo server
		defer close(served)
		c, err := l.Accept()
		if err != nil {
			log.Print(err)
			return
		}
		_, _ = io.Copy(c, c)
		_ = c.Close()
	}()

	nc, err := (&smcr.Dialer{Stack: client}).DialContext(ctx, "tcp", l.Addr().String())
	if err != nil {
		log.Fatal(err)
	}
	c := nc.(*smcr.Conn)
	fmt.Fprint(c, "hello over RDMA")
	_ = c.CloseWrite()
	answer, err := io.ReadAll(c)
	fmt.Printf("%s: %q, %v\n", c.Info().Mode, answer, err)

	_ = c.Close()
	<-served
	_ = l.Close()
	for _, closer := range []io.Closer{client, server, clientDev, serverDev} {
		if err := closer.Close(); err != nil {
			log.Print(err)
		}
	}
	// Output: SMC-R: "hello over RDMA", <nil>
}
