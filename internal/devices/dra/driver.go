// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	drahealth "k8s.io/kubelet/pkg/apis/dra-health/v1alpha1"

	"github.com/smcr-io/kube-smcr/internal/devices/claims"
	"github.com/smcr-io/kube-smcr/internal/devices/inventory"
)

// DefaultKubeletDir is kubelet's directory.
const DefaultKubeletDir = "/var/lib/kubelet"

// Inventory is the devices of the node: [inventory.Inventory].
type Inventory interface {
	Devices() []inventory.Device
	Looked() bool
	Subscribe() (changed <-chan struct{}, stop func())
}

// Config is the configuration of a Driver. All fields but KubeletDir, Instance, Ending and
// Metrics are required.
type Config struct {
	// Client is the client for ResourceSlices and ResourceClaims.
	Client kubernetes.Interface
	// Node is the name of the node, and of the pool of its devices.
	Node string
	// Instance tells the agents of a node apart: two may run during an update.
	Instance string
	// DataDir is the directory with the records of claims.
	DataDir string
	// KubeletDir is kubelet's directory; "" is [DefaultKubeletDir].
	KubeletDir string
	Inventory  Inventory
	// Ending says whether a pod of the node, by its UID, is being deleted, has finished, or does
	// not exist any more; nil: that is not known.
	Ending func(podUID string) bool

	returnWait time.Duration // set by tests; 0 is returnWait
	Metrics    *Metrics
	Log        *slog.Logger
}

// PluginDir is where the driver's sockets are, RegistryDir where kubelet looks
// for new plugins.
func PluginDir(kubeletDir string) string   { return filepath.Join(kubeletDir, "plugins", DriverName) }
func RegistryDir(kubeletDir string) string { return filepath.Join(kubeletDir, "plugins_registry") }

// Driver is the driver of one node. Its methods may be called by any goroutine.
type Driver struct {
	drahealth.UnimplementedDRAResourceHealthServer

	cfg   Config
	store claims.Store
	// republish gets a value when the slices are to be published again.
	republish chan struct{}
	// fatal gets an error after which the servers for kubelet have to be restarted.
	fatal chan error

	mu    sync.Mutex // guards slots
	slots bool       // the API server does not support consumable capacity
}

// New makes a driver.
func New(cfg Config) *Driver {
	if cfg.KubeletDir == "" {
		cfg.KubeletDir = DefaultKubeletDir
	}
	cfg.returnWait = cmp.Or(cfg.returnWait, returnWait)
	return &Driver{cfg: cfg, store: claims.NewStore(cfg.DataDir), republish: make(chan struct{}, 1), fatal: make(chan error, 1)}
}

// Run serves kubelet until ctx ends, also after kubelet was restarted. The slices stay after
// the end of Run, for the next agent; kubelet removes them if there is none.
func (d *Driver) Run(ctx context.Context) {
	if err := d.store.RemoveStale(); err != nil {
		d.cfg.Log.Warn("temporary files of claims not removed", "err", err)
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() { (&reporter{d: d}).run(ctx) })
	said := ""
	for ctx.Err() == nil {
		err := d.serve(ctx)
		if ctx.Err() != nil {
			return
		}
		if text := err.Error(); text != said { // log the same error once
			said = text
			d.cfg.Log.Warn("devices cannot be claimed on this node; the driver is started again every few seconds", "err", err)
		}
		again := time.NewTimer(restartPause)
		select {
		case <-ctx.Done():
		case <-again.C:
		}
		again.Stop()
	}
}

// serve registers with kubelet and publishes the devices, until ctx ends or an error.
func (d *Driver) serve(ctx context.Context) error {
	plugins, registry := PluginDir(d.cfg.KubeletDir), RegistryDir(d.cfg.KubeletDir)
	if err := os.MkdirAll(plugins, 0o750); err != nil {
		return fmt.Errorf("make the driver's directory: %w", err)
	}
	if _, err := os.Stat(registry); err != nil {
		return fmt.Errorf("find kubelet's registry of plugins: %w: set dra.kubeletDir to kubelet's --root-dir", err)
	}
	removeDead(registry, DriverName+"-*.sock")
	removeDead(plugins, "dra-*.sock")
	select {
	case err := <-d.fatal:
		d.cfg.Log.Debug("error of an earlier turn", "err", err)
	default:
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	helper, err := kubeletplugin.Start(ctx, d,
		kubeletplugin.DriverName(DriverName), kubeletplugin.NodeName(d.cfg.Node), kubeletplugin.KubeClient(d.cfg.Client),
		kubeletplugin.PluginDataDirectoryPath(plugins), kubeletplugin.RegistrarDirectoryPath(registry),
		kubeletplugin.RollingUpdate(instanceUID(d.cfg.Instance)),
	)
	if err != nil {
		return fmt.Errorf("serve kubelet: %w", err)
	}
	defer helper.Stop()
	d.cfg.Log.Info("devices can be claimed on this node", "driver", DriverName)
	return d.publish(ctx)
}

// HandleError implements [kubeletplugin.DRAPlugin]: it gets the errors of the helper's
// goroutines.
func (d *Driver) HandleError(_ context.Context, err error, msg string) {
	d.cfg.Log.Warn("dynamic resource allocation", "what", msg, "err", err)
	if !errors.Is(err, kubeletplugin.ErrRecoverable) {
		select {
		case d.fatal <- fmt.Errorf("%s: %w", msg, err):
		default: // an earlier error is enough
		}
	}
}

// instanceUID is the part of this agent in the names of its sockets. It is short, because
// the path of a socket has at most 107 bytes.
func instanceUID(instance string) types.UID {
	sum := sha256.Sum256([]byte(instance))
	return types.UID(fmt.Sprintf("%x", sum[:6]))
}

// removeDead removes the sockets of agents that were killed: kubelet would try to connect to
// them for ever.
func removeDead(dir, pattern string) {
	found, err := filepath.Glob(filepath.Join(dir, pattern))
	if err != nil {
		return // the pattern is a constant
	}
	for _, path := range found {
		c, err := net.DialTimeout("unix", path, dialTimeout)
		if err == nil {
			_ = c.Close() // a running agent has the socket
		} else if errors.Is(err, syscall.ECONNREFUSED) {
			_ = os.Remove(path) // after an error kubelet goes on trying it
		}
	}
}
