// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/cni"
	"github.com/smcr-io/kube-smcr/internal/config"
	"github.com/smcr-io/kube-smcr/internal/linux"
	"github.com/smcr-io/kube-smcr/internal/records"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/verbs"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
)

// fakeKernel has pods on this machine's loopback, without privileges.
type fakeKernel struct {
	mu     sync.Mutex // guards what is below
	pods   map[string]*fakePod
	opened int // handles that are open
	// hang are paths that open waits for.
	hang map[string]chan struct{}
	// cgroupErr is why there is no hierarchy of cgroups.
	cgroupErr error
	// findErr and pathsErr are why nothing is found there.
	findErr, pathsErr error
}

type fakePod struct {
	k         *fakeKernel
	inode     uint64
	isGone    bool
	foreign   linux.Others
	othersErr error // of a look at foreign
	looks     int   // at foreign
	sweeps    int
	ends      int // of the diversion, by endDiversion
	// optionSweeps counts removals of the filter of the kernel's SMC-R.
	optionSweeps int
	failStep     string                 // "listen" or "install"
	queue        func() (holder, error) // makes holders of SYNs; nil: there are none
	// gate, if given, is called with the name of each step of a set-up.
	gate func(step string)

	// dst is the original destination of everything.
	dst netip.AddrPort
	// app is where dialApp connects to.
	app netip.AddrPort
	// silent, unless nil, is what dialOut waits for: a destination that does not
	// answer.
	silent chan struct{}

	noIPv6 bool     // there are no listeners for IPv6; guarded by the kernel's lock
	ports  []uint16 // of the listeners, in order: outbound, inbound
	redir  *fakeRedirect
}

type fakeRedirect struct {
	removing func()     // called by Remove first; nil: nothing
	mu       sync.Mutex // guards what is below
	cfg      linux.RedirectConfig
	renews   int
	updates  int
	renewErr error
	updErr   error // of the next update
	bypErr   error // of each bypass
	bypassed []netip.AddrPort
	ttl      time.Duration // of the last one of them
	forgot   int
	caught   bool
	removed  bool
	held     time.Duration
	closed   bool
}

func newFakeKernel() *fakeKernel { return &fakeKernel{pods: map[string]*fakePod{}} }

func (k *fakeKernel) add(path string, inode uint64) *fakePod {
	k.mu.Lock()
	defer k.mu.Unlock()
	p := &fakePod{k: k, inode: inode}
	k.pods[path] = p
	return p
}

func (k *fakeKernel) change(f func()) {
	k.mu.Lock()
	defer k.mu.Unlock()
	f()
}

func (k *fakeKernel) handles() int {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.opened
}

func (k *fakeKernel) cgroups() (podCgroups, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.cgroupErr != nil {
		return nil, k.cgroupErr
	}
	k.opened++
	return fakeCgroups{k}, nil
}

// fakeCgroups are those of the pods at paths with cgroupPrefix.
type fakeCgroups struct{ k *fakeKernel }

func (c fakeCgroups) find(uids []string) (map[string]string, error) {
	if c.k.findErr != nil {
		return nil, c.k.findErr
	}
	out := map[string]string{}
	for _, uid := range uids {
		if _, err := c.id("/kubepods/pod" + uid); err == nil {
			out[uid] = "/kubepods/pod" + uid
		}
	}
	return out, nil
}

func (c fakeCgroups) paths(ids []uint64) (map[uint64]string, error) {
	c.k.mu.Lock()
	defer c.k.mu.Unlock()
	if c.k.pathsErr != nil {
		return nil, c.k.pathsErr
	}
	out := map[uint64]string{}
	for path, p := range c.k.pods {
		if name, ok := strings.CutPrefix(path, cgroupPrefix); ok && !p.isGone && slices.Contains(ids, p.inode) {
			out[p.inode] = name
		}
	}
	return out, nil
}

func (c fakeCgroups) id(path string) (uint64, error) {
	c.k.mu.Lock()
	defer c.k.mu.Unlock()
	p := c.k.pods[cgroupPrefix+path]
	if p == nil || p.isGone {
		return 0, fmt.Errorf("open cgroup %s: %w", path, linux.ErrGone)
	}
	return p.inode, nil
}

