// SPDX-License-Identifier: Apache-2.0

package rocev2

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/netip"
	"strings"
	"testing"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/soft"
	"github.com/smcr-io/kube-smcr/test/vm/lab"
	"github.com/smcr-io/kube-smcr/test/vm/rocev2/rdmatools"
)

// toolCase is a run of a program against ours.
type toolCase struct {
	name    string
	tool    rdmatools.Tool
	client  bool // we are
	size, n int
	mtu     int      // 0: 4096
	psn     rdma.PSN // the first of ours
	v6      bool     // the packets go over IPv6
	// fault is what netem does to the packets of both guests.
	fault string
}

// report is what our program says at the end.
type report struct {
	rdmatools.Report
	Device soft.Stats
}

// toolCases are an ordinary run of each program, and some in which something is
// special.
func toolCases() []toolCase {
	var cases []toolCase
	for _, tool := range []rdmatools.Tool{
		rdmatools.PingPong, rdmatools.WriteBW, rdmatools.WriteLat, rdmatools.ReadLat, rdmatools.SendBW,
	} {
		for _, client := range []bool{false, true} {
			cases = append(cases, toolCase{name: "plain", tool: tool, client: client, size: 20_000, n: 30})
		}
	}
	for _, tool := range []rdmatools.Tool{rdmatools.WriteBW, rdmatools.ReadBW, rdmatools.SendBW} {
		for _, client := range []bool{false, true} {
			cases = append(cases, toolCase{name: "loss", tool: tool, client: client, size: 40_000, n: 20, fault: "loss 4%"})
		}
	}
	// Where there is reordering, the packets that are not in the part are late.
	const reorder, duplicate = "delay 1ms reorder 80% 30%", "duplicate 20%"
	cases = append(
		cases,
		toolCase{name: "reordering", tool: rdmatools.WriteBW, size: 40_000, n: 20, fault: reorder},
		toolCase{name: "reordering", tool: rdmatools.ReadBW, client: true, size: 40_000, n: 20, fault: reorder},
		toolCase{name: "duplication", tool: rdmatools.SendBW, size: 40_000, n: 20, fault: duplicate},
		toolCase{name: "duplication", tool: rdmatools.WriteBW, client: true, size: 40_000, n: 20, fault: duplicate},
		toolCase{name: "small", tool: rdmatools.SendLat, size: 1, n: 50},
		toolCase{name: "long", tool: rdmatools.SendBW, client: true, size: 1 << 20, n: 5},
		toolCase{name: "wrap", tool: rdmatools.WriteBW, client: true, size: 70_000, n: 10, psn: rdma.PSNMask - 40},
		toolCase{name: "ipv6", tool: rdmatools.PingPong, size: 5_000, n: 20, v6: true},
		toolCase{name: "ipv6", tool: rdmatools.ReadBW, client: true, size: 50_000, n: 10, v6: true},
		toolCase{name: "mtu256", tool: rdmatools.WriteBW, client: true, size: 1283, n: 20, mtu: 256},
		toolCase{name: "mtu2048", tool: rdmatools.PingPong, client: true, size: 10_243, n: 20, mtu: 2048},
	)
	return cases
}

func testTools(t *testing.T, l *lab.Lab) {
	program, err := l.Build(t.Context(), "github.com/smcr-io/kube-smcr/test/vm/rocev2/toolpeer", lab.BuildOptions{})
	if err != nil {
		t.Fatal(err)
	}
	p := &tools{lab: l, program: program, gids: map[netip.Addr]string{}, counts: counters(t, l.Guest(1))}
	for _, c := range toolCases() {
		role := map[bool]string{false: "server", true: "client"}[c.client]
		t.Run(fmt.Sprintf("%s/%s/%s", c.name, c.tool, role), func(t *testing.T) { p.run(t, &c) })
	}
}

// tools runs the cases.
type tools struct {
	lab     *lab.Lab
	program string                // ours
	gids    map[netip.Addr]string // rows of their GID table
	counts  counts                // theirs after the case before
}

