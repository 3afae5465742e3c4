// SPDX-License-Identifier: Apache-2.0

package vitcp

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// The scripts in testdata/connect are the rows of the tables of §4, §4.2 and §4.3: input is what the
// shell and the peer do, output is what the machine wants done, and its state.
//
//	call [peer] [timeout=D] [mtu=N] [window=N] [unreliable] [noread] [nofc]   VipConnectRequest, of "web0" to "db1"
//	dialed [posted=N]    TCP is established
//	dial-failed
//	answer TYPE [first=N] [posted=N] [mtu=N] [window=N] [bare] [...]          the peer's message; attributes as in call
//	data                 the peer's Send
//	bytes HEX            anything
//	end                  TCP closes
//	wait D               time passes
//	cancel
//	incoming             an accepted TCP connection
//	match|no-match|reject
//	accept [posted=N] [...]
func TestSection4_Scripts(t *testing.T) {
	files := 0
	datadriven.Walk(t, "testdata/connect", func(t *testing.T, path string) {
		files++
		s := &connectScript{now: time.Unix(0, 0)}
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			s.t = t
			return s.run(d)
		})
	})
	if files == 0 {
		t.Fatal("no scripts")
	}
}

type connectScript struct {
	t      testing.TB
	now    time.Time
	caller *Caller
	callee *Callee
}

func (s *connectScript) attr(d *datadriven.TestData) Attr {
	a := Attr{Reliable: true, RDMAWrite: true, RDMARead: true, FlowControl: true, MaxTransfer: 65536, ReadWindow: 8}
	a.Peer = d.HasArg("peer")
	a.Reliable = !d.HasArg("unreliable")
	a.RDMARead = !d.HasArg("noread")
	a.RDMAWrite = !d.HasArg("nowrite")
	a.FlowControl = !d.HasArg("nofc")
	a.MaxTransfer = uint32(s.number(d, "mtu", 65536))
	a.ReadWindow = uint16(s.number(d, "window", 8))
	return a
}

func (s *connectScript) number(d *datadriven.TestData, key string, value int) int {
	if d.HasArg(key) {
		d.ScanArgs(s.t, key, &value)
	}
	return value
}

func (s *connectScript) ce(d *datadriven.TestData) CE {
	return CE{Attr: s.attr(d), Calling: disc(s.t, "web0"), Called: disc(s.t, "db1")}
}

func (s *connectScript) run(d *datadriven.TestData) string {
	note := ""
	switch d.Cmd {
	case "call":
		timeout := 10 * time.Second
		c, err := NewCaller(CallConfig{
			Calling: disc(s.t, "web0"), Called: disc(s.t, "db1"), Attr: s.attr(d), First: 100, Timeout: timeout,
		})
		if err != nil {
			return err.Error()
		}
		s.caller, s.callee = c, nil
		c.Start(s.now)
	case "dialed":
		s.caller.HandleDialed(s.now, uint16(s.number(d, "posted", 0)))
	case "dial-failed":
		s.caller.HandleDialFailed(s.now, errors.New("refused"))
	case "cancel":
		s.caller.Cancel(s.now)
	case "incoming":
		s.caller, s.callee = nil, NewCallee(s.now, CalleeConfig{})
	case "match":
		s.callee.Match(s.now)
	case "no-match":
		s.callee.NoMatch(s.now)
	case "reject":
		s.callee.Reject(s.now)
	case "accept":
		a, err := s.callee.Accept(s.now, Answer{Attr: s.attr(d), First: 200, Posted: uint16(s.number(d, "posted", 0))})
		if err != nil {
			note = err.Error() + "\n"
		} else {
			note = fmt.Sprintf("agreed %+v\n", a)
		}
	case "wait":
		dur, err := time.ParseDuration(d.CmdArgs[0].Key)
		if err != nil {
			s.t.Fatal(err)
		}
		s.now = s.now.Add(dur)
		s.timeout()
	case "end":
		if s.caller != nil {
			s.caller.HandleEnd(s.now, nil)
		} else {
			s.callee.HandleEnd(s.now, nil)
		}
	case "bytes", "data", "answer", "request":
		s.feed(s.message(d))
	default:
		s.t.Fatalf("unknown command %q", d.Cmd)
	}
	return note + s.outputs()
}

