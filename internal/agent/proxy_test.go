// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/cni"
	"github.com/smcr-io/kube-smcr/internal/config"
	"github.com/smcr-io/kube-smcr/internal/linux"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
)

// TestStartProxy_fails: a set-up that fails in any of its steps, or during which the pod is
// detached, leaves nothing behind, and says where it failed.
func TestStartProxy_fails(t *testing.T) {
	broken := errors.New("broken")
	for _, tt := range []struct {
		name     string
		fail     func(b *bare, p *fakePod)
		detachAt string // the step during which the pod is detached
		want     string
	}{
		{name: "stack", fail: func(b *bare, _ *fakePod) {
			b.a.cfg.newStack = func(smcr.Config) (stack, error) { return nil, broken }
		}, want: "start SMC-R stack"},
		{name: "outbound listeners", fail: func(_ *bare, p *fakePod) { p.failStep = "listen" }, want: "listen for outbound connections"},
		{name: "inbound listeners", fail: func(_ *bare, p *fakePod) {
			n := 0
			p.gate = func(step string) {
				if n++; step == "listen" && n == 2 {
					p.failStep = "listen"
				}
			}
		}, want: "listen for inbound connections"},
		{name: "look", fail: func(_ *bare, p *fakePod) { p.othersErr = broken }, want: "look for other redirectors"},
		{name: "table", fail: func(_ *bare, p *fakePod) { p.failStep = "install" }, want: "install redirection"},
		{name: "detached at first", detachAt: "at once", want: "detached"},
		{name: "detached while it listens", detachAt: "listen", want: "detached"},
		{name: "detached while it looks", detachAt: "others", want: "detached"},
		{name: "detached while it installs", detachAt: "install", want: "detached"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b := newAbleBare(t, "", preferAll)
			p := b.kernel.add("/netns/a", 1)
			ctx, detach := context.WithCancelCause(t.Context())
			defer detach(nil)
			if tt.fail != nil {
				tt.fail(b, p)
			}
			if tt.detachAt != "" {
				p.gate = func(step string) {
					if step == tt.detachAt {
						detach(errDetached)
					}
				}
				p.enter("at once")
			}
			px, err := b.a.startProxy(ctx, p, []cni.Attachment{attachmentOf("a")}, b.a.rnics.Node())
			if px != nil || err == nil || !strings.Contains(err.Error(), "set up pod test/a in /netns/a") || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("startProxy = %v, %v, want %q", px, err, tt.want)
			}
			if errors.Is(err, errDetached) != (tt.detachAt != "") {
				t.Errorf("detached: %v", err)
			}
			for _, port := range p.ports {
				if c, err := b.reach(port); err == nil {
					t.Errorf("port %d still listens", port)
					_ = c.Close()
				}
			}
			if p.redir != nil && !p.redir.removed {
				t.Error("the table is still there")
			}
			if made := tt.name != "stack" && tt.detachAt != "at once"; made != b.stack.closed {
				t.Errorf("stack made: %t, closed: %t", made, b.stack.closed)
			}
			if len(b.a.ledger.accounts) != 0 || len(b.a.proxies.list()) != 0 {
				t.Errorf("%d accounts and %d proxies are left", len(b.a.ledger.accounts), len(b.a.proxies.list()))
			}
		})
	}
}

