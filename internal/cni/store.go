// SPDX-License-Identifier: Apache-2.0

package cni

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/containernetworking/cni/pkg/utils"
)

// SchemaVersion is the version of the records that are written. A reader
// accepts only versions it knows.
const SchemaVersion = 1

// Pod names a pod. Outside Kubernetes it is empty.
type Pod struct {
	Namespace string `json:"namespace,omitempty"`
	Name      string `json:"name,omitempty"`
	UID       string `json:"uid,omitempty"`
}

// Attachment is the record of one interface of one container.
type Attachment struct {
	SchemaVersion int    `json:"schemaVersion"`
	ContainerID   string `json:"containerID"`
	IfName        string `json:"ifName"`
	// NetNS is the path of the network namespace and NetNSID its inode: a
	// path may be used again for another one.
	NetNS   string `json:"netns"`
	NetNSID uint64 `json:"netnsID"`
	Network string `json:"network"` // name of the CNI network
	Pod     Pod    `json:"pod"`
	// IPs are the addresses of the interface, with the length of its prefix.
	IPs     []netip.Prefix `json:"ips"`
	Created time.Time      `json:"created"`
}

// FileName is the name of the record's file.
func (a Attachment) FileName() string { return fileName(a.ContainerID, a.IfName) }

const recordSuffix = ".json"

func fileName(containerID, ifName string) string { return containerID + "-" + ifName + recordSuffix }

// checkKey refuses keys that do not make a file name.
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
	if len(b) > maxRecordBytes {
		return Attachment{}, fmt.Errorf("record is longer than %d bytes", maxRecordBytes)
	}
	var a Attachment
	if err := json.Unmarshal(b, &a); err != nil {
		return Attachment{}, fmt.Errorf("parse record: %w", err)
	}
	switch {
	case a.SchemaVersion != SchemaVersion:
		return Attachment{}, fmt.Errorf("record has schema version %d, this program knows %d", a.SchemaVersion, SchemaVersion)
	case a.NetNS == "":
		return Attachment{}, errors.New("record has no netns")
	case len(a.IPs) > maxIPs:
		return Attachment{}, fmt.Errorf("record has %d addresses, at most %d are allowed", len(a.IPs), maxIPs)
	}
	if err := checkKey(a.ContainerID, a.IfName); err != nil {
		return Attachment{}, fmt.Errorf("parse record: %w", err)
	}
	return a, nil
}

// Store is a directory of records. It has no state of its own: several
// processes may use the same directory.
type Store struct {
	dir string
}

// NewStore returns the store of a data directory. It need not exist.
func NewStore(dataDir string) Store { return Store{dir: filepath.Join(dataDir, "attachments")} }

// Dir is the directory of the records, for those who watch it. A record
// appears by a rename and goes by a removal.
func (s Store) Dir() string { return s.dir }

// tempPattern are files under construction; no container ID begins with a dot.
const tempPattern = ".tmp-*"

// MakeDir makes the directory if it is missing.
func (s Store) MakeDir() error {
	if err := os.MkdirAll(s.dir, 0o700); err != nil {
		return fmt.Errorf("make attachment directory: %w", err)
	}
	return nil
}

// Write makes a the record of its attachment, in one step: after an error, or
// a crash at any moment, the previous record stands, or none. It refuses to
// replace the record of another attachment.
func (s Store) Write(a Attachment) error {
	a.SchemaVersion = SchemaVersion
	if err := checkKey(a.ContainerID, a.IfName); err != nil {
		return fmt.Errorf("write attachment: %w", err)
	}
	b, err := json.MarshalIndent(a, "", "  ")
	if err != nil {
		return fmt.Errorf("write attachment: %w", err)
	}
	if err := s.MakeDir(); err != nil {
		return err
	}
	if old, err := s.read(a.FileName()); err == nil && (old.ContainerID != a.ContainerID || old.IfName != a.IfName) {
		return fmt.Errorf("write attachment: file %q is the record of container %q, interface %q", a.FileName(), old.ContainerID, old.IfName)
	}
	temp, err := s.writeTemp(append(b, '\n'))
	if err != nil {
		return fmt.Errorf("write attachment: %w", err)
	}
	if err := os.Rename(temp, filepath.Join(s.dir, a.FileName())); err != nil {
		return errors.Join(fmt.Errorf("write attachment: %w", err), os.Remove(temp))
	}
	return s.sync()
}

