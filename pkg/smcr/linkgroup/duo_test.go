// SPDX-License-Identifier: Apache-2.0

package linkgroup_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr/linkgroup"
	"github.com/smcr-io/kube-smcr/pkg/smcr/llc"
)

// duo is two groups that talk to each other over links that deliver at once.
type duo struct {
	t     testing.TB
	now   time.Time
	sides [2]*duoSide
	wire  wire
	kinds map[llc.Type]int // LLC requests by type
	long  int              // messages of more than 44 bytes
}

// duoSide is one of them with its RNICs.
type duoSide struct {
	d       *duo
	n       int
	g       *linkgroup.Group
	rnics   uint8
	down    uint8
	qps     map[rdma.QPN]linkgroup.LinkIndex
	rnicOf  [linkgroup.MaxLinks]uint8
	peerQPN [linkgroup.MaxLinks]rdma.QPN
	nextQPN rdma.QPN
	rmbs    int
	placed  map[*linkgroup.Conn]uint64 // bytes that we wrote for it
}

// wire is what two groups speak.
type wire struct {
	name    string
	version uint8
	rfc     bool
}

func (w wire) String() string { return w.name }

// wires are all that there are.
var wires = []wire{{"v1 RFC", 1, true}, {"v1 Linux", 1, false}, {"v2", 2, false}}

// newDuo connects two groups with one connection.
func newDuo(t testing.TB, w wire, rnics [2]uint8, maxLinks uint8) (*duo, [2]*linkgroup.Conn) {
	d := &duo{t: t, now: time.Unix(1000, 0), kinds: map[llc.Type]int{}, wire: w}
	for n := range d.sides {
		s := &duoSide{
			d: d, n: n, rnics: rnics[n], qps: map[rdma.QPN]linkgroup.LinkIndex{}, placed: map[*linkgroup.Conn]uint64{},
			nextQPN: rdma.QPN(0x100 * (n + 1)),
		}
		s.g = linkgroup.New(linkgroup.Config{
			Role: linkgroup.Role(n), Version: w.version, Release: 1, AllowRFC: w.rfc, MaxLinks: maxLinks,
			Rand: rand.New(rand.NewPCG(1, uint64(n))),
		})
		d.sides[n] = s
		s.g.AddFirstLink(s.endpoint(0, 0))
	}
	conns := [2]*linkgroup.Conn{d.sides[0].open(), d.sides[1].open()}
	for n, c := range conns {
		if err := c.Activate(conns[1-n].Local()); err != nil {
			t.Fatal(err)
		}
	}
	client, server := d.sides[0], d.sides[1]
	client.g.ConnectPeer(d.now, server.g.LocalEndpoint())
	server.g.ConnectPeer(d.now, client.g.LocalEndpoint())
	d.runUntilQuiet()
	return d, conns
}

func (s *duoSide) endpoint(index linkgroup.LinkIndex, rnic uint8) linkgroup.Endpoint {
	s.nextQPN++
	s.qps[s.nextQPN] = index
	s.rnicOf[index] = rnic
	return linkgroup.Endpoint{
		QPN: s.nextQPN, GID: rdma.GID{14: rnic, 15: byte(s.n + 1)}, MAC: rdma.MAC{4: rnic, 5: byte(s.n + 1)}, MTU: rdma.MTU1024, RNIC: rnic,
	}
}

// key is the RKey of RMB n on an RNIC.
func (s *duoSide) key(n int, rnic uint8) rdma.RKey {
	return rdma.RKey(s.n+1)<<24 | rdma.RKey(n)<<8 | rdma.RKey(rnic)
}

func (s *duoSide) open() *linkgroup.Conn {
	c, err := s.g.OpenConn(rmbeSize, sendBuffer)
	if errors.Is(err, linkgroup.ErrNeedRMB) {
		s.rmbs++
		tokens := []linkgroup.RToken{{RKey: s.key(s.rmbs, 0), VAddr: 1 << 20}}
		id, err := s.g.AddRMB(rmbeSize, 2, tokens)
		if err != nil {
			s.d.t.Fatal(err)
		}
		for n := uint8(1); n < s.rnics; n++ { // registered later
			s.g.SetRMBToken(id, n, linkgroup.RToken{RKey: s.key(s.rmbs, n), VAddr: 1<<20 + uint64(n)<<32})
		}
		c, _ = s.g.OpenConn(rmbeSize, sendBuffer)
	}
	return c
}

// connect opens a further connection as a rendezvous does.
func (d *duo) connect() [2]*linkgroup.Conn {
	d.t.Helper()
	conns := d.accept()
	if err := conns[1].Activate(conns[0].Local()); err != nil {
		d.t.Fatal(err)
	}
	d.runUntilQuiet()
	return conns
}

