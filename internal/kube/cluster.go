// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"path/filepath"
	"sync"
	"sync/atomic"

	"k8s.io/client-go/rest"

	"github.com/smcr-io/kube-smcr/internal/agent"
	"github.com/smcr-io/kube-smcr/internal/cniinstall"
	"github.com/smcr-io/kube-smcr/internal/config"
	"github.com/smcr-io/kube-smcr/internal/deviceplugin"
	"github.com/smcr-io/kube-smcr/internal/dra"
	"github.com/smcr-io/kube-smcr/internal/inventory"
	"github.com/smcr-io/kube-smcr/internal/kube/report"
	"github.com/smcr-io/kube-smcr/internal/scrape"
)

// ClusterConfig says how to run an agent in a cluster.
type ClusterConfig struct {
	// REST is how to reach the API server. Required, as are Node, Base and Log.
	REST *rest.Config
	// Node is the name of the node, Pod NAMESPACE/NAME of the agent's pod.
	Node, Pod string
	// Version of the program.
	Version string
	// Base reads the file, which the objects are put into.
	Base func() (*config.Node, error)
	// Reread makes the file be read again.
	Reread <-chan struct{}
	// Plugin is the CNI plugin's program, to be installed if the file says so.
	Plugin string
	// Agent is what the agent is to be told beyond that.
	Agent agent.Config
	Log   *slog.Logger

	run func(context.Context, agent.Config) error // nil: agent.Run
}

// cluster is an agent that runs, and what belongs to it.
type cluster struct {
	cfg    ClusterConfig
	source *Source
	cni    *cniinstall.Installer // nil: somebody else installs the plugin
	// inventory lists the devices that pods can ask for; devicePlugin offers them
	// to kubelet, nil: it does not.
	inventory    *inventory.Inventory
	devicePlugin *deviceplugin.Plugin
	// dra lets pods claim them, and claimed knows which did; nil: it does not.
	dra      *dra.Driver
	claimed  *dra.Assigned
	assigned assigned

	view        atomic.Pointer[agent.View]
	uninstalled atomic.Bool
	settled     atomic.Bool // the agent once did what the API server's objects want

	plugin sync.Mutex // held by who works on the plugin's installation

	mu      sync.Mutex // guards what is below
	manages context.CancelFunc
	report  *report.Reporter // of the present turn; its Run cannot be called twice
	tasks   sync.WaitGroup   // of managing the node: they end by manages
}

// RunAgent runs an agent that does what the objects of its cluster want, until
// ctx ends. When its SMCRNode says that the node is to be left clean, it does
// that, and waits for the end of ctx.
func RunAgent(ctx context.Context, cfg ClusterConfig) error {
	if cfg.run == nil {
		cfg.run = agent.Run
	}
	base, err := cfg.Base()
	if err != nil {
		return err
	}
	c := &cluster{cfg: cfg}
	sc := Config{
		REST: cfg.REST, Node: cfg.Node, Base: cfg.Base, Log: cfg.Log,
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
		if c.cni, err = cniinstall.New(cniConfig(cfg, base)); err != nil {
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
	return c.run(ctx)
}

// guardMetrics gives metrics only to those whom the cluster allows to read them.
func (c *cluster) guardMetrics(base *config.Node) error {
	if !base.MetricsAuth || !base.MetricsAddress.IsValid() {
		return nil
	}
	guard, err := scrape.NewGuard(c.cfg.REST, c.cfg.Log)
	if err != nil {
		return err
	}
	secret, err := scrape.TLS(base.MetricsTLS)
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
	})
}

func cniConfig(cfg ClusterConfig, base *config.Node) cniinstall.Config {
	return cniinstall.Config{
		BinSource: cfg.Plugin, BinDir: base.CNI.BinDir, ConfDir: base.CNI.ConfDir, Log: cfg.Log,
		Plugin: cniinstall.PluginConf{
			DataDir: base.DataDir, AgentSocket: base.APISocket,
			Required: base.CNI.Required, ReportStatus: base.CNI.ReportStatus,
		},
	}
}

