// SPDX-License-Identifier: Apache-2.0

package sdp_test

import (
	"bytes"
	"errors"
	"io"
	"net"
	"strings"
	"syscall"
	"testing"
	"testing/iotest"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/sdp"
)

// isNetError reports whether an error is a net.Error itself, as callers of package net may ask.
func isNetError(err error) bool {
	_, ok := err.(net.Error) //nolint:errorlint // it is to be one, and not to have one in it
	return ok
}

// What stops a copy is told once, as it is: a program that compares the error of its reader with == finds it.
func TestConn_copyErrors(t *testing.T) {
	p := newPair(t, openIWARP)
	a, b := p.dial(t)
	for _, want := range []error{errors.New("boom"), io.ErrUnexpectedEOF} {
		r := io.MultiReader(bytes.NewReader(make([]byte, 3)), iotest.ErrReader(want))
		if n, err := io.Copy(a, r); n != 3 || err != want { //nolint:errorlint // it is to be the same
			t.Errorf("reader fails: %d bytes: %v, want %v", n, err, want)
		}
	}
	if err := a.SetWriteDeadline(time.Now().Add(-time.Second)); err != nil {
		t.Fatal(err)
	}
	if _, err := a.ReadFrom(bytes.NewReader(make([]byte, 10))); !isNetError(err) {
		t.Errorf("past the deadline: %T: %v", err, err)
	}
	if err := a.Abort(); err != nil {
		t.Fatal(err)
	}
	_, err := b.ReadFrom(bytes.NewReader(make([]byte, 9<<20))) // two Buffers fail
	if !errors.Is(err, syscall.ECONNRESET) || !isNetError(err) || strings.Contains(err.Error(), "\n") {
		t.Errorf("peer is gone: %T: %v", err, err)
	}
	if err := b.Close(); err != nil {
		t.Error(err)
	}
	if err := b.SetDeadline(time.Time{}); !errors.Is(err, net.ErrClosed) || !isNetError(err) {
		t.Errorf("deadline of a closed connection: %T: %v", err, err)
	}
}

// shortWriter takes one byte less than it is given, and says no error.
type shortWriter struct{}

func (shortWriter) Write(p []byte) (int, error) { return len(p) - 1, nil }

// A writer that takes less than all, and does not say why, loses nothing unnoticed.
func TestConn_shortWriter(t *testing.T) {
	p := newPair(t, openIWARP)
	a, b := p.dial(t)
	if _, err := a.Write([]byte("four")); err != nil {
		t.Fatal(err)
	}
	if err := a.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if n, err := b.WriteTo(shortWriter{}); n != 3 || !errors.Is(err, io.ErrShortWrite) {
		t.Errorf("%d bytes: %v", n, err)
	}
	for _, c := range []*sdp.Conn{a, b} {
		_ = c.Close() // may have ended
	}
}