// accept opens a connection up to the client's Confirm, which is on its way.
func (d *duo) accept() [2]*linkgroup.Conn {
	d.t.Helper()
	client, server := d.sides[0], d.sides[1]
	sc := server.open()
	server.g.ConfirmRMB(sc.Local().RMB)
	d.runUntilQuiet()
	accept, via := sc.Local(), sc.Endpoint()
	index, ok := client.g.FindLink(via.QPN, via.GID, via.MAC)
	if !ok {
		d.t.Fatalf("the client does not know the link of %v", via)
	}
	cc := client.open()
	cc.UseLink(index)
	client.g.ConfirmRMB(cc.Local().RMB)
	d.runUntilQuiet()
	if err := cc.Activate(accept); err != nil {
		d.t.Fatal(err)
	}
	return [2]*linkgroup.Conn{cc, sc}
}

// runUntilQuiet lets both sides act until neither wants anything.
func (d *duo) runUntilQuiet() {
	d.t.Helper()
	for range 10000 {
		busy := false
		for _, s := range d.sides {
			if s.g.Idle() {
				continue
			}
			busy = true
			for _, o := range s.g.Poll(d.now, nil) {
				s.do(o)
			}
			if err := s.g.Check(); err != nil {
				d.t.Fatalf("side %d: %v", s.n, err)
			}
		}
		if !busy {
			return
		}
	}
	d.t.Fatal("the groups do not come to rest")
}

// advance lets time pass, in steps.
func (d *duo) advance(dur time.Duration) {
	d.t.Helper()
	for end := d.now.Add(dur); d.now.Before(end); {
		d.now = d.now.Add(100 * time.Millisecond)
		for _, s := range d.sides {
			s.g.HandleTimeout(d.now)
		}
		d.runUntilQuiet()
	}
}

func (s *duoSide) do(o linkgroup.Output) {
	d, other := s.d, s.d.sides[1-s.n]
	switch o.Kind {
	case linkgroup.OutReceive:
		s.peerQPN[o.Link] = o.Peer.QPN
	case linkgroup.OutTransmit:
	case linkgroup.OutCloseLink:
		for qpn, i := range s.qps {
			if i == o.Link {
				delete(s.qps, qpn)
			}
		}
		s.peerQPN[o.Link] = 0
	case linkgroup.OutWrite:
		to, ok := other.qps[s.peerQPN[o.Link]]
		if !ok {
			return
		}
		if got := uint8(o.RKey); got != other.rnicOf[to] || uint64(got) != o.RemoteAddr>>32 || o.RKey>>24 != rdma.RKey(other.n+1) {
			d.t.Errorf("side %d writes over link %d, which ends at RNIC %d, to 0x%x with RKey 0x%x",
				s.n, o.Link, other.rnicOf[to], o.RemoteAddr, uint32(o.RKey))
		}
		s.placed[o.Conn] += uint64(o.Local[0].Len + o.Local[1].Len)
	case linkgroup.OutSend:
		to, ok := other.qps[s.peerQPN[o.Link]]
		if !ok {
			return // the peer's half is gone
		}
		b := bytesOf(&o)
		if m, err := llc.Parse(s.g.Dialect(), d.wire.version, b); err == nil {
			if !m.IsResponse() {
				d.kinds[m.Type()]++
			}
			if v2 := b[0]>>4 == 2; v2 != (d.wire.version == 2) {
				d.t.Errorf("side %d sends %v", s.n, m)
			}
		}
		if len(b) > llc.Size {
			d.long++
		}
		s.g.HandleSent(d.now, o.Link, o.ID)
		if err := other.g.HandleRecv(d.now, to, b); err != nil {
			d.t.Errorf("side %d: %v", other.n, err)
		}
	case linkgroup.OutEvent:
		if o.Event == linkgroup.EventWantLink {
			s.wantLink(o)
		}
	}
}

// bytesOf is what OutSend sends.
func bytesOf(o *linkgroup.Output) []byte {
	if o.Long != nil {
		return o.Long
	}
	return o.Msg[:]
}

func (s *duoSide) wantLink(o linkgroup.Output) {
	used := s.g.RNICsInUse()
	for _, set := range [...]uint8{used | s.down, s.down} {
		for n := range s.rnics {
			if set&(1<<n) == 0 {
				s.g.OfferLink(s.d.now, o.Link, s.endpoint(o.Link, n))
				return
			}
		}
		if o.Fresh {
			break
		}
	}
	s.g.NoLink(s.d.now, o.Link)
}

