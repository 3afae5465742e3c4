// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/google/nftables"

	"github.com/smcr-io/kube-smcr/internal/testenv"
	"github.com/smcr-io/kube-smcr/pkg/smcr/synopt"
)

// An offering opens connections whose SYN has the option, as those of a kernel's SMC-R have, and sees
// whether the option arrived.
type offering struct {
	option    *synopt.Option
	pod, peer *NetNS
}

func newOffering(t *testing.T) *offering {
	t.Helper()
	testenv.Need(t, testenv.BPF)
	pod, peer := newPair(t)
	option, err := synopt.Open(synopt.Config{Mark: uint32(os.Getpid())})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { mustDo(t, option.Close()) })
	return &offering{option, pod, peer}
}

// arrives tells whether the option of a SYN from one namespace to a port of another one arrived there, and
// that the connection works.
func (o *offering) arrives(t *testing.T, from, to *NetNS, at netip.AddrPort) bool {
	t.Helper()
	ln := listen(t, to, o.option.ControlListen, at.Addr(), at.Port())
	defer func() { _ = ln.Close() }()
	client := o.dial(t, from, at)
	server := mustAccept(t, ln)
	exchange(t, client, server)
	offered, err := o.option.SYNOffered(server)
	if err != nil {
		t.Fatal(err)
	}
	answered, err := o.option.PeerOffered(client)
	if err != nil || answered != offered {
		t.Errorf("the SYN arrived with the option: %t; its answer had it: %t, %v", offered, answered, err)
	}
	_ = net.Conn(client).Close()
	return offered
}

