// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/internal/agent/rnics"
	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/cni"
	"github.com/smcr-io/kube-smcr/internal/config"
	"github.com/smcr-io/kube-smcr/internal/linux"
	"github.com/smcr-io/kube-smcr/internal/records"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
)

// bare is an agent on fakes that does not run: it has what Run makes, and nothing happens but what a
// test calls.
type bare struct {
	*bench
	a *agent
}

// newBare makes the agent of a bench without running it. Its devices are not open yet: see
// openDevices.
func newBare(t testing.TB, b *bench) *bare {
	t.Helper()
	cfg := b.cfg
	cfg.setDefaults(cfg.Log, cfg.Node.DataDir)
	a := &agent{
		cfg: cfg, started: time.Now(), store: b.store, ledger: newLedger(cfg.Node.NodeBudget),
		proxies:   proxies{all: map[*proxy]struct{}{}},
		decisions: newDecisions(), bypasses: newBypasses(),
	}
	a.manager.init(a)
	a.wire.a = a
	a.kernelPath.a = a
	a.kernelStats.a = a
	a.rnics = rnics.NewPool(rnics.Config{
		Log: cfg.Log, OpenOwn: cfg.openOwn, Learn: cfg.learn, Stay: cfg.Stay, LookEvery: cfg.deviceEvery, LookMost: cfg.ableEvery,
		Open: func(name string, d config.Device) (rdma.Device, func() error, error) {
			return a.cfg.openDevice(name, d, false)
		},
	})
	a.metrics = newMetrics(a.gauges)
	a.metrics.registry.MustRegister(&a.kernelStats)
	a.adopt(cfg.Node)
	return &bare{bench: b, a: a}
}

// newAbleBare is a bare agent whose device and option are there.
func newAbleBare(t testing.TB, nodeExtra, policies string) *bare {
	t.Helper()
	b := newBare(t, newBench(t, nodeExtra, policies))
	b.openDevices()
	b.a.option = fakeOption{}
	return b
}

func (b *bare) openDevices() {
	b.t.Helper()
	must(b.t, b.a.rnics.Open(b.t.Context(), b.a.cfg.Node.Devices))
}

// put puts another configuration in force.
func (b *bare) put(nodeExtra, policies string) {
	b.t.Helper()
	b.configure(nodeExtra, policies)
	b.a.adopt(value(b.a.cfg.Load())(b.t))
}

// attachmentOf is the attachment of a pod with these addresses, or with 127.0.0.1.
func attachmentOf(name string, ips ...string) cni.Attachment {
	att := cni.Attachment{ContainerID: name, IfName: "eth0", NetNS: "/netns/" + name, Pod: records.Pod{Namespace: "test", Name: name}}
	for _, ip := range ips {
		att.IPs = append(att.IPs, netip.MustParsePrefix(ip))
	}
	if len(ips) == 0 {
		att.IPs = []netip.Prefix{netip.MustParsePrefix("127.0.0.1/8")}
	}
	return att
}

// barePod is a pod with a proxy that has no goroutines and no listeners.
type barePod struct {
	*fakePod
	px    *proxy
	redir *fakeRedirect
	stack *fakeStack
}

// proxy makes a pod with a proxy, which is none of the manager's.
func (b *bare) proxy(name string) *barePod {
	b.t.Helper()
	p := &barePod{fakePod: b.kernel.add("/netns/"+name, 1), redir: &fakeRedirect{}, stack: b.stack}
	b.kernel.change(func() { b.kernel.opened++ }) // the handle that the proxy owns
	atts := []cni.Attachment{attachmentOf(name)}
	pod := podOf(atts[0])
	px := &proxy{
		agent: b.a, net: p.fakePod, settings: b.a.node.Load().SettingsFor(pod), set: b.a.rnics.Node(), log: b.a.cfg.Log,
		stack: b.stack, redirect: p.redir, budgetUsed: make(chan struct{}, 1),
		out: &listenerSet{dir: agentapi.Outbound, port: 1}, in: &listenerSet{dir: agentapi.Inbound, port: 2},
	}
	px.atts.Store(&atts)
	px.policies = px.policiesNow()
	px.life, px.kill = context.WithCancel(context.Background())
	b.t.Cleanup(px.kill)
	px.surroundings.Store(&surroundings{})
	must(b.t, px.openAccount())
	cfg := px.redirectConfig()
	px.tableConfig.Store(&cfg)
	b.a.proxies.add(px)
	p.px = px
	return p
}

