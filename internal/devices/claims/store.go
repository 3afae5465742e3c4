// SPDX-License-Identifier: Apache-2.0

package claims

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"time"

	"github.com/smcr-io/kube-smcr/internal/records"
)

// SchemaVersion is the version of the files. A reader accepts only the versions that it
// knows.
const SchemaVersion = 1

// Device is a device that was given to a claim.
type Device struct {
	// ID is the PCI address of a VF, the name of the network interface of another RDMA
	// device, or the name of a software device.
	ID string `json:"id"`
	// Request, Pool and Name are those of the claim's allocation.
	Request string `json:"request"`
	Pool    string `json:"pool"`
	Name    string `json:"name"`
	// IfName is the name that the interface is to have in the pod; "": the plugin
	// chooses.
	IfName string `json:"ifName,omitempty"`
	// Shared says that other pods may have the device too: it stays in the host, and the
	// pod gets no interface of it.
	Shared bool `json:"shared,omitempty"`
}

// Claim is a ResourceClaim that is prepared.
type Claim struct {
	SchemaVersion int    `json:"schemaVersion"`
	Namespace     string `json:"namespace"`
	Name          string `json:"name"`
	UID           string `json:"uid"`
	// Pods are the pods that the claim was reserved for when it was prepared.
	Pods    []records.Pod `json:"pods"`
	Devices []Device      `json:"devices"`
	// Prepared is when the claim was first prepared.
	Prepared time.Time `json:"prepared"`
}

// String is NAMESPACE/NAME.
func (c Claim) String() string { return c.Namespace + "/" + c.Name }

// Of says whether the claim is reserved for the pod.
func (c Claim) Of(podUID string) bool {
	return slices.ContainsFunc(c.Pods, func(p records.Pod) bool { return p.UID == podUID })
}

// Own counts the devices that the claim's pod has for itself.
func (c Claim) Own() (n int) {
	for _, d := range c.Devices {
		if !d.Shared {
			n++
		}
	}
	return n
}

// ErrNoClaim is the error of [Store.Get] for a claim that is not prepared.
var ErrNoClaim = errors.New("claim is not prepared")

// ErrUnread is the error of [Store.List] and [Store.OfPod] when the directory cannot be read, or when a
// record cannot be read because the node is short of descriptors or memory. A claim that is not in the
// list may exist all the same.
var ErrUnread = errors.New("claims cannot be read now")

// Parse reads a file.
func Parse(b []byte) (Claim, error) {
	var c Claim
	if err := json.Unmarshal(b, &c); err != nil {
		return Claim{}, fmt.Errorf("parse claim: %w", err)
	}
	if c.SchemaVersion != SchemaVersion {
		return Claim{}, fmt.Errorf("claim has schema version %d, this program knows %d", c.SchemaVersion, SchemaVersion)
	}
	if err := checkUID(c.UID); err != nil {
		return Claim{}, err
	}
	for _, d := range c.Devices {
		if d.ID == "" {
			return Claim{}, fmt.Errorf("claim %v has a device without id", c)
		}
	}
	return c, nil
}

// checkUID refuses a text that cannot be part of a file name.
func checkUID(uid string) error {
	if !validUID(uid) {
		return fmt.Errorf("UID %.80q of a claim is no UID", uid)
	}
	return nil
}

func validUID(uid string) bool {
	for _, r := range uid {
		letter := r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z'
		if !letter && (r < '0' || r > '9') && r != '-' {
			return false
		}
	}
	return uid != "" && len(uid) <= maxUIDBytes
}

// Store is a directory of claims. It has no state of its own: several processes
// may use the same directory.
type Store struct {
	dir   records.Dir
	fault func(name string) error // of reading a file, in tests; nil: none
}

// NewStore returns the store of a data directory. The directory need not exist.
func NewStore(dataDir string) Store {
	return Store{dir: records.Dir{Path: filepath.Join(dataDir, "claims"), MaxBytes: maxFileBytes, MaxFiles: maxClaims}}
}