// dial connects by a socket that is made now, as those of applications are, and not ahead.
func (o *offering) dial(t *testing.T, from *NetNS, to netip.AddrPort) *net.TCPConn {
	t.Helper()
	d := net.Dialer{Control: o.option.ControlDial, Timeout: waitLimit}
	var c net.Conn
	err := from.Do(func() (err error) {
		c, err = d.DialContext(t.Context(), "tcp", to.String())
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c.(*net.TCPConn)
}

func TestFilterOption(t *testing.T) {
	const selected, other = 6379, 6380
	o := newOffering(t)
	expect := func(t *testing.T, f ipFamily, port uint16, want bool) {
		t.Helper()
		if got := o.arrives(t, o.pod, o.peer, netip.AddrPortFrom(f.peer, port)); got != want {
			t.Errorf("the option to port %d of the peer arrives: %t", port, got)
		}
		if got := o.arrives(t, o.peer, o.pod, netip.AddrPortFrom(f.pod, port)); got != want {
			t.Errorf("the option to port %d of the pod arrives: %t", port, got)
		}
	}
	for _, f := range families {
		t.Run(f.name, func(t *testing.T) {
			peer := netip.PrefixFrom(f.peer, f.peer.BitLen())
			ports := []PortRange{{selected, selected}}
			for _, tt := range []struct {
				name            string
				cfg             OptionFilterConfig
				selected, other bool
			}{
				{name: "no peers"},
				{"the peer, one port", OptionFilterConfig{Peers: []OutboundRule{{Prefix: peer, Ports: ports}}}, true, false},
				{"the peer, all ports", OptionFilterConfig{Peers: []OutboundRule{{Prefix: peer}}}, true, true},
				{"somebody else", OptionFilterConfig{Peers: []OutboundRule{{Prefix: netip.PrefixFrom(f.pod, f.bits)}, {Prefix: peer, Exclude: true}}}, false, false},
				{"never the peer", OptionFilterConfig{Peers: []OutboundRule{{Prefix: f.all()}}, Never: []netip.Addr{f.peer}}, false, false},
				{"never the pod itself", OptionFilterConfig{Peers: []OutboundRule{{Prefix: f.all()}}, Never: []netip.Addr{f.pod}}, true, true},
			} {
				t.Run(tt.name, func(t *testing.T) {
					for range 2 {
						mustDo(t, FilterOption(In(o.pod), tt.cfg))
					}
					expect(t, f, selected, tt.selected)
					expect(t, f, other, tt.other)
					if got, also := tt.cfg.Allows(f.peer, selected), tt.cfg.Allows(f.peer, other); got != tt.selected || also != tt.other {
						t.Errorf("Allows says %t, and %t of the other port", got, also)
					}
				})
			}
			for range 2 {
				mustDo(t, SweepOptionFilter(In(o.pod)))
			}
			expect(t, f, other, true)
		})
	}
}

// TestAttack_hiddenOption: TCP looks at all options of a handshake, and the answer of a server counts whatever was asked. So a
// peer that is not selected can neither hide its option behind another one of the kind, nor answer with it unasked.
func TestAttack_hiddenOption(t *testing.T) {
	testenv.Need(t, testenv.BPF)
	pod, peer, wire := newWiredPair(t)
	option, err := synopt.Open(synopt.Config{Mark: uint32(os.Getpid())})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { mustDo(t, option.Close()) })
	o := &offering{option, pod, peer}
	wire.option.Store(true)
	// offered connects, and tells whether the pod's side has seen the option.
	offered := func(t *testing.T, f ipFamily, answer bool) bool {
		t.Helper()
		wire.answer.Store(answer)
		if answer {
			at := netip.AddrPortFrom(f.peer, 80)
			ln := listen(t, peer, nil, at.Addr(), at.Port())
			defer func() { _ = ln.Close() }()
			client := o.dial(t, pod, at)
			exchange(t, client, mustAccept(t, ln))
			got, err := option.PeerOffered(client)
			mustDo(t, err)
			return got
		}
		ln := listen(t, pod, option.ControlListen, f.pod, 80)
		defer func() { _ = ln.Close() }()
		client, err := DialInNS(t.Context(), peer, nil, netip.Addr{}, netip.AddrPortFrom(f.pod, 80))
		mustDo(t, err)
		t.Cleanup(func() { _ = client.Close() })
		server := mustAccept(t, ln)
		exchange(t, client, server)
		got, err := option.SYNOffered(server)
		mustDo(t, err)
		return got
	}
	// hangs wants that the SYN does not arrive.
	hangs := func(t *testing.T, f ipFamily) {
		t.Helper()
		wire.answer.Store(false)
		ln := listen(t, pod, option.ControlListen, f.pod, 80)
		defer func() { _ = ln.Close() }()
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		defer cancel()
		if c, err := DialInNS(ctx, peer, nil, netip.Addr{}, netip.AddrPortFrom(f.pod, 80)); err == nil {
			t.Errorf("%s: a SYN arrives that goes in fragments, the first of which has no whole header", f.name)
			_ = c.Close()
		}
	}
	for _, f := range families {
		for _, way := range []struct{ hidden, answer, split bool }{{false, false, false}, {true, false, false}, {false, true, false}, {false, false, true}} {
			wire.hidden.Store(way.hidden)
			wire.split.Store(way.split)
			for what, tt := range map[string]struct {
				cfg  *OptionFilterConfig
				want bool
			}{
				"no filter":    {nil, true},
				"not selected": {&OptionFilterConfig{}, false},
				"selected":     {&OptionFilterConfig{Peers: []OutboundRule{{Prefix: f.all(), Ports: []PortRange{{80, 80}}}}}, true},
				"never":        {&OptionFilterConfig{Peers: []OutboundRule{{Prefix: f.all()}}, Never: []netip.Addr{f.peer}}, false},
			} {
				mustDo(t, SweepOptionFilter(In(pod)))
				if tt.cfg != nil {
					mustDo(t, FilterOption(In(pod), *tt.cfg))
				}
				if way.split && tt.cfg != nil {
					hangs(t, f)
				} else if got := offered(t, f, way.answer); got != tt.want {
					t.Errorf("%s, hidden %t, in the answer %t, split %t, %s: the pod sees the option: %t", f.name, way.hidden, way.answer, way.split, what, got)
				}
			}
		}
	}
}

// TestAttack_answerOfService: a server behind a Service is known by the Service's address, also when it answers unasked.
func TestAttack_answerOfService(t *testing.T) {
	testenv.Need(t, testenv.BPF)
	all, name := openCgroups(t)
	makeCgroups(t, all, name+"/container")
	pod, peer, wire := newWiredPair(t)
	option, err := synopt.Open(synopt.Config{Mark: uint32(os.Getpid())})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { mustDo(t, option.Close()) })
	o, at := &offering{option, pod, peer}, Place{pod, mustOpenCgroup(t, all, name)}
	wire.option.Store(true)
	wire.answer.Store(true)
	f := families[0]
	service := netip.AddrPortFrom(f.peer.Next().Next(), 81)
	nft(t, pod, fmt.Sprintf("table ip services { chain out { type nat hook output priority -100; ip daddr %s tcp dport %d dnat to %s:80; }; }", service.Addr(), service.Port(), f.peer))
	ln := listen(t, peer, nil, f.peer, 80)
	for _, tt := range []struct {
		what string
		cfg  *OptionFilterConfig
		want bool
	}{
		{"no filter", nil, true},
		{"not selected", &OptionFilterConfig{}, false},
		{"the Service is selected", &OptionFilterConfig{Peers: []OutboundRule{{Prefix: netip.PrefixFrom(service.Addr(), 32), Ports: []PortRange{{81, 81}}}}}, true},
		{"its server is selected", &OptionFilterConfig{Peers: []OutboundRule{{Prefix: netip.PrefixFrom(f.peer, 32)}}}, false},
	} {
		if tt.cfg != nil {
			mustDo(t, FilterOption(at, *tt.cfg))
		}
		back := moveTo(t, all, name+"/container")
		client := o.dial(t, pod, service)
		back()
		exchange(t, client, mustAccept(t, ln))
		got, err := option.PeerOffered(client)
		if mustDo(t, err); got != tt.want {
			t.Errorf("%s: the client sees the option in the answer: %t", tt.what, got)
		}
	}
}

