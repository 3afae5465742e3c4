// SPDX-License-Identifier: Apache-2.0

package smcr_test

import (
	"errors"
	"io"
	"testing"

	"github.com/smcr-io/kube-smcr/pkg/smcr"
)

// TestStack_Stats: what connections and link groups have done counts while they live, and not less and not
// twice when they have ended. What is registered and what lives now is of this moment only.
func TestStack_Stats(t *testing.T) {
	const size = 10000
	p := newPair(t)
	a, b := p.dial(t)
	if a.Mode() != smcr.ModeSMCR {
		t.Fatalf("the connection is %v", a.Mode())
	}
	carry := func(from, to *smcr.Conn, n int) {
		t.Helper()
		if _, err := from.Write(make([]byte, n)); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(to, make([]byte, n)); err != nil {
			t.Fatal(err)
		}
	}
	carry(a, b, size)
	carry(b, a, 2*size)
	live := p.client.Stats()
	if live.BytesSentSMCR != size || live.BytesRecvSMCR != 2*size || live.ConnsSMCR != 1 || live.ConnsTCP != 0 {
		t.Errorf("bytes, connections: %+v", live)
	}
	if live.Groups != 1 || live.Conns != 1 || live.MemoryBytes == 0 {
		t.Errorf("what lives: %+v", live)
	}
	// The client of a first contact sends a Proposal and a Confirm, and answers CONFIRM LINK.
	if live.CLCSent != 2 || live.LLCSent == 0 || live.CDCSent == 0 {
		t.Errorf("messages: %+v", live)
	}
	_, _ = a.Close(), b.Close()
	waitFor(t, "the end of the connection", func() bool { return p.client.Stats().Conns == 0 })
	after := p.client.Stats()
	if err := p.client.Close(); err != nil {
		t.Error(err)
	}
	end := p.client.Stats()
	for what, got := range map[string]smcr.Stats{"after the connection": after, "after the stack": end} {
		if got.BytesSentSMCR != size || got.BytesRecvSMCR != 2*size || got.ConnsSMCR != 1 || got.CLCSent != 2 {
			t.Errorf("%s: %+v", what, got)
		}
		if got.LLCSent < live.LLCSent || got.CDCSent < live.CDCSent || got.CDCSent != after.CDCSent {
			t.Errorf("%s: messages: %+v, were %+v", what, got, live)
		}
	}
	if end.Groups != 0 || end.Conns != 0 || end.MemoryBytes != 0 {
		t.Errorf("alive after the stack: %+v", end)
	}
}

// TestStack_Stats_closing: a connection that was closed counts until its peer has closed it, too, and so has its bytes; one that
// was reset does not.
func TestStack_Stats_closing(t *testing.T) {
	p := newPair(t, small)
	a, b := p.dial(t)
	if err := a.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if n, err := b.Read(make([]byte, 1)); n != 0 || !errors.Is(err, io.EOF) {
		t.Fatalf("read %d bytes, %v, want the end", n, err)
	}
	const size = 20 << 10 // more than the peer's RMBE takes
	if _, err := b.Write(make([]byte, size)); err != nil {
		t.Fatal(err)
	}
	if got := p.server.Stats().Closing; got != 0 {
		t.Errorf("%d connections are closing before Close", got)
	}
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	if st := p.server.Stats(); st.Closing != 1 || st.Conns != 1 {
		t.Errorf("%d connections of %d are closing, want 1 of 1", st.Closing, st.Conns)
	}
	if got, err := io.ReadAll(a); err != nil || len(got) != size {
		t.Fatalf("read %d bytes, %v", len(got), err)
	}
	_ = a.Close()
	waitFor(t, "nothing to deliver", func() bool { return p.server.Stats().Closing == 0 })

	a, b = p.dial(t)
	if _, err := b.Write(make([]byte, size)); err != nil {
		t.Fatal(err)
	}
	_ = b.Abort()
	if got := p.server.Stats().Closing; got != 0 {
		t.Errorf("%d connections are closing after a reset", got)
	}
	_ = a.Close()
}
