// SPDX-License-Identifier: Apache-2.0

package rocev2

import (
	"encoding/binary"
	"fmt"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// OpCode is the operation of a packet (IBTA 9.2.1), of the reliable connected
// service only.
type OpCode uint8

// Operations of the reliable connected service.
const (
	SendFirst      OpCode = 0
	SendMiddle     OpCode = 1
	SendLast       OpCode = 2
	SendLastImm    OpCode = 3
	SendOnly       OpCode = 4
	SendOnlyImm    OpCode = 5
	WriteFirst     OpCode = 6
	WriteMiddle    OpCode = 7
	WriteLast      OpCode = 8
	WriteLastImm   OpCode = 9
	WriteOnly      OpCode = 10
	WriteOnlyImm   OpCode = 11
	ReadRequest    OpCode = 12
	ReadRespFirst  OpCode = 13
	ReadRespMiddle OpCode = 14
	ReadRespLast   OpCode = 15
	ReadRespOnly   OpCode = 16
	Acknowledge    OpCode = 17
	AtomicAck      OpCode = 18
	CmpSwap        OpCode = 19
	FetchAdd       OpCode = 20
	SendLastInv    OpCode = 22
	SendOnlyInv    OpCode = 23

	numOpCodes = 24
)

// Lengths of the headers (IBTA 9.2 and 9.3).
const (
	bthLen          = 12
	rethLen         = 16
	aethLen         = 4
	immDtLen        = 4
	iethLen         = 4
	atomicETHLen    = 28
	atomicAckETHLen = 8
)

// opInfo says what belongs to an operation.
type opInfo uint16

const (
	opKnown opInfo = 1 << iota
	opRequest
	opFirst  // first of several packets
	opMiddle // neither first nor last
	opLast   // last of several packets
	opOnly   // first and last
	opSend
	opWrite
	opReadResp
	opRETH
	opAETH
	opImm
	opIETH
	opAtomicETH
	opAtomicAckETH
	opPayload
)

// opTable has the row of every operation. It is a constant table.
var opTable = [numOpCodes]opInfo{
	SendFirst:      opKnown | opRequest | opSend | opFirst | opPayload,
	SendMiddle:     opKnown | opRequest | opSend | opMiddle | opPayload,
	SendLast:       opKnown | opRequest | opSend | opLast | opPayload,
	SendLastImm:    opKnown | opRequest | opSend | opLast | opPayload | opImm,
	SendOnly:       opKnown | opRequest | opSend | opOnly | opPayload,
	SendOnlyImm:    opKnown | opRequest | opSend | opOnly | opPayload | opImm,
	WriteFirst:     opKnown | opRequest | opWrite | opFirst | opPayload | opRETH,
	WriteMiddle:    opKnown | opRequest | opWrite | opMiddle | opPayload,
	WriteLast:      opKnown | opRequest | opWrite | opLast | opPayload,
	WriteLastImm:   opKnown | opRequest | opWrite | opLast | opPayload | opImm,
	WriteOnly:      opKnown | opRequest | opWrite | opOnly | opPayload | opRETH,
	WriteOnlyImm:   opKnown | opRequest | opWrite | opOnly | opPayload | opRETH | opImm,
	ReadRequest:    opKnown | opRequest | opRETH,
	ReadRespFirst:  opKnown | opReadResp | opFirst | opPayload | opAETH,
	ReadRespMiddle: opKnown | opReadResp | opMiddle | opPayload,
	ReadRespLast:   opKnown | opReadResp | opLast | opPayload | opAETH,
	ReadRespOnly:   opKnown | opReadResp | opOnly | opPayload | opAETH,
	Acknowledge:    opKnown | opAETH,
	AtomicAck:      opKnown | opAETH | opAtomicAckETH,
	CmpSwap:        opKnown | opRequest | opAtomicETH,
	FetchAdd:       opKnown | opRequest | opAtomicETH,
	SendLastInv:    opKnown | opRequest | opSend | opLast | opPayload | opIETH,
	SendOnlyInv:    opKnown | opRequest | opSend | opOnly | opPayload | opIETH,
}

func (o OpCode) info() opInfo {
	if o < numOpCodes {
		return opTable[o]
	}
	return 0
}

// IsRequest reports whether a requester sends o; the others are responses.
func (o OpCode) IsRequest() bool { return o.info()&opRequest != 0 }

func (o OpCode) String() string {
	names := [numOpCodes]string{
		SendFirst: "SEND First", SendMiddle: "SEND Middle", SendLast: "SEND Last",
		SendLastImm: "SEND Last with Immediate", SendOnly: "SEND Only",
		SendOnlyImm: "SEND Only with Immediate",
		WriteFirst:  "RDMA WRITE First", WriteMiddle: "RDMA WRITE Middle",
		WriteLast: "RDMA WRITE Last", WriteLastImm: "RDMA WRITE Last with Immediate",
		WriteOnly: "RDMA WRITE Only", WriteOnlyImm: "RDMA WRITE Only with Immediate",
		ReadRequest: "RDMA READ Request", ReadRespFirst: "RDMA READ response First",
		ReadRespMiddle: "RDMA READ response Middle", ReadRespLast: "RDMA READ response Last",
		ReadRespOnly: "RDMA READ response Only", Acknowledge: "Acknowledge",
		AtomicAck: "ATOMIC Acknowledge", CmpSwap: "CmpSwap", FetchAdd: "FetchAdd",
		SendLastInv: "SEND Last with Invalidate", SendOnlyInv: "SEND Only with Invalidate",
	}
	if o < numOpCodes && names[o] != "" {
		return "RC " + names[o]
	}
	return fmt.Sprintf("OpCode(0x%02x)", uint8(o))
}

// HeaderLen returns the length of BTH and extended headers of o.
func (o OpCode) HeaderLen() int { return bthLen + o.info().extLen() }

func (i opInfo) extLen() int {
	n := 0
	if i&opRETH != 0 {
		n += rethLen
	}
	if i&opAETH != 0 {
		n += aethLen
	}
	if i&opImm != 0 {
		n += immDtLen
	}
	if i&opIETH != 0 {
		n += iethLen
	}
	if i&opAtomicETH != 0 {
		n += atomicETHLen
	}
	if i&opAtomicAckETH != 0 {
		n += atomicAckETHLen
	}
	return n
}

// BTH is the base transport header (IBTA 9.2).
//
//	 0                   1                   2                   3
//	 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1
//	+---------------+-+-+---+-------+-------------------------------+
//	|    OpCode     |S|M|Pad| TVer  |         Partition key         |
//	+-+-+-----------+-+-+---+-------+-------------------------------+
//	|F|B| reserved  |        Destination queue pair                 |
//	+-+-+-----------+-----------------------------------------------+
//	|A|  reserved   |        Packet sequence number                 |
//	+-+-------------+-----------------------------------------------+
type BTH struct {
	OpCode    OpCode
	Solicited bool // S: ask for an event at the receiver
	MigReq    bool // M: automatic path migration, not used
	PadCount  uint8
	TVer      uint8
	PKey      uint16
	FECN      bool
	BECN      bool
	DestQP    rdma.QPN
	AckReq    bool // A: the responder must answer
	PSN       rdma.PSN
}

// RETH is the RDMA extended transport header (IBTA 9.3.3).
type RETH struct {
	Addr   uint64
	RKey   rdma.RKey
	Length uint32
}

// Packet is a parsed packet.
type Packet struct {
	BTH     BTH
	RETH    RETH   // of WRITE First and Only, READ Request
	AETH    AETH   // of responses
	Imm     uint32 // immediate data
	Ext     []byte // extended header of an operation that this package does not perform, as it came
	Payload []byte // without pad; aliases the input
}

// ParsePacket parses a packet, the UDP payload from BTH to ICRC. It checks
// everything that needs no queue pair; it does not check the ICRC.
func ParsePacket(b []byte) (Packet, error) {
	var p Packet
	err := p.Parse(b)
	return p, err
}

// Parse is [ParsePacket] into a packet that the caller reuses. After an error
// p holds nothing of use.
func (p *Packet) Parse(b []byte) error {
	if len(b) < bthLen+ICRCLen {
		return ErrShort
	}
	if len(b) > MaxPacketLen {
		return ErrLong
	}
	if len(b)%4 != 0 {
		return ErrMisfit
	}
	op := OpCode(b[0])
	info := op.info()
	if info == 0 {
		return ErrOpCode
	}
	p.BTH.parse(b)
	if p.BTH.TVer != 0 {
		return ErrTVer
	}
	ext := info.extLen()
	end := len(b) - ICRCLen - int(p.BTH.PadCount)
	if end < bthLen+ext {
		return ErrShort
	}
	p.Payload = b[bthLen+ext : end : end]
	p.Ext = nil
	if info&opPayload == 0 && (len(p.Payload) != 0 || p.BTH.PadCount != 0) {
		return ErrLength
	}
	if len(p.Payload) > MaxMTUBytes {
		return ErrLong
	}
	x := b[bthLen : bthLen+ext : bthLen+ext]
	if info&opRETH != 0 {
		p.RETH = RETH{
			Addr:   binary.BigEndian.Uint64(x),
			RKey:   rdma.RKey(binary.BigEndian.Uint32(x[8:])),
			Length: binary.BigEndian.Uint32(x[12:]),
		}
		x = x[rethLen:]
	}
	if info&opAETH != 0 {
		v := binary.BigEndian.Uint32(x)
		p.AETH = AETH{Syndrome: Syndrome(v >> 24), MSN: v & msnMask}
		x = x[aethLen:]
	}
	if info&opImm != 0 {
		p.Imm = binary.BigEndian.Uint32(x)
		x = x[immDtLen:]
	}
	if len(x) != 0 {
		p.Ext = x
	}
	return nil
}

// parse reads a BTH from b, which is long enough.
func (h *BTH) parse(b []byte) {
	w0 := binary.BigEndian.Uint32(b)
	w1 := binary.BigEndian.Uint32(b[4:])
	w2 := binary.BigEndian.Uint32(b[8:])
	h.OpCode = OpCode(w0 >> 24)
	h.Solicited = w0&bthSolicited != 0
	h.MigReq = w0&bthMigReq != 0
	h.PadCount = uint8(w0 >> 20 & 3)
	h.TVer = uint8(w0 >> 16 & 15)
	h.PKey = uint16(w0)
	h.FECN = w1&bthFECN != 0
	h.BECN = w1&bthBECN != 0
	h.DestQP = rdma.QPN(w1) & rdma.MaxQPN
	h.AckReq = w2&bthAckReq != 0
	h.PSN = rdma.PSN(w2) & rdma.PSNMask
}

// Bits of the three words of a BTH.
const (
	bthSolicited = 1 << 23
	bthMigReq    = 1 << 22
	bthFECN      = 1 << 31
	bthBECN      = 1 << 30
	bthAckReq    = 1 << 31
)

func bit(on bool, mask uint32) uint32 {
	if on {
		return mask
	}
	return 0
}

// put writes the BTH into b[:bthLen].
func (h *BTH) put(b []byte) {
	_ = b[bthLen-1]
	w0 := uint32(h.OpCode)<<24 | bit(h.Solicited, bthSolicited) | bit(h.MigReq, bthMigReq) |
		uint32(h.PadCount&3)<<20 | uint32(h.TVer&15)<<16 | uint32(h.PKey)
	w1 := bit(h.FECN, bthFECN) | bit(h.BECN, bthBECN) | uint32(h.DestQP&rdma.MaxQPN)
	w2 := bit(h.AckReq, bthAckReq) | uint32(h.PSN&rdma.PSNMask)
	binary.BigEndian.PutUint32(b, w0)
	binary.BigEndian.PutUint32(b[4:], w1)
	binary.BigEndian.PutUint32(b[8:], w2)
}

// AppendHeader appends the BTH and the extended headers to b. Payload, pad
// and ICRC follow them on the wire.
func (p *Packet) AppendHeader(b []byte) []byte {
	var h [bthLen]byte
	p.BTH.put(h[:])
	b = append(b, h[:]...)
	info := p.BTH.OpCode.info()
	if info&opRETH != 0 {
		b = binary.BigEndian.AppendUint64(b, p.RETH.Addr)
		b = binary.BigEndian.AppendUint32(b, uint32(p.RETH.RKey))
		b = binary.BigEndian.AppendUint32(b, p.RETH.Length)
	}
	if info&opAETH != 0 {
		b = binary.BigEndian.AppendUint32(b, uint32(p.AETH.Syndrome)<<24|p.AETH.MSN&msnMask)
	}
	if info&opImm != 0 {
		b = binary.BigEndian.AppendUint32(b, p.Imm)
	}
	return append(b, p.Ext...)
}

// padLen returns the pad bytes that follow a payload of n bytes.
func padLen(n int) int { return -n & 3 }
