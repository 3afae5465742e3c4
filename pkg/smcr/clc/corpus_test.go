// SPDX-License-Identifier: Apache-2.0

package clc

import (
	"bytes"
	"encoding/hex"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

// sample is one message of the corpus.
type sample struct {
	name string
	raw  []byte
}

// corpus reads testdata: one message per file, in hex, with comment lines. It
// fails on an empty directory, so that the golden tests cannot pass vacuously.
func corpus(tb testing.TB, dirs ...string) []sample {
	tb.Helper()
	if len(dirs) == 0 {
		dirs = []string{"captured", "published"}
	}
	var all []sample
	for _, d := range dirs {
		files, err := filepath.Glob(filepath.Join("testdata", d, "*.hex"))
		if err != nil {
			tb.Fatal(err)
		}
		if len(files) == 0 {
			tb.Fatalf("corpus %s is empty", d)
		}
		for _, f := range files {
			raw := readHex(tb, f)
			all = append(all, sample{name: d + "/" + strings.TrimSuffix(filepath.Base(f), ".hex"), raw: raw})
		}
	}
	return all
}

// load returns one message of the corpus.
func load(tb testing.TB, name string) []byte {
	tb.Helper()
	return readHex(tb, filepath.Join("testdata", name+".hex"))
}

func readHex(tb testing.TB, file string) []byte {
	tb.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		tb.Fatal(err)
	}
	var digits strings.Builder
	for line := range strings.Lines(string(text)) {
		if !strings.HasPrefix(line, "#") {
			digits.WriteString(strings.TrimSpace(line))
		}
	}
	raw, err := hex.DecodeString(digits.String())
	if err != nil {
		tb.Fatalf("%s: %v", file, err)
	}
	return raw
}

// opts compares messages field by field; netip.Prefix has unexported fields.
var opts = cmp.Options{cmpopts.EquateComparable(netip.Prefix{})}

// parseAny decodes a message by its header.
func parseAny(b []byte) (msg interface{ Append([]byte) []byte }, err error) {
	if len(b) < HeaderLen {
		return nil, parseErr(0, "short")
	}
	h, err := ParseHeader([HeaderLen]byte(b))
	if err != nil {
		return nil, err
	}
	switch h.Type {
	case TypeProposal:
		return ParseProposal(b)
	case TypeAccept:
		return ParseAccept(b)
	case TypeConfirm:
		return ParseConfirm(b)
	case TypeDecline:
		return ParseDecline(b)
	}
	panic("unreachable")
}

// Golden: everything that was captured is decoded and comes out byte for byte.
func TestCorpusRoundTrip(t *testing.T) {
	seen := map[Type]int{}
	for _, s := range corpus(t) {
		t.Run(s.name, func(t *testing.T) {
			h, err := ParseHeader([HeaderLen]byte(s.raw))
			if err != nil {
				t.Fatal(err)
			}
			if want, _, _ := strings.Cut(filepath.Base(s.name), "-"); !strings.EqualFold(h.Type.String(), want) {
				t.Errorf("type %v, want %s", h.Type, want)
			}
			if h.Length != len(s.raw) {
				t.Errorf("header says %d bytes, message has %d", h.Length, len(s.raw))
			}
			seen[h.Type]++
			msg, err := parseAny(s.raw)
			if err != nil {
				t.Fatal(err)
			}
			prefix := []byte("prefix")
			got := msg.Append(prefix)
			if !bytes.HasPrefix(got, prefix) {
				t.Fatal("Append wrote over what was there")
			}
			if diff := cmp.Diff(hex.Dump(s.raw), hex.Dump(got[len(prefix):])); diff != "" {
				t.Errorf("encoded again (-captured +ours):\n%s", diff)
			}
		})
	}
	for _, typ := range []Type{TypeProposal, TypeAccept, TypeConfirm, TypeDecline} {
		if seen[typ] == 0 {
			t.Errorf("no %v in the corpus", typ)
		}
	}
}

// Every proper prefix and every message with bytes behind it is refused as not
// being a CLC message (RFC 7609 C.6).
func TestCorpusWrongLength(t *testing.T) {
	for _, s := range corpus(t) {
		for n := range s.raw {
			if _, err := parseAny(s.raw[:n]); !isParseError(err) {
				t.Fatalf("%s cut to %d bytes: %v, want a ParseError", s.name, n, err)
			}
		}
		if _, err := parseAny(append(bytes.Clone(s.raw), 0)); !isParseError(err) {
			t.Errorf("%s with a byte more: %v, want a ParseError", s.name, err)
		}
	}
}
