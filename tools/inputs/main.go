// SPDX-License-Identifier: Apache-2.0

// The inputs command tells go test what tests build: a variable for each program of the module, whose value changes when
// anything does that the program is made of.
//
//	env $(go run ./tools/inputs) go test ./test/vm/...
//
// A test that builds programs looks at their variables ([testenv.Builds]), and go test, which remembers the outcome of a test
// until something changes that the test looked at, runs it again when one of its programs is another one: a change of the
// controller does not start the guests. One that asks for something of its machine ([testenv.Need]) looks at the variable of that:
// it changes with the kernel and the programs that tests run.
//
// With -stamp all files of the checkout get a time that follows from their content. go test knows files by size and time: in
// a fresh clone all would be other ones.
package main

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/smcr-io/kube-smcr/internal/testenv"
)

func main() {
	stamp := flag.Bool("stamp", false, "give the checkout's files times that follow from their content")
	flag.Parse()
	var err error
	if *stamp {
		err = stampFiles(".")
	} else {
		err = printVariables(os.Stdout, ".")
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "inputs:", err)
		os.Exit(1)
	}
}

// printVariables prints the variables of the module in a directory.
func printVariables(w io.Writer, dir string) error {
	packages, err := list(dir)
	if err != nil {
		return err
	}
	common, err := commonHash(dir)
	if err != nil {
		return err
	}
	sums, err := hashPrograms(packages, common)
	if err != nil {
		return err
	}
	if sums["..."], err = hashFiles(dir, common, isProduct); err != nil {
		return err
	}
	if sums["*"], err = hashFiles(dir, common, func(string) bool { return true }); err != nil {
		return err
	}
	if sums["machine"], err = hashMachine(dir); err != nil {
		return err
	}
	names := make([]string, 0, len(sums))
	for p := range sums {
		names = append(names, p)
	}
	slices.Sort(names)
	for _, p := range names {
		if _, err := fmt.Fprintf(w, "%s=%s\n", testenv.InputVariable(p), sums[p]); err != nil {
			return err
		}
	}
	return nil
}

// A goPackage is what go list says of a package, or of one as it is built for some test.
type goPackage struct {
	ImportPath, Name, Dir string
	Module                *struct{ Main bool }
	Deps                  []string

	// The ignored files are for other systems, or for builds without cgo, as some programs are built.
	GoFiles, CgoFiles, IgnoredGoFiles, CFiles, HFiles, SFiles, EmbedFiles []string
}

func (p *goPackage) isOurs() bool { return p.Module != nil && p.Module.Main }

// list returns the packages of the module, their tests, and all that these are made of.
func list(dir string) (map[string]*goPackage, error) {
	cmd := exec.Command("go", "list", "-e", "-deps", "-test", "-json=ImportPath,Name,Dir,Module,Deps,GoFiles,CgoFiles,IgnoredGoFiles,CFiles,HFiles,SFiles,EmbedFiles", "./...")
	cmd.Dir, cmd.Stderr = dir, os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("list packages: %w", err)
	}
	packages := map[string]*goPackage{}
	for d := json.NewDecoder(bytes.NewReader(out)); ; {
		p := &goPackage{}
		switch err := d.Decode(p); {
		case errors.Is(err, io.EOF):
			return packages, nil
		case err != nil:
			return nil, fmt.Errorf("list packages: %w", err)
		}
		packages[p.ImportPath] = p
	}
}

// commonHash returns the hash of what all programs are made of: the modules of others, also those of tools, and go itself.
func commonHash(dir string) ([]byte, error) {
	h := sha256.New()
	cmd := exec.Command("go", "env", "GOVERSION", "GOFLAGS", "GOARCH", "CGO_ENABLED")
	cmd.Dir = dir
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("ask go for its version: %w", err)
	}
	h.Write(out)
	files, err := tracked(dir)
	if err != nil {
		return nil, err
	}
	modules := slices.DeleteFunc(files, func(f string) bool { return path.Base(f) != "go.mod" && path.Base(f) != "go.sum" })
	err = addFiles(h, dir, modules...)
	return h.Sum(nil), err
}

