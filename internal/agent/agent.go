// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net"
	"net/http"
	"os/exec"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"

	"github.com/smcr-io/kube-smcr/internal/agent/rnics"
	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/cni"
	"github.com/smcr-io/kube-smcr/internal/config"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/soft"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
)

// Config says how to run the agent.
type Config struct {
	// Node is the configuration to start with. Required.
	Node *config.Node
	// Log gets the agent's records. Required.
	Log *slog.Logger
	// Level, if given, is set to the log level of the configuration.
	Level *slog.LevelVar
	// Version is the program's version, for the status.
	Version string
	// Reload makes the agent call Load and put the result in force.
	Reload <-chan struct{}
	Load   func() (*config.Node, error)
	// Observe, if given, is called once, before the agent manages the node.
	Observe func(View)
	// Stay lets the agent run on a node that lacks a device or a feature: the agent says so, and
	// everything is plain TCP. When what was missing is there, Run returns nil, and the caller
	// calls Run again; so it does when devices that are missing cannot come back in this container. Without Stay, Run fails.
	Stay bool
	// Hurry, when it is closed, makes a draining agent reset the remaining connections at once.
	Hurry <-chan struct{}
	// Instance tells this agent from the agents of the node before and after it.
	Instance string
	// Manages, if given, is called with true when the agent begins to manage the node, and with
	// false when it handed the node over, so that other work for the node can begin and end then.
	// Manages is not called when the agent ends, and must not wait for the agent.
	Manages func(bool)
	// Leave, when it is closed, makes the agent remove everything of kube-smcr from the node: Run
	// ends the diversion, gives the connections a few seconds to end, sweeps all pods, removes the
	// attachment records and the agent's files, and returns. The caller removes the CNI plugin
	// first, or it would write new records.
	Leave <-chan struct{}
	// MayBeLast, if given, says whether it is not known that another agent comes to the node. Run
	// calls it when the agent is told to end while it manages the node. If it is true, the agent
	// waits for a successor until DrainTimeout is over, also when it carries nothing, and calls
	// NoSuccessor if none has asked for the node. NoSuccessor may close Leave.
	MayBeLast   func() bool
	NoSuccessor func()
	// Cluster, if given, says what the agent has of its cluster, for the status. It may be
	// called by any goroutine, and must not block.
	Cluster func() agentapi.Cluster
	// Gone, if given, says whether the cluster has no such pod any more. Its processes may live on
	// for a while, without policies. It may be called by any goroutine, and must not block.
	Gone func(config.Pod) bool
	// Collectors are served with the agent's metrics.
	Collectors []prometheus.Collector
	// GuardMetrics, if given, wraps the handler of node.metricsAddress, and MetricsListener its
	// listener. Without them everybody who reaches the address may read the metrics.
	GuardMetrics    func(http.Handler) http.Handler
	MetricsListener func(net.Listener) net.Listener

	// Assigned, if given, says which devices kubelet gave to a pod. A pod's stack runs on these
	// unless an attachment record names devices.
	Assigned Assigned

	// Keeper, if given, makes the command of a process that calls linux.KeepQueues on its
	// descriptor 3. Without it, a SYN that is held when the agent is killed is lost until TCP repeats
	// it, and one that is held when the agent is stopped waits.
	Keeper func() *exec.Cmd

	// platform is what the machine gives. Only tests set it.
	platform
}

// agent is a running agent.
type agent struct {
	cfg     Config
	started time.Time
	node    atomic.Pointer[config.Node]
	rnics   *rnics.Pool
	host    hostDevices
	option  smcr.Option // nil: everything is plain TCP
	unable  unable      // why option is nil; its code is empty if option is not
	store   cni.Store
	ledger  *ledger
	// fewFiles says by how much the limit of open files lowers the node's budget; "" if not at all.
	fewFiles string
	stacks   stackPool
	wire     wire
	// kernelPath is for the pods that the agent does not carry itself.
	kernelPath  kernelPath
	kernelStats kernelStats
	proxies     proxies
	holds       holds
	parker      *smcr.Parker // of idle sessions

	metrics       *metrics
	noMetrics     atomic.Pointer[string] // why nobody gets metrics; nil or "": they are served, or nobody is to get them
	sessions      sessions
	decisions     *decisions
	bypasses      *bypasses
	logLimit      logLimiter
	strayLogLimit logLimiter // for connections to the agent's own ports
	refusals      refusals
	manager       manager
	draining      atomic.Bool

	// Owned by the goroutine of Run, and by the manager's goroutine while the manager runs.
	nodeLock *nodeLock // nil: another agent manages the node
	tookFrom string    // Instance of the agent before this one; changes only while no server runs
	legacies legacies
}

