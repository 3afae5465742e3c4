// SPDX-License-Identifier: Apache-2.0

package vf

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"slices"

	"github.com/vishvananda/netlink"
)

// Ethertypes of a port VLAN, by the names that users give them.
const (
	protoQ, proto8021q   = "802.1q", 0x8100
	protoAD, proto8021ad = "802.1ad", 0x88a8
)

// linkStates are the names of a VF's link state, by the kernel's number.
var linkStates = [...]string{"auto", "enable", "disable"}

// validate refuses values that no device has.
func (s *Settings) validate() error {
	bad := func(name, format string, args ...any) error {
		return fmt.Errorf("setting %s: %s", name, fmt.Sprintf(format, args...))
	}
	if s.MAC != nil {
		if m, err := net.ParseMAC(*s.MAC); err != nil || len(m) != 6 || m[0]&1 != 0 || bytes.Equal(m, make([]byte, 6)) {
			return bad("mac", "%.40q is not the address of one interface, as 02:00:00:00:00:01", *s.MAC)
		}
	}
	if s.VLAN != nil && (*s.VLAN < 0 || *s.VLAN > maxVLAN) {
		return bad("vlan", "%d is not between 0 and %d", *s.VLAN, maxVLAN)
	}
	if s.VLANQoS != nil && (*s.VLANQoS < 0 || *s.VLANQoS > maxVLANQoS) {
		return bad("vlanQoS", "%d is not between 0 and %d", *s.VLANQoS, maxVLANQoS)
	}
	if s.VLANProto != nil && *s.VLANProto != protoQ && *s.VLANProto != protoAD {
		return bad("vlanProto", "%.40q is neither %s nor %s", *s.VLANProto, protoQ, protoAD)
	}
	if (s.VLANQoS != nil && *s.VLANQoS != 0 || s.VLANProto != nil && *s.VLANProto != protoQ) && (s.VLAN == nil || *s.VLAN == 0) {
		return bad("vlan", "is missing: vlanQoS and vlanProto belong to one")
	}
	for name, rate := range map[Setting]*int{SettingMinTxRate: s.MinTxRate, SettingMaxTxRate: s.MaxTxRate} {
		if rate != nil && *rate < 0 {
			return bad(string(name), "%d is negative", *rate)
		}
	}
	if s.MinTxRate != nil && s.MaxTxRate != nil && *s.MaxTxRate > 0 && *s.MinTxRate > *s.MaxTxRate {
		return bad(string(SettingMinTxRate), "%d is more than maxTxRate, %d", *s.MinTxRate, *s.MaxTxRate)
	}
	if s.LinkState != nil && !slices.Contains(linkStates[:], *s.LinkState) {
		return bad(string(SettingLinkState), "%.40q is none of auto, enable and disable", *s.LinkState)
	}
	if s.MTU != nil && (*s.MTU < minMTU || *s.MTU > maxMTU) {
		return bad("mtu", "%d is not between %d and %d", *s.MTU, minMTU, maxMTU)
	}
	for _, r := range s.Required {
		switch r {
		case SettingSpoofCheck, SettingTrust, SettingMinTxRate, SettingMaxTxRate, SettingLinkState:
		default:
			return bad("required", "%.40q is no setting that a device may lack", r)
		}
	}
	return nil
}

// pfSettings are the settings that a PF has made for its VF number n; nil if the PF does
// not report them.
func pfSettings(pf netlink.Link, n int) *PFSettings {
	vfs := pf.Attrs().Vfs
	i := slices.IndexFunc(vfs, func(v netlink.VfInfo) bool { return v.ID == n })
	if i < 0 {
		return nil
	}
	v := &vfs[i]
	p := &PFSettings{
		MAC: v.Mac.String(), VLAN: v.Vlan, VLANQoS: v.Qos, VLANProto: protoQ, SpoofCheck: v.Spoofchk, Trust: v.Trust == 1,
		MinTxRate: int(v.MinTxRate), MaxTxRate: int(v.MaxTxRate), LinkState: linkStates[0],
	}
	if v.VlanProto == proto8021ad || v.VlanProto == swap16(proto8021ad) { // the library reads it in either order
		p.VLANProto = protoAD
	}
	if int(v.LinkState) < len(linkStates) {
		p.LinkState = linkStates[v.LinkState]
	}
	return p
}

