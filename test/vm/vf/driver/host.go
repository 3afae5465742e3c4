// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"

	"github.com/smcr-io/kube-smcr/test/vm/vf/report"
)

// ipamDir is where host-local remembers its addresses, if the configuration says
// so.
const ipamDir = "/run/ipam"

// maxLists bounds how often RDMA devices are listed until two lists agree.
const maxLists = 20

// host is the state of the machine.
func host(dataDir string) (report.Host, error) {
	h := report.Host{Links: map[string]report.Link{}, VFs: map[string]report.VF{}}
	links, err := netlink.LinkList()
	if err != nil {
		return h, fmt.Errorf("list links: %w", err)
	}
	for _, l := range links {
		a := l.Attrs()
		addrs, err := netlink.AddrList(l, netlink.FAMILY_ALL)
		if err != nil {
			return h, fmt.Errorf("list addresses of %s: %w", a.Name, err)
		}
		link := report.Link{Kind: l.Type(), MAC: a.HardwareAddr.String(), MTU: a.MTU, Up: a.Flags&net.FlagUp != 0, Alias: a.Alias, Addrs: []string{}}
		for _, addr := range addrs {
			if !addr.IP.IsLinkLocalUnicast() {
				link.Addrs = append(link.Addrs, addr.IPNet.String())
			}
		}
		h.Links[a.Name] = link
		for _, v := range a.Vfs {
			h.VFs[fmt.Sprintf("%s %d", a.Name, v.ID)] = report.VF{
				MAC: v.Mac.String(), Own: ownMAC(a.Name, v.ID), VLAN: v.Vlan, QoS: v.Qos, Proto: v.VlanProto, Spoofchk: v.Spoofchk, Trust: v.Trust != 0,
				LinkState: v.LinkState, MinRate: v.MinTxRate, MaxRate: v.MaxTxRate, Driver: driver(a.Name, v.ID),
			}
		}
	}
	if h.RDMA, err = rdma(); err != nil {
		return h, err
	}
	h.Files, err = files(dataDir, ipamDir)
	return h, err
}

// driver is the driver of a VF.
func driver(pf string, vf int) string {
	to, err := os.Readlink(fmt.Sprintf("/sys/class/net/%s/device/virtfn%d/driver", pf, vf))
	if err != nil {
		return ""
	}
	return filepath.Base(to)
}

// ownMAC returns the MAC address of a VF's interface, "" if the interface is not here.
func ownMAC(pf string, vf int) string {
	found, err := filepath.Glob(fmt.Sprintf("/sys/class/net/%s/device/virtfn%d/net/*/address", pf, vf))
	if err != nil || len(found) == 0 {
		return ""
	}
	mac, err := os.ReadFile(found[0])
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(mac))
}

// rdma are the RDMA devices, by the tool of the distribution. It leaves one out when
// another goes meanwhile: what it says twice is right.
func rdma() (map[string]string, error) {
	var out, last []byte
	for try := range maxLists {
		var err error
		if out, err = exec.Command("rdma", "-j", "link").Output(); err != nil {
			return nil, fmt.Errorf("list RDMA devices: %w", err)
		}
		if try > 0 && bytes.Equal(out, last) {
			break
		}
		last = out
	}
	var devices []struct {
		Name   string `json:"ifname"`
		NetDev string `json:"netdev"`
	}
	if err := json.Unmarshal(out, &devices); err != nil && len(strings.TrimSpace(string(out))) > 0 {
		return nil, fmt.Errorf("list RDMA devices: %w", err)
	}
	of := map[string]string{}
	for _, d := range devices {
		of[d.Name] = d.NetDev
	}
	return of, nil
}

// files returns the files below directories, without locks and sockets, and without what
// does not depend on pods: what the machine can do, and what host-local remembers
// of the past.
func files(dirs ...string) ([]string, error) {
	found := []string{}
	for _, dir := range dirs {
		err := filepath.WalkDir(dir, func(name string, d fs.DirEntry, err error) error {
			if err != nil {
				if errors.Is(err, fs.ErrNotExist) {
					return nil
				}
				return err
			}
			switch base := d.Name(); {
			case !d.Type().IsRegular(), strings.HasSuffix(base, ".lock"), base == "lock":
			case base == "capabilities", strings.HasPrefix(base, "last_reserved_ip"):
			default:
				found = append(found, name)
			}
			return nil
		})
		if err != nil {
			return nil, fmt.Errorf("list files: %w", err)
		}
	}
	slices.Sort(found)
	return found, nil
}
