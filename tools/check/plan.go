// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"path"
	"regexp"
	"slices"
	"strings"
)

const module = "github.com/smcr-io/kube-smcr"

// apart are the packages that start clusters or guests, or take minutes.
var apart = regexp.MustCompile(`^test/(cluster(/lab|/rdma)?$|netns/apps$|vm/|scale$)`)

// readBy is which package tests what files without a package of their own say, by
// the beginning of their names.
var readBy = map[string]string{
	"charts/": "test/chart", "config/": "test/chart", ".github/": "test/chart", "Dockerfile": "test/chart", "Makefile": "test/chart",
}

// A pkg is a package of the module and what it imports, its tests included.
type pkg struct {
	dir     string // below the module's root, "." for the root
	imports []string
}

// A todo is what is tested, as directories in order.
type todo struct {
	changed   []string
	importers []string // of these
	apart     []string // changed, too, but only linted
}

func (t todo) String() string {
	say := func(dirs []string) string {
		if len(dirs) == 0 {
			return "none"
		}
		return strings.Join(dirs, " ")
	}
	return fmt.Sprintf("changed: %s\nimport these: %s\nonly linted: %s", say(t.changed), say(t.importers), say(t.apart))
}

// plan says what is tested when these files have changed. The package of the root,
// with the rules of the repository, always is, and so is not in it.
func plan(files []string, all []pkg) todo {
	dirs := map[string]bool{}
	for _, p := range all {
		dirs[p.dir] = true
	}
	changed := map[string]bool{}
	for _, f := range files {
		dir := packageOf(f, dirs)
		for prefix, reader := range readBy {
			if dir == "." && strings.HasPrefix(f, prefix) {
				dir = reader
			}
		}
		if dir != "." && dirs[dir] {
			changed[dir] = true
		}
	}
	var t todo
	for _, p := range all {
		switch {
		case p.dir == ".":
		case apart.MatchString(p.dir):
			if changed[p.dir] {
				t.apart = append(t.apart, p.dir)
			}
		case changed[p.dir]:
			t.changed = append(t.changed, p.dir)
		case slices.ContainsFunc(p.imports, func(i string) bool { return changed[local(i)] }):
			t.importers = append(t.importers, p.dir)
		}
	}
	slices.Sort(t.changed)
	slices.Sort(t.importers)
	slices.Sort(t.apart)
	return t
}

// packageOf is the directory of the package that a file is in or belongs to, as what
// is below testdata does.
func packageOf(file string, dirs map[string]bool) string {
	dir := path.Dir(file)
	for dir != "." && !dirs[dir] {
		dir = path.Dir(dir)
	}
	return dir
}

// local is the directory of a package of this module.
func local(importPath string) string {
	if importPath == module {
		return "."
	}
	dir, ours := strings.CutPrefix(importPath, module+"/")
	if !ours {
		return importPath
	}
	return dir
}
