// SPDX-License-Identifier: Apache-2.0

// Package tidy_test holds the rules of the repository that a compiler and a
// linter do not check. A new rule goes here when it was broken once.
package tidy_test

import (
	"bufio"
	"bytes"
	"errors"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/smcr-io/kube-smcr/internal/testenv"
)

const (
	module = "github.com/smcr-io/kube-smcr"

	// maxLines is what a reader still takes in as one thing.
	maxLines = 800

	spdx = "SPDX-License-Identifier: Apache-2.0"
)

// pure are the packages without sockets, clock, locks and goroutines:
// everything that decides, as opposed to what carries decisions out.
var pure = []string{
	"api/v1alpha1",
	"internal/config",
	"internal/synqueue",
	"pkg/rdma",
	"pkg/rdma/internal/ssp",
	"pkg/rdma/internal/widecrc",
	"pkg/rdma/internal/wq",
	"pkg/rdma/iwarp",
	"pkg/rdma/rocev2",
	"pkg/rdma/vitcp",
	"pkg/sdp/bsdh",
	"pkg/sdp/socket",
	"pkg/sdp/portmap",
	"pkg/smcr/cdc",
	"pkg/smcr/clc",
	"pkg/smcr/linkgroup",
	"pkg/smcr/llc",
}

// impureImports are the standard packages that a PURE package does without.
var impureImports = []string{
	"context", "crypto/rand", "log", "log/slog", "math/rand", "net", "os", "os/exec", "os/signal",
	"runtime", "sync", "sync/atomic", "syscall", "unsafe",
}

// mayUseUnsafe are the packages of pkg/ that cannot do without: provider maps registered
// memory, verbs is C below, smcr and synopt make system calls that x/sys lacks, and tcpqp and soft
// such for which x/sys allocates.
var mayUseUnsafe = []string{"pkg/rdma/internal/provider", "pkg/rdma/internal/tcpqp", "pkg/rdma/soft", "pkg/rdma/verbs", "pkg/smcr", "pkg/smcr/synopt"}

// cgo is the only package with C: the rest of the project builds, and links
// statically, with CGO_ENABLED=0.
const cgo = "pkg/rdma/verbs"

// binary are the files that are data and not text.
var binary = []string{".o", ".pcap", ".pcapng", ".png", ".gz", ".bin"}

// file is one file of the repository.
type file struct {
	name string // relative to the root, with slashes
	text []byte
}

func (f *file) is(ext string) bool { return strings.HasSuffix(f.name, ext) }

func (f *file) generated() bool {
	head, _, _ := bytes.Cut(f.text, []byte("\npackage "))
	return generatedMark.Match(head)
}

var generatedMark = regexp.MustCompile(`(?m)^// Code generated .* DO NOT EDIT\.$`)

// repository reads every file of the checkout but what building leaves there.
func repository(t *testing.T) []*file {
	t.Helper()
	var files []*file
	err := filepath.WalkDir(".", func(name string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && foreign(name):
			return fs.SkipDir
		case !d.Type().IsRegular():
			return nil
		}
		text, err := os.ReadFile(name)
		if errors.Is(err, fs.ErrNotExist) {
			return nil // another test of this run removed its scratch file
		}
		if err != nil {
			return err
		}
		files = append(files, &file{name: filepath.ToSlash(name), text: text})
		return nil
	})
	if err != nil {
		t.Fatalf("read the repository: %v", err)
	}
	if len(files) == 0 {
		t.Fatal("the repository has no files")
	}
	return files
}

// foreign says whether a directory holds what is not of the repository: programs that were built, caches.
func foreign(dir string) bool {
	hidden := strings.HasPrefix(path.Base(filepath.ToSlash(dir)), ".")
	return slices.Contains([]string{"bin", "out"}, dir) || hidden && !slices.Contains([]string{".", ".ci", ".github"}, dir)
}

// sources are the Go files outside testdata.
func sources(t *testing.T) []*file {
	t.Helper()
	var files []*file
	for _, f := range repository(t) {
		if f.is(".go") && !strings.Contains("/"+f.name, "/testdata/") {
			files = append(files, f)
		}
	}
	return files
}

