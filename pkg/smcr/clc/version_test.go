// SPDX-License-Identifier: Apache-2.0

package clc

import (
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// side is what one end of a negotiation in these tests is and can.
type side struct {
	cfg   Config
	offer Offer
}

// talk runs a whole negotiation between a client and a server over a
// connection that loses nothing, and writes how each ended: the version and
// what it selected, or the Decline.
func talk(tb testing.TB, client, server side, firstContact bool) (c, s string) {
	tb.Helper()
	cl, sv := NewClient(client.cfg), NewServer(epoch, server.cfg)
	p, err := cl.cfg.Proposal(client.offer)
	if err != nil {
		cl.Decline(epoch, reasonOf(err), false)
	} else {
		cl.Propose(epoch, p)
	}
	var selected [2]Selection
	ends := [2]string{}
	for range 8 {
		for i, m := range []peer{cl, sv} {
			for _, o := range m.Poll(nil) {
				switch o.Kind {
				case OutputSend:
					if left, _ := feed([]peer{cl, sv}[1-i], epoch, o.Data); len(left) > 0 {
						tb.Fatalf("%d bytes not taken by %v", len(left), []string{"server", "client"}[i])
					}
				case OutputProposed:
					selected[1] = o.Selected
					sv.Accept(epoch, Accept{endpointOf(server, firstContact, o.Selected.Version)})
				case OutputAccepted:
					selected[0] = o.Selected
					e := endpointOf(client, firstContact, o.Selected.Version)
					e.MTU = min(e.MTU, o.Accept.MTU)
					cl.Confirm(epoch, Confirm{Endpoint: e}, firstContact)
					cl.Complete(epoch)
				case OutputConfirmed:
					if o.Selected != selected[1] {
						tb.Errorf("server selected %+v, then %+v", selected[1], o.Selected)
					}
					sv.Complete(epoch)
				case OutputEstablished:
					ends[i] = describe(selected[i])
				case OutputDeclined:
					ends[i] = o.Declined.Reason.String()
					if o.Declined.FromPeer {
						ends[i] += " from the peer"
					}
				case OutputAbort:
					ends[i] = o.Err.Error()
				}
			}
		}
	}
	return ends[0], ends[1]
}

func describe(s Selection) string {
	if s.Version < V2 {
		if s.NoV2 != 0 {
			return "v1, " + s.NoV2.String()
		}
		return "v1"
	}
	x := fmt.Sprintf("v2 %v", s.EID)
	if s.MaxConns != 0 {
		x += fmt.Sprintf(" r%d conns=%d links=%d features=%x", s.Release, s.MaxConns, s.MaxLinks, s.FeatureMask)
	}
	return x
}

// endpointOf is what a shell gives to Accept and Confirm: nothing that was
// negotiated.
func endpointOf(s side, firstContact bool, version uint8) Endpoint {
	e := Endpoint{
		FirstContact: firstContact, PeerID: s.cfg.PeerID, GID: s.offer.GID, MAC: s.offer.MAC, QPN: 17, RKey: 0x345,
		RMBEIndex: 1, AlertToken: 1, RMBESize: 2, MTU: rdma.MTU1024, RMBAddr: 1 << 40, PSN: 99,
	}
	if version >= V2 {
		e.GID, e.Ext.Direct = s.offer.GIDv2, true
	}
	return e
}

func ends(addr string, mac rdma.MAC, s Support) side {
	return side{
		cfg:   Config{PeerID: NewPeerID(7, mac), OS: OSLinux, Hostname: "host", Support: s},
		offer: Offer{GID: gidOf("fe80::1"), MAC: mac, GIDv2: gidOf(addr)},
	}
}

// Every pair of settings has a defined outcome on both sides.
func TestNegotiation(t *testing.T) {
	near, far := subnets("10.0.0.0/24"), subnets("10.9.0.0/24")
	a := []EID{eid("A")}
	ab, ba := []EID{eid("A"), eid("B")}, []EID{eid("B"), eid("A")}
	v1 := Support{Subnets: near}
	v1far := Support{Subnets: far}
	v1any := Support{Subnets: far, AnySubnet: true}
	v2 := Support{V2: true, EIDs: a, Release: Release1, FeatureMask: 3}
	v2b := Support{V2: true, EIDs: []EID{eid("B")}, Release: Release1}
	both := Support{V1: true, V2: true, Subnets: near, EIDs: a, Release: Release1, FeatureMask: 1}
	bothFar, bothB := both, both
	bothFar.Subnets = far
	bothB.EIDs = []EID{eid("B")}
	with := func(s Support, f func(*Support)) Support { f(&s); return s }
	tests := []struct {
		name           string
		client, server Support
		wantC, wantS   string // empty: as the client
	}{
		{"both version 1, one subnet", v1, v1, "v1", ""},
		{"both version 1, other subnets", v1, v1far, "DIFFPREFIX from the peer", "DIFFPREFIX"},
		{"both version 1, other subnets, the server takes all", v1, v1any, "v1", ""},
		{"both version 2", v2, v2, "v2 A r1 conns=255 links=2 features=3", ""},
		{"both all, version 2 is preferred", both, both, "v2 A r1 conns=255 links=2 features=1", ""},
		{"both all, other subnets: version 2 does not mind", both, bothFar, "v2 A r1 conns=255 links=2 features=1", ""},
		{"client 1, server all", v1, both, "v1", ""},
		{"client all, server 1", both, v1, "v1", ""},
		{"client 1, server 2", v1, v2, "VERSMISMAT from the peer", "VERSMISMAT"},
		{"client 2, server 1", v2, v1, "VERSMISMAT from the peer", "VERSMISMAT"},
		{"client 1, server all, other subnets", v1, bothFar, "DIFFPREFIX from the peer", "DIFFPREFIX"},
		{"client all, server 1, other subnets", both, v1far, "DIFFPREFIX from the peer", "DIFFPREFIX"},
		{"no EID in common", v2, v2b, "NOUEID from the peer", "NOUEID"},
		{"no EID in common, version 1 remains", both, bothB, "v1", "v1, NOUEID"},
		{"no EID in common, version 1 not in these subnets", both, with(bothB, func(s *Support) { s.Subnets = far }), "NOUEID from the peer", "NOUEID"},
		{"no EID in common, version 1 not allowed at the server", both, v2b, "NOUEID from the peer", "NOUEID"},
		{"the server's order of EIDs counts", with(v2, func(s *Support) { s.EIDs = ab }), with(v2, func(s *Support) { s.EIDs = ba }), "v2 B r1 conns=255 links=2 features=3", ""},
		{"release 0 at the client", with(v2, func(s *Support) { s.Release = 0 }), v2, "v2 A", "v2 A r0 conns=255 links=2 features=0"},
		{"release 0 at the server", v2, with(v2, func(s *Support) { s.Release = 0 }), "v2 A", "v2 A r0 conns=255 links=2 features=0"},
		{"the smaller limits hold", with(v2, func(s *Support) { s.MaxConns, s.MaxLinks = 16, 8 }), with(v2, func(s *Support) { s.MaxConns, s.MaxLinks = 32, 4 }), "v2 A r1 conns=16 links=4 features=3", ""},
		{"eight links", with(v2, func(s *Support) { s.MaxLinks = 8 }), with(v2, func(s *Support) { s.MaxLinks = 8 }), "v2 A r1 conns=255 links=8 features=3", ""},
		{"features of both", with(v2, func(s *Support) { s.FeatureMask = 6 }), v2, "v2 A r1 conns=255 links=2 features=2", ""},
		{"too few connections at the client", with(v2, func(s *Support) { s.MaxConns = 15 }), v2, "MAXCONNERR from the peer", "MAXCONNERR"},
		{"too few connections at the server", v2, with(v2, func(s *Support) { s.MaxConns = 15 }), "MAXCONNERR", "MAXCONNERR from the peer"},
		{"version 1 without a subnet is not proposed", Support{V1: true}, v1, "CNFERR", "CNFERR from the peer"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if tt.wantS == "" {
				tt.wantS = tt.wantC
			}
			client, server := ends("10.0.0.2", macClient, tt.client), ends("10.9.0.1", macServer, tt.server)
			c, s := talk(t, client, server, true)
			if diff := cmp.Diff([]string{tt.wantC, tt.wantS}, []string{c, s}); diff != "" {
				t.Errorf("client, server (-want +got):\n%s", diff)
			}
			// Subsequent contact chooses alike, but has no limits in its messages.
			if !strings.HasPrefix(tt.wantC, "v") {
				return
			}
			c, s = talk(t, client, server, false)
			if want := strings.Join(strings.Fields(tt.wantC)[:min(2, len(strings.Fields(tt.wantC)))], " "); c != want || s != tt.wantS && tt.wantS == tt.wantC {
				t.Errorf("subsequent contact: client %q, server %q, want %q, %q", c, s, want, tt.wantS)
			}
		})
	}
}

