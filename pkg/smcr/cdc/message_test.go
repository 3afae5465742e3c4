// SPDX-License-Identifier: Apache-2.0

package cdc_test

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

	"github.com/smcr-io/kube-smcr/pkg/smcr/cdc"
)

type captured struct {
	direction string
	raw       []byte
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
		for s := bufio.NewScanner(bytes.NewReader(text)); s.Scan(); {
			if strings.HasPrefix(s.Text(), "#") {
				continue
			}
			direction, digits, _ := strings.Cut(s.Text(), " ")
			raw, err := hex.DecodeString(digits)
			if err != nil {
				tb.Fatalf("%s: %v", name, err)
			}
			all[name] = append(all[name], captured{direction, raw})
		}
		if len(all[name]) == 0 {
			tb.Fatalf("%s: no messages", name)
		}
	}
	return all
}

func TestParse_captures(t *testing.T) {
	// All captured RMBEs have Linux's default size.
	ring := cdc.Ring{Origin: cdc.OriginLinux, Size: 64 << 10}
	for name, messages := range captures(t) {
		t.Run(filepath.Base(name), func(t *testing.T) {
			for _, c := range messages {
				m, err := cdc.Parse(c.raw)
				if err != nil {
					t.Fatal(err)
				}
				if diff := cmp.Diff(c.raw, m.Append(nil)); diff != "" {
					t.Errorf("%v: encoded again (-captured +ours):\n%s", m, diff)
				}
				if !ring.Valid(m.Prod) || !ring.Valid(m.Cons) {
					t.Errorf("%v: cursor outside the RMBE", m)
				}
			}
		})
	}
}

// The cursors of a real transfer that wraps six times, checked as a receiver
// does: none is refused, and the last ones say how much travelled.
func TestRing_slowReaderCapture(t *testing.T) {
	ring := cdc.Ring{Size: 64 << 10}
	type side struct{ prod, cons uint64 }
	sides := make(map[string]*side)
	for _, c := range captures(t)["testdata/captures/08-flow-control-slow-reader.txt"] {
		m, err := cdc.Parse(c.raw)
		if err != nil {
			t.Fatal(err)
		}
		s := sides[c.direction]
		if s == nil {
			s = new(side)
			sides[c.direction] = s
		}
		var errProd, errCons error
		s.prod, errProd = ring.Advance(s.prod, m.Prod)
		s.cons, errCons = ring.Advance(s.cons, m.Cons)
		if err := errors.Join(errProd, errCons); err != nil {
			t.Fatalf("%s %v: %v", c.direction, m, err)
		}
	}
	want := map[string]side{
		"10.0.0.2>10.0.0.1": {prod: 400016, cons: 1},
		"10.0.0.1>10.0.0.2": {prod: 1, cons: 400016},
	}
	for direction, w := range want {
		if s := sides[direction]; s == nil || *s != w {
			t.Errorf("%s: %+v, want %+v", direction, s, w)
		}
	}
}

func sample() cdc.Message {
	return cdc.Message{
		Seq:   0x0102,
		Token: 0x03040506,
		Prod:  cdc.Cursor{Wrap: 0x0708, Count: 0x090a0b0c},
		Cons:  cdc.Cursor{Wrap: 0x0d0e, Count: 0x0f101112},
		Flags: cdc.Flags(0).WithWriterBlocked().WithFailoverValidation().WithAbort(),
	}
}

// The bytes by hand from figure 41.
func TestSectionA_4_Message(t *testing.T) {
	want := make([]byte, cdc.Size)
	copy(want, []byte{
		0xfe, 44, 1, 2, 3, 4, 5, 6, 0, 0, 7, 8, 9, 10, 11, 12,
		0, 0, 0x0d, 0x0e, 0x0f, 0x10, 0x11, 0x12, 0x88, 0x20,
	})
	b := sample().Append([]byte("x"))
	if diff := cmp.Diff(want, b[1:]); diff != "" {
		t.Errorf("message (-want +got):\n%s", diff)
	}
	got, err := cdc.Parse(append(b[1:], "more"...))
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(sample(), got); diff != "" {
		t.Errorf("parsed (-sent +got):\n%s", diff)
	}
	if got, want := sample().String(), "CDC seq=258 token=0x03040506 prod=1800:151653132 cons=3342:252711186 flags=BFA"; got != want {
		t.Errorf("String() = %q, want %q", got, want)
	}
}

