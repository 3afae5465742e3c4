// SPDX-License-Identifier: Apache-2.0

package portmap

import (
	"fmt"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"
)

// exchange runs the scripts in testdata/scripts: the draft's figures of the port mapper, and its races. C is a client with
// its connecting peer, S a server; what the network does and what owners want is input, all that both machines do is output.
//
//	server [at=IP] [agents=PREFIX] [time=PMTIME] [pending=N]
//	                        a new server without mappings, on a host
//	maps service=ADDR to=ADDR
//	unmaps service=ADDR
//	asks service=ADDR cp=ADDR [from=IP] [handle=N]
//	                        a new transaction of C, of which from is the host: that of the connecting peer, if none is named
//	flow                    all that was sent arrives, and what that leads to
//	C|S passes [n=N]        the next datagrams that C has sent arrive at S
//	C|S loses [n=N]         the next ones do not
//	C|S repeats             a copy of the next one arrives before it
//	C|S turns               the next two arrive in the other order
//	C|S shows               the next one, as figure 17 draws it
//	wait n=MILLISECONDS
//	connects                the connecting peer connects to where C's transaction sends it
type exchange struct {
	s     *Server
	at    netip.Addr
	l     *Lookup
	from  netip.Addr
	now   time.Time
	up    []datagram // of C
	down  []datagram // of S
	state State      // of l, as was said
	held  int        // transactions of s, as was said
	lines []string
}

// datagram is one under way.
type datagram struct {
	client netip.Addr
	b      []byte
}

func TestExchange_scripts(t *testing.T) {
	if files, err := filepath.Glob("testdata/scripts/*.txt"); err != nil || len(files) < 4 { // also where one of them is run alone
		t.Fatalf("only %d scripts: %v", len(files), err)
	}
	datadriven.Walk(t, "testdata/scripts", func(t *testing.T, path string) {
		x := &exchange{now: began}
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			x.run(t, d)
			x.settle()
			out := strings.Join(x.lines, "\n")
			x.lines = nil
			if out == "" {
				return "ok\n"
			}
			return out + "\n"
		})
	})
}

func (x *exchange) say(format string, args ...any) {
	x.lines = append(x.lines, fmt.Sprintf(format, args...))
}

func (x *exchange) run(t *testing.T, d *datadriven.TestData) {
	switch d.Cmd {
	case "server":
		c := ServerConfig{CacheTime: CacheTime(argument(t, d, "time", 0)), MaxPending: argument(t, d, "pending", 0)}
		if p := text(t, d, "agents", ""); p != "" {
			c.Agents = []netip.Prefix{netip.MustParsePrefix(p)}
		}
		*x = exchange{s: NewServer(c), at: netip.MustParseAddr(text(t, d, "at", "10.0.0.2")), now: began}
	case "maps":
		if err := x.s.Map(addrPort(text(t, d, "service", "")), addrPort(text(t, d, "to", ""))); err != nil {
			x.say("error: %v", err)
		}
	case "unmaps":
		x.s.Unmap(addrPort(text(t, d, "service", "")))
	case "asks":
		cp := addrPort(text(t, d, "cp", "10.0.0.1:40000"))
		x.from = netip.MustParseAddr(text(t, d, "from", cp.Addr().String()))
		x.l = NewLookup(x.now, LookupConfig{Service: addrPort(text(t, d, "service", "")), CP: cp, Handle: uint64(argument(t, d, "handle", 1))})
		x.state = Waiting
	case "flow":
		for len(x.up)+len(x.down) > 0 {
			x.pass(len(x.up) > 0)
			x.settle()
		}
	case "C", "S":
		x.network(t, d, d.Cmd == "C")
	case "wait":
		x.wait(time.Duration(argument(t, d, "n", 0)) * time.Millisecond)
	case "connects":
		x.connect()
	default:
		d.Fatalf(t, "unknown command %q", d.Cmd)
	}
}

func argument(t *testing.T, d *datadriven.TestData, key string, n int) int {
	d.MaybeScanArgs(t, key, &n)
	return n
}

func text(t *testing.T, d *datadriven.TestData, key, s string) string {
	d.MaybeScanArgs(t, key, &s)
	return s
}