// randomSupport returns settings that pass Validate.
func randomSupport(rng *rand.Rand) Support {
	s := Support{V1: rng.IntN(2) == 0, V2: rng.IntN(2) == 0, AnySubnet: rng.IntN(4) == 0}
	for _, p := range subnets("10.0.0.0/24", "10.1.0.0/24", "10.2.0.0/24") {
		if rng.IntN(2) == 0 {
			s.Subnets = append(s.Subnets, p)
		}
	}
	for i := range 1 + rng.IntN(MaxEIDs) {
		s.EIDs = append(s.EIDs, eid(string(rune('A'+(i+rng.IntN(6))%12))))
	}
	s.Release = uint8(rng.IntN(2))
	s.MaxConns = uint8(MinMaxConns + rng.IntN(256-MinMaxConns))
	s.MaxLinks = uint8(1 + rng.IntN(MaxMaxLinks))
	s.FeatureMask = uint16(rng.IntN(1 << 16))
	return s
}

// agree lets two random sides negotiate: whatever they may, both end the same
// way, and SMC-R is used exactly when some version allows it.
func agree(t *testing.T, rng *rand.Rand) {
	client, server := ends("10.0.0.2", macClient, randomSupport(rng)), ends("10.9.0.1", macServer, randomSupport(rng))
	for _, s := range []side{client, server} {
		if err := s.cfg.Validate(); err != nil {
			t.Fatal(err)
		}
	}
	first := rng.IntN(2) == 0
	c, s := talk(t, client, server, first)
	cs, ss := client.cfg.Support.withDefaults(), server.cfg.Support.withDefaults()
	v2 := cs.V2 && ss.V2 && func() bool {
		for _, e := range cs.EIDs {
			for _, f := range ss.EIDs {
				if e == f {
					return true
				}
			}
		}
		return false
	}()
	v1 := cs.V1 && ss.V1 && len(cs.Subnets) > 0 && (ss.AnySubnet || func() bool {
		for _, p := range ss.Subnets {
			if p == cs.Subnets[0] {
				return true
			}
		}
		return false
	}())
	want := "declined"
	if v1 {
		want = "v1"
	}
	if v2 {
		want = "v2"
	}
	for who, end := range map[string]string{"client": c, "server": s} {
		got := "declined"
		if strings.HasPrefix(end, "v1") || strings.HasPrefix(end, "v2") {
			got = end[:2]
		}
		if got != want {
			t.Fatalf("%s: %q, want %s; client %+v, server %+v", who, end, want, cs, ss)
		}
	}
	if declined := strings.HasSuffix(c, "from the peer") != strings.HasSuffix(s, "from the peer"); want == "declined" && !declined {
		t.Fatalf("who declined? client %q, server %q", c, s)
	}
	if want == "v2" && first && strings.Contains(c, " r1 ") && c != s {
		t.Fatalf("client %q, server %q", c, s)
	}
}

