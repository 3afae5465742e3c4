// SPDX-License-Identifier: Apache-2.0

package soft

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// linkWatch follows the interface that has an address, by the notifications
// of a netlink socket, which stays in its network namespace.
type linkWatch struct {
	addr    netip.Addr // without its zone
	zone    string     // of the address: an interface's name or index; "": any
	file    *os.File
	changed chan struct{}
	state   atomic.Pointer[LinkState]
	wg      sync.WaitGroup

	// owned by watchLink, then by the goroutine
	links map[int32]linkInfo
	addrs map[addrKey]struct{} // addresses that are or cover addr
	seq   uint32
}

type linkInfo struct {
	name     string
	mac      rdma.MAC
	mtu      int
	up       bool
	loopback bool
}

type addrKey struct {
	index int32
	bits  uint8
	addr  netip.Addr
}

// bitsFor is the length of the subnet of an address; a single address tells
// nothing about who else is on its link.
func (k addrKey) bitsFor(a netip.Addr) int {
	if int(k.bits) == a.BitLen() {
		return 0
	}
	return int(k.bits)
}

// netlinkBuffer holds the largest dump message of the kernel.
const netlinkBuffer = 64 << 10

// lookAgainAfter is the pause after a look at all links and addresses that failed: so many may change
// that the socket overruns meanwhile.
const lookAgainAfter = 100 * time.Millisecond

// watchLink opens the socket and reads the state of all links and addresses.
func watchLink(addr netip.Addr) (*linkWatch, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open netlink socket: %w", err)
	}
	groups := uint32(unix.RTMGRP_LINK | unix.RTMGRP_IPV4_IFADDR | unix.RTMGRP_IPV6_IFADDR)
	if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: groups}); err != nil {
		_ = unix.Close(fd)
		return nil, fmt.Errorf("bind netlink socket: %w", err)
	}
	w := &linkWatch{
		addr:    addr.WithZone(""),
		zone:    addr.Zone(),
		file:    os.NewFile(uintptr(fd), "netlink"),
		changed: make(chan struct{}, 1),
	}
	if err := w.dump(); err != nil {
		_ = w.file.Close()
		return nil, err
	}
	s := w.compute()
	w.state.Store(&s)
	return w, nil
}

func (w *linkWatch) get() LinkState { return *w.state.Load() }

// index returns the interface of the address, 0 if there is none.
func (w *linkWatch) index() int32 {
	k, _ := w.holder()
	return k.index
}

func (w *linkWatch) start() {
	w.wg.Add(1)
	go w.loop()
}

func (w *linkWatch) close() error {
	err := w.file.Close()
	w.wg.Wait()
	return err
}

// loop reads notifications until the socket is closed.
func (w *linkWatch) loop() {
	defer w.wg.Done()
	buf := make([]byte, netlinkBuffer)
	lost := false // notifications were: everything is looked at again when the deadline has passed
	for {
		n, err := w.file.Read(buf)
		switch {
		case err == nil:
			_, _ = w.parse(buf[:n])
		case lost && errors.Is(err, unix.ENOBUFS):
		case errors.Is(err, unix.ENOBUFS), errors.Is(err, os.ErrDeadlineExceeded):
			lost = w.lookAgain() != nil
		default:
			return
		}
		if s := w.compute(); s != w.get() {
			w.state.Store(&s)
			select {
			case w.changed <- struct{}{}:
			default:
			}
		}
	}
}

// lookAgain is dump. After an error what was known stands, and the socket has a read deadline for the next try.
func (w *linkWatch) lookAgain() error {
	_ = w.file.SetReadDeadline(time.Time{}) // an error is that of a closed file, which a read has, too
	links, addrs := w.links, w.addrs
	err := w.dump()
	if err != nil {
		w.links, w.addrs = links, addrs
		_ = w.file.SetReadDeadline(time.Now().Add(lookAgainAfter))
	}
	return err
}

// dump reads all links and addresses anew.
func (w *linkWatch) dump() error {
	w.links = make(map[int32]linkInfo)
	w.addrs = make(map[addrKey]struct{})
	buf := make([]byte, netlinkBuffer)
	for _, typ := range []uint16{unix.RTM_GETLINK, unix.RTM_GETADDR} {
		w.seq++
		req := make([]byte, 0, unix.NLMSG_HDRLEN+unix.SizeofIfInfomsg)
		req = binary.NativeEndian.AppendUint32(req, unix.NLMSG_HDRLEN+unix.SizeofIfInfomsg)
		req = binary.NativeEndian.AppendUint16(req, typ)
		req = binary.NativeEndian.AppendUint16(req, unix.NLM_F_REQUEST|unix.NLM_F_DUMP)
		req = binary.NativeEndian.AppendUint32(req, w.seq)
		req = binary.NativeEndian.AppendUint32(req, 0)
		req = append(req, make([]byte, unix.SizeofIfInfomsg)...)
		if _, err := w.file.Write(req); err != nil {
			return fmt.Errorf("ask for links and addresses: %w", err)
		}
		for done := false; !done; {
			n, err := w.file.Read(buf)
			if err != nil {
				return fmt.Errorf("read links and addresses: %w", err)
			}
			if done, err = w.parse(buf[:n]); err != nil {
				return err
			}
		}
	}
	return nil
}

