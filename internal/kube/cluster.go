// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"

	"k8s.io/client-go/rest"

	"github.com/smcr-io/kube-smcr/internal/agent"
	"github.com/smcr-io/kube-smcr/internal/cni/install"
	"github.com/smcr-io/kube-smcr/internal/config"
	"github.com/smcr-io/kube-smcr/internal/devices/deviceplugin"
	"github.com/smcr-io/kube-smcr/internal/devices/dra"
	"github.com/smcr-io/kube-smcr/internal/devices/inventory"
	"github.com/smcr-io/kube-smcr/internal/kube/report"
	"github.com/smcr-io/kube-smcr/internal/preflight"
	"github.com/smcr-io/kube-smcr/internal/scrape"
)

// ClusterConfig says how to run an agent in a cluster.
type ClusterConfig struct {
	// REST is how to reach the API server. Required, as are Node, Base and Log.
	REST *rest.Config
	// Node is the name of the node, Pod NAMESPACE/NAME of the agent's pod.
	Node, Pod string
	// DaemonSet is the name of the DaemonSet that makes the agents, in the namespace of
	// Pod; "": there is none, and whoever ends the agent cleans the node.
	DaemonSet string
	// Version of the program.
	Version string
	// Base reads the configuration file, to which the cluster's objects are added.
	Base func() (*config.Node, error)
	// Reread gets a value when Base is to be called again.
	Reread <-chan struct{}
	// Plugin is the CNI plugin's program, to be installed if the file says so.
	Plugin string
	// Agent is the rest of the agent's configuration.
	Agent agent.Config
	Log   *slog.Logger

	run func(context.Context, agent.Config) error // nil: agent.Run
}

// podNamespace is the namespace of the agent's pod.
func (c *ClusterConfig) podNamespace() string {
	namespace, _, _ := strings.Cut(c.Pod, "/")
	return namespace
}

// cluster is an agent that runs, and what belongs to it.
type cluster struct {
	cfg     ClusterConfig
	machine preflight.Machine
	source  *Source
	cni     *install.Installer // nil: somebody else installs the plugin
	// inventory lists the devices that pods can ask for; devicePlugin offers them
	// to kubelet, nil: it does not.
	inventory    *inventory.Inventory
	devicePlugin *deviceplugin.Plugin
	// dra lets pods claim devices, and claimed knows which pods did; nil: DRA is off.
	dra      *dra.Driver
	claimed  *dra.Assigned
	assigned assigned

	view        atomic.Pointer[agent.View]
	uninstalled atomic.Bool
	departs     atomic.Pointer[departure] // nil: not yet, or not for good
	reconciled  atomic.Bool               // the agent has once done what the API server's objects want
	joined      atomic.Bool               // see agentapi.Cluster

	// startAgain ends the agent in order, and its container starts again. It is set before the
	// agent runs.
	startAgain context.CancelFunc

	plugin sync.Mutex // held while the plugin is being installed or uninstalled

	mu      sync.Mutex         // guards what is below
	duty    duty               // what the agent does for its node now
	endDuty context.CancelFunc // ends the tasks; nil: none run
	report  *report.Reporter   // of the present duty; its Run cannot be called twice
	tasks   sync.WaitGroup     // what runs for the present duty
}

// RunAgent runs an agent that does what the objects of its cluster want, until
// ctx ends. When the SMCRNode of the node says so, RunAgent leaves the node clean, and
// then waits for the end of ctx. It also leaves the node clean at the end of ctx if no
// other agent comes, see departure.
func RunAgent(ctx context.Context, cfg ClusterConfig) error {
	if cfg.run == nil {
		cfg.run = agent.Run
	}
	base, err := cfg.Base()
	if err != nil {
		return err
	}
	c := &cluster{cfg: cfg, machine: preflight.Agent()}
	sc := Config{
		REST: cfg.REST, Node: cfg.Node, Pod: cfg.Pod, Base: cfg.Base, Log: cfg.Log,
		StateFile: filepath.Join(base.DataDir, stateFile),
	}
	if base.DRA.Enabled {
		c.claimed = dra.NewAssigned(base.DataDir, cfg.Log)
		sc.Claimed = c.claimed.Claimed
	}
	if c.source, err = New(sc); err != nil {
		return fmt.Errorf("connect to the cluster: %w", err)
	}
	if base.CNI.Install {
		if c.cni, err = install.New(cniConfig(cfg, base)); err != nil {
			return fmt.Errorf("install the CNI plugin: %w", err)
		}
	}
	if err := c.shareDevices(base); err != nil {
		return err
	}
	if err := c.guardMetrics(base); err != nil {
		return err
	}
	if c.report, err = c.newReporter(false); err != nil {
		return fmt.Errorf("connect to the cluster: %w", err)
	}
	c.cfg.Agent.Collectors = append(c.cfg.Agent.Collectors, upMetric{c})
	return c.run(ctx)
}

