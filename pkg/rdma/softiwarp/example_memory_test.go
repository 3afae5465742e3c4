// SPDX-License-Identifier: Apache-2.0

package softiwarp_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log"
	"net/netip"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/iwarp"
	"github.com/smcr-io/kube-smcr/pkg/rdma/softiwarp"
)

// shelf is memory that a server lets its client write and read.
type shelf struct {
	endpoint
	pd rdma.PD
}

// newShelf makes a queue pair and a region whose keys open it for the peer. The queue pair must
// allow it, too.
func newShelf(d *softiwarp.Device) (s shelf, err error) {
	const access = rdma.LocalWrite | rdma.RemoteWrite | rdma.RemoteRead
	if s.Context, err = d.Open(); err != nil {
		return s, err
	}
	if s.pd, err = s.AllocPD(); err != nil {
		return s, err
	}
	if s.cq, err = s.CreateCQ(16); err != nil {
		return s, err
	}
	if s.mr, err = s.pd.AllocMR(1<<20, access); err != nil {
		return s, err
	}
	if s.qp, err = s.pd.CreateQP(rdma.QPConfig{SendCQ: s.cq, RecvCQ: s.cq, MaxSendWR: 8, MaxRecvWR: 8}); err != nil {
		return s, err
	}
	return s, s.qp.Modify(rdma.QPAttr{State: rdma.QPInit, Access: access})
}

// ticket is what the client has to know of the region: it travels as private data.
func (s *shelf) ticket() []byte {
	b := binary.BigEndian.AppendUint64(nil, s.mr.Addr())
	return binary.BigEndian.AppendUint32(b, uint32(s.mr.RKey()))
}

// move posts one WRITE or READ between the beginnings of the regions, and waits for its end.
func (s *shelf) move(op rdma.Opcode, off, n int, ticket []byte) error {
	_, err := s.qp.PostSend([]rdma.SendWR{{
		Op: op, Flags: rdma.SendSignaled,
		SGL:        []rdma.SGE{{Addr: s.mr.Addr() + uint64(off), Length: uint32(n), LKey: s.mr.LKey()}},
		RemoteAddr: binary.BigEndian.Uint64(ticket), RKey: rdma.RKey(binary.BigEndian.Uint32(ticket[8:])),
	}})
	if err != nil {
		return err
	}
	wc, err := s.next()
	if err == nil && wc.Status != rdma.StatusSuccess {
		err = fmt.Errorf("%v: %v", op, wc.Status)
	}
	return err
}

// A client writes into the server's memory and reads it again. The server's program does nothing
// meanwhile.
func Example_memory() {
	d, err := softiwarp.Open(softiwarp.Config{Name: "iw0", Addr: netip.MustParseAddr("127.0.0.1")})
	if err != nil {
		log.Fatal(err)
	}
	defer func() { _ = d.Close() }()
	server, errServer := newShelf(d)
	client, errClient := newShelf(d)
	l, errListen := d.Listen(":0")
	if err := errors.Join(errServer, errClient, errListen); err != nil {
		log.Fatal(err)
	}

	accepted := make(chan error, 1)
	go func() {
		r, err := l.Accept(context.Background())
		if err == nil {
			err = r.Accept(context.Background(), server.qp, softiwarp.ConnectOptions{PrivateData: server.ticket()})
		}
		accepted <- err
	}()
	options := softiwarp.ConnectOptions{MaxULPDU: iwarp.MaxOwnULPDU} // long FPDUs: the peer is software, too
	ticket, err := d.Dial(context.Background(), client.qp, l.Addr().String(), options)
	if err := errors.Join(err, <-accepted); err != nil {
		log.Fatal(err)
	}

	n := copy(client.mr.Bytes(), "over there and back")
	if err := client.move(rdma.OpWrite, 0, n, ticket); err != nil {
		log.Fatal(err)
	}
	// The READ comes behind the WRITE: when it has ended, the server's memory has the bytes.
	if err := client.move(rdma.OpRead, 4096, n, ticket); err != nil {
		log.Fatal(err)
	}
	fmt.Printf("%s\n", server.mr.Bytes()[:n])
	fmt.Printf("%s\n", client.mr.Bytes()[4096:][:n])
	if err := errors.Join(d.Disconnect(client.qp), client.Close(), server.Close()); err != nil {
		log.Fatal(err)
	}
	// Output:
	// over there and back
	// over there and back
}
