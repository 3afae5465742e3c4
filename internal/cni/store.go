// SPDX-License-Identifier: Apache-2.0

package cni

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"path/filepath"
	"slices"
	"time"

	"github.com/containernetworking/cni/pkg/utils"

	"github.com/smcr-io/kube-smcr/internal/records"
)

// SchemaVersion is the version of the records that are written. A reader accepts only
// the versions that it knows.
const SchemaVersion = 1

// Attachment is the record of one interface of one container.
type Attachment struct {
	SchemaVersion int    `json:"schemaVersion"`
	ContainerID   string `json:"containerID"`
	IfName        string `json:"ifName"`
	// NetNS is the path of the network namespace and NetNSID its inode: the path may be
	// used again for another namespace.
	NetNS   string      `json:"netns"`
	NetNSID uint64      `json:"netnsID"`
	Network string      `json:"network"` // name of the CNI network
	Pod     records.Pod `json:"pod"`
	// IPs are the addresses of the interface, with the length of its prefix.
	IPs     []netip.Prefix `json:"ips"`
	Created time.Time      `json:"created"`
	// Devices are the RDMA devices that the pod got for itself with this
	// interface. Without any, the pod's connections use the node's.
	Devices []AttachedDevice `json:"devices,omitempty"`
	// IPAM is the configuration of the IPAM plugin that gave the devices' interfaces their
	// addresses. The network may have another one, or none, when they are given back.
	IPAM json.RawMessage `json:"ipam,omitempty"`
}

// AttachedDevice is a device of a pod, as it is after ADD.
type AttachedDevice struct {
	// ID names the device on its node: the PCI address of a VF, or the name
	// that the interface of another RDMA device has on the host.
	ID     string   `json:"id"`
	PCI    string   `json:"pci,omitempty"`
	RDMA   []string `json:"rdma,omitempty"`   // names of its RDMA devices
	NetDev string   `json:"netdev,omitempty"` // name of its interface on the host
	PF     string   `json:"pf,omitempty"`     // name of the interface of its PF
	PFPCI  string   `json:"pfPCI,omitempty"`  // PCI address of its PF
	VF     int      `json:"vf"`               // its number at the PF; -1: it is no VF
	// NUMANode is the memory that the device is near to; -1: none.
	NUMANode int `json:"numaNode"`
	Rail     int `json:"rail"`
	// Mode says where the device is: "move" for one in the pod's namespace,
	// "ipvlan" for one that stays on the host and has a child in the pod, and
	// "chained" for one that another plugin wired, or that pods share.
	Mode string `json:"mode"`
	// IfName is the name of the interface in the pod that this plugin made, MAC
	// its address, IPs those of the network layer with the length of their
	// prefix, and Routes those through it.
	IfName string          `json:"ifName,omitempty"`
	MAC    string          `json:"mac,omitempty"`
	IPs    []netip.Prefix  `json:"ips,omitempty"`
	Routes []AttachedRoute `json:"routes,omitempty"`
}

// AttachedRoute is a route that ADD made: a result does not say which interface a route is for, nor
// the gateway that an IPAM plugin left out.
type AttachedRoute struct {
	Dst      netip.Prefix `json:"dst"`
	Gateway  netip.Addr   `json:"gw,omitzero"` // zero: the hosts of Dst are on the link
	Priority int          `json:"priority,omitempty"`
	Table    *int         `json:"table,omitempty"`
}

// modeChained is the mode of a device that this plugin did not wire.
const modeChained = "chained"

// wired are the devices of an attachment whose interfaces this plugin made.
func (a Attachment) wired() []AttachedDevice {
	return slices.DeleteFunc(slices.Clone(a.Devices), func(d AttachedDevice) bool { return d.Mode == modeChained })
}

// Addresses are all that the attachment gave the pod: those of its interface, and those of the interfaces of claimed
// devices beside it.
func (a Attachment) Addresses() []netip.Prefix {
	out := slices.Clone(a.IPs)
	for i := range a.Devices {
		for _, p := range a.Devices[i].IPs {
			if !slices.Contains(out, p) {
				out = append(out, p)
			}
		}
	}
	return out
}

