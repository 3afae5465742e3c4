// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	coordinationv1 "k8s.io/api/coordination/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	ctrl "sigs.k8s.io/controller-runtime"
	ctrlmetrics "sigs.k8s.io/controller-runtime/pkg/metrics"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
	"github.com/smcr-io/kube-smcr/internal/scrape"
)

// LeaseName is the name of the Lease by which the replicas elect their leader.
const LeaseName = "kube-smcr-controller"

// Config is how a controller runs.
type Config struct {
	// Namespace is where the add-on is installed: its agents' pods and the Lease.
	Namespace string
	// AgentSelector selects the pods of the node agent in Namespace.
	AgentSelector string
	// DaemonSet is the name of the agents' DaemonSet in Namespace; "": all that AgentSelector
	// selects. While the cluster has an older DaemonSet, of another installation, with agents,
	// the controller does nothing, and says so. While the DaemonSet is there, pods on nodes
	// without an agent have the status NO_AGENT.
	DaemonSet string
	// LeaderElect makes only one of several replicas work, the leader. The renewals of the
	// leader's own Lease also show that the API server works, without which the Leases of
	// agents say nothing. So without LeaderElect the controller goes by the agents' pods.
	LeaderElect bool
	// LeaseDuration, RenewDeadline and RetryPeriod are of the leader election;
	// 0 means leaseDuration, renewDeadline and retryPeriod.
	LeaseDuration, RenewDeadline, RetryPeriod time.Duration
	// StartupTaint lets the controller take the taint smcr.io/agent-not-ready off
	// nodes whose agent is ready.
	StartupTaint bool
	// MetricsAddress and HealthAddress are where metrics and health endpoints
	// are served; empty means nowhere.
	MetricsAddress, HealthAddress string
	// MetricsAuth serves metrics only over TLS, and only to clients that the cluster
	// allows to get /metrics. MetricsTLS is the directory of the certificate; "": the
	// controller makes one.
	MetricsAuth bool
	MetricsTLS  string
	Log         *slog.Logger
}

// DefaultAgentSelector selects the agents' pods that the chart makes.
const DefaultAgentSelector = "app.kubernetes.io/part-of=kube-smcr,app.kubernetes.io/component=agent"

// Validate says what is wrong with the configuration.
func (c *Config) Validate() error {
	if c.Namespace == "" {
		return errors.New("namespace is empty: give the namespace that the agents run in")
	}
	if _, err := labels.Parse(c.AgentSelector); err != nil {
		return fmt.Errorf("agent selector %q: %w", c.AgentSelector, err)
	}
	if c.AgentSelector == "" {
		return errors.New("agent selector is empty, so that it would select every pod: give the labels of the agents' pods")
	}
	return nil
}

// NewScheme returns the types that the controller uses.
func NewScheme() (*runtime.Scheme, error) {
	s := runtime.NewScheme()
	if err := errors.Join(clientgoscheme.AddToScheme(s), v1alpha1.AddToScheme(s)); err != nil {
		return nil, fmt.Errorf("register the API's types: %w", err)
	}
	return s, nil
}

// Run runs a controller until ctx ends. When the controller loses the API server or the
// leadership, it starts again, with empty caches, as soon as it can.
func Run(ctx context.Context, api *rest.Config, c Config) error {
	if err := c.Validate(); err != nil {
		return err
	}
	api = paced(api)
	s := &service{config: c, metrics: newMetrics(c.Log)}
	stop, err := s.serve(api)
	if err != nil {
		return err
	}
	defer stop()
	for pause := minRestart; ; {
		worked, err := s.manage(ctx, api)
		if ctx.Err() != nil {
			return nil
		}
		if worked {
			pause = minRestart
		}
		c.Log.Warn("controller stopped; it starts again after the pause", "err", err, "pause", pause)
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(pause):
		}
		pause = min(2*pause, maxRestart)
	}
}

