// SPDX-License-Identifier: Apache-2.0

package bsdh

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/smcr-io/kube-smcr/internal/invariant"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// ErrMalformed says that bytes are not a message: too short, of a length that is not that of their
// kind, of an unknown kind, or with a value that no field of that name can have.
var ErrMalformed = errors.New("bsdh: malformed message")

// Message is a message (§6). MID says which of the fields behind Payload it has.
//
//	 0                   1                   2                   3
//	|              Bufs             |     Flags     |      MID      |
//	|                              Len                              |
//	|                              MSeq                             |
//	|                            MSeqAck                            |
type Message struct {
	MID   MID
	Flags Flags
	Bufs  uint16 // receive buffers that the sender has posted
	Seq   uint32 // MSeq: number of the message
	Ack   uint32 // MSeqAck: number of the last message that the sender received

	Payload []byte // of Data, SrcAvail, SinkAvail

	Setup  Setup    // of Hello, HelloAck
	Advert Advert   // of SrcAvail, SinkAvail
	Bytes  uint32   // of RdmaWrCompl, RdmaRdCompl: bytes moved; of ChRcvBuf, ChRcvBufAck: size of receive buffers
	Change ModeWord // of ModeChange
	Port   uint16   // of SuspComm: TCP port to connect to
}

// Setup is what Hello and HelloAck have in common (§6.2.1, §6.2.2), and both sizes of Hello:
//
//	|           MaxAdverts          |      Rsvd     |  MinV |  MajV |
//	|                          DesRemRcvSz                          |
//	|                           LocalRcvSz                          |
//	|             LocIRD            |             LocORD            |
//
// HelloAck has one size, ActRcvSz, which is RecvBytes here.
type Setup struct {
	MaxAdverts    uint16 // adverts that the receiver of this message may have outstanding
	Major, Minor  uint8  // version, four bits each
	WantRecvBytes uint32 // DesRemRcvSz: size of receive buffers that the sender would like the peer to have; Hello only
	RecvBytes     uint32 // LocalRcvSz or ActRcvSz: size of the sender's receive buffers
	IRD, ORD      uint16 // RDMA READs at a time that the sender serves and asks for
}

// Advert is memory that the sender opens to the peer (§6.3.2, §6.3.3). NonDiscards is in SinkAvail only.
//
//	|                              Len                              |
//	|                              STag                             |
//	|                           VA (32-63)                          |
//	|                           VA (0-31)                           |
//	|                          NonDiscards                          |
type Advert struct {
	Len         uint32 // bytes, with those that the payload repeats
	Key         rdma.RKey
	Addr        uint64
	NonDiscards uint32
}

// ModeWord is the header of ModeChange (§6.3.8).
//
//	|                        Rsvd                           |Mode |S|
type ModeWord struct {
	Mode Mode
	Send bool // S: the receiver changes its sending half, else its receiving half
}

// Parse decodes a message, which is all of b. Every length is checked against len(b), and every value
// that is wrong whatever came before. What a Hello must have to be accepted is [Message.CheckSetup].
func Parse(b []byte, l Layout) (Message, error) {
	if len(b) < HeaderLen {
		return Message{}, fmt.Errorf("%w: %d bytes, want %d at least", ErrMalformed, len(b), HeaderLen)
	}
	m := Message{Seq: binary.BigEndian.Uint32(b[8:]), Ack: binary.BigEndian.Uint32(b[12:])}
	if l == LayoutIBTA {
		m.MID, m.Flags, m.Bufs = MID(b[0]), Flags(b[1])&allFlags, binary.BigEndian.Uint16(b[2:])
	} else {
		m.Bufs, m.Flags, m.MID = binary.BigEndian.Uint16(b), Flags(b[2])&allFlags, MID(b[3])
	}
	f, known := m.MID.form()
	n := binary.BigEndian.Uint32(b[4:])
	switch {
	case !known:
		return m, fmt.Errorf("%w: message identifier %#02x is reserved", ErrMalformed, uint8(m.MID))
	case uint64(n) != uint64(len(b)):
		return m, fmt.Errorf("%w: %v says %d bytes, and has %d", ErrMalformed, m.MID, n, len(b))
	case len(b) < HeaderLen+f.extended || !f.payload && len(b) > HeaderLen+f.extended:
		return m, fmt.Errorf("%w: %v of %d bytes, its headers are %d", ErrMalformed, m.MID, len(b), HeaderLen+f.extended)
	}
	m.parseExtended(b[HeaderLen:HeaderLen+f.extended], l)
	if f.payload {
		m.Payload = b[HeaderLen+f.extended:]
	}
	return m, m.check(b[HeaderLen:], l)
}