func TestRepository(t *testing.T) {
	t.Chdir(t.TempDir())
	for _, name := range []string{"a/b.go", ".ci/run", ".github/c.yml", ".cache/d.go", "a/.cache/e.go", "bin/f", "out/g", "a/out/h", ".i"} {
		if err := errors.Join(os.MkdirAll(path.Dir(name), 0o700), os.WriteFile(name, nil, 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	var got []string
	for _, f := range repository(t) {
		got = append(got, f.name)
	}
	if want := []string{".ci/run", ".github/c.yml", ".i", "a/b.go", "a/out/h"}; !slices.Equal(got, want) {
		t.Errorf("files of the repository: %q, want %q", got, want)
	}
}

func TestEveryFileNamesItsLicense(t *testing.T) {
	for _, f := range repository(t) {
		lines := strings.SplitN(string(f.text), "\n", 4)
		switch {
		case strings.Contains("/"+f.name, "/testdata/") || f.generated():
		case f.is(".go"):
			if lines[0] != "// "+spdx || len(lines) < 2 || lines[1] != "" {
				t.Errorf("%s: does not begin with %q and a blank line", f.name, "// "+spdx)
			}
		case f.is(".bpf.c"), f.is(".bpf.h"): // the kernel's helpers ask for a license compatible with the GPL
			if !strings.HasPrefix(lines[0], "// SPDX-License-Identifier: ") {
				t.Errorf("%s: its first line names no license", f.name)
			}
		case f.is(".sh"), f.is(".c"), f.is(".h"), f.name == "Makefile", f.name == ".ci/run":
			if !strings.Contains(strings.Join(lines[:min(2, len(lines))], "\n"), spdx) {
				t.Errorf("%s: %q is not in its first two lines", f.name, spdx)
			}
		}
	}
}

func TestEveryFileIsShort(t *testing.T) {
	for _, f := range repository(t) {
		if !f.is(".go") && !f.is(".sh") && !f.is(".c") || f.generated() {
			continue
		}
		if n := bytes.Count(f.text, []byte("\n")); n >= maxLines {
			t.Errorf("%s: %d lines; the limit is %d: cut it where its subject changes", f.name, n, maxLines)
		}
	}
}

// command matches the directories of programs.
var command = regexp.MustCompile(`^(bench|cmd|demo|tools)/`)

// Limits of a type: above them it is several.
const (
	maxMethods = 80
	maxFields  = 30
)

func TestEveryTypeIsSmall(t *testing.T) {
	methods, fields := map[string]int{}, map[string]int{}
	for _, f := range sources(t) {
		if strings.HasSuffix(f.name, "_test.go") || f.generated() {
			continue
		}
		tree, err := parser.ParseFile(token.NewFileSet(), f.name, f.text, parser.SkipObjectResolution)
		if err != nil {
			t.Fatalf("parse: %v", err)
		}
		dir := path.Dir(f.name)
		ast.Inspect(tree, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.FuncDecl:
				if n.Recv != nil {
					methods[dir+"."+receiver(n)]++
				}
				return false // types of a function are its own
			case *ast.TypeSpec:
				if s, ok := n.Type.(*ast.StructType); ok {
					fields[dir+"."+n.Name.Name] = s.Fields.NumFields()
				}
			}
			return true
		})
	}
	for name, n := range methods {
		if n > maxMethods {
			t.Errorf("%s: %d methods; the limit is %d: give what belongs together to a type of its own", name, n, maxMethods)
		}
	}
	for name, n := range fields {
		if n > maxFields {
			t.Errorf("%s: %d fields; the limit is %d: give what belongs together to a type of its own", name, n, maxFields)
		}
	}
}

// receiver names the type of a method.
func receiver(f *ast.FuncDecl) string {
	e := f.Recv.List[0].Type
	for {
		switch x := e.(type) {
		case *ast.StarExpr:
			e = x.X
		case *ast.IndexExpr:
			e = x.X
		case *ast.IndexListExpr:
			e = x.X
		case *ast.Ident:
			return x.Name
		default:
			return ""
		}
	}
}

// logCalls are the methods of *slog.Logger that take keys and values, and how many arguments come before these.
var logCalls = map[string]int{
	"Debug": 1, "Info": 1, "Warn": 1, "Error": 1, "With": 0,
	"DebugContext": 2, "InfoContext": 2, "WarnContext": 2, "ErrorContext": 2, "Log": 3,
}

// A query for errors in the logs of all programs needs one key.
func TestEveryLogKeyHasTheUsualForm(t *testing.T) {
	form := regexp.MustCompile(`^[a-z][a-zA-Z0-9]*$`)
	found := 0
	for _, f := range sources(t) {
		if strings.HasSuffix(f.name, "_test.go") || !strings.HasPrefix(f.name, "cmd/") && !strings.HasPrefix(f.name, "internal/") {
			continue
		}
		fset := token.NewFileSet()
		tree, err := parser.ParseFile(fset, f.name, f.text, parser.SkipObjectResolution)
		if err != nil {
			t.Fatalf("parse: %v", err)
		}
		ast.Inspect(tree, func(n ast.Node) bool {
			call, ok := n.(*ast.CallExpr)
			if !ok {
				return true
			}
			method, ok := call.Fun.(*ast.SelectorExpr)
			if !ok {
				return true
			}
			before, ok := logCalls[method.Sel.Name]
			if pkg, _ := method.X.(*ast.Ident); !ok || pkg != nil && pkg.Name == "http" { // http.Error
				return true
			}
			for i := before; i+1 < len(call.Args); i += 2 {
				key, ok := call.Args[i].(*ast.BasicLit)
				if !ok || key.Kind != token.STRING {
					continue // a method of another type, or a key that is not written out
				}
				found++
				name := strings.Trim(key.Value, "\"`")
				switch {
				case name == "error":
					t.Errorf("%v: log key %q; the usual one is \"err\"", fset.Position(key.Pos()), name)
				case !form.MatchString(name):
					t.Errorf("%v: log key %q is not in lowerCamelCase", fset.Position(key.Pos()), name)
				}
			}
			return true
		})
	}
	if found == 0 {
		t.Error("no log key found: this test checks nothing")
	}
}

func TestEveryPackageHasADoc(t *testing.T) {
	packages := map[string]bool{} // directory to "its doc.go, or a command's main.go, has a package comment"
	for _, f := range sources(t) {
		dir := path.Dir(f.name)
		if dir == "." {
			continue // this file is its own doc
		}
		base := path.Base(f.name)
		isDoc := base == "doc.go" || base == "main.go" && command.MatchString(dir)
		packages[dir] = packages[dir] || isDoc && packageComment(t, f) != ""
	}
	for dir, documented := range packages {
		if !documented {
			t.Errorf("%s: no doc.go with a package comment: what it is, who owns what, how to use it, limitations", dir)
		}
	}
}

func packageComment(t *testing.T, f *file) string {
	t.Helper()
	tree, err := parser.ParseFile(token.NewFileSet(), f.name, f.text, parser.ParseComments|parser.PackageClauseOnly)
	if err != nil {
		t.Fatalf("parse: %v", err)
	}
	return tree.Doc.Text()
}

// rooms are packages of many files, each of which is read beside its test.
var rooms = []string{
	"internal/agent", "internal/kube/report", "pkg/rdma/internal/softdev", "pkg/rdma/soft", "pkg/smcr", "pkg/smcr/linkgroup",
}

// A file that only declares constants and types has nothing to test.
func TestEveryFileOfARoomHasItsTest(t *testing.T) {
	tests, found := map[string]bool{}, map[string]bool{} // by name without the ending
	for _, f := range sources(t) {
		if name, ok := strings.CutSuffix(f.name, "_test.go"); ok {
			tests[name] = true
			if i := strings.LastIndexByte(name, '_'); i > 0 {
				tests[name[:i]] = true // x_netns_test.go: what of x needs a kernel, say
			}
		}
	}
	for _, f := range sources(t) {
		dir := path.Dir(f.name)
		if !slices.Contains(rooms, dir) || f.is("_test.go") {
			continue
		}
		tree, err := parser.ParseFile(token.NewFileSet(), f.name, f.text, parser.SkipObjectResolution)
		if err != nil {
			t.Fatalf("parse: %v", err)
		}
		isFunc := func(d ast.Decl) bool { _, ok := d.(*ast.FuncDecl); return ok }
		if !slices.ContainsFunc(tree.Decls, isFunc) {
			continue
		}
		found[dir] = true
		if name := strings.TrimSuffix(f.name, ".go"); !tests[name] {
			t.Errorf("%s: there is no %s_test.go beside it", f.name, path.Base(name))
		}
	}
	if len(found) != len(rooms) {
		t.Errorf("of the rooms %v only %d have files", rooms, len(found))
	}
}

func TestNothingIsLeftForLater(t *testing.T) {
	// Put together here so that this file does not find itself.
	mark := regexp.MustCompile(`\b(` + strings.Join([]string{"TO" + "DO", "FIX" + "ME", "XX" + "X"}, "|") + `)\b`)
	for _, f := range repository(t) {
		if isBinary(f) || path.Base(f.name) == "go.sum" || strings.Contains("/"+f.name, "/testdata/") {
			continue
		}
		for n, line := range bytes.Split(f.text, []byte("\n")) {
			if m := mark.Find(line); m != nil {
				t.Errorf("%s:%d: %s: finish it, or open an issue and say in the text what is so today", f.name, n+1, m)
			}
		}
	}
}

func TestNoFileNamesAPathOfThisMachine(t *testing.T) {
	checkout, err := os.Getwd()
	if err != nil {
		t.Fatalf("find the checkout: %v", err)
	}
	home := regexp.MustCompile(`(^|[\s"'=(:])/(home/[a-z][a-z0-9_-]*|Users/[A-Za-z]+|root)/`)
	gke := []byte("/home/kubernetes/bin") // where every node of GKE has CNI plugins
	for _, f := range repository(t) {
		if isBinary(f) {
			continue
		}
		for n, line := range bytes.Split(bytes.ReplaceAll(f.text, gke, nil), []byte("\n")) {
			if len(checkout) > len("/src") && bytes.Contains(line, []byte(checkout)) || home.Match(line) {
				t.Errorf("%s:%d: names a path of one machine: %s", f.name, n+1, line)
			}
		}
	}
}

func TestEveryFuzzTargetHasSeeds(t *testing.T) {
	target := regexp.MustCompile(`(?m)^func (Fuzz\w*)\((\w+) \*testing\.F\) \{\n((?s:.*?))^\}`)
	found := 0
	for _, f := range sources(t) {
		if !f.is("_test.go") {
			continue
		}
		for _, m := range target.FindAllSubmatch(f.text, -1) {
			found++
			name, param, body := string(m[1]), string(m[2]), m[3]
			corpus := path.Join(path.Dir(f.name), "testdata", "fuzz", name)
			entries, err := os.ReadDir(corpus)
			if err != nil && !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("read corpus: %v", err)
			}
			// Seeds are added in the target itself, by a helper that takes the
			// *testing.F, or lie in the corpus.
			uses := regexp.MustCompile(`\b` + param + `\.Add\(|\(` + param + `[,)]`)
			if !uses.Match(body) && len(entries) == 0 {
				t.Errorf("%s: %s has no seeds; take them from captures", f.name, name)
			}
		}
	}
	if found == 0 {
		t.Error("no fuzz target found; every parser has one")
	}
}