func (s *connectScript) message(d *datadriven.TestData) []byte {
	switch d.Cmd {
	case "bytes":
		return unhex(s.t, d.CmdArgs[0].Key)
	case "data":
		return unhex(s.t, golden[0].hex)
	case "request":
		m := connectMessage{typ: TypeConnectRequest, first: 100, posted: 3, ce: s.ce(d)}
		return m.bytes()
	}
	types := map[string]Type{
		"accept": TypeConnectAccept, "reject": TypeConnectReject, "no-match": TypeConnectNoMatch, "request": TypeConnectRequest,
	}
	m := connectMessage{
		typ: types[d.CmdArgs[0].Key], first: uint32(s.number(d, "first", 200)), posted: uint16(s.number(d, "posted", 0)), ce: s.ce(d),
	}
	b := m.bytes()
	if d.HasArg("bare") {
		b = (&Header{Type: m.typ, Flags: FlagEnd, Length: HeaderLen}).Append(nil)
	}
	return b
}

// feed gives bytes one by one, and stops where the machine does not want them any more.
func (s *connectScript) feed(b []byte) {
	for i := range b {
		if s.caller != nil {
			s.caller.HandleData(s.now, b[i:i+1])
			if s.caller.Want() == 0 {
				return
			}
		} else {
			s.callee.HandleData(s.now, b[i:i+1])
			if s.callee.Want() == 0 {
				return
			}
		}
	}
}

func (s *connectScript) timeout() {
	if s.caller != nil {
		s.caller.HandleTimeout(s.now)
	} else {
		s.callee.HandleTimeout(s.now)
	}
}

func (s *connectScript) outputs() string {
	var b strings.Builder
	var out []Output
	var state State
	var at time.Time
	var ok bool
	if s.caller != nil {
		out, state = s.caller.Poll(nil), s.caller.State()
		at, ok = s.caller.NextTimeout()
	} else {
		out, state = s.callee.Poll(nil), s.callee.State()
		at, ok = s.callee.NextTimeout()
	}
	for _, o := range out {
		fmt.Fprintf(&b, "%v", o.Kind)
		switch o.Kind {
		case OutputSend:
			m, err := parseConnect(o.Data)
			if err != nil {
				s.t.Fatalf("our own message: %v", err)
			}
			fmt.Fprintf(&b, " %v: first %d, posted %d, %q to %q, %+v", m.typ, m.first, m.posted, m.ce.Calling, m.ce.Called, m.ce.Attr)
		case OutputRequest:
			fmt.Fprintf(&b, " of %q to %q: %+v", o.Request.Calling, o.Request.Called, o.Request.Attr)
		case OutputConnected:
			fmt.Fprintf(&b, ": first %d and %d, posted %d and %d, %+v",
				o.Terms.First, o.Terms.PeerFirst, o.Terms.Posted, o.Terms.PeerPosted, o.Terms.Attr)
		case OutputFailed:
			fmt.Fprintf(&b, ": %v", o.Err)
		}
		b.WriteByte('\n')
	}
	b.WriteString(state.String())
	if ok {
		fmt.Fprintf(&b, ", timer in %v", at.Sub(s.now))
	}
	return b.String()
}

// peerNode is one host of peer-to-peer mode: its call, and the calls that reach it.
type peerNode struct {
	addr  netip.Addr
	disc  Discriminator
	call  *Peer
	begun bool
	conns []*peerConn // by this node's call, or from the other
	ended error
	terms []Terms
}

// peerConn is a TCP connection of the network below.
type peerConn struct {
	from   *peerNode
	callee *Callee
	closed bool
}

// peerNet runs two nodes with delays that a seed draws.
type peerNet struct {
	t     testing.TB
	rng   *rand.Rand
	now   time.Time
	nodes [2]*peerNode
	queue []peerEvent
	live  int // TCP connections that both ends think connected
}

type peerEvent struct {
	at time.Time
	do func()
}

func (p *peerNet) later(do func()) {
	at := p.now.Add(time.Duration(p.rng.IntN(3000)) * time.Microsecond)
	if p.rng.IntN(3) == 0 {
		at = at.Add(time.Duration(p.rng.IntN(300)) * time.Millisecond)
	}
	p.queue = append(p.queue, peerEvent{at, do})
}

