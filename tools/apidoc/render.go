// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"fmt"
	"slices"
	"strings"
)

const head = `# API reference

The Kubernetes objects of kube-smcr, group ` + "`smcr.io/v1alpha1`" + `. ` + "`kubectl explain smcrpolicy.spec`" + ` says the same.
People write only [SMCRPolicy](#smcrpolicy), and annotations; everything else is written by agents and controller.
[Operations](operations.md) says how to use them.

This file is generated from the types in api/v1alpha1 by ` + "`go generate ./api/...`" + `; do not edit it.
`

// generate returns the reference of the types in a directory.
func generate(dir string) ([]byte, error) {
	s, err := read(dir)
	if err != nil {
		return nil, err
	}
	var b bytes.Buffer
	b.WriteString(head)
	done := map[*typeDoc]bool{}
	for _, k := range s.kinds {
		s.kind(&b, k)
		for _, t := range s.reachable(k) {
			if !done[t] {
				done[t] = true
				s.object(&b, t)
			}
		}
	}
	s.names(&b)
	return b.Bytes(), nil
}

// kind writes the head of an object, and its fields if it has some besides spec
// and status.
func (s *source) kind(b *bytes.Buffer, t *typeDoc) {
	fmt.Fprintf(b, "\n## %s\n\n", t.name)
	resource := ""
	for _, m := range t.markers {
		if v, ok := strings.CutPrefix(m, "kubebuilder:resource:"); ok {
			resource = v
		}
	}
	scope, short := "In a namespace", ""
	for part := range strings.SplitSeq(resource, ",") {
		if part == "scope=Cluster" {
			scope = "Of the cluster"
		}
		if v, ok := strings.CutPrefix(part, "shortName="); ok {
			short = v
		}
	}
	fmt.Fprintf(b, "%s; short name `%s`.\n\n%s\n\n", scope, short, paragraphs(t.doc))
	s.table(b, t)
}

func (s *source) object(b *bytes.Buffer, t *typeDoc) {
	fmt.Fprintf(b, "\n### %s\n\n%s\n\n", t.name, paragraphs(t.doc))
	s.table(b, t)
}

func (s *source) table(b *bytes.Buffer, t *typeDoc) {
	b.WriteString("| field | type | default | allowed | meaning |\n|---|---|---|---|---|\n")
	for _, f := range t.fields {
		fmt.Fprintf(b, "| `%s` | %s | %s | %s | %s |\n", f.name, s.typeCell(f.typ), code(marker(f.markers, "kubebuilder:default")), s.allowed(f), cell(f.doc))
	}
	refused := rules(t.markers)
	for _, f := range t.fields {
		for _, r := range rules(s.markers(f)) {
			refused = append(refused, code(f.name)+": "+r)
		}
	}
	if len(refused) > 0 {
		fmt.Fprintf(b, "\nRefused, with these words:\n\n- %s\n", strings.Join(refused, "\n- "))
	}
}

// typeCell names a type in terms of YAML, with a link to its table.
func (s *source) typeCell(typ string) string {
	if rest, ok := strings.CutPrefix(typ, "[]"); ok {
		return "list of " + s.typeCell(rest)
	}
	if strings.HasPrefix(typ, "map[") {
		return "map of " + s.typeCell(element(typ))
	}
	switch typ {
	case "int32", "int64":
		return "integer"
	case "bool":
		return "boolean"
	case "Time":
		return "time"
	case "Quantity":
		return "quantity"
	case "Condition":
		return "condition"
	}
	if t := s.types[typ]; t != nil && t.fields != nil {
		return fmt.Sprintf("[%s](#%s)", typ, strings.ToLower(typ))
	}
	return "string"
}

// allowed says what the API server lets through.
func (s *source) allowed(f field) string {
	var parts []string
	markers := s.markers(f)
	if v := marker(markers, "kubebuilder:validation:Enum"); v != "" {
		var values []string
		for one := range strings.SplitSeq(v, ";") {
			values = append(values, code(strings.Trim(one, `"`)))
		}
		parts = append(parts, strings.Join(values, ", "))
	}
	low, high := marker(markers, "kubebuilder:validation:Minimum"), marker(markers, "kubebuilder:validation:Maximum")
	switch {
	case low != "" && high != "":
		parts = append(parts, low+" to "+high)
	case low != "":
		parts = append(parts, low+" or more")
	}
	for _, l := range []struct{ marker, text string }{
		{"MinItems", "at least %s items"},
		{"MaxItems", "at most %s items"},
		{"MaxProperties", "at most %s labels"},
	} {
		if v := marker(markers, "kubebuilder:validation:"+l.marker); v != "" {
			text := fmt.Sprintf(l.text, v)
			if v == "1" {
				text = strings.TrimSuffix(text, "s")
			}
			parts = append(parts, text)
		}
	}
	if v := marker(markers, "kubebuilder:validation:MaxLength"); v != "" && marker(markers, "kubebuilder:validation:Enum") == "" {
		each := ""
		if element(f.typ) != f.typ {
			each = "each "
		}
		parts = append(parts, each+"at most "+v+" characters")
	}
	for _, m := range f.markers {
		if m == "required" {
			parts = append([]string{"required"}, parts...)
		}
	}
	return strings.Join(parts, "; ")
}

// markers returns the markers of the field and of its type.
func (s *source) markers(f field) []string {
	if t := s.types[element(f.typ)]; t != nil && t.fields == nil {
		return slices.Concat(f.markers, t.markers)
	}
	return f.markers
}

// names writes the tables of annotations, conditions and other words.
func (s *source) names(b *bytes.Buffer) {
	b.WriteString("\n## Names\n")
	for _, g := range s.consts {
		title := strings.TrimSuffix(g.doc, ".")
		if title == "" {
			continue
		}
		var rows []constant
		for _, v := range g.values {
			if v.doc != "" {
				rows = append(rows, v)
			}
		}
		if len(rows) == 0 || strings.Contains(title, "group of all objects") {
			continue
		}
		fmt.Fprintf(b, "\n### %s\n\n| name | meaning |\n|---|---|\n", title)
		for _, v := range rows {
			fmt.Fprintf(b, "| `%s` | %s |\n", v.value, cell(goNames(v.doc, g)))
		}
	}
}

// goNames puts the words themselves in place of the names of their constants.
func goNames(doc string, g constGroup) string {
	for _, v := range g.values {
		doc = strings.ReplaceAll(doc, v.name, "`"+v.value+"`")
	}
	return strings.ReplaceAll(doc, "one of the PodStatus\nwords", "one of the words of the next table")
}

func code(s string) string {
	if s == "" {
		return ""
	}
	return "`" + s + "`"
}

// cell makes one line of a text, for a table.
func cell(s string) string {
	return strings.ReplaceAll(strings.Join(strings.Fields(s), " "), "|", `\|`)
}

// paragraphs keeps the paragraphs of a comment and joins their lines.
func paragraphs(s string) string {
	var out []string
	for p := range strings.SplitSeq(s, "\n\n") {
		out = append(out, strings.Join(strings.Fields(p), " "))
	}
	return strings.Join(out, "\n\n")
}
