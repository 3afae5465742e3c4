// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/cni"
	"github.com/smcr-io/kube-smcr/internal/config"
	"github.com/smcr-io/kube-smcr/internal/linux"
	"github.com/smcr-io/kube-smcr/internal/vf"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
)

// Config says how to run the agent.
type Config struct {
	// Node is the configuration to start with. Required.
	Node *config.Node
	// Log gets the agent's records. Required.
	Log *slog.Logger
	// Level, if given, follows the configured log level.
	Level *slog.LevelVar
	// Version of the program, for status.
	Version string
	// Reload makes the agent ask Load for the configuration again.
	Reload <-chan struct{}
	Load   func() (*config.Node, error)
	// Observe, if given, is called once, before the agent manages the node.
	Observe func(View)
	// Stay lets the agent run where the node lacks a device or a feature: it
	// says so, and everything is plain TCP. When what was missing is there, Run
	// ends, and is to be called again. Otherwise Run fails.
	Stay bool
	// Hurry ends the draining of a stopping agent.
	Hurry <-chan struct{}
	// Instance tells this agent from others of the node, before and after it.
	Instance string
	// Manages, if given, is called when the agent begins to manage the node,
	// and, with false, when it handed over to another one: what else is done
	// for the node begins and ends then. It is not called in between or at the
	// end, and must not wait for the agent.
	Manages func(bool)
	// Leave, when it is closed, makes the agent take everything of its kind off
	// the node: Run ends the diversion, lets connections end for a moment,
	// sweeps all pods, removes the attachment records and its files, and
	// returns. End first what makes new records: the CNI plugin.
	Leave <-chan struct{}
	// Collectors are served with the agent's metrics.
	Collectors []prometheus.Collector
	// GuardMetrics, if given, wraps what serves node.metricsAddress, and
	// MetricsListener its listener. Otherwise it serves everybody who gets there.
	GuardMetrics    func(http.Handler) http.Handler
	MetricsListener func(net.Listener) net.Listener

	// Assigned, if given, says which devices pods got from kubelet. Without an
	// attachment record that names devices, a pod's connections use these.
	Assigned Assigned

	// What the machine gives; nil is the real thing.
	kernel     kernel
	host       hostNet
	openDevice func(name string, cfg config.Device, share bool) (rdma.Device, func() error, error)
	openOwn    func(d *ownDevice, in podNet) (rdma.Device, func() error, error)
	// hostDevices are those that the host has for pods.
	hostDevices func() ([]vf.Device, error)
	learn       func(d ownDevice) (ownDevice, error)
	openOption  func() (smcr.Option, func() error, error)
	newStack    func(smcr.Config) (stack, error)
	route       func(src, dst netip.Addr) (clc.Route, error)
	preflight   func() error
	files       func() uint64 // how many the process may have open
	mayUseAPI   func(uid uint32) bool
	ableEvery   time.Duration
	// deviceEvery is how soon a device that is gone is looked for again; the
	// pause doubles up to ableEvery.
	deviceEvery time.Duration
	// untrackAfter is how long nobody must have had rules in a pod before packets
	// are kept from connection tracking there.
	untrackAfter time.Duration
}

// agent is a running agent.
type agent struct {
	cfg     Config
	started time.Time
	node    atomic.Pointer[config.Node]
	devices devices
	host    hostDevices
	option  smcr.Option // nil: everything is plain TCP
	unable  unable      // why option is nil
	store   cni.Store
	ledger  *ledger
	// fewFiles says what the limit of open files leaves out of the node's budget.
	fewFiles string
	stacks   stackPool
	wire     wire
	runs     runs
	near     func(numaNode int) bool // to the processors that the agent may use

	metrics   *metrics
	flows     flows
	decisions *decisions
	bypasses  bypasses
	news      gate
	strays    gate // of connections that were not diverted
	refusals  refusals
	manager   manager
	draining  atomic.Bool

	// owned by the goroutine of Run, or by the manager while it runs
	claim    *claim // nil: another agent manages the node
	tookFrom string // instance; changes only while no server runs
	legacies legacies
}