func (p *peerNet) other(n *peerNode) *peerNode {
	if p.nodes[0] == n {
		return p.nodes[1]
	}
	return p.nodes[0]
}

// pump does what a node's call wants.
func (p *peerNet) pump(n *peerNode) {
	for _, o := range n.call.Poll(nil) {
		switch o.Kind {
		case OutputDial:
			c := &peerConn{from: n}
			n.conns = append(n.conns, c)
			p.later(func() {
				if !c.closed && n.conns[len(n.conns)-1] == c {
					c.callee = NewCallee(p.now, CalleeConfig{})
					n.call.HandleDialed(p.now, 1)
					p.pump(n)
				}
			})
		case OutputSend:
			c := n.conns[len(n.conns)-1]
			p.inOrder(c, func() {
				c.callee.HandleData(p.now, o.Data)
				p.pumpCallee(c)
			})
		case OutputClose:
			c := n.conns[len(n.conns)-1]
			c.closed = true
			if c.callee != nil {
				p.inOrder(c, func() { c.callee.HandleEnd(p.now, nil); p.pumpCallee(c) })
			}
		case OutputConnected:
			n.terms = append(n.terms, o.Terms)
			p.live++
		case OutputFailed:
			n.ended = o.Err
		}
	}
}

// inOrder delivers what the same TCP connection carries in the order it was sent.
func (p *peerNet) inOrder(c *peerConn, do func()) { p.later(do); p.order(c) }

// order gives the last event no earlier time than the one before it, for all connections: TCP does no less.
func (p *peerNet) order(*peerConn) {
	k := len(p.queue) - 1
	if k > 0 && p.queue[k].at.Before(p.queue[k-1].at) {
		p.queue[k].at = p.queue[k-1].at
	}
}

// pumpCallee does what a call that reached a node wants.
func (p *peerNet) pumpCallee(c *peerConn) {
	host := p.other(c.from)
	for {
		outs := c.callee.Poll(nil)
		if len(outs) == 0 {
			return
		}
		for _, o := range outs {
			switch o.Kind {
			case OutputRequest:
				if host.begun && o.Request.Called == host.disc && o.Request.Calling == c.from.disc {
					host.call.HandleRequest(p.now, c.callee, 1)
					p.pump(host)
				} else {
					c.callee.NoMatch(p.now)
				}
			case OutputSend:
				p.inOrder(c, func() {
					if !c.closed {
						c.from.call.HandleData(p.now, o.Data)
						p.pump(c.from)
					}
				})
			case OutputClose:
				p.inOrder(c, func() {
					if !c.closed && c.from.conns[len(c.from.conns)-1] == c {
						c.from.call.HandleEnd(p.now, nil)
						p.pump(c.from)
					}
				})
			case OutputConnected:
				host.terms = append(host.terms, o.Terms)
			}
		}
	}
}

func (p *peerNet) run() {
	for range 10_000 {
		if len(p.nodes[0].terms) > 0 && len(p.nodes[1].terms) > 0 && len(p.queue) == 0 {
			return
		}
		next := -1
		for i := range p.queue {
			if next < 0 || p.queue[i].at.Before(p.queue[next].at) {
				next = i
			}
		}
		var timer *peerNode
		var at time.Time
		if next >= 0 {
			at = p.queue[next].at
		}
		for _, n := range p.nodes {
			if d, ok := n.call.NextTimeout(); ok && n.begun && (at.IsZero() || d.Before(at)) {
				at, timer = d, n
			}
		}
		if at.IsZero() {
			return
		}
		if at.After(p.now) {
			p.now = at
		}
		if timer != nil {
			timer.call.HandleTimeout(p.now)
			p.pump(timer)
			continue
		}
		e := p.queue[next]
		p.queue = slices.Delete(p.queue, next, next+1)
		e.do()
	}
	p.t.Fatal("no end")
}

