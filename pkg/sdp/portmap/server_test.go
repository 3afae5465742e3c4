// SPDX-License-Identifier: Apache-2.0

package portmap

import (
	"errors"
	"fmt"
	"net/netip"
	"testing"
	"time"
)

// A host is a server and its clock.
type host struct {
	*Server
	t   testing.TB
	now time.Time
}

func newHost(t testing.TB, c ServerConfig) *host {
	t.Helper()
	if err := c.Validate(); err != nil {
		t.Fatal(err)
	}
	h := &host{Server: NewServer(c), t: t, now: began}
	h.must(h.Map(service, sdpAddr))
	return h
}

func (h *host) must(err error) {
	h.t.Helper()
	if err != nil {
		h.t.Fatal(err)
	}
}

// hear gives the server a message of its connecting peer's host, and returns the answer.
func (h *host) hear(m Message) (Message, bool) {
	h.t.Helper()
	return h.hearFrom(m.CP.Addr(), m)
}

func (h *host) hearFrom(from netip.Addr, m Message) (Message, bool) {
	h.t.Helper()
	b := h.HandleDatagram(h.now, from, service.Addr(), m.Append(nil), nil)
	if len(b) == 0 {
		return Message{}, false
	}
	if len(b) != Len {
		h.t.Fatalf("answers %d bytes", len(b))
	}
	a, err := ParseMessage(b)
	h.must(err)
	return a, true
}

// counts compares some counts and the number of transactions.
func (h *host) counts(pending int, want ServerStats) {
	h.t.Helper()
	got := h.Stats()
	want.Mappings, want.Pending, want.Peers, want.Datagrams = got.Mappings, pending, got.Peers, got.Datagrams
	if got != want {
		h.t.Errorf("counts\n%+v, want\n%+v", got, want)
	}
}

func req() Message { return answer(Request) }

func (h *host) wants(m Message, typ Type) {
	h.t.Helper()
	a, ok := h.hear(m)
	want := m
	want.Type = typ
	if typ == Accept {
		want.AP, want.CacheTime = sdpAddr, h.cfg.CacheTime
	}
	if !ok || a != want {
		h.t.Errorf("%v is answered by %v, PmTime %d, %v; want %v, PmTime %d", m, a, a.CacheTime, ok, want, want.CacheTime)
	}
}

// TestSection7_4_Answers: a PMAccept and a PMDeny have what the PMReq had, but for what they say.
func TestSection7_4_Answers(t *testing.T) {
	h := newHost(t, ServerConfig{CacheTime: 40})
	h.wants(req(), Accept)
	ack := answer(Ack)
	if a, ok := h.hear(ack); ok {
		t.Errorf("a PMAck is answered by %v", a)
	}
	unknown := req()
	unknown.AP = addrPort("10.0.0.2:5002")
	h.wants(unknown, Deny)
	unknown.AP = addrPort("10.0.0.3:5001")
	h.wants(unknown, Deny)
	h.counts(0, ServerStats{Requests: 3, Accepted: 1, DeniedUnknown: 2, Acked: 1})

	h.must(h.Map(addrPort("[fd00::2]:5001"), addrPort("[fd00::3]:35001")))
	six := Message{Type: Request, Handle: 1, CP: addrPort("[fd00::1]:40000"), AP: addrPort("[fd00::2]:5001")}
	if a, ok := h.hear(six); !ok || a.Type != Accept || a.AP != addrPort("[fd00::3]:35001") || a.CP != six.CP || a.Handle != 1 {
		t.Errorf("IPv6: %v, %v", a, ok)
	}
	v6, mapped := req(), netip.AddrFrom16(service.Addr().As16())
	v6.CP, v6.AP = netip.AddrPortFrom(netip.AddrFrom16(cpAddr.Addr().As16()), 1), netip.AddrPortFrom(mapped, service.Port())
	h.wants(v6, Deny) // IPv4 in the form of IPv6 is no IPv4
}