func TestEveryCorpusHasFiles(t *testing.T) {
	err := filepath.WalkDir(".", func(name string, d fs.DirEntry, err error) error {
		if err != nil || !d.IsDir() {
			return err
		}
		if foreign(name) {
			return fs.SkipDir
		}
		if !strings.Contains("/"+filepath.ToSlash(name)+"/", "/testdata/") {
			return nil
		}
		entries, err := os.ReadDir(name)
		if err == nil && len(entries) == 0 {
			t.Errorf("%s: empty, so its test tests nothing", name)
		}
		return err
	})
	if err != nil {
		t.Fatalf("walk: %v", err)
	}
}

// Editors and reviewers' tools go by it. Inputs that a fuzzer found have none.
func TestEveryFixtureHasAnExtension(t *testing.T) {
	found := 0
	for _, f := range repository(t) {
		name := "/" + f.name
		if !strings.Contains(name, "/testdata/") || strings.Contains(name, "/testdata/fuzz/") {
			continue
		}
		found++
		if path.Ext(f.name) == "" {
			t.Errorf("%s: has no extension", f.name)
		}
	}
	if found == 0 {
		t.Error("no fixture found: this test checks nothing")
	}
}

func TestEveryLinkOfTheDocsLeadsSomewhere(t *testing.T) {
	link := regexp.MustCompile(`\]\(([^)#:\s]+)(#[^)]*)?\)`)
	for _, f := range repository(t) {
		if !f.is(".md") {
			continue
		}
		for _, m := range link.FindAllSubmatch(f.text, -1) {
			name := filepath.Join(filepath.Dir(f.name), string(m[1]))
			if _, err := os.Stat(name); err != nil {
				t.Errorf("%s: link to %s: %v", f.name, m[1], err)
			}
		}
	}
}

