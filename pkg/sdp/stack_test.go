// SPDX-License-Identifier: Apache-2.0

package sdp_test

import (
	"errors"
	"io"
	"net"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// holder is a reader and a writer that keeps the memory that it is given until it may go on, and then uses it.
type holder struct {
	has  chan struct{} // closed when it has memory
	goOn chan struct{}
}

func newHolder() *holder { return &holder{make(chan struct{}), make(chan struct{})} }

func (h *holder) Read(p []byte) (int, error) {
	close(h.has)
	<-h.goOn
	clear(p)
	return len(p), io.EOF
}

func (h *holder) Write(p []byte) (int, error) {
	close(h.has)
	<-h.goOn
	sum := byte(0)
	for _, b := range p {
		sum += b
	}
	if want := byte('a' + 'b'); sum != want {
		return 0, errors.New("what was written is not what came")
	}
	return len(p), nil
}

// A stack is closed while a program copies a stream: its reader and its writer have the memory until they return, and the last of them
// gives it back.
func TestStack_closesBesideCopies(t *testing.T) {
	eachTransport(t, func(t *testing.T, open func(testing.TB, string) rdma.Device) {
		before := regions(t)
		p := newPair(t, open)
		a, b := p.dial(t)
		in, out := newHolder(), newHolder()
		sent, got := make(chan error, 1), make(chan error, 1)
		go func() {
			_, err := a.ReadFrom(in)
			sent <- err
		}()
		go func() {
			_, err := a.WriteTo(out)
			got <- err
		}()
		if _, err := b.Write([]byte("ab")); err != nil {
			t.Fatal(err)
		}
		<-in.has
		<-out.has
		closed := make(chan error, 1)
		go func() { closed <- p.client.Close() }()
		select {
		case err := <-closed:
			if err != nil {
				t.Error(err)
			}
		case <-time.After(hostilePatience):
			t.Fatal("the stack waits for a program")
		}
		close(in.goOn)
		if err := <-sent; !errors.Is(err, net.ErrClosed) {
			t.Errorf("sent to %v", err)
		}
		close(out.goOn)
		if err := <-got; !errors.Is(err, net.ErrClosed) {
			t.Errorf("received to %v", err)
		}
		if _, err := a.ReadFrom(in); !errors.Is(err, net.ErrClosed) {
			t.Errorf("read from: %v", err)
		}
		if _, err := a.WriteTo(out); !errors.Is(err, net.ErrClosed) {
			t.Errorf("write to: %v", err)
		}
		_ = b.Abort() // its peer is gone
		if err := p.server.Close(); err != nil {
			t.Error(err)
		}
		if after := regions(t); after > before {
			t.Errorf("%d regions are mapped, and %d were before", after, before)
		}
	})
}

// A read that is over, and ends with an out-of-band byte, says so after the end of the stack, too.
func TestStack_closesBeforeWait(t *testing.T) {
	eachTransport(t, func(t *testing.T, open func(testing.TB, string) rdma.Device) {
		p := newPair(t, open)
		a, b := p.dial(t)
		buf, behind := newBuffer(t, p.client, 64<<10), newBuffer(t, p.client, 64<<10)
		x, err := a.StartRead(buf, 0, 64<<10, false)
		if err != nil {
			t.Fatal(err)
		}
		y, err := a.StartRead(behind, 0, 64<<10, false)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := b.WriteUrgent([]byte("abc!")); err != nil {
			t.Fatal(err)
		}
		if _, err := b.Write([]byte("d")); err != nil {
			t.Fatal(err)
		}
		if n, err := y.Wait(); n != 1 || err != nil { // then the one before it is over
			t.Fatalf("read %d bytes: %v", n, err)
		}
		if err := p.client.Close(); err != nil {
			t.Fatal(err)
		}
		if n, err := x.Wait(); n != 3 || err != nil {
			t.Errorf("read %d bytes: %v", n, err)
		}
		if u, err := a.ReadUrgent(); u != '!' || err != nil {
			t.Errorf("urgent %q: %v", u, err)
		}
		_ = b.Abort() // its peer is gone
	})
}
