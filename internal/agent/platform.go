// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"fmt"
	"log/slog"
	"net/netip"
	"path/filepath"
	"slices"
	"time"

	"github.com/smcr-io/kube-smcr/internal/agent/rnics"
	"github.com/smcr-io/kube-smcr/internal/config"
	"github.com/smcr-io/kube-smcr/internal/devices/vf"
	"github.com/smcr-io/kube-smcr/internal/files"
	"github.com/smcr-io/kube-smcr/internal/linux"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/soft"
	"github.com/smcr-io/kube-smcr/pkg/rdma/verbs"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
	"github.com/smcr-io/kube-smcr/pkg/smcr/synopt"
)

// platform is what the agent needs of the machine that it runs on. A test replaces
// single functions, for example openDevice by one that returns a fake device.
type platform struct {
	kernel      kernel
	smc         kernelSMC
	host        hostNet
	openDevice  func(name string, cfg config.Device, share bool) (rdma.Device, func() error, error)
	openOwn     func(d *rnics.Own, in rnics.Namespace) (rdma.Device, func() error, error)
	hostDevices func() ([]vf.Device, error) // the host's devices that pods can have
	learn       func(d rnics.Own) (rnics.Own, error)
	openOption  func() (smcr.Option, func() error, error)
	newStack    func(smcr.Config) (stack, error)
	route       func(src, dst netip.Addr) (clc.Route, error)
	preflight   func() error
	probeQueue  func() (linux.QueueForm, error)
	files       func() uint64 // limit of open files
	unlinked    func(dir string) bool
	mayUseAPI   func(uid uint32) bool
	ableEvery   time.Duration
	// deviceEvery is the pause before the agent looks for a missing device again. The pause doubles
	// up to ableEvery.
	deviceEvery time.Duration
	// untrackAfter is how long a pod must have been without rules of others before the
	// agent keeps packets from connection tracking there.
	untrackAfter time.Duration
	// parkAfter is how long nothing must move in a direction of a session before it is parked.
	parkAfter time.Duration
	// appPatience is how long an inbound connection waits for its application before it is plain TCP.
	appPatience time.Duration
	// clientEvery is the pause between two looks whether the client of such a connection is still there.
	clientEvery time.Duration
	// arrivalPatience is how long a session on SMC-R waits for the application's connection, whose SYN was diverted.
	arrivalPatience time.Duration
	// bypassPatience is how long a connection waits until its destination is in the negative cache.
	bypassPatience time.Duration
}

// setDefaults fills in the real functions and times where tests set nothing.
func (p *platform) setDefaults(log *slog.Logger, dataDir string) {
	if p.kernel == nil {
		p.kernel = linuxKernel{}
	}
	if p.smc == nil {
		p.smc = newLinuxSMC(dataDir)
	}
	if p.host == nil {
		p.host = linuxHost{}
	}
	if p.openDevice == nil {
		p.openDevice = func(name string, cfg config.Device, share bool) (rdma.Device, func() error, error) {
			return openDevice(log, dataDir, name, cfg, share)
		}
	}
	if p.openOwn == nil {
		p.openOwn = rnics.OpenOwn
	}
	host := vf.Host{DataDir: dataDir}
	if p.hostDevices == nil {
		p.hostDevices = host.Devices
	}
	if p.learn == nil {
		p.learn = func(d rnics.Own) (rnics.Own, error) { return rnics.Learn(host, d) }
	}
	if p.openOption == nil {
		p.openOption = openOption
	}
	if p.newStack == nil {
		p.newStack = func(cfg smcr.Config) (stack, error) {
			s, err := smcr.NewStack(cfg)
			if err != nil {
				return nil, err
			}
			return smcrStack{s}, nil
		}
	}
	if p.route == nil {
		p.route = route
	}
	if p.ableEvery == 0 {
		p.ableEvery = ableEvery
	}
	if p.files == nil {
		p.files = linux.FileLimit
	}
	if p.unlinked == nil {
		p.unlinked = files.Unlinked
	}
	if p.untrackAfter == 0 {
		p.untrackAfter = untrackAfter
	}
	if p.parkAfter == 0 {
		p.parkAfter = parkAfter
	}
	if p.appPatience == 0 {
		p.appPatience = appPatience
	}
	if p.clientEvery == 0 {
		p.clientEvery = clientEvery
	}
	if p.arrivalPatience == 0 {
		p.arrivalPatience = arrivalPatience
	}
	if p.bypassPatience == 0 {
		p.bypassPatience = bypassPatience
	}
	if p.preflight == nil {
		p.preflight = linux.Probe
	}
	if p.probeQueue == nil {
		p.probeQueue = linux.ProbeQueue
	}
	if p.mayUseAPI == nil {
		p.mayUseAPI = mayUseAPI
	}
}

