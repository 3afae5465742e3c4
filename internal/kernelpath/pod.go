// SPDX-License-Identifier: Apache-2.0

package kernelpath

import (
	"errors"
	"fmt"
	"slices"
	"strconv"

	"github.com/smcr-io/kube-smcr/internal/linux"
	"github.com/smcr-io/kube-smcr/internal/smcnl"
	"github.com/smcr-io/kube-smcr/internal/undo"
)

// PodConfig says how a pod uses the kernel's SMC-R.
type PodConfig struct {
	// Filter says which connections may be on SMC-R.
	Filter linux.OptionFilterConfig
	// SendBufferBytes and RMBEBytes are the sizes of the buffers of a connection; 0: what the kernel
	// has.
	SendBufferBytes, RMBEBytes int
}

// ErrUnfit means that the kernel finds no RDMA device for a pod's interfaces.
var ErrUnfit = errors.New("no interface of the pod is a child (macvlan, ipvlan) of an active RDMA device's")

// Fit tells whether the kernel finds an RDMA device for the connections of a namespace: whether an
// interface of it is the child of that of an RDMA device in another namespace, the host's. The error
// is [ErrUnfit] if not.
func Fit(ns *linux.NetNS) error {
	devices, err := smcnl.Devices()
	if err != nil {
		return err
	}
	parents, err := linux.ParentsElsewhere(ns)
	if err != nil {
		return err
	}
	for _, d := range devices {
		for _, p := range d.Ports {
			if p.Active && slices.Contains(parents, int(p.NetDev)) {
				return nil
			}
		}
	}
	return ErrUnfit
}

// Chosen tells whether new sockets of a namespace are SMC, by this Chooser or an earlier one with the
// same directory.
func (c *Chooser) Chosen(ns *linux.NetNS) (bool, error) {
	cookie, err := ns.Cookie()
	if err != nil {
		return false, err
	}
	return c.isChosen(cookie)
}

// Others are the cookies of the network namespaces that are chosen, but for these: perhaps of pods that ended
// when nobody was there to detach them.
func (c *Chooser) Others(known []*linux.NetNS) (cookies []uint64, err error) {
	rules, err := c.Rules() // before the cookies of those that are chosen since
	if err != nil {
		return nil, err
	}
	ours := make(map[uint64]bool, len(known))
	for _, ns := range known {
		cookie, err := ns.Cookie()
		if errors.Is(err, linux.ErrClosed) {
			continue // it is just given up
		}
		if err != nil {
			return nil, err
		}
		ours[cookie] = true
	}
	for _, r := range rules {
		if r.Cgroup == 0 && !ours[r.NetNS] {
			cookies = append(cookies, r.NetNS)
		}
	}
	return cookies, nil
}

// Attach makes new sockets of a pod SMC. Connections that Filter does not select are TCP from the
// first one on. It may be called again with another Filter, which holds for new connections at once;
// the buffers stay those of the first call.
func (c *Chooser) Attach(ns *linux.NetNS, cfg PodConfig) error {
	cookie, err := ns.Cookie()
	if err != nil {
		return err
	}
	chosen, err := c.isChosen(cookie)
	if err != nil {
		return err
	}
	if chosen {
		return linux.FilterOption(ns, cfg.Filter)
	}
	var u undo.Stack
	return u.Run(
		undo.Step{
			Name: "filter the option", Do: func() error { return linux.FilterOption(ns, cfg.Filter) },
			Undo: func() error { return linux.SweepOptionFilter(ns) },
		},
		undo.Step{
			Name: "set buffers", Do: func() error { return setBuffers(ns, PodConfig{}, cfg) },
			Undo: func() error { return setBuffers(ns, cfg, PodConfig{}) },
		},
		undo.Step{Name: "choose", Do: func() error { return c.ChooseNetNS(cookie) }},
	)
}

// Detach takes Attach back: new sockets are TCP. While sockets of SMC are left, of which those that
// listen would accept connections on SMC-R, the filter lets none be on SMC-R, and left is true: call
// Sweep later. It is no error if nothing was attached.
func (c *Chooser) Detach(ns *linux.NetNS, cfg PodConfig) (left bool, err error) {
	cookie, err := ns.Cookie()
	if err != nil {
		return false, err
	}
	if err := c.ForgetNetNS(cookie); err != nil {
		return false, err
	}
	return Sweep(ns, cfg)
}

// Sweep takes away what Attach left in a namespace that is not chosen any more; see Detach.
func Sweep(ns *linux.NetNS, cfg PodConfig) (left bool, err error) {
	if left, err = hasSockets(ns); err != nil {
		return left, err
	}
	if left {
		return true, linux.FilterOption(ns, linux.OptionFilterConfig{})
	}
	return false, errors.Join(linux.SweepOptionFilter(ns), setBuffers(ns, cfg, PodConfig{}))
}

// Purge is Detach of a pod that is given up: it removes everything, whoever still listens there.
func (c *Chooser) Purge(ns *linux.NetNS, cfg PodConfig) error {
	cookie, err := ns.Cookie()
	if err != nil {
		return err
	}
	return errors.Join(c.ForgetNetNS(cookie), linux.SweepOptionFilter(ns), setBuffers(ns, cfg, PodConfig{}))
}

// hasSockets tells whether a namespace has sockets of SMC that did not become TCP.
func hasSockets(ns *linux.NetNS) (bool, error) {
	all, err := sockets(ns)
	return slices.ContainsFunc(all, func(s smcnl.Socket) bool { return s.Mode != smcnl.ModeTCP }), err
}

// The variables of a namespace that say how large the buffers of connections are.
const (
	sendBufferVariable = "net/smc/wmem"
	rmbeVariable       = "net/smc/rmem"
)

// setBuffers changes the variables of a namespace from the sizes of one configuration to those of another.
// Another value is somebody else's and stays.
func setBuffers(ns *linux.NetNS, from, to PodConfig) error {
	for _, v := range []struct {
		name     string
		from, to int
	}{{sendBufferVariable, from.SendBufferBytes, to.SendBufferBytes}, {rmbeVariable, from.RMBEBytes, to.RMBEBytes}} {
		if v.from == v.to {
			continue
		}
		usual, err := usualValue(v.name)
		if err != nil {
			return err
		}
		value := func(size int) string {
			if size == 0 {
				return usual
			}
			return strconv.Itoa(size)
		}
		now, err := linux.Sysctl(ns, v.name)
		if err == nil && now == value(v.from) {
			err = linux.SetSysctl(ns, v.name, value(v.to))
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// usualValue is what the kernel gives a variable in new namespaces.
func usualValue(name string) (string, error) {
	ns, err := linux.ScratchNetNS()
	if err != nil {
		return "", err
	}
	value, err := linux.Sysctl(ns, name)
	if err := errors.Join(err, ns.Close()); err != nil {
		return "", fmt.Errorf("look up what the kernel gives new namespaces: %w", err)
	}
	return value, nil
}