// Dir is the directory of the files, for those who watch it. A file appears by a rename and
// disappears by a removal.
func (s Store) Dir() string { return s.dir.Path }

const suffix = ".json"

// MakeDir makes the directory if it is missing.
func (s Store) MakeDir() error {
	if err := s.dir.Make(); err != nil {
		return fmt.Errorf("make directory of claims: %w", err)
	}
	return nil
}

// Write writes the file of a claim in one step: after an error, or a crash at any moment,
// the previous file is there unchanged, or none.
func (s Store) Write(c Claim) error {
	c.SchemaVersion = SchemaVersion
	if err := checkUID(c.UID); err != nil {
		return err
	}
	if err := s.dir.Write(c.UID+suffix, c); err != nil {
		return fmt.Errorf("write claim %v: %w", c, err)
	}
	return nil
}

// Delete removes the file of a claim. It is no error if there is none.
func (s Store) Delete(uid string) error {
	if !validUID(uid) {
		return nil // such a file cannot exist
	}
	if err := s.dir.Remove(uid + suffix); err != nil {
		return fmt.Errorf("remove claim: %w", err)
	}
	return nil
}

// Get returns a claim. The error is [ErrNoClaim] if there is none.
func (s Store) Get(uid string) (Claim, error) {
	if err := checkUID(uid); err != nil {
		return Claim{}, fmt.Errorf("%w: %w", ErrNoClaim, err)
	}
	c, err := s.read(uid + suffix)
	if errors.Is(err, fs.ErrNotExist) {
		return Claim{}, fmt.Errorf("%s: %w", uid, ErrNoClaim)
	}
	return c, err
}

func (s Store) read(name string) (Claim, error) {
	b, err := s.dir.Read(name)
	if s.fault != nil {
		err = errors.Join(err, s.fault(name))
	}
	if err != nil {
		return Claim{}, fmt.Errorf("read claim %s: %w", filepath.Join(s.Dir(), name), err)
	}
	c, err := Parse(b)
	if err == nil && c.UID+suffix != name {
		err = fmt.Errorf("it is claim %s: the file was renamed or copied", c.UID)
	}
	if err != nil {
		return Claim{}, fmt.Errorf("read claim %s: %w", filepath.Join(s.Dir(), name), err)
	}
	return c, nil
}

// List returns all claims in the order of their UIDs. If files cannot be read, it returns the other
// claims and an error, which is [ErrUnread] if the files may be valid. A missing directory counts as
// empty.
func (s Store) List() ([]Claim, error) {
	names, err := s.dir.Names()
	var errs []error
	switch {
	case err != nil && names == nil:
		return nil, fmt.Errorf("%w: %w", ErrUnread, err)
	case err != nil: // there are too many
		errs = append(errs, fmt.Errorf("list claims: %w", err))
	}
	var out []Claim
	for _, name := range names {
		c, err := s.read(name)
		switch {
		case err == nil:
			out = append(out, c)
		case records.IsShortage(err):
			return out, fmt.Errorf("%w: %w", ErrUnread, err)
		case !errors.Is(err, fs.ErrNotExist): // removed in the meantime
			errs = append(errs, err)
		}
	}
	return out, errors.Join(errs...)
}

// OfPod returns the devices of a pod, in the order in which its claims were
// prepared. If files cannot be read, it returns the devices of the other claims and an
// error.
func (s Store) OfPod(podUID string) ([]Device, error) {
	all, err := s.List()
	slices.SortStableFunc(all, func(a, b Claim) int { return a.Prepared.Compare(b.Prepared) })
	var out []Device
	for _, c := range all {
		if c.Of(podUID) {
			out = append(out, c.Devices...)
		}
	}
	return out, err
}

// RemoveStale removes the temporary files of writers that were killed.
func (s Store) RemoveStale() error { return s.dir.RemoveStale() }

// RemoveAll removes all claims, and the directory.
func (s Store) RemoveAll() error {
	if err := s.dir.RemoveAll(); err != nil {
		return fmt.Errorf("remove claims: %w", err)
	}
	return nil
}
