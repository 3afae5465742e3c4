// SPDX-License-Identifier: Apache-2.0

package config

import (
	"net/netip"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
)

// Node is the whole configuration of an agent. Nobody changes it after [Parse].
type Node struct {
	// Name is the node's name in records and answers.
	Name string
	// Devices carry the links: 1 to 8, all of one kind.
	Devices []Device
	// NodeBudget bounds all pods together, PodBudget each of them.
	NodeBudget, PodBudget Budget
	// RMBEBytes and SendBufferBytes are the buffers of one connection.
	RMBEBytes, SendBufferBytes int
	// Versions are the versions of SMC-R that may be used. EIDs are the
	// enterprise IDs of version 2, the preferred one first.
	Versions Versions
	EIDs     []clc.EID
	Dialects Dialects
	// AnyPrefix lets clients of other IP subnets in, where the RoCE fabric is
	// routed.
	AnyPrefix bool
	// DataDir holds the attachment records.
	DataDir string
	// APISocket is the path of the Unix socket of the JSON API.
	APISocket string
	// MetricsAddress serves Prometheus metrics; invalid means the API socket
	// only.
	MetricsAddress netip.AddrPort
	// RedirectTTL is how long a silent agent's diversions stay in force.
	RedirectTTL time.Duration
	// NegativeCacheTTL is how long a destination without SMC-R is not
	// diverted.
	NegativeCacheTTL time.Duration
	// DrainTimeout is how long a stopping agent waits for carried
	// connections before it resets them.
	DrainTimeout time.Duration
	// AnswerPoll is how long the agent looks for a program's answer before it
	// sleeps; 0: not at all.
	AnswerPoll time.Duration
	LogLevel   LogLevel
	Policies   []Policy
}

// Device is an RNIC that carries links: exactly one of its two kinds is set.
type Device struct {
	// SoftAddress is the local address of the software RoCEv2 device.
	SoftAddress netip.Addr
	// SoftMTU is its path MTU in bytes; 0 means the largest that fits the
	// interface.
	SoftMTU int
	// RDMA is the name of an RDMA device of the kernel.
	RDMA string
}

// Soft says whether the device is the software one.
func (d Device) Soft() bool { return d.RDMA == "" }

func (d Device) String() string {
	if d.Soft() {
		return d.SoftAddress.String()
	}
	return d.RDMA
}

// Budget bounds resources. Short of them a connection is plain TCP.
type Budget struct {
	MemoryBytes int
	Conns       int
}

// Versions says which versions of SMC-R may be used.
type Versions uint8

// Version choices.
const (
	VersionsBoth Versions = iota // version 2 where the peer can, else version 1
	VersionsV1
	VersionsV2
)

func (v Versions) String() string {
	switch v {
	case VersionsV1:
		return "v1"
	case VersionsV2:
		return "v2"
	case VersionsBoth:
	}
	return "both"
}

// Dialects says which dialects of the wire protocol may be used.
type Dialects uint8

// Dialect choices.
const (
	DialectsBoth  Dialects = iota // ask for Linux's, accept either
	DialectsLinux                 // Linux's only
)

func (d Dialects) String() string {
	if d == DialectsLinux {
		return "linux"
	}
	return "both"
}

// LogLevel is the least severe level that is logged.
type LogLevel uint8

// Log levels.
const (
	LogInfo LogLevel = iota
	LogDebug
	LogWarn
	LogError
)

func (l LogLevel) String() string {
	switch l {
	case LogDebug:
		return "debug"
	case LogWarn:
		return "warn"
	case LogError:
		return "error"
	case LogInfo:
	}
	return "info"
}

// Mode says what happens to a selected connection that cannot use SMC-R.
type Mode uint8

// Modes.
const (
	ModePrefer   Mode = iota // it is plain TCP
	ModeRequired             // it is reset
)

func (m Mode) String() string {
	if m == ModeRequired {
		return "Required"
	}
	return "Prefer"
}

// Policy selects connections, of both directions, that are to use SMC-R.
type Policy struct {
	Name string
	Mode Mode
	Pods PodSelector
	// Peers are the addresses of the other side; empty means all.
	Peers []netip.Prefix
	// Except are taken out of Peers.
	Except []netip.Prefix
	// Ports are the ports of the service, whichever side it is on; empty means
	// all.
	Ports []PortRange
}

// PodSelector selects pods; an empty list selects all. Entries are names in
// which * stands for any run of characters.
type PodSelector struct {
	Namespaces []string
	Names      []string
	Interfaces []string
}

// PortRange is an inclusive range of TCP ports.
type PortRange struct {
	First, Last uint16
}

// Contains says whether p lies in the range.
func (r PortRange) Contains(p uint16) bool { return r.First <= p && p <= r.Last }

// Pod identifies the pod's side of a connection.
type Pod struct {
	Namespace string
	Name      string
	Interface string // of the attachment, in the pod
}

func (p Pod) String() string { return p.Namespace + "/" + p.Name }
