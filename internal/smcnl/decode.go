// SPDX-License-Identifier: Apache-2.0

package smcnl

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
)

// Top level attributes of the family SMC_GEN_NETLINK, as in the kernel's
// interface (linux/smc.h).
const (
	attrSystem    = 1
	attrGroup     = 2
	attrLink      = 3
	attrDevice    = 6
	attrStats     = 7
	attrFallbacks = 8
)

// attrTypeMask takes the flags (nested, byte order) off an attribute's type.
const attrTypeMask = 0x3fff

var errShort = errors.New("netlink attribute ends in its middle")

// attrs are the attributes of one level.
type attrs map[uint16][]byte

func parseAttrs(b []byte) (attrs, error) {
	const header = 4
	a := make(attrs)
	for len(b) > 0 {
		if len(b) < header {
			return nil, errShort
		}
		n := int(binary.NativeEndian.Uint16(b))
		if n < header || n > len(b) {
			return nil, errShort
		}
		a[binary.NativeEndian.Uint16(b[2:])&attrTypeMask] = b[header:n]
		b = b[min((n+3)&^3, len(b)):]
	}
	return a, nil
}

// num is an unsigned number of any of netlink's widths; an attribute that is
// not there is 0.
func (a attrs) num(typ uint16) uint64 {
	switch b := a[typ]; len(b) {
	case 1:
		return uint64(b[0])
	case 2:
		return uint64(binary.NativeEndian.Uint16(b))
	case 4:
		return uint64(binary.NativeEndian.Uint32(b))
	case 8:
		return binary.NativeEndian.Uint64(b)
	default:
		return 0
	}
}

// wireNum is a number of four bytes as it is in messages between peers.
func (a attrs) wireNum(typ uint16) uint32 {
	if b := a[typ]; len(b) == 4 {
		return binary.BigEndian.Uint32(b)
	}
	return 0
}

// text is a string without its end mark and the blanks that fill it.
func (a attrs) text(typ uint16) string { return cString(a[typ]) }

func cString(b []byte) string {
	b, _, _ = bytes.Cut(b, []byte{0})
	return string(bytes.TrimRight(b, " "))
}

func (a attrs) nested(typ uint16) (attrs, error) { return parseAttrs(a[typ]) }

// decodeStats reads the answer to the request for statistics. Fallbacks come
// by another one.
func decodeStats(msg []byte) (Counters, error) {
	var c Counters
	top, err := nestedPath(msg, attrStats)
	if err != nil {
		return c, err
	}
	c.ClientErrors, c.ServerErrors = top.num(3), top.num(4)
	r, err := top.nested(2)
	if err != nil {
		return c, err
	}
	c.ClientV1, c.ClientV2, c.ServerV1, c.ServerV2 = r.num(7), r.num(8), r.num(9), r.num(10)
	c.Urgent = r.num(15)
	c.RxBytes, c.TxBytes, c.RxCalls, c.TxCalls = r.num(16), r.num(17), r.num(18), r.num(19)
	for typ, b := range map[uint16]*Buffers{5: &c.Tx, 6: &c.Rx} {
		a, err := r.nested(typ)
		if err != nil {
			return c, err
		}
		*b = Buffers{
			PeerSmall: a.num(1), Small: a.num(2), PeerFull: a.num(3), Full: a.num(4),
			Reused: a.num(5), Allocated: a.num(6), Downgraded: a.num(7),
		}
	}
	return c, nil
}

// decodeFallback adds one message of the answer to the request for fallbacks,
// of which there is one for each side and reason, to c.
func decodeFallback(msg []byte, c *Counters) error {
	a, err := nestedPath(msg, attrFallbacks)
	if err != nil {
		return err
	}
	if _, ok := a[2]; ok { // the first message has the totals
		c.ServerFallbacks, c.ClientFallbacks = a.num(2), a.num(3)
	}
	f := Fallback{Reason: clc.Reason(a.num(4))}
	switch kind := a.num(1); kind {
	case 0:
		f.Side = Client
	case 1:
		f.Side = Server
	default:
		return fmt.Errorf("fallback statistics of unknown side %d", kind)
	}
	if n := a.num(5); n != 0 {
		if c.Fallbacks == nil {
			c.Fallbacks = make(map[Fallback]uint64)
		}
		c.Fallbacks[f] += n
	}
	return nil
}

