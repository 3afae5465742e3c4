// SPDX-License-Identifier: Apache-2.0

package vf

import "github.com/smcr-io/kube-smcr/internal/records"

// Mode is a way of wiring.
type Mode string

// Modes.
const (
	ModeAuto   Mode = ""       // the first of the two that works
	ModeMove   Mode = "move"   // the interface goes into the pod
	ModeIPVlan Mode = "ipvlan" // the interface stays; the pod gets an ipvlan child of it
)

// Setting names a setting of a device.
type Setting string

// Settings that not every driver supports. MAC, VLAN and MTU are not among them: they are
// always required, because a pod in the wrong network is worse than a pod that does not
// start.
const (
	SettingSpoofCheck Setting = "spoofchk"
	SettingTrust      Setting = "trust"
	SettingMinTxRate  Setting = "minTxRate"
	SettingMaxTxRate  Setting = "maxTxRate"
	SettingLinkState  Setting = "linkState"
)

// Settings are the settings of a device. A setting that is nil is not changed.
type Settings struct {
	MAC *string `json:"mac,omitempty"`
	// VLAN is the port VLAN, 0 for none. VLANQoS (0 to 7) and VLANProto
	// ("802.1q" or "802.1ad") go with it.
	VLAN       *int    `json:"vlan,omitempty"`
	VLANQoS    *int    `json:"vlanQoS,omitempty"`
	VLANProto  *string `json:"vlanProto,omitempty"`
	SpoofCheck *bool   `json:"spoofchk,omitempty"`
	Trust      *bool   `json:"trust,omitempty"`
	// MinTxRate and MaxTxRate are in Mbit/s, 0 is no limit.
	MinTxRate *int `json:"minTxRate,omitempty"`
	MaxTxRate *int `json:"maxTxRate,omitempty"`
	// LinkState is "auto", "enable" or "disable".
	LinkState *string `json:"linkState,omitempty"`
	MTU       *int    `json:"mtu,omitempty"`
	// Required are the settings that make Attach fail if the driver does not support
	// them. For others Attach returns a Warning.
	Required []Setting `json:"required,omitempty"`
}

// Request asks for a device.
type Request struct {
	Device      string // its ID
	ContainerID string
	IfName      string // of the attachment
	Network     string // name of the CNI network
	// PodIfName is the interface's name in the pod; "" is IfName.
	PodIfName string
	NetNSPath string // of the pod
	Pod       records.Pod
	Mode      Mode
	Settings  Settings
}

// RDMADevice is an RDMA device that a pod has.
type RDMADevice struct {
	Name string `json:"name"`
	// NetNS is the path of the network namespace that the device is in; "" is the host's.
	// A software device is opened from the host, also one that was made in a pod.
	NetNS string `json:"netns,omitempty"`
	// GIDNetDev is the interface whose GIDs are to be used. The table may also have GIDs
	// of an ipvlan child, which carry no traffic.
	GIDNetDev string `json:"gidNetDev"`
	Soft      string `json:"soft,omitempty"` // "rxe" or "siw", "" for hardware
}

// Warning says what Attach was asked for and could not do.
type Warning struct {
	Setting Setting `json:"setting,omitempty"`
	Text    string  `json:"text"`
}

// Wiring is the result of an Attach.
type Wiring struct {
	Device Device       `json:"device"` // as it was before
	Owner  Owner        `json:"owner"`
	Mode   Mode         `json:"mode"`
	IfName string       `json:"ifName"`
	MAC    string       `json:"mac"`
	MTU    int          `json:"mtu"`
	RDMA   []RDMADevice `json:"rdma,omitempty"`
	// Settings are the settings that were made, without those that Warnings are about.
	Settings Settings  `json:"settings"`
	Warnings []Warning `json:"warnings,omitempty"`
	// Original is the state that Detach restores.
	Original Original `json:"original"`
}

// Original is the state of a device before it was given away.
type Original struct {
	Name      string      `json:"name"`
	MAC       string      `json:"mac"`
	MTU       int         `json:"mtu"`
	Up        bool        `json:"up"`
	Alias     string      `json:"alias,omitempty"`
	Addresses []string    `json:"addresses,omitempty"`
	RDMA      []string    `json:"rdma,omitempty"`
	Parent    string      `json:"parent,omitempty"` // the device of hardware of the interface, as in "virtio3"
	Traits    *Traits     `json:"traits,omitempty"` // nil: not known
	PF        *PFSettings `json:"pf,omitempty"`     // the PF's settings for the VF
}

// PFSettings are what a PF sets for a VF.
type PFSettings struct {
	MAC        string `json:"mac"`
	VLAN       int    `json:"vlan"`
	VLANQoS    int    `json:"vlanQoS"`
	VLANProto  string `json:"vlanProto"`
	SpoofCheck bool   `json:"spoofchk"`
	Trust      bool   `json:"trust"`
	MinTxRate  int    `json:"minTxRate"`
	MaxTxRate  int    `json:"maxTxRate"`
	LinkState  string `json:"linkState"`
}

// Detachment says which device of which attachment is to be brought back.
type Detachment struct {
	ContainerID string
	IfName      string
	Device      string // its ID; "" is all that the attachment has
	// NetNSPath is the path of the pod's network namespace, if it still exists. It is
	// needed only when the journal is lost.
	NetNSPath string
}