// mayRelay lets the pod's sessions be relayed. A parker waits for sockets, for which the clock of a
// test's bubble stands still, so that only those tests have one that need it.
func (p *barePod) mayRelay(t testing.TB) {
	t.Helper()
	a := p.px.agent
	a.parker = value(smcr.NewParker(a.cfg.parkAfter, nil))(t)
	t.Cleanup(func() { must(t, a.parker.Close()) })
}

// reservation is a pending connection of the pod.
func (p *barePod) reservation(t testing.TB) *reservation {
	t.Helper()
	rv, _ := p.px.account.reserve(netip.Addr{}, true)
	if rv == nil {
		t.Fatal("the pod has no pending connection left")
	}
	return rv
}

// loopback is a connection over loopback. near is the agent's side.
func loopback(t testing.TB) (near, far *net.TCPConn) {
	t.Helper()
	l := value(net.ListenTCP("tcp4", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)}))(t)
	defer l.Close()
	far = value(net.DialTCP("tcp4", nil, l.Addr().(*net.TCPAddr)))(t)
	near = value(l.AcceptTCP())(t)
	for _, c := range []*net.TCPConn{near, far} {
		must(t, c.SetDeadline(time.Now().Add(waitLimit)))
		t.Cleanup(func() { _ = c.Close() })
	}
	return near, far
}

// decided wants exactly one decision, and returns it.
func (b *bare) decided() agentapi.Decision {
	b.t.Helper()
	ds := b.a.decisions.list()
	if len(ds) != 1 {
		b.t.Fatalf("decisions %+v, want one", ds)
	}
	return ds[0]
}

// wantFree wants that nothing of the node's budget is used.
func (b *bare) wantFree() {
	b.t.Helper()
	l := b.a.ledger
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.used != (amounts{}) {
		b.t.Errorf("still in use: %v", l.used)
	}
}

// wantLive wants that a connection is open, and that nothing was sent on it.
func wantLive(t testing.TB, c *net.TCPConn) {
	t.Helper()
	must(t, c.SetReadDeadline(time.Now().Add(5*time.Millisecond)))
	defer func() { _ = c.SetReadDeadline(time.Now().Add(waitLimit)) }()
	var timeout net.Error
	if n, err := c.Read(make([]byte, 1)); !errors.As(err, &timeout) || !timeout.Timeout() {
		t.Errorf("read %d bytes, %v, want an open connection that waits", n, err)
	}
}

// hookedNet is a fake pod whose dials a test sees, and can change.
type hookedNet struct {
	podNet
	out func(ctx context.Context, control linux.Control, local netip.Addr, dst netip.AddrPort) (*net.TCPConn, error)
	app func(ctx context.Context, client netip.Addr, dst netip.AddrPort) (*net.TCPConn, error)
}

func (h hookedNet) dialOut(ctx context.Context, control linux.Control, local netip.Addr, dst netip.AddrPort) (*net.TCPConn, error) {
	if h.out == nil {
		return h.podNet.dialOut(ctx, control, local, dst)
	}
	return h.out(ctx, control, local, dst)
}

func (h hookedNet) dialApp(ctx context.Context, client netip.Addr, dst netip.AddrPort) (*net.TCPConn, error) {
	if h.app == nil {
		return h.podNet.dialApp(ctx, client, dst)
	}
	return h.app(ctx, client, dst)
}
