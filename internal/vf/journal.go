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

	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/internal/records"
)

const (
	journalVersion = 1
	journalSuffix  = ".json"
	lockSuffix     = ".lock"

	// softLock is the lock of all devices of software, and longer than a device's name.
	softLock = "soft-rdma-devices"
)

// bootIDFile has another text after each boot.
const bootIDFile = "/proc/sys/kernel/random/boot_id"

// journal is what is remembered of an attachment that has a device, from before
// the first change until everything is back.
type journal struct {
	Version int    `json:"version"`
	Boot    string `json:"boot"`
	// Complete says that Attach succeeded. Without it, and without a holder of
	// the lock, the device is somewhere on the way.
	Complete bool `json:"complete"`
	// Asked are the settings that Attach set out to make. What the PF had for
	// others is not brought back: somebody else changed it.
	Asked  Settings `json:"asked"`
	Wiring Wiring   `json:"wiring"`
	// AtHome and InPod are the kernel's numbers of RDMA devices of software: of those
	// that were in the host or are again, and of those that were made in the pod,
	// which die when the interface leaves it.
	AtHome map[string]int `json:"atHome,omitempty"`
	InPod  map[string]int `json:"inPod,omitempty"`
}

// number notes the number of an RDMA device of software.
func number(numbers *map[string]int, name string, n int) {
	if *numbers == nil {
		*numbers = map[string]int{}
	}
	(*numbers)[name] = n
}

// device is d, as it was found in /sys, with what is known of its owner.
func (j *journal) device(d Device) Device {
	w := &j.Wiring
	owner := w.Owner
	d.State, d.Owner, d.Mode = StatePod, &owner, w.Mode
	if w.Mode == ModeMove {
		d.NetDev, d.MAC = w.IfName, cmp.Or(w.MAC, d.MAC)
	}
	if len(d.RDMA) == 0 {
		d.RDMA, d.SoftRDMA = w.Device.RDMA, w.Device.SoftRDMA
	}
	return d
}

// idPattern keeps IDs to what is one element of a path.
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

// readJournal reads the journal of a device. The error is fs.ErrNotExist if there is
// none, or one from before the last boot: nothing of it holds any more.
func (h Host) readJournal(id string) (*journal, error) {
	b, err := h.records().Read(id + journalSuffix)
	if errors.Is(err, fs.ErrNotExist) {
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
	if boot, err := bootID(); err == nil && boot != j.Boot {
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

// validName tells whether the kernel takes it as an interface's name.
func validName(s string) bool {
	return s != "" && len(s) <= maxNameBytes && s != "." && s != ".." && !strings.ContainsAny(s, "/: \t\r\n")
}

func bootID() (string, error) {
	b, err := os.ReadFile(bootIDFile)
	return strings.TrimSpace(string(b)), err
}

// journals reads all that are valid. One that is not hides no other.
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
		if j, err := h.readJournal(id); err == nil {
			out[id] = j
		}
	}
	return out, nil
}

// write makes j the journal of its device.
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

// lock takes the lock of a device and returns what gives it back. The files
// stay: removing one that another process just opened would make two locks.
func (h Host) lock(ctx context.Context, id string) (func(), error) {
	if err := checkID(id); err != nil {
		return nil, err
	}
	if err := h.records().Make(); err != nil {
		return nil, fmt.Errorf("make directory of journals: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, lockWait)
	defer cancel()
	fd, err := unix.Open(filepath.Join(h.dir(), id+lockSuffix), unix.O_CREAT|unix.O_RDWR|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock device %s: %w", id, err)
	}
	for {
		err := unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return func() { unix.Close(fd) }, nil
		}
		if !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR) {
			unix.Close(fd)
			return nil, fmt.Errorf("lock device %s: %w", id, err)
		}
		select {
		case <-ctx.Done():
			unix.Close(fd)
			return nil, fmt.Errorf("lock device %s: another call is busy with it: %w", id, ctx.Err())
		case <-time.After(lockPoll):
		}
	}
}
