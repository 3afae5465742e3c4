// SPDX-License-Identifier: Apache-2.0

package twonodes

import (
	"bytes"
	"encoding/hex"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// frameFields are what tshark says about each frame.
var frameFields = []string{
	"frame.number", "frame.protocols", "udp.dstport", "infiniband.bth.opcode", "tcp.len", "smc.clc_msg",
	"_ws.malformed", "tcp.payload", "udp.payload",
}

// frame is a captured packet as tshark understands it.
type frame struct {
	number    int
	protocols []string
	udpPort   int
	opcode    int // of the BTH, -1 if there is none
	tcpLen    int
	clc       []int
	malformed bool
	payload   []byte // of UDP or TCP
}

// parseFrames reads tshark's output, a line for each frame.
func parseFrames(s string) ([]frame, error) {
	var out []frame
	for line := range strings.Lines(s) {
		f := strings.Split(strings.TrimRight(line, "\n"), "|")
		if len(f) != len(frameFields) {
			return nil, fmt.Errorf("tshark wrote %q, want %d fields", line, len(frameFields))
		}
		var (
			fr  frame
			err error
		)
		if fr.number, err = strconv.Atoi(f[0]); err != nil {
			return nil, fmt.Errorf("tshark wrote the frame number %q", f[0])
		}
		fr.protocols = strings.Split(f[1], ":")
		fr.udpPort, fr.opcode, fr.tcpLen = number(f[2]), number(f[3]), max(0, number(f[4]))
		if f[5] != "" {
			for m := range strings.SplitSeq(f[5], ",") {
				fr.clc = append(fr.clc, number(m))
			}
		}
		fr.malformed = f[6] != "" || slices.Contains(fr.protocols, "_ws.malformed")
		if fr.payload, err = hex.DecodeString(strings.ReplaceAll(f[7]+f[8], ":", "")); err != nil {
			return nil, fmt.Errorf("frame %d: payload: %w", fr.number, err)
		}
		out = append(out, fr)
	}
	return out, nil
}

// number reads a number of tshark's; -1 if there is none.
func number(s string) int {
	n, err := strconv.ParseInt(s, 0, 32)
	if err != nil {
		return -1
	}
	return int(n)
}

func (f *frame) has(protocol string) bool { return slices.Contains(f.protocols, protocol) }

const rocePort = 4791

// rdmaWrite says whether a BTH opcode is one of the RDMA WRITEs of the
// reliable connection service.
func rdmaWrite(opcode int) bool { return opcode >= 0x06 && opcode <= 0x0b }

var clcNames = map[int]string{1: "Proposal", 2: "Accept", 3: "Confirm", 4: "Decline"}

// look finds the marked transfer in the frames of the underlay and of the
// pods' link.
func (c *Captured) look(roce, tcp []frame, marker string) {
	for _, f := range roce {
		if f.malformed {
			c.MalformedFrames = append(c.MalformedFrames, f.number)
		}
		if f.udpPort != rocePort || !f.has("infiniband") {
			continue
		}
		c.RoCEPackets++
		if rdmaWrite(f.opcode) && bytes.Contains(f.payload, []byte(marker)) {
			c.RoCEPayload += uint64(max(0, len(f.payload)-overhead(f.payload, f.opcode)))
		}
	}
	for _, f := range tcp {
		if f.malformed {
			c.MalformedFrames = append(c.MalformedFrames, f.number)
		}
		if f.tcpLen == 0 {
			continue
		}
		for _, m := range f.clc {
			c.CLCMessages = append(c.CLCMessages, clcNames[m])
		}
		if !f.has("smc") {
			c.TCPOther++
		}
		if bytes.Contains(f.payload, []byte(marker)) {
			c.TCPPayload += uint64(f.tcpLen)
		}
	}
}

// overhead is how much of a packet of RDMA WRITE is not payload: BTH, RETH in
// the first one, immediate data in the last one, padding, ICRC.
func overhead(packet []byte, opcode int) int {
	const bth, reth, immediate, icrc = 12, 16, 4, 4
	n := bth + icrc + int(packet[1]>>4&3)
	switch opcode {
	case 0x06, 0x0a:
		n += reth
	case 0x09:
		n += immediate
	case 0x0b:
		n += reth + immediate
	}
	return n
}

// markedLine is the length of a line of the marked transfer.
const markedLine = 64

// markedText is the marker again and again, in numbered lines.
func markedText(marker string) string {
	var b strings.Builder
	for i := range markedLines {
		fmt.Fprintf(&b, "%-*s\n", markedLine-1, fmt.Sprintf("%s %06d", marker, i))
	}
	return b.String()
}