// hasAddresses tells whether an IPAM plugin was asked for addresses of a device's interface.
// If none was then, the network's plugin of today knows nothing of the interface.
func (a Attachment) hasAddresses(d AttachedDevice) bool { return len(a.IPAM) > 0 || len(d.IPs) > 0 }

// FileName is the name of the record's file.
func (a Attachment) FileName() string { return fileName(a.ContainerID, a.IfName) }

const recordSuffix = ".json"

func fileName(containerID, ifName string) string { return containerID + "-" + ifName + recordSuffix }

// checkKey refuses a container ID and interface name that cannot be part of a file name.
func checkKey(containerID, ifName string) error {
	if err := utils.ValidateContainerID(containerID); err != nil {
		return fmt.Errorf("container ID %q: %w", containerID, err)
	}
	if err := utils.ValidateInterfaceName(ifName); err != nil {
		return fmt.Errorf("interface name %q: %w", ifName, err)
	}
	if n := len(fileName(containerID, ifName)); n > maxNameBytes {
		return fmt.Errorf("container ID and interface name make a file name of %d bytes, at most %d are allowed", n, maxNameBytes)
	}
	return nil
}

func validKey(containerID, ifName string) bool { return checkKey(containerID, ifName) == nil }

// ParseAttachment reads a record.
func ParseAttachment(b []byte) (Attachment, error) {
	var a Attachment
	if err := json.Unmarshal(b, &a); err != nil {
		return Attachment{}, fmt.Errorf("parse record: %w", err)
	}
	if err := a.validate(); err != nil {
		return Attachment{}, err
	}
	return a, nil
}

// validate refuses what no reader takes for a record. Such a record must not be written either.
func (a *Attachment) validate() error {
	switch {
	case a.SchemaVersion != SchemaVersion:
		return fmt.Errorf("record has schema version %d, this program knows %d", a.SchemaVersion, SchemaVersion)
	case a.NetNS == "":
		return errors.New("record has no netns")
	case len(a.IPs) > maxIPs:
		return fmt.Errorf("record has %d addresses, at most %d are allowed", len(a.IPs), maxIPs)
	case len(a.Devices) > maxDevices:
		return fmt.Errorf("record has %d devices, at most %d are allowed", len(a.Devices), maxDevices)
	case slices.ContainsFunc(a.Devices, func(d AttachedDevice) bool { return len(d.IPs) > maxIPs }):
		return fmt.Errorf("record has a device with more than %d addresses", maxIPs)
	}
	if err := checkKey(a.ContainerID, a.IfName); err != nil {
		return fmt.Errorf("record: %w", err)
	}
	return nil
}

// Store is a directory of records. It has no state of its own: several
// processes may use the same directory.
type Store struct {
	dir records.Dir
}

// NewStore returns the store of a data directory. The directory need not exist.
func NewStore(dataDir string) Store {
	return Store{records.Dir{Path: filepath.Join(dataDir, "attachments"), MaxBytes: maxRecordBytes, MaxFiles: maxRecords}}
}

// owing returns the store of attachments that have ended, and whose addresses the IPAM plugin has not taken back:
// the next DEL needs their names, and what the network's IPAM plugin was.
func owing(dataDir string) Store {
	s := NewStore(dataDir)
	s.dir.Path = filepath.Join(dataDir, "owing")
	return s
}

// Dir is the directory of the records, for those who watch it. A record appears by a
// rename and disappears by a removal.
func (s Store) Dir() string { return s.dir.Path }

// MakeDir makes the directory if it is missing.
func (s Store) MakeDir() error {
	if err := s.dir.Make(); err != nil {
		return fmt.Errorf("make attachment directory: %w", err)
	}
	return nil
}

// Write writes the record of an attachment in one step: after an error, or a crash at any
// moment, the previous record is there unchanged, or none. Write refuses to replace the
// record of another attachment, and a record that no reader would take.
func (s Store) Write(a Attachment) error {
	a.SchemaVersion = SchemaVersion
	if err := a.validate(); err != nil {
		return fmt.Errorf("write attachment: %w", err)
	}
	if old, err := s.read(a.FileName()); err == nil && (old.ContainerID != a.ContainerID || old.IfName != a.IfName) {
		return fmt.Errorf("write attachment: file %q is the record of container %q, interface %q", a.FileName(), old.ContainerID, old.IfName)
	}
	if err := s.dir.Write(a.FileName(), a); err != nil {
		return fmt.Errorf("write attachment: %w", err)
	}
	return nil
}