// Run runs an agent until ctx ends, and then stops it gracefully: it ends the
// diversion, waits up to DrainTimeout for the connections, resets the rest and
// removes what it put into the pods. An agent that handed over to another one
// does not touch the pods any more.
func Run(ctx context.Context, cfg Config) (err error) {
	cfg.setDefaults()
	a := &agent{
		cfg: cfg, started: time.Now(), store: cni.NewStore(cfg.Node.DataDir),
		runs: runs{all: map[*run]struct{}{}}, near: nearNodes(), flows: flows{all: map[uint64]*flow{}},
		decisions: newDecisions(), bypasses: bypasses{all: map[bypassKey]agentapi.Bypass{}},
	}
	budget, few := fitFiles(cfg.Node.NodeBudget, cfg.files())
	a.ledger, a.fewFiles = newLedger(budget), few
	if few != "" {
		a.cfg.Log.Warn("the limit of open files makes the node's budget smaller", "detail", few)
	}
	a.manager.init(a)
	a.wire.a = a
	a.metrics = newMetrics(a.gauges)
	a.metrics.registry.MustRegister(cfg.Collectors...)
	a.adopt(cfg.Node)
	if err := a.store.MakeDir(); err != nil {
		return fmt.Errorf("data directory: %w: make it writable for the agent", err)
	}
	defer func() { err = errors.Join(err, a.devices.close(), a.removeDirs()) }()
	closeOption, err := a.enable(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, closeOption()) }()
	defer a.keepDevices(context.WithoutCancel(ctx))()
	if err := a.obtain(ctx); err != nil {
		return err
	}
	defer func() {
		if a.claim != nil {
			err = errors.Join(err, a.claim.release())
		}
	}()
	api, err := a.listenAPI(ctx)
	if err != nil {
		return err
	}
	if cfg.Observe != nil {
		cfg.Observe(View{a})
	}
	for api != nil && err == nil {
		a.manages(true)
		if err = a.manage(ctx, api); err == nil && a.claim == nil {
			api, err = a.standBy(ctx)
			continue
		}
		api = nil
	}
	a.cfg.Log.Info("agent stopped")
	return err
}

// manage runs the agent's tasks until it ends, leaves or hands over. The
// manager stops last but one: the API answers while the agent drains.
func (a *agent) manage(ctx context.Context, api *apiServer) error {
	a.cfg.Log.Info("agent started", "version", a.cfg.Version, "node", a.node.Load().Name, "socket", a.node.Load().APISocket)
	g, life := errgroup.WithContext(context.WithoutCancel(ctx))
	life, stopAPI := context.WithCancel(life)
	managerCtx, stopManager := context.WithCancel(life)
	defer stopAPI()
	defer stopManager()
	unhook := context.AfterFunc(ctx, stopManager)
	defer unhook()
	task := func(name string, f func(context.Context) error) func() error {
		return func() error {
			if err := f(life); err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
			return nil
		}
	}
	for _, s := range api.servers {
		g.Go(task("serve "+s.name, s.run))
	}
	g.Go(task("look again for what is missing", func(context.Context) error {
		if a.unable.code != "" && a.cfg.Stay && a.awaitAble(managerCtx) {
			stopManager()
		}
		return nil
	}))
	g.Go(task("manage pods", func(context.Context) error {
		defer stopAPI()
		defer stopManager()
		switch h := a.manager.run(managerCtx); {
		case h != nil:
			a.handOver(h, api)
			return nil
		case a.left():
			return a.leave(ctx)
		}
		return errors.Join(a.manager.shutdown(context.WithoutCancel(ctx)), a.wire.remove())
	}))
	return g.Wait()
}

