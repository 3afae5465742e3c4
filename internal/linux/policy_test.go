// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"math/rand/v2"
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/smcr-io/kube-smcr/internal/testenv"
)

func rangeOf(first, last string, ports PortRange) block {
	return block{addrRange{netip.MustParseAddr(first), netip.MustParseAddr(last)}, ports}
}

func TestCompile(t *testing.T) {
	pre := netip.MustParsePrefix
	all := PortRange{0, 65535}
	for _, c := range []struct {
		name  string
		is4   bool
		rules []OutboundRule
		want  []block
	}{
		{"nothing", true, nil, nil},
		{"everything", true, []OutboundRule{{Prefix: pre("0.0.0.0/0")}}, []block{rangeOf("0.0.0.0", "255.255.255.255", all)}},
		{"other family", true, []OutboundRule{{Prefix: pre("::/0")}}, nil},
		{"IPv6 without link-local", false, []OutboundRule{{Prefix: pre("::/0")}}, []block{
			rangeOf("::", "fe7f:ffff:ffff:ffff:ffff:ffff:ffff:ffff", all),
			rangeOf("fec0::", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", all),
		}},
		{"host bits are ignored", true, []OutboundRule{{Prefix: pre("10.1.2.3/8")}}, []block{rangeOf("10.0.0.0", "10.255.255.255", all)}},
		{"neighbours join", true, []OutboundRule{{Prefix: pre("10.0.0.0/9")}, {Prefix: pre("10.128.0.0/9")}}, []block{
			rangeOf("10.0.0.0", "10.255.255.255", all),
		}},
		{"hole", true, []OutboundRule{{Prefix: pre("10.0.0.0/24")}, {Prefix: pre("10.0.0.7/32"), Exclude: true}}, []block{
			rangeOf("10.0.0.0", "10.0.0.6", all), rangeOf("10.0.0.8", "10.0.0.255", all),
		}},
		{"hole on a port", true, []OutboundRule{
			{Prefix: pre("10.0.0.0/24")}, {Prefix: pre("10.0.0.0/24"), Ports: []PortRange{{80, 80}}, Exclude: true},
		}, []block{
			rangeOf("10.0.0.0", "10.0.0.255", PortRange{0, 79}), rangeOf("10.0.0.0", "10.0.0.255", PortRange{81, 65535}),
		}},
		{"overlapping ports", true, []OutboundRule{
			{Prefix: pre("10.0.0.1/32"), Ports: []PortRange{{1, 10}, {5, 20}}},
		}, []block{rangeOf("10.0.0.1", "10.0.0.1", PortRange{1, 20})}},
		{"excluded whole", true, []OutboundRule{{Prefix: pre("10.0.0.0/24")}, {Prefix: pre("0.0.0.0/0"), Exclude: true}}, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			got := compile(c.rules, c.is4)
			if diff := cmp.Diff(c.want, got, cmp.AllowUnexported(block{}, addrRange{}), cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// TestCompile_meansTheRules compares random policies with their definition:
// selected by some rule, excluded by none, and no two blocks overlap.
func TestCompile_meansTheRules(t *testing.T) {
	seed := testenv.Seed(t)
	rng := rand.New(rand.NewPCG(seed, 0))
	addr := func() netip.Addr { return netip.AddrFrom4([4]byte{10, 0, 0, byte(rng.IntN(16))}) }
	port := func() uint16 { return uint16(rng.IntN(12)) }
	for range 500 {
		rules := make([]OutboundRule, rng.IntN(6))
		for i := range rules {
			rules[i] = OutboundRule{Prefix: netip.PrefixFrom(addr(), 28+rng.IntN(5)), Exclude: rng.IntN(3) == 0}
			for range rng.IntN(3) {
				p := port()
				rules[i].Ports = append(rules[i].Ports, PortRange{p, p + uint16(rng.IntN(6))})
			}
		}
		blocks := compile(rules, true)
		for a := byte(0); a < 18; a++ {
			for p := range uint16(20) {
				dst := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, a}), p)
				want, got := 0, 0
				if selected(rules, dst) {
					want = 1
				}
				for _, b := range blocks {
					if b.first.Compare(dst.Addr()) <= 0 && dst.Addr().Compare(b.last) <= 0 && b.ports.First <= p && p <= b.ports.Last {
						got++
					}
				}
				if got != want {
					t.Fatalf("seed %d: %v is in %d blocks, want %d\nrules %v\nblocks %v", seed, dst, got, want, rules, blocks)
				}
			}
		}
	}
}

func selected(rules []OutboundRule, dst netip.AddrPort) bool {
	in := false
	for _, r := range rules {
		hit := len(r.Ports) == 0
		for _, p := range r.Ports {
			hit = hit || p.First <= dst.Port() && dst.Port() <= p.Last
		}
		if !hit || !r.Prefix.Contains(dst.Addr()) {
			continue
		}
		if r.Exclude {
			return false
		}
		in = true
	}
	return in
}

func TestMergePorts(t *testing.T) {
	got := mergePorts([]PortRange{{5, 9}, {1, 3}, {4, 4}, {20, 65535}, {30, 40}, {11, 11}})
	if diff := cmp.Diff([]PortRange{{1, 9}, {11, 11}, {20, 65535}}, got); diff != "" {
		t.Error(diff)
	}
}

func TestParseDiagAnswer_refuses(t *testing.T) {
	for _, c := range []struct {
		name string
		b    []byte
	}{
		{"empty", nil},
		{"short", make([]byte, nlHeaderSize+3)},
		{"other type", make([]byte, nlHeaderSize+40)},
	} {
		t.Run(c.name, func(t *testing.T) {
			if state, err := parseDiagAnswer(c.b); err == nil {
				t.Errorf("no error, state %d", state)
			}
		})
	}
}
