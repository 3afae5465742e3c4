// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"strings"
)

// nameGroup are names of a document that belong together.
type nameGroup struct {
	title string
	names []documentName
}

// documentName is what the code has in place of one that a document gives.
type documentName struct {
	name, words string
	code        []reference
}

// readNames reads and resolves the names of a document: none, if it has no such file.
func (d *document) readNames(ix *source) ([]nameGroup, error) {
	file := path.Join(d.dir, "names")
	b, err := fs.ReadFile(ix.repo, file)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	groups, err := ix.parseNames(file, string(b))
	return groups, err
}

// parseNames parses the lines of a file: "= TITLE" begins a group, "NAME | CODE; CODE | words" is
// a name, and # begins a comment.
func (ix *source) parseNames(file, text string) ([]nameGroup, error) {
	var groups []nameGroup
	var errs []error
	seen := map[string]bool{}
	for i, line := range strings.Split(text, "\n") {
		bad := func(format string, args ...any) {
			errs = append(errs, fmt.Errorf("%s:%d: %s", file, i+1, fmt.Sprintf(format, args...)))
		}
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		if title, ok := strings.CutPrefix(line, "= "); ok {
			groups = append(groups, nameGroup{title: title})
			continue
		}
		parts := strings.Split(line, "|")
		if len(parts) != 3 || len(groups) == 0 {
			bad("want NAME | CODE | words, below a group: %q", line)
			continue
		}
		n := documentName{name: strings.TrimSpace(parts[0]), code: references(parts[1]), words: strings.TrimSpace(parts[2])}
		if seen[n.name] {
			bad("%s for the second time", n.name)
		}
		seen[n.name] = true
		if len(n.code) == 0 && n.words == "" {
			bad("%s has neither code nor words", n.name)
		}
		where := statement{id: n.name, line: fmt.Sprintf("%s:%d", file, i+1)}
		for j := range n.code {
			errs = append(errs, ix.find(&where, &n.code[j], false))
		}
		g := &groups[len(groups)-1]
		g.names = append(g.names, n)
	}
	return groups, errors.Join(errs...)
}

// renderNames writes the table of names, if there are any.
func renderNames(b *bytes.Buffer, groups []nameGroup) {
	if len(groups) == 0 {
		return
	}
	b.WriteString("## Names\n\nWhat the document's names are in Go.\n")
	for _, g := range groups {
		fmt.Fprintf(b, "\n**%s**\n\n| document | Go | |\n|---|---|---|\n", g.title)
		for _, n := range g.names {
			fmt.Fprintf(b, "| `%s` | %s | %s |\n", n.name, links(n.code), cell(n.words))
		}
	}
	b.WriteString("\n")
}
