// SPDX-License-Identifier: Apache-2.0

package report

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// A Call is one call of a chain of CNI plugins.
type Call struct {
	Command string          `json:"command"`
	Seconds float64         `json:"seconds"`
	Result  json.RawMessage `json:"result,omitempty"` // of ADD
	Error   *Error          `json:"error,omitempty"`
}

// An Error is a plugin's.
type Error struct {
	Code    uint   `json:"code"` // 0 if the plugin did not say one, because it was killed
	Msg     string `json:"msg"`
	Details string `json:"details,omitempty"`
}

func (e *Error) Error() string {
	s := fmt.Sprintf("CNI error %d: %s", e.Code, e.Msg)
	if e.Details != "" {
		s += ": " + e.Details
	}
	return s
}

// A Host is the state of a machine that plugins change and have to bring back.
type Host struct {
	// Links are by their names, VFs by the name of their PF and their numbers.
	Links map[string]Link `json:"links"`
	VFs   map[string]VF   `json:"vfs"`
	// RDMA are the RDMA devices with their network interfaces.
	RDMA map[string]string `json:"rdma"`
	// Files are what records and journals there are.
	Files []string `json:"files"`
}

// A Link is a network interface.
type Link struct {
	Kind  string   `json:"kind"`
	MAC   string   `json:"mac"`
	MTU   int      `json:"mtu"`
	Up    bool     `json:"up"`
	Alias string   `json:"alias"`
	Addrs []string `json:"addrs"` // without those that the kernel makes
}

// A VF is what a PF says of a virtual function. The kernel does not say which MAC
// the PF's administrator has set, and which the VF's driver chose.
type VF struct {
	MAC       string `json:"mac"`
	Own       string `json:"own"` // of its interface, if that is in the host
	VLAN      int    `json:"vlan"`
	QoS       int    `json:"qos"`
	Proto     int    `json:"proto"`
	Spoofchk  bool   `json:"spoofchk"`
	Trust     bool   `json:"trust"`
	LinkState uint32 `json:"linkState"`
	MinRate   uint32 `json:"minRate"`
	MaxRate   uint32 `json:"maxRate"`
	Driver    string `json:"driver"`
}

// noMAC is what a PF says that knows no MAC of a VF.
const noMAC = "00:00:00:00:00:00"

// sameVF compares what administrators set. A MAC that the driver chose is not among
// that: the PF says it once the driver has told it, which it does anew after each
// reset of the PF or its own, and none before. Interfaces are compared with theirs.
func sameVF(a, b VF) bool {
	for _, v := range []*VF{&a, &b} {
		if v.MAC == v.Own {
			v.MAC = noMAC
		}
		v.Own = ""
	}
	return a == b
}

// Differences say how another state of the machine differs from this one.
func (h Host) Differences(other Host) []string {
	var diffs []string
	diffs = append(diffs, differences("link", h.Links, other.Links, func(a, b Link) bool { return fmt.Sprint(a) == fmt.Sprint(b) })...)
	diffs = append(diffs, differences("VF", h.VFs, other.VFs, sameVF)...)
	diffs = append(diffs, differences("RDMA device", h.RDMA, other.RDMA, func(a, b string) bool { return a == b })...)
	if was, is := strings.Join(h.Files, " "), strings.Join(other.Files, " "); was != is {
		diffs = append(diffs, fmt.Sprintf("files were %q, are %q", was, is))
	}
	return diffs
}

func differences[T any](what string, was, is map[string]T, same func(a, b T) bool) []string {
	var diffs []string
	for _, name := range slices.Sorted(maps.Keys(was)) {
		now, ok := is[name]
		switch {
		case !ok:
			diffs = append(diffs, fmt.Sprintf("%s %s is gone", what, name))
		case !same(was[name], now):
			diffs = append(diffs, fmt.Sprintf("%s %s was %+v, is %+v", what, name, was[name], now))
		}
	}
	for _, name := range slices.Sorted(maps.Keys(is)) {
		if _, ok := was[name]; !ok {
			diffs = append(diffs, fmt.Sprintf("%s %s is new: %+v", what, name, is[name]))
		}
	}
	return diffs
}

// A Crash is what became of a plugin that was killed after one of its steps, and
// of the machine after the call that was to bring that back.
type Crash struct {
	After       int      `json:"after"` // that many steps
	Step        string   `json:"step"`
	Recovery    string   `json:"recovery"`        // what was to bring that back
	Error       string   `json:"error,omitempty"` // of the call that brings back
	Differences []string `json:"differences,omitempty"`
}

// A Churn is what many pods were.
type Churn struct {
	// Add and Del are the seconds that the calls took, in order.
	Add []float64 `json:"add"`
	Del []float64 `json:"del"`
	// Errors are what must not be.
	Errors      []string `json:"errors,omitempty"`
	Differences []string `json:"differences,omitempty"`
}

// Quantile is the smallest value that this part of the values does not exceed.
func Quantile(values []float64, q float64) float64 {
	if len(values) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(values))
	return sorted[min(len(sorted)-1, int(q*float64(len(sorted))))]
}