func decodeSystem(msg []byte) (System, error) {
	a, err := nestedPath(msg, attrSystem)
	if err != nil {
		return System{}, err
	}
	return System{Version: uint8(a.num(1)), Release: uint8(a.num(2)), Hostname: a.text(4), SMCRv2: a.num(6) != 0}, nil
}

// decodeGroups reads the answer to the request for links: each group's message
// is followed by those of its links.
func decodeGroups(msgs [][]byte) ([]Group, error) {
	var groups []Group
	for _, m := range msgs {
		top, err := parseAttrs(m)
		if err != nil {
			return nil, err
		}
		if _, ok := top[attrGroup]; ok {
			g, err := decodeGroup(top)
			if err != nil {
				return nil, fmt.Errorf("link group: %w", err)
			}
			groups = append(groups, g)
		}
		if _, ok := top[attrLink]; !ok {
			continue
		}
		if len(groups) == 0 {
			return nil, errors.New("a link without its link group")
		}
		l, err := decodeLink(top)
		if err != nil {
			return nil, fmt.Errorf("link of group %#x: %w", groups[len(groups)-1].ID, err)
		}
		g := &groups[len(groups)-1]
		g.Links = append(g.Links, l)
	}
	return groups, nil
}

func decodeGroup(top attrs) (Group, error) {
	a, err := top.nested(attrGroup)
	if err != nil {
		return Group{}, err
	}
	common, err := a.nested(7)
	if err != nil {
		return Group{}, err
	}
	v2, err := a.nested(8)
	if err != nil {
		return Group{}, err
	}
	g := Group{
		ID: uint32(a.num(1)), Role: Client, Redundancy: name(redundancies[:], a.num(3)), PNetID: a.text(4), Conns: uint32(a.num(6)),
		Version: uint8(common.num(0)), Release: uint8(common.num(1)), EID: common.text(3), PeerHost: common.text(4),
		MaxConns: uint8(v2.num(2)), MaxLinks: uint8(v2.num(3)),
		SendBufBytes: a.num(12), RMBBytes: a.num(13),
	}
	if a.num(2) != 0 {
		g.Role = Server
	}
	return g, nil
}

func decodeLink(top attrs) (Link, error) {
	a, err := top.nested(attrLink)
	if err != nil {
		return Link{}, err
	}
	l := Link{
		ID: uint8(a.num(1)), Device: a.text(2), Port: uint8(a.num(3)), Conns: uint32(a.num(6)),
		UserID: a.wireNum(8), PeerUserID: a.wireNum(9), State: name(linkStates[:], a.num(10)),
	}
	for typ, addr := range map[uint16]*netip.Addr{4: &l.GID, 5: &l.PeerGID} {
		gid, err := netip.ParseAddr(a.text(typ))
		if err != nil {
			return Link{}, fmt.Errorf("GID: %w", err)
		}
		*addr = gid.Unmap()
	}
	return l, nil
}

// decodeDevice reads a message of the answer to the request for RDMA devices.
func decodeDevice(msg []byte) (Device, error) {
	a, err := nestedPath(msg, attrDevice)
	if err != nil {
		return Device{}, err
	}
	d := Device{Name: a.text(10), PCI: a.text(7), Groups: uint32(a.num(1))}
	for i, typ := range []uint16{8, 9} {
		p, err := a.nested(typ)
		if err != nil {
			return Device{}, fmt.Errorf("port %d: %w", i+1, err)
		}
		if p.num(5) == 0 {
			continue // the device has no such port
		}
		d.Ports = append(d.Ports, Port{
			Number: uint8(i + 1), PNetID: p.text(2), PNetIDByUser: p.num(1) != 0, NetDev: uint32(p.num(3)),
			Active: p.num(4) != 0, Links: uint32(p.num(6)),
		})
	}
	return d, nil
}

// nestedPath is what is inside the top level attribute typ.
func nestedPath(msg []byte, typ uint16) (attrs, error) {
	top, err := parseAttrs(msg)
	if err != nil {
		return nil, err
	}
	if _, ok := top[typ]; !ok {
		return nil, fmt.Errorf("netlink answer without attribute %d", typ)
	}
	return top.nested(typ)
}

var redundancies = [...]string{"NONE", "SINGLE", "SYMMETRIC", "ASYMMETRIC PEER", "ASYMMETRIC LOCAL"}

var linkStates = [...]string{"UNUSED", "INACTIVE", "ACTIVATING", "ACTIVE"}

