// SPDX-License-Identifier: Apache-2.0

//go:build linux && cgo

package verbs_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// Commands and events of /dev/infiniband/rdma_cm, as include/uapi/rdma/rdma_user_cm.h has them.
const (
	cmCreate, cmBind, cmResolveIP, cmResolveRoute, cmConnect, cmListen, cmAccept, cmGetEvent = 0, 2, 3, 4, 6, 7, 8, 12

	cmAddrResolved, cmRouteResolved, cmConnectRequest, cmEstablished = 0, 2, 4, 9

	cmTCP     = 0x0106 // the ports are those of TCP
	cmRC      = 2      // reliable connections
	cmReads   = 16     // of both sides
	cmTimeout = 10 * time.Second

	connParamBytes, sockaddrBytes, eventBytes = 272, 28, 400
)

// An rdmaCM is one user of rdma_cm, which connects one queue pair.
type rdmaCM struct {
	f    *os.File
	page []byte // where the kernel writes answers
	id   uint32
}

func newRDMACM(t testing.TB) *rdmaCM {
	t.Helper()
	f, err := os.OpenFile("/dev/infiniband/rdma_cm", os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	page, err := unix.Mmap(-1, 0, os.Getpagesize(), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		t.Fatal(err)
	}
	c := &rdmaCM{f: f, page: page}
	t.Cleanup(func() { // the kernel ends the connection
		if err := errors.Join(f.Close(), unix.Munmap(page)); err != nil {
			t.Error(err)
		}
	})
	b := binary.NativeEndian.AppendUint64(nil, 1) // our name for it
	b = binary.NativeEndian.AppendUint64(b, c.answer())
	b = binary.NativeEndian.AppendUint16(b, cmTCP)
	c.must(t, "create an ID", c.command(cmCreate, append(b, cmRC, 0, 0, 0, 0, 0), 4))
	c.id = binary.NativeEndian.Uint32(c.page)
	return c
}

func (c *rdmaCM) must(t testing.TB, what string, err error) {
	t.Helper()
	if err != nil {
		t.Fatalf("rdma_cm: %s: %v", what, err)
	}
}

func (c *rdmaCM) answer() uint64 { return uint64(uintptr(unsafe.Pointer(&c.page[0]))) }

// command has the kernel do something.
func (c *rdmaCM) command(cmd uint32, in []byte, out int) error {
	b := binary.NativeEndian.AppendUint32(nil, cmd)
	b = binary.NativeEndian.AppendUint16(b, uint16(len(in)))
	b = binary.NativeEndian.AppendUint16(b, uint16(out))
	_, err := c.f.Write(append(b, in...))
	return err
}

// event waits for an event and returns the ID that it is of.
func (c *rdmaCM) event(want uint32) (id uint32, err error) {
	fds := []unix.PollFd{{Fd: int32(c.f.Fd()), Events: unix.POLLIN}}
	for deadline := time.Now().Add(cmTimeout); ; {
		n, err := unix.Poll(fds, int(max(time.Until(deadline), 0)/time.Millisecond))
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil:
			return 0, err
		case n == 0:
			return 0, fmt.Errorf("no event %d after %v", want, cmTimeout)
		}
		break
	}
	if err := c.command(cmGetEvent, binary.NativeEndian.AppendUint64(nil, c.answer()), eventBytes); err != nil {
		return 0, fmt.Errorf("get an event: %w", err)
	}
	id, got, status := binary.NativeEndian.Uint32(c.page[8:]), binary.NativeEndian.Uint32(c.page[12:]), int32(binary.NativeEndian.Uint32(c.page[16:]))
	if got != want || status != 0 {
		return 0, fmt.Errorf("event %d with status %d, want event %d", got, status, want)
	}
	return id, nil
}

// sockaddr is an address of IPv4 in the room of one of IPv6.
func sockaddr(a netip.AddrPort) []byte {
	b := binary.NativeEndian.AppendUint16(nil, unix.AF_INET)
	b = binary.BigEndian.AppendUint16(b, a.Port())
	ip := a.Addr().As4()
	return append(append(b, ip[:]...), make([]byte, sockaddrBytes-8)...)
}

// connParam says which queue pair is to be connected.
func connParam(q rdma.QP) []byte {
	b := make([]byte, connParamBytes)
	binary.NativeEndian.PutUint32(b, uint32(q.Num()))
	b[connParamBytes-6], b[connParamBytes-5] = cmReads, cmReads // served and asked
	b[connParamBytes-1] = 1                                     // it is valid
	return b
}

func words(v ...uint32) (b []byte) {
	for _, w := range v {
		b = binary.NativeEndian.AppendUint32(b, w)
	}
	return b
}

// connect connects a queue pair from an address to a listener.
func (c *rdmaCM) connect(q rdma.QP, from netip.Addr, to netip.AddrPort) error {
	b := append(sockaddr(netip.AddrPortFrom(from, 0)), sockaddr(to)...)
	err := c.command(cmResolveIP, append(b, words(c.id, uint32(cmTimeout.Milliseconds()))...), 0)
	if err == nil {
		_, err = c.event(cmAddrResolved)
	}
	if err == nil {
		err = c.command(cmResolveRoute, words(c.id, uint32(cmTimeout.Milliseconds())), 0)
	}
	if err == nil {
		_, err = c.event(cmRouteResolved)
	}
	if err == nil {
		err = c.command(cmConnect, append(connParam(q), words(c.id, 0, 0, 0)...), 0)
	}
	if err == nil {
		_, err = c.event(cmEstablished)
	}
	return err
}

// listen listens at an address.
func (c *rdmaCM) listen(at netip.AddrPort) error {
	b := binary.NativeEndian.AppendUint64(nil, 0)
	err := c.command(cmBind, append(append(b, sockaddr(at)...), words(c.id)...), 0)
	if err == nil {
		err = c.command(cmListen, words(c.id, 1), 0)
	}
	return err
}

// accept connects a queue pair to who comes.
func (c *rdmaCM) accept(q rdma.QP) error {
	id, err := c.event(cmConnectRequest)
	if err == nil {
		b := append(binary.NativeEndian.AppendUint64(nil, 2), connParam(q)...)
		err = c.command(cmAccept, append(b, words(id, 0, 0, 0)...), 0)
	}
	if err == nil {
		_, err = c.event(cmEstablished)
	}
	return err
}
