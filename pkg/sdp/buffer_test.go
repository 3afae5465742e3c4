// SPDX-License-Identifier: Apache-2.0

package sdp_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"syscall"
	"testing"
	"testing/iotest"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/sdp"
	"github.com/smcr-io/kube-smcr/pkg/sdp/socket"
)

func newBuffer(tb testing.TB, s *sdp.Stack, size int) *sdp.Buffer {
	tb.Helper()
	b, err := s.AllocBuffer(size)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := b.Close(); err != nil && !errors.Is(err, rdma.ErrClosed) {
			tb.Error(err)
		}
	})
	return b
}

// send writes the data by Buffers, several under way, each as long as the buffer.
func send(c *sdp.Conn, bufs []*sdp.Buffer, data []byte) error {
	under := make([]*sdp.Transfer, len(bufs))
	for i := 0; len(data) > 0 || i < len(bufs); i++ {
		k := i % len(bufs)
		if x := under[k]; x != nil {
			under[k] = nil
			if _, err := x.Wait(); err != nil {
				return err
			}
		}
		n := copy(bufs[k].Bytes(), data)
		if data = data[n:]; n == 0 {
			continue
		}
		x, err := c.StartWrite(bufs[k], 0, n)
		if err != nil {
			return err
		}
		under[k] = x
	}
	for _, x := range under {
		if x != nil {
			if _, err := x.Wait(); err != nil {
				return err
			}
		}
	}
	return nil
}

// receive reads by Buffers until the end of the stream.
func receive(c *sdp.Conn, bufs []*sdp.Buffer, fill bool) ([]byte, error) {
	var got []byte
	var under []*sdp.Transfer
	var err error
	for i := 0; ; i++ {
		if len(under) == len(bufs) {
			var n int
			n, err = under[0].Wait()
			got = append(got, bufs[i%len(bufs)].Bytes()[:n]...)
			under = under[1:]
			if err != nil {
				break
			}
		}
		x, serr := c.StartRead(bufs[i%len(bufs)], 0, len(bufs[i%len(bufs)].Bytes()), fill)
		if err = serr; err != nil {
			break
		}
		under = append(under, x)
	}
	for _, x := range under {
		if n, werr := x.Wait(); n > 0 || werr != nil && !errors.Is(werr, io.EOF) {
			err = errors.Join(err, werr)
		}
	}
	if errors.Is(err, io.EOF) {
		err = nil
	}
	return got, err
}

// What long Buffers hold moves without a copy of this package: by the reader's RDMA READs or the writer's RDMA
// WRITEs, and all of it arrives.
func TestBuffer_zeroCopy(t *testing.T) {
	const size, total = 256 << 10, 8 << 20
	for _, tc := range []struct {
		name           string
		writes, reads  int // Buffers of each side
		fill           bool
		wantWritesOver int // per cent of the bytes by RDMA WRITE, at least
	}{
		{"one at a time", 1, 1, true, 0},
		{"many written", 4, 1, true, 0},
		{"reader ahead", 1, 4, false, 0},
	} {
		t.Run(tc.name, func(t *testing.T) {
			eachTransport(t, func(t *testing.T, open func(testing.TB, string) rdma.Device) {
				p := newPair(t, open)
				a, b := p.dial(t)
				var out, in []*sdp.Buffer
				for range tc.writes {
					out = append(out, newBuffer(t, p.client, size))
				}
				for range tc.reads {
					in = append(in, newBuffer(t, p.server, size))
				}
				data := random(7, total)
				sent := make(chan error, 1)
				go func() { sent <- errors.Join(send(a, out, data), a.CloseWrite()) }()
				got, err := receive(b, in, tc.fill)
				if err = errors.Join(err, <-sent); err != nil {
					t.Fatal(err)
				}
				if !bytes.Equal(got, data) {
					t.Fatalf("%d of %d bytes arrived, or others", len(got), total)
				}
				x, y := a.Info(), b.Info()
				t.Logf("%v; %v", x, y)
				rdmaBytes := x.BytesWritten + y.BytesRead
				if rdmaBytes < total*9/10 {
					t.Errorf("%d of %d bytes by RDMA", rdmaBytes, total)
				}
				if copied := x.BytesCopied + y.BytesCopied; copied > total/5 {
					t.Errorf("%d bytes were copied", copied)
				}
				if err := errors.Join(a.Close(), b.Close()); err != nil {
					t.Error(err)
				}
			})
		})
	}
}

// Short Buffers, and all with NoZcopy, go as bytes in messages.
func TestBuffer_copied(t *testing.T) {
	eachTransport(t, func(t *testing.T, open func(testing.TB, string) rdma.Device) {
		p := newPair(t, open, func(c *sdp.Config) { c.ZcopySize = socket.NoZcopy })
		a, b := p.dial(t)
		data := random(8, 1<<20)
		out, in := newBuffer(t, p.client, 128<<10), newBuffer(t, p.server, 128<<10)
		sent := make(chan error, 1)
		go func() { sent <- errors.Join(send(a, []*sdp.Buffer{out}, data), a.CloseWrite()) }()
		got, err := receive(b, []*sdp.Buffer{in}, false)
		if err = errors.Join(err, <-sent); err != nil || !bytes.Equal(got, data) {
			t.Fatalf("%d bytes arrived: %v", len(got), err)
		}
		if x, y := a.Info(), b.Info(); x.BytesCopied != 1<<20 || y.BytesCopied != 1<<20 || x.Adverts != 0 {
			t.Errorf("%+v; %+v", x, y)
		}
	})
}