// imports are the direct imports of each package of the module, without those
// of its tests.
func imports(t *testing.T) map[string][]string {
	t.Helper()
	all := map[string][]string{}
	for _, line := range goList(t, "-f", `{{.ImportPath}} {{join .Imports " "}}`, "./...") {
		words := strings.Fields(line)
		all[strings.TrimPrefix(words[0], module+"/")] = words[1:]
	}
	return all
}

func goList(t *testing.T, args ...string) []string {
	t.Helper()
	testenv.Builds("*") // what go reads
	cmd := exec.Command("go", append([]string{"list", "-e"}, args...)...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v\n%s", err, stderr.Bytes())
	}
	var lines []string
	for s := bufio.NewScanner(bytes.NewReader(out)); s.Scan(); {
		lines = append(lines, s.Text())
	}
	return lines
}

func TestPurePackagesImportNoShell(t *testing.T) {
	all := imports(t)
	for _, name := range pure {
		for _, imp := range all[name] {
			local, ours := strings.CutPrefix(imp, module+"/")
			switch {
			case slices.Contains(impureImports, imp):
				t.Errorf("%s imports %s; PURE packages take what they need from the caller", name, imp)
			case name == "internal/config" && local == "api/v1alpha1": // types only; they become values here
			case name == "pkg/rdma/internal/widecrc" && imp == "golang.org/x/sys/cpu": // what the processor can: constants
			case ours && local != "internal/invariant" && !slices.Contains(pure, local):
				t.Errorf("%s imports %s, which is not PURE", name, local)
			case !ours && strings.Contains(strings.Split(imp, "/")[0], ".") && name != "internal/config" && name != "api/v1alpha1":
				t.Errorf("%s imports %s; the protocol engine uses the standard library only", name, imp)
			}
		}
	}
}

