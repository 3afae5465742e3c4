// SPDX-License-Identifier: Apache-2.0

package install

import (
	"bytes"
	"fmt"
	"path/filepath"
	"strings"
)

// A file is a configuration file of the directory, as it was read, and what it contains:
// a list, a single plugin, or neither if err is set.
type file struct {
	name string
	text []byte
	link string // the target, if the file is a symbolic link
	err  error  // why a runtime could not use the file

	list   *list
	single *single
}

// parse finds out what a file contains. It leaves a file that could not be read alone.
func (f *file) parse() {
	if f.err != nil {
		return
	}
	if filepath.Ext(f.name) == ".conflist" {
		l, err := parseList(f.text)
		if f.err = err; err == nil {
			f.list = &l
		}
		return
	}
	s, err := parseSingle(f.text)
	if f.err = err; err == nil {
		f.single = &s
	}
}

func (f *file) network() (name string, versions []string) {
	if f.list != nil {
		return f.list.name, f.list.versions
	}
	return f.single.name, f.single.versions
}

// A change is a file that is to be written, or removed if there is no new text.
type change struct {
	name     string
	old, new []byte // old is nil for a file that is not there
	// dropped are the fields that our element had and has no more, of an earlier version or
	// configuration, or put there by hand.
	dropped []string
}

// A decision is what is to be changed in a directory, and the state after that.
type decision struct {
	state   State
	detail  string
	active  string // the file that the runtime uses
	network string
	version string
	newer   bool // the list has an entry that a later version of the product wrote
	changes []change
}

// A goal is what decide is to reach.
type goal struct {
	entry []byte // the plugin's configuration; nil: the plugin is to be in no list
	// unfinished tells whether a file that is not valid may still be being written.
	unfinished func(name string) bool
}

// decide decides what to change in a directory with these files, which are in the order
// of their names. It changes nothing itself.
func decide(files []file, w goal) decision {
	d := decision{state: StateWaiting, detail: "no network is configured yet"}
	derived := map[string]*file{} // by the name of its source
	var active *file
	var invalid []string
	for i := range files {
		f := &files[i]
		if s, ok := parseDerived(*f); ok {
			derived[s.File] = f
			continue
		}
		if f.err != nil {
			if active == nil {
				invalid = append(invalid, fmt.Sprintf("%s %v", f.name, f.err))
				if w.entry != nil && w.unfinished(f.name) {
					d.detail = invalid[len(invalid)-1]
					return d // change nothing until the file is complete: it may become the active one
				}
			}
			continue
		}
		if active == nil && w.entry != nil {
			active = f
		}
	}
	for i := range files {
		f := &files[i]
		if f.list != nil && f != active && f.link == "" && f.list.hasManaged() && !isDerived(*f) {
			d.edit(*f, (*list).unchain)
		}
	}
	if active != nil {
		d.chain(active, derived, w.entry)
	}
	for _, f := range files { // in the order of names, so that tests and logs are stable
		if s, ok := parseDerived(f); ok && derived[s.File] != nil {
			d.changes = append(d.changes, change{name: f.name, old: f.text})
		}
	}
	if len(invalid) > 0 {
		note := "container runtimes stop at a file that is not valid; correct or remove: " + strings.Join(invalid, "; ")
		if active == nil && w.entry != nil {
			d.state, d.detail = StateBroken, note
		} else {
			d.detail = join(d.detail, note)
		}
	}
	return d
}

func isDerived(f file) bool {
	_, ok := parseDerived(f)
	return ok
}

// edit adds the change that fn makes to a list, if it makes one.
func (d *decision) edit(f file, fn func(*list) ([]byte, error)) {
	out, err := fn(f.list)
	if err != nil {
		d.state, d.detail = StateBroken, join(d.detail, fmt.Sprintf("%s: %v", f.name, err))
		return
	}
	if !bytes.Equal(out, f.text) {
		d.changes = append(d.changes, change{name: f.name, old: f.text, new: out, dropped: dropped(f.text, out)})
	}
}

// chain decides about the active file. If the list derived from it stays, chain removes
// that list from derived, whose other lists the caller deletes.
func (d *decision) chain(f *file, derived map[string]*file, entry []byte) {
	var versions []string
	d.network, versions = f.network()
	d.active, d.version = f.name, versions[len(versions)-1]
	d.state, d.detail = StateInstalled, ""
	if v, bad := unsupported(versions); bad {
		d.state, d.detail = StateBroken, fmt.Sprintf("%s %v", f.name, versionError(v))
		if f.list != nil && f.link == "" && f.list.hasManaged() {
			d.edit(*f, (*list).unchain)
		}
		return
	}
	if f.list != nil && f.link == "" {
		d.newer = f.list.hasNewer()
		d.edit(*f, func(l *list) ([]byte, error) { return l.chain(entry) })
		return
	}
	d.active = derivedName(f.name)
	old := derived[f.name]
	delete(derived, f.name)
	if upToDate(old, *f, entry) {
		return
	}
	out, err := derive(*f, entry, old)
	if err != nil {
		d.state, d.detail = StateBroken, fmt.Sprintf("derive a list from %s, which %v", f.name, err)
		return
	}
	c := change{name: d.active, new: out}
	if old != nil {
		c.old = old.text
		d.newer = old.list != nil && old.list.hasNewer()
	}
	d.changes = append(d.changes, c)
}

// chainedIn tells whether one of the lists names the plugin, so that a runtime would
// execute it.
func chainedIn(files []file) bool {
	for _, f := range files {
		if f.list == nil {
			continue
		}
		for _, p := range f.list.plugins {
			if p.ours {
				return true
			}
		}
	}
	return false
}

func join(a, b string) string {
	switch {
	case a == "":
		return b
	case b == "":
		return a
	}
	return a + "; " + b
}