// What a Write has sent a Buffer can read, and the other way round.
func TestBuffer_mixed(t *testing.T) {
	eachTransport(t, func(t *testing.T, open func(testing.TB, string) rdma.Device) {
		p := newPair(t, open)
		a, b := p.dial(t)
		data := random(9, 3<<20)
		out, in := newBuffer(t, p.client, 200_000), newBuffer(t, p.server, 150_000)
		sent := make(chan error, 1)
		go func() {
			left := data
			var err error
			for i := 0; len(left) > 0 && err == nil; i++ {
				var n int
				if i%2 == 0 {
					n, err = a.Write(left[:min(len(left), 1+i*7919%300_000)])
				} else {
					k := copy(out.Bytes(), left)
					n, err = a.WriteBuffer(out, 0, k)
				}
				left = left[n:]
			}
			sent <- errors.Join(err, a.CloseWrite())
		}()
		var got []byte
		p1 := make([]byte, 70_000)
		for i := 0; ; i++ {
			var n int
			var err error
			if i%3 == 0 {
				n, err = b.Read(p1)
				got = append(got, p1[:n]...)
			} else {
				n, err = b.ReadBuffer(in, 0, 150_000, i%3 == 1)
				got = append(got, in.Bytes()[:n]...)
			}
			if err != nil {
				if !errors.Is(err, io.EOF) {
					t.Fatal(err)
				}
				break
			}
		}
		if err := <-sent; err != nil || !bytes.Equal(got, data) {
			t.Fatalf("%d of %d bytes arrived, or others: %v", len(got), len(data), err)
		}
	})
}

// A connection that lasts does not remember Buffers that were used once and closed.
func TestBuffer_closedIsForgotten(t *testing.T) {
	eachTransport(t, func(t *testing.T, open func(testing.TB, string) rdma.Device) {
		a, b := newPair(t, open).dial(t)
		done := make(chan error, 1)
		go func() {
			_, err := io.Copy(io.Discard, b)
			done <- err
		}()
		for range 200 {
			if _, err := a.ReadFrom(bytes.NewReader(make([]byte, 10))); err != nil {
				t.Fatal(err)
			}
		}
		if n := sdp.BuffersOf(a); n > 40 {
			t.Errorf("of 200 and more Buffers %d are remembered", n)
		}
		if err := errors.Join(a.Close(), <-done); err != nil {
			t.Error(err)
		}
		_ = b.Close()
	})
}

// failingWriter fails.
type failingWriter struct{ err error }

func (w failingWriter) Write([]byte) (int, error) { return 0, w.err }

// A stream of a reader arrives at a writer, without a copy where it is long.
func TestConn_readFromWriteTo(t *testing.T) {
	eachTransport(t, func(t *testing.T, open func(testing.TB, string) rdma.Device) {
		p := newPair(t, open)
		for _, size := range []int{0, 1, 100_000, 5<<20 + 77} {
			a, b := p.dial(t)
			data := random(uint64(size), size)
			sent := make(chan error, 1)
			go func() {
				n, err := a.ReadFrom(bytes.NewReader(data))
				if err == nil && n != int64(size) {
					err = fmt.Errorf("sent %d of %d bytes", n, size)
				}
				sent <- errors.Join(err, a.CloseWrite())
			}()
			var got bytes.Buffer
			n, err := b.WriteTo(&got)
			if err = errors.Join(err, <-sent); err != nil || n != int64(size) || !bytes.Equal(got.Bytes(), data) {
				t.Errorf("%d of %d bytes arrived, or others: %v", n, size, err)
			}
			if x, y := a.Info(), b.Info(); size > 1<<20 && x.BytesCopied+y.BytesCopied > uint64(size)/5 {
				t.Errorf("%v; %v", x, y)
			}
			_, _ = a.Close(), b.Close()
		}
		a, b := p.dial(t)
		boom := errors.New("boom")
		if _, err := a.Write([]byte("lost")); err != nil {
			t.Fatal(err)
		}
		if n, err := b.WriteTo(failingWriter{boom}); n != 0 || !errors.Is(err, boom) {
			t.Errorf("writer fails: %d bytes: %v", n, err)
		}
		if _, err := a.Write([]byte("here")); err != nil {
			t.Fatal(err)
		}
		got := make([]byte, 5)
		if n, err := b.Read(got); err != nil || string(got[:n]) != "here" {
			t.Errorf("after that, the peer reads %q: %v", got[:n], err)
		}
		if _, err := a.WriteUrgent([]byte("!")); err != nil { // alone in its read, which then gives nothing
			t.Fatal(err)
		}
		if _, err := a.Write([]byte("behind")); err != nil {
			t.Fatal(err)
		}
		if err := a.CloseWrite(); err != nil {
			t.Fatal(err)
		}
		var rest bytes.Buffer
		if n, err := b.WriteTo(&rest); err != nil || n != 6 || rest.String() != "behind" {
			t.Errorf("behind an out-of-band byte is %q: %v", rest.String(), err)
		}
		_, _ = a.Close(), b.Close()
		a, b = p.dial(t)
		if n, err := a.ReadFrom(io.MultiReader(bytes.NewReader(make([]byte, 3)), iotest.ErrReader(boom))); n != 3 || !errors.Is(err, boom) {
			t.Errorf("reader fails: %d bytes: %v", n, err)
		}
		_ = a.Abort()
		if _, err := b.ReadFrom(bytes.NewReader(make([]byte, 9<<20))); !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("peer is gone: %v", err)
		}
		_ = b.Close()
	})
}