func TestNegotiation_bothSidesAgree(t *testing.T) {
	for seed := range uint64(3000) {
		t.Run(fmt.Sprintf("seed=%d", seed), func(t *testing.T) { agree(t, rand.New(rand.NewPCG(seed, 1))) })
	}
}

// FuzzNegotiation looks for more pairs of settings.
func FuzzNegotiation(f *testing.F) {
	f.Add(uint64(1), uint64(1))
	f.Fuzz(func(t *testing.T, a, b uint64) { agree(t, rand.New(rand.NewPCG(a, b))) })
}

// bare strips what the machine has to fill in.
func bare(e Endpoint) Endpoint {
	direct := e.Ext.Direct
	e.Version, e.EID, e.Ext = 0, EID{}, FirstContactExtension{Direct: direct}
	return e
}

// Our engine plays either side of every captured rendezvous: it accepts what
// the kernel sent, and answers byte for byte as the other kernel did.
func TestCapturedRendezvous(t *testing.T) {
	accepts, err := filepath.Glob("testdata/captured/accept-*.hex")
	if err != nil || len(accepts) == 0 {
		t.Fatalf("no captures: %v", err)
	}
	versions := map[uint8]int{}
	for _, file := range accepts {
		n := strings.TrimSuffix(strings.TrimPrefix(filepath.Base(file), "accept-"), ".hex")
		t.Run(n, func(t *testing.T) {
			// Linux proposes the same each time; not every capture has its own.
			proposal := "proposal-01"
			if n[0] == '4' {
				proposal = "proposal-40"
			}
			m := captured(t, proposal, "accept-"+n, "confirm-"+n)
			versions[m.accept.Version]++

			cfg := testCfg
			cfg.Hostname = m.accept.Ext.Host()
			s := NewServer(epoch, cfg)
			if _, err := feed(s, epoch, m.raw[TypeProposal]); err != nil {
				t.Fatal(err)
			}
			s.Accept(epoch, Accept{bare(m.accept.Endpoint)})
			if _, err := feed(s, epoch, m.raw[TypeConfirm]); err != nil {
				t.Fatal(err)
			}
			s.Complete(epoch)
			answers(t, "server", s, m.raw[TypeAccept])

			cfg.Hostname = m.confirm.Ext.Host()
			c := NewClient(cfg)
			c.Propose(epoch, m.proposal)
			if _, err := feed(c, epoch, m.raw[TypeAccept]); err != nil {
				t.Fatal(err)
			}
			c.Confirm(epoch, Confirm{Endpoint: bare(m.confirm.Endpoint), GIDs: m.confirm.GIDs}, m.accept.FirstContact)
			c.Complete(epoch)
			answers(t, "client", c, m.raw[TypeConfirm])
		})
	}
	if versions[V1] == 0 || versions[V2] == 0 {
		t.Errorf("captures of version 1 and 2: %v", versions)
	}
}

