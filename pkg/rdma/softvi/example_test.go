// SPDX-License-Identifier: Apache-2.0

package softvi_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"net/netip"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/softvi"
)

// endpoint is one queue pair of a device, and memory for it.
type endpoint struct {
	rdma.Context
	cq rdma.CQ
	mr rdma.MR
	qp rdma.QP
}

func newEndpoint(d *softvi.Device) (e endpoint, err error) {
	if e.Context, err = d.Open(); err != nil {
		return e, err
	}
	pd, errPD := e.AllocPD()
	cq, errCQ := e.CreateCQ(16)
	if err := errors.Join(errPD, errCQ); err != nil {
		return e, err
	}
	e.cq = cq
	if e.mr, err = pd.AllocMR(4096, rdma.LocalWrite); err != nil {
		return e, err
	}
	if e.qp, err = pd.CreateQP(rdma.QPConfig{SendCQ: cq, RecvCQ: cq, MaxSendWR: 8, MaxRecvWR: 8}); err != nil {
		return e, err
	}
	return e, e.qp.Modify(rdma.QPAttr{State: rdma.QPInit})
}

// next waits for the next completion.
func (e *endpoint) next() (rdma.WC, error) {
	var wc [1]rdma.WC
	for {
		n, err := e.cq.Poll(wc[:])
		if n == 1 || err != nil {
			return wc[0], err
		}
		if err := e.cq.Arm(false); err != nil {
			return wc[0], err
		}
		if n, err = e.cq.Poll(wc[:]); n == 1 || err != nil { // it came before Arm
			return wc[0], err
		}
		<-e.cq.Notify()
	}
}

// A server listens for a name, a client calls it, and sends it a message.
func Example() {
	d, err := softvi.Open(softvi.Config{Name: "vi0", Addr: netip.MustParseAddr("127.0.0.1")})
	if err != nil {
		log.Fatal(err)
	}
	defer func() { _ = d.Close() }()
	server, errServer := newEndpoint(d)
	client, errClient := newEndpoint(d)
	l, errListen := d.Listen("greeter")
	if err := errors.Join(errServer, errClient, errListen); err != nil {
		log.Fatal(err)
	}

	served := make(chan error, 1)
	go func() {
		sge := rdma.SGE{Addr: server.mr.Addr(), Length: 64, LKey: server.mr.LKey()}
		_, err := server.qp.PostRecv([]rdma.RecvWR{{SGE: sge}}) // what is sent before waits
		var r *softvi.Request
		if err == nil {
			r, err = l.Accept(context.Background())
		}
		if err == nil {
			_, err = r.Accept(server.qp, softvi.Options{})
		}
		var wc rdma.WC
		if err == nil {
			wc, err = server.next()
		}
		if err == nil {
			fmt.Printf("%v: %s\n", wc.Op, server.mr.Bytes()[:wc.Bytes])
		}
		served <- err
	}()

	to := softvi.Addr{IP: netip.MustParseAddr("127.0.0.1"), Discriminator: "greeter"}
	if _, err := d.Dial(context.Background(), client.qp, to, softvi.Options{}); err != nil {
		log.Fatal(err)
	}
	n := copy(client.mr.Bytes(), "hello")
	sge := rdma.SGE{Addr: client.mr.Addr(), Length: uint32(n), LKey: client.mr.LKey()}
	if _, err := client.qp.PostSend([]rdma.SendWR{{Op: rdma.OpSend, SGL: []rdma.SGE{sge}}}); err != nil {
		log.Fatal(err)
	}
	if err := <-served; err != nil {
		log.Fatal(err)
	}
	if err := errors.Join(client.Close(), server.Close()); err != nil {
		log.Fatal(err)
	}
	// Output: RECV: hello
}
