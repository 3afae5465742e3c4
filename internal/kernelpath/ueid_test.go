// SPDX-License-Identifier: Apache-2.0

package kernelpath

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"golang.org/x/sys/unix"
)

// fakeUEIDs is a table of enterprise IDs.
type fakeUEIDs struct {
	ids  []string
	race string // somebody else adds it while we do
	err  error  // of the next add
}

func (f *fakeUEIDs) list() ([]string, error) { return slices.Clone(f.ids), nil }

func (f *fakeUEIDs) add(id string) error {
	if f.race == id {
		f.ids = append(f.ids, id)
	}
	switch err := f.err; {
	case err != nil:
		f.err = nil
		return err
	case slices.Contains(f.ids, id):
		return unix.EEXIST
	case len(f.ids) == maxUEIDs:
		return unix.ERANGE
	}
	f.ids = append(f.ids, id)
	return nil
}

func (f *fakeUEIDs) remove(id string) error {
	i := slices.Index(f.ids, id)
	if i < 0 {
		return unix.ENOENT
	}
	f.ids = slices.Delete(f.ids, i, i+1)
	return nil
}

// What others have in the table stays, also what we wanted to add and could not, and others did before us or since.
func TestRemoveUEIDs_leavesOthers(t *testing.T) {
	for _, tt := range []struct {
		name  string
		table fakeUEIDs
		fails bool
		since []string // what others add later
		want  []string // is left
	}{
		{"ours", fakeUEIDs{}, false, nil, nil},
		{"it was there", fakeUEIDs{ids: []string{"OURS"}}, false, nil, []string{"OURS"}},
		{"others were", fakeUEIDs{ids: []string{"A", "B"}}, false, nil, []string{"A", "B"}},
		{"others added it at the same time", fakeUEIDs{race: "OURS"}, false, nil, []string{"OURS"}},
		{"there was no room, and others made some and added it", fakeUEIDs{ids: []string{"A", "B", "C", "D"}}, true, []string{"OURS"}, []string{"A", "B", "C", "OURS"}},
		{"it was refused, and others added it", fakeUEIDs{err: unix.EPERM}, true, []string{"OURS"}, []string{"OURS"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			record := filepath.Join(t.TempDir(), "record")
			if err := addUEIDs(&tt.table, []string{"OURS"}, record); (err != nil) != tt.fails {
				t.Fatalf("add: %v", err)
			}
			for _, id := range tt.since {
				if len(tt.table.ids) == maxUEIDs {
					tt.table.ids = tt.table.ids[:maxUEIDs-1]
				}
				tt.table.ids = append(tt.table.ids, id)
			}
			if err := removeUEIDs(&tt.table, record); err != nil {
				t.Fatal(err)
			}
			if !slices.Equal(tt.table.ids, tt.want) {
				t.Errorf("left is %q, want %q", tt.table.ids, tt.want)
			}
			if _, err := os.Stat(record); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("the record is left: %v", err)
			}
		})
	}
}

// One that an agent added is ours for the next agent, too, which may find it gone and adds it again.
func TestAddUEIDs_again(t *testing.T) {
	record := filepath.Join(t.TempDir(), "record")
	table := fakeUEIDs{}
	add := func() error { return addUEIDs(&table, []string{"ONE", "TWO"}, record) }
	if err := errors.Join(add(), add(), table.remove("ONE"), add()); err != nil {
		t.Fatal(err)
	}
	if ids, err := readRecord(record); err != nil || !slices.Equal(slices.Sorted(slices.Values(ids)), []string{"ONE", "TWO"}) {
		t.Errorf("the record is %q, %v", ids, err)
	}
	if err := removeUEIDs(&table, record); err != nil || len(table.ids) != 0 {
		t.Errorf("left is %q, %v", table.ids, err)
	}
}