// guardMetrics lets the agent give metrics only to those whom the cluster allows to read them.
func (c *cluster) guardMetrics(base *config.Node) error {
	if !base.MetricsAuth || !base.MetricsAddress.IsValid() {
		return nil
	}
	guard, err := scrape.NewGuard(c.cfg.REST, c.cfg.Log)
	if err != nil {
		return err
	}
	secret, err := scrape.TLS(base.MetricsTLS, c.cfg.Log)
	if err != nil {
		return err
	}
	c.cfg.Agent.GuardMetrics = guard.Wrap
	c.cfg.Agent.MetricsListener = func(ln net.Listener) net.Listener { return scrape.Listener(ln, secret) }
	return nil
}

func (c *cluster) newReporter(linksOnly bool) (*report.Reporter, error) {
	return report.New(report.Config{
		Client: c.cfg.REST, Node: c.cfg.Node, AgentPod: c.cfg.Pod, AgentVersion: c.cfg.Version, LinksOnly: linksOnly, Source: c.snapshot, Log: c.cfg.Log,
		Preflight: c.preflight, Recheck: c.machine.KernelPath,
	})
}

// preflight finds out which of the things that the agent is configured to use the node has.
func (c *cluster) preflight(ctx context.Context) preflight.Report {
	m := c.machine
	if base, err := c.cfg.Base(); err == nil {
		use := preflight.Use{ForPods: base.DevicePlugin.Enabled || base.DRA.Enabled}
		for _, d := range base.Devices {
			use.Software, use.Hardware = use.Software || d.Soft(), use.Hardware || !d.Soft()
		}
		m = m.For(use)
	}
	return preflight.Examine(ctx, m)
}

func cniConfig(cfg ClusterConfig, base *config.Node) install.Config {
	return install.Config{
		BinSource: cfg.Plugin, BinDir: base.CNI.BinDir, ConfDir: base.CNI.ConfDir, Log: cfg.Log,
		Plugin: install.PluginConf{
			DataDir: base.DataDir, AgentSocket: base.APISocket,
			Required: base.CNI.Required, ReportStatus: base.CNI.ReportStatus, IPAM: []byte(base.DRA.IPAM),
		},
	}
}

func (c *cluster) run(ctx context.Context) error {
	// The source outlives ctx: the agent drains after the end of ctx, and needs it.
	life, end := context.WithCancel(context.WithoutCancel(ctx))
	var wg sync.WaitGroup
	defer func() {
		c.manage(life, dutyNone)
		end()
		wg.Wait()
		c.tasks.Wait()
	}()
	wg.Go(func() { c.source.Run(life) })
	if c.devicePlugin != nil || c.dra != nil {
		wg.Go(func() { c.inventory.Run(life) })
	}
	if c.claimed != nil {
		wg.Go(func() { c.claimed.Run(life) })
		wg.Go(func() { c.followClaims(life) })
	}
	wg.Go(func() { c.reread(life) })
	node := c.source.First(ctx)
	if ctx.Err() != nil {
		return nil
	}
	e := c.newExit()
	wg.Go(func() { e.awaitUninstall(life) })
	// The agent goes on until it is known whether another one comes.
	running, stop := context.WithCancel(life)
	c.startAgain = stop
	wg.Go(func() {
		defer stop()
		e.awaitEnd(ctx, life)
	})
	err := c.cfg.run(running, c.agentConfig(life, node, e))
	return c.afterRun(ctx, life, e, err)
}

// agentConfig is the configuration that the agent begins with.
func (c *cluster) agentConfig(life context.Context, node *config.Node, e *exit) agent.Config {
	cfg := c.cfg.Agent
	cfg.Node, cfg.Load, cfg.Reload, cfg.Version, cfg.Log = node, c.source.Load, c.source.Changed(), c.cfg.Version, c.cfg.Log
	cfg.Observe = func(v agent.View) { c.view.Store(&v) }
	cfg.Cluster, cfg.Gone = c.contact, c.source.Gone
	cfg.Manages = func(yes bool) {
		if yes {
			c.manage(life, dutyNode)
		} else {
			c.manage(life, dutyLinks)
		}
	}
	cfg.Leave, cfg.MayBeLast, cfg.NoSuccessor = e.leave, e.mayBeLast.Load, func() { e.noSuccessor(life) }
	cfg.Stay = true
	return cfg
}

// afterRun tells the cluster about an agent that has left its node, and waits for the end of ctx
// unless no other agent comes. It returns err, the error of the agent that ended.
func (c *cluster) afterRun(ctx, life context.Context, e *exit, err error) error {
	select {
	case <-e.leave:
	default:
		return err
	}
	if err != nil {
		c.cfg.Log.Error("rules or files of the agent are left on the node; remove them by hand", "err", err)
	}
	c.uninstalled.Store(true)
	c.mu.Lock()
	c.report.Poke()
	c.mu.Unlock()
	select {
	case <-e.departed:
		c.reportDeparture(life)
		return err
	default:
	}
	c.cfg.Log.Info("the node is clean; the agent waits for its end")
	<-ctx.Done()
	return err
}

