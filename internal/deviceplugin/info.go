// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// infoVersion is the version of the Device Information Specification that files
// are written in.
const infoVersion = "1.1.0"

// info is a device information file of a device plugin, as Multus and smcr-cni
// read it (Device Information Specification 1.1.0, section 3). There is no type
// for RDMA devices that are not PCI, so they have no file.
type info struct {
	Type    string  `json:"type"`
	Version string  `json:"version"`
	PCI     pciInfo `json:"pci"`
}

// pciInfo is section 3.1.3.
type pciInfo struct {
	Address string `json:"pci-address"`
	PF      string `json:"pf-pci-address,omitempty"`
	RDMA    string `json:"rdma-device,omitempty"`
}

// infoPath is the file of a device (section 4.1).
func infoPath(dir, resource, id string) string {
	return filepath.Join(dir, strings.ReplaceAll(resource+"-"+id+"-device.json", "/", "-"))
}

// isPCIAddress says whether s is a PCI address: domain, bus, device, function.
func isPCIAddress(s string) bool {
	const form = "hhhh:hh:hh.h"
	if len(s) != len(form) {
		return false
	}
	for i, c := range []byte(strings.ToLower(s)) {
		if hex := '0' <= c && c <= '9' || 'a' <= c && c <= 'f'; form[i] == 'h' && !hex || form[i] != 'h' && c != form[i] {
			return false
		}
	}
	return true
}

// writeInfo writes the file of a VF, or replaces it.
func writeInfo(dir, resource string, d Device) error {
	b, err := json.Marshal(info{Type: "pci", Version: infoVersion, PCI: pciInfo{Address: d.ID, PF: d.PF, RDMA: d.RDMA}})
	if err != nil {
		return fmt.Errorf("device information of %s: %w", d.ID, err)
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("directory of device information: %w", err)
	}
	path := infoPath(dir, resource, d.ID)
	f, err := os.CreateTemp(dir, ".smcr-*")
	if err != nil {
		return fmt.Errorf("device information of %s: %w", d.ID, err)
	}
	_, err = f.Write(b)
	if err = errors.Join(err, f.Chmod(0o644), f.Close()); err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		_ = os.Remove(f.Name())
		return fmt.Errorf("device information of %s: %w", d.ID, err)
	}
	return nil
}

// removeInfos removes the files of a resource but those of the IDs in keep.
func removeInfos(dir, resource string, keep func(id string) bool) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("directory of device information: %w", err)
	}
	prefix := strings.ReplaceAll(resource, "/", "-") + "-"
	var errs []error
	for i, e := range entries {
		id, ok := strings.CutPrefix(e.Name(), prefix)
		id, isInfo := strings.CutSuffix(id, "-device.json")
		if i >= maxInfoFiles || !ok || !isInfo || keep(id) {
			continue
		}
		if err := os.Remove(filepath.Join(dir, e.Name())); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}
