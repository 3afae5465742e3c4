// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/test/vm/peer/report"
)

// killed are the ends of which the peer is not told.
func (b *bed) killed(t *testing.T) {
	each(t, "kernelProcessKilled", b.testKernelProcessKilled)
	each(t, "engineProcessKilled", b.testEngineProcessKilled)
}

// testLinks are the tests by which such an end is found out.
func (b *bed) testLinks(t *testing.T) {
	t.Run("testLink/ofKernel", b.testLinkOfKernel)
	t.Run("testLink/ofEngine", b.testLinkOfEngine)
}

// A program that is killed leaves its sockets to the kernel, which ends them in
// order: our side gets the end of the stream, as it would over TCP.
func (b *bed) testKernelProcessKilled(t *testing.T, r role) {
	var killed time.Time
	p := plan{engine: r, do: "hold", dial: "-conns 3", fails: true, during: func(t *testing.T, r2 *round) {
		run := r2.server
		if r == engineServes {
			run = r2.client
		}
		killed = time.Now()
		if _, err := run.Kill(); err != nil {
			t.Error(err)
		}
	}}
	got := b.play(t, p)
	t.Logf("over %v after", time.Since(killed).Round(time.Millisecond))
	check(t, "our side", got.ours)
	for _, c := range got.ours.Conns {
		if c.End != report.EndEOF {
			t.Errorf("%s ended by %q, want eof", c.Local, c.End)
		}
	}
	if len(got.ours.Conns) != 3 {
		t.Errorf("%d connections, want 3", len(got.ours.Conns))
	}
}

// When our engine is killed, it tells its peer nothing. Its TCP connections end, but the kernel does not look
// at them, and finds out by TEST LINK.
func (b *bed) testEngineProcessKilled(t *testing.T, r role) {
	b.sysctl(t, "net.smc.smcr_testlink_time", 1)
	var killed time.Time
	p := plan{engine: r, do: "hold", dial: "-conns 3", fails: true, during: func(t *testing.T, r2 *round) {
		run := r2.client
		if r == engineServes {
			run = r2.server
		}
		killed = time.Now()
		if _, err := run.Kill(); err != nil {
			t.Error(err)
		}
		if r == engineDials { // a server is told to end only after it has seen its client end
			for deadline := time.Now().Add(endTimeout); len(b.ask(t).Groups) > 0 && time.Now().Before(deadline); {
				time.Sleep(100 * time.Millisecond) // polls the kernel's link groups
			}
		}
	}}
	got := b.play(t, p)
	t.Logf("over %v after", time.Since(killed).Round(time.Millisecond))
	for _, c := range got.theirs.Conns {
		t.Logf("%s: end %q, state %q, error %q", c.Local, c.End, c.EndState, c.Err)
		// The kernel tells some of its readers that they are not connected, and
		// some that the stream has ended.
		if c.End != report.EndReset && c.End != report.EndEOF {
			t.Errorf("%s ended by %q (%s), want reset or eof", c.Local, c.End, c.Err)
		}
	}
	if len(got.theirs.Conns) != 3 {
		t.Errorf("%d connections, want 3", len(got.theirs.Conns))
	}
}

// testLinkOfKernel: the kernel tests a quiet link each second, and we answer. Without an answer the kernel
// would end the link group.
func (b *bed) testLinkOfKernel(t *testing.T) {
	b.sysctl(t, "net.smc.smcr_testlink_time", 1)
	b.testLink(t, plan{engine: engineDials}, b.kernel.Addr(0), b.engine.Addr(0), 2, 3500*time.Millisecond)
}

// testLinkOfEngine: we test a link that has been quiet for 10 s, and the kernel
// answers. With one link there are no other messages: no ADD LINK is tried again.
func (b *bed) testLinkOfEngine(t *testing.T) {
	b.sysctl(t, "net.smc.smcr_testlink_time", 0)
	b.testLink(t, plan{engine: engineServes, ours: "-links 1"}, b.engine.Addr(0), b.kernel.Addr(0), 1, 11*time.Second)
}

// testLink has a connection wait for a time, in which there must be a least number of TEST LINK and of answers. As guests
// may have stood still for a part of that, a round with fewer is played again, and then the connection waits longer.
func (b *bed) testLink(t *testing.T, p plan, asks, answers netip.Addr, least int, hold time.Duration) {
	t.Helper()
	for _, p.do = range []string{fmt.Sprintf("hold:for=%v", hold), fmt.Sprintf("hold:for=%v", 3*hold)} {
		requests, responses := b.countTestLinks(t, p, asks, answers)
		// There may be more requests: the kernel repeats what it has sent on a queue
		// pair whose peer was killed.
		t.Logf("%s: %d TEST LINK from %v, %d answers", p.do, requests, asks, responses)
		if requests >= least && responses >= least {
			return
		}
	}
	t.Errorf("fewer than %d TEST LINK from %v, or answers", least, asks)
}

// countTestLinks plays a round and counts its TEST LINK messages, and the answers.
func (b *bed) countTestLinks(t *testing.T, p plan, asks, answers netip.Addr) (requests, responses int) {
	t.Helper()
	stop, err := b.lab.Capture("testlink-" + strings.ToLower(p.engine.String()))
	if err != nil {
		t.Fatal(err)
	}
	stopped := false
	defer func() {
		if !stopped { // the test has ended in play
			_, _ = stop()
		}
	}()
	got := b.play(t, p)
	stopped = true
	file, err := stop()
	if err != nil {
		t.Fatal(err)
	}
	got.wantSMCR(t, p, 1)
	capture, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range testLinksIn(capture) {
		switch {
		case !m.response && m.src == asks:
			requests++
		case m.response && m.src == answers:
			responses++
		}
	}
	return requests, responses
}

type testLinkMessage struct {
	src      netip.Addr
	response bool
}

// testLinksIn finds the TEST LINK messages of a capture: SENDs of 44 bytes over
// RoCEv2. Retransmissions count once each.
func testLinksIn(pcap []byte) []testLinkMessage {
	const (
		fileHeader, packetHeader = 24, 16
		ethernet, ipv4, udp, bth = 14, 20, 8, 12
		llcBytes                 = 44
		opSendOnly               = 4
		port4791                 = 4791
		typeTestLink, response   = 0x27, 0x80 // of version 2
	)
	var all []testLinkMessage
	seen := map[string]bool{}
	for b := pcap[min(fileHeader, len(pcap)):]; len(b) >= packetHeader; {
		n := int(binary.LittleEndian.Uint32(b[8:]))
		if n > len(b)-packetHeader {
			break
		}
		p := b[packetHeader : packetHeader+n]
		b = b[packetHeader+n:]
		if len(p) < ethernet+ipv4+udp+bth+llcBytes || binary.BigEndian.Uint16(p[12:]) != 0x0800 || p[ethernet] != 0x45 {
			continue
		}
		ip := p[ethernet:]
		t := ip[ipv4+udp:]
		if ip[9] != 17 || binary.BigEndian.Uint16(ip[ipv4+2:]) != port4791 || t[0]&0x1f != opSendOnly {
			continue
		}
		m := t[bth:]
		src := netip.AddrFrom4([4]byte(ip[12:]))
		if m[0] != typeTestLink || seen[src.String()+string(t[:bth])] {
			continue
		}
		seen[src.String()+string(t[:bth])] = true
		all = append(all, testLinkMessage{src, m[3]&response != 0})
	}
	return all
}