// TestProxy_ends: what the ways in which a proxy ends do to its pod, its sessions and what it had.
// A pod that is gone, or that another agent manages, is left as it is.
func TestProxy_ends(t *testing.T) {
	for _, tt := range []struct {
		name           string
		gone, released bool

		touches bool // the pod: its table is removed, and the namespace swept
		forgets bool // the destinations that are left alone
	}{
		{name: "stop", touches: true, forgets: true},
		{name: "stop of a pod that is gone", gone: true, forgets: true},
		{name: "stop after a handover", released: true},
		{name: "stop after a handover of a pod that is gone", gone: true, released: true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b := newAbleBare(t, "", preferAll)
			p := b.kernel.add("/netns/a", 1)
			b.kernel.change(func() { b.kernel.opened++ })
			px := value(b.a.startProxy(t.Context(), p, []cni.Attachment{attachmentOf("a")}, b.a.rnics.Node()))(t)
			bp := &barePod{fakePod: p, px: px}
			s := bp.live(t, "192.0.2.9:80")
			px.bypass(s, agentapi.CodeConnect, false)
			if tt.released {
				must(t, px.release(handoverTTL))
			}
			if err := px.stop(agentapi.CodePolicyChange, tt.gone); err != nil {
				t.Errorf("stop = %v", err)
			}
			if s.endedBy() != agentapi.CodePolicyChange {
				t.Errorf("the session ended by %q", s.endedBy())
			}
			if p.redir.removed != tt.touches || p.redir.closed == tt.touches || (p.sweeps == 1) != tt.touches {
				t.Errorf("table removed %t, its handle closed %t, swept %d times", p.redir.removed, p.redir.closed, p.sweeps)
			}
			if forgot := b.a.bypasses.get("test/a", s.dst, time.Now()) == nil; forgot != tt.forgets {
				t.Errorf("the destinations that are left alone were forgotten: %t", forgot)
			}
			for _, port := range p.ports {
				if c, err := b.reach(port); err == nil {
					t.Errorf("port %d still listens", port)
					_ = c.Close()
				}
			}
			if !b.stack.closed || len(b.a.ledger.accounts) != 0 || len(b.a.proxies.list()) != 0 || b.kernel.handles() != 0 || px.life.Err() == nil {
				t.Errorf("stack closed %t, %d accounts, %d proxies and %d handles left, life %v",
					b.stack.closed, len(b.a.ledger.accounts), len(b.a.proxies.list()), b.kernel.handles(), px.life.Err())
			}
		})
	}
}

// TestProxy_closeListenersLongTTL: with a long node.redirectTTL, too, listeners close soon.
func TestProxy_closeListenersLongTTL(t *testing.T) {
	b := newAbleBare(t, "", preferAll)
	b.a.cfg.Node.RedirectTTL = time.Minute
	p := b.kernel.add("/netns/a", 1)
	b.kernel.change(func() { b.kernel.opened++ })
	px := value(b.a.startProxy(t.Context(), p, []cni.Attachment{attachmentOf("a")}, b.a.rnics.Node()))(t)
	began := time.Now()
	px.closeListeners()
	if took := time.Since(began); took > 5*renewMost {
		t.Errorf("closed after %v", took)
	}
	must(t, px.stop(agentapi.CodeDraining, false))
}

// TestProxy_drain: a proxy that drains diverts nothing, waits for its sessions, and resets those
// that are left when its time is over. After a handover the table is another agent's.
func TestProxy_drain(t *testing.T) {
	for _, released := range []bool{false, true} {
		for _, patient := range []bool{true, false} {
			t.Run(fmt.Sprintf("released %t, patient %t", released, patient), func(t *testing.T) {
				b := newAbleBare(t, "", preferAll)
				p := b.proxy("a")
				s := p.live(t, "192.0.2.9:80")
				ended := make(chan struct{})
				p.px.sessionTasks.Go(func() {
					eventually(t, func() string {
						if patient || s.endedBy() != "" {
							return ""
						}
						return "the session was not reset"
					})
					close(ended)
				})
				p.px.released.Store(released)
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				if !patient {
					cancel()
				}
				p.px.drain(ctx)
				select {
				case <-ended:
				default:
					t.Error("drain did not wait for the session")
				}
				if want := map[bool]agentapi.Code{true: "", false: agentapi.CodeDraining}[patient]; s.endedBy() != want {
					t.Errorf("the session ended by %q, want %q", s.endedBy(), want)
				}
				if p.redir.removed == released || !p.px.draining.Load() {
					t.Errorf("table removed %t, draining %t", p.redir.removed, p.px.draining.Load())
				}
			})
		}
	}
}

