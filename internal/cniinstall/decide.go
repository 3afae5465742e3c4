// SPDX-License-Identifier: Apache-2.0

package cniinstall

import (
	"bytes"
	"fmt"
	"path/filepath"
	"strings"
)

// A file is a configuration in the directory as it was read, and what it is.
type file struct {
	name string
	text []byte
	link string // where it leads, if it is a symbolic link
	err  error  // why it is none that a runtime could take

	list   *list
	single *single
}

// parse finds out what a file is that could be read.
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
}

// A decision is what is to be done in a directory, and how it stands once that
// is done.
type decision struct {
	state   State
	detail  string
	active  string // the file that the runtime takes
	network string
	version string
	newer   bool // a later version's entry is in the list
	changes []change
}

// A wish is what decide is asked for.
type wish struct {
	entry []byte // the plugin's configuration; nil: nothing of ours may stay
	// patient are the files that are not valid and may become so at any moment.
	patient func(name string) bool
}

// decide reads files, which are in the order of their names, and decides. It
// touches nothing.
func decide(files []file, w wish) decision {
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
				if w.entry != nil && w.patient(f.name) {
					d.detail = invalid[len(invalid)-1]
					return d // nothing changes until it is known what this becomes
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
	for _, f := range files { // in order, for the sake of tests and logs
		if s, ok := parseDerived(f); ok && derived[s.File] != nil {
			d.changes = append(d.changes, change{name: f.name, old: f.text})
		}
	}
	if len(invalid) > 0 {
		note := "container runtimes do not get past a file that is not valid: " + strings.Join(invalid, "; ")
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

// edit adds the change that fn makes of a list.
func (d *decision) edit(f file, fn func(*list) ([]byte, error)) {
	out, err := fn(f.list)
	if err != nil {
		d.state, d.detail = StateBroken, join(d.detail, fmt.Sprintf("%s: %v", f.name, err))
		return
	}
	if !bytes.Equal(out, f.text) {
		d.changes = append(d.changes, change{name: f.name, old: f.text, new: out})
	}
}

// chain decides about the active file. A derived list that stays is taken out of
// derived.
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

// chainedIn tells whether the runtime would execute the plugin as things are.
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