func (c fakeCgroups) close() error {
	c.k.change(func() { c.k.opened-- })
	return nil
}

func (k *fakeKernel) open(path string) (podNet, error) {
	k.mu.Lock()
	hang := k.hang[path]
	k.mu.Unlock()
	if hang != nil {
		<-hang
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	p := k.pods[path]
	if p == nil || p.isGone {
		return nil, fmt.Errorf("open network namespace %s: %w", path, linux.ErrGone)
	}
	k.opened++
	return p, nil
}

func (p *fakePod) id() uint64 { return p.inode }

func (p *fakePod) gone() bool {
	p.k.mu.Lock()
	defer p.k.mu.Unlock()
	return p.isGone
}

// route is through a router, so that it can be told from the agent's.
func (p *fakePod) route(netip.Addr, netip.Addr) (clc.Route, error) {
	return clc.Route{Found: true, Gateway: true}, nil
}

func (p *fakePod) netInterfaces([]int) (map[int]verbs.Interface, error) {
	return nil, nil
}

func (p *fakePod) sweep() error {
	p.k.change(func() { p.sweeps++ })
	return nil
}

func (p *fakePod) endDiversion() error {
	p.k.change(func() { p.ends++ })
	return nil
}

func (p *fakePod) sweepOption() error {
	p.k.change(func() { p.optionSweeps++ })
	return nil
}

func (p *fakePod) close() error {
	p.k.change(func() { p.k.opened-- })
	return nil
}

func (p *fakePod) listen(ctx context.Context, _ linux.Control, _ uint16) ([]*net.TCPListener, uint16, error) {
	p.enter("listen")
	if p.failStep == "listen" {
		return nil, 0, errors.New("address already in use")
	}
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp4", "127.0.0.1:0")
	if err != nil {
		return nil, 0, err
	}
	port := l.Addr().(*net.TCPAddr).AddrPort().Port()
	p.k.change(func() { p.ports = append(p.ports, port) })
	ls := []*net.TCPListener{l.(*net.TCPListener)}
	six, err := p.listenIPv6(ctx, nil, 0, port)
	if errors.Is(err, errNoIPv6) {
		return ls, port, nil
	}
	return append(ls, six), port, err
}

// listenIPv6 opens a listener that nobody connects to. It is one of IPv4, which every machine has.
func (p *fakePod) listenIPv6(ctx context.Context, _ linux.Control, _, _ uint16) (*net.TCPListener, error) {
	none := false
	if p.k.change(func() { none = p.noIPv6 }); none {
		return nil, errNoIPv6
	}
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp4", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	return l.(*net.TCPListener), nil
}

func (p *fakePod) hold(linux.HolderConfig) (holder, error) {
	if p.queue == nil {
		return nil, errors.New("no queues")
	}
	return p.queue()
}

func (p *fakePod) install(cfg linux.RedirectConfig) (redirect, error) {
	p.enter("install")
	if p.failStep == "install" {
		return nil, errors.New("no nftables")
	}
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	r := &fakeRedirect{cfg: cfg}
	p.k.change(func() { p.redir = r })
	return r, nil
}

func (p *fakePod) enter(step string) {
	if p.gate != nil {
		p.gate(step)
	}
}

func (p *fakePod) others() (linux.Others, error) {
	p.enter("others")
	p.k.mu.Lock()
	defer p.k.mu.Unlock()
	p.looks++
	return p.foreign, p.othersErr
}

// transparentDst takes every connection for a diverted one.
func (p *fakePod) transparentDst(c *net.TCPConn, _ uint16) (netip.AddrPort, error) {
	return addrPort(c.LocalAddr()), nil
}

func (p *fakePod) originalDst(*net.TCPConn) (netip.AddrPort, error) {
	p.k.mu.Lock()
	defer p.k.mu.Unlock()
	if !p.dst.IsValid() {
		return netip.AddrPort{}, linux.ErrNotRedirected
	}
	return p.dst, nil
}

func (p *fakePod) dialOut(ctx context.Context, _ linux.Control, _ netip.Addr, dst netip.AddrPort) (*net.TCPConn, error) {
	if p.silent != nil {
		select {
		case <-p.silent:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	return dialTCP(ctx, dst)
}

func (p *fakePod) dialApp(ctx context.Context, _ netip.Addr, _ netip.AddrPort) (*net.TCPConn, error) {
	return dialTCP(ctx, p.app)
}

func dialTCP(ctx context.Context, dst netip.AddrPort) (*net.TCPConn, error) {
	c, err := (&net.Dialer{}).DialContext(ctx, "tcp", dst.String())
	if err != nil {
		return nil, err
	}
	return c.(*net.TCPConn), nil
}

func (r *fakeRedirect) Update(cfg linux.RedirectConfig) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.updErr; err != nil {
		r.updErr = nil
		return err
	}
	if err := cfg.Validate(); err != nil {
		return err
	}
	r.cfg, r.renewErr = cfg, nil
	r.updates++
	return nil
}

func (r *fakeRedirect) Renew() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.renews++
	return r.renewErr
}

func (r *fakeRedirect) Bypass(dst netip.AddrPort, ttl time.Duration) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.bypErr != nil {
		return r.bypErr
	}
	r.bypassed, r.ttl = append(r.bypassed, dst), ttl
	return nil
}

