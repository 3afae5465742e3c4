// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"fmt"
	"net"
	"net/netip"
	"sync/atomic"
	"testing"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/config"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/soft"
	"github.com/smcr-io/kube-smcr/pkg/rdma/soft/softtest"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
)

// TestLedger_queuePairs: half of a device's queue pairs is kept for the pods, in equal
// shares; a device that comes back may have another number of them.
func TestLedger_queuePairs(t *testing.T) {
	l := newLedger(budget(1))
	all := func(a *account, device string) (n int) {
		for a.TakeQP(netip.Addr{}, device) == nil {
			n++
		}
		return n
	}
	greedy, modest := l.open(budget(1)), l.open(budget(1))
	l.setQueuePairs("soft0", 80)
	l.setQueuePairs("soft1", 8)
	for _, step := range []struct {
		name   string
		a      *account
		device string
		want   int
	}{
		{"all but the other one's share", greedy, "soft0", 80 - 20},
		{"the other one's share", modest, "soft0", 20},
		{"of another device", greedy, "soft1", 8 - 2},
	} {
		if got := all(step.a, step.device); got != step.want {
			t.Errorf("%s: %d queue pairs, want %d", step.name, got, step.want)
		}
	}
	if n := greedy.queuePairRefusals(); n != 2 {
		t.Errorf("%d refusals, want 2", n)
	}
	l.setQueuePairs("soft1", 16)
	if got := all(greedy, "soft1"); got != 16-4-6 {
		t.Errorf("of a larger device: %d more, want 6", got)
	}
	greedy.GiveQP(netip.Addr{}, "soft0")
	if greedy.TakeQP(netip.Addr{}, "soft0") != nil || greedy.TakeQP(netip.Addr{}, "soft0") == nil {
		t.Error("one was given back: want one")
	}
	greedy.close()
	greedy.GiveQP(netip.Addr{}, "soft0") // by a stack that is late
	if got := all(modest, "soft0"); got != 80-20 {
		t.Errorf("the others have gone: %d more, want 60", got)
	}
	if modest.TakeQP(netip.Addr{}, "pod0") != nil {
		t.Error("a device that a pod has for itself is bounded")
	}
	modest.GiveQP(netip.Addr{}, "pod0")
}

// TestLedger_queuePairsOfMembers: pods that share a stack have their shares of a device's
// queue pairs in the account of that stack, and nowhere else.
func TestLedger_queuePairsOfMembers(t *testing.T) {
	l := newLedger(budget(1))
	l.setQueuePairs("soft0", 80)
	stack := l.openShared(1)
	for range 4 {
		l.openMember(budget(1))
		stack.join(1)
	}
	n := 0
	for stack.TakeQP(netip.Addr{}, "soft0") == nil {
		n++
	}
	if n != 80 {
		t.Errorf("pods that share a stack and are alone have %d queue pairs, want 80", n)
	}
}

// countingDevice is a device that says how many queue pairs are left.
type countingDevice struct {
	*fakeOpen
	left *atomic.Int64
}

func (d countingDevice) Attr() rdma.DeviceAttr { return rdma.DeviceAttr{Provider: "verbs", MaxQP: 10} }
func (d countingDevice) QueuePairs() int       { return int(d.left.Load()) }

// TestRun_raisesQueuePairs: a device was opened while another agent had most of its queue pairs, and
// says later that there are more.
func TestRun_raisesQueuePairs(t *testing.T) {
	b, hs := hardwareBench(t, "rxe0")
	var left atomic.Int64
	left.Store(10)
	b.cfg.openDevice = func(string, config.Device, bool) (rdma.Device, func() error, error) {
		_, stop, err := hs[0].open()
		return countingDevice{hs[0].opened[0], &left}, stop, err
	}
	var a *agent
	b.cfg.Observe = func(v View) { a = v.a }
	b.start()
	limit := func() int {
		r, _ := a.ledger.queuePairsOf(config.DeviceName(0, config.Device{RDMA: "rxe0"}))
		a.ledger.mu.Lock()
		defer a.ledger.mu.Unlock()
		return a.ledger.limit[r]
	}
	if n := limit(); n != 10 {
		t.Errorf("the device has %d queue pairs, want 10", n)
	}
	left.Store(100)
	eventually(t, func() string {
		if n := limit(); n != 100 {
			return fmt.Sprintf("the device has %d queue pairs, want 100", n)
		}
		return ""
	})
	left.Store(50)
	a.raiseQueuePairs()
	if n := limit(); n != 100 {
		t.Errorf("the device has %d queue pairs, want 100 as before", n)
	}
	a.ledger.raiseQueuePairs("of a pod", 100)
	if _, shared := a.ledger.queuePairsOf("of a pod"); shared {
		t.Error("the ledger has a pod's own device")
	}
}

// crowd are peers of pods whose stacks share a device, with the agent's accounts and without namespaces.
type crowd struct {
	t      *testing.T
	ledger *ledger
	peers  rdma.Device
	shared rdma.Device
}

func newCrowd(t *testing.T, node config.Budget) *crowd {
	fabric := softtest.NewFabric(t, 1)
	open := func(name, addr string) rdma.Device {
		return fabric.Open(t, soft.Config{Name: name, Addr: netip.MustParseAddr(addr), MTU: rdma.MTU1024})
	}
	return &crowd{t, newLedger(node), open("peers", "192.0.2.2"), open("soft0", "192.0.2.1")}
}

