// SPDX-License-Identifier: Apache-2.0

package rnics

import (
	"errors"
	"log/slog"
	"net/netip"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/smcr-io/kube-smcr/internal/config"
	"github.com/smcr-io/kube-smcr/internal/devices/vf"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

func rowOf(addr, netDev string) rdma.GIDEntry {
	return rdma.GIDEntry{GID: rdma.GIDFromAddr(netip.MustParseAddr(addr)), Type: rdma.GIDTypeRoCEv2, NetDev: netDev}
}

// TestPool_Monitor_laterAddress: a device that was opened before its interface had an address is opened again when the
// address is there, once.
func TestPool_Monitor_laterAddress(t *testing.T) {
	for _, own := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			h := newHost()
			p := h.pool(t, "a")
			defer p.Monitor(t.Context())()
			s, id := p.Node(), "a"
			if own {
				s, id = p.NewSet(nil), "x"
				s.Update(t.Context(), nil, []Own{{Pod: "p", ID: "x", Mode: string(vf.ModeIPVlan)}})
				defer func() { must(t, s.Release()) }()
			}
			first := h.first(id)
			first.table.Store(&[]rdma.GIDEntry{rowOf("fe80::1", "eth3")})
			first.events <- rdma.AsyncEvent{Kind: rdma.EventGIDChange}
			<-time.After(time.Minute)
			if h.first(id) != first {
				t.Fatal("it was opened again though it has only a link-local GID")
			}
			h.noted()
			first.table.Store(&[]rdma.GIDEntry{rowOf("fe80::1", "eth3"), rowOf("192.0.2.9", "eth3")})
			first.events <- rdma.AsyncEvent{Kind: rdma.EventGIDChange}
			synctest.Wait()
			if now := s.States()[0]; now.Open != nil || !errors.Is(now.Err, errReopen) {
				t.Errorf("with an address: %+v", now)
			}
			<-time.After(time.Minute)
			if _, count := s.Usable(); count == 0 || h.count(id) != 1 || h.first(id) == first {
				t.Errorf("count %d, open %d times, the first opening: %t", count, h.count(id), h.first(id) == first)
			}
			if got, want := h.noted(), id+" gid_table; "+id+" gone; "+id+" back"; got != want {
				t.Errorf("changes %q, want %q", got, want)
			}
		})
	}
}

// TestPool_Monitor_moved: a device of which only the ID was known is opened again when its interface went into the pod, so that
// its GIDs are looked up there; one whose port is down for another reason is not, nor one that has a record.
func TestPool_Monitor_moved(t *testing.T) {
	for _, c := range []struct {
		name         string
		lookUp, goes bool
		want         int // openings
	}{{"goes into the pod", true, true, 2}, {"stays", true, false, 1}, {"has a record", false, true, 1}} {
		synctest.Test(t, func(t *testing.T) {
			h := newHost()
			var gone atomic.Bool
			var inPod []bool // at each opening
			p := NewPool(Config{
				Log: slog.New(slog.DiscardHandler), Learn: func(d Own) (Own, error) { return d, nil },
				InPod: func(*Own) bool { return gone.Load() },
				OpenOwn: func(d *Own, _ Namespace) (rdma.Device, func() error, error) {
					inPod = append(inPod, gone.Load())
					return h.opens(d.ID)
				},
			})
			defer p.Monitor(t.Context())()
			in := &fakeNet{}
			s := p.NewSet(in)
			s.Update(t.Context(), nil, []Own{{Pod: "p", ID: "x", LookUp: c.lookUp}})
			defer func() { must(t, s.Release()) }()
			first := h.first("x")
			first.down.Store(true)
			first.events <- rdma.AsyncEvent{Kind: rdma.EventPortDown} // the interface is still on its way
			<-time.After(time.Minute)
			gone.Store(c.goes)
			<-time.After(time.Minute)
			synctest.Wait()
			if len(inPod) != c.want || h.count("x") != 1 {
				t.Errorf("%s: opened %v, want %d times, open %d times", c.name, inPod, c.want, h.count("x"))
			}
			if inside := s.Inside(netip.MustParseAddr("192.0.2.9")) == in; inside != (c.want == 2) {
				t.Errorf("%s: its address is in the pod's namespace: %t", c.name, inside)
			}
		})
	}
}

// TestBetterGID: which rows make it worth to open a device again, which ends all of its links.
func TestBetterGID(t *testing.T) {
	v1 := rowOf("192.0.2.1", "eth3")
	v1.Type = rdma.GIDTypeRoCEv1
	local := rowOf("fe80::1", "eth3")
	for _, c := range []struct {
		name  string
		d     device
		table []rdma.GIDEntry
		want  bool
	}{
		{"none at all", device{}, nil, false},
		{"only link-local ones", device{}, []rdma.GIDEntry{local, rowOf("fe80::2", "eth3")}, false},
		{"IPv4", device{}, []rdma.GIDEntry{local, rowOf("192.0.2.1", "eth3")}, true},
		{"IPv6", device{}, []rdma.GIDEntry{local, rowOf("fd00::1", "eth3")}, true},
		{"of another type", device{}, []rdma.GIDEntry{local, v1}, false},
		{"of the port's other interface", device{}, []rdma.GIDEntry{local, rowOf("192.0.2.1", "eth3.7")}, true},
		{"of the port's other interface, in a pod", device{own: &Own{}}, []rdma.GIDEntry{local, rowOf("192.0.2.1", "eth3.7")}, false},
		{"of a pod's child", device{}, []rdma.GIDEntry{local, rowOf("192.0.2.1", "")}, false},
		{"a better one than the first", device{}, []rdma.GIDEntry{rowOf("2001:db8::1", "eth3"), rowOf("192.0.2.1", "eth3")}, false},
		{"configured", device{cfg: config.Device{GIDAddress: local.GID.Addr()}}, []rdma.GIDEntry{local, rowOf("192.0.2.1", "eth3")}, false},
	} {
		if err := betterGID(&c.d, c.table); (err != nil) != c.want || err != nil && !errors.Is(err, errReopen) {
			t.Errorf("%s: %v, want one: %t", c.name, err, c.want)
		}
	}
}
