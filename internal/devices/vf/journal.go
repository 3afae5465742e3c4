// SPDX-License-Identifier: Apache-2.0

package vf

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"github.com/smcr-io/kube-smcr/internal/files"
	"github.com/smcr-io/kube-smcr/internal/records"
)

const (
	journalVersion = 1
	journalSuffix  = ".json"
	lockSuffix     = ".lock"

	// softLock is the name of the lock for all software devices. It is longer than an
	// interface's name can be, so it is no device's ID.
	softLock = "soft-rdma-devices"
)

// bootIDFile has a new text after each boot.
const bootIDFile = "/proc/sys/kernel/random/boot_id"

// journal is the record of an attachment that has a device. It exists from before the
// first change until the device is in its original state again.
type journal struct {
	Version int    `json:"version"`
	Boot    string `json:"boot"`
	// Complete says that Attach succeeded. If it is false, and no process has the lock,
	// an Attach was killed between two steps.
	Complete bool `json:"complete"`
	// Asked are the settings that Attach was asked to make. Only these are restored: if
	// another one differs from the original state, another program changed it.
	Asked  Settings `json:"asked"`
	Wiring Wiring   `json:"wiring"`
	// AtHome are the kernel's numbers of the software RDMA devices that were in the host
	// before, or are again. InPod are the numbers of those that were made in the pod,
	// which the kernel removes when the interface leaves the pod.
	AtHome map[string]int `json:"atHome,omitempty"`
	InPod  map[string]int `json:"inPod,omitempty"`

	// marked says that the journal is lost, and that this one is made of the interface's
	// alias, which a pod may have written.
	marked bool
}

// number notes the number of an RDMA device of software.
func number(numbers *map[string]int, name string, n int) {
	if *numbers == nil {
		*numbers = map[string]int{}
	}
	(*numbers)[name] = n
}

// device is d, as it was found in /sys, with its owner from the journal.
func (j *journal) device(d Device) Device {
	w := &j.Wiring
	owner := w.Owner
	d.State, d.Owner, d.Mode, d.PodIfName = StatePod, &owner, w.Mode, w.IfName
	if w.Mode == ModeMove {
		d.NetDev, d.MAC = w.IfName, cmp.Or(w.MAC, d.MAC)
	}
	if len(d.RDMA) == 0 {
		d.RDMA, d.SoftRDMA = w.Device.RDMA, w.Device.SoftRDMA
	}
	return d
}

// idPattern matches IDs that are one element of a path.
var idPattern = regexp.MustCompile(`^[A-Za-z0-9_][A-Za-z0-9_.:@-]*$`)

func checkID(id string) error {
	if len(id) > maxIDBytes || !idPattern.MatchString(id) {
		return fmt.Errorf("device %.80q: %w: an ID is a PCI address, as 0000:3b:10.2, or the name of an interface", id, ErrNotFound)
	}
	return nil
}

func (h Host) dir() string { return filepath.Join(cmp.Or(h.DataDir, DefaultDataDir), "devices") }

// records are the journals; the locks of devices are beside them.
func (h Host) records() records.Dir {
	return records.Dir{Path: h.dir(), MaxBytes: maxJournalBytes, MaxFiles: maxJournals}
}

func (h Host) file(id string) string { return filepath.Join(h.dir(), id+journalSuffix) }

// readJournal reads the journal of a device. The error is fs.ErrNotExist if there is none,
// or one from before the last boot, which is out of date.
func (h Host) readJournal(id string) (*journal, error) {
	b, err := h.records().Read(id + journalSuffix)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("read journal of device %s: %w", id, err)
	}
	if err == nil && h.hooks.read != nil {
		err = h.hooks.read(id)
	}
	if records.IsShortage(err) {
		return nil, fmt.Errorf("read journal of device %s: %w", id, err)
	}
	var j *journal
	if err == nil {
		j, err = parseJournal(b)
	}
	if err != nil {
		return nil, fmt.Errorf("read journal %s: %w: bring the device back by hand and remove the file", h.file(id), err)
	}
	if j.Wiring.Device.ID != id {
		return nil, fmt.Errorf("read journal %s: it is that of device %q", h.file(id), j.Wiring.Device.ID)
	}
	boot, err := bootID()
	switch {
	case records.IsShortage(err): // it may be out of date
		return nil, fmt.Errorf("read journal of device %s: %w", id, err)
	case err == nil && boot != j.Boot:
		return nil, fmt.Errorf("read journal of device %s: from before the last boot: %w", id, fs.ErrNotExist)
	}
	return j, nil
}

