// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// source knows the names of the repository's Go packages.
type source struct {
	repo     fs.FS
	packages map[string]*pkg // by directory
	cites    []citation
}

// pkg is a package with its tests, the external ones included.
type pkg struct {
	symbols map[string]symbol          // by name, or Type.Name
	tests   map[string]string          // test function to file
	strings map[string]map[string]bool // file of tests to the strings in it
	data    map[string]string          // base names below testdata to path
}

// symbol is where a name is declared.
type symbol struct {
	file string
	line int // of a function; 0: the name is no function's
}

// citation is a section of an RFC named by a comment; rfc is empty if the comment
// names none before it.
type citation struct{ rfc, section, file, where string }

// readSource parses every Go file of the module, whatever its build tags.
func readSource(repo fs.FS) (*source, error) {
	ix := &source{repo: repo, packages: map[string]*pkg{}}
	err := fs.WalkDir(repo, ".", func(name string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir():
			if name != "." && (strings.HasPrefix(d.Name(), ".") || name == "bin" || name == "out" || name == "tools/pinned") {
				return fs.SkipDir
			}
			return nil
		case strings.Contains("/"+name, "/testdata/"):
			dir, _, _ := strings.Cut("/"+name, "/testdata/")
			base, data := path.Base(name), ix.at(strings.TrimPrefix(dir, "/")).data
			data[base] = name
			data[strings.TrimSuffix(base, ".txt")] = name // as datadriven calls its subtests
			return nil
		case strings.HasSuffix(name, ".go"):
			return ix.parse(name)
		}
		return nil
	})
	return ix, err
}

func (ix *source) at(dir string) *pkg {
	p := ix.packages[dir]
	if p == nil {
		p = &pkg{map[string]symbol{}, map[string]string{}, map[string]map[string]bool{}, map[string]string{}}
		ix.packages[dir] = p
	}
	return p
}

func (ix *source) parse(name string) error {
	b, err := fs.ReadFile(ix.repo, name)
	if err != nil {
		return err
	}
	fset := token.NewFileSet()
	f, err := parser.ParseFile(fset, name, b, parser.ParseComments|parser.SkipObjectResolution)
	if err != nil {
		return err
	}
	p := ix.at(path.Dir(name))
	if strings.HasSuffix(name, "_test.go") {
		p.addTests(f, name)
	} else {
		p.addSymbols(f, fset, name)
	}
	if slices.ContainsFunc(documents, func(d document) bool { return d.covers(name) }) {
		for _, group := range f.Comments {
			for _, c := range group.List {
				ix.cites = append(ix.cites, citations(c.Text, name, fset.Position(c.Pos()).String())...)
			}
		}
	}
	return nil
}

func (p *pkg) addTests(f *ast.File, name string) {
	for _, d := range f.Decls {
		if fn, ok := d.(*ast.FuncDecl); ok && fn.Recv == nil && testName.MatchString(fn.Name.Name) {
			p.tests[fn.Name.Name] = name
		}
	}
	p.strings[name] = map[string]bool{}
	ast.Inspect(f, func(n ast.Node) bool {
		if lit, ok := n.(*ast.BasicLit); ok && lit.Kind == token.STRING {
			if s, err := strconv.Unquote(lit.Value); err == nil {
				p.strings[name][s] = true
			}
		}
		return true
	})
}

func (p *pkg) addSymbols(f *ast.File, fset *token.FileSet, file string) {
	for _, d := range f.Decls {
		switch d := d.(type) {
		case *ast.FuncDecl:
			name := d.Name.Name
			if d.Recv != nil {
				name = receiver(d.Recv.List[0].Type) + "." + name
			}
			p.symbols[name] = symbol{file, fset.Position(d.Pos()).Line}
		case *ast.GenDecl:
			for _, spec := range d.Specs {
				p.addSpec(spec, file)
			}
		}
	}
}

func (p *pkg) addSpec(spec ast.Spec, file string) {
	switch s := spec.(type) {
	case *ast.ValueSpec:
		for _, n := range s.Names {
			p.symbols[n.Name] = symbol{file: file}
		}
	case *ast.TypeSpec:
		p.symbols[s.Name.Name] = symbol{file: file}
		var fields *ast.FieldList
		switch t := s.Type.(type) {
		case *ast.StructType:
			fields = t.Fields
		case *ast.InterfaceType:
			fields = t.Methods
		default:
			return
		}
		for _, f := range fields.List {
			for _, n := range f.Names {
				p.symbols[s.Name.Name+"."+n.Name] = symbol{file: file}
			}
		}
	}
}