func (r *fakeRedirect) Forget() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.forgot++
	return nil
}

func (r *fakeRedirect) Caught() (bool, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.caught, nil
}

func (r *fakeRedirect) Remove() error {
	if r.removing != nil {
		r.removing()
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.removed = true
	return nil
}

func (r *fakeRedirect) Release(hold time.Duration) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.held, r.closed = hold, true
	return nil
}

func (r *fakeRedirect) Close() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.closed = true
	return nil
}

func (r *fakeRedirect) look(f func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	f()
}

// fakeStack answers every rendezvous in the same way.
type fakeStack struct {
	mu       sync.Mutex // guards what is below
	mode     smcr.Mode
	reason   clc.Reason
	err      error
	declined []clc.Reason
	closed   bool
	hang     chan struct{} // Stats waits for it
	closing  int
	added    []rdma.Device
	removed  []string
	addErr   error
}

func (s *fakeStack) set(mode smcr.Mode, reason clc.Reason, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mode, s.reason, s.err = mode, reason, err
}

func (s *fakeStack) change(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f()
}

func (s *fakeStack) client(_ context.Context, tcp *net.TCPConn) (peerConn, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err != nil {
		reset(tcp)
		return nil, s.err
	}
	return fakeConn{plainTCP{tcp, time.Now()}, s.mode, s.reason}, nil
}

func (s *fakeStack) server(ctx context.Context, tcp *net.TCPConn, decline clc.Reason) (peerConn, error) {
	s.mu.Lock()
	s.declined = append(s.declined, decline)
	s.mu.Unlock()
	c, err := s.client(ctx, tcp)
	if err == nil && decline != 0 {
		return fakeConn{plainTCP{tcp, time.Now()}, smcr.ModeTCP, decline}, nil
	}
	return c, err
}

func (s *fakeStack) LinkGroups() []smcr.GroupInfo { return []smcr.GroupInfo{{ID: 7, Err: io.EOF}} }
func (s *fakeStack) LostGroups() []smcr.GroupInfo { return nil }

func (s *fakeStack) Stats() smcr.Stats {
	s.mu.Lock()
	hang, closing := s.hang, s.closing
	s.mu.Unlock()
	if hang != nil {
		<-hang
	}
	return smcr.Stats{Groups: 1, Closing: closing}
}

func (s *fakeStack) AddDevice(d rdma.Device) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.addErr == nil {
		s.added = append(s.added, d)
	}
	return s.addErr
}

func (s *fakeStack) RemoveDevice(name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.removed = append(s.removed, name)
}

func (s *fakeStack) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	return nil
}

type fakeConn struct {
	plainTCP
	mode   smcr.Mode
	reason clc.Reason
}

func (c fakeConn) Info() smcr.Info { return smcr.Info{Mode: c.mode, Reason: c.reason, GroupID: 7} }

type fakeDevice struct{ rdma.Device }

