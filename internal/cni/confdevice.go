// SPDX-License-Identifier: Apache-2.0

package cni

import (
	"bytes"
	"encoding/json"
	"errors"
	"net"
	"path/filepath"
	"slices"
	"strings"

	"github.com/smcr-io/kube-smcr/internal/devices/vf"
)

// DeviceConf is the part of the configuration that is about a device for the
// pod. Its names and ranges are those of the plugin sriov, so that
// configurations carry over.
type DeviceConf struct {
	// DeviceID is the device: a PCI address, or the name that the interface of
	// an RDMA device that is not PCI has on the host. A device plugin that lets
	// pods share a device appends a slash and a number.
	DeviceID string `json:"deviceID"`
	// MAC, VLAN, VLANQoS and VLANProto are what the PF sets for the VF.
	MAC       string  `json:"mac"`
	VLAN      *int    `json:"vlan"`
	VLANQoS   *int    `json:"vlanQoS"`
	VLANProto *string `json:"vlanProto"`
	// SpoofCheck and Trust are "on" or "off"; empty leaves the VF as it is.
	SpoofCheck string `json:"spoofchk"`
	Trust      string `json:"trust"`
	// LinkState is "auto", "enable" or "disable".
	LinkState string `json:"link_state"`
	// MinTxRate and MaxTxRate are in Mbit/s; 0 is no limit.
	MinTxRate *int `json:"min_tx_rate"`
	MaxTxRate *int `json:"max_tx_rate"`
	// MTU of the interface; 0 leaves it as it is.
	MTU int `json:"mtu"`
	// Mode is "auto" (default), "move" or "ipvlan": see package vf.
	Mode string `json:"mode"`
	// RequiredSettings are the fields that make ADD fail if the driver does not support
	// the setting; others are left out with a warning. MAC, VLAN and MTU are always
	// required.
	RequiredSettings []string `json:"requiredSettings"`
	// PFNames are the PFs whose VFs this network uses, by interface or PCI address. ADD
	// refuses the VFs of other PFs, and STATUS fails when no VF is free.
	PFNames []string `json:"pfNames"`

	IPAM          IPAMConf      `json:"ipam"`
	RuntimeConfig RuntimeConfig `json:"runtimeConfig"`
}

// IPAMConf is what the plugin reads of the configuration of the IPAM plugin.
type IPAMConf struct {
	Type string `json:"type"`
}

// RuntimeConfig is what the plugin reads of what a runtime says about one pod.
type RuntimeConfig struct {
	DeviceID          string `json:"deviceID"`
	MAC               string `json:"mac"`
	CNIDeviceInfoFile string `json:"CNIDeviceInfoFile"`
}

// UnmarshalJSON reads an IPAM configuration. If it is not a JSON object, other programs may have put it
// there, and it counts as none.
func (c *IPAMConf) UnmarshalJSON(b []byte) error {
	type plain IPAMConf
	if !bytes.HasPrefix(bytes.TrimSpace(b), []byte("{")) {
		return nil
	}
	return json.Unmarshal(b, (*plain)(c))
}

// deviceID is the device that this pod is to get, and whether other pods get
// it too.
func (c DeviceConf) deviceID() (id string, shared bool) {
	id = c.DeviceID
	if c.RuntimeConfig.DeviceID != "" {
		id = c.RuntimeConfig.DeviceID
	}
	id, _, shared = strings.Cut(id, "/")
	return id, shared
}

// former is the part that DEL and GC need, see [NetConf.former].
func (c DeviceConf) former() DeviceConf {
	f := DeviceConf{DeviceID: c.DeviceID, IPAM: c.IPAM, RuntimeConfig: RuntimeConfig{
		DeviceID: c.RuntimeConfig.DeviceID, CNIDeviceInfoFile: c.RuntimeConfig.CNIDeviceInfoFile,
	}}
	if f.checkDeviceID() != nil { // ADD has given no such device to a pod
		f.DeviceID, f.RuntimeConfig.DeviceID = "", ""
	}
	return f
}