// TestProxy_drainDelivers: what connections that ended have still to deliver is waited for, unless other pods use the stack,
// and not for longer than the time given.
func TestProxy_drainDelivers(t *testing.T) {
	for _, tt := range []struct {
		name      string
		users     int // of a shared stack; 0: it is the pod's
		delivered bool
		waits     bool
	}{
		{"delivered", 0, true, true},
		{"never delivered", 0, false, true},
		{"shared, the last pod", 1, true, true},
		{"shared", 2, false, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b := newAbleBare(t, "", preferAll)
			p := b.proxy("a")
			inner := &fakeStack{closing: 1}
			p.px.stack = inner
			if tt.users > 0 {
				p.px.stack = &sharedStack{stack: inner, pool: &stackPool{}, account: b.a.ledger.openShared(1), users: tt.users}
			}
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			drained := make(chan struct{})
			go func() {
				p.px.drain(ctx)
				close(drained)
			}()
			if !tt.waits {
				<-drained
				return
			}
			select {
			case <-drained:
				t.Error("bytes that were not delivered are not waited for")
			case <-time.After(3 * drainPoll):
			}
			if tt.delivered {
				inner.change(func() { inner.closing = 0 })
			} else {
				cancel()
			}
			<-drained
		})
	}
}

// TestOutboundPort: a pod's outbound port is always the same, and in the range of ports that
// programs do not listen on; the ports of neighbours differ.
func TestOutboundPort(t *testing.T) {
	seen := map[uint16]int{}
	for id := range uint64(2000) {
		id += 4026531840 // the kernel's first number of a namespace
		port := outboundPort(id)
		if port < 32768 || port > 60999 || port != outboundPort(id) {
			t.Fatalf("namespace %d: port %d", id, port)
		}
		seen[port]++
	}
	if len(seen) < 1700 { // as many as by chance, nearly
		t.Errorf("2000 neighbours have only %d ports", len(seen))
	}
	if a, b := outboundPort(4026531840), outboundPort(4026531841); a+1 == b || a == b {
		t.Errorf("neighbours have the ports %d and %d", a, b)
	}
}

