// SPDX-License-Identifier: Apache-2.0

package rdmacm

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"reflect"
	"time"

	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// device is where commands go.
const device = "/dev/infiniband/rdma_cm"

// Commands and events, as include/uapi/rdma/rdma_user_cm.h has them.
const (
	cmdCreate, cmdDestroy, cmdBind, cmdResolveIP, cmdResolveRoute = 0, 1, 2, 3, 4
	cmdConnect, cmdListen, cmdAccept, cmdReject                   = 6, 7, 8, 9
	cmdDisconnect, cmdGetEvent                                    = 10, 12

	eventAddrResolved, eventRouteResolved, eventConnectRequest, eventEstablished, eventDisconnected = 0, 2, 4, 9, 10

	spaceTCP = 0x0106 // the ports are those of TCP
	typeRC   = 2      // reliable connections
)

// Sizes and places in what the kernel and we give each other.
const (
	sockaddrBytes = 28
	eventBytes    = 400 // room for an event

	paramBytes, paramData, paramDataLen, paramReads, paramValid = 272, 8, 264, 266, 271
	rejectBytes, rejectDataLen, rejectData                      = 264, 4, 8
	eventID, eventKind, eventStatus, eventParam                 = 8, 12, 16, 20
)

const (
	reads   = 16 // of both sides
	timeout = 10 * time.Second
	backlog = 16

	// MaxPrivateData is how much the kernel takes, with what iWARP needs of it.
	MaxPrivateData = 252
)

// CM is a user of rdma_cm.
type CM struct {
	f    *os.File
	page []byte // where the kernel writes answers
	id   uint32 // that connects or listens
	conn uint32 // that has a connection, if it is another one
	made bool   // conn is there
}

// New opens the device.
func New() (*CM, error) {
	f, err := os.OpenFile(device, os.O_RDWR, 0)
	if err != nil {
		return nil, fmt.Errorf("rdma_cm: %w", err)
	}
	page, err := unix.Mmap(-1, 0, os.Getpagesize(), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("rdma_cm: %w", err), f.Close())
	}
	c := &CM{f: f, page: page}
	b := binary.NativeEndian.AppendUint64(nil, 1) // our name for it
	b = binary.NativeEndian.AppendUint64(b, c.answer())
	b = binary.NativeEndian.AppendUint16(b, spaceTCP)
	if err := c.command(cmdCreate, append(b, typeRC, 0, 0, 0, 0, 0), 4); err != nil {
		return nil, errors.Join(fmt.Errorf("rdma_cm: create an ID: %w", err), c.Close())
	}
	c.id = binary.NativeEndian.Uint32(c.page)
	return c, nil
}

// Close ends what is connected.
func (c *CM) Close() error { return errors.Join(c.f.Close(), unix.Munmap(c.page)) }

// answer is the address of the page, which is no memory of Go's and stays.
func (c *CM) answer() uint64 { return uint64(reflect.ValueOf(c.page).Pointer()) }

// command has the kernel do something.
func (c *CM) command(cmd uint32, in []byte, out int) error {
	b := binary.NativeEndian.AppendUint32(nil, cmd)
	b = binary.NativeEndian.AppendUint16(b, uint16(len(in)))
	b = binary.NativeEndian.AppendUint16(b, uint16(out))
	_, err := c.f.Write(append(b, in...))
	return err
}

// event is what the kernel tells.
type event struct {
	id          uint32
	privateData []byte
}

// await waits for an event of a kind. The end of a connection that was forgotten is none.
func (c *CM) await(want uint32, d time.Duration) (event, error) {
	for deadline := time.Now().Add(d); ; {
		if err := c.readable(time.Until(deadline)); err != nil {
			return event{}, fmt.Errorf("await event %d: %w", want, err)
		}
		if err := c.command(cmdGetEvent, binary.NativeEndian.AppendUint64(nil, c.answer()), eventBytes); err != nil {
			return event{}, fmt.Errorf("get an event: %w", err)
		}
		word := func(at int) uint32 { return binary.NativeEndian.Uint32(c.page[at:]) }
		e := event{id: word(eventID)}
		kind, status := word(eventKind), int32(word(eventStatus))
		if kind == eventDisconnected && want != kind {
			continue
		}
		if kind != want || status != 0 {
			return e, fmt.Errorf("event %d with status %d, want event %d", kind, status, want)
		}
		param := c.page[eventParam:][:paramBytes]
		e.privateData = append(e.privateData, param[paramData:][:min(int(param[paramDataLen]), MaxPrivateData)]...)
		return e, nil
	}
}

// readable waits until there is an event.
func (c *CM) readable(d time.Duration) error {
	fds := []unix.PollFd{{Fd: int32(c.f.Fd()), Events: unix.POLLIN}}
	for deadline := time.Now().Add(d); ; {
		n, err := unix.Poll(fds, int(max(time.Until(deadline), 0)/time.Millisecond))
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return err
		case n == 0:
			return fmt.Errorf("none within %v: %w", d, os.ErrDeadlineExceeded)
		default:
			return nil
		}
	}
}