func parseJournal(b []byte) (*journal, error) {
	var j journal
	if err := json.Unmarshal(b, &j); err != nil {
		return nil, err
	}
	w := &j.Wiring
	switch {
	case j.Version != journalVersion:
		return nil, fmt.Errorf("has version %d, this program knows %d", j.Version, journalVersion)
	case checkID(w.Device.ID) != nil:
		return nil, fmt.Errorf("has a device %.80q", w.Device.ID)
	case w.Device.PCI != "" && !pciAddress.MatchString(w.Device.PCI):
		return nil, fmt.Errorf("has a PCI address %.80q", w.Device.PCI)
	case !validName(w.IfName) || !validName(w.Original.Name):
		return nil, fmt.Errorf("has interfaces %.80q and %.80q", w.IfName, w.Original.Name)
	case w.Mode != ModeMove && w.Mode != ModeIPVlan:
		return nil, fmt.Errorf("has a mode %.80q", w.Mode)
	case len(w.Original.Addresses) > maxAddresses || len(w.Original.RDMA) > maxRDMA || len(w.RDMA) > maxRDMA:
		return nil, errors.New("has too many addresses or RDMA devices")
	case w.Owner.ContainerID == "":
		return nil, errors.New("has no owner")
	}
	return &j, nil
}

// validName tells whether the kernel accepts s as the name of an interface.
func validName(s string) bool {
	return s != "" && len(s) <= maxNameBytes && s != "." && s != ".." && !strings.ContainsAny(s, "/: \t\r\n")
}

func bootID() (string, error) {
	b, err := os.ReadFile(bootIDFile)
	return strings.TrimSpace(string(b)), err
}

// journals reads all valid journals. It skips those that are not valid. It fails if one cannot be read
// just now, because the device of that journal is not free.
func (h Host) journals() (map[string]*journal, error) {
	names, err := h.records().Names()
	if err != nil {
		return nil, fmt.Errorf("list journals: %w", err)
	}
	out := map[string]*journal{}
	for _, name := range names {
		id, ok := strings.CutSuffix(name, journalSuffix)
		if !ok || checkID(id) != nil {
			continue
		}
		j, err := h.readJournal(id)
		switch {
		case err == nil:
			out[id] = j
		case records.IsShortage(err):
			return nil, fmt.Errorf("list journals: %w", err)
		}
	}
	return out, nil
}

// write writes j as the journal of its device.
func (h Host) write(j *journal) error {
	id := j.Wiring.Device.ID
	j.Version = journalVersion
	var err error
	if j.Boot, err = bootID(); err == nil {
		err = h.records().Write(id+journalSuffix, j)
	}
	if err != nil {
		return fmt.Errorf("write journal of device %s: %w", id, err)
	}
	return nil
}

// forget removes the journal of a device.
func (h Host) forget(id string) error {
	if err := h.records().Remove(id + journalSuffix); err != nil {
		return fmt.Errorf("remove journal of device %s: %w", id, err)
	}
	return nil
}

// lock takes the lock of a device and returns the function that releases it. The lock's
// file stays.
func (h Host) lock(ctx context.Context, id string) (func(), error) {
	return h.lockWithin(ctx, lockWait, id)
}

// lockWithin is lock with another time to wait. If another call keeps the lock, the error wraps
// files.ErrLocked.
func (h Host) lockWithin(ctx context.Context, wait time.Duration, id string) (func(), error) {
	if err := checkID(id); err != nil {
		return nil, err
	}
	if err := h.records().Make(); err != nil {
		return nil, fmt.Errorf("make directory of journals: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	l, err := files.LockWithin(ctx, filepath.Join(h.dir(), id+lockSuffix))
	switch {
	case errors.Is(err, files.ErrLocked):
		return nil, fmt.Errorf("lock device %s: another call is busy with it: %w", id, err)
	case err != nil:
		return nil, fmt.Errorf("lock device %s: %w", id, err)
	}
	return func() { _ = l.Unlock() }, nil // the error is that of closing an unchanged file
}