// TestProxy_stackConfig: what a stack is made of, from the settings of the pod, the node, and what
// the node's budget leaves.
func TestProxy_stackConfig(t *testing.T) {
	const region = config.ConnsPerRegion
	eids := []clc.EID{value(clc.ParseUEID("ACME"))(t)}
	settings := config.Settings{RMBEBytes: 64 << 10, SendBufferBytes: 64 << 10, Budget: config.Budget{MemoryBytes: 1 << 30, Conns: 100}}
	for _, tt := range []struct {
		name   string
		change func(*proxy)
		node   func(*config.Node)
		want   func(*smcr.Config)
	}{
		{name: "as it is", want: func(*smcr.Config) {}},
		{name: "few connections fit", change: func(px *proxy) { px.settings.Budget.MemoryBytes = 3 * 128 << 10 }, want: func(c *smcr.Config) {
			c.MaxConns, c.RMBEsPerRMB, c.MemoryBytes = 3, 3, 3*128<<10
		}},
		{name: "large buffers", change: func(px *proxy) {
			px.settings.Budget, px.settings.RMBEBytes, px.settings.SendBufferBytes = config.Budget{MemoryBytes: 4 << 20, Conns: 100}, 512<<10, 512<<10
		}, want: func(c *smcr.Config) { // of which further connections with a peer have less
			c.MaxConns, c.RMBEsPerRMB, c.MemoryBytes, c.RMBESizeBytes, c.SendBufferBytes = 16, 4, 4<<20, 512<<10, 512<<10
		}},
		{name: "none fits", change: func(px *proxy) { px.settings.Budget.MemoryBytes = 0 }, want: func(c *smcr.Config) {
			c.MaxConns, c.RMBEsPerRMB, c.MemoryBytes = 1, 1, 1
		}},
		{name: "no connections", change: func(px *proxy) { px.settings.Budget.Conns = 0 }, want: func(c *smcr.Config) { c.MaxConns = 1 }},
		{name: "shared", change: func(px *proxy) { px.settings.Shared = true }, want: func(c *smcr.Config) {
			c.MaxConns, c.MemoryBytes, c.Prefixes = sharedPods*100, sharedPods<<30, nil
		}},
		{name: "shared, more than the node has", change: func(px *proxy) {
			px.settings.Shared = true
			px.agent.ledger.limit[memory], px.agent.ledger.limit[conns] = 2<<30, 150
		}, want: func(c *smcr.Config) { c.MaxConns, c.MemoryBytes, c.Prefixes = 150, 2<<30, nil }},
		{name: "a claimed device with an interface of its own", change: func(px *proxy) {
			att := attachmentOf("a")
			att.Devices = []cni.AttachedDevice{{ID: "0000:03:00.1", IfName: "rdma0", IPs: []netip.Prefix{netip.MustParsePrefix("10.0.2.1/20")}}}
			px.atts.Store(&[]cni.Attachment{att})
		}, want: func(c *smcr.Config) { c.Prefixes = append(c.Prefixes, netip.MustParsePrefix("10.0.2.1/20")) }},
		{name: "single link", change: func(px *proxy) { px.settings.SingleLink = true }, want: func(c *smcr.Config) { c.LinksPerGroup = 1 }},
		{name: "node", node: func(n *config.Node) {
			n.Dialects, n.AnswerPoll, n.AnyPrefix, n.EIDs = config.DialectsLinux, time.Millisecond, true, eids
		}, want: func(c *smcr.Config) {
			c.Dialects, c.AnswerPoll, c.AnyPrefix, c.EIDs = smcr.DialectsLinux, time.Millisecond, true, eids
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b := newAbleBare(t, "", preferAll)
			px := b.proxy("a").px
			px.settings = settings
			b.a.ledger.limit[memory], b.a.ledger.limit[conns] = 1<<40, 1<<20
			n := *b.a.node.Load()
			n.Dialects, n.AnswerPoll, n.AnyPrefix, n.EIDs = 0, 0, false, nil
			if tt.node != nil {
				tt.node(&n)
			}
			b.a.node.Store(&n)
			if tt.change != nil {
				tt.change(px)
			}
			got := px.stackConfig(px.account)
			if got.Account != px.account || got.QueuePairs != px.account || len(got.Devices) != 1 || got.Option == nil || got.Hostname != "n" {
				t.Errorf("%+v", got)
			}
			want := smcr.Config{
				RMBESizeBytes: 64 << 10, SendBufferBytes: 64 << 10, RMBEsPerRMB: region, MemoryBytes: 1 << 30, MaxConns: 100,
				AnswerPoll: -1, Prefixes: []netip.Prefix{netip.MustParsePrefix("127.0.0.1/8")},
			}
			tt.want(&want)
			plain := smcr.Config{
				RMBESizeBytes: got.RMBESizeBytes, SendBufferBytes: got.SendBufferBytes, RMBEsPerRMB: got.RMBEsPerRMB, MemoryBytes: got.MemoryBytes, MaxConns: got.MaxConns,
				AnswerPoll: got.AnswerPoll, Prefixes: got.Prefixes, AnyPrefix: got.AnyPrefix, EIDs: got.EIDs, Dialects: got.Dialects, LinksPerGroup: got.LinksPerGroup,
			}
			if d := cmp.Diff(fmt.Sprintf("%+v", want), fmt.Sprintf("%+v", plain)); d != "" {
				t.Errorf("(-want +got):\n%s", d)
			}
		})
	}
}