func (c *cluster) run(ctx context.Context) error {
	// The source outlives the agent, which drains after ctx.
	life, end := context.WithCancel(context.WithoutCancel(ctx))
	var wg sync.WaitGroup
	defer func() {
		c.manage(life, turnOver)
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
	leave := make(chan struct{})
	wg.Go(func() {
		select {
		case <-life.Done():
		case <-c.source.Uninstall():
			c.cfg.Log.Info("the node is to be left clean: the product is being uninstalled")
			c.uninstallPlugin(life)
			if err := errors.Join(c.source.forget(), c.forgetDevices()); err != nil {
				c.cfg.Log.Error("the node is not left quite clean", "err", err)
			}
			close(leave)
		}
	})
	cfg := c.cfg.Agent
	cfg.Node, cfg.Load, cfg.Reload, cfg.Version, cfg.Log = node, c.source.Load, c.source.Changed(), c.cfg.Version, c.cfg.Log
	cfg.Observe = func(v agent.View) { c.view.Store(&v) }
	cfg.Manages = func(yes bool) {
		if yes {
			c.manage(life, turnNode)
		} else {
			c.manage(life, turnLinks)
		}
	}
	cfg.Leave = leave
	cfg.Stay = true
	err := c.cfg.run(ctx, cfg)
	select {
	case <-leave:
	default:
		return err
	}
	if err != nil {
		c.cfg.Log.Error("the node was not left quite clean", "err", err)
	}
	c.uninstalled.Store(true)
	c.mu.Lock()
	c.report.Poke()
	c.mu.Unlock()
	c.cfg.Log.Info("the node is clean; the agent waits for its end")
	<-ctx.Done()
	return err
}

// turn is what an agent does beside carrying connections.
type turn uint8

const (
	turnOver  turn = iota // nothing
	turnLinks             // reports the link groups that it has: another agent manages the node
	turnNode              // all that is done for the node
)

// manage begins what is done in a turn, and ends what was done before.
func (c *cluster) manage(life context.Context, t turn) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.manages != nil {
		c.manages()
		c.manages = nil
	}
	if t == turnOver {
		return
	}
	ctx, cancel := context.WithCancel(life)
	c.manages = cancel
	if r, err := c.newReporter(t == turnLinks); err != nil {
		c.cfg.Log.Error("nothing is reported to the cluster", "err", err) // it worked before
	} else {
		c.report = r
		c.tasks.Go(func() { r.Run(ctx) })
	}
	if t == turnLinks {
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
	until, stop := context.WithCancel(ctx)
	defer stop()
	done := make(chan struct{})
	go func() {
		defer close(done)
		select {
		case <-until.Done():
		case <-c.source.Uninstall():
			stop()
		}
	}()
	select {
	case <-c.source.Uninstall():
	default:
		c.cni.Run(until)
	}
	stop()
	<-done
}

// uninstallPlugin takes the CNI plugin off the node: no new records.
func (c *cluster) uninstallPlugin(ctx context.Context) {
	if c.cni == nil {
		return
	}
	c.plugin.Lock()
	defer c.plugin.Unlock()
	if err := c.cni.Uninstall(ctx); err != nil {
		c.cfg.Log.Error("CNI plugin not uninstalled", "err", err)
	}
}

// snapshot is what is told to Kubernetes.
func (c *cluster) snapshot() report.Snapshot {
	s := report.Snapshot{
		Verdicts: c.source.Verdicts(), Annotations: c.source.StatusAnnotations(), Uninstalled: c.uninstalled.Load(),
	}
	if c.cni != nil {
		st := c.cni.Status()
		s.CNI = report.CNI{State: string(st.State), Detail: st.Detail}
	}
	v := c.view.Load()
	if v == nil {
		return s
	}
	s.Status, s.Links, s.Attachments, s.Decisions = v.Status(), v.Links(), v.Attachments(), v.Decisions()
	s.PodDevices, s.Nodes = v.Devices(), c.source.peerNodes()
	node, _ := c.source.Load() // it has no errors
	s.SettledOnce = c.settled.Load() || c.source.Live() && v.Applied() == node
	c.settled.Store(s.SettledOnce)
	return s
}

// reread reads the file again when it is told to.
func (c *cluster) reread(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-c.cfg.Reread:
			if err := c.source.Rebase(); err != nil {
				c.cfg.Log.Error("configuration not taken over; the old one stays in force", "err", err)
			}
		}
	}
}