// paced is api with the rate apiQPS and apiBurst, unless it has one. The default of the client
// library is 5 requests a second.
func paced(api *rest.Config) *rest.Config {
	api = rest.CopyConfig(api)
	if api.QPS == 0 {
		api.QPS, api.Burst = apiQPS, apiBurst
	}
	return api
}

// service is the part of a controller that goes on when a manager ends and the next one
// starts: metrics and health.
type service struct {
	config  Config
	metrics *metrics
	synced  atomic.Bool            // the caches of the present manager are filled
	refused atomic.Pointer[string] // why the controller does nothing; nil: it works
}

// manage runs one manager until it ends. worked says that the manager had read all
// objects.
func (s *service) manage(ctx context.Context, api *rest.Config) (worked bool, err error) {
	// The end of ctx also ends goroutines that a manager that lost its lease leaves behind.
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer s.metrics.lead(nil)
	defer s.synced.Store(false)
	selector, err := labels.Parse(s.config.AgentSelector)
	if err != nil {
		return false, fmt.Errorf("agent selector: %w", err)
	}
	if err := s.first(ctx, api, installation{s.config.Namespace, s.config.DaemonSet, selector}); err != nil {
		return false, err
	}
	agents := agentPods{namespace: s.config.Namespace, selector: selector}
	mgr, err := s.newManager(ctx, api, agents)
	if err != nil {
		return false, err
	}
	if err := s.addReconcilers(ctx, mgr, agents); err != nil {
		return false, err
	}
	var watching sync.WaitGroup
	defer watching.Wait()
	defer cancel()
	watching.Go(func() {
		if mgr.GetCache().WaitForCacheSync(ctx) {
			s.synced.Store(true)
		}
		select {
		case <-mgr.Elected():
			s.metrics.lead(mgr.GetCache())
			s.config.Log.Info("this replica leads")
		case <-ctx.Done():
		}
	})
	err = mgr.Start(ctx)
	return s.synced.Load(), err
}

// newManager makes a manager with its caches and their indexes.
func (s *service) newManager(ctx context.Context, api *rest.Config, agents agentPods) (ctrl.Manager, error) {
	c := &s.config
	scheme, err := NewScheme()
	if err != nil {
		return nil, err
	}
	mgr, err := ctrl.NewManager(api, ctrl.Options{
		Scheme: scheme, Cache: cacheOptions(agents, c.DaemonSet), Logger: logr.FromSlogHandler(c.Log.Handler()),
		// The service serves metrics and health, also between two managers.
		Metrics: metricsserver.Options{BindAddress: "0"}, HealthProbeBindAddress: "0",
		LeaderElection: c.LeaderElect, LeaderElectionID: LeaseName, LeaderElectionNamespace: c.Namespace,
		LeaderElectionReleaseOnCancel: true,
		LeaseDuration:                 new(cmp.Or(c.LeaseDuration, leaseDuration)),
		RenewDeadline:                 new(cmp.Or(c.RenewDeadline, renewDeadline)),
		RetryPeriod:                   new(cmp.Or(c.RetryPeriod, retryPeriod)),
	})
	if err != nil {
		return nil, fmt.Errorf("make a manager: %w", err)
	}
	return mgr, addIndexes(ctx, mgr.GetFieldIndexer(), agents)
}

