// SPDX-License-Identifier: Apache-2.0

package vf

// Mode is a way of wiring.
type Mode string

// Modes.
const (
	ModeAuto   Mode = ""       // the first of the two that works
	ModeMove   Mode = "move"   // the interface goes into the pod
	ModeIPVlan Mode = "ipvlan" // it stays; the pod gets an ipvlan child
)

// Setting names a setting of a device.
type Setting string

// Settings that not every driver has. MAC, VLAN and MTU are not among them: a
// pod in the wrong network is worse than none, so these are always required.
const (
	SettingSpoofCheck Setting = "spoofchk"
	SettingTrust      Setting = "trust"
	SettingMinTxRate  Setting = "minTxRate"
	SettingMaxTxRate  Setting = "maxTxRate"
	SettingLinkState  Setting = "linkState"
)

// Settings are what the device is to be set to; what is nil is left alone.
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
	// Required are those whose lack makes Attach fail. Of the others it warns.
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
	Pod       Pod
	Mode      Mode
	Settings  Settings
}

// RDMADevice is an RDMA device that a pod has.
type RDMADevice struct {
	Name string `json:"name"`
	// NetNS is the path of the network namespace it is in; "" is the host's. A
	// device of software is opened from the host also if it is made in a pod.
	NetNS string `json:"netns,omitempty"`
	// GIDNetDev is the interface whose GIDs are to be used: of an ipvlan child's
	// GIDs, which are in the same table, none carries traffic.
	GIDNetDev string `json:"gidNetDev"`
	Soft      string `json:"soft,omitempty"` // "rxe" or "siw", "" for hardware
}

// Warning is what was asked for and is not so.
type Warning struct {
	Setting Setting `json:"setting,omitempty"`
	Text    string  `json:"text"`
}

// Wiring is what an attachment has.
type Wiring struct {
	Device Device       `json:"device"` // as it was found
	Owner  Owner        `json:"owner"`
	Mode   Mode         `json:"mode"`
	IfName string       `json:"ifName"`
	MAC    string       `json:"mac"`
	MTU    int          `json:"mtu"`
	RDMA   []RDMADevice `json:"rdma,omitempty"`
	// Settings are those that hold, without the ones that Warnings are about.
	Settings Settings  `json:"settings"`
	Warnings []Warning `json:"warnings,omitempty"`
	// Original is what Detach brings back.
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
	PF        *PFSettings `json:"pf,omitempty"` // what the PF had set for the VF
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

// Detachment says which attachment gives its device back.
type Detachment struct {
	ContainerID string
	IfName      string
	Device      string // its ID; "" is all that the attachment has
	// NetNSPath is the pod's, if it still has one. It is needed only when the
	// journal is lost.
	NetNSPath string
}
