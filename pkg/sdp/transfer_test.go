// SPDX-License-Identifier: Apache-2.0

package sdp_test

import (
	"bytes"
	"errors"
	"io"
	"net"
	"os"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/sdp"
)

// within returns what comes in time.
func within[T any](t *testing.T, what string, ch <-chan T) (v T) {
	t.Helper()
	select {
	case v = <-ch:
	case <-time.After(20 * time.Second):
		t.Fatalf("never: %s", what)
	}
	return v
}

// A program may start as many transfers as it likes before it waits for the first: one that is over takes no place of another.
func TestTransfer_manyBeforeWait(t *testing.T) {
	const many = 200 // more than wait at a time
	p := newPair(t, openIWARP)
	a, b := p.dial(t)
	buf := newBuffer(t, p.client, many)
	data := random(13, many)
	copy(buf.Bytes(), data)
	started := make(chan []*sdp.Transfer, 1)
	go func() {
		var under []*sdp.Transfer
		for i := range many {
			x, err := a.StartWrite(buf, i, 1)
			if err != nil {
				t.Error(err)
				break
			}
			under = append(under, x)
		}
		started <- under
	}()
	_ = b.SetReadDeadline(time.Now().Add(10 * time.Second)) // it has no error
	got := make([]byte, many)
	if _, err := io.ReadFull(b, got); err != nil || string(got) != string(data) {
		t.Errorf("other bytes arrived: %v", err)
	}
	for i, x := range within(t, "all writes are started", started) {
		if n, err := x.Wait(); n != 1 || err != nil {
			t.Errorf("write %d: %d bytes, %v", i, n, err)
		}
	}
	_, _ = a.Close(), b.Close()
}

// Close ends a transfer that waits to begin, too.
func TestTransfer_closeWhileStarting(t *testing.T) {
	const waiting = 128 // as many as may be
	p := newPair(t, openIWARP)
	a, b := p.dial(t)
	buf := newBuffer(t, p.client, waiting)
	var under []*sdp.Transfer
	for i := range waiting {
		x, err := a.StartRead(buf, i, 1, false)
		if err != nil {
			t.Fatal(err)
		}
		under = append(under, x)
	}
	more := make(chan error, 1)
	go func() {
		_, err := a.StartRead(buf, 0, 1, false)
		more <- err
	}()
	if err := a.Close(); err != nil {
		t.Error(err)
	}
	if err := within(t, "the one that waits to begin ends", more); !errors.Is(err, net.ErrClosed) {
		t.Errorf("one more read: %v", err)
	}
	for _, x := range under {
		if n, err := x.Wait(); n != 0 || !errors.Is(err, net.ErrClosed) {
			t.Errorf("read of %d bytes: %v", n, err)
		}
	}
	_ = b.Close()
}

// A Write that still waits after CloseWrite ends by its deadline, or by Close, as any other. The end of the stream then comes behind what the
// peer has of it.
func TestConn_canceledBehindCloseWrite(t *testing.T) {
	eachTransport(t, func(t *testing.T, open func(testing.TB, string) rdma.Device) {
		p := newPair(t, open)
		data := random(14, 8<<20) // more than there is room for
		for _, tc := range []struct {
			name string
			ends func(c *sdp.Conn) error
			want error
		}{
			{"deadline", func(c *sdp.Conn) error { return c.SetWriteDeadline(time.Now().Add(50 * time.Millisecond)) }, os.ErrDeadlineExceeded},
			{"Close", (*sdp.Conn).Close, net.ErrClosed},
		} {
			for _, direct := range []bool{false, true} {
				a, b := p.dial(t)
				buf := newBuffer(t, p.client, len(data))
				copy(buf.Bytes(), data)
				type result struct {
					n   int
					err error
				}
				written := make(chan result, 1)
				go func() {
					write := a.Write
					if direct {
						write = func([]byte) (int, error) { return a.WriteBuffer(buf, 0, len(data)) }
					}
					n, err := write(data)
					written <- result{n, err}
				}()
				got := make([]byte, 1)
				_ = b.SetReadDeadline(time.Now().Add(10 * time.Second)) // it has no error
				if _, err := io.ReadFull(b, got); err != nil {          // the Write has begun
					t.Fatal(err)
				}
				if err := errors.Join(a.CloseWrite(), tc.ends(a)); err != nil {
					t.Error(err)
				}
				begin := time.Now()
				r := within(t, "the Write ends", written)
				if d := time.Since(begin); !errors.Is(r.err, tc.want) || r.n == 0 || r.n >= len(data) || d > 5*time.Second {
					t.Errorf("%s, direct %t: wrote %d bytes in %v: %v", tc.name, direct, r.n, d, r.err)
				}
				rest, err := io.ReadAll(b)
				if got = append(got, rest...); err != nil || !bytes.Equal(got, data[:r.n]) {
					t.Errorf("%s, direct %t: read %d bytes of %d, or others: %v", tc.name, direct, len(got), r.n, err)
				}
				_, _ = a.Close(), b.Close()
			}
		}
	})
}

// More out-of-band bytes than the machine has room for wait for those before them, as long as the deadline lets them.
func TestConn_manyUrgentWrites(t *testing.T) {
	const many, size = 40, 64 << 10 // more than there may be, with more than there is room for
	a, b := newPair(t, openIWARP).dial(t)
	if err := errors.Join(a.SetWriteDeadline(time.Now().Add(20*time.Second)), b.SetReadDeadline(time.Now().Add(20*time.Second))); err != nil {
		t.Fatal(err)
	}
	b.SetUrgentInline(true)
	written := make(chan error, many)
	for range many {
		go func() {
			_, err := a.WriteUrgent(make([]byte, size))
			written <- err
		}()
	}
	got := 0
	for p := make([]byte, size); got < many*size; {
		n, err := b.Read(p)
		if got += n; err != nil {
			t.Fatalf("read %d bytes: %v", got, err)
		}
	}
	for range many {
		if err := within(t, "all writes end", written); err != nil {
			t.Error(err)
		}
	}
	_, _ = a.Close(), b.Close()
}