func name(names []string, i uint64) string {
	if i < uint64(len(names)) {
		return names[i]
	}
	return fmt.Sprint(i)
}

// decodeSocket reads a message of the module smc_diag: a fixed part, which
// begins like that of inet_diag, then attributes.
//
//	0 family, 1 state, 2 mode, 4 ports, 8 source, 24 destination, 40 interface, 44 cookie, 52 uid, 56 inode, 64 ...
//
// The attribute for the link is:
//
//	0 link, 1 device, 65 port, 66 GID, 106 GID of the peer, 146 role
func decodeSocket(b []byte) (Socket, error) {
	const fixed = 64
	if len(b) < fixed {
		return Socket{}, errShort
	}
	addr := func(off int) netip.Addr {
		// The family is that of SMC for both kinds of addresses, unless the socket is of TCP's families.
		if a := netip.AddrFrom16([16]byte(b[off:])); !bytes.Equal(b[off+4:off+16], make([]byte, 12)) {
			return a.Unmap()
		}
		return netip.AddrFrom4([4]byte(b[off:]))
	}
	s := Socket{
		State: socketState(b[1]), Mode: name(modes[:], uint64(b[2])), IPv6: b[0] == unix.AF_INET6,
		Local: netip.AddrPortFrom(addr(8), binary.BigEndian.Uint16(b[4:])),
		Peer:  netip.AddrPortFrom(addr(24), binary.BigEndian.Uint16(b[6:])),
		UID:   binary.NativeEndian.Uint32(b[52:]), Inode: binary.NativeEndian.Uint64(b[56:]),
		// Two words, the lower one first in either byte order.
		Cookie: uint64(binary.NativeEndian.Uint32(b[44:])) | uint64(binary.NativeEndian.Uint32(b[48:]))<<32,
	}
	a, err := parseAttrs(b[fixed:])
	if err != nil {
		return Socket{}, err
	}
	s.Shutdown = Shutdown(a.num(3)) & ShutBoth // the field of the fixed part is not filled in
	if c := a[1]; len(c) >= 16 && s.Mode == modes[0] {
		s.Token, s.SendBufBytes = binary.NativeEndian.Uint32(c), binary.NativeEndian.Uint32(c[4:])
		s.RMBEBytes, s.PeerRMBEBytes = binary.NativeEndian.Uint32(c[8:]), binary.NativeEndian.Uint32(c[12:])
	}
	if l := a[2]; len(l) >= 147 {
		s.LinkID, s.Device = l[0], cString(l[1:65])
		s.GID, s.PeerGID = gidOf(l[66:106]), gidOf(l[106:146])
		if s.Role = Client; l[146] != 0 {
			s.Role = Server
		}
	}
	if f := a[5]; len(f) >= 8 {
		s.Reason, s.PeerReason = clc.Reason(binary.NativeEndian.Uint32(f)), clc.Reason(binary.NativeEndian.Uint32(f[4:]))
	}
	return s, nil
}

// gidOf reads a GID as text. A link that is on its way out has none.
func gidOf(b []byte) netip.Addr {
	gid, err := netip.ParseAddr(cString(b))
	if err != nil {
		return netip.Addr{}
	}
	return gid.Unmap()
}

var modes = [...]string{ModeSMCR, ModeTCP, "SMCD"}

func socketState(s byte) string {
	for _, e := range [...]struct {
		s    byte
		name string
	}{
		{1, StateActive},
		{2, StateInit},
		{7, StateClosed},
		{10, StateListen},
		{20, "PEERCLOSEWAIT1"},
		{21, "PEERCLOSEWAIT2"},
		{22, "APPCLOSEWAIT1"},
		{23, "APPCLOSEWAIT2"},
		{24, "APPFINCLOSEWAIT"},
		{25, "PEERFINCLOSEWAIT"},
		{26, "PEERABORTWAIT"},
		{27, "PROCESSABORT"},
	} {
		if e.s == s {
			return e.name
		}
	}
	return fmt.Sprint(s)
}

// decodePNet reads an entry of the table of physical networks. The kernel says "n/a" of what an entry does not have.
func decodePNet(a attrs) PNet {
	const none = "n/a"
	p := PNet{Name: a.text(1)}
	if netDev := a.text(2); netDev != none {
		p.NetDev = netDev
	}
	if device := a.text(3); device != none {
		p.Device, p.Port = device, uint8(a.num(4))
	}
	return p
}