// TestProxy_openAccount: a pod that shares its stack has no memory of its own, or it would be
// counted twice.
func TestProxy_openAccount(t *testing.T) {
	for _, shared := range []bool{false, true} {
		b := newAbleBare(t, "", preferAll)
		px := b.proxy("a").px
		px.settings.Shared = shared
		must(t, px.openAccount())
		if has := px.account.limit[memory] > 0; has == shared || px.memory != px.account {
			t.Errorf("shared %t: memory %d bytes", shared, px.account.limit[memory])
		}
	}
}

// A pod with two interfaces has one table, and one filter, for which the policies of both are one set: what a policy selects is there
// once, however many interfaces the policy is for, and fits.
func TestProxy_furtherInterface(t *testing.T) {
	var peers, ports []string
	for i := range 200 {
		peers = append(peers, fmt.Sprintf("198.51.%d.%d/32", i/100, 2*(i%100)))
		ports = append(ports, fmt.Sprint(1000+2*i))
	}
	many := "peers: {cidrs: [" + strings.Join(peers, ", ") + "]}"
	for _, tt := range []struct {
		policy, datapath            string
		outbound, required, inbound int
	}{
		{many, "Agent", 200, 0, 0},
		{many + ", mode: Required", "Agent", 200, 200, 0},
		{many + ", ports: [80, 90]", "Agent", 200, 0, 2},
		{"ports: [" + strings.Join(ports, ", ") + "]", "Agent", 2, 0, 200},
		{many, "Kernel", 200, 0, 0},
		{many + ", ports: [80, 90]", "Kernel", 200, 0, 0},
	} {
		b, s := newKernelBench(t, "policies:\n- {name: p, datapath: "+tt.datapath+", "+tt.policy+"}\n")
		p := b.attach("a", 1)
		second := attachmentOf("a")
		second.IfName, second.NetNSID, second.Network = "net1", 1, "m"
		must(t, b.store.Write(second))
		b.start()
		if a := b.attachment("a"); a.State != agentapi.StateReady {
			t.Errorf("%.40s: attachment %+v", tt.policy, a)
			continue
		}
		if cfg, _ := s.pod(1); tt.datapath == "Kernel" {
			if len(cfg.Filter.Peers) != tt.outbound {
				t.Errorf("%s: %d rules of the filter, want %d", tt.policy, len(cfg.Filter.Peers), tt.outbound)
			}
			continue
		}
		p.redir.look(func() {
			if c := p.redir.cfg; len(c.Outbound) != tt.outbound || len(c.Required) != tt.required || len(c.Inbound) != tt.inbound {
				t.Errorf("%.40s: %d rules, %d required, %d port ranges; want %d, %d, %d", tt.policy, len(c.Outbound), len(c.Required), len(c.Inbound), tt.outbound, tt.required, tt.inbound)
			}
		})
	}
}