func (c *Config) setDefaults() {
	if c.kernel == nil {
		c.kernel = linuxKernel{}
	}
	if c.host == nil {
		c.host = linuxHost{}
	}
	if c.openDevice == nil {
		c.openDevice = func(name string, cfg config.Device, share bool) (rdma.Device, func() error, error) {
			return openDevice(c.Node.DataDir, name, cfg, share)
		}
	}
	if c.openOwn == nil {
		c.openOwn = openOwn
	}
	host := vf.Host{DataDir: c.Node.DataDir}
	if c.hostDevices == nil {
		c.hostDevices = host.Devices
	}
	if c.learn == nil {
		c.learn = func(d ownDevice) (ownDevice, error) { return learn(host, d) }
	}
	if c.openOption == nil {
		c.openOption = openOption
	}
	if c.newStack == nil {
		c.newStack = func(cfg smcr.Config) (stack, error) {
			s, err := smcr.NewStack(cfg)
			if err != nil {
				return nil, err
			}
			return smcrStack{s}, nil
		}
	}
	if c.route == nil {
		c.route = route
	}
	if c.ableEvery == 0 {
		c.ableEvery = ableEvery
	}
	if c.deviceEvery == 0 {
		c.deviceEvery = deviceEvery
	}
	if c.files == nil {
		c.files = linux.FileLimit
	}
	if c.untrackAfter == 0 {
		c.untrackAfter = untrackAfter
	}
	if c.preflight == nil {
		c.preflight = linux.Probe
	}
	if c.mayUseAPI == nil {
		c.mayUseAPI = mayUseAPI
	}
}

// adopt puts a configuration in force.
func (a *agent) adopt(n *config.Node) {
	a.node.Store(n)
	if a.cfg.Level == nil {
		return
	}
	switch n.LogLevel {
	case config.LogDebug:
		a.cfg.Level.Set(slog.LevelDebug)
	case config.LogInfo:
		a.cfg.Level.Set(slog.LevelInfo)
	case config.LogWarn:
		a.cfg.Level.Set(slog.LevelWarn)
	case config.LogError:
		a.cfg.Level.Set(slog.LevelError)
	}
}

// reload takes over a changed configuration. After a mistake the one in force
// stays.
func (a *agent) reload() {
	n, err := a.cfg.Load()
	if err == nil {
		if fields := a.node.Load().Immutable(n); len(fields) > 0 {
			err = fmt.Errorf("changes %v, which takes a restart of the agent", fields)
		}
	}
	if err != nil {
		a.metrics.reloads.WithLabelValues("refused").Inc()
		a.cfg.Log.Error("configuration not taken over; the old one stays in force", "err", err)
		return
	}
	a.adopt(n)
	a.metrics.reloads.WithLabelValues("done").Inc()
	if n.InCluster() { // that is every day's business
		a.cfg.Log.Debug("configuration taken over", "pods", len(n.Pods))
		return
	}
	a.cfg.Log.Info("configuration taken over", "policies", len(n.Policies))
}

func (a *agent) gauges() gauges {
	g := gauges{groups: map[string]int{}, devicesUp: map[string]int{}, budget: a.ledger.info()}
	for _, f := range a.flows.list(nil) {
		if i := f.info(); i.Mode == smcr.ModeSMCR.String() {
			g.flowsSMCR++
			g.bytesSMCR += i.BytesSent + i.BytesRecv
		} else {
			g.flowsTCP++
		}
	}
	for _, p := range a.manager.snapshot() {
		switch p.state {
		case agentapi.StateReady:
			g.ready++
			if p.run.paused() != agentapi.CodeOK {
				g.paused++
			}
			if p.run.meshed().code != "" {
				g.meshed++
			}
		case agentapi.StateIdle:
			g.idle++
		default:
			g.failed++
		}
	}
	for _, d := range a.devices.all() {
		g.devicesUp[d.name] = 0
		if d.open != nil && d.open.Port().State == rdma.PortActive {
			g.devicesUp[d.name] = 1
		}
	}
	g.wire = a.wire.info()
	a.eachStack(func(u stackUse) {
		for _, lg := range u.stack.LinkGroups() {
			g.groups[redundancyLabel(lg.Redundancy)]++
		}
	})
	return g
}