// receiver is the name of a method's type.
func receiver(t ast.Expr) string {
	switch t := t.(type) {
	case *ast.StarExpr:
		return receiver(t.X)
	case *ast.IndexExpr:
		return receiver(t.X)
	case *ast.IndexListExpr:
		return receiver(t.X)
	case *ast.Ident:
		return t.Name
	}
	return ""
}

var (
	testName      = regexp.MustCompile(`^(Test|Fuzz|Benchmark|Example)`)
	referenceForm = regexp.MustCompile(`^([a-z0-9_/-]+)\.([A-Za-z_][\w.]*)(?:/(.+))?$`)
	citationForm  = regexp.MustCompile(`(RFC (\d+)[^§]{0,20})?§ ?([0-9][0-9.]*[0-9]|[0-9])`)
)

// citations finds the sections that a comment names. They are of the RFC whose number
// stands before them.
func citations(comment, file, where string) []citation {
	var all []citation
	rfc := ""
	for _, m := range citationForm.FindAllStringSubmatch(comment, -1) {
		if m[2] != "" {
			rfc = m[2]
		}
		all = append(all, citation{rfc, m[3], file, where})
	}
	return all
}

// checkCitations finds comments that name a section which the document has not.
func (ix *source) checkCitations(d *document, sections []*section) error {
	known := map[string]bool{}
	for _, s := range sections {
		for n := s.number; n != ""; {
			known[n] = true
			i := strings.LastIndexByte(n, '.')
			n = n[:max(i, 0)]
		}
	}
	var errs []error
	for _, c := range ix.cites {
		n := d.section(c)
		if d.covers(c.file) && n != "" && !known[n] {
			errs = append(errs, fmt.Errorf("%s: %s has no §%s, or %s lacks it", c.where, d.about, n, d.dir))
		}
	}
	return errors.Join(errs...)
}

// resolve finds where every name is.
func (ix *source) resolve(sections []*section) error {
	var errs []error
	for _, sec := range sections {
		for _, s := range sec.statements {
			for i := range s.code {
				errs = append(errs, ix.find(s, &s.code[i], false))
			}
			for i := range s.tests {
				errs = append(errs, ix.find(s, &s.tests[i], true))
			}
		}
	}
	return errors.Join(errs...)
}

func (ix *source) find(s *statement, r *reference, test bool) error {
	fail := func(format string, args ...any) error {
		return fmt.Errorf("%s: %s: %s: %s", s.line, s.id, r.name, fmt.Sprintf(format, args...))
	}
	if _, err := fs.Stat(ix.repo, r.name); err == nil && strings.Contains(r.name, "/") {
		r.file = r.name
		return nil
	}
	m := referenceForm.FindStringSubmatch(r.name)
	if m == nil {
		return fail("neither package.Name nor a file")
	}
	dir, err := ix.lookUp(m[1])
	if err != nil {
		return fail("%v", err)
	}
	p := ix.packages[dir]
	switch {
	case test:
		r.file, r.dir, r.test, r.subtest = p.tests[m[2]], dir, m[2], m[3]
	case m[3] == "":
		r.symbol = p.symbols[m[2]]
		r.file = r.symbol.file
	}
	switch sub := m[3]; {
	case r.file == "" && test:
		return fail("there is no such test")
	case r.file == "":
		return fail("there is no such function, type, constant, variable, method or field")
	case sub == "" || p.strings[r.file][sub]:
		return nil
	case p.data[sub] != "":
		r.file = p.data[sub]
		return nil
	default:
		return fail("%s names no such subtest, and testdata has no such file", r.file)
	}
}

func underTest(dir string) bool { return strings.HasPrefix(dir, "test/") }

// lookUp finds a package by the end of its directory. A package under test has a
// name that the one it tests may have too, and is then named from test on.
func (ix *source) lookUp(name string) (string, error) {
	var dirs []string
	for dir, p := range ix.packages {
		if (dir == name || strings.HasSuffix(dir, "/"+name)) && len(p.symbols)+len(p.tests) > 0 {
			dirs = append(dirs, dir)
		}
	}
	slices.Sort(dirs)
	if tested := slices.DeleteFunc(slices.Clone(dirs), underTest); len(tested) == 1 {
		dirs = tested
	}
	switch len(dirs) {
	case 0:
		return "", errors.New("there is no such package")
	case 1:
		return dirs[0], nil
	default:
		return "", fmt.Errorf("name one of %s", strings.Join(dirs, ", "))
	}
}