// TestSection7_5_2_Duplicates: each PMReq is answered by what is true then, and makes one transaction.
func TestSection7_5_2_Duplicates(t *testing.T) {
	h := newHost(t, ServerConfig{})
	h.wants(req(), Accept)
	h.now = began.Add(DefaultAckTimeout - 1)
	h.wants(req(), Accept) // and its time begins anew
	h.counts(1, ServerStats{Requests: 2, Duplicates: 1, Accepted: 2})
	h.now = began.Add(DefaultAckTimeout + time.Second)
	h.HandleTimeout(h.now)
	h.counts(1, ServerStats{Requests: 2, Duplicates: 1, Accepted: 2})

	h.Unmap(service)
	h.wants(req(), Deny)
	h.counts(0, ServerStats{Requests: 3, Duplicates: 2, Accepted: 2, DeniedUnknown: 1})
	h.must(h.Map(service, sdpAddr))
	h.wants(req(), Accept)
	moved := addrPort("10.0.0.2:35002")
	h.must(h.Map(service, moved))
	if a, _ := h.hear(req()); a.AP != moved {
		t.Errorf("a duplicate is told of %v, want %v", a.AP, moved)
	}
	h.hear(answer(Ack)) // of the first address: the first answer is the client's
	h.counts(0, ServerStats{Requests: 5, Duplicates: 3, Accepted: 4, DeniedUnknown: 1, Acked: 1})
	h.hear(answer(Ack))
	h.counts(0, ServerStats{Requests: 5, Duplicates: 3, Accepted: 4, DeniedUnknown: 1, Acked: 1, StrayAcks: 1})
}

// TestSection7_5_2_NewHandle: a PMReq with another AssocHandle ends the transaction before it.
func TestSection7_5_2_NewHandle(t *testing.T) {
	h := newHost(t, ServerConfig{})
	h.wants(req(), Accept)
	again := req()
	again.Handle++
	h.wants(again, Accept)
	h.counts(1, ServerStats{Requests: 2, Replaced: 1, Accepted: 2})
	h.hear(answer(Ack)) // of the old one
	h.counts(1, ServerStats{Requests: 2, Replaced: 1, Accepted: 2, StrayAcks: 1})
	h.Unmap(service)
	again.Handle++
	h.wants(again, Deny)
	h.counts(0, ServerStats{Requests: 3, Replaced: 2, Accepted: 2, StrayAcks: 1, DeniedUnknown: 1})
}

// TestServer_twoServices: transactions from one port for two services are two.
func TestServer_twoServices(t *testing.T) {
	h := newHost(t, ServerConfig{})
	two := req()
	two.AP, two.Handle = addrPort("10.0.0.2:5002"), 2
	h.must(h.Map(two.AP, addrPort("10.0.0.2:35002")))
	h.wants(req(), Accept)
	h.hear(two)
	h.counts(2, ServerStats{Requests: 2, Accepted: 2})
	h.HandleConnect(cpAddr, addrPort("10.0.0.2:35002"))
	h.counts(1, ServerStats{Requests: 2, Accepted: 2, Connected: 1})
	h.hear(answer(Ack))
	h.counts(0, ServerStats{Requests: 2, Accepted: 2, Connected: 1, Acked: 1})
}

// TestSection7_5_2_Timer: without a PMAck and a connection the transaction goes, and not before.
func TestSection7_5_2_Timer(t *testing.T) {
	h := newHost(t, ServerConfig{AckTimeout: time.Second})
	if _, ok := h.NextTimeout(); ok {
		t.Error("waits for nothing")
	}
	h.wants(req(), Accept)
	at, ok := h.NextTimeout()
	if !ok || !at.Equal(began.Add(time.Second)) {
		t.Errorf("waits until %v, %v", at, ok)
	}
	h.HandleTimeout(at.Add(-1))
	h.counts(1, ServerStats{Requests: 1, Accepted: 1})
	h.HandleTimeout(at)
	h.counts(0, ServerStats{Requests: 1, Accepted: 1, Expired: 1})
	h.now = at
	h.hear(answer(Ack)) // late
	h.counts(0, ServerStats{Requests: 1, Accepted: 1, Expired: 1, StrayAcks: 1})

	h.wants(req(), Accept)
	h.HandleConnect(addrPort("10.0.0.1:40001"), sdpAddr)
	h.HandleConnect(cpAddr, service)
	h.counts(1, ServerStats{Requests: 2, Accepted: 2, Expired: 1, StrayAcks: 1})
	h.HandleConnect(cpAddr, sdpAddr)
	h.HandleConnect(cpAddr, sdpAddr)
	h.counts(0, ServerStats{Requests: 2, Accepted: 2, Expired: 1, StrayAcks: 1, Connected: 1})
	h.now = h.now.Add(time.Second)
	h.HandleTimeout(h.now)
	h.counts(0, ServerStats{Requests: 2, Accepted: 2, Expired: 1, StrayAcks: 1, Connected: 1})
}