// network does something to the datagrams of one side.
func (x *exchange) network(t *testing.T, d *datadriven.TestData, up bool) {
	way := &x.down
	if up {
		way = &x.up
	}
	n := argument(t, d, "n", 1)
	what := d.CmdArgs[0].Key
	if what == "turns" {
		n = 2
	}
	if len(*way) < n {
		d.Fatalf(t, "%d datagrams are under way", len(*way))
	}
	q := *way
	switch what {
	case "passes":
		for range n {
			x.pass(up)
			x.settle()
		}
	case "loses":
		for _, g := range q[:n] {
			x.say("%v is lost", message(g.b))
		}
		*way = q[n:]
	case "repeats":
		*way = append([]datagram{q[0]}, q...)
		x.pass(up)
	case "turns":
		q[0], q[1] = q[1], q[0]
	case "shows":
		const word = 4
		for i := 0; i < Len; i += word {
			x.say("%x", q[0].b[i:i+word])
		}
	default:
		d.Fatalf(t, "unknown command %q", what)
	}
}

// message is what a datagram of ours says.
func message(b []byte) Message {
	m, err := ParseMessage(b)
	if err != nil {
		panic(err) // neither machine sends such a one
	}
	return m
}

// by names the host of a client that is not on that of the connecting peer.
func by(client netip.Addr, m Message) string {
	if client == m.CP.Addr() {
		return ""
	}
	return fmt.Sprintf(", by %v", client)
}

// pass brings the next datagram to the server, or to the client.
func (x *exchange) pass(up bool) {
	if !up {
		g := x.down[0]
		x.down = x.down[1:]
		x.say("C gets %v", message(g.b))
		if v := x.l.HandleDatagram(g.b); v != Taken {
			x.say("C discards it: %v", v)
		}
		return
	}
	g := x.up[0]
	x.up = x.up[1:]
	x.say("S gets %v%s", message(g.b), by(g.client, message(g.b)))
	before := x.s.Stats()
	answer := x.s.HandleDatagram(x.now, g.client, x.at, g.b, nil)
	after := x.s.Stats()
	for _, c := range []struct {
		before, after uint64
		what          string
	}{
		{before.Duplicates, after.Duplicates, "has heard that before"},
		{before.Replaced, after.Replaced, "forgets the transaction before it"},
		{before.DeniedUnknown, after.DeniedUnknown, "knows no such service"},
		{before.DeniedForeign, after.DeniedForeign, "says this to nobody but the connecting peer and agents"},
		{before.DeniedPeer + before.DeniedFull, after.DeniedPeer + after.DeniedFull, "has too many transactions"},
		{before.StrayAcks, after.StrayAcks, "has no such transaction"},
	} {
		if c.after != c.before {
			x.say("S %s", c.what)
		}
	}
	if len(answer) > 0 {
		m := message(answer)
		x.say("S sends %v%s", m, map[bool]string{true: fmt.Sprintf(", PmTime %d", m.CacheTime)}[m.Type == Accept])
		x.down = append(x.down, datagram{g.client, answer})
	}
}

// wait lets time pass, from one timeout to the next.
func (x *exchange) wait(d time.Duration) {
	for end := x.now.Add(d); ; x.settle() {
		x.now = end
		at, some := x.s.NextTimeout()
		if x.l != nil {
			if l, ok := x.l.NextTimeout(); ok && (!some || l.Before(at)) {
				at, some = l, true
			}
		}
		if !some || at.After(end) {
			return
		}
		x.now = at
		x.s.HandleTimeout(x.now)
		if x.l != nil {
			x.l.HandleTimeout(x.now)
		}
	}
}

// connect is the second stage, which is no matter of the protocol: a connection of TCP, of which the server hears.
func (x *exchange) connect() {
	c := &x.l.cfg
	if x.l.State() != Accepted {
		x.say("%v connects to %v, the conventional address", c.CP, c.Service)
		return
	}
	sdp, _ := x.l.Answer()
	x.say("%v connects to %v, the SDP address", c.CP, sdp)
	x.s.HandleConnect(c.CP, sdp)
}

// settle writes down what both machines want now, and in which state they are.
func (x *exchange) settle() {
	if x.l != nil {
		for b, ok := x.l.Poll(nil); ok; b, ok = x.l.Poll(nil) {
			x.say("C sends %v%s", message(b), by(x.from, message(b)))
			x.up = append(x.up, datagram{x.from, b})
		}
		if s := x.l.State(); s != x.state {
			x.state = s
			x.say("C is in %v", s)
		}
	}
	if n := x.s.Stats().Pending; n != x.held {
		x.held = n
		x.say("transactions of S: %d", n)
	}
}
