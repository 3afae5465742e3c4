// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"flag"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/test/vm/lab"
	"github.com/smcr-io/kube-smcr/test/vm/peer/drive"
	"github.com/smcr-io/kube-smcr/test/vm/peer/report"
	"github.com/smcr-io/kube-smcr/test/vm/peer/script"
)

// bigBytes is small enough for continuous integration: 1 GiB takes minutes in
// an emulated guest.
var bigBytes = flag.String("bytes", "8M", "size of the big transfers, in each direction")

// slowestBytes is the least that a second carries in each direction, in a guest
// on a busy machine.
const slowestBytes = 250e3

func TestKernel(t *testing.T) {
	l := lab.ForTest(t, lab.Config{})
	if err := drive.Build(t.Context(), l); err != nil {
		t.Fatal(err)
	}
	if err := drive.SetUpKernel(t.Context(), l.Guest(0), 0); err != nil {
		t.Fatal(err)
	}
	b := &bed{lab: l, kernel: l.Guest(0), engine: l.Guest(1)}
	// Both want the UDP port of RoCE, so one comes after the other.
	t.Run("soft", func(t *testing.T) {
		b := *b
		b.device = "soft:" + b.engine.Addr(0).String()
		b.shell(t, b.engine, "for d in rxe0 rxe1; do rdma link delete $d 2>/dev/null || true; done; modprobe -rq rdma_rxe || true")
		// First what takes the kernel's device away: link groups that have just ended
		// can hold it for good (a worker in smc_cdc_wait_pend_tx_wr).
		b.declines(t)
		b.traffic(t)
		b.limits(t)
		b.killed(t)
		b.testLinks(t)
	})
	t.Run("verbs", func(t *testing.T) {
		b := *b
		b.device = "verbs:rxe0"
		if err := b.engine.AddRXE(t.Context(), 0); err != nil {
			t.Fatal(err)
		}
		b.traffic(t)
		b.killed(t)
	})
}

// each runs a test in both roles.
func each(t *testing.T, name string, test func(*testing.T, role)) {
	t.Helper()
	t.Run(name, func(t *testing.T) {
		for _, r := range roles {
			t.Run(r.String(), func(t *testing.T) { test(t, r) })
		}
	})
}

// traffic is what connections are for.
func (b *bed) traffic(t *testing.T) {
	each(t, "scripts", b.testScripts)
	each(t, "hundreds", b.testHundreds)
	each(t, "big", b.testBig)
}

// scripts are all of them, on three connections each, and what the server sees
// of the client's end. Where our engine serves it is told of a reset; the
// kernel's sockets give eof, and their state tells.
var scripts = []struct {
	do    string
	end   [2]string // what our engine sees as server, what the kernel does
	abort bool      // the kernel must see that it is a reset
}{
	{do: "echo", end: [2]string{report.EndEOF, report.EndEOF}},
	{do: "sizes:size=128K", end: [2]string{report.EndEOF, report.EndEOF}},
	{do: "bulk:bytes=1M", end: [2]string{report.EndEOF, report.EndEOF}},
	{do: "fetch:bytes=1M", end: [2]string{report.EndEOF, report.EndEOF}},
	{do: "duplex:bytes=1M", end: [2]string{report.EndEOF, report.EndEOF}},
	{do: "slow:bytes=1536K", end: [2]string{report.EndEOF, report.EndEOF}},
	{do: "half:bytes=300000", end: [2]string{report.EndEOF, report.EndEOF}},
	{do: "urgent:count=3", end: [2]string{report.EndEOF, report.EndEOF}},
	{do: "unread", end: [2]string{report.EndReset, report.EndEOF}, abort: true},
	// The kernel closes in order where TCP would reset.
	{do: "abort", end: [2]string{report.EndEOF, report.EndEOF}, abort: true},
	{do: "hold:for=10ms", end: [2]string{report.EndEOF, report.EndEOF}},
}

func (b *bed) testScripts(t *testing.T, r role) {
	var do []string
	for _, s := range scripts {
		do = append(do, s.do)
	}
	const conns = 3
	p := plan{engine: r, do: strings.Join(do, ","), dial: fmt.Sprintf("-conns %d", conns)}
	got := b.play(t, p)
	got.wantSMCR(t, p, conns*len(scripts))
	if n := got.firstContacts(); n != 1 {
		t.Errorf("%d first contacts, want 1: all connections go through one link group", n)
	}
	// Linux writes into larger RMBEs than RFC 7609 has.
	const largest = 2 << 20
	if large := slices.ContainsFunc(got.ours.Conns, func(c report.Conn) bool { return c.Engine.RMBE == largest }); large != strings.HasPrefix(b.device, "soft:") {
		t.Errorf("there are connections with an RMBE of %d bytes: %v, on %s", largest, large, b.device)
	}
	side, server := 1, got.theirs
	if r == engineServes {
		side, server = 0, got.ours
	}
	for _, s := range scripts {
		name, _, _ := strings.Cut(s.do, ":")
		t.Run(name, func(t *testing.T) {
			n := 0
			for _, c := range server.Conns {
				if is, _, _ := strings.Cut(c.Script, ":"); is != name {
					continue
				}
				n++
				if c.End != s.end[side] {
					t.Errorf("the server saw end %q, want %q", c.End, s.end[side])
				}
				if aborted := c.EndState == report.StateAborted; r == engineDials && aborted != s.abort {
					t.Errorf("the end left the kernel's socket in state %s, is that a reset: want %t", c.EndState, s.abort)
				}
			}
			if n != conns {
				t.Errorf("%d connections, want %d", n, conns)
			}
		})
	}
}

// A link group has 255 connections at most, so that 300 make two.
func (b *bed) testHundreds(t *testing.T, r role) {
	const conns = 300
	p := plan{engine: r, do: "echo:count=3", dial: fmt.Sprintf("-conns %d", conns), ours: "-rmbe 65536"}
	got := b.play(t, p)
	got.wantSMCR(t, p, conns)
	if n := got.firstContacts(); n != 2 {
		t.Errorf("%d first contacts, want 2", n)
	}
}

func (b *bed) testBig(t *testing.T, r role) {
	p := plan{engine: r, do: "duplex:bytes=" + *bigBytes, ours: "-timeout 1h", theirs: "-timeout 1h"} // play's is shorter
	spec, err := script.Parse(p.do)
	if err != nil {
		t.Fatal(err)
	}
	p.more = time.Duration(spec.Bytes/slowestBytes) * time.Second
	got := b.play(t, p)
	got.wantSMCR(t, p, 1)
	for _, c := range got.ours.Conns {
		t.Logf("%d bytes in each direction in %.0f ms, %.1f MB/s in sum", c.Sent, c.TookMS, float64(c.Sent+c.Received)/c.TookMS/1e3)
	}
}