// answers checks that the last message a machine sent is want and that it has
// ended in SMC-R.
func answers(t *testing.T, who string, p peer, want []byte) {
	t.Helper()
	var got []byte
	for _, o := range p.Poll(nil) {
		if o.Kind == OutputSend {
			got = o.Data
		}
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("%s (-captured +ours):\n%s", who, diff)
	}
	if p.State() != StateEstablished {
		t.Errorf("%s ends in %v", who, p.State())
	}
}

// A Confirm of first contact names at least the RNIC of its link.
func TestClient_confirmHasAGID(t *testing.T) {
	m := firstV2(t)
	c := NewClient(testCfg)
	c.Propose(epoch, m.proposal)
	if _, err := feed(c, epoch, m.raw[TypeAccept]); err != nil {
		t.Fatal(err)
	}
	c.Confirm(epoch, Confirm{Endpoint: bare(m.confirm.Endpoint)}, true)
	answer := c.Poll(nil)
	got, err := ParseConfirm(answer[len(answer)-1].Data)
	if err != nil || !got.GIDs.Equal(ListOf(m.confirm.GID)) {
		t.Errorf("GIDs %v, %v, want %v", got.GIDs, err, m.confirm.GID)
	}
}

// A server that finds no way to the client's GID takes version 1 if it can.
func TestServer_WithoutV2(t *testing.T) {
	both := testSupport
	both.Subnets, both.AnySubnet = subnets("10.0.0.0/24"), false
	for _, tt := range []struct {
		name  string
		offer Support
		want  string
	}{
		{"version 1 offered in our subnet", both, "v1, NOROUTE"},
		{"version 1 offered elsewhere", func() Support { s := both; s.Subnets = subnets("10.9.0.0/24"); return s }(), ""},
		{"version 2 offered only", func() Support { s := both; s.V1 = false; return s }(), ""},
		{"version 1 chosen already", Support{Subnets: both.Subnets}, "v1"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			client := ends("10.0.0.2", macClient, tt.offer)
			p, err := client.cfg.Proposal(client.offer)
			if err != nil {
				t.Fatal(err)
			}
			s := NewServer(epoch, Config{Support: both})
			if _, err := feed(s, epoch, p.Append(nil)); err != nil {
				t.Fatal(err)
			}
			s.Poll(nil)
			sel, ok := s.WithoutV2(epoch, ReasonNoRoute)
			if ok != (tt.want != "") || ok && describe(sel) != tt.want {
				t.Fatalf("%+v, %v, want %q", sel, ok, tt.want)
			}
			if !ok {
				if got := trace(s.Poll(nil)); got != "Send(Decline v2 NOROUTE) Declined(NOROUTE)" {
					t.Errorf("outputs %s", got)
				}
				return
			}
			s.Accept(epoch, Accept{endpointOf(client, true, V1)})
			if got := trace(s.Poll(nil)); got != "Send(Accept v1)" {
				t.Errorf("outputs %s", got)
			}
		})
	}
	s := NewServer(epoch, Config{})
	if _, ok := s.WithoutV2(epoch, ReasonNoRoute); ok || s.State() != StateAborted {
		t.Errorf("before the Proposal: %v, state %v", ok, s.State())
	}
}

