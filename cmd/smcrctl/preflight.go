// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/linux"
	"github.com/smcr-io/kube-smcr/pkg/smcr/synopt"
)

type result string

const (
	resultOK   result = "OK"
	resultWarn result = "WARN"
	resultFail result = "FAIL"
)

// check is one line of the report.
type check struct {
	Name   string `json:"name"`
	Result result `json:"result"`
	Detail string `json:"detail,omitempty"`
	Advice string `json:"advice,omitempty"` // what to do
}

type report struct {
	APIVersion string  `json:"apiVersion"`
	Worst      result  `json:"worst"`
	Checks     []check `json:"checks"`
}

// machine is what preflight looks at; tests have another one.
type machine struct {
	sysfs, proc string
	uid         int
	release     func() (string, error)
	option      func() error
	netns       func() error
	nftables    func() error
	tproxy      func() error
	transparent func() error
	sysctl      func() error
	roceSocket  func(context.Context) error
}

// rocePort is the UDP port of RoCEv2.
const rocePort = 4791

// The oldest kernel that has what the TCP option program needs.
const oldestMajor, oldestMinor = 5, 10

func realMachine() machine {
	return machine{
		sysfs: "/sys", proc: "/proc", uid: os.Geteuid(),
		release: func() (string, error) {
			b, err := os.ReadFile("/proc/sys/kernel/osrelease")
			return strings.TrimSpace(string(b)), err
		},
		option: synopt.Probe, netns: linux.ProbeNetNS, nftables: linux.ProbeNftables, tproxy: linux.ProbeTProxy,
		transparent: linux.ProbeTransparent, sysctl: linux.ProbeSysctl,
		roceSocket: func(ctx context.Context) error {
			c, err := (&net.ListenConfig{}).ListenPacket(ctx, "udp", net.JoinHostPort("", strconv.Itoa(rocePort)))
			if err != nil {
				return err
			}
			return c.Close()
		},
	}
}

// examine makes all checks; one that fails hides no other.
func examine(ctx context.Context, m machine) report {
	r := report{APIVersion: agentapi.Version, Worst: resultOK}
	for _, c := range []check{
		m.kernel(), m.privileges(), m.cgroup(),
		m.feature("TCP option (eBPF sock_ops)", resultWarn, m.option, "everything stays plain TCP without it"),
		m.feature("network namespaces", resultFail, m.netns, ""),
		m.feature("nftables", resultFail, m.nftables, ""),
		m.feature("nftables tproxy", resultFail, m.tproxy, ""),
		m.feature("transparent sockets", resultFail, m.transparent, ""),
		m.feature("sysctl tcp_fwmark_accept", resultFail, m.sysctl, ""),
		m.rdma(), m.softRoCE(ctx),
	} {
		r.Checks = append(r.Checks, c)
		if c.Result == resultFail || c.Result == resultWarn && r.Worst == resultOK {
			r.Worst = c.Result
		}
	}
	return r
}

func (m machine) kernel() check {
	c := check{Name: "kernel", Result: resultOK}
	release, err := m.release()
	if err != nil {
		c.Result, c.Detail = resultWarn, err.Error()
		return c
	}
	c.Detail = "Linux " + release
	var have [2]int
	if _, err := fmt.Sscanf(release, "%d.%d", &have[0], &have[1]); err != nil {
		c.Result, c.Advice = resultWarn, "the version is not understood; see the other checks"
	} else if have[0] < oldestMajor || have[0] == oldestMajor && have[1] < oldestMinor {
		c.Result, c.Advice = resultWarn, fmt.Sprintf("use Linux %d.%d or later: older ones cannot write the TCP option", oldestMajor, oldestMinor)
	}
	return c
}

func (m machine) privileges() check {
	if m.uid != 0 {
		return check{
			Name: "privileges", Result: resultFail, Detail: fmt.Sprintf("user id %d", m.uid),
			Advice: "run as root: the agent needs CAP_NET_ADMIN, CAP_SYS_ADMIN and CAP_BPF, and the checks below need them too",
		}
	}
	return check{Name: "privileges", Result: resultOK, Detail: "root"}
}

