// SPDX-License-Identifier: Apache-2.0

package rnics

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/smcr-io/kube-smcr/internal/config"
	"github.com/smcr-io/kube-smcr/internal/devices/vf"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// TestPool_Monitor: a device that is gone is closed at once, and opened when it is back.
func TestPool_Monitor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost()
		p := h.pool(t, "a")
		stop := p.Monitor(t.Context())
		defer stop()
		d := h.first("a")
		for _, kind := range []rdma.EventKind{rdma.EventPortDown, rdma.EventPortActive, rdma.EventGIDChange, rdma.EventQPFatal} {
			d.events <- rdma.AsyncEvent{Kind: kind}
		}
		h.lacks("a", errUnplugged)
		d.events <- rdma.AsyncEvent{Kind: rdma.EventDeviceFatal, Err: errUnplugged}
		synctest.Wait()
		if now := p.Node().States(); now[0].Open != nil || !errors.Is(now[0].Err, errUnplugged) || h.count("a") != 0 {
			t.Errorf("gone: %+v, open %d times", now[0], h.count("a"))
		}
		if diff := cmp.Diff("a port_down; a port_active; a gid_table; a gone", h.noted()); diff != "" {
			t.Errorf("changes (-want +got)\n%s", diff)
		}
		<-time.After(time.Minute)
		h.lacks("a", nil)
		<-time.After(lookMost + time.Second)
		synctest.Wait()
		if _, count := p.Node().Usable(); count != 1 || h.noted() != "a back" || h.count("a") != 1 {
			t.Errorf("back: count %d, open %d times", count, h.count("a"))
		}
	})
}

// TestPool_Monitor_pauses: a missing device of the node is looked for ever more rarely, one of a pod
// always after LookEvery, since its pod waits.
func TestPool_Monitor_pauses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost()
		for _, name := range []string{"a", "x"} {
			h.lacks(name, errUnplugged)
		}
		tries := map[string][]time.Duration{}
		began := time.Now()
		tried := func(name string) (rdma.Device, func() error, error) {
			h.mu.Lock()
			if at := time.Since(began); at > 0 { // not the one of Open
				tries[name] = append(tries[name], at)
			}
			h.mu.Unlock()
			return h.opens(name)
		}
		p := NewPool(Config{
			Log: slog.New(slog.DiscardHandler), Stay: true,
			Open:    func(name string, _ config.Device) (rdma.Device, func() error, error) { return tried(name) },
			OpenOwn: func(d *Own, _ Namespace) (rdma.Device, func() error, error) { return tried(d.ID) },
		})
		must(t, p.Open(t.Context(), []config.Device{{RDMA: "a"}}))
		stop := p.Monitor(t.Context())
		set := p.NewSet(nil)
		set.Update(t.Context(), nil, []Own{{Pod: "test/p", ID: "x", Mode: string(vf.ModeIPVlan)}})
		<-time.After(30 * time.Second)
		synctest.Wait()
		h.mu.Lock()
		want := []time.Duration{1, 3, 7, 15, 25} // the pause doubles up to lookMost
		for i := range want {
			want[i] *= time.Second
		}
		if d := cmp.Diff(want, tries["a"]); d != "" {
			t.Errorf("the node's device is tried at (-want +got):\n%s", d)
		}
		if n := len(tries["x"]); n != 30 {
			t.Errorf("the pod's device is tried %d times in 30 s, want 30", n)
		}
		h.mu.Unlock()
		if s := set.States()[0]; s.Err == nil || !strings.Contains(s.Err.Error(), "device x of pod test/p cannot be used: it was unplugged") {
			t.Errorf("%+v", s)
		}
		stop()
		must(t, set.Release())
	})
}

// TestPool_Monitor_again: the pause before a device that was back begins anew.
func TestPool_Monitor_again(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost()
		p := h.pool(t, "a")
		defer p.Monitor(t.Context())()
		for range 3 {
			h.lacks("a", errUnplugged)
			h.first("a").events <- rdma.AsyncEvent{Kind: rdma.EventDeviceFatal}
			<-time.After(time.Minute) // the pause is lookMost now
			h.lacks("a", nil)
			<-time.After(lookMost)
			synctest.Wait()
			h.lacks("a", errUnplugged)
			h.first("a").events <- rdma.AsyncEvent{Kind: rdma.EventDeviceFatal}
			h.lacks("a", nil)
			<-time.After(lookEvery)
			synctest.Wait()
			if n := h.count("a"); n != 1 {
				t.Errorf("the device is open %d times after %v", n, lookEvery)
			}
		}
	})
}

// TestPool_Monitor_soft: a software device is never gone, so nobody watches it.
func TestPool_Monitor_soft(t *testing.T) {
	h := newHost()
	p := h.pool(t)
	must(t, p.Open(t.Context(), []config.Device{{SoftAddress: netip.MustParseAddr("192.0.2.1")}}))
	p.monitor(t.Context(), p.nodeDevices()[0]) // returns
}

// closedDevice is a device that cannot be opened for its events.
type closedDevice struct{ fakeDevice }

func (*closedDevice) Open() (rdma.Context, error) { return nil, errUnplugged }

// TestPool_watch: which events mean that a device is gone, and why it is said to be.
func TestPool_watch(t *testing.T) {
	for _, tt := range []struct {
		name   string
		events []rdma.AsyncEvent // the last one, or the end of the events, is the end of the device
		closed bool              // the events end
		want   error
	}{
		{"fatal", []rdma.AsyncEvent{{Kind: rdma.EventDeviceFatal, Err: errUnplugged}}, false, errUnplugged},
		{"fatal without a reason", []rdma.AsyncEvent{{Kind: rdma.EventDeviceFatal}}, false, rdma.ErrClosed},
		{"events end", nil, true, rdma.ErrClosed},
		{"others before", []rdma.AsyncEvent{{Kind: rdma.EventQPFatal}, {Kind: rdma.EventPathDown}, {Kind: rdma.EventPortDown}}, true, rdma.ErrClosed},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p := newHost().pool(t)
			dev := &fakeDevice{name: "a", events: make(chan rdma.AsyncEvent, len(tt.events))}
			for _, ev := range tt.events {
				dev.events <- ev
			}
			if tt.closed {
				close(dev.events)
			}
			if err := p.watch(t.Context(), &device{name: "a"}, dev); !errors.Is(err, tt.want) {
				t.Errorf("watch = %v, want %v", err, tt.want)
			}
		})
	}
	p := newHost().pool(t)
	if err := p.watch(t.Context(), &device{name: "a"}, &closedDevice{}); !errors.Is(err, errUnplugged) {
		t.Errorf("watch = %v, want %v", err, errUnplugged)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if err := p.watch(ended, &device{name: "a"}, &fakeDevice{events: make(chan rdma.AsyncEvent)}); err != nil {
		t.Errorf("watch = %v after the agent's end", err)
	}
}
