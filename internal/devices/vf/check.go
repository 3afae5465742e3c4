// SPDX-License-Identifier: Apache-2.0

package vf

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strconv"

	"github.com/vishvananda/netlink"

	"github.com/smcr-io/kube-smcr/internal/linux"
)

// PropertyError says which property of a wiring is not as Attach left it.
type PropertyError struct {
	Device    string
	Property  string // as in "mtu"
	Got, Want string
}

// Error implements error.
func (e *PropertyError) Error() string {
	return fmt.Sprintf("device %s: %s is %s, not %s", e.Device, e.Property, e.Got, e.Want)
}

// Wiring returns what Attach returned. The error is fs.ErrNotExist if the
// attachment has no such device.
func (h Host) Wiring(containerID, ifName, device string) (Wiring, error) {
	if err := checkID(device); err != nil {
		return Wiring{}, err
	}
	j, err := h.readJournal(device)
	if err != nil {
		return Wiring{}, err
	}
	if w := j.Wiring; j.Complete && w.Owner.Is(containerID, ifName) {
		return w, nil
	}
	return Wiring{}, fmt.Errorf("device %s: interface %s of container %s does not have it: %w", device, ifName, containerID, fs.ErrNotExist)
}

// Check compares a wiring with the state of the machine. The error is a *PropertyError for
// the first property that differs. An MTU of 0 is any.
func (h Host) Check(ctx context.Context, w Wiring) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	t, err := h.newTask(&journal{Wiring: w})
	if err != nil {
		return err
	}
	defer t.close()
	c := checker{t: t, w: &t.j.Wiring}
	if j, err := h.readJournal(w.Device.ID); err != nil {
		return errors.Join(&PropertyError{w.Device.ID, "owner", "nobody", w.Owner.String()}, err)
	} else if o := j.Wiring.Owner; !o.Is(w.Owner.ContainerID, w.Owner.IfName) {
		return &PropertyError{w.Device.ID, "owner", o.String(), w.Owner.String()}
	}
	t.pod, err = linux.OpenNetNS(w.Owner.NetNS)
	if err != nil {
		return err
	}
	for _, check := range []func() error{c.inPod, c.inHost, c.rdma} {
		if err := check(); err != nil {
			return err
		}
	}
	return nil
}

// checker is one call of Check.
type checker struct {
	t *task
	w *Wiring
}

func same[T comparable](c *checker, property string, got, want T) error {
	if got == want {
		return nil
	}
	return &PropertyError{c.w.Device.ID, property, fmt.Sprint(got), fmt.Sprint(want)}
}

// yes describes a state that is on or off.
func yes(b bool, on, off string) string {
	if b {
		return on
	}
	return off
}

func (c *checker) inPod() error {
	parent := 0
	if c.w.Mode == ModeIPVlan {
		if err := in(c.t.home, func(h *netlink.Handle) error {
			l, err := find(h, c.w.Original.Name)
			if l != nil {
				parent = l.Attrs().Index
			}
			return err
		}); err != nil {
			return err
		}
	}
	return in(c.t.pod, func(h *netlink.Handle) error {
		l, err := find(h, c.w.IfName)
		if err != nil {
			return err
		}
		if err := same(c, "interface "+c.w.IfName+" in the pod", yes(l != nil, "there", "missing"), "there"); err != nil {
			return err
		}
		its := c.t.ours(l)
		if c.w.Mode == ModeIPVlan {
			its = c.t.isChild(l, parent)
		}
		return cmp.Or(
			same(c, "interface "+c.w.IfName+" in the pod", yes(its, "of the device", "of something else"), "of the device"),
			same(c, "state", yes(isUp(l), "up", "down"), "up"),
			same(c, "mac", l.Attrs().HardwareAddr.String(), c.w.MAC),
			same(c, "mtu", l.Attrs().MTU, cmp.Or(c.w.MTU, l.Attrs().MTU)),
		)
	})
}

// inHost compares the parent of an ipvlan child, and the settings that the PF has made.
func (c *checker) inHost() error {
	return in(c.t.home, func(h *netlink.Handle) error {
		if c.w.Mode == ModeIPVlan {
			l, err := find(h, c.w.Original.Name)
			if err != nil {
				return err
			}
			if err := cmp.Or(
				same(c, "interface "+c.w.Original.Name+" in the host", yes(l != nil, "there", "missing"), "there"),
				same(c, "state of "+c.w.Original.Name, yes(l != nil && isUp(l), "up", "down"), "up"),
			); err != nil {
				return err
			}
		}
		if c.w.Device.VF < 0 {
			return nil
		}
		pf, err := c.t.findPF(h)
		if err != nil {
			return err
		}
		if err := cmp.Or(
			same(c, "PF "+c.w.Device.PF, yes(pf != nil, "there", "missing"), "there"),
			same(c, "state of PF "+c.w.Device.PF, yes(pf != nil && isUp(pf), "up", "down"), "up"),
		); err != nil {
			return err
		}
		return c.settings(pfSettings(pf, c.w.Device.VF))
	})
}

// settings compares the settings that Attach was asked for and made.
func (c *checker) settings(p *PFSettings) error {
	if p == nil {
		return same(c, "VF "+strconv.Itoa(c.w.Device.VF)+" of PF "+c.w.Device.PF, "missing", "there")
	}
	s := &c.w.Settings
	if s.VLAN != nil {
		if err := cmp.Or(
			same(c, "vlan", p.VLAN, *s.VLAN),
			same(c, "vlanQoS", p.VLANQoS, value(s.VLANQoS, 0)),
			same(c, "vlanProto", p.VLANProto, value(s.VLANProto, protoQ)),
		); err != nil {
			return err
		}
	}
	return cmp.Or(
		same(c, "mac by the PF", p.MAC, value(s.MAC, p.MAC)),
		same(c, string(SettingSpoofCheck), p.SpoofCheck, value(s.SpoofCheck, p.SpoofCheck)),
		same(c, string(SettingTrust), p.Trust, value(s.Trust, p.Trust)),
		same(c, string(SettingMinTxRate), p.MinTxRate, value(s.MinTxRate, p.MinTxRate)),
		same(c, string(SettingMaxTxRate), p.MaxTxRate, value(s.MaxTxRate, p.MaxTxRate)),
		same(c, string(SettingLinkState), p.LinkState, value(s.LinkState, p.LinkState)),
	)
}

// rdma checks that the RDMA devices are in their namespace.
func (c *checker) rdma() error {
	for _, r := range c.w.RDMA {
		ns, where := c.t.home, "the host"
		if r.NetNS != "" {
			ns, where = c.t.pod, "the pod"
		}
		var names []string
		if err := ns.Do(func() (err error) { names, err = c.t.rdma.Names(); return err }); err != nil {
			return err
		}
		if err := same(c, "RDMA device "+r.Name+" in "+where, yes(slices.Contains(names, r.Name), "there", "missing"), "there"); err != nil {
			return err
		}
	}
	return nil
}