func (c DeviceConf) mac() (field, mac string) {
	if c.RuntimeConfig.MAC != "" {
		return "runtimeConfig.mac", c.RuntimeConfig.MAC
	}
	return "mac", c.MAC
}

// settings are what is asked of the device.
func (c DeviceConf) settings() vf.Settings {
	s := vf.Settings{
		VLAN: c.VLAN, VLANQoS: c.VLANQoS, SpoofCheck: onOff(c.SpoofCheck), Trust: onOff(c.Trust),
		MinTxRate: c.MinTxRate, MaxTxRate: c.MaxTxRate,
	}
	if _, mac := c.mac(); mac != "" {
		if hw, err := net.ParseMAC(mac); err == nil { // no error: validate parsed it before
			mac = hw.String()
		}
		s.MAC = &mac
	}
	if c.VLANProto != nil {
		proto := strings.ToLower(*c.VLANProto)
		s.VLANProto = &proto
	}
	if c.LinkState != "" {
		s.LinkState = &c.LinkState
	}
	if c.MTU != 0 {
		s.MTU = &c.MTU
	}
	for _, name := range c.RequiredSettings {
		s.Required = append(s.Required, settingOf(name))
	}
	return s
}

func onOff(v string) *bool {
	if v == "" {
		return nil
	}
	on := v == "on"
	return &on
}

// settingOf is the setting that a field of the configuration is about, if it is one that
// a driver may not support; else "".
func settingOf(field string) vf.Setting {
	switch field {
	case "spoofchk":
		return vf.SettingSpoofCheck
	case "trust":
		return vf.SettingTrust
	case "min_tx_rate":
		return vf.SettingMinTxRate
	case "max_tx_rate":
		return vf.SettingMaxTxRate
	case "link_state":
		return vf.SettingLinkState
	}
	return ""
}

// firstSetting is the first field that is set and that has a meaning only for an
// interface that this plugin makes; "" if there is none.
func (c DeviceConf) firstSetting() string {
	for _, f := range []struct {
		name string
		set  bool
	}{
		{"mac", c.MAC != ""},
		{"vlan", c.VLAN != nil},
		{"spoofchk", c.SpoofCheck != ""},
		{"trust", c.Trust != ""},
		{"link_state", c.LinkState != ""},
		{"min_tx_rate", c.MinTxRate != nil},
		{"max_tx_rate", c.MaxTxRate != nil},
		{"mtu", c.MTU != 0},
		{"mode", c.Mode != ""},
		{"ipam", c.IPAM.Type != ""},
	} {
		if f.set {
			return f.name
		}
	}
	return ""
}

func (c DeviceConf) mode() vf.Mode {
	if c.Mode == "auto" {
		return vf.ModeAuto
	}
	return vf.Mode(c.Mode)
}

// The values of fields that have a fixed set of them.
var (
	onOffValues     = [...]string{"", "on", "off"}
	linkStateValues = [...]string{"", "auto", "enable", "disable"}
	modeValues      = [...]string{"", "auto", "move", "ipvlan"}
	protoValues     = [...]string{"802.1q", "802.1ad"}
)