// TestServer_discards: what is not for a server is counted and not answered.
func TestServer_discards(t *testing.T) {
	h := newHost(t, ServerConfig{})
	for _, m := range []Message{answer(Accept), answer(Deny), answer(Ack)} {
		if a, ok := h.hear(m); ok {
			t.Errorf("%v is answered by %v", m, a)
		}
	}
	for _, b := range [][]byte{nil, []byte("rubbish"), req().Append(nil)[:Len-1], append([]byte{0x44}, req().Append(nil)[1:]...)} {
		if a := h.HandleDatagram(h.now, cpAddr.Addr(), service.Addr(), b, nil); len(a) > 0 {
			t.Errorf("%x is answered by %x", b, a)
		}
	}
	h.counts(0, ServerStats{NotForUs: 2, StrayAcks: 1, Malformed: 4})
}

// TestServer_foreign: only agents ask for connections of others.
func TestServer_foreign(t *testing.T) {
	agent := netip.MustParseAddr("10.0.7.7")
	h := newHost(t, ServerConfig{Agents: []netip.Prefix{netip.MustParsePrefix("10.0.7.0/24")}})
	for _, c := range []struct {
		from netip.Addr
		want Type
	}{{netip.MustParseAddr("10.0.0.9"), Deny}, {agent, Accept}, {cpAddr.Addr(), Accept}} {
		if a, ok := h.hearFrom(c.from, req()); !ok || a.Type != c.want {
			t.Errorf("from %v: %v, %v; want a %v", c.from, a, ok, c.want)
		}
	}
	h.counts(1, ServerStats{Requests: 3, DeniedForeign: 1, Accepted: 2, Duplicates: 1})

	// Nor does a stranger end what somebody else has asked, with that one's handle or another.
	other := req()
	other.Handle++
	for _, m := range []Message{req(), other} {
		if a, ok := h.hearFrom(netip.MustParseAddr("10.0.0.9"), m); !ok || a.Type != Deny {
			t.Errorf("from a stranger: %v, %v; want a Deny", a, ok)
		}
	}
	h.counts(1, ServerStats{Requests: 5, DeniedForeign: 3, Accepted: 2, Duplicates: 1})
}

// TestServer_mappings: the table is its owner's, and bounded.
func TestServer_mappings(t *testing.T) {
	h := newHost(t, ServerConfig{MaxMappings: 3})
	for _, bad := range [][2]string{{"10.0.0.2:0", "10.0.0.2:1"}, {"10.0.0.2:1", "10.0.0.2:0"}, {"10.0.0.2:1", "[fd00::1]:1"}} {
		if err := h.Map(addrPort(bad[0]), addrPort(bad[1])); !errors.Is(err, ErrAddress) {
			t.Errorf("map %v: %v", bad, err)
		}
	}
	if err := h.Map(netip.AddrPort{}, netip.AddrPort{}); !errors.Is(err, ErrAddress) {
		t.Error(err)
	}
	h.must(h.Map(addrPort("10.0.0.2:2"), sdpAddr))
	h.must(h.Map(addrPort("10.0.0.2:3"), sdpAddr))
	if err := h.Map(addrPort("10.0.0.2:4"), sdpAddr); !errors.Is(err, ErrFull) {
		t.Errorf("one too many: %v", err)
	}
	h.must(h.Map(addrPort("10.0.0.2:3"), service)) // in its place
	if !h.Unmap(addrPort("10.0.0.2:3")) || h.Unmap(addrPort("10.0.0.2:3")) {
		t.Error("unmap does not say whether there was one")
	}
	h.must(h.Map(addrPort("0.0.0.0:6000"), addrPort("0.0.0.0:36000")))
	for ap, want := range map[string]string{"10.0.0.2:6000": "10.0.0.2:36000", "10.0.0.8:6000": "", "10.0.0.2:2": "10.0.0.2:35001"} {
		m := req()
		m.AP = addrPort(ap)
		a, _ := h.hear(m)
		if want == "" && a.Type == Deny {
			continue
		}
		if a.Type != Accept || a.AP.String() != want {
			t.Errorf("%s: %v, want %q", ap, a, want)
		}
	}
	if got := h.Stats().Mappings; got != 3 {
		t.Errorf("%d mappings", got)
	}
}

