// SPDX-License-Identifier: Apache-2.0

package main

import (
	"io/fs"
	"slices"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"

	"github.com/smcr-io/kube-smcr/internal/testenv"
)

// The document in the repository is what the statements and the code say now.
func TestDocumentIsUpToDate(t *testing.T) {
	testenv.Builds("*")
	root, err := findRoot()
	if err != nil {
		t.Fatal(err)
	}
	if err := update(root, true); err != nil {
		t.Error(err)
	}
}

func TestParseStatements_rejects(t *testing.T) {
	const head = "§4.5.1 Window updates\n\nR4.5.1-1 MUST Do it.\n"
	for _, tt := range []struct{ name, text, want string }{
		{"prose", "Do it.", "f:1: neither a section"},
		{"statement before a section", "R1-1 MUST Do it.", "f:1: statement R1-1 does not stand in its section"},
		{"statement of another section", "§2 Links\nR1-1 MUST Do it.", "f:2: statement R1-1 does not stand in its section"},
		{"number again", head + "\nR4.5.1-1 MAY Do it.", "f:5: statement R4.5.1-1 after number 1"},
		{"level", "§2 Links\nR2-1 SHALL Do it.", "f:2: neither a section"},
		{"field without a statement", "§2 Links\ncode: a.B", "f:2: code without a statement"},
		{"continuation of nothing", head + "\n  and more", "f:5: nothing to continue"},
		{"field twice", head + "code: a.B\ncode: a.C", "f:5: R4.5.1-1: a second code"},
		{"unused duty", head + "unused: no", "only a MAY can be unused"},
		{"unused exception", "§2 Links\nR2-1 MAY Do it.\nunused: no\nexception: no", "unused, and an exception"},
		{"open exception", head + "exception: no\nopen: no", "an exception, and open"},
		{"exception of an exception", head + "exception: no\nlinux: no", "an exception towards Linux of what"},
		{"test without code", head + "test: a.TestB", "a test, but no code"},
		{"alive, of other code", head + "code: a.B\nalive: a.C: no", `"a.C" is not among its code`},
		{"alive, without a reason", head + "code: a.B\nalive: because", `"because" is not among its code`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, err := parseStatements("f", tt.text)
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("error %v, want %q", err, tt.want)
			}
		})
	}
}

func TestStatement_state(t *testing.T) {
	const text = `# comment
§2 Links

R2-1 MUST Do it,
  and well.
code: a.B;
  a.C
test: a.TestB; a.TestC/d,
  and e

R2-2 MUST Do it.
code: a.B

R2-3 MUST Do it.
code: a.B
test: a.TestB
exception: Not so.

R2-4 MAY Do it.
unused: No.

R2-5 MUST Do it.

R2-7 MUST Do it.
code: a.B
test: a.TestB
open: Half of it.

R2-8 MUST Do it.
code: a.B
test: a.TestB
linux: Not to Linux.
`
	sections, err := parseStatements("f", text)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, s := range sections[0].statements {
		got = append(got, s.id+" "+s.state().String())
	}
	want := []string{"R2-1 tested", "R2-2 implemented", "R2-3 exception", "R2-4 not used", "R2-5 open", "R2-7 open", "R2-8 tested"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("states (-want +got):\n%s", diff)
	}
	first := sections[0].statements[0]
	if first.text != "Do it, and well." || len(first.code) != 2 || first.tests[1].name != "a.TestC/d, and e" {
		t.Errorf("first statement: %+v", first)
	}
}

