// SPDX-License-Identifier: Apache-2.0

package smcr_test

import (
	"encoding/hex"
	"fmt"
	"io"
	"net/netip"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
)

// captured reads a message of a Linux kernel.
func captured(t *testing.T, name string) []byte {
	t.Helper()
	text, err := os.ReadFile("clc/testdata/captured/" + name + ".hex")
	if err != nil {
		t.Fatal(err)
	}
	var digits strings.Builder
	for line := range strings.Lines(string(text)) {
		if !strings.HasPrefix(line, "#") {
			digits.WriteString(strings.TrimSpace(line))
		}
	}
	b, err := hex.DecodeString(digits.String())
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// TestSMCRv2_messagesAsLinux: what two stacks say to each other has, but for the
// names and numbers of the machines, the bytes that two Linux kernels were
// captured with: one RNIC each (capture 01), two each (20), first and
// subsequent contact.
func TestSMCRv2_messagesAsLinux(t *testing.T) {
	for _, tc := range []struct {
		name, capture string
		rnics         int
	}{{"one RNIC", "01", 1}, {"two RNICs", "20", 2}} {
		t.Run(tc.name, func(t *testing.T) {
			f := newFakeFabric()
			stack := func(name, host string, last byte) *smcr.Stack {
				return newStack(t, nil, versions(smcr.VersionsV2), func(c *smcr.Config) {
					c.Hostname, c.EIDs, c.RMBESizeBytes = host, eids(t, "SMCV2-DEFAULT-UEID"), 64<<10
					c.Devices = nil
					for i := range tc.rnics {
						d := f.device(fmt.Sprintf("%s%d", name, i), last+10*byte(i)).(*fakeDevice)
						d.gid.PrefixBits = 24
						c.Devices = append(c.Devices, d)
					}
				})
			}
			p := &pair{fabric: f, client: stack("c", "g2", 2), server: stack("s", "g1", 1)}
			p.listen(t)
			k := newProxy(t, p.l.Addr().String())
			p.dialTo = k.addr
			a, b := p.dial(t)
			first := k.take(t)
			c, d := p.dial(t)
			then := k.take(t)
			checkProposal(t, first[0], captured(t, "proposal-01")) // of capture 20 it is the same
			checkAccept(t, first[1], captured(t, "accept-"+tc.capture))
			checkConfirm(t, first[2], captured(t, "confirm-"+tc.capture))
			checkProposal(t, then[0], captured(t, "proposal-01"))
			checkAccept(t, then[1], captured(t, "accept-20-2"))
			checkConfirm(t, then[2], captured(t, "confirm-20-2"))
			for _, x := range []io.Closer{a, b, c, d} {
				_ = x.Close()
			}
		})
	}
}

// TestStack_proposalOfBothVersions: version 1 comes first, version 2 is an
// extension behind its subnet, as Linux has it: the version 2 Proposal of capture
// 01 and the subnet of capture 40.
func TestStack_proposalOfBothVersions(t *testing.T) {
	f := newFakeFabric()
	id := func(c *smcr.Config) { c.EIDs = eids(t, "SMCV2-DEFAULT-UEID") }
	p := &pair{fabric: f, client: newStack(t, f.device("c", 1), id), server: newStack(t, f.device("s", 2), id)}
	p.listen(t)
	k := newProxy(t, p.l.Addr().String())
	p.dialTo = k.addr
	a, b := p.dial(t)
	got := k.take(t)[0]
	v1, v2 := captured(t, "proposal-40"), captured(t, "proposal-01")
	const ids, area, subnet = 8, 40, 80 // offsets: names of the machine, growth area, subnet
	want := append([]byte{}, v1[:subnet]...)
	want = append(want, 127, 0, 0, 0, 24, 0, 0, 0)
	want = append(want, v2[subnet:]...) // the extension, where version 2 alone has it
	want[6], want[7] = byte(len(want)), v1[7]&^0x0c|v2[7]&0x0c
	want[area+11] = 36 // where the extension begins
	copy(want[ids:area-2], got[ids:area-2])
	gid := subnet + 8 + 8 // in the extension
	copy(want[gid:gid+16], got[gid:gid+16])
	want[gid+16+3] = 0 // the feature of SMC-D
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("Proposal (-Linux +ours):\n%s", d)
	}
	_, _ = a.Close(), b.Close()
}

func checkProposal(t *testing.T, ours, linux []byte) {
	t.Helper()
	p, err := clc.ParseProposal(ours)
	if err != nil {
		t.Fatal(err)
	}
	l, err := clc.ParseProposal(linux)
	if err != nil {
		t.Fatal(err)
	}
	// Linux leaves peer ID and MAC out if it does not offer version 1. Its
	// feature is one of SMC-D.
	p.PeerID, p.MAC, p.Ext.GID, p.Ext.FeatureMask = l.PeerID, l.MAC, l.Ext.GID, l.Ext.FeatureMask
	if d := cmp.Diff(linux, p.Append(nil)); d != "" {
		t.Errorf("Proposal (-Linux +ours):\n%s", d)
	}
}

func checkAccept(t *testing.T, ours, linux []byte) {
	t.Helper()
	a, err := clc.ParseAccept(ours)
	if err != nil {
		t.Fatal(err)
	}
	l, err := clc.ParseAccept(linux)
	if err != nil {
		t.Fatal(err)
	}
	checkEndpoint(t, &a.Endpoint, &l.Endpoint)
	if d := cmp.Diff(linux, a.Append(nil)); d != "" {
		t.Errorf("Accept (-Linux +ours):\n%s", d)
	}
}