// TestProxy_redirectConfig: what is diverted in a pod.
func TestProxy_redirectConfig(t *testing.T) {
	all := []linux.OutboundRule{{Prefix: netip.MustParsePrefix("0.0.0.0/0")}, {Prefix: netip.MustParsePrefix("::/0")}}
	mixed := "policies:\n- {name: must, mode: Required, ports: [80]}\n- {name: may, ports: [90]}\n"
	ports := func(ps ...uint16) (out []linux.PortRange) {
		for _, p := range ps {
			out = append(out, linux.PortRange{First: p, Last: p})
		}
		return out
	}
	for _, tt := range []struct {
		name, policies string
		change         func(*proxy)

		outbound    int // rules
		inbound     []linux.PortRange
		inboundAll  bool
		when        linux.WhenCaught
		required    int // rules
		always      []linux.PortRange
		greedy      int
		outboundAny bool // of any destination and port
	}{
		{name: "all", policies: preferAll, outbound: len(all), inboundAll: true, outboundAny: true},
		{name: "all of one interface", policies: "policies:\n- {name: all, pods: {interfaces: [eth0]}}\n- {name: some, ports: [80], pods: {interfaces: [net1]}}\n", change: func(px *proxy) {
			second := attachmentOf("a")
			second.IfName = "net1"
			px.atts.Store(&[]cni.Attachment{second, attachmentOf("a")})
		}, outbound: 4, inboundAll: true},
		{name: "some required", policies: mixed, outbound: 4, inbound: ports(80, 90), when: linux.CaughtDrop, required: 2},
		{name: "no option", policies: mixed, change: func(px *proxy) { px.agent.option = nil }, outbound: 4, when: linux.CaughtDrop, required: 2},
		{name: "mismatch", policies: mixed, change: func(px *proxy) { px.settings.Mismatch = config.MismatchTransport }, outbound: 4, when: linux.CaughtDrop, required: 2},
		{name: "other redirector", policies: mixed, change: func(px *proxy) { px.surroundings.Store(&surroundings{caught: true}) }, outbound: 2, when: linux.CaughtDivert},
		{name: "other redirector, none required", policies: preferAll, change: func(px *proxy) { px.surroundings.Store(&surroundings{caught: true}) }},
		{name: "pause", policies: mixed, change: func(px *proxy) { px.pausing.Store(&pause{code: agentapi.CodeBudgetRelays}) }, outbound: 2, inbound: ports(80), when: linux.CaughtDrop, required: 2},
		{name: "no IPv6", policies: preferAll, change: func(px *proxy) { px.out.listeners = make([]*net.TCPListener, 1) }, outbound: 1, inboundAll: true},
		{name: "no IPv6, some required", policies: mixed, change: func(px *proxy) { px.out.listeners = make([]*net.TCPListener, 1) }, outbound: 3, inbound: ports(80, 90), when: linux.CaughtDrop, required: 2},
		{name: "greedy client", policies: mixed, change: func(px *proxy) { px.greedy.Store(&greedy{sources: addrs("192.0.2.7")}) }, outbound: 4, inbound: ports(80, 90), when: linux.CaughtDrop, required: 2, always: ports(80), greedy: 1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b := newAbleBare(t, "", tt.policies)
			px := b.proxy("a").px
			if tt.change != nil {
				tt.change(px)
			}
			c := px.redirectConfig()
			if c.Mark != markWire || c.AppMark != markApp || c.PlainMark != markPlain || c.OutboundPort != 1 || c.InboundPort != 2 || c.FailOpenTTL != b.cfg.Node.RedirectTTL {
				t.Errorf("%+v", c)
			}
			if len(c.Outbound) != tt.outbound || c.InboundAll != tt.inboundAll || c.WhenCaught != tt.when || len(c.Required) != tt.required || len(c.InboundExcept) != tt.greedy {
				t.Errorf("%+v", c)
			}
			if d := cmp.Diff(tt.inbound, c.Inbound); d != "" {
				t.Errorf("inbound (-want +got):\n%s", d)
			}
			if d := cmp.Diff(tt.always, c.InboundAlways); d != "" {
				t.Errorf("always (-want +got):\n%s", d)
			}
			if tt.outboundAny && (c.Outbound[0].Prefix != all[0].Prefix || len(c.Outbound[0].Ports) != 0) {
				t.Errorf("outbound %+v", c.Outbound)
			}
		})
	}
}

// TestProxy_identity: the pod of a connection is the attachment that has its address, or else the
// first.
func TestProxy_identity(t *testing.T) {
	first, second := attachmentOf("a", "10.0.0.1/24"), attachmentOf("a", "10.0.1.1/24", "fd00::1/64")
	second.IfName = "net1"
	second.Devices = []cni.AttachedDevice{{ID: "0000:03:00.1", IfName: "rdma0", IPs: []netip.Prefix{netip.MustParsePrefix("10.0.2.1/24")}}}
	var px proxy
	px.atts.Store(&[]cni.Attachment{first, second})
	for addr, want := range map[string]string{"10.0.0.1": "eth0", "10.0.1.1": "net1", "fd00::1": "net1", "10.0.1.2": "eth0", "10.0.2.1": "net1"} {
		if got := px.identity(netip.MustParseAddr(addr)); got.Interface != want || got.Name != "a" || got.Namespace != "test" {
			t.Errorf("%s: %+v, want interface %s", addr, got, want)
		}
	}
	outside := cni.Attachment{ContainerID: "0123abc", IfName: "eth0"}
	if got := podOf(outside); got.Name != "0123abc" {
		t.Errorf("outside Kubernetes: %+v", got)
	}
}

