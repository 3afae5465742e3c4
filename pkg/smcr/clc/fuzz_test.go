// SPDX-License-Identifier: Apache-2.0

package clc

import (
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// seed adds the corpus of one type and short inputs.
func seed(f *testing.F, want Type) {
	n := 0
	for _, s := range corpus(f) {
		if Type(s.raw[4]) == want {
			f.Add(s.raw)
			n++
		}
	}
	if n == 0 {
		f.Fatalf("no %v in the corpus", want)
	}
	f.Add([]byte(nil))
	f.Add(fullProposal().Append(nil))
}

// fuzzCodec checks what holds for any bytes: no panic; errors have one of the
// two types; what was decoded is encoded in a form that decodes to the same.
func fuzzCodec[M interface{ Append([]byte) []byte }](f *testing.F, typ Type, parse func([]byte) (M, error)) {
	seed(f, typ)
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := parse(b)
		if err != nil && !errors.Is(err, ErrDecline) {
			if !isParseError(err) {
				t.Fatalf("untyped error %v", err)
			}
			return
		}
		again, err2 := parse(m.Append(nil))
		if isParseError(err2) {
			t.Fatalf("%+v does not decode again: %v", m, err2)
		}
		// Mode bits of a message to decline are not kept.
		if diff := cmp.Diff(m, again, opts); diff != "" {
			t.Fatalf("decoded again (-first +second):\n%s", diff)
		}
	})
}

func FuzzParseProposal(f *testing.F) { fuzzCodec(f, TypeProposal, ParseProposal) }
func FuzzParseAccept(f *testing.F)   { fuzzCodec(f, TypeAccept, ParseAccept) }
func FuzzParseConfirm(f *testing.F)  { fuzzCodec(f, TypeConfirm, ParseConfirm) }
func FuzzParseDecline(f *testing.F)  { fuzzCodec(f, TypeDecline, ParseDecline) }

func FuzzParseHeader(f *testing.F) {
	for _, s := range corpus(f) {
		f.Add(s.raw[:HeaderLen])
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) != HeaderLen {
			return
		}
		h, err := ParseHeader([HeaderLen]byte(b))
		if err != nil {
			if !isParseError(err) {
				t.Fatalf("untyped error %v", err)
			}
			return
		}
		if h.Length < declineV1Len || h.Length > MaxLen {
			t.Fatalf("a reader would take %d bytes", h.Length)
		}
	})
}