func (m *Message) parseExtended(b []byte, l Layout) {
	word := func(at int) uint32 { return binary.BigEndian.Uint32(b[at:]) }
	switch m.MID {
	case Hello, HelloAck:
		m.Setup = parseSetup(b, l)
	case SrcAvail, SinkAvail:
		m.Advert = Advert{Len: word(0), Key: rdma.RKey(word(4)), Addr: binary.BigEndian.Uint64(b[8:])}
		if m.MID == SinkAvail {
			m.Advert.NonDiscards = word(16)
		}
	case RdmaWrCompl, RdmaRdCompl, ChRcvBuf, ChRcvBufAck:
		m.Bytes = word(0)
	case ModeChange:
		if l == LayoutIBTA {
			m.Change = ModeWord{Mode: Mode(b[0] >> 4 & 7), Send: b[0]>>7 != 0}
		} else {
			m.Change = ModeWord{Mode: Mode(b[3] >> 1 & 7), Send: b[3]&1 != 0}
		}
	case SuspComm:
		m.Port = binary.BigEndian.Uint16(b[4:])
		if l == LayoutIBTA {
			m.Port = binary.BigEndian.Uint16(b[6:])
		}
	case DisConn, AbortConn, SendSm, SrcAvailCancel, SinkAvailCancel, SinkCancelAck, SuspCommAck, Data:
	}
}

func parseSetup(b []byte, l Layout) Setup {
	var s Setup
	ird, ord := b[len(b)-4:], b[len(b)-2:]
	if l == LayoutIBTA {
		s.Major, s.Minor, s.MaxAdverts = b[0]>>4, b[0]&15, binary.BigEndian.Uint16(b[2:])
		ird, ord = ord, ird
	} else {
		s.MaxAdverts, s.Minor, s.Major = binary.BigEndian.Uint16(b), b[3]>>4, b[3]&15
	}
	s.RecvBytes = binary.BigEndian.Uint32(b[len(b)-8:])
	if len(b) == helloLen {
		s.WantRecvBytes = binary.BigEndian.Uint32(b[4:])
	}
	s.IRD, s.ORD = binary.BigEndian.Uint16(ird), binary.BigEndian.Uint16(ord)
	return s
}

// check reports values that no conforming sender puts into a message, whatever the state. b are the
// extended header and the payload.
func (m *Message) check(b []byte, l Layout) error {
	if m.Flags&OOBPresent != 0 && (m.MID != Data || len(m.Payload) == 0) {
		return fmt.Errorf("%w: out-of-band byte in %v with %d bytes of payload", ErrMalformed, m.MID, len(m.Payload))
	}
	switch m.MID {
	case SrcAvail, SinkAvail:
		a := m.Advert
		switch {
		case a.Len == 0 || a.Len > MaxBytes:
			return fmt.Errorf("%w: %v of %d bytes", ErrMalformed, m.MID, a.Len)
		case a.Addr+uint64(a.Len)-1 < a.Addr:
			return fmt.Errorf("%w: %v of %d bytes at %#x passes the end of memory", ErrMalformed, m.MID, a.Len, a.Addr)
		case m.MID == SrcAvail && uint64(len(m.Payload)) > uint64(a.Len):
			return fmt.Errorf("%w: SrcAvail of %d bytes with %d of them as payload", ErrMalformed, a.Len, len(m.Payload))
		}
	case ModeChange:
		if m.Change.Mode > Pipelined {
			return fmt.Errorf("%w: mode %d is reserved", ErrMalformed, uint8(m.Change.Mode))
		}
	case SuspComm:
		constant2 := b[6:]
		if l == LayoutIBTA {
			constant2 = b[4:]
		}
		if binary.BigEndian.Uint32(b) != 0 || binary.BigEndian.Uint16(constant2) != 1 {
			return fmt.Errorf("%w: constants of SuspComm are not 0 and 1: %x", ErrMalformed, b)
		}
	case Hello, HelloAck, DisConn, AbortConn, SendSm, RdmaWrCompl, RdmaRdCompl, SrcAvailCancel, SinkAvailCancel, SinkCancelAck,
		ChRcvBuf, ChRcvBufAck, SuspCommAck, Data:
	}
	return nil
}