func (l *tools) run(t *testing.T, c *toolCase) {
	ctx, cancel := context.WithTimeout(t.Context(), caseTimeout)
	defer cancel()
	ours, theirs := l.lab.Guest(0), l.lab.Guest(1)
	check := func() {}
	if c.fault != "" {
		check = disturb(t, l.lab, c.fault)
	}
	us, them := l.commands(t, c)
	p, err := ours.Start(ctx, append([]string{l.program}, us...)...)
	if err != nil {
		t.Fatal(err)
	}
	out := bufio.NewReader(p.Stdout)
	if !c.client {
		if line, err := out.ReadString('\n'); line != "listening\n" {
			text, _ := io.ReadAll(p.Stderr)
			t.Fatalf("our side said %q, %v: %s", line, err, text)
		}
	}
	short, cancel := context.WithTimeout(ctx, caseTimeout*3/4) // ours says what it saw
	defer cancel()
	text, err := theirs.Run(short, them...)
	_ = p.Stdin.Close()
	if err != nil {
		t.Errorf("%v\n%s", err, text)
	}
	var report report
	if err := json.NewDecoder(out).Decode(&report); err != nil {
		t.Errorf("read our report: %v", err)
	}
	err = p.Wait()
	now := counters(t, theirs)
	t.Logf("ours %+v %+v\nrxe %v", report.Stats, report.Device, now.sub(l.counts))
	l.counts = now
	if err != nil {
		text, _ := io.ReadAll(p.Stderr)
		t.Fatalf("our side: %v: %s", err, text)
	}
	check()
	c.checkReport(t, report)
}

// commands are the arguments of our program, and the command of the other one.
func (l *tools) commands(t *testing.T, c *toolCase) (us, them []string) {
	ours, theirs := l.lab.Guest(0), l.lab.Guest(1)
	local, remote := ours.Addr(0), theirs.Addr(0)
	if c.v6 {
		local, remote = ours.Addr6(0), theirs.Addr6(0)
	}
	mtu := c.mtu
	if mtu == 0 {
		mtu = 4096
	}
	if l.gids[remote] == "" {
		l.gids[remote] = gidIndex(t, theirs, rdma.GIDFromAddr(remote))
	}
	gid := "-x"
	if c.tool == rdmatools.PingPong {
		gid = "-g"
	}
	us = []string{
		"-addr", local.String(), "-tool", string(c.tool), "-n", fmt.Sprint(c.n), "-s", fmt.Sprint(c.size),
		"-psn", fmt.Sprint(uint32(c.psn)), "-mtu", fmt.Sprint(mtu), "-timeout", (caseTimeout * 3 / 4).String(),
		// A fault is to hit packets, and not many at a time.
		fmt.Sprintf("-segment=%t", c.fault == ""),
	}
	them = []string{
		string(c.tool), "-d", "rxe0", gid, l.gids[remote],
		"-m", fmt.Sprint(mtu), "-n", fmt.Sprint(c.n), "-s", fmt.Sprint(c.size),
	}
	if c.tool != rdmatools.PingPong {
		// Without it perftest gives up before its last word if it cannot measure the processor's clock. An emulated
		// processor may stand still meanwhile.
		them = append(them, "-F")
	}
	if c.client {
		return append(us, "-to", theirs.Addr(0).String()), them
	}
	return us, append(them, ours.Addr(0).String())
}

// checkReport compares what our queue pair counted with what was asked for.
func (c *toolCase) checkReport(t *testing.T, r report) {
	t.Helper()
	want := c.mtu
	if want == 0 {
		want = 4096
	}
	if r.MTU.Bytes() != want {
		t.Errorf("path MTU %v, want %d", r.MTU, want)
	}
	talk := c.tool == rdmatools.PingPong || c.tool == rdmatools.SendLat || c.tool == rdmatools.WriteLat
	// A long READ of theirs may be several requests.
	if got := r.Stats.RxMessages; (talk || !c.client) && got < uint64(c.n) {
		t.Errorf("we took %d messages, want %d", got, c.n)
	}
	if got := r.Stats.TxMessages; (talk || c.client) && got != uint64(c.n) {
		t.Errorf("we completed %d messages, want %d", got, c.n)
	}
	if r.Stats.NAKErrSent+r.Stats.NAKErrReceived != 0 {
		t.Errorf("a request was refused: %+v", r.Stats)
	}
}

// gidIndex finds the row of a GID in the table of a guest's rxe0.
func gidIndex(t *testing.T, g *lab.Guest, gid rdma.GID) string {
	t.Helper()
	const dir = "/sys/class/infiniband/rxe0/ports/1/gids/"
	out, err := g.Shell(t.Context(), "cd "+dir+"; grep . * || true") // rows that are empty cannot be read
	if err != nil {
		t.Fatal(err)
	}
	var want strings.Builder
	for i := range 8 {
		fmt.Fprintf(&want, ":%02x%02x", gid[2*i], gid[2*i+1])
	}
	for line := range strings.Lines(out) {
		if row, found := strings.CutSuffix(strings.TrimSpace(line), want.String()); found {
			return row
		}
	}
	t.Fatalf("GID %v is not in the table:\n%s", gid, out)
	return ""
}