// parse takes netlink messages in; done means that the current dump ended.
func (w *linkWatch) parse(b []byte) (done bool, err error) {
	for len(b) >= unix.NLMSG_HDRLEN {
		n := int(binary.NativeEndian.Uint32(b))
		if n < unix.NLMSG_HDRLEN || n > len(b) {
			return done, errors.New("netlink message is cut off")
		}
		typ, seq := binary.NativeEndian.Uint16(b[4:]), binary.NativeEndian.Uint32(b[8:])
		body := b[unix.NLMSG_HDRLEN:n]
		switch typ {
		case unix.NLMSG_DONE:
			done = done || seq == w.seq
		case unix.NLMSG_ERROR:
			if len(body) >= 4 {
				if e := -int32(binary.NativeEndian.Uint32(body)); e != 0 {
					return done, fmt.Errorf("netlink: %w", unix.Errno(e))
				}
			}
		case unix.RTM_NEWLINK, unix.RTM_DELLINK:
			w.parseLink(typ == unix.RTM_NEWLINK, body)
		case unix.RTM_NEWADDR, unix.RTM_DELADDR:
			w.parseAddr(typ == unix.RTM_NEWADDR, body)
		}
		b = b[min((n+3)&^3, len(b)):]
	}
	return done, nil
}

// attrs calls f for each attribute.
func attrs(b []byte, f func(typ uint16, val []byte)) {
	for len(b) >= unix.SizeofRtAttr {
		n := int(binary.NativeEndian.Uint16(b))
		if n < unix.SizeofRtAttr || n > len(b) {
			return
		}
		f(binary.NativeEndian.Uint16(b[2:]), b[unix.SizeofRtAttr:n])
		b = b[min((n+3)&^3, len(b)):]
	}
}

func (w *linkWatch) parseLink(added bool, b []byte) {
	if len(b) < unix.SizeofIfInfomsg {
		return
	}
	index := int32(binary.NativeEndian.Uint32(b[4:]))
	flags := binary.NativeEndian.Uint32(b[8:])
	if !added {
		if b[0] == unix.AF_UNSPEC { // bridges tell about their ports in their own family
			delete(w.links, index)
		}
		return
	}
	l := w.links[index]
	l.up = flags&unix.IFF_UP != 0 && flags&(unix.IFF_RUNNING|unix.IFF_LOOPBACK) != 0
	l.loopback = flags&unix.IFF_LOOPBACK != 0
	attrs(b[unix.SizeofIfInfomsg:], func(typ uint16, v []byte) {
		switch {
		case typ == unix.IFLA_IFNAME && len(v) > 0:
			l.name = string(v[:len(v)-1])
		case typ == unix.IFLA_MTU && len(v) == 4:
			l.mtu = int(binary.NativeEndian.Uint32(v))
		case typ == unix.IFLA_ADDRESS && len(v) == len(l.mac):
			l.mac = rdma.MAC(v)
		}
	})
	w.links[index] = l
}

func (w *linkWatch) parseAddr(added bool, b []byte) {
	if len(b) < unix.SizeofIfAddrmsg {
		return
	}
	k := addrKey{index: int32(binary.NativeEndian.Uint32(b[4:])), bits: b[1]}
	attrs(b[unix.SizeofIfAddrmsg:], func(typ uint16, v []byte) {
		a, ok := netip.AddrFromSlice(v)
		// IFA_LOCAL is our own address also on point-to-point links.
		if ok && (typ == unix.IFA_LOCAL || typ == unix.IFA_ADDRESS && !k.addr.IsValid()) {
			k.addr = a
		}
	})
	if !k.addr.IsValid() || !netip.PrefixFrom(k.addr, int(k.bits)).Contains(w.addr) {
		return
	}
	if added {
		w.addrs[k] = struct{}{}
	} else {
		delete(w.addrs, k)
	}
}

// holder returns the interface that has the address: the very address, or on a
// loopback interface one whose prefix covers it. An address with a zone is on that
// interface only: a link-local one may be on others too, and its prefix is on all.
func (w *linkWatch) holder() (_ addrKey, found bool) {
	var best addrKey
	for k := range w.addrs {
		l, ok := w.links[k.index]
		if !ok || k.addr != w.addr && !l.loopback {
			continue
		}
		if w.zone != "" && w.zone != l.name && w.zone != strconv.Itoa(int(k.index)) {
			continue
		}
		if was := best.addr == w.addr; !found || !was && k.addr == w.addr || was == (k.addr == w.addr) && k.index < best.index {
			best, found = k, true
		}
	}
	return best, found
}

// compute returns the state of the interface that has the address.
func (w *linkWatch) compute() LinkState {
	if k, ok := w.holder(); ok {
		l := w.links[k.index]
		s := LinkState{Up: l.up, MTUBytes: l.mtu, NetDev: l.name, MAC: l.mac, PrefixBits: k.bitsFor(w.addr)}
		if l.loopback && !w.addr.IsLoopback() {
			s.MTUBytes, s.MaxMTUBytes = w.wayOut(l.mtu)
		}
		return s
	}
	s := LinkState{MTUBytes: 1500}
	if old := w.state.Load(); old != nil {
		s = *old
		s.Up = false
	}
	return s
}

// wayOut returns the smallest and the largest MTU of the interfaces by which packets of an address on a loopback interface
// may leave: those that are up. Routes say by which one, for each peer another one. Without any, packets stay on the
// machine, and it is the MTU of the loopback interface.
func (w *linkWatch) wayOut(loopbackMTU int) (least, most int) {
	for _, l := range w.links {
		if l.up && !l.loopback {
			least, most = min(cmp.Or(least, l.mtu), l.mtu), max(most, l.mtu)
		}
	}
	return cmp.Or(least, loopbackMTU), cmp.Or(most, loopbackMTU)
}