func swap16(n int) int { return n>>8 | n&0xff<<8 }

// A vfPort makes the settings of a VF through its PF.
type vfPort struct {
	h  *netlink.Handle
	pf netlink.Link
	vf int
}

func (p vfPort) setMAC(mac string) error {
	m, err := net.ParseMAC(mac)
	if err != nil {
		return err
	}
	return p.h.LinkSetVfHardwareAddr(p.pf, p.vf, m)
}

func (p vfPort) setVLAN(vlan, qos int, proto string) error {
	if proto == protoAD {
		return p.h.LinkSetVfVlanQosProto(p.pf, p.vf, vlan, qos, proto8021ad)
	}
	return p.h.LinkSetVfVlanQos(p.pf, p.vf, vlan, qos) // older drivers support only this request
}

func (p vfPort) setLinkState(name string) error {
	return p.h.LinkSetVfState(p.pf, p.vf, uint32(slices.Index(linkStates[:], name)))
}

// apply makes the settings of want, except trust. A setting that the device does not
// support and that is not required is removed from want, and reported as a warning.
func (p vfPort) apply(want *Settings, had PFSettings) ([]Warning, error) {
	if want.MAC != nil {
		if err := p.macTaken(*want.MAC); err != nil {
			return nil, err
		}
		if err := p.setMAC(*want.MAC); err != nil {
			return nil, fmt.Errorf("%w: set MAC of VF %d to %s by %s: %w", ErrSetting, p.vf, *want.MAC, p.pf.Attrs().Name, err)
		}
	}
	if want.VLAN != nil {
		qos, proto := value(want.VLANQoS, 0), value(want.VLANProto, protoQ)
		if err := p.setVLAN(*want.VLAN, qos, proto); err != nil {
			return nil, fmt.Errorf("%w: set VLAN of VF %d to %d, QoS %d, %s by %s: %w", ErrSetting, p.vf, *want.VLAN, qos, proto, p.pf.Attrs().Name, err)
		}
	}
	return p.applyOptional(want, had)
}

func (p vfPort) applyOptional(want *Settings, had PFSettings) ([]Warning, error) {
	var o optional
	o.required = want.Required
	try(&o, SettingSpoofCheck, &want.SpoofCheck, func(v bool) error { return p.h.LinkSetVfSpoofchk(p.pf, p.vf, v) })
	// The kernel has one call for both rates. The maximum is set first, so that a device
	// that supports no minimum gets it all the same.
	try(&o, SettingMaxTxRate, &want.MaxTxRate, func(v int) error { return p.h.LinkSetVfRate(p.pf, p.vf, min(had.MinTxRate, orMax(v)), v) })
	try(&o, SettingMinTxRate, &want.MinTxRate, func(v int) error {
		return p.h.LinkSetVfRate(p.pf, p.vf, v, value(want.MaxTxRate, had.MaxTxRate))
	})
	try(&o, SettingLinkState, &want.LinkState, p.setLinkState)
	return o.warnings, o.err
}

// applyTrust sets trust. It is called after the VF got its address.
func (p vfPort) applyTrust(want *Settings) ([]Warning, error) {
	o := optional{required: want.Required}
	try(&o, SettingTrust, &want.Trust, func(v bool) error { return p.h.LinkSetVfTrust(p.pf, p.vf, v) })
	return o.warnings, o.err
}

// orMax is a limit as a number that can be compared: 0, which means no limit, is the
// largest number.
func orMax(rate int) int {
	if rate == 0 {
		return int(^uint32(0) >> 1)
	}
	return rate
}

// optional collects the warnings and errors about settings that a device may not support.
type optional struct {
	required []Setting
	warnings []Warning
	err      error
}

// lacks notes that a setting was not made.
func (o *optional) lacks(s Setting, why error) {
	if slices.Contains(o.required, s) {
		o.err = errors.Join(o.err, fmt.Errorf("%w: %s, which is required: %w", ErrSetting, s, why))
		return
	}
	o.warnings = append(o.warnings, Warning{Setting: s, Text: fmt.Sprintf("setting %s was not made: %v", s, why)})
}