// Run runs an agent until ctx ends, and then stops it gracefully: it ends the diversion, waits up
// to DrainTimeout for the connections to end, resets those that are left, and removes what it put
// into the pods. An agent that handed the node over leaves the pods to its successor.
func Run(ctx context.Context, cfg Config) (err error) {
	cfg.setDefaults(cfg.Log, cfg.Node.DataDir)
	a := &agent{
		cfg: cfg, started: time.Now(), store: cni.NewStore(cfg.Node.DataDir),
		proxies:   proxies{all: map[*proxy]struct{}{}},
		decisions: newDecisions(), bypasses: newBypasses(),
	}
	budget, few := fitFiles(cfg.Node.NodeBudget, cfg.files())
	a.ledger, a.fewFiles = newLedger(budget), few
	// The ledger must know a device before its first queue pair is taken: TakeQP counts only known
	// devices, and GiveQP would give back what was not taken.
	for i, d := range cfg.Node.Devices {
		a.ledger.setQueuePairs(config.DeviceName(i, d), math.MaxInt32)
	}
	if few != "" {
		a.cfg.Log.Warn("the limit of open files makes the node's budget smaller", "detail", few)
	}
	a.manager.init(a)
	a.wire.a = a
	a.kernelPath.a = a
	a.kernelStats.a = a
	a.rnics = rnics.NewPool(rnics.Config{
		Log: cfg.Log, OpenOwn: cfg.openOwn, Learn: cfg.learn, Stay: cfg.Stay, LookEvery: cfg.deviceEvery, LookMost: cfg.ableEvery,
		Open: func(name string, d config.Device) (rdma.Device, func() error, error) {
			dev, closed, err := cfg.openDevice(name, d, cfg.Node.Takeover)
			if err == nil {
				a.ledger.setQueuePairs(name, dev.Attr().MaxQP)
			}
			return dev, closed, err
		},
		Changed: func(device string, c rnics.Change) { a.metrics.deviceChanges.WithLabelValues(device, string(c)).Inc() },
	})
	a.metrics = newMetrics(a.gauges)
	a.metrics.registry.MustRegister(&a.kernelStats)
	a.metrics.registry.MustRegister(cfg.Collectors...)
	a.adopt(cfg.Node)
	if err := a.store.MakeDir(); err != nil {
		return fmt.Errorf("data directory: %w: make it writable for the agent", err)
	}
	defer func() { err = errors.Join(err, a.kernelPath.close(), a.rnics.Close(), a.removeDirs()) }()
	spare := newSpare()
	defer runBeside(ctx, spare.run)()
	if a.parker, err = smcr.NewParker(a.cfg.parkAfter, spare.calm); err != nil {
		return fmt.Errorf("wait for idle connections: %w", err)
	}
	defer func() { err = errors.Join(err, a.parker.Close()) }()
	closeOption, err := a.enable(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, closeOption()) }()
	a.holds.enable(a)
	if a.holds.on && cfg.Keeper != nil {
		defer runBeside(ctx, func(ctx context.Context) { a.holds.keeper.run(ctx, cfg.Keeper) })()
	}
	if a.unable.code == "" { // if something is missing, awaitAble looks for it, and Run starts again
		defer a.rnics.Monitor(context.WithoutCancel(ctx))()
	}
	if err := a.lockNode(ctx); err != nil {
		return err
	}
	defer func() {
		if a.nodeLock != nil {
			err = errors.Join(err, a.nodeLock.release())
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
		if err = a.manage(ctx, api); err == nil && a.nodeLock == nil {
			api, err = a.standBy(ctx)
			continue
		}
		api = nil
	}
	a.cfg.Log.Info("agent stopped")
	return err
}