func (fakeDevice) Name() string          { return "fake0" }
func (fakeDevice) Attr() rdma.DeviceAttr { return rdma.DeviceAttr{Provider: "fake", MaxQP: 8} }
func (fakeDevice) GIDs() []rdma.GIDEntry { return nil }
func (fakeDevice) Port() rdma.PortAttr {
	return rdma.PortAttr{State: rdma.PortActive, MaxMTU: rdma.MTU4096, ActiveMTU: rdma.MTU4096}
}

type fakeOption struct{ smcr.Option }

func (fakeOption) ControlDial(string, string, syscall.RawConn) error   { return nil }
func (fakeOption) ControlListen(string, string, syscall.RawConn) error { return nil }

// bench is an agent on fakes.
type bench struct {
	t      testing.TB
	dir    string
	kernel *fakeKernel
	wires  *fakeHost
	stack  *fakeStack
	store  cni.Store
	client *agentapi.Client
	cfg    Config
	reload chan struct{}
	hurry  chan struct{}
	text   string // of the configuration
	log    *logBuffer
	cancel context.CancelFunc
	done   chan error
}

type logBuffer struct {
	mu sync.Mutex // guards b
	b  bytes.Buffer
}

func (l *logBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func newBench(t testing.TB, nodeExtra, policies string) *bench {
	t.Helper()
	b := &bench{
		t: t, dir: t.TempDir(), kernel: newFakeKernel(), wires: &fakeHost{}, stack: &fakeStack{mode: smcr.ModeSMCR},
		reload: make(chan struct{}, 1), hurry: make(chan struct{}), log: &logBuffer{},
	}
	b.store = cni.NewStore(b.dir)
	b.configure(nodeExtra, policies)
	n := value(config.Parse("test", []byte(b.text)))(t)
	b.client = agentapi.NewClient(n.APISocket)
	t.Cleanup(b.client.Close)
	b.cfg = Config{
		Node: n, Log: slog.New(slog.NewTextHandler(b.log, nil)), Version: "test",
		Reload: b.reload, Hurry: b.hurry,
		Load: func() (*config.Node, error) { return config.Parse("test", []byte(b.text)) },
		platform: platform{
			kernel:    b.kernel,
			smc:       newFakeSMC(),
			host:      b.wires,
			preflight: func() error { return nil },
			files:     func() uint64 { return math.MaxUint64 },
			openDevice: func(string, config.Device, bool) (rdma.Device, func() error, error) {
				return fakeDevice{}, func() error { return nil }, nil
			},
			openOption: func() (smcr.Option, func() error, error) {
				return fakeOption{}, func() error { return nil }, nil
			},
			newStack: func(smcr.Config) (stack, error) { return b.stack, nil },
			// So that whatever a test does to a session, it may happen while that is parked.
			parkAfter: time.Millisecond,
			// So that a busy machine is no busy kernel.
			bypassPatience: time.Minute,
		},
	}
	return b
}

func (b *bench) configure(nodeExtra, policies string) {
	b.text = fmt.Sprintf("node:\n  name: n\n  devices: [{soft: {address: 192.0.2.1}}]\n  dataDir: %s\n  apiSocket: %s\n  metricsAddress: none\n  holdSYNs: false\n  redirectTTL: 500ms\n  drainTimeout: 200ms\n%s%s",
		b.dir, filepath.Join(b.dir, "a.sock"), nodeExtra, policies)
}

// attach makes a pod with a record; the agent is told if it runs.
func (b *bench) attach(name string, inode uint64) *fakePod {
	b.t.Helper()
	p := b.kernel.add("/netns/"+name, inode)
	b.record(name, inode)
	return p
}

func (b *bench) record(name string, inode uint64) {
	b.t.Helper()
	must(b.t, b.store.Write(cni.Attachment{
		ContainerID: name, IfName: "eth0", NetNS: "/netns/" + name, NetNSID: inode, Network: "n",
		Pod: records.Pod{Namespace: "test", Name: name}, IPs: []netip.Prefix{netip.MustParsePrefix("127.0.0.1/8")},
	}))
}

func (b *bench) start() {
	b.t.Helper()
	var ctx context.Context
	ctx, b.cancel = context.WithCancel(context.Background())
	b.done = make(chan error, 1)
	go func() { b.done <- Run(ctx, b.cfg) }()
	b.t.Cleanup(func() {
		b.stop()
		if n := b.kernel.handles(); n != 0 {
			b.t.Errorf("%d namespace handles left open", n)
		}
		if _, err := os.Stat(b.cfg.Node.APISocket); !errors.Is(err, os.ErrNotExist) {
			b.t.Errorf("API socket left behind: %v", err)
		}
		if b.t.Failed() {
			b.t.Log(b.log.String())
		}
	})
	b.sync()
}

func (b *bench) stop() {
	b.t.Helper()
	if b.done == nil {
		return
	}
	b.cancel()
	if err := <-b.done; err != nil {
		b.t.Errorf("Run = %v", err)
	}
	b.done = nil
}

func (b *bench) sync() {
	b.t.Helper()
	eventually(b.t, func() string { // of a reload and a sync that wait, the manager takes any first
		if len(b.reload) > 0 {
			return "the configuration is not reloaded"
		}
		return ""
	})
	eventually(b.t, func() string {
		select {
		case err := <-b.done:
			b.done = nil
			b.t.Fatalf("Run ended: %v", err)
		default:
		}
		if err := b.client.Sync(b.t.Context()); err != nil {
			return err.Error()
		}
		return ""
	})
}

// agentPort is the address of one of the pod's listeners: 0 outbound, 1 inbound.
func (b *bench) agentPort(p *fakePod, listener int) netip.AddrPort {
	var port uint16
	p.k.change(func() { port = p.ports[listener] })
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), port)
}