// addReconcilers adds the reconcilers to a manager, and, if there is a leader election, what
// follows the agents' Leases.
func (s *service) addReconcilers(ctx context.Context, mgr ctrl.Manager, agents agentPods) error {
	var beats *leases
	if s.config.LeaderElect {
		beats = newLeases()
		informer, err := mgr.GetCache().GetInformer(ctx, &coordinationv1.Lease{})
		if err != nil {
			return fmt.Errorf("watch the Leases: %w", err)
		}
		if _, err := informer.AddEventHandler(beats.follow()); err != nil {
			return fmt.Errorf("watch the Leases: %w", err)
		}
	}
	recorder := mgr.GetEventRecorder("kube-smcr-controller")
	for _, r := range []interface{ setUp(ctrl.Manager) error }{
		&policies{client: mgr.GetClient(), recorder: recorder},
		&peers{client: mgr.GetClient(), recorder: recorder},
		&podEvents{client: mgr.GetClient(), log: s.config.Log},
		&pairs{client: mgr.GetClient()},
		&nodes{
			client: mgr.GetClient(), live: mgr.GetAPIReader(), recorder: recorder, agents: agents, leases: beats,
			taint: s.config.StartupTaint, daemonSet: s.config.DaemonSet,
		},
	} {
		if err := r.setUp(mgr); err != nil {
			return fmt.Errorf("set up a reconciler: %w", err)
		}
	}
	return nil
}

// serve serves metrics and health until the returned function is called.
func (s *service) serve(api *rest.Config) (stop func(), err error) {
	counters, secret, err := s.metricsHandler(api)
	if err != nil {
		return nil, err
	}
	var servers []*http.Server
	var running sync.WaitGroup
	stop = func() {
		for _, srv := range servers {
			srv.Close() //nolint:errcheck // nobody is to be served any more
		}
		running.Wait()
	}
	for _, one := range []struct {
		what, address string
		handler       http.Handler
	}{{"metrics", s.config.MetricsAddress, counters}, {"health", s.config.HealthAddress, s.healthHandler()}} {
		if one.address == "" || one.address == "0" {
			continue
		}
		l, err := net.Listen("tcp", one.address)
		if err != nil {
			stop()
			return nil, fmt.Errorf("serve %s: %w", one.what, err)
		}
		address := l.Addr().String()
		if one.what == "metrics" {
			l = scrape.Listener(l, secret)
		}
		srv := &http.Server{
			Handler: one.handler, ReadHeaderTimeout: headerTimeout, IdleTimeout: idleTimeout, WriteTimeout: callTimeout,
			// Clients that connect and send nothing are logged at level debug only.
			ErrorLog: slog.NewLogLogger(s.config.Log.Handler(), slog.LevelDebug),
		}
		servers = append(servers, srv)
		running.Go(func() {
			if err := srv.Serve(l); !errors.Is(err, http.ErrServerClosed) {
				s.config.Log.Error("server stopped; restart the controller's pod", "server", one.what, "err", err)
			}
		})
		s.config.Log.Info("serving", "what", one.what, "address", address)
	}
	return stop, nil
}

// healthHandler answers the probes: the controller is alive at once, and ready when its caches
// are filled and no other installation was first.
func (s *service) healthHandler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusOK) })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		if why := s.refused.Load(); why != nil {
			http.Error(w, *why, http.StatusServiceUnavailable)
			return
		}
		if !s.synced.Load() {
			http.Error(w, "the caches are not filled: the API server does not answer, or this is the start", http.StatusServiceUnavailable)
		}
	})
	return mux
}

// metricsHandler gives metrics to those who may read them. secret is for the connections; nil:
// they are not encrypted.
func (s *service) metricsHandler(api *rest.Config) (handler http.Handler, secret *tls.Config, err error) {
	registry := prometheus.NewRegistry()
	if err := registry.Register(s.metrics); err != nil {
		return nil, nil, fmt.Errorf("register the metrics: %w", err)
	}
	metrics := promhttp.HandlerFor(prometheus.Gatherers{ctrlmetrics.Registry, registry}, promhttp.HandlerOpts{})
	if s.config.MetricsAuth {
		guard, err := scrape.NewGuard(api, s.config.Log)
		if err != nil {
			return nil, nil, err
		}
		if secret, err = scrape.TLS(s.config.MetricsTLS, s.config.Log); err != nil {
			return nil, nil, err
		}
		metrics = guard.Wrap(metrics)
	}
	mux := http.NewServeMux()
	mux.Handle("GET "+scrape.Path, metrics)
	return mux, secret, nil
}