// The key of a client stays the same from contact to contact.
func TestPeerKey(t *testing.T) {
	v1, v2 := firstV1(t), firstV2(t)
	other := v2.proposal
	other.Ext.GID = gidOf("10.0.0.9")
	for name, same := range map[string]bool{
		"version 1, Confirm":                   v1.proposal.Key(V1).Matches(v1.confirm),
		"version 1, Confirm of another":        !v1.proposal.Key(V1).Matches(v2.confirm),
		"version 2, no peer ID":                v2.proposal.Key(V2).Matches(v2.confirm),
		"version 2, another RNIC":              v2.proposal.Key(V2) != other.Key(V2),
		"version 1 ignores what version 2 has": v2.proposal.Key(V1) == other.Key(V1),
		"versions have groups of their own":    v1.proposal.Key(V1) != v1.proposal.Key(V2),
	} {
		if !same {
			t.Error(name)
		}
	}
}

// A kernel that offers another EID is declined as a kernel would, with the more
// exact reason; and the kernel's own Decline is understood.
func TestCapturedDecline(t *testing.T) {
	s := NewServer(epoch, testCfg)
	if _, err := feed(s, epoch, load(t, "captured/proposal-12")); reasonOf(err) != ReasonNoUEID {
		t.Errorf("%v", err)
	}
	theirs, err := ParseDecline(load(t, "captured/decline-12"))
	if err != nil {
		t.Fatal(err)
	}
	theirs.PeerID, theirs.Reason = testCfg.PeerID, ReasonNoUEID
	if diff := cmp.Diff(theirs.Append(nil), s.Poll(nil)[0].Data); diff != "" {
		t.Errorf("(-as captured +ours):\n%s", diff)
	}
	c := NewClient(testCfg)
	c.Propose(epoch, firstV2(t).proposal)
	if _, err := feed(c, epoch, load(t, "captured/decline-12")); err != nil || c.State() != StateDeclined {
		t.Errorf("%v, state %v", err, c.State())
	}
}
