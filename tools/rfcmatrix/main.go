// SPDX-License-Identifier: Apache-2.0

// Command rfcmatrix writes what protocol documents demand, statement by
// statement, where it is in the code, and which test proves it:
// docs/rfc7609.md of SMC-R, docs/iwarp.md of iWARP's four RFCs, docs/ssp.md of DAT's Socket Service
// Point, docs/vitcp.md of the draft of VI/TCP, docs/sdp.md of that of SDP, docs/portmap.md of its port mapper.
//
// It reads docs/rfc7609/*.txt and its like and checks that each function, type,
// constant and test named there exists, so that the table cannot rot: who renames
// or removes one of them hears of it from the test in this package.
//
// # The files
//
// A line that begins with § opens a section: its number and its title. A
// statement follows; a line that begins with blanks continues the one before
// it, and # begins a comment.
//
//	§4.5.1 Window updates
//
//	R4.5.1-1 MUST In our words, never the RFC's.
//	code: cdc.Conn.UpdateDue; linkgroup.MaxLinks
//	test: cdc.TestSection4_5_1_WindowUpdate; clc.TestParseErrors/trailer
//	exception: What we do instead, and why.
//
// Where a table is of several RFCs, a section begins with the number of its RFC:
// §5044.7.1.2 and R5044.7.1.2-1.
//
// The number is for good: later statements get later numbers, and the number
// of one that goes is not used again. The level is MUST, SHOULD or MAY, as
// the RFC means it: it often says must without capitals, or just says what
// happens on the wire.
//
//   - code: names as in Go: package and function, type, constant, variable,
//     or Type.Method, Type.field. Where two packages share a name, its
//     directory goes before it: internal/config.Config.
//   - test: a test or fuzz target, perhaps with a subtest, which is a string
//     of the test's file or a file below the package's testdata; or the path
//     of a file.
//   - exception: not done as the RFC says, on purpose.
//   - linux: done as the RFC says, but otherwise towards a Linux kernel.
//   - unused: a permission (MAY) that we do not use.
//   - alive: functions without which the tests pass, and why that is right:
//     NAME, NAME: reason.
//   - open: what is still missing. A statement that has none of code, test,
//     exception and unused is open, too.
//
// A file "names" beside them, if any, says what the names of the document's own interface are in
// Go: "= TITLE" begins a group, and a line "NAME | CODE; CODE | words" is a name, with code as
// above or words or both.
//
// Comments of pkg/smcr, and of the packages of the other documents, that name a
// section of the RFC are checked for sections that there are. For a table of several
// RFCs those count that stand behind the number of their RFC.
//
// # Proof
//
// With -prove it writes nothing, but switches each function off that a statement with
// tests names, as if it began with a return of zero values, and runs the tests of that
// statement. If all of them pass, they prove nothing about the function: the statement
// must name a test that fails, or say under alive why there is none.
//
//	make rfcmatrix ARGS='-prove'
//	make rfcmatrix ARGS='-prove -rows R3.5.2,C-errors -j 2'
//
// -rows takes beginnings of numbers, and names of files without .txt. No file of the
// repository is touched: the switches are in an overlay of "go test", all in one binary
// for each package with tests, and the environment says which one is off. What is known
// is kept in the user's cache directory until the binary or the package's testdata
// changes. All of it takes some minutes, and half an hour after a change of pkg/smcr.
//
// # Limitations
//
// That a test fails without a function does not say that they do what the statement
// asks for; reviewers do. Types, constants and fields cannot be switched off, and
// tests in guests and scripts are not run.
package main

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

const (
	exitFailed = 1
	exitUsage  = 2
)

func main() { os.Exit(run(os.Args[1:], os.Stderr)) }

func run(args []string, stderr io.Writer) int {
	flags := flag.NewFlagSet("rfcmatrix", flag.ContinueOnError)
	flags.SetOutput(stderr)
	check := flags.Bool("check", false, "write nothing; fail if a document is not up to date")
	proveIt := flags.Bool("prove", false, "write nothing; see that tests fail without the code that they prove")
	rows := flags.String("rows", "", "with -prove: beginnings of statements' numbers, or names of files, separated by commas")
	jobs := flags.Int("j", 1, "with -prove: how many tests run at a time")
	if err := flags.Parse(args); err != nil || flags.NArg() > 0 || *check && *proveIt || *jobs < 1 || *rows != "" && !*proveIt {
		return exitUsage
	}
	root, err := findRoot()
	switch {
	case err != nil:
	case *proveIt:
		err = prove(root, proof{rows: strings.FieldsFunc(*rows, func(r rune) bool { return r == ',' }), jobs: *jobs, log: stderr})
	default:
		err = update(root, *check)
	}
	if err != nil {
		fmt.Fprintf(stderr, "rfcmatrix: %v\n", err)
		return exitFailed
	}
	return 0
}

// findRoot looks for the module's root at and above the working directory.
func findRoot() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for {
		if _, err := os.Stat(filepath.Join(dir, documents[0].dir)); err == nil {
			return dir, nil
		}
		up := filepath.Dir(dir)
		if up == dir {
			return "", errors.New("no " + documents[0].dir + " here or above: run it in the repository")
		}
		dir = up
	}
}

// update writes the documents, or with check only compares them.
func update(root string, check bool) error {
	repo := os.DirFS(root)
	ix, err := readSource(repo)
	if err != nil {
		return err
	}
	var errs []error
	for i := range documents {
		errs = append(errs, documents[i].update(root, ix, check))
	}
	return errors.Join(errs...)
}

func (d *document) update(root string, ix *source, check bool) error {
	sections, err := d.load(ix)
	if err != nil {
		return err
	}
	names, err := d.readNames(ix)
	if err != nil {
		return err
	}
	want := d.render(sections, names)
	if !check {
		return os.WriteFile(filepath.Join(root, d.output()), want, 0o644)
	}
	got, err := fs.ReadFile(ix.repo, d.output())
	if err != nil {
		return err
	}
	if !bytes.Equal(got, want) {
		return fmt.Errorf("%s is not up to date: run make rfcmatrix and commit it", d.output())
	}
	return nil
}

// load reads the statements and checks them against the code.
func (d *document) load(ix *source) ([]*section, error) {
	sections, err := d.readStatements(ix.repo)
	if err != nil {
		return nil, err
	}
	return sections, errors.Join(ix.resolve(sections), ix.checkCitations(d, sections))
}