func (c DeviceConf) validate() error {
	for _, f := range []struct {
		name, value string
		allowed     []string
	}{
		{"spoofchk", c.SpoofCheck, onOffValues[:]},
		{"trust", c.Trust, onOffValues[:]},
		{"link_state", c.LinkState, linkStateValues[:]},
		{"mode", c.Mode, modeValues[:]},
	} {
		if !slices.Contains(f.allowed, f.value) {
			return confError(f.name, "is %q, must be one of %s", f.value, strings.Join(f.allowed[1:], ", "))
		}
	}
	if err := c.checkVLAN(); err != nil {
		return err
	}
	switch least, most := c.MinTxRate, c.MaxTxRate; {
	case least != nil && *least < 0:
		return confError("min_tx_rate", "is %d, must be 0 (no limit) or Mbit/s", *least)
	case most != nil && *most < 0:
		return confError("max_tx_rate", "is %d, must be 0 (no limit) or Mbit/s", *most)
	case least != nil && most != nil && *most != 0 && *least > *most:
		return confError("min_tx_rate", "is %d, more than max_tx_rate, which is %d", *least, *most)
	case c.MTU != 0 && (c.MTU < minMTU || c.MTU > maxMTU):
		return confError("mtu", "is %d, must be between %d and %d", c.MTU, minMTU, maxMTU)
	case len(c.PFNames) > maxPFs:
		return confError("pfNames", "has %d names, at most %d are allowed", len(c.PFNames), maxPFs)
	}
	if field, mac := c.mac(); mac != "" {
		if err := checkMAC(mac); err != nil {
			return confError(field, "%q: %v", mac, err)
		}
	}
	for _, name := range c.RequiredSettings {
		if settingOf(name) == "" {
			return confError("requiredSettings", "has %q; what a driver may lack are spoofchk, trust, min_tx_rate, max_tx_rate and link_state", name)
		}
	}
	if f := c.RuntimeConfig.CNIDeviceInfoFile; f != "" && !filepath.IsAbs(f) {
		return confError("runtimeConfig.CNIDeviceInfoFile", "%q is not an absolute path", f)
	}
	return c.checkDeviceID()
}

func (c DeviceConf) checkVLAN() error {
	switch {
	case c.VLAN == nil && c.VLANQoS != nil:
		return confError("vlanQoS", "needs vlan")
	case c.VLAN == nil && c.VLANProto != nil:
		return confError("vlanProto", "needs vlan")
	case c.VLAN == nil:
		return nil
	case *c.VLAN < 0 || *c.VLAN > maxVLAN:
		return confError("vlan", "is %d, must be between 0 (none) and %d", *c.VLAN, maxVLAN)
	}
	if q := c.VLANQoS; q != nil {
		switch {
		case *q < 0 || *q > maxVLANQoS:
			return confError("vlanQoS", "is %d, must be between 0 and %d", *q, maxVLANQoS)
		case *q != 0 && *c.VLAN == 0:
			return confError("vlanQoS", "needs a vlan other than 0")
		}
	}
	if p := c.VLANProto; p != nil {
		switch proto := strings.ToLower(*p); {
		case !slices.Contains(protoValues[:], proto):
			return confError("vlanProto", "is %q, must be one of %s", *p, strings.Join(protoValues[:], ", "))
		case proto == protoValues[1] && *c.VLAN == 0:
			return confError("vlanProto", "%s needs a vlan other than 0", *p)
		}
	}
	return nil
}

// checkDeviceID refuses a deviceID that is neither a PCI address nor the name of a
// device: the ID becomes part of file names.
func (c DeviceConf) checkDeviceID() error {
	id, _ := c.deviceID()
	switch {
	case id == "" && (c.DeviceID != "" || c.RuntimeConfig.DeviceID != ""), id == ".", id == "..":
		return confError("deviceID", "%q is no device", id)
	case len(id) > maxDeviceID:
		return confError("deviceID", "has %d bytes, at most %d are allowed", len(id), maxDeviceID)
	case strings.ContainsFunc(id, func(r rune) bool { return r <= ' ' || r > '~' }):
		return confError("deviceID", "%q is neither a PCI address as in 0000:01:10.2 nor the name of an interface", id)
	}
	return nil
}

func checkMAC(s string) error {
	hw, err := net.ParseMAC(s)
	switch {
	case err != nil:
		return errors.New("is no MAC address")
	case len(hw) != 6:
		return errors.New("is not a MAC address of 6 bytes")
	case hw[0]&1 != 0:
		return errors.New("is a multicast address")
	case bytes.Equal(hw, make([]byte, 6)):
		return errors.New("is the zero address")
	}
	return nil
}