// openDevice opens a device of the node. With share, another agent with the same data directory may
// have a software device open, too; devices of the kernel can always be opened by several.
func openDevice(log *slog.Logger, dataDir, name string, cfg config.Device, share bool) (rdma.Device, func() error, error) {
	addr, err := deviceAddress(cfg)
	if err != nil {
		return nil, nil, err
	}
	if !cfg.Soft() {
		d, err := verbs.Open(hardware(cfg, addr))
		if err != nil {
			return nil, nil, err
		}
		return d, d.Close, nil
	}
	d, err := soft.Open(software(log, dataDir, name, addr, cfg.SoftMTU, share))
	if err != nil {
		return nil, nil, err
	}
	return d, d.Close, nil
}

// software is a device in software.
func software(log *slog.Logger, dataDir, name string, addr netip.Addr, mtuBytes int, share bool) soft.Config {
	var mtu rdma.MTU // 0: what the interface allows
	for m := rdma.MTU256; m <= rdma.MTU4096; m++ {
		if m.Bytes() == mtuBytes {
			mtu = m
		}
	}
	return soft.Config{
		Name: name, Addr: addr, MTU: mtu, Share: share, Dir: softDir(dataDir),
		TooLarge: func(p soft.TooLarge) {
			log.Warn("RoCE packets do not fit the interface that they leave by, so connections on SMC-R are reset: unless its MTU was lowered just now, set a lower soft.mtu of the device",
				"device", name, "peer", p.Peer, "packetBytes", p.PacketBytes)
		},
	}
}

// hardware is a device of the kernel by the address that it has now.
func hardware(cfg config.Device, addr netip.Addr) verbs.Config {
	return verbs.Config{Name: cfg.RDMA, Port: cfg.Port, Addr: addr, GIDType: cfg.GIDType, TrafficClass: cfg.TrafficClass}
}

// deviceAddress is the address of a device of the node: that of the configuration, or one that its
// interface has now. An interface may get its address only after the agent started, or another one.
func deviceAddress(cfg config.Device) (netip.Addr, error) {
	known := cfg.GIDAddress
	if cfg.Soft() {
		known = cfg.SoftAddress
	}
	if cfg.Interface == "" {
		return known, nil
	}
	all, err := linux.LastingAddresses()
	if err != nil {
		return netip.Addr{}, err
	}
	switch addrs := all[cfg.Interface]; {
	case len(addrs) == 0:
		return netip.Addr{}, fmt.Errorf("interface %s is not there or has no address: ip address shows them", cfg.Interface)
	case slices.Contains(addrs, known):
		return known, nil
	default:
		return addrs[0], nil
	}
}

// softDir is the directory by which the software devices of two agents find each other.
func softDir(dataDir string) string { return filepath.Join(dataDir, "devices.soft") }

// route asks how a device's address reaches a peer's, in the namespace of the calling thread.
func route(src, dst netip.Addr) (clc.Route, error) {
	r, err := linux.RouteTo(src, dst)
	if err != nil {
		return clc.Route{}, err
	}
	out := clc.Route{Found: r.Found, Gateway: r.Gateway}
	copy(out.MAC[:], r.MAC)
	if !r.Gateway { // with a router it is not asked for
		out.Elsewhere, err = r.Elsewhere(src)
	}
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