// runBeside runs f in a goroutine until stop, also when ctx has ended.
func runBeside(ctx context.Context, f func(context.Context)) (stop func()) {
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		f(ctx)
	}()
	return func() {
		cancel()
		<-ended
	}
}

// manage runs the agent's tasks until the agent ends, leaves or hands over. The API's servers end
// after the manager, so the API answers while the agent drains.
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
		g.Go(task("serve "+s.name, s.serve))
	}
	g.Go(task("look again for what is missing", func(context.Context) error {
		if a.unable.code != "" && a.cfg.Stay && a.awaitAble(managerCtx) {
			stopManager()
		}
		return nil
	}))
	g.Go(task("look whether devices can come back", func(context.Context) error {
		if a.cfg.Stay && a.awaitReplaced(managerCtx) {
			stopManager()
		}
		return nil
	}))
	g.Go(task("manage pods", func(context.Context) error {
		defer stopAPI()
		defer stopManager()
		defer a.manager.noHandover()
		switch h := a.manager.run(managerCtx); {
		case h != nil:
			a.handOver(h, api)
			return nil
		case a.left():
			return a.leave(ctx)
		case ctx.Err() == nil: // awaitAble or awaitReplaced ended the manager, and Run will be called again: keep the table of an earlier agent
			_, ended := a.manager.shutdown(context.WithoutCancel(ctx))
			return errors.Join(<-ended, a.wire.remove(), a.wire.closeHandedOver())
		}
		return a.end(ctx, api, stopAPI)
	}))
	return g.Wait()
}

// adopt puts a configuration in force, and sets the log level.
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

// reload puts a changed configuration in force. If the new one has a mistake, the old one stays.
func (a *agent) reload() {
	n, err := a.cfg.Load()
	if err == nil {
		if fields := a.node.Load().Immutable(n); len(fields) > 0 {
			err = fmt.Errorf("changes %v, which takes a restart of the agent", fields)
		}
	}
	if err != nil {
		a.metrics.reloads.WithLabelValues(reloadRefused).Inc()
		a.cfg.Log.Error("configuration not taken over; the old one stays in force", "err", err)
		return
	}
	a.adopt(n)
	a.metrics.reloads.WithLabelValues(reloadDone).Inc()
	if n.InCluster() { // in a cluster every change of a pod is a reload
		a.cfg.Log.Debug("configuration taken over", "pods", len(n.Pods))
		return
	}
	a.cfg.Log.Info("configuration taken over", "policies", len(n.Policies))
}

func (a *agent) gauges() gauges {
	g := gauges{groups: map[string]int{}, devicesUp: map[string]int{}, unsent: map[string]uint64{}, budget: a.ledger.info()}
	for _, s := range a.sessions.list(nil) {
		switch i := s.info(); i.Mode {
		case smcr.ModeSMCR.String():
			g.sessionsSMCR++
			g.bytesSMCR += i.BytesSent + i.BytesRecv
		case smcr.ModeTCP.String():
			g.sessionsTCP++
		default:
			g.undecided++
		}
	}
	for _, p := range a.manager.snapshot() {
		switch p.state {
		case podReady:
			g.ready++
			if p.proxy.paused() != agentapi.CodeOK {
				g.paused++
			}
			if p.proxy.meshed().code != "" {
				g.meshed++
			}
			if p.proxy.whyUnheld() != "" {
				g.unheld++
			}
		case podKernel:
			g.ready++
			g.kernel++
		case podIdle:
			g.idle++
		default:
			g.failed++
			if p.kernel != nil && !p.kernel.leaving && !p.kernel.withheld { // only its filter could not be changed
				g.kernel++
			}
		}
	}
	for _, d := range a.rnics.All() {
		g.devicesUp[d.Name] = 0
		if d.Open != nil && d.Open.Port().State == rdma.PortActive {
			g.devicesUp[d.Name] = 1
		}
		if s, ok := d.Open.(interface{ Stats() soft.Stats }); ok {
			g.unsent[d.Name] = s.Stats().TxErrors
		}
	}
	g.wire, g.held = a.wire.info(), a.holds.counters()
	a.eachStack(func(u stackUse) {
		for _, lg := range u.stack.LinkGroups() {
			g.groups[redundancyLabel(lg.Redundancy)]++
			if lg.Degraded {
				g.degraded++
			}
		}
	})
	return g
}