func TestCompareNumbers(t *testing.T) {
	want := []string{"1", "2", "2.2", "2.2.1", "2.10", "3.5", "4", "A", "A.2", "A.2.1", "B", "C.7.1"}
	got := slices.Clone(want)
	slices.Reverse(got)
	slices.SortFunc(got, compareNumbers)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// repo is a small repository.
func repo(statements string) fstest.MapFS {
	file := func(s string) *fstest.MapFile { return &fstest.MapFile{Data: []byte(s)} }
	return fstest.MapFS{
		"docs/rfc7609/2.txt": file("§2 Links\n§3.5.5.1.4 Deleting\n" + statements),
		"pkg/smcr/cdc/conn.go": file(`package cdc
// RFC 7609 §2 and §3.5.5: both exist. RFC 9293 §77 is another RFC's.
const Limit = 1
type Conn struct{ field int }
type Doer interface{ Do() }
func (c *Conn) Next() {}
func free() {}
`),
		"pkg/smcr/cdc/conn_test.go": file(`package cdc_test
func TestNext(t *testing.T) { t.Run("row one (C.1)", nil) }
func FuzzNext(f *testing.F) {}
func helper() {}
`),
		"pkg/smcr/cdc/testdata/scripts/closing": file("close"),
		"internal/config/config.go":             file("package config\ntype Config int\n"),
		"tools/config/config.go":                file("package config\ntype Config int\n"),
		"test/netns/run.sh":                     file("true"),
		"test/vm/cdc/cdc_test.go":               file("package cdc\nfunc TestInGuests(t *testing.T) {}\n"),
	}
}

// tableOf is the first document of a repository.
func tableOf(r fs.FS) ([]byte, error) {
	ix, err := readSource(r)
	if err != nil {
		return nil, err
	}
	sections, err := documents[0].load(ix)
	return documents[0].render(sections, nil), err
}

func TestDocument_references(t *testing.T) {
	for _, tt := range []struct{ ref, want string }{
		{"code: cdc.Conn", ""},
		{"code: cdc.Conn.Next; cdc.Conn.field; cdc.Doer.Do; cdc.Limit; cdc.free", ""},
		{"code: internal/config.Config", ""},
		{"code: cdc.Conn\ntest: cdc.TestNext; cdc.FuzzNext; test/netns/run.sh", ""},
		{"code: cdc.Conn\ntest: cdc.TestNext/row one (C.1); cdc.TestNext/closing", ""},
		{"code: cdc.Conn\ntest: test/vm/cdc.TestInGuests", ""},
		{"code: cdc.Conn\ntest: vm/cdc.TestInGuests", ""},
		{"code: cdc.Conn\ntest: cdc.TestInGuests", "cdc.TestInGuests: there is no such test"},
		{"code: cdc.Gone", "cdc.Gone: there is no such function"},
		{"code: cdc.Conn.Gone", "cdc.Conn.Gone: there is no such function"},
		{"code: cdc.TestNext", "cdc.TestNext: there is no such function"},
		{"code: gone.Conn", "there is no such package"},
		{"code: config.Config", "name one of internal/config, tools/config"},
		{"code: Conn", "neither package.Name nor a file"},
		{"code: cdc.Conn\ntest: cdc.TestGone", "docs/rfc7609/2.txt:3: R3.5.5.1.4-1: cdc.TestGone: there is no such test"},
		{"code: cdc.Conn\ntest: cdc.helper", "there is no such test"},
		{"code: cdc.Conn\ntest: cdc.TestNext/row two", "names no such subtest"},
		{"code: cdc.Conn\ntest: test/netns/gone.sh", "there is no such package"},
	} {
		doc, err := tableOf(repo("R3.5.5.1.4-1 MUST Do it.\n" + tt.ref + "\n"))
		switch {
		case tt.want == "" && err != nil:
			t.Errorf("%s: %v", tt.ref, err)
		case tt.want == "" && !strings.Contains(string(doc), "| R3.5.5.1.4-1 | MUST | Do it. |"):
			t.Errorf("%s: not in the document:\n%s", tt.ref, doc)
		case tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)):
			t.Errorf("%s: error %v, want %q", tt.ref, err, tt.want)
		}
	}
}

func TestDocument_citations(t *testing.T) {
	r := repo("R3.5.5.1.4-1 MUST Do it.\n")
	r["pkg/smcr/cdc/more.go"] = &fstest.MapFile{Data: []byte("package cdc\n\n// As §3.5.5.1.5 says.\nvar x int\n")}
	_, err := tableOf(r)
	if want := "pkg/smcr/cdc/more.go:3:1: RFC 7609 has no §3.5.5.1.5"; err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("error %v, want %q", err, want)
	}
}

