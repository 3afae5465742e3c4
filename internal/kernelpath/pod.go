// SPDX-License-Identifier: Apache-2.0

package kernelpath

import (
	"errors"
	"fmt"
	"net/netip"
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
	// has, as in the node's network always.
	SendBufferBytes, RMBEBytes int
	// Veth lets the kernel find an RNIC for a pod that has a veth only, by [Veths]. Addresses are those that the pod's
	// network gave it: a program there may have given itself others.
	Veth      bool
	Addresses []netip.Addr
}

// Why the kernel finds no RDMA device for a pod.
var (
	ErrUnfit     = errors.New("no interface of the pod is that of an active RDMA device, or a child (macvlan, ipvlan) of one's")
	ErrUnfitHost = errors.New("no active RDMA device has an interface in the node's network")
)

// Fit tells whether the kernel finds an RDMA device for the connections of a pod: whether an
// interface of its namespace is that of an RDMA device, as of a VF, or the child of one's in another namespace, the host's. The
// error is [ErrUnfit] if not, and [ErrUnfitHost] of a pod in the network of the host.
func Fit(at linux.Place) error {
	devices, err := smcnl.Devices()
	if err != nil {
		return err
	}
	own, err := linux.RDMADevicesIn(at.NetNS)
	if err != nil {
		return err
	}
	unfit, parents := ErrUnfitHost, []int(nil)
	if at.Cgroup == nil {
		unfit = ErrUnfit
		if parents, err = linux.ParentsElsewhere(at.NetNS); err != nil {
			return err
		}
	}
	for _, d := range devices {
		for _, p := range d.Ports {
			if p.Active && (slices.Contains(own, d.Name) || slices.Contains(parents, int(p.NetDev))) {
				return nil
			}
		}
	}
	return unfit
}

// Fit is the function Fit, of a pod that is configured so. With [PodConfig.Veth] a veth serves as well.
func (c *Chooser) Fit(at linux.Place, cfg PodConfig) error {
	err := Fit(at)
	if at.Cgroup != nil || !errors.Is(err, ErrUnfit) || c.veths == nil {
		return err
	}
	if cfg.Veth {
		return c.veths.fit(at.NetNS, cfg.Addresses)
	}
	if veths, verr := linux.VethsWith(at.NetNS, cfg.Addresses); verr == nil && len(veths) > 0 {
		err = fmt.Errorf("%w; its veth %s would do with kernelPath.veth, which is experimental", err, veths[0].Name)
	}
	return err
}

// needsVeth tells whether a pod needs what Veths make.
func (c *Chooser) needsVeth(at linux.Place, cfg PodConfig) (bool, error) {
	if c.veths == nil || !cfg.Veth || at.Cgroup != nil {
		return false, nil
	}
	err := Fit(at)
	if errors.Is(err, ErrUnfit) {
		return true, nil
	}
	return false, err
}

// A Choice is whose new sockets are SMC: those of the namespace with this cookie, or of the cgroup with this ID.
type Choice struct{ NetNS, Cgroup uint64 }

// choiceOf is that of a place.
func choiceOf(at linux.Place) (Choice, error) {
	if at.Cgroup != nil {
		return Choice{Cgroup: at.Cgroup.ID()}, nil
	}
	cookie, err := at.NetNS.Cookie()
	return Choice{NetNS: cookie}, err
}

// Chosen tells whether new sockets of a place are SMC, by this Chooser or an earlier one with the
// same directory.
func (c *Chooser) Chosen(at linux.Place) (bool, error) {
	choice, err := choiceOf(at)
	if err != nil {
		return false, err
	}
	return c.isChosen(choice)
}

// Others are the choices but for those of these places: perhaps of pods that ended when nobody was there to
// detach them.
func (c *Chooser) Others(known []linux.Place) (others []Choice, err error) {
	rules, err := c.Rules() // before the cookies of those that are chosen since
	if err != nil {
		return nil, err
	}
	ours := make(map[Choice]bool, len(known))
	for _, at := range known {
		choice, err := choiceOf(at)
		if errors.Is(err, linux.ErrClosed) {
			continue // it is just given up
		}
		if err != nil {
			return nil, err
		}
		ours[choice] = true
	}
	for _, r := range rules {
		if !r.Exclude && !ours[r.Choice] {
			others = append(others, r.Choice)
		}
	}
	return others, nil
}

