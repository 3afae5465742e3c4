// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"net"
	"net/netip"
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
		for a.TakeQP(device) {
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
	greedy.GiveQP("soft0")
	if !greedy.TakeQP("soft0") || greedy.TakeQP("soft0") {
		t.Error("one was given back: want one")
	}
	greedy.close()
	greedy.GiveQP("soft0") // by a stack that is late
	if got := all(modest, "soft0"); got != 80-20 {
		t.Errorf("the others have gone: %d more, want 60", got)
	}
	if !modest.TakeQP("pod0") {
		t.Error("a device that a pod has for itself is bounded")
	}
	modest.GiveQP("pod0")
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
	for stack.TakeQP("soft0") {
		n++
	}
	if n != 80 {
		t.Errorf("pods that share a stack and are alone have %d queue pairs, want 80", n)
	}
}

// TestAttack_queuePairs: many peers make link groups with one of two pods that share a
// device. The other pod gets its link groups, and the first one's connections are plain TCP
// with a reason of their own from some number on.
func TestAttack_queuePairs(t *testing.T) {
	const queuePairs = 24 // of which a quarter is each pod's
	l := newLedger(config.Budget{MemoryBytes: 1 << 30, Conns: 1000, Relays: 1000, Pending: 1000})
	fabric := softtest.NewFabric(t, 1)
	open := func(name, addr string) rdma.Device {
		return fabric.Open(t, soft.Config{Name: name, Addr: netip.MustParseAddr(addr), MTU: rdma.MTU1024})
	}
	shared := open("soft0", "192.0.2.1")
	l.setQueuePairs("soft0", queuePairs)
	stack := func(c smcr.Config) *smcr.Stack {
		c.Option, c.RMBESizeBytes = smcr.BothSpeak{}, 16<<10
		s := value(smcr.NewStack(c))(t)
		t.Cleanup(func() { must(t, s.Close()) })
		return s
	}
	peers := open("peers", "192.0.2.2")
	// carried makes so many peers connect to a pod; it counts those on SMC-R.
	carried := func(px *proxy, pod *smcr.Stack, n int) (smcrs int) {
		t.Helper()
		ln := value(smcr.Listen(t.Context(), pod, "tcp", "127.0.0.1:0"))(t)
		t.Cleanup(func() { must(t, ln.Close()) })
		for range n {
			before := px.shortage()
			d := smcr.Dialer{Stack: stack(smcr.Config{Devices: []rdma.Device{peers}})}
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
			} else if why := px.fallbackOf(s.Info(), before); why.code != agentapi.CodeQueuePairs {
				t.Errorf("plain TCP because of %v, want %v", why, agentapi.CodeQueuePairs)
			}
		}
		return smcrs
	}
	proxies := [2]*proxy{}
	for i := range proxies {
		a := l.open(config.Budget{MemoryBytes: 1 << 30, Conns: 1000})
		proxies[i] = &proxy{account: a, memory: a}
	}
	pods := [2]*smcr.Stack{}
	for i, px := range proxies {
		pods[i] = stack(smcr.Config{Devices: []rdma.Device{shared}, Account: px.memory, QueuePairs: px.memory})
	}
	// A first contact needs one more for a moment.
	if got, want := carried(proxies[0], pods[0], queuePairs), queuePairs*3/4-1; got != want {
		t.Errorf("the attacked pod has %d link groups, want %d", got, want)
	}
	if got, want := carried(proxies[1], pods[1], 4), 4; got != want {
		t.Errorf("the other pod has %d link groups, want %d", got, want)
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
	for n <= want && a.TakeQP("rxe0") {
		n++
	}
	if n != want {
		t.Errorf("the only pod may have %d queue pairs, want all of the device, %d", n, want)
	}
}