// §4: where calls of two peers meet, one of them stands, and exactly one connection comes of it.
func TestSection4_PeerToPeer(t *testing.T) {
	conceded := 0
	for seed := range uint64(1000) {
		p := &peerNet{t: t, rng: rand.New(rand.NewPCG(seed, 4)), now: time.Unix(0, 0)}
		addrs := [2]string{"10.0.0.1", "10.0.0.2"}
		if seed%3 == 0 {
			addrs[1] = addrs[0] // the discriminators decide
		}
		for i := range p.nodes {
			p.nodes[i] = &peerNode{addr: netip.MustParseAddr(addrs[i]), disc: disc(t, fmt.Sprint("node", i))}
		}
		for i, n := range p.nodes {
			o := p.nodes[1-i]
			var err error
			n.call, err = NewPeer(CallConfig{
				Calling: n.disc, Called: o.disc, First: uint32(i),
				Attr: Attr{Reliable: true, MaxTransfer: 100},
			}, n.addr, o.addr)
			if err != nil {
				t.Fatal(err)
			}
			p.later(func() { n.begun = true; n.call.Start(p.now); p.pump(n) })
		}
		p.run()
		for i, n := range p.nodes {
			if len(n.terms) != 1 || n.terms[0].First != uint32(i) || n.terms[0].PeerFirst != uint32(1-i) || !n.terms[0].Peer {
				t.Fatalf("seed %d: node %d has terms %+v, ended with %v", seed, i, n.terms, n.ended)
			}
			if errors.Is(n.ended, ErrRival) {
				conceded++
			}
		}
		if p.live != 1 {
			t.Fatalf("seed %d: %d calls stand, want 1", seed, p.live)
		}
	}
	if conceded != 1000 {
		t.Errorf("%d of 1000 pairs had one concede", conceded)
	}
}

func TestNewPeer_refusesItself(t *testing.T) {
	a := netip.MustParseAddr("10.0.0.1")
	c := CallConfig{Calling: disc(t, "x"), Called: disc(t, "x"), Attr: Attr{MaxTransfer: 1}}
	if _, err := NewPeer(c, a, a); !errors.Is(err, rdma.ErrInvalid) {
		t.Errorf("%v, want ErrInvalid", err)
	}
}

// A peer's call that is none of peer-to-peer mode, or does not fit, is refused.
func TestPeer_refuses(t *testing.T) {
	now := time.Unix(0, 0)
	lo, hi := netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.0.2")
	for _, c := range []struct {
		name  string
		attr  Attr
		state State
		err   error
	}{
		{"not peer-to-peer", Attr{MaxTransfer: 1}, StateConnecting, nil},
		{"attributes", Attr{MaxTransfer: 1, Peer: true, RDMARead: true}, StateDisconnected, ErrRDMARead},
	} {
		p, err := NewPeer(CallConfig{Calling: disc(t, "a"), Called: disc(t, "b"), Attr: Attr{MaxTransfer: 1}}, lo, hi)
		if err != nil {
			t.Fatal(err)
		}
		p.Start(now)
		in := NewCallee(now, CalleeConfig{})
		m := connectMessage{typ: TypeConnectRequest, ce: CE{Attr: c.attr, Calling: disc(t, "b"), Called: disc(t, "a")}}
		in.HandleData(now, m.bytes())
		in.Poll(nil)
		if p.HandleRequest(now, in, 0) {
			t.Errorf("%s: taken", c.name)
		}
		if in.State() != StateDisconnected || p.State() != c.state {
			t.Errorf("%s: callee in %v, our call in %v, want %v", c.name, in.State(), p.State(), c.state)
		}
		var failed error
		for _, o := range p.Poll(nil) {
			if o.Kind == OutputFailed {
				failed = o.Err
			}
		}
		if !errors.Is(failed, c.err) {
			t.Errorf("%s: our call ended with %v, want %v", c.name, failed, c.err)
		}
	}
}

func TestValidateOffer(t *testing.T) {
	good := CallConfig{Attr: Attr{MaxTransfer: 1}}
	for name, f := range map[string]func(*CallConfig){
		"no transfer":       func(c *CallConfig) { c.Attr.MaxTransfer = 0 },
		"window":            func(c *CallConfig) { c.Attr.ReadWindow = MaxReadWindow + 1 },
		"security":          func(c *CallConfig) { c.Security = make([]byte, MaxSecurity+1) },
		"negative patience": func(c *CallConfig) { c.Timeout = -1 },
	} {
		c := good
		f(&c)
		if _, err := NewCaller(c); !errors.Is(err, rdma.ErrInvalid) {
			t.Errorf("%s: %v, want ErrInvalid", name, err)
		}
	}
	if _, err := NewCaller(good); err != nil {
		t.Error(err)
	}
}
