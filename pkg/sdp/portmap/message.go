// SPDX-License-Identifier: Apache-2.0

package portmap

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"github.com/smcr-io/kube-smcr/internal/invariant"
)

// What makes a datagram no message of this protocol.
var (
	ErrShort     = errors.New("portmap: datagram is shorter than a message")
	ErrVersion   = errors.New("portmap: unknown version of the protocol")
	ErrIPVersion = errors.New("portmap: addresses are neither of IPv4 nor of IPv6")
)

// Type is the kind of a message (§7.3.1.2).
type Type uint8

// Types.
const (
	Request Type = iota // client: where is the service?
	Accept              // server: there
	Ack                 // client: I have heard
	Deny                // server: not by SDP
)

func (t Type) String() string {
	names := [...]string{"PMReq", "PMAccept", "PMAck", "PMDeny"}
	if int(t) < len(names) {
		return names[t]
	}
	return fmt.Sprintf("Type(%d)", uint8(t))
}

// Message is any message of the protocol (§7.3, figure 17).
//
//	 0                   1                   2                   3
//	 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1
//	+---+---+-------+---------------+-------------------------------+
//	|Ver|MT |  IPV  |    PmTime     |           Reserved            |
//	+---+---+-------+---------------+-------------------------------+
//	|            ApPort             |            CpPort             |
//	+-------------------------------+-------------------------------+
//	|                          AssocHandle                          |
//	|                                                               |
//	+---------------------------------------------------------------+
//	|                           CpIPAddr                            |
//	|                           (16 bytes)                          |
//	+---------------------------------------------------------------+
//	|                           ApIPAddr                            |
//	|                           (16 bytes)                          |
//	+---------------------------------------------------------------+
type Message struct {
	Type      Type
	CacheTime CacheTime      // of a PMAccept; 0 in all others
	Handle    uint64         // AssocHandle: names the transaction
	CP        netip.AddrPort // the connecting peer
	AP        netip.AddrPort // the accepting peer: the SDP address in PMAccept and PMAck, else the conventional one
}

const (
	version      = 0
	typeShift    = 4
	typeMask     = 3
	versionShift = 6
	ipvMask      = 15
	ipv4, ipv6   = 4, 6

	timeOffset   = 1
	apPortOffset = 4
	cpPortOffset = 6
	handleOffset = 8
	cpAddrOffset = 16
	apAddrOffset = 32
	addrLen      = 16
)

// ParseMessage reads a datagram. It does not look at the reserved field, at bytes of addresses that IPv4
// does not use, at a PmTime where it has no meaning, and at what is behind the message: all of these
// occur (§7.3.1.3 to §7.3.1.5).
func ParseMessage(b []byte) (Message, error) {
	if len(b) < Len {
		return Message{}, fmt.Errorf("%w: %d bytes", ErrShort, len(b))
	}
	if v := b[0] >> versionShift; v != version {
		return Message{}, fmt.Errorf("%w: %d", ErrVersion, v)
	}
	ipv := b[0] & ipvMask
	if ipv != ipv4 && ipv != ipv6 {
		return Message{}, fmt.Errorf("%w: IPV is %d", ErrIPVersion, ipv)
	}
	m := Message{
		Type:   Type(b[0] >> typeShift & typeMask),
		Handle: binary.BigEndian.Uint64(b[handleOffset:]),
		CP:     netip.AddrPortFrom(parseAddr(b[cpAddrOffset:], ipv), binary.BigEndian.Uint16(b[cpPortOffset:])),
		AP:     netip.AddrPortFrom(parseAddr(b[apAddrOffset:], ipv), binary.BigEndian.Uint16(b[apPortOffset:])),
	}
	if m.Type == Accept {
		m.CacheTime = CacheTime(b[timeOffset])
	}
	return m, nil
}

func parseAddr(b []byte, ipv uint8) netip.Addr {
	if ipv == ipv4 {
		return netip.AddrFrom4([4]byte(b))
	}
	return netip.AddrFrom16([addrLen]byte(b))
}

// Append appends the message to b. Both addresses are of one family, and a zone is left out.
func (m Message) Append(b []byte) []byte {
	cp, ap := m.CP.Addr(), m.AP.Addr()
	invariant.Must(cp.IsValid() && ap.IsValid() && cp.Is4() == ap.Is4(), "portmap: addresses of a message are of two families, or missing")
	ipv := uint8(ipv6)
	if ap.Is4() {
		ipv = ipv4
	}
	var p [Len]byte
	p[0] = version<<versionShift | uint8(m.Type&typeMask)<<typeShift | ipv
	if m.Type == Accept {
		p[timeOffset] = uint8(m.CacheTime)
	}
	binary.BigEndian.PutUint16(p[apPortOffset:], m.AP.Port())
	binary.BigEndian.PutUint16(p[cpPortOffset:], m.CP.Port())
	binary.BigEndian.PutUint64(p[handleOffset:], m.Handle)
	putAddr(p[cpAddrOffset:], cp)
	putAddr(p[apAddrOffset:], ap)
	return append(b, p[:]...)
}

func putAddr(b []byte, a netip.Addr) {
	if a.Is4() {
		v4 := a.As4()
		copy(b, v4[:])
		return
	}
	v6 := a.As16()
	copy(b, v6[:])
}

func (m Message) String() string {
	return fmt.Sprintf("%v %016x from %v to %v", m.Type, m.Handle, m.CP, m.AP)
}