// hashPrograms returns the hashes of programs and of packages' tests, by import path: of the last a program of its own, as in "x/y.test".
func hashPrograms(packages map[string]*goPackage, common []byte) (map[string]string, error) {
	own := map[string][]byte{}
	for name, p := range packages {
		if !p.isOurs() {
			continue
		}
		h := sha256.New()
		files := slices.Concat(p.GoFiles, p.CgoFiles, p.IgnoredGoFiles, p.CFiles, p.HFiles, p.SFiles, p.EmbedFiles)
		files = slices.DeleteFunc(files, filepath.IsAbs) // what go itself writes for a test
		if err := addFiles(h, p.Dir, files...); err != nil {
			return nil, err
		}
		if strings.HasSuffix(name, ".test") {
			data, err := under(filepath.Join(p.Dir, "testdata"))
			if err == nil {
				err = addFiles(h, "", data...)
			}
			if err != nil {
				return nil, err
			}
		}
		own[name] = h.Sum(nil)
	}
	programs := map[string]string{}
	for name, p := range packages {
		if !p.isOurs() || p.Name != "main" || strings.Contains(name, " ") {
			continue
		}
		h := sha256.New()
		h.Write(common)
		h.Write(own[name])
		deps := slices.Clone(p.Deps)
		slices.Sort(deps)
		for _, d := range deps {
			if sum, ok := own[d]; ok {
				_, _ = fmt.Fprintf(h, "%s %x\n", d, sum)
			}
		}
		programs[name] = hex.EncodeToString(h.Sum(nil)[:12])
	}
	return programs, nil
}

// isProduct reports whether a file may be part of an image, a chart or a script: everything but tests and what only people read.
func isProduct(f string) bool {
	return !strings.HasSuffix(f, "_test.go") && path.Ext(f) != ".md" && !strings.HasPrefix(f, ".") && !strings.HasPrefix(f, "docs/")
}

// hashFiles is the hash of some files of the checkout.
func hashFiles(dir string, common []byte, some func(string) bool) (string, error) {
	files, err := tracked(dir)
	if err != nil {
		return "", err
	}
	h := sha256.New()
	h.Write(common)
	for _, f := range files {
		if !some(f) {
			continue
		}
		if _, err := fmt.Fprintln(h, path.Dir(f)); err != nil {
			return "", err
		}
		if err := addFiles(h, dir, f); err != nil {
			return "", err
		}
	}
	return hex.EncodeToString(h.Sum(nil)[:12]), nil
}

// tracked returns the files of a checkout, also those that git does not have yet. Without git, as in an unpacked archive, it returns all files.
func tracked(dir string) ([]string, error) {
	cmd := exec.Command("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--deduplicate")
	cmd.Dir = dir
	out, err := cmd.Output()
	files := strings.FieldsFunc(string(out), func(r rune) bool { return r == 0 })
	if err != nil {
		if files, err = under(dir); err != nil {
			return nil, err
		}
		for i, f := range files {
			if files[i], err = filepath.Rel(dir, f); err != nil {
				return nil, err
			}
		}
	}
	files = slices.DeleteFunc(files, func(f string) bool {
		i, err := os.Lstat(filepath.Join(dir, f))
		return err != nil || !i.Mode().IsRegular() // deleted, or a link, whose target is listed, too
	})
	slices.Sort(files)
	return files, nil
}

// under returns the files below a directory, if it is there.
func under(dir string) (files []string, err error) {
	err = filepath.WalkDir(dir, func(f string, e fs.DirEntry, err error) error {
		if err == nil && e.Type().IsRegular() {
			files = append(files, f)
		}
		return err
	})
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	return files, err
}

// addFiles adds names and contents of files to a hash.
func addFiles(h io.Writer, dir string, files ...string) error {
	for _, f := range files {
		b, err := os.ReadFile(filepath.Join(dir, f))
		if err != nil {
			return err
		}
		if _, err := fmt.Fprintf(h, "%s %x\n", filepath.Base(f), sha256.Sum256(b)); err != nil {
			return err
		}
	}
	return nil
}

// stampFiles gives files, and directories with them, times that follow from their content. These are of the years 2001 to 2016:
// go test does not trust a file that has just changed.
func stampFiles(dir string) error {
	files, err := tracked(dir)
	if err != nil {
		return err
	}
	const first, span = 1_000_000_000, 500_000_000
	at := func(f string, n uint64) error {
		t := time.Unix(int64(first+n%span), 0)
		return os.Chtimes(f, t, t)
	}
	dirs := map[string]bool{}
	for _, f := range files {
		b, err := os.ReadFile(filepath.Join(dir, f))
		if err != nil {
			return err
		}
		sum := sha256.Sum256(b)
		if err := at(filepath.Join(dir, f), binary.BigEndian.Uint64(sum[:])); err != nil {
			return err
		}
		for d := path.Dir(f); !dirs[d]; d = path.Dir(d) {
			dirs[d] = true
		}
	}
	for d := range dirs {
		if err := at(filepath.Join(dir, d), 0); err != nil {
			return err
		}
	}
	return nil
}