func (c *crowd) stack(cfg smcr.Config) *smcr.Stack {
	cfg.Option, cfg.RMBESizeBytes = smcr.BothSpeak{}, 16<<10
	s := value(smcr.NewStack(cfg))(c.t)
	c.t.Cleanup(func() { must(c.t, s.Close()) })
	return s
}

// pod opens a pod's account and stack.
func (c *crowd) pod(b config.Budget) (*proxy, *smcr.Stack) {
	a := c.ledger.open(b)
	return &proxy{account: a, memory: a}, c.stack(smcr.Config{Devices: []rdma.Device{c.shared}, Account: a, QueuePairs: a})
}

// carried makes so many peers of one address connect to a pod; it counts those on SMC-R. The others' reason is to be why.
func (c *crowd) carried(px *proxy, pod *smcr.Stack, from string, n int, why fallback) (smcrs int) {
	t := c.t
	t.Helper()
	ln := value(smcr.Listen(t.Context(), pod, "tcp", "127.0.0.1:0"))(t)
	t.Cleanup(func() { must(t, ln.Close()) })
	for range n {
		before := px.shortage()
		d := smcr.Dialer{Stack: c.stack(smcr.Config{Devices: []rdma.Device{c.peers}})}
		d.Dialer.LocalAddr = net.TCPAddrFromAddrPort(netip.AddrPortFrom(netip.MustParseAddr(from), 0))
		accepted := make(chan net.Conn, 1)
		go func() {
			c, _ := ln.Accept()
			accepted <- c
		}()
		c, err := d.DialContext(t.Context(), "tcp", ln.Addr().String())
		must(t, err)
		t.Cleanup(func() { _ = c.Close() })
		s := (<-accepted).(*smcr.Conn)
		t.Cleanup(func() { _ = s.Close() })
		if s.Mode() == smcr.ModeSMCR {
			smcrs++
		} else if got := px.fallbackOf(s.Info(), before); got != why {
			t.Errorf("plain TCP because of %v, want %v", got, why)
		}
	}
	return smcrs
}

// TestAttack_queuePairs: many peers make link groups with one of two pods that share a
// device. The other pod gets its link groups, and the first one's connections are plain TCP
// with a reason of their own from some number on: those of one address before the others.
func TestAttack_queuePairs(t *testing.T) {
	const queuePairs = 24 // of which a quarter is each pod's
	b := config.Budget{MemoryBytes: 1 << 30, Conns: 1000, Relays: 1000, Pending: 1000}
	c := newCrowd(t, b)
	c.ledger.setQueuePairs("soft0", queuePairs)
	why := fallback{code: agentapi.CodeQueuePairs}
	px, attacked := c.pod(b)
	px2, other := c.pod(b)
	const most = queuePairs * 3 / 4
	got := c.carried(px, attacked, "127.0.0.9", queuePairs, why)
	if got < most/2 || got > most*3/4+1 {
		t.Errorf("one client has %d link groups, want three quarters of %d", got, most)
	}
	// A first contact needs one more for a moment.
	if all := got + c.carried(px, attacked, "127.0.0.8", queuePairs, why); all != most-1 {
		t.Errorf("the attacked pod has %d link groups, want %d", all, most-1)
	}
	if got, want := c.carried(px2, other, "127.0.0.1", 4, why), 4; got != want {
		t.Errorf("the other pod has %d link groups, want %d", got, want)
	}
}

// TestAttack_memoryOfOneClient: one address makes link groups with a pod, each under another peer ID and with a
// connection that stays, until it gets no more. Another client of the pod is on SMC-R all the same, and has as many
// as are left; and so has the first one when its own end.
func TestAttack_memoryOfOneClient(t *testing.T) {
	const groups = 16
	b := config.Budget{MemoryBytes: groups * (27<<10 + 3*(16<<10)), Conns: 1000, Relays: 1000, Pending: 1000}
	c := newCrowd(t, b)
	px, pod := c.pod(b)
	full := fallback{code: agentapi.CodeBudgetMemory, detail: sourceFull}
	if got := c.carried(px, pod, "127.0.0.9", groups, full); got < groups/2 || got > groups*3/4+1 {
		t.Errorf("one client has %d link groups, want three quarters of %d", got, groups)
	}
	if got := c.carried(px, pod, "127.0.0.1", 2, fallback{}); got != 2 {
		t.Errorf("%d of 2 connections of another client are on SMC-R", got)
	}
}

// TestProxy_chargesQueuePairs: a pod's stack has an account that knows the node's devices.
func TestProxy_chargesQueuePairs(t *testing.T) {
	b, _ := hardwareBench(t, "rxe0")
	configs := make(chan smcr.Config, 1)
	b.cfg.newStack = func(cfg smcr.Config) (stack, error) {
		configs <- cfg
		return b.stack, nil
	}
	b.attach("a", 1)
	b.start()
	a := (<-configs).QueuePairs
	n, want := 0, fakeDevice{}.Attr().MaxQP
	for n <= want && a.TakeQP(netip.Addr{}, "rxe0") == nil {
		n++
	}
	if n != want {
		t.Errorf("the only pod may have %d queue pairs, want all of the device, %d", n, want)
	}
}