func TestParse_rejects(t *testing.T) {
	good := sample().Append(nil)
	edit := func(at int, v byte) []byte { b := bytes.Clone(good); b[at] = v; return b }
	for name, b := range map[string][]byte{
		"empty":        nil,
		"one byte":     good[:1],
		"43 bytes":     good[:43],
		"type":         edit(0, 0xff),
		"length field": edit(1, 45),
	} {
		t.Run(name, func(t *testing.T) {
			var want *cdc.ParseError
			if m, err := cdc.Parse(b); !errors.As(err, &want) || err.Error() == "" {
				t.Errorf("parsed as %v, %v", m, err)
			}
		})
	}
}

func TestFlags(t *testing.T) {
	tests := map[string]struct {
		set  func(cdc.Flags) cdc.Flags
		has  func(cdc.Flags) bool
		bits cdc.Flags
	}{
		"B": {cdc.Flags.WithWriterBlocked, cdc.Flags.WriterBlocked, 0x8000},
		"P": {cdc.Flags.WithUrgentPending, cdc.Flags.UrgentPending, 0x4000},
		"U": {cdc.Flags.WithUrgentPresent, cdc.Flags.UrgentPresent, 0x2000},
		"R": {cdc.Flags.WithCursorUpdateRequested, cdc.Flags.CursorUpdateRequested, 0x1000},
		"F": {cdc.Flags.WithFailoverValidation, cdc.Flags.FailoverValidation, 0x0800},
		"D": {cdc.Flags.WithSendingDone, cdc.Flags.SendingDone, 0x0080},
		"C": {cdc.Flags.WithClosed, cdc.Flags.Closed, 0x0040},
		"A": {cdc.Flags.WithAbort, cdc.Flags.Abort, 0x0020},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			f := tt.set(0)
			if f != tt.bits || !tt.has(f) || tt.has(^tt.bits) || f.String() != name {
				t.Errorf("bits 0x%04x, has %t, others have it %t, %v", uint16(f), tt.has(f), tt.has(^tt.bits), f)
			}
		})
	}
	if got := cdc.Flags(0).String(); got != "-" {
		t.Errorf("no flags: %q", got)
	}
}

func TestSeqNewer(t *testing.T) {
	for name, tt := range map[string]struct {
		a, b uint16
		want bool
	}{
		"next":             {2, 1, true},
		"same":             {1, 1, false},
		"before":           {1, 2, false},
		"after the wrap":   {0, 0xffff, true},
		"before the wrap":  {0xffff, 0, false},
		"just below half":  {0x7fff, 0, true},
		"exactly half":     {0x8000, 0, false},
		"half, other way":  {0, 0x8000, false},
		"just beyond half": {0x8001, 0, false},
	} {
		t.Run(name, func(t *testing.T) {
			if got := cdc.SeqNewer(tt.a, tt.b); got != tt.want {
				t.Errorf("SeqNewer(%d, %d) = %t", tt.a, tt.b, got)
			}
		})
	}
}

func TestMessage_allocatesNothing(t *testing.T) {
	raw, buf := sample().Append(nil), make([]byte, 0, cdc.Size)
	ring := cdc.Ring{Origin: 4, Size: 64 << 10}
	var err error
	var pos uint64
	if n := testing.AllocsPerRun(1000, func() {
		m, e := cdc.Parse(raw)
		buf = m.Append(buf[:0])
		ring.Spans(pos, 1000)
		pos, err = ring.Advance(pos, ring.Cursor(pos+1000))
		err = errors.Join(e, err)
	}); n != 0 || err != nil {
		t.Errorf("%v allocations, error %v", n, err)
	}
}

func BenchmarkParse(b *testing.B) {
	raw := sample().Append(nil)
	b.ReportAllocs()
	for b.Loop() {
		if _, err := cdc.Parse(raw); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkMessage_Append(b *testing.B) {
	m, buf := sample(), make([]byte, 0, cdc.Size)
	b.ReportAllocs()
	for b.Loop() {
		buf = m.Append(buf[:0])
	}
}

func BenchmarkRing_Advance(b *testing.B) {
	ring := cdc.Ring{Origin: 4, Size: 64 << 10}
	var pos uint64
	b.ReportAllocs()
	for b.Loop() {
		var err error
		if pos, err = ring.Advance(pos, ring.Cursor(pos+1000)); err != nil {
			b.Fatal(err)
		}
	}
}

func FuzzParseCDC(f *testing.F) {
	for _, messages := range captures(f) {
		for _, c := range messages[:min(len(messages), 20)] {
			f.Add(c.raw)
		}
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := cdc.Parse(b)
		if err != nil {
			return
		}
		_ = m.String()
		got, err := cdc.Parse(m.Append(nil))
		if err != nil || got != m {
			t.Fatalf("%v encoded and parsed: %v, %v", m, got, err)
		}
	})
}