// Delete removes a record, or a file of its name that is no record. It is no error if
// there is none. The record of another attachment stays.
func (s Store) Delete(containerID, ifName string) error {
	name := fileName(containerID, ifName)
	if !validKey(containerID, ifName) {
		return nil // such a record cannot exist
	}
	if a, err := s.read(name); err == nil && (a.ContainerID != containerID || a.IfName != ifName) {
		return nil
	}
	return s.remove(name)
}

func (s Store) remove(name string) error {
	if err := s.dir.Remove(name); err != nil {
		return fmt.Errorf("delete attachment: %w", err)
	}
	return nil
}

// Get returns a record. The error is [ErrNoAttachment] if there is none, and a
// *JunkError if its file cannot be read as one.
func (s Store) Get(containerID, ifName string) (Attachment, error) {
	if err := checkKey(containerID, ifName); err != nil {
		return Attachment{}, fmt.Errorf("%w: %w", ErrNoAttachment, err)
	}
	a, err := s.read(fileName(containerID, ifName))
	if errors.Is(err, fs.ErrNotExist) || err == nil && (a.ContainerID != containerID || a.IfName != ifName) {
		return Attachment{}, fmt.Errorf("container %q, interface %q: %w", containerID, ifName, ErrNoAttachment)
	}
	return a, err
}

// read reads the file of a record.
func (s Store) read(name string) (Attachment, error) {
	b, err := s.dir.Read(name)
	if err != nil {
		return Attachment{}, &JunkError{Name: name, Err: err}
	}
	a, err := ParseAttachment(b)
	if err == nil && a.FileName() != name {
		err = fmt.Errorf("is the record of container %q, interface %q: the file was renamed or copied", a.ContainerID, a.IfName)
	}
	if err != nil {
		return Attachment{}, &JunkError{Name: name, Err: err}
	}
	return a, nil
}

// List returns all records, in the order of their file names, and a JunkError for each file that is no
// record. A missing directory counts as empty. The error err is about the directory itself, or says
// that no further records can be read just now. List then returns the records that it has read, and
// others may exist all the same.
func (s Store) List() (as []Attachment, junk []*JunkError, err error) {
	names, err := s.dir.Names()
	if err != nil {
		err = fmt.Errorf("list attachments: %w", err)
	}
	for _, name := range names {
		a, rerr := s.read(name)
		var je *JunkError
		switch {
		case rerr == nil:
			as = append(as, a)
		case errors.Is(rerr, fs.ErrNotExist): // deleted in the meantime
		case records.IsShortage(rerr):
			return as, junk, fmt.Errorf("list attachments: %w", rerr)
		case errors.As(rerr, &je):
			junk = append(junk, je)
		}
	}
	return as, junk, err
}

// CollectGarbage removes the records of a network whose key is not valid, and temporary files that a
// dead plugin left. A record with addresses that an IPAM plugin has to take back is moved to owing.
// CollectGarbage goes on after an error.
func (s Store) CollectGarbage(network string, owing Store, valid func(containerID, ifName string) bool) error {
	as, _, err := s.List()
	errs := []error{err}
	for _, a := range as {
		switch {
		case a.Network != network || valid(a.ContainerID, a.IfName):
		case slices.ContainsFunc(a.wired(), a.hasAddresses):
			if err := s.dir.MoveTo(owing.dir, a.FileName()); !errors.Is(err, fs.ErrNotExist) { // else a DEL was faster
				errs = append(errs, err)
			}
		default:
			errs = append(errs, s.remove(a.FileName()))
		}
	}
	return errors.Join(append(errs, s.dir.RemoveStale())...)
}

// RemoveAll removes all records of a data directory, and their directories.
func RemoveAll(dataDir string) error {
	if err := errors.Join(NewStore(dataDir).dir.RemoveAll(), owing(dataDir).dir.RemoveAll()); err != nil {
		return fmt.Errorf("remove attachment records: %w", err)
	}
	return nil
}

// CheckWritable tells whether a record could be written now.
func (s Store) CheckWritable() error {
	if err := s.dir.CheckWritable(); err != nil {
		return fmt.Errorf("write to attachment directory: %w", err)
	}
	return nil
}