func (s *duoSide) port(rnic uint8, up bool) {
	s.down &^= 1 << rnic
	if !up {
		s.down |= 1 << rnic
	}
	s.g.HandlePort(s.d.now, rnic, up)
}

// exchange sends bytes both ways over a connection.
func (d *duo) exchange(conns [2]*linkgroup.Conn, n uint64) {
	d.t.Helper()
	for i, c := range conns {
		before := conns[1-i].Data().PeerProduced()
		c.Produce(c.Data().Produced() + n)
		d.runUntilQuiet()
		got := conns[1-i].Data().PeerProduced()
		if got != before+n {
			d.t.Fatalf("side %d wrote %d bytes, %d arrived", i, n, got-before)
		}
		conns[1-i].Consume(got)
		d.runUntilQuiet()
	}
}

func (d *duo) links(want int, r linkgroup.Redundancy) {
	d.t.Helper()
	for n, s := range d.sides {
		if got := s.g.Links(); len(got) != want || s.g.Redundancy() != r {
			d.t.Fatalf("side %d has %d links, %v, want %d, %v: %+v", n, len(got), s.g.Redundancy(), want, r, got)
		}
	}
}

// RFC 7609 §2.2.2: from one link to the largest group, and back link by link,
// with connections that never notice.
func TestSection2_2_2_EightLinks(t *testing.T) {
	for _, w := range wires {
		t.Run(w.name, func(t *testing.T) {
			d, first := newDuo(t, w, [2]uint8{8, 8}, 8)
			d.links(8, linkgroup.Symmetric)
			conns := [][2]*linkgroup.Conn{first}
			for range 16 {
				conns = append(conns, d.connect())
			}
			if d.kinds[llc.TypeConfirmRKeyContinuation] == 0 {
				t.Error("RMBs of eight links were confirmed without a continuation")
			}
			if v2 := w.version == 2; (d.long > 0) != v2 || (d.kinds[llc.TypeAddLinkContinuation] == 0) != v2 {
				t.Errorf("%d long messages, %d continuations of ADD LINK", d.long, d.kinds[llc.TypeAddLinkContinuation])
			}
			for _, s := range d.sides {
				for _, l := range s.g.Links() {
					if l.Conns < 2 || l.Conns > 3 {
						t.Errorf("side %d, link %d carries %d of 17 connections", s.n, l.Index, l.Conns)
					}
				}
			}
			for lost := uint8(0); lost < 7; lost++ {
				d.sides[lost&1].port(lost, false)
				d.sides[1-lost&1].down |= 1 << lost // its other end is of no use
				d.runUntilQuiet()
				for _, c := range conns {
					d.exchange(c, 100)
				}
			}
			d.links(1, linkgroup.Single)
			for back := uint8(0); back < 7; back++ {
				d.sides[0].down &^= 1 << back
				d.sides[1].down &^= 1 << back
			}
			d.sides[0].port(0, true) // the client's hint brings them all back
			d.runUntilQuiet()
			d.links(8, linkgroup.Symmetric)
			for _, c := range conns {
				d.exchange(c, 100)
			}
		})
	}
}

// §2.2.1: each kind of group, from what the two sides have.
func TestSection2_2_1_Redundancy(t *testing.T) {
	for _, tt := range []struct {
		name   string
		rnics  [2]uint8 // client, server
		links  int
		client linkgroup.Redundancy
		server linkgroup.Redundancy
	}{
		{"one each", [2]uint8{1, 1}, 1, linkgroup.Single, linkgroup.Single},
		{"client has two", [2]uint8{2, 1}, 2, linkgroup.AsymmetricPeer, linkgroup.AsymmetricLocal},
		{"server has two", [2]uint8{1, 2}, 2, linkgroup.AsymmetricLocal, linkgroup.AsymmetricPeer},
		{"two each", [2]uint8{2, 2}, 2, linkgroup.Symmetric, linkgroup.Symmetric},
		{"two and three", [2]uint8{2, 3}, 2, linkgroup.Symmetric, linkgroup.Symmetric},
	} {
		for _, w := range wires {
			t.Run(tt.name+"/"+w.name, func(t *testing.T) {
				d, conns := newDuo(t, w, tt.rnics, 8)
				d.exchange(conns, 100)
				for n, want := range []linkgroup.Redundancy{tt.client, tt.server} {
					if g := d.sides[n].g; len(g.Links()) != tt.links || g.Redundancy() != want {
						t.Errorf("side %d: %d links, %v, want %d, %v", n, len(g.Links()), g.Redundancy(), tt.links, want)
					}
				}
				d.advance(30 * time.Minute) // nothing comes of the retries
				for n, s := range d.sides {
					if len(s.g.Links()) != tt.links {
						t.Errorf("side %d: %d links later", n, len(s.g.Links()))
					}
				}
			})
		}
	}
}

