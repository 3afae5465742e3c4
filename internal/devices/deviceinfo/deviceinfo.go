// SPDX-License-Identifier: Apache-2.0

package deviceinfo

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

	"github.com/smcr-io/kube-smcr/internal/files"
)

// DefaultDir is where device plugins put their files (section 4.1).
const DefaultDir = "/var/run/k8s.cni.cncf.io/devinfo/dp"

// CNIDir is where plugins put the files that runtimes name (section 4.2). Files elsewhere are refused:
// whoever may write a network's configuration could name any file of the node.
const CNIDir = "/var/run/k8s.cni.cncf.io/devinfo/cni"

// IsOfCNI reports whether path is a file in CNIDir, under one of its names.
func IsOfCNI(path string) bool {
	dir := filepath.Dir(filepath.Clean(path))
	return dir == CNIDir || "/var"+dir == CNIDir
}

// version is the version of the specification that files are written in.
const version = "1.1.0"

// Info is the content of a file (section 3).
type Info struct {
	Type    string `json:"type"`
	Version string `json:"version"`
	PCI     *PCI   `json:"pci,omitempty"` // nil: a device of another type
}

// PCI is the part of a file about a PCI device (section 3.1.3).
type PCI struct {
	Address string `json:"pci-address"`
	RDMA    string `json:"rdma-device,omitempty"` // names, separated by commas
	PF      string `json:"pf-pci-address,omitempty"`
}

// RDMA are the RDMA devices that the file names.
func (i Info) RDMA() []string {
	if i.PCI == nil {
		return nil
	}
	return strings.FieldsFunc(i.PCI.RDMA, func(r rune) bool { return r == ',' || r == ' ' })
}

// Path is the path of a device plugin's file about a device (section 4.1).
func Path(dir, resource, id string) string {
	return filepath.Join(dir, prefix(resource)+id+suffix)
}

const suffix = "-device.json"

func prefix(resource string) string { return strings.ReplaceAll(resource, "/", "-") + "-" }

// Find returns the path of a device plugin's file about a device, whatever the resource,
// or "" if there is none.
func Find(dir, id string) (string, error) {
	entries, err := list(dir)
	for _, e := range entries {
		if strings.HasSuffix(e.Name(), "-"+id+suffix) {
			return filepath.Join(dir, e.Name()), nil
		}
	}
	return "", err
}

// list returns at most maxFiles entries. A missing directory counts as empty.
func list(dir string) ([]fs.DirEntry, error) {
	d, err := os.Open(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read device-info file: %w", err)
	}
	entries, err := d.ReadDir(maxFiles)
	if errors.Is(err, io.EOF) {
		err = nil
	}
	if err = errors.Join(err, d.Close()); err != nil {
		return nil, fmt.Errorf("read device-info file: %w", err)
	}
	return entries, nil
}

// Read reads a file. The error is fs.ErrNotExist if there is none.
func Read(path string) (Info, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return Info{}, fmt.Errorf("read device-info file: %w", err)
	}
	defer func() { _ = f.Close() }() // only read
	b, err := io.ReadAll(io.LimitReader(f, maxBytes))
	if err != nil {
		return Info{}, fmt.Errorf("read device-info file: %w", err)
	}
	var info Info
	if err := json.Unmarshal(b, &info); err != nil {
		return Info{}, fmt.Errorf("parse device-info file %s: %w", path, err)
	}
	return info, nil
}

// Write writes d to the file path, and makes the directory if it is missing.
func Write(path string, d PCI) error {
	b, err := json.Marshal(Info{Type: "pci", Version: version, PCI: &d})
	if err == nil {
		err = os.MkdirAll(filepath.Dir(path), 0o755)
	}
	if err == nil {
		err = files.Write(path, b, 0o644)
	}
	if err != nil {
		return fmt.Errorf("write device-info file of %s: %w", d.Address, err)
	}
	return nil
}

// Remove removes a file. It is no error if there is none, or if path is "".
func Remove(path string) error {
	if path == "" {
		return nil
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove device-info file: %w", err)
	}
	return nil
}

// RemoveOthers removes a resource's files, except those of the IDs for which keep is true.
func RemoveOthers(dir, resource string, keep func(id string) bool) error {
	entries, err := list(dir)
	errs := []error{err}
	for _, e := range entries {
		id, ours := strings.CutPrefix(e.Name(), prefix(resource))
		id, is := strings.CutSuffix(id, suffix)
		if ours && is && !keep(id) {
			errs = append(errs, Remove(filepath.Join(dir, e.Name())))
		}
	}
	return errors.Join(errs...)
}