func TestPurePackagesStartNoGoroutine(t *testing.T) {
	for _, f := range sources(t) {
		if f.is("_test.go") || !slices.Contains(pure, path.Dir(f.name)) {
			continue
		}
		set := token.NewFileSet()
		tree, err := parser.ParseFile(set, f.name, f.text, 0)
		if err != nil {
			t.Fatalf("parse: %v", err)
		}
		ast.Inspect(tree, func(n ast.Node) bool {
			switch n.(type) {
			case *ast.GoStmt, *ast.SelectStmt, *ast.SendStmt:
				t.Errorf("%s: PURE packages have one owner and never wait", set.Position(n.Pos()))
			}
			return true
		})
	}
}

// Tests do not sleep. Only a loop that waits for something outside the program
// may, and its line says for what.
func TestSleepsOfTestsArePolls(t *testing.T) {
	for _, f := range sources(t) {
		if !f.is("_test.go") || !bytes.Contains(f.text, []byte("// polls ")) {
			continue
		}
		set := token.NewFileSet()
		tree, err := parser.ParseFile(set, f.name, f.text, 0)
		if err != nil {
			t.Fatal(err)
		}
		lines := bytes.Split(f.text, []byte("\n"))
		var around []ast.Node
		ast.Inspect(tree, func(n ast.Node) bool {
			if n == nil {
				around = around[:len(around)-1]
				return true
			}
			around = append(around, n)
			call, ok := n.(*ast.SelectorExpr)
			if !ok || call.Sel.Name != "Sleep" {
				return true
			}
			at := set.Position(n.Pos())
			loop := slices.ContainsFunc(around, func(n ast.Node) bool { _, ok := n.(*ast.ForStmt); return ok })
			if !loop && bytes.Contains(lines[at.Line-1], []byte("// polls ")) {
				t.Errorf("%s: sleeps outside a loop that polls", at)
			}
			return true
		})
	}
}

func TestLibraryDoesNotImportTheProduct(t *testing.T) {
	for name, imps := range imports(t) {
		if !strings.HasPrefix(name, "pkg/") {
			continue
		}
		for _, imp := range imps {
			local, ours := strings.CutPrefix(imp, module+"/")
			switch {
			case ours && strings.HasPrefix(local, "internal/") &&
				local != "internal/invariant" && local != "internal/testenv":
				t.Errorf("%s imports %s; pkg/ stands without the product", name, local)
			case imp == "unsafe" && !slices.Contains(mayUseUnsafe, name):
				t.Errorf("%s imports unsafe; see mayUseUnsafe", name)
			}
		}
	}
}