// sockaddr is an address of IPv4 in the room of one of IPv6.
func sockaddr(a netip.AddrPort) []byte {
	b := binary.NativeEndian.AppendUint16(nil, unix.AF_INET)
	b = binary.BigEndian.AppendUint16(b, a.Port())
	ip := a.Addr().As4()
	return append(append(b, ip[:]...), make([]byte, sockaddrBytes-8)...)
}

// connParam says which queue pair is to be connected.
func connParam(q rdma.QPN, privateData []byte) ([]byte, error) {
	if len(privateData) > MaxPrivateData {
		return nil, fmt.Errorf("%d bytes of private data, want at most %d: %w", len(privateData), MaxPrivateData, rdma.ErrInvalid)
	}
	b := make([]byte, paramBytes)
	binary.NativeEndian.PutUint32(b, uint32(q))
	b[paramDataLen] = byte(copy(b[paramData:], privateData))
	b[paramReads], b[paramReads+1] = reads, reads // served and asked
	b[paramValid] = 1
	return b, nil
}

func words(v ...uint32) (b []byte) {
	for _, w := range v {
		b = binary.NativeEndian.AppendUint32(b, w)
	}
	return b
}

// Connect connects a queue pair in INIT from an address to a listener, and returns the private data of
// its Reply.
func (c *CM) Connect(q rdma.QPN, from netip.Addr, to netip.AddrPort, privateData []byte) ([]byte, error) {
	param, err := connParam(q, privateData)
	wait := uint32(timeout.Milliseconds())
	for _, step := range []struct {
		cmd   uint32
		in    []byte
		event uint32
	}{
		{cmdResolveIP, append(append(sockaddr(netip.AddrPortFrom(from, 0)), sockaddr(to)...), words(c.id, wait)...), eventAddrResolved},
		{cmdResolveRoute, words(c.id, wait), eventRouteResolved},
		{cmdConnect, append(param, words(c.id, 0, 0, 0)...), eventEstablished},
	} {
		if err == nil {
			err = c.command(step.cmd, step.in, 0)
		}
		var e event
		if err == nil {
			e, err = c.await(step.event, timeout)
		}
		if err == nil && step.event == eventEstablished {
			c.conn = c.id
			return e.privateData, nil
		}
	}
	return nil, fmt.Errorf("rdma_cm: connect to %v: %w", to, err)
}

// Listen listens at an address.
func (c *CM) Listen(at netip.AddrPort) error {
	b := binary.NativeEndian.AppendUint64(nil, 0)
	err := c.command(cmdBind, append(append(b, sockaddr(at)...), words(c.id)...), 0)
	if err == nil {
		err = c.command(cmdListen, words(c.id, backlog), 0)
	}
	if err != nil {
		return fmt.Errorf("rdma_cm: listen on %v: %w", at, err)
	}
	return nil
}

// Await waits for the next client of a listener, and returns its private data. [CM.Accept] takes it.
func (c *CM) Await(d time.Duration) ([]byte, error) {
	if err := c.forget(); err != nil {
		return nil, fmt.Errorf("rdma_cm: forget the connection before: %w", err)
	}
	e, err := c.await(eventConnectRequest, d)
	if err != nil {
		return nil, fmt.Errorf("rdma_cm: %w", err)
	}
	c.conn, c.made = e.id, true
	return e.privateData, nil
}

// forget forgets the connection that was accepted before.
func (c *CM) forget() error {
	if !c.made {
		return nil
	}
	c.made = false
	b := binary.NativeEndian.AppendUint64(nil, c.answer())
	return c.command(cmdDestroy, append(b, words(c.conn, 0)...), 4)
}

// Accept connects a queue pair in INIT to the client that was awaited.
func (c *CM) Accept(q rdma.QPN, privateData []byte) error {
	param, err := connParam(q, privateData)
	if err == nil {
		b := append(binary.NativeEndian.AppendUint64(nil, 2), param...)
		err = c.command(cmdAccept, append(b, words(c.conn, 0, 0, 0)...), 0)
	}
	if err == nil {
		_, err = c.await(eventEstablished, timeout)
	}
	if err != nil {
		return fmt.Errorf("rdma_cm: accept: %w", err)
	}
	return nil
}

// Reject refuses the client that was awaited.
func (c *CM) Reject(privateData []byte) error {
	if len(privateData) > MaxPrivateData {
		return fmt.Errorf("rdma_cm: reject with %d bytes of private data, want at most %d: %w", len(privateData), MaxPrivateData, rdma.ErrInvalid)
	}
	b := make([]byte, rejectBytes)
	copy(b, words(c.conn))
	b[rejectDataLen] = byte(copy(b[rejectData:], privateData))
	if err := c.command(cmdReject, b, 0); err != nil {
		return fmt.Errorf("rdma_cm: reject: %w", err)
	}
	return nil
}

// AwaitEnd waits until the peer has ended the connection in order.
func (c *CM) AwaitEnd(d time.Duration) error {
	if _, err := c.await(eventDisconnected, d); err != nil {
		return fmt.Errorf("rdma_cm: %w", err)
	}
	return nil
}

// Disconnect ends the connection in order.
func (c *CM) Disconnect() error {
	if err := c.command(cmdDisconnect, words(c.conn, 0), 0); err != nil {
		return fmt.Errorf("rdma_cm: disconnect: %w", err)
	}
	return nil
}
