// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/cni"
	"github.com/smcr-io/kube-smcr/internal/config"
	"github.com/smcr-io/kube-smcr/internal/linux"
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
	// Hurry ends the draining of a stopping agent.
	Hurry <-chan struct{}

	// What the machine gives; nil is the real thing.
	kernel     kernel
	openDevice func(name string, cfg config.Device) (rdma.Device, func() error, error)
	openOption func() (smcr.Option, func() error, error)
	newStack   func(smcr.Config) (stack, error)
	route      func(src, dst netip.Addr) (clc.Route, error)
	preflight  func() error
	mayUseAPI  func(uid uint32) bool
}

// agent is a running agent.
type agent struct {
	cfg     Config
	started time.Time
	node    atomic.Pointer[config.Node]
	devices []device    // as they are configured
	option  smcr.Option // nil: everything is plain TCP
	problem string      // why option is nil
	store   cni.Store
	pool    pool

	metrics   *metrics
	flows     flows
	decisions *decisions
	bypasses  bypasses
	news      gate
	manager   manager
	draining  atomic.Bool
}

// Run runs an agent until ctx ends, and then stops it gracefully: it ends the
// diversion, waits up to DrainTimeout for the connections, resets the rest and
// removes what it put into the pods.
func Run(ctx context.Context, cfg Config) (err error) {
	cfg.setDefaults()
	if err := cfg.preflight(); err != nil {
		return fmt.Errorf("this node cannot run the agent: %w", err)
	}
	a := &agent{
		cfg: cfg, started: time.Now(), store: cni.NewStore(cfg.Node.DataDir),
		pool: pool{limit: cfg.Node.NodeBudget}, flows: flows{all: map[uint64]*flow{}},
		decisions: newDecisions(), bypasses: bypasses{all: map[bypassKey]agentapi.Bypass{}},
	}
	a.manager.init(a)
	a.metrics = newMetrics(a.gauges)
	a.adopt(cfg.Node)
	if err := a.store.MakeDir(); err != nil {
		return fmt.Errorf("data directory: %w: make it writable for the agent", err)
	}
	defer func() { err = errors.Join(err, a.closeDevices()) }()
	if err := a.openDevices(); err != nil {
		return err
	}
	option, closeOption, err := cfg.openOption()
	if err != nil {
		a.problem = fmt.Sprintf("the SMC-R TCP option cannot be written: %v", err)
		cfg.Log.Warn("everything is plain TCP", "err", err)
	} else {
		a.option = option
		defer func() { err = errors.Join(err, closeOption()) }()
	}
	api, err := a.listenAPI(ctx)
	if err != nil {
		return err
	}
	return a.serve(ctx, api)
}

// serve runs the agent's tasks. The manager stops last but one: the API
// answers while the agent drains.
func (a *agent) serve(ctx context.Context, api *apiServer) error {
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
	g.Go(task("manage pods", func(context.Context) error {
		defer stopAPI()
		a.manager.run(managerCtx)
		return a.manager.shutdown(context.WithoutCancel(ctx))
	}))
	err := g.Wait()
	a.cfg.Log.Info("agent stopped")
	return err
}

func (c *Config) setDefaults() {
	if c.kernel == nil {
		c.kernel = linuxKernel{}
	}
	if c.openDevice == nil {
		c.openDevice = openDevice
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
	a.cfg.Log.Info("configuration taken over", "policies", len(n.Policies))
}

// connBytes is the memory of one connection's buffers.
func (a *agent) connBytes() int {
	n := a.node.Load()
	return n.RMBEBytes + n.SendBufferBytes
}

func (a *agent) gauges() gauges {
	var g gauges
	for _, f := range a.flows.list(nil) {
		if f.modeNow() == smcr.ModeSMCR.String() {
			g.flowsSMCR++
		} else {
			g.flowsTCP++
		}
	}
	for _, p := range a.manager.snapshot() {
		switch p.state {
		case agentapi.StateReady:
			g.ready++
			st := p.run.stack.Stats()
			g.groups += st.Groups
			g.memoryBytes += int(st.MemoryBytes)
		case agentapi.StateIdle:
			g.idle++
		default:
			g.failed++
		}
	}
	return g
}