// go test does not know what a test has go do, and would remember its outcome for too long.
func TestTestsSayWhatTheyBuild(t *testing.T) {
	starts := regexp.MustCompile(`exec\.Command(Context)?\((\w+(\.Context\(\))?, )?"go"`)
	own := []string{"internal/version/version_test.go", "cmd/cni-plugin/script_test.go"} // itself
	found := false
	for _, f := range sources(t) {
		test := strings.HasSuffix(f.name, "_test.go") || strings.HasPrefix(f.name, "test/vm/lab/")
		if !test || !starts.Match(f.text) || slices.Contains(own, f.name) {
			continue
		}
		found = true
		if !bytes.Contains(f.text, []byte("testenv.Builds(")) {
			t.Errorf("%s starts go; say what for by testenv.Builds", f.name)
		}
	}
	if !found {
		t.Error("no test starts go: this test checks nothing")
	}
}

func TestCgoIsInOnePlace(t *testing.T) {
	found := false
	for _, f := range sources(t) {
		if !bytes.Contains(f.text, []byte("\nimport \"C\"\n")) {
			continue
		}
		found = true
		if path.Dir(f.name) != cgo {
			t.Errorf("%s imports C; only %s does", f.name, cgo)
		}
	}
	if !found {
		t.Errorf("nothing in %s imports C: this test checks nothing", cgo)
	}
}

func TestPluginStaysSmall(t *testing.T) {
	const plugin = "cmd/cni-plugin"
	if _, err := os.Stat(plugin); errors.Is(err, fs.ErrNotExist) {
		t.Fatalf("%s is gone: this test checks nothing", plugin)
	}
	for _, dep := range goList(t, "-deps", "./"+plugin) {
		for _, heavy := range []string{
			"k8s.io/", "sigs.k8s.io/", "github.com/prometheus/",
			module + "/internal/agent", module + "/pkg/",
		} {
			if strings.HasPrefix(dep, heavy) {
				t.Errorf("%s depends on %s; it is executed once per pod and only talks to the agent's socket", plugin, dep)
			}
		}
	}
}

func isBinary(f *file) bool {
	return slices.Contains(binary, path.Ext(f.name))
}

// Every rule above reads the list of PURE packages; one that was renamed would
// silently not be checked.
func TestPurePackagesExist(t *testing.T) {
	all := imports(t)
	var missing []string
	for _, name := range pure {
		if _, ok := all[name]; !ok {
			missing = append(missing, name)
		}
	}
	if len(missing) > 0 {
		t.Errorf("no such packages: %s; mend the list of this test", strings.Join(missing, ", "))
	}
}

// Every make target begins with this script, and no test runs it.
func TestDepsRuns(t *testing.T) {
	text, err := exec.Command("tools/deps.sh", "nothing").CombinedOutput()
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.ExitCode() != 2 || !strings.HasPrefix(string(text), "usage: ") {
		t.Errorf("tools/deps.sh with a wrong argument: %v, %q; want exit code 2 and how to use it (an apostrophe in a list?)", err, text)
	}
}

// go list takes no package for that of the directory, and so would pass what a failed command left.
func TestMakeTestWantsPackages(t *testing.T) {
	text, err := exec.Command("make", "-n", "test", "PKG= ").CombinedOutput()
	if err == nil || !strings.Contains(string(text), "PKG names no package") {
		t.Errorf("make test without packages: %v\n%s", err, text)
	}
	if text, err := exec.Command("make", "-n", "test", "PKG=./pkg/smcr").CombinedOutput(); err != nil {
		t.Errorf("make test with a package: %v\n%s", err, text)
	}
}

// A test that draws a seed itself cannot be played again by tools/again, which would call what the test found flaky.
func TestSeedsAreOfTestenv(t *testing.T) {
	drawn := regexp.MustCompile(`(?i)seed\w* :?= (rand\.\w+\(\)|u?int64\(time\.Now)`)
	for _, f := range sources(t) {
		if strings.HasSuffix(f.name, "_test.go") && drawn.Match(f.text) {
			t.Errorf("%s draws a seed; take that of testenv.Seed", f.name)
		}
	}
}
