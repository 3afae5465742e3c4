// SPDX-License-Identifier: Apache-2.0

package script

import (
	"context"
	"errors"
	"io"
	"net"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/smcr-io/kube-smcr/test/vm/peer/report"
)

func TestParse(t *testing.T) {
	for _, tt := range []struct {
		name, text string
		want       Spec
		bad        string // part of the error
	}{
		{name: "defaults", text: "echo", want: Spec{Name: "echo", Size: 64, Count: 10}},
		{name: "units", text: "bulk:bytes=1G:size=16K:seed=7", want: Spec{Name: "bulk", Size: 16 << 10, Bytes: 1 << 30, Seed: 7}},
		{name: "times", text: "echo:for=2s:every=20ms", want: Spec{Name: "echo", Size: 64, Count: 10, For: 2 * time.Second, Every: 20 * time.Millisecond}},
		{name: "unknown script", text: "dance", bad: "want one of echo"},
		{name: "unknown parameter", text: "echo:colour=red", bad: "unknown parameter"},
		{name: "no value", text: "echo:size", bad: "not KEY=VALUE"},
		{name: "too large", text: "echo:size=2M", bad: "not in 1 to"},
		{name: "overflow", text: "bulk:bytes=9223372036854775807G", bad: "not in 0 to"},
		{name: "too long", text: "echo:for=2h", bad: "not in 0 to 1h"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, err := Parse(tt.text)
			if tt.bad != "" {
				if err == nil || !strings.Contains(err.Error(), tt.bad) {
					t.Fatalf("error %v, want %q", err, tt.bad)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
			if again, err := Parse(got.String()); err != nil || again != got {
				t.Errorf("%s is read as %v, %v", got, again, err)
			}
		})
	}
}

func TestStream_seesWhatIsWrong(t *testing.T) {
	const n = 3 * patternLen
	right := make([]byte, 0, n)
	for s := newStream(5, true); len(right) < n; {
		b := s.next(1000)
		s.add(b)
		right = append(right, b...)
	}
	for _, tt := range []struct {
		name  string
		spoil func(b []byte) []byte
		bad   bool
	}{
		{"as it is", func(b []byte) []byte { return b }, false},
		{"a bit", func(b []byte) []byte { b[n/2] ^= 1; return b }, true},
		{"a byte is lost", func(b []byte) []byte { return append(b[:4000], b[4001:]...) }, true},
		{"a ring late", func(b []byte) []byte { return append(b[:4000], b[4000+64<<10:]...) }, true},
		{"twice", func(b []byte) []byte { return append(append([]byte(nil), b[:100]...), b...) }, true},
		{"of another connection", func([]byte) []byte { s := newStream(6, true); return s.next(100) }, true},
		{"of the other direction", func([]byte) []byte { s := newStream(5, false); return s.next(100) }, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newStream(5, true)
			err := s.check(tt.spoil(append([]byte(nil), right...)))
			if errors.Is(err, errWrongBytes) != tt.bad {
				t.Errorf("%v", err)
			}
		})
	}
}

// pipeConn is an end of a net.Pipe that knows no more than tests here need.
type pipeConn struct{ net.Conn }

func (c pipeConn) CloseWrite() error                 { return nil }
func (c pipeConn) Abort() error                      { return c.Close() }
func (c pipeConn) WriteUrgent(p []byte) (int, error) { return c.Write(p) }
func (c pipeConn) ReadUrgent() (byte, error)         { return 0, io.EOF }

func TestServe_refusesWhatIsNoScript(t *testing.T) {
	for name, text := range map[string]string{
		"no mark":        "GET / HTTP/1.1\r\n",
		"too long":       "kpr\xff\xff",
		"unknown script": "kpr\x00\x04sing",
		"too much":       "kpr\x00\x0fecho:size=9999M",
		"cut":            "kpr\x00",
	} {
		t.Run(name, func(t *testing.T) {
			a, b := net.Pipe()
			go func() {
				_, _ = io.WriteString(a, text)
				_ = a.Close()
			}()
			if r := Serve(t.Context(), pipeConn{b}); r.Err == "" {
				t.Errorf("%+v", r)
			}
		})
	}
}

func TestDial_endsWithItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b := net.Pipe()
		go func() { _, _ = io.Copy(io.Discard, b) }() // a peer that never answers
		ctx, cancel := context.WithTimeoutCause(t.Context(), time.Second, errors.New("too late"))
		defer cancel()
		r := Dial(ctx, pipeConn{a}, Spec{Name: "echo", Size: 8, Count: 1}, nil)
		if !strings.Contains(r.Err, "too late") || r.TookMS != 1000 {
			t.Errorf("%+v", r)
		}
		_ = b.Close()
	})
}

// A connection that only waits does so until its time is over, or until it is enough.
func TestDial_holdsUntilItIsEnough(t *testing.T) {
	for name, tt := range map[string]struct {
		text string
		want float64 // milliseconds
	}{
		"its time":  {"hold:for=300ms", 300},
		"is enough": {"hold", 1000},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				a, b := net.Pipe()
				served := make(chan report.Conn, 1)
				go func() { served <- Serve(t.Context(), pipeConn{b}) }()
				s, err := Parse(tt.text)
				if err != nil {
					t.Fatal(err)
				}
				enough := make(chan struct{})
				s.Enough = enough
				time.AfterFunc(time.Second, func() { close(enough) })
				r := Dial(t.Context(), pipeConn{a}, s, nil)
				if r.Err != "" || r.End != report.EndOpen || r.TookMS != tt.want {
					t.Errorf("%+v, want an open end after %.0f ms", r, tt.want)
				}
				if r := <-served; r.Err != "" || r.End != report.EndEOF {
					t.Errorf("the server's end: %+v", r)
				}
			})
		})
	}
}

func TestReport_check(t *testing.T) {
	if err := (&report.Report{}).Check(); err == nil {
		t.Error("a report without an end is in order")
	}
	if err := (&report.Report{Conns: []report.Conn{{Err: "broken"}}, End: &report.End{}}).Check(); err == nil {
		t.Error("a report with a broken connection is in order")
	}
	if err := (&report.Report{End: &report.End{Groups: []report.Group{{Conns: 1}}}}).Check(); err == nil {
		t.Error("a report with a leak is in order")
	}
	if err := (&report.Report{End: &report.End{}}).Check(); err != nil {
		t.Error(err)
	}
}
