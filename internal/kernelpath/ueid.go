// SPDX-License-Identifier: Apache-2.0

package kernelpath

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/internal/files"
	"github.com/smcr-io/kube-smcr/internal/smcnl"
)

// AddUEIDs gives the kernel the enterprise IDs that it does not have, without one of which in common
// with a peer it never speaks SMC-R version 2. The machine has one table of them, with room for
// four. The file record keeps which ones are ours, perhaps none, so that [RemoveUEIDs] leaves the others.
func AddUEIDs(ids []string, record string) error { return addUEIDs(kernelUEIDs{}, ids, record) }

// ueidTable is the machine's table of enterprise IDs.
type ueidTable interface {
	list() ([]string, error)
	add(id string) error
	remove(id string) error
}

type kernelUEIDs struct{}

func (kernelUEIDs) list() ([]string, error) { return smcnl.UEIDs() }
func (kernelUEIDs) add(id string) error     { return smcnl.AddUEID(id) }
func (kernelUEIDs) remove(id string) error  { return smcnl.RemoveUEID(id) }

func addUEIDs(t ueidTable, ids []string, record string) error {
	ours, err := readRecord(record)
	if err != nil {
		return err
	}
	if ours == nil {
		ours = []string{}
		if err := writeRecord(record, ours); err != nil {
			return err
		}
	}
	have, err := t.list()
	if err != nil {
		return err
	}
	for _, id := range ids {
		if slices.Contains(have, id) {
			continue
		}
		before := ours
		if !slices.Contains(ours, id) { // before it is so: one that is not there is removed without harm
			ours = append(slices.Clone(ours), id)
			if err := writeRecord(record, ours); err != nil {
				return err
			}
		}
		err := t.add(id)
		if err != nil { // it is none of ours, and may be somebody else's when ours are removed
			ours = slices.DeleteFunc(slices.Clone(before), func(o string) bool { return o == id })
			if err := writeRecord(record, ours); err != nil {
				return err
			}
		}
		switch {
		case err == nil, errors.Is(err, unix.EEXIST):
		case errors.Is(err, unix.ERANGE):
			return fmt.Errorf("give the kernel enterprise ID %s: it has room for %d, and has %q; name one of these in the setting eids of all agents, or remove one (smcd ueid): %w", id, maxUEIDs, have, err)
		default:
			return fmt.Errorf("give the kernel enterprise ID %s, besides %q: %w", id, have, err)
		}
	}
	return nil
}

// RemoveUEIDs takes the enterprise IDs away that AddUEIDs gave, and the record.
func RemoveUEIDs(record string) error { return removeUEIDs(kernelUEIDs{}, record) }

func removeUEIDs(t ueidTable, record string) error {
	ours, err := readRecord(record)
	if err != nil || ours == nil {
		return err
	}
	have, err := t.list()
	if err != nil && !errors.Is(err, smcnl.ErrNoSMC) { // without the module there are none
		return err
	}
	for _, id := range ours {
		if !slices.Contains(have, id) {
			continue
		}
		if err := t.remove(id); err != nil {
			return fmt.Errorf("take enterprise ID %s from the kernel: %w", id, err)
		}
	}
	if err := os.Remove(record); err != nil {
		return fmt.Errorf("remove the record of enterprise IDs: %w", err)
	}
	return nil
}

// readRecord returns nil if there is no record.
func readRecord(name string) (ids []string, err error) {
	text, err := os.ReadFile(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err == nil {
		err = json.Unmarshal(text, &ids)
	}
	if err != nil {
		return nil, fmt.Errorf("read the record of enterprise IDs %s: %w", name, err)
	}
	return ids, nil
}

func writeRecord(name string, ids []string) error {
	text, err := json.Marshal(ids)
	if err == nil {
		err = files.Write(name, text, 0o600)
	}
	if err != nil {
		return fmt.Errorf("write the record of enterprise IDs: %w", err)
	}
	return nil
}
