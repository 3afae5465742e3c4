// SPDX-License-Identifier: Apache-2.0

package bsdh

import (
	"fmt"
	"strings"
)

// Layout says how the words of several fields are drawn.
type Layout uint8

// Layouts.
const (
	LayoutFigures Layout = iota // the leftmost field of a figure first
	LayoutIBTA                  // the words mirrored, as InfiniBand's SDP has them
)

func (l Layout) String() string {
	switch l {
	case LayoutFigures:
		return "figures"
	case LayoutIBTA:
		return "IBTA"
	}
	return fmt.Sprintf("Layout(%d)", uint8(l))
}

// MID is the message identifier (§6.1.1).
type MID uint8

// Message identifiers.
const (
	Hello           MID = 0x00
	HelloAck        MID = 0x01
	DisConn         MID = 0x02
	AbortConn       MID = 0x03
	SendSm          MID = 0x04
	RdmaWrCompl     MID = 0x05
	RdmaRdCompl     MID = 0x06
	ModeChange      MID = 0x07
	SrcAvailCancel  MID = 0x08
	SinkAvailCancel MID = 0x09
	SinkCancelAck   MID = 0x0a
	ChRcvBuf        MID = 0x0b
	ChRcvBufAck     MID = 0x0c
	SuspComm        MID = 0x0d
	SuspCommAck     MID = 0x0e
	SinkAvail       MID = 0xfd
	SrcAvail        MID = 0xfe
	Data            MID = 0xff
)

// form is what a kind of message has on the wire, and how it is sent.
type form struct {
	name      string
	extended  int  // length of the extended header
	payload   bool // bytes of the program may follow
	solicited bool // §14.2: it wakes the peer
}

// forms are the messages that there are (§6.1.1, figure 3): up to SuspCommAck by their numbers, and
// the last three from SinkAvail on.
var forms = [...]form{
	Hello:           {"Hello", helloLen, false, false},
	HelloAck:        {"HelloAck", helloAckLen, false, true},
	DisConn:         {"DisConn", 0, false, false},
	AbortConn:       {"AbortConn", 0, false, true},
	SendSm:          {"SendSm", 0, false, true},
	RdmaWrCompl:     {"RdmaWrCompl", wordLen, false, true},
	RdmaRdCompl:     {"RdmaRdCompl", wordLen, false, true},
	ModeChange:      {"ModeChange", wordLen, false, false},
	SrcAvailCancel:  {"SrcAvailCancel", 0, false, true},
	SinkAvailCancel: {"SinkAvailCancel", 0, false, true},
	SinkCancelAck:   {"SinkCancelAck", 0, false, true},
	ChRcvBuf:        {"ChRcvBuf", wordLen, false, false},
	ChRcvBufAck:     {"ChRcvBufAck", wordLen, false, false},
	SuspComm:        {"SuspComm", suspCommLen, false, true},
	SuspCommAck:     {"SuspCommAck", 0, false, true},
	lowForms:        {"SinkAvail", sinkAvailLen, true, false},
	lowForms + 1:    {"SrcAvail", srcAvailLen, true, false},
	lowForms + 2:    {"Data", 0, true, false},
}

const lowForms = int(SuspCommAck) + 1

func (m MID) form() (form, bool) {
	switch {
	case int(m) < lowForms:
		return forms[m], true
	case m >= SinkAvail:
		return forms[lowForms+int(m-SinkAvail)], true
	}
	return form{}, false
}

// HeadersLen is the length of a message of this kind without payload, in bytes.
func (m MID) HeadersLen() int {
	f, _ := m.form()
	return HeaderLen + f.extended
}

func (m MID) String() string {
	if f, ok := m.form(); ok {
		return f.name
	}
	return fmt.Sprintf("MID(%#02x)", uint8(m))
}

// Flags are the flags of a message (§6.1.2). Bits that have no name are not kept.
type Flags uint8

// Flags.
const (
	OOBPresent       Flags = 1 << iota // OOB_PRES: the last byte of the payload is out-of-band data
	OOBPending                         // OOB_PEND: out-of-band data will come
	RequestPipelined                   // REQ_PIPE: the sender wants the other direction in Pipelined mode
	allFlags         = OOBPresent | OOBPending | RequestPipelined
)

func (f Flags) String() string {
	var names []string
	for i, n := range [...]string{"OOB_PRES", "OOB_PEND", "REQ_PIPE"} {
		if f&(1<<i) != 0 {
			names = append(names, n)
		}
	}
	return strings.Join(names, "|")
}

// Mode is the flow control mode of one direction (§11), as ModeChange names it (§6.3.8.1).
type Mode uint8

// Modes.
const (
	Buffered Mode = iota
	Combined
	Pipelined
)

func (m Mode) String() string {
	switch m {
	case Buffered:
		return "Buffered"
	case Combined:
		return "Combined"
	case Pipelined:
		return "Pipelined"
	}
	return fmt.Sprintf("Mode(%d)", uint8(m))
}
