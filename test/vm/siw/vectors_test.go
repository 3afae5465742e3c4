// SPDX-License-Identifier: Apache-2.0

package siw

import (
	"bytes"
	"encoding/hex"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/smcr-io/kube-smcr/test/vm/lab"
)

var update = flag.Bool("update", false, "write the vectors of testdata anew")

// vectorCases are the runs whose frames are kept, and the settings of siw in both guests.
// They are small: what is kept is read by people, too.
var vectorCases = []struct {
	name     string
	settings []string
	tool     *tool
}{
	{"rping", nil, rping(2, 64)},
	{"rping-crc", []string{"mpa_crc_required=1"}, rping(2, 65)},
	{"rping-peer-to-peer", []string{"mpa_crc_required=1", "peer_to_peer=1"}, rping(1, 64)},
	{"send", nil, perftest("ib_send_lat", 5, 1501)},
	{"write", []string{"mpa_crc_required=1"}, perftest("ib_write_lat", 5, 1501)},
	{"read", []string{"mpa_crc_required=1"}, perftest("ib_read_lat", 5, 1501)},
}

// testVectors makes the vectors, and with -update keeps them. Without, it checks that they
// can be made.
func (b *bed) testVectors(t *testing.T) {
	b.delay(t)
	g0, g1 := b.lab.Guest(0), b.lab.Guest(1)
	for _, c := range vectorCases {
		t.Run(c.name, func(t *testing.T) {
			for _, g := range []*lab.Guest{g0, g1} {
				b.load(t, g, c.settings...)
			}
			stop := b.capture(t, c.name)
			b.run(t, c.tool, g0, g1)
			frames, err := largestConnection(t, stop())
			if err == nil {
				err = checkVector(frames)
			}
			if err != nil {
				t.Fatal(err)
			}
			if !*update {
				return
			}
			var text bytes.Buffer
			fmt.Fprintf(&text, "# %s, between two guests with siw of Linux", strings.Join(c.tool.client, " "))
			if len(c.settings) > 0 {
				fmt.Fprintf(&text, " and its settings %s", strings.Join(c.settings, " "))
			}
			text.WriteString(", MTU 1500.\n")
			for _, f := range frames {
				fmt.Fprintf(&text, "%s %x\n", f.from, f.bytes)
			}
			if err := os.WriteFile(filepath.Join("testdata", c.name+".txt"), text.Bytes(), 0o644); err != nil {
				t.Error(err)
			}
		})
	}
}

// A frame is one of MPA, and who sent it.
type frame struct {
	from  string // initiator or responder
	bytes []byte
}

// largestConnection splits the connection of a capture that has most data into frames:
// what measures has another one before, to agree on what to do.
func largestConnection(t *testing.T, pcap string) ([]frame, error) {
	t.Helper()
	rows := tshark(t, pcap, "tcp.len > 0", "tcp.stream", "tcp.len", "ip.src", "tcp.seq", "tcp.payload")
	sizes, largest := map[string]int{}, ""
	for _, row := range rows {
		n, err := strconv.Atoi(row[1])
		if err != nil {
			return nil, err
		}
		sizes[row[0]] += n
		if sizes[row[0]] > sizes[largest] {
			largest = row[0]
		}
	}
	c := connection{directions: map[string]*direction{}}
	for _, row := range rows {
		if row[0] != largest {
			continue
		}
		if err := c.add(row[2], row[3], row[4]); err != nil {
			return nil, err
		}
	}
	for _, d := range c.directions {
		if len(d.rest) > 0 {
			return nil, fmt.Errorf("the %s ends with a part of a frame: %x", d.from, d.rest)
		}
	}
	return c.frames, nil
}

// A connection is put together of its packets, and taken apart again.
type connection struct {
	directions map[string]*direction // by the sender's address
	frames     []frame
}

// A direction is what one side sends.
type direction struct {
	from string
	next int    // the number of the first byte that was not seen
	rest []byte // the beginning of a frame
	size func([]byte) int
}

// add adds a packet, as tshark writes its sender, number and data.
func (c *connection) add(sender, number, data string) error {
	d := c.directions[sender]
	if d == nil {
		d = &direction{from: [...]string{"initiator", "responder"}[len(c.directions)], next: 1, size: startSize}
		c.directions[sender] = d
	}
	seq, err := strconv.Atoi(number)
	if err != nil {
		return err
	}
	payload, err := hex.DecodeString(data)
	if err != nil {
		return err
	}
	if seq > d.next {
		return fmt.Errorf("the capture lacks bytes %d to %d of the %s", d.next, seq, d.from)
	}
	fresh := payload[min(d.next-seq, len(payload)):]
	d.next += len(fresh)
	d.rest = append(d.rest, fresh...)
	for n := d.size(d.rest); n > 0; n = d.size(d.rest) {
		c.frames = append(c.frames, frame{d.from, d.rest[:n:n]})
		d.rest, d.size = d.rest[n:], fpduSize
	}
	return nil
}

// checkVector looks at what frames have in common: who begins, and the CRCs, which are
// zero where none were agreed.
func checkVector(frames []frame) error {
	if len(frames) < 4 {
		return fmt.Errorf("there are %d frames", len(frames))
	}
	if q, r := frames[0], frames[1]; q.from != "initiator" || r.from != "responder" || !bytes.HasPrefix(q.bytes, []byte(requestKey)) || !bytes.HasPrefix(r.bytes, []byte(replyKey)) {
		return errors.New("it does not begin with a Request and a Reply")
	}
	crc := frames[1].bytes[keyBytes]&flagCRC != 0
	for i, f := range frames[2:] {
		err := checkCRC(f.bytes)
		if !crc && bytes.HasSuffix(f.bytes, make([]byte, crcBytes)) {
			err = nil
		}
		if n := fpduSize(f.bytes); n != len(f.bytes) {
			err = fmt.Errorf("it has %d bytes, its length says %d", len(f.bytes), n)
		}
		if err != nil {
			return fmt.Errorf("frame %d, of the %s: %w", i+2, f.from, err)
		}
	}
	return nil
}

// The vectors that are kept are what they say they are.
func TestVectors(t *testing.T) {
	for _, c := range vectorCases {
		t.Run(c.name, func(t *testing.T) {
			text, err := os.ReadFile(filepath.Join("testdata", c.name+".txt"))
			if err != nil {
				t.Fatal(err)
			}
			var frames []frame
			for line := range strings.Lines(string(text)) {
				if strings.HasPrefix(line, "#") {
					continue
				}
				from, digits, _ := strings.Cut(strings.TrimSpace(line), " ")
				b, err := hex.DecodeString(digits)
				if err != nil {
					t.Fatal(err)
				}
				frames = append(frames, frame{from, b})
			}
			if err := checkVector(frames); err != nil {
				t.Error(err)
			}
			if want := strings.Contains(string(text), "mpa_crc_required"); want != (len(frames) > 1 && frames[1].bytes[keyBytes]&flagCRC != 0) {
				t.Errorf("its first line says CRC: %t, its Reply does not", want)
			}
		})
	}
}