// The largest table fits into one transaction.
func TestFilterOption_largest(t *testing.T) {
	ns := newNS(t)
	var cfg OptionFilterConfig
	for i := range maxFilterNever {
		cfg.Never = append(cfg.Never, netip.AddrFrom16([16]byte{0: 0xfd, 14: byte(i >> 8), 15: byte(i)}))
	}
	for i := range maxOutboundRules {
		cfg.Peers = append(cfg.Peers, OutboundRule{Prefix: netip.PrefixFrom(netip.AddrFrom16([16]byte{0: 0xfd, 1: byte(i), 15: 1}), 128), Ports: []PortRange{{1, 1}}})
	}
	mustDo(t, FilterOption(In(ns), cfg))
	mustDo(t, SweepOptionFilter(In(ns)))
}

// A pod has the filter from the first one to the end of it, whatever else there is.
func TestOptionFiltered(t *testing.T) {
	ns := newNS(t)
	expect := func(want bool) {
		t.Helper()
		if got, err := OptionFiltered(In(ns)); got != want || err != nil {
			t.Errorf("filtered %t, %v, want %t", got, err, want)
		}
	}
	conn, err := openNFT(ns)
	if err != nil {
		t.Fatal(err)
	}
	conn.AddTable(&nftables.Table{Family: nftables.TableFamilyINet, Name: optionTableOf(7)})
	conn.AddTable(&nftables.Table{Family: nftables.TableFamilyIPv4, Name: optionTableName})
	mustDo(t, errors.Join(conn.Flush(), conn.CloseLasting()))
	expect(false)
	mustDo(t, FilterOption(In(ns), OptionFilterConfig{}))
	expect(true)
	mustDo(t, SweepOptionFilter(In(ns)))
	expect(false)
}

func TestOptionFilterConfig_Validate(t *testing.T) {
	many := make([]netip.Addr, maxFilterNever+1)
	for i := range many {
		many[i] = families[0].peer
	}
	for _, tt := range []struct {
		field string
		cfg   OptionFilterConfig
	}{
		{"Never", OptionFilterConfig{Never: many}},
		{"Never[1]", OptionFilterConfig{Never: []netip.Addr{families[0].pod, netip.MustParseAddr("::ffff:10.0.0.1")}}},
		{"Peers[0].Prefix", OptionFilterConfig{Peers: []OutboundRule{{}}}},
	} {
		var ce *ConfigError
		if err := tt.cfg.Validate(); !errors.As(err, &ce) || ce.Field != tt.field {
			t.Errorf("%v, want one of %s", err, tt.field)
		}
	}
	if err := (&OptionFilterConfig{Never: many[:maxFilterNever]}).Validate(); err != nil {
		t.Error(err)
	}
}

// Allows says of every destination what the elements of the kernel's sets say.
func TestOptionFilterConfig_Allows(t *testing.T) {
	const seed = 20
	random := rand.New(rand.NewPCG(seed, seed))
	address := func() netip.Addr { // of few, so that rules meet
		a := families[random.IntN(len(families))].peer.AsSlice()
		a[len(a)-1] = byte(random.IntN(8))
		addr, _ := netip.AddrFromSlice(a)
		return addr
	}
	selected := 0
	for range 2000 {
		var cfg OptionFilterConfig
		for range random.IntN(4) {
			a := address()
			r := OutboundRule{Prefix: netip.PrefixFrom(a, a.BitLen()-random.IntN(5)), Exclude: random.IntN(3) == 0}
			for range random.IntN(3) {
				first := uint16(random.IntN(6))
				r.Ports = append(r.Ports, PortRange{first, first + uint16(random.IntN(3))})
			}
			cfg.Peers = append(cfg.Peers, r)
		}
		for range random.IntN(3) {
			cfg.Never = append(cfg.Never, address())
		}
		peer, port := address(), uint16(random.IntN(8))
		want := !slices.Contains(cfg.Never, peer) && slices.ContainsFunc(compile(cfg.Peers, peer.Is4()), func(b block) bool {
			return b.first.Compare(peer) <= 0 && peer.Compare(b.last) <= 0 && b.ports.First <= port && port <= b.ports.Last
		})
		if got := cfg.Allows(peer, port); got != want {
			t.Fatalf("seed %d: %v port %d: %t, and the sets say %t, by %+v", seed, peer, port, got, want, cfg)
		}
		if want {
			selected++
		}
	}
	if selected == 0 {
		t.Error("nothing was selected: this test checks nothing")
	}
	all := OptionFilterConfig{Peers: []OutboundRule{{Prefix: netip.MustParsePrefix("0.0.0.0/0")}, {Prefix: netip.MustParsePrefix("::/0")}}}
	for addr, want := range map[string]bool{"10.0.0.1": true, "::ffff:10.0.0.1": true, "fe80::1%eth0": false, "fd99::1%eth0": true} {
		if got := all.Allows(netip.MustParseAddr(addr), 1); got != want {
			t.Errorf("%s: %t", addr, got)
		}
	}
	if all.Allows(netip.Addr{}, 1) {
		t.Error("no address was allowed")
	}
}

func TestProbeOptionFilter(t *testing.T) {
	testenv.Need(t, testenv.Root, testenv.NetAdmin, testenv.Nftables)
	mustDo(t, ProbeOptionFilter())
}