// AppendHeaders encodes the message but for its payload, of which only the length is needed: the bytes
// go behind what is returned. Payload is not looked at.
func (m *Message) AppendHeaders(b []byte, l Layout, payload int) []byte {
	f, known := m.MID.form()
	invariant.Must(known, "bsdh: message of a kind that does not exist")
	invariant.Must(payload == 0 || f.payload && payload > 0 && payload <= MaxBytes, "bsdh: payload in a message that has none")
	invariant.Must(m.Flags&^allFlags == 0, "bsdh: flags that do not exist")
	if l == LayoutIBTA {
		b = append(b, byte(m.MID), byte(m.Flags))
		b = binary.BigEndian.AppendUint16(b, m.Bufs)
	} else {
		b = binary.BigEndian.AppendUint16(b, m.Bufs)
		b = append(b, byte(m.Flags), byte(m.MID))
	}
	b = binary.BigEndian.AppendUint32(b, uint32(HeaderLen+f.extended+payload))
	b = binary.BigEndian.AppendUint32(b, m.Seq)
	b = binary.BigEndian.AppendUint32(b, m.Ack)
	switch m.MID {
	case Hello, HelloAck:
		return m.appendSetup(b, l)
	case SrcAvail, SinkAvail:
		b = binary.BigEndian.AppendUint32(b, m.Advert.Len)
		b = binary.BigEndian.AppendUint32(b, uint32(m.Advert.Key))
		b = binary.BigEndian.AppendUint64(b, m.Advert.Addr)
		if m.MID == SinkAvail {
			b = binary.BigEndian.AppendUint32(b, m.Advert.NonDiscards)
		}
	case RdmaWrCompl, RdmaRdCompl, ChRcvBuf, ChRcvBufAck:
		b = binary.BigEndian.AppendUint32(b, m.Bytes)
	case ModeChange:
		b = m.Change.append(b, l)
	case SuspComm:
		b = append(b, 0, 0, 0, 0)
		if l == LayoutIBTA {
			return binary.BigEndian.AppendUint16(append(b, 0, 1), m.Port)
		}
		return append(binary.BigEndian.AppendUint16(b, m.Port), 0, 1)
	case DisConn, AbortConn, SendSm, SrcAvailCancel, SinkAvailCancel, SinkCancelAck, SuspCommAck, Data:
	}
	return b
}

// Append encodes the message.
func (m *Message) Append(b []byte, l Layout) []byte {
	return append(m.AppendHeaders(b, l, len(m.Payload)), m.Payload...)
}

func (m *Message) appendSetup(b []byte, l Layout) []byte {
	s := &m.Setup
	invariant.Must(s.Major <= 15 && s.Minor <= 15, "bsdh: version of more than four bits")
	if l == LayoutIBTA {
		b = binary.BigEndian.AppendUint16(append(b, s.Major<<4|s.Minor, 0), s.MaxAdverts)
	} else {
		b = append(binary.BigEndian.AppendUint16(b, s.MaxAdverts), 0, s.Minor<<4|s.Major)
	}
	if m.MID == Hello {
		b = binary.BigEndian.AppendUint32(b, s.WantRecvBytes)
	}
	b = binary.BigEndian.AppendUint32(b, s.RecvBytes)
	first, second := s.IRD, s.ORD
	if l == LayoutIBTA {
		first, second = second, first
	}
	b = binary.BigEndian.AppendUint16(b, first)
	return binary.BigEndian.AppendUint16(b, second)
}

func (w ModeWord) append(b []byte, l Layout) []byte {
	invariant.Must(w.Mode <= Pipelined, "bsdh: mode that does not exist")
	var s byte
	if w.Send {
		s = 1
	}
	if l == LayoutIBTA {
		return append(b, s<<7|byte(w.Mode)<<4, 0, 0, 0)
	}
	return append(b, 0, 0, 0, byte(w.Mode)<<1|s)
}

// Solicited reports whether the message wakes its receiver (§14.2): it goes by a Send with Solicited Event.
func (m *Message) Solicited() bool {
	if m.MID == Data {
		return m.Flags&(OOBPresent|OOBPending) != 0
	}
	f, _ := m.MID.form()
	return f.solicited
}
