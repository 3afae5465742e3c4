// SPDX-License-Identifier: Apache-2.0

package tidy_test

import (
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// notDrawn are rooms that the graph of ARCHITECTURE.md leaves out, with what is below
// them: nearly everything imports the first two, and a lone test the last.
var notDrawn = []string{"internal/invariant", "internal/version", "internal/cli/kubectl/kubectltest"}

// partOf names rooms whose packages are drawn as one.
var partOf = []string{"internal/testenv"}

var (
	// drawnRoom is a node of the graph: clc["pkg/smcr/clc: the handshake's messages"].
	drawnRoom = regexp.MustCompile(`(\w+)\["((?:api|cmd|config|internal|pkg)/[\w/-]+)(?::[^"]*)?"\]`)
	// drawnArrows are its imports: clc[...] --> rdma & llc.
	drawnArrows = regexp.MustCompile(`^\s*(\w+)(?:\[".*"\])? --> ([\w &]+)$`)
)

// graph is what ARCHITECTURE.md draws, or what the packages import: from a room, by
// its directory, to those that it imports.
type graph map[string][]string

// reaches tells whether there is a way of arrows.
func (g graph) reaches(from, to string) bool {
	return slices.ContainsFunc(g[from], func(next string) bool { return next == to || g.reaches(next, to) })
}

// TestArchitectureDrawsTheImports: the graph has every room, each arrow is an import,
// and each import is an arrow or a way of several.
//
// "agent --> smcr" and "smcr --> linkgroup" say enough of the agent's own import of
// linkgroup: drawn, all of them would hide the order of the rooms.
func TestArchitectureDrawsTheImports(t *testing.T) {
	drawn, real := drawnGraph(t), importGraph(t)
	for room, arrows := range drawn {
		if _, ok := real[room]; !ok {
			t.Errorf("ARCHITECTURE.md draws %s, which is no package", room)
		}
		for _, to := range arrows {
			if !slices.Contains(real[room], to) {
				t.Errorf("ARCHITECTURE.md draws %s --> %s, which is no import", room, to)
			}
		}
	}
	if t.Failed() {
		return // arrows that are imports make no circle, so that reaches ends
	}
	for room, imported := range real {
		if _, ok := drawn[room]; !ok {
			t.Errorf("ARCHITECTURE.md does not draw %s", room)
			continue
		}
		for _, to := range imported {
			if !drawn.reaches(room, to) {
				t.Errorf("ARCHITECTURE.md has no way from %s to %s, which it imports", room, to)
			}
		}
	}
}

func drawnGraph(t *testing.T) graph {
	t.Helper()
	text, err := os.ReadFile("ARCHITECTURE.md")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(text), "```mermaid")
	picture, _, _ := strings.Cut(rest, "```")
	g, room := graph{}, map[string]string{}
	for _, m := range drawnRoom.FindAllStringSubmatch(picture, -1) {
		if at := room[m[1]]; at != "" {
			t.Errorf("ARCHITECTURE.md draws %s twice, as %s and %s", m[1], at, m[2])
		}
		room[m[1]], g[m[2]] = m[2], nil
	}
	if len(g) == 0 {
		t.Fatal("ARCHITECTURE.md draws no rooms")
	}
	for line := range strings.Lines(picture) {
		m := drawnArrows.FindStringSubmatch(strings.TrimRight(line, "\n"))
		if m == nil {
			continue
		}
		for to := range strings.SplitSeq(m[2], " & ") {
			if room[m[1]] == "" || room[to] == "" {
				t.Errorf("ARCHITECTURE.md has an arrow from or to no room: %s", strings.TrimSpace(line))
			}
			g[room[m[1]]] = append(g[room[m[1]]], room[to])
		}
	}
	return g
}

func importGraph(t *testing.T) graph {
	t.Helper()
	within := func(dir string, rooms []string) string {
		i := slices.IndexFunc(rooms, func(room string) bool { return dir == room || strings.HasPrefix(dir, room+"/") })
		if i < 0 {
			return ""
		}
		return rooms[i]
	}
	// A package's room is its directory; "" if it is not drawn.
	roomOf := func(pkg string) string {
		dir, ours := strings.CutPrefix(pkg, module+"/")
		top, _, _ := strings.Cut(dir, "/")
		switch {
		case !ours || !slices.Contains([]string{"api", "cmd", "config", "internal", "pkg"}, top) || within(dir, notDrawn) != "":
			return ""
		case within(dir, partOf) != "":
			return within(dir, partOf)
		}
		return dir
	}
	g := graph{}
	for dir, imported := range imports(t) {
		room := roomOf(module + "/" + dir)
		if room == "" {
			continue
		}
		g[room] = append(g[room], nil...)
		for _, i := range imported {
			if to := roomOf(i); to != "" && to != room && !slices.Contains(g[room], to) {
				g[room] = append(g[room], to)
			}
		}
	}
	return g
}
