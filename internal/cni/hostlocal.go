// SPDX-License-Identifier: Apache-2.0

package cni

import (
	"encoding/json"
	"net/netip"
	"path/filepath"
	"strings"

	"github.com/containernetworking/cni/pkg/skel"

	"github.com/smcr-io/kube-smcr/internal/records"
)

// hostLocal is the IPAM plugin that keeps the addresses that it gave in a directory of the node, which
// outlasts a reboot. There is a file for each address, whose name is the address, and which has the
// container and the name of the interface. hostLocalDir has a directory for each network; ipam.dataDir
// may name another place.
const (
	hostLocal    = "host-local"
	hostLocalDir = "/var/lib/cni/networks"
)

// keptNames are the names of the interfaces for which host-local keeps addresses of the pod. Other IPAM
// plugins do not show what they keep: they would have to be executed once for every name that a
// claimed device may have, at the DEL of each pod. The error says that the names cannot be known just
// now.
func (p Plugin) keptNames(c NetConf, args *skel.CmdArgs) ([]string, error) {
	if c.IPAM.Type != hostLocal || args.IfName != podInterface {
		return nil, nil
	}
	dir := c.hostLocalDir()
	files, err := dir.Names()
	var out []string
	for _, name := range files {
		if _, err := netip.ParseAddr(name); err != nil {
			continue // a lock, or which address was the last
		}
		b, rerr := dir.Read(name)
		if records.IsShortage(rerr) {
			err = rerr
			break
		}
		id, ifName, _ := strings.Cut(string(b), "\n")
		ifName = strings.TrimSpace(ifName)
		if rerr == nil && strings.TrimSpace(id) == args.ContainerID && validKey(args.ContainerID, ifName) {
			out = append(out, ifName)
		}
	}
	switch {
	case records.IsShortage(err):
		return out, unknownAddresses(err)
	case err != nil:
		p.tell("DEL goes on without what host-local keeps: %v", err)
	}
	return out, nil
}

// hostLocalDir is where host-local keeps the addresses of the network.
func (c NetConf) hostLocalDir() records.Dir {
	var f struct {
		IPAM struct {
			DataDir string `json:"dataDir"`
		} `json:"ipam"`
	}
	dir := hostLocalDir
	if json.Unmarshal(c.raw, &f) == nil && f.IPAM.DataDir != "" {
		dir = f.IPAM.DataDir
	}
	return records.Dir{Path: filepath.Join(dir, c.Name), MaxBytes: maxKeptBytes, MaxFiles: maxRecords}
}