// duty is what an agent does for its node beside carrying connections.
type duty uint8

const (
	dutyNone  duty = iota // nothing
	dutyLinks             // reports the link groups that it has left: another agent manages the node
	dutyNode              // manages the node
)

// managesNode says whether the agent manages its node now.
func (c *cluster) managesNode() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.duty == dutyNode
}

// manage ends the tasks of the duty before, without waiting for them, and begins those of d.
func (c *cluster) manage(life context.Context, d duty) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.duty = d
	if c.endDuty != nil {
		c.endDuty()
		c.endDuty = nil
	}
	if d == dutyNone {
		return
	}
	ctx, cancel := context.WithCancel(life)
	c.endDuty = cancel
	if r, err := c.newReporter(d == dutyLinks); err != nil {
		c.cfg.Log.Error("no reporter; SMCRNode, SMCRLinks and pod statuses are not updated", "err", err) // it worked before
	} else {
		c.report = r
		c.tasks.Go(func() { r.Run(ctx) })
	}
	if d == dutyLinks {
		return
	}
	c.tasks.Go(func() { c.adopt(ctx) })
	if c.cni != nil {
		c.tasks.Go(func() { c.keepPlugin(ctx) })
	}
	if c.devicePlugin != nil {
		c.tasks.Go(func() { c.offerDevices(ctx) })
	}
	if c.dra != nil {
		c.tasks.Go(func() { c.driveClaims(ctx) })
	}
}

// keepPlugin keeps the CNI plugin installed until ctx ends, or until it is to be
// uninstalled.
func (c *cluster) keepPlugin(ctx context.Context) {
	c.plugin.Lock()
	defer c.plugin.Unlock()
	until, stop := c.untilUninstall(ctx)
	defer stop()
	select {
	case <-c.source.Uninstall():
	default:
		if err := c.cni.Run(until); err != nil {
			c.cfg.Log.Warn("the agent drains, ends and is started again", "why", err)
			c.startAgain()
		}
	}
}

// untilUninstall returns a context that ends with ctx, or when the product is to be uninstalled
// from the node. The caller calls stop in the end.
func (c *cluster) untilUninstall(ctx context.Context) (until context.Context, stop func()) {
	until, cancel := context.WithCancel(ctx)
	var watching sync.WaitGroup
	watching.Go(func() {
		select {
		case <-until.Done():
		case <-c.source.Uninstall():
			cancel()
		}
	})
	return until, func() {
		cancel()
		watching.Wait()
	}
}

// uninstallPlugin takes the CNI plugin off the node: no new records.
func (c *cluster) uninstallPlugin(ctx context.Context) {
	if c.cni == nil {
		return
	}
	c.plugin.Lock()
	defer c.plugin.Unlock()
	if err := c.cni.Uninstall(ctx); err != nil {
		c.cfg.Log.Error("CNI plugin not uninstalled; remove it from the node's CNI configuration by hand", "err", err)
	}
}

// snapshot is what the reporter is to tell Kubernetes.
func (c *cluster) snapshot() report.Snapshot {
	s := report.Snapshot{Verdicts: c.source.Verdicts(), Early: !c.source.mayTellPod(), Uninstalled: c.uninstalled.Load()}
	s.Annotations, s.Versions = c.source.StatusAnnotations()
	if d := c.departs.Load(); d != nil && d.deselected && s.Uninstalled {
		s.Left = d.why
	}
	if c.cni != nil {
		st := c.cni.Status()
		s.CNI = report.CNI{State: string(st.State), Detail: st.Detail}
	}
	v := c.view.Load()
	if v == nil {
		return s
	}
	links := v.Links()
	s.Status, s.Attachments, s.Decisions = v.Status(), v.Attachments().Attachments, v.Decisions()
	s.Links, s.LinksProblem = append(links.LinkGroups, v.LostLinks()...), links.Problem
	s.PodDevices, s.Nodes = v.Devices().Devices, c.source.peerNodes()
	node, _ := c.source.Load() // Load never fails
	c.contact()                // nobody may ask before the API server goes away
	s.Reconciled = c.reconciled.Load() || c.source.Live() && v.Applied() == node
	c.reconciled.Store(s.Reconciled)
	return s
}

// reread reads the configuration file again when ClusterConfig.Reread says so.
func (c *cluster) reread(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-c.cfg.Reread:
			if err := c.source.Rebase(); err != nil {
				c.cfg.Log.Error("configuration not taken over; the old one stays in force", "err", err)
				if v := c.view.Load(); v != nil { // nil: nobody can read the agent's metrics yet
					v.CountRefused()
				}
			}
		}
	}
}