// try makes one setting. If the device does not support it, try sets *v to nil.
func try[T any](o *optional, s Setting, v **T, set func(T) error) {
	if *v == nil || o.err != nil {
		return
	}
	if err := set(**v); err != nil {
		o.lacks(s, fmt.Errorf("the driver refuses it: %w", err))
		*v = nil
	}
}

func value[T any](p *T, def T) T {
	if p == nil {
		return def
	}
	return *p
}

// macTaken returns an error if another VF of the same PF has the address.
func (p vfPort) macTaken(mac string) error {
	m, err := net.ParseMAC(mac)
	if err != nil {
		return err
	}
	for _, v := range p.pf.Attrs().Vfs {
		if v.ID != p.vf && bytes.Equal(v.Mac, m) {
			return fmt.Errorf("%w: set MAC of VF %d to %s: VF %d of %s has it: ask for another, or for none", ErrSetting, p.vf, mac, v.ID, p.pf.Attrs().Name)
		}
	}
	return nil
}

// restore restores the settings that were asked for to the values that the PF had set,
// except the MAC, see restoreAssignment. If the PF does not have the VF any more, there is
// nothing to restore.
func (p vfPort) restore(asked *Settings, had PFSettings) error {
	now := pfSettings(p.pf, p.vf)
	if now == nil {
		return nil
	}
	var errs []error
	back := func(name string, err error) {
		if err != nil {
			errs = append(errs, fmt.Errorf("bring back %s of VF %d by %s: %w", name, p.vf, p.pf.Attrs().Name, err))
		}
	}
	if asked.VLAN != nil && (now.VLAN != had.VLAN || now.VLANQoS != had.VLANQoS || now.VLANProto != had.VLANProto) {
		back("VLAN", p.setVLAN(had.VLAN, had.VLANQoS, had.VLANProto))
	}
	if asked.SpoofCheck != nil && now.SpoofCheck != had.SpoofCheck {
		back("spoof check", p.h.LinkSetVfSpoofchk(p.pf, p.vf, had.SpoofCheck))
	}
	if asked.Trust != nil && now.Trust != had.Trust {
		back("trust", p.h.LinkSetVfTrust(p.pf, p.vf, had.Trust))
	}
	if (asked.MinTxRate != nil || asked.MaxTxRate != nil) && (now.MinTxRate != had.MinTxRate || now.MaxTxRate != had.MaxTxRate) {
		back("rates", p.h.LinkSetVfRate(p.pf, p.vf, had.MinTxRate, had.MaxTxRate))
	}
	if asked.LinkState != nil && now.LinkState != had.LinkState {
		back("link state", p.setLinkState(had.LinkState))
	}
	return errors.Join(errs...)
}

// reset sets the defaults of a new VF. It is for a lost journal, when the original
// settings are not known: the pod's VLAN or trust must not stay.
func (p vfPort) reset() error {
	all := Settings{VLAN: new(int), SpoofCheck: new(bool), Trust: new(bool), MaxTxRate: new(int), LinkState: new(string)}
	return p.restore(&all, PFSettings{VLANProto: protoQ, SpoofCheck: true, LinkState: linkStates[0]})
}

// noVF removes the settings from want that only a VF has, and reports them as warnings.
func noVF(want *Settings) ([]Warning, error) {
	if want.VLAN != nil {
		return nil, fmt.Errorf("%w: vlan: the device is not a VF and has no port VLAN: use a VLAN interface of the host's", ErrSetting)
	}
	none := errors.New("the device is not a VF")
	o := optional{required: want.Required}
	try(&o, SettingSpoofCheck, &want.SpoofCheck, func(bool) error { return none })
	try(&o, SettingTrust, &want.Trust, func(bool) error { return none })
	try(&o, SettingMaxTxRate, &want.MaxTxRate, func(int) error { return none })
	try(&o, SettingMinTxRate, &want.MinTxRate, func(int) error { return none })
	try(&o, SettingLinkState, &want.LinkState, func(string) error { return none })
	return o.warnings, o.err
}