func checkConfirm(t *testing.T, ours, linux []byte) {
	t.Helper()
	c, err := clc.ParseConfirm(ours)
	if err != nil {
		t.Fatal(err)
	}
	l, err := clc.ParseConfirm(linux)
	if err != nil {
		t.Fatal(err)
	}
	gids := c.GIDs
	if c.FirstContact && (gids.Len() != l.GIDs.Len() || gids.At(0) != c.GID) {
		t.Errorf("the Confirm has the GIDs %v, that of its link is %v; Linux had %v", gids.Slice(), c.GID, l.GIDs.Slice())
	}
	checkEndpoint(t, &c.Endpoint, &l.Endpoint)
	c.GIDs = l.GIDs
	if d := cmp.Diff(linux, c.Append(nil)); d != "" {
		t.Errorf("Confirm (-Linux +ours):\n%s", d)
	}
}

// checkEndpoint checks names and numbers of a machine, and puts those of Linux
// in their place.
func checkEndpoint(t *testing.T, e, linux *clc.Endpoint) {
	t.Helper()
	if e.PeerID.IsZero() || e.GID == (rdma.GID{}) || e.MAC == (rdma.MAC{}) || e.QPN == 0 || e.RKey == 0 || e.RMBEIndex == 0 || e.AlertToken == 0 || !e.MTU.Valid() {
		t.Errorf("a name or number is missing: %+v", e)
	}
	e.PeerID, e.GID, e.MAC, e.QPN, e.PSN, e.MTU = linux.PeerID, linux.GID, linux.MAC, linux.QPN, linux.PSN, linux.MTU
	e.RKey, e.RMBAddr, e.RMBEIndex, e.AlertToken = linux.RKey, linux.RMBAddr, linux.RMBEIndex, linux.AlertToken
	e.Ext.FeatureMask = linux.Ext.FeatureMask // of SMC-D
	e.RMBESize = linux.RMBESize
}

// TestLink_pathAttributes: where packets go, and how far.
func TestLink_pathAttributes(t *testing.T) {
	router := rdma.MAC{0x52, 0x54, 0, 0, 0, 0xfe}
	for _, tc := range []struct {
		name   string
		client byte // the client's subnet; the server's is 1
		bits   int
		route  func(src, dst netip.Addr) (clc.Route, error)
		dmac   rdma.MAC
		hops   uint8
		direct bool
	}{
		{"one subnet", 1, 24, nil, rdma.MAC{2, 0, 0, 0, 1, 1}, 1, true},
		{"the subnet is not known", 1, 0, nil, rdma.MAC{2, 0, 0, 0, 1, 1}, 64, true},
		{"other subnets, the device finds the way", 2, 24, nil, rdma.MAC{2, 0, 0, 0, 1, 1}, 64, true},
		{"behind a router", 2, 24, func(netip.Addr, netip.Addr) (clc.Route, error) {
			return clc.Route{Found: true, Gateway: true, MAC: router}, nil
		}, router, 64, false},
		{"on-link by a route", 2, 24, func(netip.Addr, netip.Addr) (clc.Route, error) {
			return clc.Route{Found: true}, nil
		}, rdma.MAC{2, 0, 0, 0, 1, 1}, 64, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			f := newFakeFabric()
			stack := func(net, last byte) *smcr.Stack {
				return newStack(t, nil, func(c *smcr.Config) {
					c.Route = tc.route
					c.Devices = []rdma.Device{&fakeDevice{f: f, name: "d", gid: rdma.GIDEntry{
						GID: rdma.GIDFromAddr(netip.AddrFrom4([4]byte{10, 0, net, last})), Type: rdma.GIDTypeRoCEv2,
						MAC: rdma.MAC{2, 0, 0, 0, net, last}, PrefixBits: tc.bits,
					}}}
				})
			}
			p := &pair{fabric: f, client: stack(tc.client, 2), server: stack(1, 1)}
			p.listen(t)
			k := newProxy(t, p.l.Addr().String())
			p.dialTo = k.addr
			a, b := p.dial(t)
			if i := a.Info(); i.Version != 2 {
				t.Fatalf("version %d, %v because of %v", i.Version, i.Mode, i.Reason)
			}
			qpn := p.client.LinkGroups()[0].Links[0].LocalQPN
			f.mu.Lock()
			path := f.qps[qpn].path
			f.mu.Unlock()
			if path.DMAC != tc.dmac || path.HopLimit != tc.hops {
				t.Errorf("packets go to %v with hop limit %d, want %v and %d", path.DMAC, path.HopLimit, tc.dmac, tc.hops)
			}
			said := k.take(t)
			acc, err := clc.ParseAccept(said[1])
			if err != nil || acc.Ext.Direct != tc.direct {
				t.Errorf("the server says direct %v, %v; want %v", acc.Ext.Direct, err, tc.direct)
			}
			con, err := clc.ParseConfirm(said[2])
			if err != nil || con.Ext.Direct != tc.direct {
				t.Errorf("the client says direct %v, %v; want %v", con.Ext.Direct, err, tc.direct)
			}
			_, _ = a.Close(), b.Close()
		})
	}
}