// TestProxy_enforcePolicies: which sessions a change of the policies ends.
func TestProxy_enforcePolicies(t *testing.T) {
	const none, smcrMode, tcp = agentapi.ModeConnecting, "SMC-R", "TCP"
	off := "policies:\n- {name: p, ports: [9]}\n"
	for _, tt := range []struct {
		name, before, after, mode string
		ends                      bool
	}{
		{"allowed as before", preferAll, preferAll, smcrMode, false},
		{"no longer allowed", preferAll, off, smcrMode, true},
		{"no longer allowed, connecting", preferAll, off, none, true},
		{"no longer allowed, plain TCP already", preferAll, off, tcp, false},
		{"never allowed", off, off, tcp, false},
		{"required now, plain TCP", preferAll, requireAll, tcp, true},
		{"required now, was not selected", off, requireAll, tcp, true},
		{"required now, on SMC-R", preferAll, requireAll, smcrMode, false},
		{"required now, connecting", preferAll, requireAll, none, false},
	} {
		b := newAbleBare(t, "", tt.before)
		p := b.proxy("a")
		s := p.live(t, "192.0.2.9:80")
		s.mode = tt.mode
		b.put("", tt.after)
		p.px.enforcePolicies()
		if want := map[bool]agentapi.Code{true: agentapi.CodePolicyChange}[tt.ends]; s.endedBy() != want {
			t.Errorf("%s: ended by %q, want %q", tt.name, s.endedBy(), want)
		}
	}
	b := newAbleBare(t, "", preferAll)
	p := b.proxy("a")
	p.px.agent.cfg.Gone = func(config.Pod) bool { return true }
	s := p.live(t, "192.0.2.9:80")
	s.mode = smcrMode
	b.put("", off)
	p.px.enforcePolicies()
	if s.endedBy() != agentapi.CodeDraining {
		t.Errorf("of a pod that is gone: ended by %q", s.endedBy())
	}
}

// TestProxy_update: an update writes the table only if the policies want another, forgets which
// destinations are left alone if the policies changed, and is due again if it failed.
func TestProxy_update(t *testing.T) {
	b := newAbleBare(t, "", preferAll)
	p := b.proxy("a")
	atts := *p.px.atts.Load()
	step := func(name string, updates, forgot int, stale bool) {
		t.Helper()
		err := p.px.update(atts)
		if (err != nil) != stale || p.px.tableStale.Load() != stale || p.redir.updates != updates || p.redir.forgot != forgot {
			t.Errorf("%s: %v, due again %t, %d updates, forgot %d times; want %d and %d", name, err, p.px.tableStale.Load(), p.redir.updates, p.redir.forgot, updates, forgot)
		}
	}
	s := p.outboundTo("192.0.2.9:80")
	p.px.bypass(s, agentapi.CodeConnect, false)
	step("nothing changed", 0, 0, false)
	if b.a.bypasses.get("test/a", s.dst, time.Now()) == nil {
		t.Error("a destination was forgotten, though no policy changed")
	}
	b.put("", "policies:\n- {name: p, ports: [80]}\n")
	p.redir.updErr = errors.New("no memory for the table")
	step("fails", 0, 1, true)
	step("again", 1, 1, false)
	if b.a.bypasses.get("test/a", s.dst, time.Now()) != nil {
		t.Error("a destination is still left alone under other policies")
	}
	step("nothing changed since", 1, 1, false)
}

