// SPDX-License-Identifier: Apache-2.0

package cni

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
)

// defaultDevInfoDir is where device plugins put device-info files (Device
// Information Specification 1.1.0, §4.1).
const defaultDevInfoDir = "/var/run/k8s.cni.cncf.io/devinfo/dp"

const deviceInfoVersion = "1.1.0"

// A deviceInfo is what a device-info file says; kinds of devices other than
// PCI are read without their details.
type deviceInfo struct {
	Type    string   `json:"type"`
	Version string   `json:"version"`
	PCI     *pciInfo `json:"pci,omitempty"`
}

type pciInfo struct {
	Address   string `json:"pci-address"`
	RDMA      string `json:"rdma-device,omitempty"`
	PFAddress string `json:"pf-pci-address,omitempty"`
}

// rdma are the RDMA devices that the file names.
func (i deviceInfo) rdma() []string {
	if i.PCI == nil {
		return nil
	}
	return strings.FieldsFunc(i.PCI.RDMA, func(r rune) bool { return r == ',' || r == ' ' })
}

// readDeviceInfo returns what the device plugin said about a device: in the
// file that the runtime made for this attachment of it, or in the device
// plugin's own. Without any it says nothing. name is the file.
func readDeviceInfo(attachmentFile, dpDir, deviceID string) (info deviceInfo, name string, err error) {
	if attachmentFile != "" {
		info, err := readDeviceInfoFile(attachmentFile)
		if err == nil || !errors.Is(err, fs.ErrNotExist) {
			return info, attachmentFile, err
		}
	}
	// The file's name begins with the resource's, which the configuration does
	// not have.
	entries, err := os.ReadDir(dpDir)
	if errors.Is(err, fs.ErrNotExist) {
		return deviceInfo{}, "", nil
	}
	if err != nil {
		return deviceInfo{}, "", fmt.Errorf("read device-info files: %w", err)
	}
	for _, e := range entries {
		if strings.HasSuffix(e.Name(), "-"+deviceID+"-device.json") {
			name = filepath.Join(dpDir, e.Name())
			info, err = readDeviceInfoFile(name)
			return info, name, err
		}
	}
	return deviceInfo{}, "", nil
}

func readDeviceInfoFile(name string) (deviceInfo, error) {
	f, err := os.OpenFile(name, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return deviceInfo{}, fmt.Errorf("read device-info file: %w", err)
	}
	defer func() { _ = f.Close() }() // only read
	b, err := io.ReadAll(io.LimitReader(f, maxDeviceInfoBytes))
	if err != nil {
		return deviceInfo{}, fmt.Errorf("read device-info file: %w", err)
	}
	var info deviceInfo
	if err := json.Unmarshal(b, &info); err != nil {
		return deviceInfo{}, fmt.Errorf("parse device-info file %s: %w", name, err)
	}
	return info, nil
}

// writeDeviceInfo writes the attachment's device-info file. The format knows no
// RDMA device that is not PCI, so for those there is none.
func writeDeviceInfo(name string, d AttachedDevice) error {
	info := deviceInfo{
		Type: "pci", Version: deviceInfoVersion,
		PCI: &pciInfo{Address: d.PCI, RDMA: strings.Join(d.RDMA, ","), PFAddress: d.PFPCI},
	}
	b, err := json.Marshal(info)
	if err != nil {
		return fmt.Errorf("write device-info file: %w", err)
	}
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		return fmt.Errorf("write device-info file: %w", err)
	}
	f, err := os.CreateTemp(filepath.Dir(name), ".smcr-*")
	if err != nil {
		return fmt.Errorf("write device-info file: %w", err)
	}
	_, err = f.Write(b)
	err = errors.Join(err, f.Chmod(0o644), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), name)
	}
	if err != nil {
		return fmt.Errorf("write device-info file: %w", errors.Join(err, os.Remove(f.Name())))
	}
	return nil
}

// removeDeviceInfo removes the attachment's device-info file, which the runtime
// does too if it is Multus.
func removeDeviceInfo(name string) error {
	if name == "" {
		return nil
	}
	if err := os.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove device-info file: %w", err)
	}
	return nil
}