// Attach makes new sockets of a pod SMC. Connections that Filter does not select are TCP from the
// first one on. It may be called again with another Filter, which holds for new connections at once;
// the buffers stay those of the first call.
func (c *Chooser) Attach(at linux.Place, cfg PodConfig) error {
	choice, err := choiceOf(at)
	if err != nil {
		return err
	}
	chosen, err := c.isChosen(choice)
	if err != nil {
		return err
	}
	if chosen {
		return linux.FilterOption(at, cfg.Filter)
	}
	veth, err := c.needsVeth(at, cfg)
	if err != nil {
		return err
	}
	var u undo.Stack
	return u.Run(
		undo.Step{
			Name: "filter the option", Do: func() error { return linux.FilterOption(at, cfg.Filter) },
			Undo: func() error { // an earlier attachment may have left sockets that listen
				_, err := sweepFilter(at)
				return err
			},
		},
		undo.Step{
			Name: "set buffers", Do: func() error { return setBuffers(at, PodConfig{}, cfg) },
			Undo: func() error { return setBuffers(at, cfg, PodConfig{}) },
		},
		undo.Step{
			Name: "let the kernel find an RNIC for the veth", Do: func() error {
				if !veth {
					return nil
				}
				return c.veths.attach(at.NetNS, cfg.Addresses)
			},
			Undo: func() error { return c.detachVeth(at) },
		},
		undo.Step{Name: "choose", Do: func() error { return c.Choose(choice) }},
	)
}

// Detach takes Attach back: new sockets are TCP. While sockets of SMC are left, of which those that
// listen would accept connections on SMC-R, the filter lets none be on SMC-R, and left is true: call
// Sweep later. It is no error if nothing was attached.
func (c *Chooser) Detach(at linux.Place, cfg PodConfig) (left bool, err error) {
	choice, err := choiceOf(at)
	if err != nil {
		return false, err
	}
	if err := c.Forget(choice); err != nil {
		return false, err
	}
	if left, err = Sweep(at, cfg); left || err != nil {
		return left, err
	}
	return false, c.detachVeth(at)
}

// detachVeth takes away what Veths made for a pod.
func (c *Chooser) detachVeth(at linux.Place) error {
	if c.veths == nil || at.Cgroup != nil {
		return nil
	}
	return c.veths.detach(at.NetNS)
}

// Sweep takes away what Attach left in a place that is not chosen any more; see Detach.
func Sweep(at linux.Place, cfg PodConfig) (left bool, err error) {
	if left, err = sweepFilter(at); left || err != nil {
		return left, err
	}
	return false, setBuffers(at, cfg, PodConfig{})
}

// sweepFilter removes the filter of a place, or lets it select nothing while the place has sockets of SMC.
func sweepFilter(at linux.Place) (left bool, err error) {
	if left, err = hasSockets(at); err != nil {
		return left, err
	}
	if left {
		return true, linux.FilterOption(at, linux.OptionFilterConfig{})
	}
	return false, linux.SweepOptionFilter(at)
}

// Purge is Detach of a pod that is given up: it removes everything, whoever still listens there.
func (c *Chooser) Purge(at linux.Place, cfg PodConfig) error {
	choice, err := choiceOf(at)
	if err != nil {
		return err
	}
	return errors.Join(c.Forget(choice), linux.SweepOptionFilter(at), setBuffers(at, cfg, PodConfig{}), c.detachVeth(at))
}

// hasSockets tells whether a place has sockets of SMC that did not become TCP. A socket of the node's network of which nobody can
// tell whose it is, as it has no port yet, may be one, and so may those of which there are too many to look through.
func hasSockets(at linux.Place) (bool, error) {
	all, err := sockets(at.NetNS, isNotTCP)
	return hasAmong(at, all, err)
}

// isNotTCP tells whether a socket did not become TCP.
func isNotTCP(s *smcnl.Socket) bool { return s.Mode != smcnl.ModeTCP }

// hasAmong is hasSockets by the list of the sockets of the place's namespace, or by why there is none.
func hasAmong(at linux.Place, all []smcnl.Socket, err error) (bool, error) {
	if err != nil {
		return unlessTooMuch(err)
	}
	all = slices.DeleteFunc(all, func(s smcnl.Socket) bool { return !isNotTCP(&s) })
	if at.Cgroup == nil || len(all) == 0 {
		return len(all) > 0, nil
	}
	tcp, err := findTCP(at)
	if err != nil {
		return unlessTooMuch(err)
	}
	return slices.ContainsFunc(all, func(s smcnl.Socket) bool { return !tcp.isForeign(&s) }), nil
}

// unlessTooMuch takes a place of whose sockets not all are known for one that has some.
func unlessTooMuch(err error) (bool, error) {
	if errors.Is(err, linux.ErrTooMuch) {
		return true, nil
	}
	return false, err
}

// The variables of a namespace that say how large the buffers of connections are.
const (
	sendBufferVariable = "net/smc/wmem"
	rmbeVariable       = "net/smc/rmem"
)

// setBuffers changes the variables of a namespace from the sizes of one configuration to those of another.
// Another value is somebody else's and stays, and so do those of the node's network.
func setBuffers(at linux.Place, from, to PodConfig) error {
	if at.Cgroup != nil {
		return nil
	}
	ns := at.NetNS
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
