// SPDX-License-Identifier: Apache-2.0

package siw

import (
	"fmt"
	"regexp"
	"strings"
	"testing"

	"github.com/smcr-io/kube-smcr/test/vm/lab"
)

// tools are the programs that come with librdmacm.
func tools() []*tool {
	return []*tool{
		rping(10, 4000),
		{
			name: "ucmatose", server: []string{"ucmatose", "-c", "4", "-C", "10", "-S", "1000"},
			client: []string{"ucmatose", "-c", "4", "-C", "10", "-S", "1000"}, port: "-p", to: "-s",
		},
		{name: "rdma_client", server: []string{"rdma_server"}, client: []string{"rdma_client"}, port: "-p", to: "-s"},
	}
}

// rping sends, reads, and writes each message, and its client compares them.
func rping(n, size int) *tool {
	options := []string{"-C", fmt.Sprint(n), "-S", fmt.Sprint(size)}
	return &tool{
		name: "rping", server: append([]string{"rping", "-s"}, options...), client: append([]string{"rping", "-c", "-V"}, options...),
		port: "-p", to: "-a",
	}
}

// perftest is one of the programs that measure.
func perftest(name string, n, size int) *tool {
	command := []string{name, "-d", "siw0", "-R", "-F", "-n", fmt.Sprint(n), "-s", fmt.Sprint(size)}
	if name == "ib_read_bw" {
		command = append(command, "-o", "1")
	}
	return &tool{name: name, server: command, client: command, port: "-p"}
}

// testGuests runs all programs between the guests, and has tshark decode every frame.
func (b *bed) testGuests(t *testing.T) {
	b.delay(t)
	stop := b.capture(t, "guests")
	g0, g1 := b.lab.Guest(0), b.lab.Guest(1)
	both := func(name string, run func(t *testing.T, server, client *lab.Guest)) {
		t.Run(name+"/g0", func(t *testing.T) { run(t, g0, g1) })
		t.Run(name+"/g1", func(t *testing.T) { run(t, g1, g0) })
	}
	for _, c := range tools() {
		both(c.name, func(t *testing.T, server, client *lab.Guest) { b.run(t, c, server, client) })
	}
	const n = 5 // the least that all take
	for _, name := range []string{"ib_send_bw", "ib_send_lat", "ib_write_bw", "ib_write_lat", "ib_read_bw", "ib_read_lat"} {
		measure := func(size int) func(t *testing.T, server, client *lab.Guest) {
			return func(t *testing.T, server, client *lab.Guest) {
				out := b.run(t, perftest(name, n, size), server, client)
				if !regexp.MustCompile(fmt.Sprintf(`(?m)^ *%d +%d +\d`, size, n)).MatchString(out) {
					t.Errorf("the client did not measure %d messages of %d bytes:\n%s", n, size, out)
				}
			}
		}
		both(name, measure(100))
		t.Run(name+"/long", func(t *testing.T) { measure(1<<20)(t, g0, g1) })
	}
	d := decode(t, stop())
	t.Logf("%d connections; messages by opcode: %v", d.requests, d.opcodes)
	if len(d.strange) > 0 {
		t.Errorf("tshark does not understand %d frames:\n%s", len(d.strange), strings.Join(d.strange[:min(10, len(d.strange))], "\n"))
	}
	// A connection for each program, and two more of rping's and perftest's kinds.
	if least := 2*len(tools()) + 6*3; d.requests < least || d.replies != d.requests {
		t.Errorf("%d Requests and %d Replies of MPA, want %d or more of each", d.requests, d.replies, least)
	}
	for op, name := range opcodes {
		if d.opcodes[op] == 0 {
			t.Errorf("there was no %s", name)
		}
	}
}

// opcodes are those of RDMAP that the programs make siw use.
var opcodes = map[string]string{"0x00": "Write", "0x01": "Read Request", "0x02": "Read Response", "0x03": "Send"}