func (m machine) cgroup() check {
	c := check{Name: "cgroup v2", Result: resultOK}
	b, err := os.ReadFile(filepath.Join(m.proc, "self/cgroup"))
	if err != nil {
		c.Result, c.Detail = resultWarn, err.Error()
		return c
	}
	for line := range strings.Lines(string(b)) {
		if p, ok := strings.CutPrefix(line, "0::"); ok {
			c.Detail = strings.TrimSpace(p)
			return c
		}
	}
	c.Result, c.Detail = resultWarn, "this process is in no cgroup v2"
	c.Advice = "mount cgroup2 (boot with systemd.unified_cgroup_hierarchy=1): the TCP option program is attached to it"
	return c
}

// feature reports a probe.
func (machine) feature(name string, bad result, probe func() error, advice string) check {
	c := check{Name: name, Result: resultOK}
	err := probe()
	if err == nil {
		return c
	}
	c.Result, c.Detail, c.Advice = bad, err.Error(), advice
	var fe *linux.FeatureError
	var ue *synopt.UnsupportedError
	switch {
	case errors.As(err, &fe):
		c.Detail, c.Advice = fmt.Sprintf("%s: %v", fe.Feature, fe.Err), fe.Remedy
	case errors.As(err, &ue):
		c.Detail, c.Advice = fmt.Sprintf("%s: %v", ue.What, ue.Err), "needs "+ue.Need+"; "+advice
	}
	return c
}

// rdma lists the kernel's RDMA devices. None is no failure: the software
// device needs none.
func (m machine) rdma() check {
	c := check{Name: "RDMA devices", Result: resultOK}
	dir := filepath.Join(m.sysfs, "class/infiniband")
	devs, err := os.ReadDir(dir)
	if errors.Is(err, os.ErrNotExist) || err == nil && len(devs) == 0 {
		c.Result, c.Detail = resultWarn, "none"
		c.Advice = "use the software device (soft in node.devices), or install the RNIC's driver and check rdma link"
		return c
	}
	if err != nil {
		c.Result, c.Detail = resultWarn, err.Error()
		return c
	}
	var texts []string
	active := false
	for _, d := range devs {
		b, err := os.ReadFile(filepath.Join(dir, d.Name(), "ports/1/state"))
		state := strings.TrimSpace(string(b))
		if err != nil {
			state = "state not readable"
		}
		active = active || strings.Contains(state, "ACTIVE")
		texts = append(texts, fmt.Sprintf("%s (%s)", d.Name(), state))
	}
	c.Detail = strings.Join(texts, ", ")
	if !active {
		c.Result, c.Advice = resultWarn, "no port is active: bring its network interface up and give it an address"
	}
	return c
}

func (m machine) softRoCE(ctx context.Context) check {
	c := check{Name: "software RoCE", Result: resultOK, Detail: fmt.Sprintf("UDP port %d is free", rocePort)}
	err := m.roceSocket(ctx)
	switch {
	case err == nil:
	case errors.Is(err, syscall.EADDRINUSE):
		c.Result, c.Detail = resultWarn, fmt.Sprintf("UDP port %d is in use", rocePort)
		c.Advice = "fine if the agent runs; otherwise the kernel's rxe module has it: remove it (rdma link del) or use another address"
	default:
		c.Result, c.Detail = resultWarn, err.Error()
	}
	return c
}

func printReport(w io.Writer, r report) error {
	rows := []string{row("CHECK", "RESULT", "DETAIL")}
	for _, c := range r.Checks {
		rows = append(rows, row(c.Name, c.Result, strings.ReplaceAll(c.Detail, "\n", "; ")))
		if c.Advice != "" {
			rows = append(rows, "\t\t-> "+c.Advice)
		}
	}
	return table(w, rows...)
}