// TestProxy_updateOfOneInterface: which destinations are left alone is forgotten when the policies of any of the pod's
// interfaces change, also because the interface came after the pod's proxy.
func TestProxy_updateOfOneInterface(t *testing.T) {
	const eth0, net1, required = "- {name: a, pods: {interfaces: [eth0]}}\n", "- {name: b, pods: {interfaces: [net1]}", ", mode: Required}\n"
	b := newAbleBare(t, "", "policies:\n"+eth0+net1+required)
	p := b.proxy("a")
	atts := *p.px.atts.Load()
	update := func(name string, forgot int) {
		t.Helper()
		must(t, p.px.update(atts))
		if p.redir.forgot != forgot {
			t.Errorf("%s: forgot %d times, want %d", name, p.redir.forgot, forgot)
		}
	}
	update("nothing changed", 0)
	second := attachmentOf("a", "192.0.2.4/24")
	second.IfName = "net1"
	atts = append(slices.Clone(atts), second)
	update("another interface", 1)
	b.put("", "policies:\n"+eth0+net1+"}\n")
	update("its policy requires SMC-R no more", 2)
	p.px.bypass(p.outboundTo("10.9.0.5:80"), agentapi.CodeOf(clc.ReasonPeerNoSMC), false)
	b.put("", "policies:\n"+eth0+net1+required)
	update("it does again", 3)
	if e := b.a.bypasses.list(time.Now()); len(e) > 0 {
		t.Errorf("left alone: %+v", e)
	}
	update("nothing changed since", 3)
}

// TestProxy_updateAgain: an update of a pod's table that failed is tried again with the
// next look, without anything new.
func TestProxy_updateAgain(t *testing.T) {
	b := newBench(t, "", preferAll)
	p := b.attach("a", 1)
	b.start()
	p.redir.look(func() { p.redir.updErr = errors.New("no memory for the table") })
	b.configure("", "policies:\n- {name: some, peers: {cidrs: [10.2.0.0/16]}}\n")
	b.reload <- struct{}{}
	eventually(t, func() string {
		if !strings.Contains(b.log.String(), "no memory for the table") {
			return "the update did not fail"
		}
		return ""
	})
	eventually(t, func() string {
		var rules []linux.OutboundRule
		p.redir.look(func() { rules = p.redir.cfg.Outbound })
		if len(rules) != 1 || rules[0].Prefix.String() != "10.2.0.0/16" {
			return fmt.Sprintf("the table selects %v", rules)
		}
		if a := b.attachment("a"); a.Detail != "" {
			return "the attachment says " + a.Detail
		}
		return ""
	})
}

// TestProxy_dropsRequiredOnly: what a pod's table drops for a moment, when a redirector
// is caught, are connections to where a policy wants nothing without SMC-R.
func TestProxy_dropsRequiredOnly(t *testing.T) {
	must := []linux.OutboundRule{{Prefix: netip.MustParsePrefix("10.2.0.0/16"), Ports: []linux.PortRange{}}}
	for _, c := range []struct {
		name, policies string
		when           linux.WhenCaught
		required       []linux.OutboundRule
	}{
		{"none required", preferAll, linux.CaughtDirect, nil},
		{"some required", "policies:\n- {name: all, peers: {except: [10.2.0.0/16]}}\n- {name: must, mode: Required, peers: {cidrs: [10.2.0.0/16]}}\n", linux.CaughtDrop, must},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newBench(t, "", c.policies)
			p := b.attach("a", 1)
			b.start()
			var cfg linux.RedirectConfig
			p.redir.look(func() { cfg = p.redir.cfg })
			if cfg.WhenCaught != c.when || len(cfg.Outbound) == 0 {
				t.Errorf("when caught %v, want %v; outbound %v", cfg.WhenCaught, c.when, cfg.Outbound)
			}
			if diff := cmp.Diff(c.required, cfg.Required, cmp.Comparer(func(a, b netip.Prefix) bool { return a == b })); diff != "" {
				t.Error(diff)
			}
		})
	}
}
