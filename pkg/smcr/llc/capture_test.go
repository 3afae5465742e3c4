// SPDX-License-Identifier: Apache-2.0

package llc_test

import (
	"bufio"
	"bytes"
	"encoding/hex"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/smcr-io/kube-smcr/pkg/smcr/llc"
)

type captured struct {
	version uint8
	comment string // direction and kind, as the capture tool names it
	raw     []byte
}

// captures returns the messages of all capture files, by file.
func captures(tb testing.TB) map[string][]captured {
	tb.Helper()
	files, err := filepath.Glob("testdata/captures/*.txt")
	if err != nil {
		tb.Fatal(err)
	}
	if len(files) == 0 {
		tb.Fatal("no captures in testdata/captures")
	}
	all := make(map[string][]captured)
	for _, name := range files {
		text, err := os.ReadFile(name)
		if err != nil {
			tb.Fatal(err)
		}
		var c captured
		for s := bufio.NewScanner(bytes.NewReader(text)); s.Scan(); {
			line := s.Text()
			switch {
			case line == "# version 1":
				c.version = llc.Version1
			case line == "# version 2":
				c.version = llc.Version2
			case strings.HasPrefix(line, "#"):
				c.comment = line
			default:
				if c.raw, err = hex.DecodeString(line); err != nil {
					tb.Fatalf("%s: %v", name, err)
				}
				all[name] = append(all[name], c)
			}
		}
		if len(all[name]) == 0 {
			tb.Fatalf("%s: no messages", name)
		}
	}
	return all
}

func TestParse_captures(t *testing.T) {
	kinds := make(map[string]int)
	for name, messages := range captures(t) {
		t.Run(filepath.Base(name), func(t *testing.T) {
			for _, c := range messages {
				m, err := llc.Parse(llc.DialectLinux, c.version, c.raw)
				if err != nil {
					t.Fatalf("%s: %v", c.comment, err)
				}
				kinds[m.String()[:strings.Index(m.String(), " re")]]++
				if diff := cmp.Diff(c.raw, m.Append(nil)); diff != "" {
					t.Errorf("%s: %v: encoded again (-captured +ours):\n%s", c.comment, m, diff)
				}
				if want := strings.Contains(c.comment, " RESP "); m.IsResponse() != want {
					t.Errorf("%s: IsResponse() = %t", c.comment, m.IsResponse())
				}
				kind := strings.ReplaceAll(m.Type().String(), " ", "_")
				kind = strings.Replace(kind, "CONTINUATION", "CONT", 1)
				if !strings.Contains(c.comment, " "+kind) {
					t.Errorf("%s: Type() = %v", c.comment, m.Type())
				}
			}
		})
	}
	for _, k := range []string{
		"CONFIRM LINK", "ADD LINK", "ADD LINK CONTINUATION", "DELETE LINK", "CONFIRM RKEY", "TEST LINK", "DELETE RKEY",
		"CONFIRM LINK v2", "ADD LINK v2", "DELETE LINK v2", "CONFIRM RKEY v2", "TEST LINK v2", "DELETE RKEY v2",
		"REQUEST ADD LINK v2",
	} {
		if kinds[k] == 0 {
			t.Errorf("no %s in the captures", k)
		}
	}
}

// In the RFC's dialect Linux's ADD LINK must not pass for the same thing.
func TestParse_dialectsDiffer(t *testing.T) {
	for _, messages := range captures(t) {
		for _, c := range messages {
			if llc.Type(c.raw[0]) != llc.TypeAddLink {
				continue
			}
			linux, err1 := llc.ParseAddLink(llc.DialectLinux, c.raw)
			rfc, err2 := llc.ParseAddLink(llc.DialectRFC, c.raw)
			if err := errors.Join(err1, err2); err != nil {
				t.Fatal(err)
			}
			if linux.GID == rfc.GID || linux.QPN == rfc.QPN {
				t.Errorf("both dialects read %v", linux)
			}
		}
	}
}