// TestSection15_2_Flood: a peer has a bounded rate and a bounded number of transactions, which take nothing
// from others, and all of them together have a bound.
func TestSection15_2_Flood(t *testing.T) {
	const burst, perPeer, all = 10, 4, 6
	h := newHost(t, ServerConfig{PeerRate: 10, PeerBurst: burst, MaxPendingPerPeer: perPeer, MaxPending: all})
	flood := func(from string, n int) (accepted, denied int) {
		for i := range n {
			m := req()
			m.CP, m.Handle = addrPort(fmt.Sprintf("%s:%d", from, i+1)), uint64(i)
			switch a, ok := h.hear(m); {
			case ok && a.Type == Accept:
				accepted++
			case ok:
				denied++
			}
		}
		return accepted, denied
	}
	if a, d := flood("10.0.0.1", 3*burst); a != perPeer || d != burst-perPeer {
		t.Errorf("one peer: %d accepted, %d denied", a, d)
	}
	if a, d := flood("10.0.0.3", burst); a != all-perPeer || d != burst-a {
		t.Errorf("the next: %d accepted, %d denied", a, d)
	}
	h.counts(all, ServerStats{
		Throttled: 2 * burst, Requests: 2 * burst, Accepted: all, DeniedPeer: burst - perPeer, DeniedFull: burst - (all - perPeer),
	})
	h.now = h.now.Add(500 * time.Millisecond) // worth 5
	if a, d := flood("10.0.0.1", burst); a+d != burst/2 {
		t.Errorf("half a second later %d are heard", a+d)
	}
	h.now = h.now.Add(DefaultAckTimeout) // then all is as before
	if a, _ := flood("10.0.0.1", 3*burst); a != perPeer {
		t.Errorf("after a while: %d accepted", a)
	}
	if st := h.Stats(); st.Expired != all {
		t.Errorf("%d expired", st.Expired)
	}
}

// TestServer_peers: a flood from addresses without number leaves known peers alone.
func TestServer_peers(t *testing.T) {
	const peers, burst = 8, 4
	h := newHost(t, ServerConfig{MaxPeers: peers, PeerRate: 1, PeerBurst: burst})
	from := func(i int) netip.Addr { return netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)}) }
	rubbish := func(a netip.Addr) bool {
		before := h.Stats().Throttled
		h.HandleDatagram(h.now, a, service.Addr(), nil, nil)
		return h.Stats().Throttled == before
	}
	rubbish(cpAddr.Addr())
	heard := 0
	for i := range 1000 {
		if rubbish(from(i)) {
			heard++
		}
	}
	if want := peers - 1 + burst; heard != want {
		t.Errorf("%d datagrams of the flood are heard, want %d", heard, want)
	}
	for range burst - 1 {
		if !rubbish(cpAddr.Addr()) {
			t.Error("the known peer is throttled")
		}
	}
	if got := h.Stats().Peers; got != peers {
		t.Errorf("%d peers are known", got)
	}
	h.now = h.now.Add(time.Minute)
	for i := range 1000 { // each of them takes the place of an old one, until there is none
		if got := rubbish(from(5000 + i)); got != (i < peers+burst) {
			t.Fatalf("datagram %d: heard %v", i, got)
		}
	}
	for a, b := range map[string]string{"fd00::1": "fd00::2", "fd00:0:0:1::1": "fd00:0:0:1:ffff::9"} {
		if h.peers.find(h.now.Add(time.Hour), netip.MustParseAddr(a)) != h.peers.find(h.now.Add(time.Hour), netip.MustParseAddr(b)) {
			t.Errorf("%s and %s are two peers", a, b)
		}
	}
}

// TestServer_keepsPending: a peer with a transaction is not forgotten for a new one, who cannot confirm it either.
func TestServer_keepsPending(t *testing.T) {
	h := newHost(t, ServerConfig{MaxPeers: 1, PeerRate: 1000, AckTimeout: time.Minute})
	h.wants(req(), Accept)
	h.now = h.now.Add(time.Second)
	h.hearFrom(netip.MustParseAddr("10.0.0.77"), answer(Ack))
	h.hear(answer(Ack))
	h.counts(0, ServerStats{Requests: 1, Accepted: 1, Acked: 1, StrayAcks: 1})
}

func TestServerConfig_Validate(t *testing.T) {
	for name, c := range map[string]ServerConfig{
		"MaxMappings": {MaxMappings: -1}, "MaxPending": {MaxPending: -1}, "MaxPendingPerPeer": {MaxPendingPerPeer: -1}, "MaxPeers": {MaxPeers: -1},
		"PeerRate": {PeerRate: -1}, "PeerBurst": {PeerBurst: -1}, "AckTimeout": {AckTimeout: -1}, "a rate": {PeerRate: 2e9},
	} {
		if c.Validate() == nil {
			t.Errorf("%s is taken", name)
		}
	}
	if err := (&ServerConfig{}).Validate(); err != nil {
		t.Error(err)
	}
}
