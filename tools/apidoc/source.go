// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// source is what the types say.
type source struct {
	kinds  []*typeDoc // in the order that readers want
	types  map[string]*typeDoc
	consts []constGroup
}

// typeDoc is a type of the API.
type typeDoc struct {
	name    string
	doc     string
	markers []string
	fields  []field // of a struct
}

// field is a field of a struct.
type field struct {
	name    string // in JSON
	typ     string // Go type
	doc     string
	markers []string
}

// constGroup is a declaration of string constants.
type constGroup struct {
	doc    string
	values []constant
}

type constant struct{ name, value, doc string }

// kindOrder is the order of the objects in the reference.
func kindOrder() []string { return []string{"SMCRPolicy", "SMCRLink", "SMCRNode", "SMCRPeerSlice"} }

func read(dir string) (*source, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("read the types: %w", err)
	}
	s := &source{types: map[string]*typeDoc{}}
	for _, e := range entries {
		name := e.Name()
		if !strings.HasSuffix(name, ".go") || strings.HasPrefix(name, "zz_") || strings.HasSuffix(name, "_test.go") {
			continue
		}
		file, err := parser.ParseFile(token.NewFileSet(), filepath.Join(dir, name), nil, parser.ParseComments)
		if err != nil {
			return nil, fmt.Errorf("read the types: %w", err)
		}
		for _, d := range file.Decls {
			if g, ok := d.(*ast.GenDecl); ok {
				s.add(g)
			}
		}
	}
	for _, k := range kindOrder() {
		t := s.types[k]
		if t == nil {
			return nil, fmt.Errorf("%s has no type %s", dir, k)
		}
		s.kinds = append(s.kinds, t)
	}
	return s, nil
}

func (s *source) add(g *ast.GenDecl) {
	switch g.Tok {
	case token.TYPE:
		for _, spec := range g.Specs {
			t := spec.(*ast.TypeSpec)
			doc, markers := comment(g.Doc)
			td := &typeDoc{name: t.Name.Name, doc: doc, markers: markers}
			if st, ok := t.Type.(*ast.StructType); ok {
				td.fields = fields(st)
			}
			s.types[td.name] = td
		}
	case token.CONST:
		doc, _ := comment(g.Doc)
		group := constGroup{doc: doc}
		for _, spec := range g.Specs {
			v := spec.(*ast.ValueSpec)
			if len(v.Values) != 1 {
				continue
			}
			lit, ok := v.Values[0].(*ast.BasicLit)
			if !ok || lit.Kind != token.STRING {
				continue
			}
			value, err := strconv.Unquote(lit.Value)
			if err != nil {
				continue
			}
			text, _ := comment(v.Doc)
			if text == "" {
				text, _ = comment(v.Comment)
			}
			group.values = append(group.values, constant{v.Names[0].Name, value, text})
		}
		if len(group.values) > 0 {
			s.consts = append(s.consts, group)
		}
	default:
	}
}

func fields(st *ast.StructType) []field {
	var out []field
	for _, f := range st.Fields.List {
		if f.Tag == nil {
			continue
		}
		tag, err := strconv.Unquote(f.Tag.Value)
		if err != nil {
			continue
		}
		_, after, _ := strings.Cut(tag, `json:"`)
		name, _, _ := strings.Cut(after, `"`)
		name, _, _ = strings.Cut(name, ",")
		if name == "" || name == "metadata" {
			continue
		}
		doc, markers := comment(f.Doc)
		out = append(out, field{name: name, typ: typeText(f.Type), doc: doc, markers: markers})
	}
	return out
}

// comment parts a comment into its text and its markers.
func comment(c *ast.CommentGroup) (text string, markers []string) {
	if c == nil {
		return "", nil
	}
	var lines []string
	for _, l := range c.List {
		line := strings.TrimPrefix(strings.TrimPrefix(l.Text, "//"), " ")
		if m, ok := strings.CutPrefix(line, "+"); ok {
			markers = append(markers, m)
		} else {
			lines = append(lines, line)
		}
	}
	return strings.TrimSpace(strings.Join(lines, "\n")), markers
}

func typeText(e ast.Expr) string {
	switch t := e.(type) {
	case *ast.Ident:
		return t.Name
	case *ast.StarExpr:
		return typeText(t.X)
	case *ast.ArrayType:
		return "[]" + typeText(t.Elt)
	case *ast.MapType:
		return "map[" + typeText(t.Key) + "]" + typeText(t.Value)
	case *ast.SelectorExpr:
		return t.Sel.Name
	}
	return "object"
}

// marker returns the value of the first marker of the name: KEY=VALUE, or "" if
// there is none. Values in quotes lose them.
func marker(markers []string, name string) string {
	for _, m := range markers {
		if v, ok := strings.CutPrefix(m, name+"="); ok {
			if u, err := strconv.Unquote(v); err == nil {
				return u
			}
			return v
		}
	}
	return ""
}

// rules returns the messages of the CEL rules.
func rules(markers []string) []string {
	var out []string
	for _, m := range markers {
		if !strings.HasPrefix(m, "kubebuilder:validation:XValidation:") {
			continue
		}
		_, after, ok := strings.Cut(m, `message=`)
		if !ok {
			continue
		}
		if text, err := strconv.Unquote(after); err == nil {
			out = append(out, text)
		}
	}
	return out
}

// reachable returns the structs that the kind is made of, outermost first.
func (s *source) reachable(t *typeDoc) []*typeDoc {
	var out []*typeDoc
	for _, f := range t.fields {
		inner := s.types[element(f.typ)]
		if inner == nil || inner.fields == nil || slices.Contains(out, inner) {
			continue
		}
		out = append(out, inner)
		for _, more := range s.reachable(inner) {
			if !slices.Contains(out, more) {
				out = append(out, more)
			}
		}
	}
	return out
}

// element is the type of the items of a list or of the values of a map.
func element(typ string) string {
	typ = strings.TrimPrefix(typ, "[]")
	if _, v, ok := strings.Cut(typ, "]"); ok {
		return v
	}
	return typ
}