// dial connects to one of the pod's listeners.
func (b *bench) dial(p *fakePod, listener int) *net.TCPConn {
	b.t.Helper()
	c := value(dialTCP(b.t.Context(), b.agentPort(p, listener)))(b.t)
	must(b.t, c.SetDeadline(time.Now().Add(waitLimit)))
	b.t.Cleanup(func() { _ = c.Close() })
	return c
}

// reach connects to a port of this machine's.
func (b *bench) reach(port uint16) (*net.TCPConn, error) {
	return dialTCP(b.t.Context(), netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), port))
}

// dialReset connects to one of the pod's listeners and wants a reset, which may
// come before the connection is seen to be made.
func (b *bench) dialReset(p *fakePod, listener int) {
	b.t.Helper()
	c, err := dialTCP(b.t.Context(), b.agentPort(p, listener))
	if err != nil {
		if !errors.Is(err, syscall.ECONNRESET) {
			b.t.Errorf("dial = %v, want a reset", err)
		}
		return
	}
	defer c.Close()
	must(b.t, c.SetDeadline(time.Now().Add(waitLimit)))
	wantReset(b.t, c)
}

// server is an echo server on loopback.
func (b *bench) server() netip.AddrPort {
	b.t.Helper()
	l := value(net.Listen("tcp4", "127.0.0.1:0"))(b.t).(*net.TCPListener)
	serve(b.t, l, echo)
	return addrPort(l.Addr())
}

func (b *bench) status() agentapi.Status {
	b.t.Helper()
	return value(b.client.Status(b.t.Context()))(b.t)
}

// get asks the API as any HTTP client does.
func (b *bench) get(path string) (code int, body string) {
	b.t.Helper()
	c := http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(context.Context, string, string) (net.Conn, error) {
		return net.Dial("unix", b.cfg.Node.APISocket)
	}}}
	resp := value(c.Get("http://agent" + path))(b.t)
	defer resp.Body.Close()
	return resp.StatusCode, string(value(io.ReadAll(resp.Body))(b.t))
}

func (b *bench) attachment(name string) agentapi.Attachment {
	b.t.Helper()
	for _, a := range value(b.client.Attachments(b.t.Context()))(b.t).Attachments {
		if a.ContainerID == name {
			return a
		}
	}
	b.t.Fatalf("no attachment %s", name)
	return agentapi.Attachment{}
}

func wantReset(t testing.TB, c *net.TCPConn) {
	t.Helper()
	_, err := c.Read(make([]byte, 1))
	if err == nil || !strings.Contains(err.Error(), "connection reset") {
		t.Errorf("read = %v, want a reset", err)
	}
}