// Either side's second RNIC goes and comes back: the symmetric group becomes an
// asymmetric one and recovers; only one asymmetric link exists at any time.
func TestDuo_portsFlap(t *testing.T) {
	for _, w := range wires {
		for side := range 2 {
			t.Run(fmt.Sprintf("%v/side %d", w, side), func(t *testing.T) {
				d, conns := newDuo(t, w, [2]uint8{2, 2}, 2)
				for round := range 5 {
					rnic := uint8(round & 1)
					d.sides[side].port(rnic, false)
					d.runUntilQuiet()
					d.exchange(conns, 1000)
					if r := d.sides[side].g.Redundancy(); r != linkgroup.AsymmetricLocal {
						t.Fatalf("lost RNIC %d: %v", rnic, r)
					}
					d.sides[side].port(rnic, true)
					d.runUntilQuiet()
					d.links(2, linkgroup.Symmetric)
					d.exchange(conns, 1000)
				}
				if asks := w.version == 2 && side == 0; (d.kinds[llc.TypeRequestAddLink] > 0) != asks {
					t.Errorf("%d times REQUEST ADD LINK", d.kinds[llc.TypeRequestAddLink])
				}
			})
		}
	}
}

// A Confirm names a link that is lost before it arrives, whose place another
// link has by then, and whose RNIC none.
func TestDuo_confirmNamesFormerLink(t *testing.T) {
	for _, w := range wires {
		t.Run(w.name, func(t *testing.T) {
			d, _ := newDuo(t, w, [2]uint8{3, 3}, 2)
			conns := d.accept()
			confirm, server := conns[0].Local(), d.sides[1].g
			at := func(l linkgroup.LinkInfo) bool { return l.Local == conns[1].Endpoint() }
			links := server.Links()
			named := links[slices.IndexFunc(links, at)].Index
			d.sides[0].port(conns[0].Endpoint().RNIC, false)
			for lost := 0; ; lost++ {
				d.runUntilQuiet()
				d.advance(2 * time.Second)
				d.links(2, linkgroup.Symmetric)
				links = server.Links()
				if slices.ContainsFunc(links, func(l linkgroup.LinkInfo) bool { return l.Index == named }) {
					break
				}
				if lost > linkgroup.MaxLinks {
					t.Fatalf("no other link takes place %d: %+v", named, links)
				}
				server.HandleLinkFailure(d.now, links[lost%2].Index, errors.New("test"))
			}
			if err := conns[1].Activate(confirm); err != nil {
				t.Fatal(err)
			}
			d.exchange(conns, 100)
		})
	}
}

// §2.2.4: a link number comes back only after all others.
func TestSection2_2_4_LinkNumbers(t *testing.T) {
	d, _ := newDuo(t, wires[1], [2]uint8{2, 2}, 2)
	used := map[llc.LinkID]bool{}
	for round := range 200 {
		for _, l := range d.sides[1].g.Links() {
			if l.ID > 2 && used[l.ID] {
				t.Fatalf("number %d again in round %d", l.ID, round)
			}
		}
		l := d.sides[1].g.Links()[0]
		used[l.ID] = true
		d.sides[1].g.HandleLinkFailure(d.now, l.Index, errors.New("test"))
		d.runUntilQuiet()
		d.advance(100 * time.Millisecond)
	}
	if len(used) < 200 {
		t.Errorf("%d numbers in 200 rounds", len(used))
	}
}

// Nothing is allocated for a message while links fail over around it.
func TestGroup_failoverDataPathAllocatesNothing(t *testing.T) {
	d, conns := newDuo(t, wires[1], [2]uint8{2, 2}, 2)
	d.sides[0].g.HandleLinkFailure(d.now, 0, errors.New("test"))
	d.runUntilQuiet()
	s, c := d.sides[0], conns[0]
	outs := make([]linkgroup.Output, 0, 16)
	pos := c.Data().Produced()
	send := func() {
		pos++
		c.Produce(pos)
		for !s.g.Idle() {
			outs = s.g.Poll(d.now, outs[:0])
			for i := range outs {
				if outs[i].Kind == linkgroup.OutSend {
					s.g.HandleSent(d.now, outs[i].Link, outs[i].ID)
				}
			}
		}
	}
	if n := testing.AllocsPerRun(1000, send); n != 0 {
		t.Errorf("%v allocations per message", n)
	}
}