// In a table of several RFCs a section is named with its RFC.
func TestDocument_citationsOfSeveral(t *testing.T) {
	for comment, want := range map[string]string{
		"RFC 5044 §7.1.2 and §7.1": "",
		"RFC 5040 §7.1.2":          "pkg/rdma/iwarp/x.go:2:1: iWARP has no §5040.7.1.2",
		"RFC 5041 §5; §6":          "pkg/rdma/iwarp/x.go:2:1: iWARP has no §5041.6",
		"RFC 3720 §99, §98":        "",
		"as §99 says":              "",
	} {
		ix, err := readSource(fstest.MapFS{
			"docs/iwarp/1.txt":       {Data: []byte("§5041.5 Data\n§5044.7.1.2 Rules\n")},
			"pkg/rdma/iwarp/x.go":    {Data: []byte("package iwarp\n// " + comment + "\nvar x int\n")},
			"pkg/rdma/another/x.go":  {Data: []byte("package another\n// RFC 5044 §99\nvar x int\n")},
			"pkg/smcr/cdc/bogus7.go": {Data: []byte("package cdc\n// RFC 5044 §99\nvar x int\n")},
		})
		if err != nil {
			t.Fatal(err)
		}
		if _, err = documents[1].load(ix); (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%s: error %v, want %q", comment, err, want)
		}
	}
}

func TestParseNames(t *testing.T) {
	ix, err := readSource(repo(""))
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct{ text, want string }{
		{"# comment\n= Calls\n\ncall_next | cdc.Conn.Next; cdc.Limit | Not twice.\nCALL_NONE | | There is none.\n", ""},
		{"call_next | cdc.Conn.Next |\n", "names:1: want NAME | CODE | words"},
		{"= Calls\ncall_next\n", "names:2: want NAME | CODE | words"},
		{"= Calls\nn | cdc.Gone |\n", "names:2: n: cdc.Gone: there is no such function"},
		{"= Calls\nn | |\n", "names:2: n has neither code nor words"},
		{"= Calls\nn | cdc.Conn |\nn | | Again.\n", "names:3: n for the second time"},
	} {
		groups, err := ix.parseNames("names", tt.text)
		if (err == nil) != (tt.want == "") || err != nil && !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%q: error %v, want %q", tt.text, err, tt.want)
		}
		if tt.want != "" {
			continue
		}
		doc := string(documents[0].render(nil, groups))
		want := "**Calls**\n\n| document | Go | |\n|---|---|---|\n" +
			"| `call_next` | [cdc.Conn.Next](../pkg/smcr/cdc/conn.go)<br>[cdc.Limit](../pkg/smcr/cdc/conn.go) | Not twice. |\n" +
			"| `CALL_NONE` |  | There is none. |\n"
		if !strings.Contains(doc, want) {
			t.Errorf("no %q in:\n%s", want, doc)
		}
	}
}

func TestRender(t *testing.T) {
	sections, err := parseStatements("f", "§2.2 Groups\n\n§2.2.1 Types\nR2.2.1-1 MUST A|B.\ncode: a.B\ntest: a.TestB/x[y]\n\nR2.2.1-2 MAY C.\nexception: D.\n\nR2.2.1-3 MUST E.\ncode: a.B\nlinux: F.\n")
	if err != nil {
		t.Fatal(err)
	}
	s := sections[1].statements[0]
	s.code[0].file, s.tests[0].file = "a/b.go", "a/b_test.go"
	doc := string(documents[0].render(sections, nil))
	for _, want := range []string{
		"| 2.2 | Groups | 1 | 1 | 1 | | | 3 |\n",
		"| R2.2.1-1 | MUST | A\\|B. | tested | [a.B](../a/b.go) | [a.TestB/x\\[y\\]](../a/b_test.go) |\n",
		"## Open\n\nNone.\n",
		"| R2.2.1-2 | MAY | C. | D. |\n",
		"| R2.2.1-3 | MUST | E. | F. |\n",
		"| R2.2.1-3 | MUST | E. | implemented, [towards Linux](#towards-linux) otherwise |",
	} {
		if !strings.Contains(doc, want) {
			t.Errorf("no %q in:\n%s", want, doc)
		}
	}
}

// TestDocument_covers: a file is of the document whose directory is the nearest one.
func TestDocument_covers(t *testing.T) {
	was := documents
	defer func() { documents = was }()
	documents = []document{{dir: "all", code: []string{"pkg/a/"}}, {dir: "part", code: []string{"pkg/a/b/"}}, {dir: "same", code: []string{"pkg/c/", "pkg/a/b/"}}}
	for file, want := range map[string]string{"pkg/a/x.go": "all", "pkg/a/b/x.go": "part same", "pkg/c/x.go": "same", "pkg/d/x.go": ""} {
		var got []string
		for i := range documents {
			if documents[i].covers(file) {
				got = append(got, documents[i].dir)
			}
		}
		if strings.Join(got, " ") != want {
			t.Errorf("%s is of %v, want %q", file, got, want)
		}
	}
}
