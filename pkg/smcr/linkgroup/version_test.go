// SPDX-License-Identifier: Apache-2.0

package linkgroup_test

import (
	"fmt"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr/linkgroup"
	"github.com/smcr-io/kube-smcr/pkg/smcr/llc"
)

// RMBs that nobody uses any more are taken back with as few messages as the
// version allows: up to 8 keys in version 1 (RFC 7609 A.3.7); in version 2 up to
// 255 by the server, and 9 by the client, so that only one long message of each
// side is under way.
func TestGroup_deletesRKeysTogether(t *testing.T) {
	const conns = 40 // on RMBs of two elements
	for _, w := range wires {
		t.Run(w.name, func(t *testing.T) {
			d, _ := newDuo(t, w, [2]uint8{2, 2}, 2)
			var all [][2]*linkgroup.Conn
			for range conns {
				all = append(all, d.connect())
			}
			before := d.long
			for _, c := range all {
				for _, c := range c {
					c.Close(d.now)
				}
			}
			d.runUntilQuiet()
			for n, s := range d.sides {
				for _, c := range all {
					c[n].Release(d.now)
				}
				d.runUntilQuiet()
				if gone := s.g.TakeGoneRMBs(); len(gone) != conns/2-1 { // two elements stay free
					t.Errorf("side %d: %d RMBs are gone, want %d", n, len(gone), conns/2-1)
				}
			}
			want, wantLong := 3+3, 0
			if w.version == 2 {
				want, wantLong = 3+1, 1
			}
			if n := d.kinds[llc.TypeDeleteRKey]; n != want {
				t.Errorf("%d times DELETE RKEY, want %d", n, want)
			}
			if long := d.long - before; long != wantLong {
				t.Errorf("%d long messages, want %d", long, wantLong)
			}
		})
	}
}

// The first contact of a full group and the largest message that a group of ours
// can say.
func TestGroup_longestMessage(t *testing.T) {
	if linkgroup.MaxMessage > llc.MaxSizeV2 {
		t.Errorf("ADD LINK with all RMBs has %d bytes, a peer takes %d", linkgroup.MaxMessage, llc.MaxSizeV2)
	}
	r := newRigOf(t, 2, linkgroup.Config{Role: linkgroup.Server, Version: 2, Release: 1}, true)
	r.elements = 1
	r.form(llc.DialectLinux)
	for i := range linkgroup.MaxRMBs - 1 {
		name := fmt.Sprint("c", i)
		if err := r.open(name); err != nil {
			t.Fatal(err)
		}
		rmb := r.conns[name].Local()
		r.g.ConfirmRMB(rmb.RMB)
		r.poll()
		r.recv(llc.ConfirmRKey{Header: llc.Header{Version: 2, Response: true}, This: llc.RToken(rmb.RToken)})
		r.poll()
	}
	r.recv(llc.RequestAddLink{GIDs: []rdma.GID{peerEndOn(1).GID}})
	r.poll()
	if n := len(r.sent[len(r.sent)-1]); n != linkgroup.MaxMessage {
		t.Errorf("ADD LINK with all RMBs has %d bytes, want %d", n, linkgroup.MaxMessage)
	}
	got, err := llc.ParseAddLink(llc.DialectLinux, r.sent[len(r.sent)-1])
	if err != nil || len(got.Ext.Pairs) != linkgroup.MaxRMBs {
		t.Fatalf("sent %d pairs, want %d: %v", len(got.Ext.Pairs), linkgroup.MaxRMBs, err)
	}
}

// The router between the sides goes from the shell through ADD LINK's direct bit
// and back to the shell.
func TestGroup_routedLinks(t *testing.T) {
	router, other := rdma.MAC{0: 2, 5: 0xfe}, rdma.MAC{0: 2, 5: 0xfd}
	for _, role := range []linkgroup.Role{linkgroup.Client, linkgroup.Server} {
		t.Run(role.String(), func(t *testing.T) {
			r := newRigOf(t, 2, linkgroup.Config{Role: role, Version: 2, Release: 1}, true)
			r.offers = []linkgroup.Endpoint{r.ourEndOn(1)}
			r.offers[0].Router = other
			if err := r.open("a"); err != nil {
				t.Fatal(err)
			}
			if err := r.activate("a", peerRKey, 1); err != nil {
				t.Fatal(err)
			}
			p := peerEnd
			p.Router = router
			r.g.ConnectPeer(r.now, p)
			r.poll()
			h := llc.Header{Version: 2, Response: role == linkgroup.Server}
			r.recv(llc.ConfirmLink{
				Header: h, MAC: p.MAC, GID: p.GID, QPN: p.QPN, Link: 1, MaxLinks: 2, MaxConns: 255, Flags: llc.NoRMBEEyecatcher,
			})
			r.poll()
			q := peerEndOn(1)
			r.recv(llc.AddLink{Header: h, Link: 2, MTU: q.MTU, GID: q.GID, MAC: q.MAC, QPN: q.QPN})
			r.poll()
			if got := []rdma.MAC{r.peers[0].NextHop(), r.peers[1].NextHop()}; !slices.Equal(got, []rdma.MAC{router, other}) {
				t.Errorf("queue pairs send to %v", got)
			}
			for _, b := range r.sent {
				if m, err := llc.ParseAddLink(llc.DialectLinux, b); err == nil && m.Ext.Direct {
					t.Errorf("%v, but there is a router", m)
				}
			}
		})
	}
	if e := peerEnd; e.NextHop() != e.MAC {
		t.Errorf("without a router the next hop is %v", e.NextHop())
	}
}

// The shell learns which RNIC the client means.
func TestGroup_requestNamesGID(t *testing.T) {
	r := newRigOf(t, 1, linkgroup.Config{Role: linkgroup.Server, Version: 2, Release: 1}, false)
	r.form(llc.DialectLinux)
	r.wanted = nil
	want := peerEndOn(3).GID
	r.recv(llc.RequestAddLink{GIDs: []rdma.GID{peerEnd.GID, want, peerEndOn(2).GID}}) // the first one has a link
	r.poll()
	if diff := cmp.Diff([]linkgroup.Endpoint{{GID: want}}, r.wanted); diff != "" {
		t.Error(diff)
	}
}

func TestGroup_version(t *testing.T) {
	for version, want := range []uint8{1, 1, 2} {
		if g := linkgroup.New(linkgroup.Config{Version: uint8(version)}); g.Version() != want {
			t.Errorf("version %d gives %d", version, g.Version())
		}
	}
}

// The peer's CONFIRM LINK shows the byte order of its host, which our ADD LINK then has.
func TestGroup_byteOrderOfThePeer(t *testing.T) {
	for _, role := range []linkgroup.Role{linkgroup.Client, linkgroup.Server} {
		for _, big := range []bool{false, true} {
			r := newRigOf(t, 2, linkgroup.Config{Role: role, Version: 2, Release: 1}, true)
			r.connect()
			r.recv(llc.ConfirmLink{
				Header: llc.Header{Version: 2, Response: role == linkgroup.Server, BigEndian: big},
				MAC:    peerEnd.MAC, GID: peerEnd.GID, QPN: peerEnd.QPN, Link: 1, MaxLinks: 2, MaxConns: 255, Flags: llc.NoRMBEEyecatcher,
			})
			r.poll()
			if got := r.g.Snapshot(r.now).Terms.BigEndian; got != big {
				t.Errorf("%v: big-endian %t, want %t", role, got, big)
			}
		}
	}
}