// writeTemp writes b to a new file aside and returns its path.
func (s Store) writeTemp(b []byte) (string, error) {
	f, err := os.CreateTemp(s.dir, tempPattern)
	if err != nil {
		return "", err
	}
	_, err = f.Write(b)
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return "", errors.Join(err, os.Remove(f.Name()))
	}
	return f.Name(), nil
}

// sync makes a rename or a removal survive a power cut.
func (s Store) sync() error {
	d, err := os.Open(s.dir)
	if err != nil {
		return fmt.Errorf("sync attachment directory: %w", err)
	}
	if err := errors.Join(d.Sync(), d.Close()); err != nil {
		return fmt.Errorf("sync attachment directory: %w", err)
	}
	return nil
}

// Delete removes a record. A missing one is no error, nor is a file of that
// name that is no record. The record of another attachment stays.
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
	err := os.Remove(filepath.Join(s.dir, name))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("delete attachment: %w", err)
	}
	return s.sync()
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
	// A pipe must not block, nor a link lead elsewhere.
	f, err := os.OpenFile(filepath.Join(s.dir, name), os.O_RDONLY|syscall.O_NONBLOCK|syscall.O_NOFOLLOW, 0)
	if err != nil {
		return Attachment{}, &JunkError{Name: name, Err: err}
	}
	defer func() { _ = f.Close() }() // only read
	st, err := f.Stat()
	if err == nil && !st.Mode().IsRegular() {
		err = errors.New("is not a regular file")
	}
	if err != nil {
		return Attachment{}, &JunkError{Name: name, Err: err}
	}
	b, err := io.ReadAll(io.LimitReader(f, maxRecordBytes+1))
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

// List returns all records, in the order of their file names, and an error for
// each file that is none. A missing directory is an empty one. err is about the
// directory itself; what could be read is returned with it.
func (s Store) List() (as []Attachment, junk []*JunkError, err error) {
	d, err := os.Open(s.dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil, nil
	}
	if err != nil {
		return nil, nil, fmt.Errorf("list attachments: %w", err)
	}
	entries, err := d.ReadDir(maxRecords + 1)
	if errors.Is(err, io.EOF) {
		err = nil
	}
	if cerr := d.Close(); cerr != nil || err != nil {
		return nil, nil, fmt.Errorf("list attachments: %w", errors.Join(err, cerr))
	}
	if len(entries) > maxRecords {
		entries = entries[:maxRecords]
		err = fmt.Errorf("list attachments: %s has more than %d files: clean it up", s.dir, maxRecords)
	}
	slices.SortFunc(entries, func(a, b os.DirEntry) int { return strings.Compare(a.Name(), b.Name()) })
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), ".") {
			continue // under construction
		}
		a, rerr := s.read(e.Name())
		var je *JunkError
		switch {
		case rerr == nil:
			as = append(as, a)
		case errors.Is(rerr, fs.ErrNotExist): // deleted in the meantime
		case errors.As(rerr, &je):
			junk = append(junk, je)
		}
	}
	return as, junk, err
}

// CollectGarbage removes the records of a network whose key is not valid, and
// temporary files that a dead plugin left. It goes on after an error.
func (s Store) CollectGarbage(network string, valid func(containerID, ifName string) bool, now time.Time) error {
	as, _, err := s.List()
	errs := []error{err}
	for _, a := range as {
		if a.Network == network && !valid(a.ContainerID, a.IfName) {
			errs = append(errs, s.remove(a.FileName()))
		}
	}
	temps, err := filepath.Glob(filepath.Join(s.dir, tempPattern))
	errs = append(errs, err)
	for _, path := range temps {
		if st, err := os.Lstat(path); err == nil && now.Sub(st.ModTime()) > staleAfter {
			errs = append(errs, os.Remove(path))
		}
	}
	return errors.Join(errs...)
}

// CheckWritable tells whether a record could be written now.
func (s Store) CheckWritable() error {
	if err := s.MakeDir(); err != nil {
		return err
	}
	temp, err := s.writeTemp([]byte(strings.Repeat(" ", os.Getpagesize()))) // at least one block
	if err != nil {
		return fmt.Errorf("write to attachment directory: %w", err)
	}
	return os.Remove(temp)
}
