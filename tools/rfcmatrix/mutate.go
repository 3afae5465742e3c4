// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// offEnv names the function that is switched off in a process of an instrumented test
// binary. Without it all are on.
const offEnv = "RFCMATRIX_OFF"

// switchFile is what each package with such functions gets besides its own files.
const switchFile = "rfcmatrix_switch.go"

// target is a function that can be switched off.
type target struct {
	dir  string // of its package
	name string // or Type.Name
}

func (t target) String() string { return t.dir + "." + t.name }

// overlay copies the files in which targets are declared to tmp, with a way out at the
// beginning of each target, and writes what "go test -overlay" reads. All targets are in
// one binary, which so has to be built once; which one is off, its environment says.
func overlay(root, tmp string, targets []target) (string, error) {
	byDir := map[string][]string{}
	for _, t := range targets {
		byDir[t.dir] = append(byDir[t.dir], t.name)
	}
	replace := map[string]string{}
	put := func(file string, b []byte) error {
		copied := filepath.Join(tmp, strconv.Itoa(len(replace))+".go")
		replace[filepath.Join(root, file)] = copied
		return os.WriteFile(copied, b, 0o600)
	}
	for _, dir := range sortedKeys(byDir) {
		files, err := filepath.Glob(filepath.Join(root, dir, "*.go"))
		if err != nil {
			return "", err
		}
		pkg := ""
		for _, name := range files {
			if strings.HasSuffix(name, "_test.go") {
				continue
			}
			src, err := os.ReadFile(name)
			if err != nil {
				return "", err
			}
			b, in, err := instrument(name, src, dir, byDir[dir])
			if err != nil {
				return "", err
			}
			if b == nil {
				continue
			}
			pkg = in
			if err := put(path.Join(dir, filepath.Base(name)), b); err != nil {
				return "", err
			}
		}
		if pkg != "" {
			off := fmt.Sprintf("package %s\n\nimport \"os\"\n\nvar rfcmatrixOff = os.Getenv(%q)\n", pkg, offEnv)
			if err := put(path.Join(dir, switchFile), []byte(off)); err != nil {
				return "", err
			}
		}
	}
	list, err := json.Marshal(map[string]any{"Replace": replace})
	if err != nil {
		return "", err
	}
	out := filepath.Join(tmp, "overlay.json")
	return out, os.WriteFile(out, list, 0o600)
}

// instrument gives functions of a file a way out: at once, with zero values. It returns
// nil if none of them is there.
func instrument(name string, src []byte, dir string, functions []string) (_ []byte, pkg string, err error) {
	fset := token.NewFileSet()
	f, err := parser.ParseFile(fset, name, src, parser.SkipObjectResolution)
	if err != nil {
		return nil, "", err
	}
	var b bytes.Buffer
	done := 0
	for _, d := range f.Decls {
		fn, ok := d.(*ast.FuncDecl)
		if !ok || fn.Body == nil || !slices.Contains(functions, functionName(fn)) {
			continue
		}
		at := fset.Position(fn.Body.Lbrace).Offset + 1
		b.Write(src[done:at])
		fmt.Fprintf(&b, " if rfcmatrixOff == %q { return %s }; ", target{dir, functionName(fn)}.String(), zeros(fset, src, fn.Type.Results))
		done = at
	}
	if done == 0 {
		return nil, "", nil
	}
	b.Write(src[done:])
	return b.Bytes(), f.Name.Name, nil
}

// functionName is the name of a function, or Type.Name of a method.
func functionName(fn *ast.FuncDecl) string {
	if fn.Recv == nil {
		return fn.Name.Name
	}
	return receiver(fn.Recv.List[0].Type) + "." + fn.Name.Name
}

// zeros are the zero values of a function's results; nothing where these have names.
func zeros(fset *token.FileSet, src []byte, results *ast.FieldList) string {
	if results == nil {
		return ""
	}
	var all []string
	for _, r := range results.List {
		if len(r.Names) > 0 {
			return ""
		}
		from, to := fset.Position(r.Type.Pos()).Offset, fset.Position(r.Type.End()).Offset
		all = append(all, "*new("+string(src[from:to])+")")
	}
	return strings.Join(all, ", ")
}

func sortedKeys[V any](m map[string]V) []string {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}
