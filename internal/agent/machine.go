// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"fmt"
	"net/netip"
	"path/filepath"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/config"
	"github.com/smcr-io/kube-smcr/internal/linux"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/soft"
	"github.com/smcr-io/kube-smcr/pkg/rdma/verbs"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
	"github.com/smcr-io/kube-smcr/pkg/smcr/synopt"
)

// unable is why nothing can be on SMC-R here.
type unable struct {
	why  string
	code agentapi.Code
}

// enable gets what SMC-R needs of the node. What is missing is an error, or
// with Stay the reason why everything is plain TCP; only the TCP option may be
// missing in any case.
func (a *agent) enable(ctx context.Context) (closeOption func() error, err error) {
	cannot := func(code agentapi.Code, err error) {
		if a.unable.code == "" {
			a.unable = unable{err.Error(), code}
		}
		a.cfg.Log.Warn("everything is plain TCP", "reason", code, "err", err)
	}
	if err := a.cfg.preflight(); err != nil {
		err = fmt.Errorf("this node cannot run the agent: %w", err)
		if !a.cfg.Stay {
			return nil, err
		}
		cannot(agentapi.CodeNoOption, err)
	}
	if err := a.openDevices(ctx); err != nil {
		return nil, err
	}
	// Devices of the kernel are used as soon as they are there. The address of a
	// software device is in the configuration, which is read again at the start.
	if open, _ := a.devices.usable(nil); len(open) == 0 && len(a.devices.node) > 0 && a.devices.node[0].cfg.Soft() {
		cannot(agentapi.CodeOf(clc.ReasonNoDev), a.devices.node[0].err)
	}
	nothing := func() error { return nil }
	option, closeOption, err := a.cfg.openOption()
	if err != nil {
		cannot(agentapi.CodeNoOption, fmt.Errorf("the SMC-R TCP option cannot be written: %w", err))
		return nothing, nil
	}
	if a.unable.code != "" {
		return nothing, closeOption()
	}
	a.option = option
	return closeOption, nil
}

// awaitAble waits until what kept the agent from SMC-R is there, or ctx ends.
func (a *agent) awaitAble(ctx context.Context) bool {
	for wait(ctx, a.cfg.ableEvery) {
		if a.able() {
			a.cfg.Log.Info("what was missing for SMC-R is there; the agent starts again")
			return true
		}
	}
	return false
}

// able tries everything that enable needs, and leaves nothing behind.
func (a *agent) able() bool {
	if a.cfg.preflight() != nil {
		return false
	}
	if _, closeOption, err := a.cfg.openOption(); err != nil || closeOption() != nil {
		return false
	}
	if open, _ := a.devices.usable(nil); len(open) > 0 || len(a.devices.node) == 0 {
		return true
	}
	for _, d := range a.devices.node {
		if _, stop, err := a.cfg.openDevice(d.name, d.cfg, a.cfg.Node.Takeover); err == nil && stop() == nil {
			return true
		}
	}
	return false
}

// openDevice picks the provider. This is the only place that knows providers.
// With share another agent with the same data directory may have the device open too;
// the kernel's devices may be opened by anybody.
func openDevice(dataDir, name string, cfg config.Device, share bool) (rdma.Device, func() error, error) {
	if !cfg.Soft() {
		d, err := verbs.Open(verbs.Config{Name: cfg.RDMA, Port: cfg.Port, Addr: cfg.GIDAddress, GIDType: cfg.GIDType})
		if err != nil {
			return nil, nil, err
		}
		return d, d.Close, nil
	}
	if !cfg.SoftAddress.IsValid() {
		return nil, nil, fmt.Errorf("interface %s is not there or has no address: ip address shows them", cfg.Interface)
	}
	var mtu rdma.MTU // 0: what fits the interface
	for m := rdma.MTU256; m <= rdma.MTU4096; m++ {
		if m.Bytes() == cfg.SoftMTU {
			mtu = m
		}
	}
	d, err := soft.Open(soft.Config{Name: name, Addr: cfg.SoftAddress, MTU: mtu, Share: share, Dir: softDir(dataDir)})
	if err != nil {
		return nil, nil, err
	}
	return d, d.Close, nil
}

// softDir is where the software devices of two agents find each other.
func softDir(dataDir string) string { return filepath.Join(dataDir, "devices.soft") }

// route asks how devices reach a peer's, in the namespace of the calling thread.
func route(src, dst netip.Addr) (clc.Route, error) {
	r, err := linux.RouteTo(src, dst)
	out := clc.Route{Found: r.Found, Gateway: r.Gateway}
	copy(out.MAC[:], r.MAC)
	return out, err
}

// openOption attaches the program that writes the TCP option.
func openOption() (smcr.Option, func() error, error) {
	o, err := synopt.Open(synopt.Config{Mark: markWire})
	if err != nil {
		return nil, nil, err
	}
	return o, o.Close, nil
}
