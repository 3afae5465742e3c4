// SPDX-License-Identifier: Apache-2.0

package sdp_test

import (
	"io"
	"net"
	"testing"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/sdp"
)

// A stream of 1 MiB messages: as TCP, by Write and Read, and by Buffers. Both ends are in this process, so processor time
// counts both.
func BenchmarkConn_stream(b *testing.B) {
	const size = 1 << 20
	b.Run("TCP", func(b *testing.B) {
		x, y := tcpPair(b)
		stream(b, x, y, size)
	})
	for _, tr := range transports {
		b.Run(tr.name+"/Bcopy", func(b *testing.B) {
			x, y := newPair(b, tr.open).dial(b)
			stream(b, x, y, size)
		})
		b.Run(tr.name+"/Zcopy", func(b *testing.B) {
			p := newPair(b, tr.open)
			x, y := p.dial(b)
			zeroCopy(b, p, x, y, size)
		})
	}
}

// stream moves b.N messages by Write and Read.
func stream(b *testing.B, x, y net.Conn, size int) {
	b.SetBytes(int64(size))
	done := make(chan error, 1)
	go func() {
		buf := make([]byte, size)
		for range b.N {
			if _, err := io.ReadFull(y, buf); err != nil {
				done <- err
				return
			}
		}
		done <- nil
	}()
	buf := make([]byte, size)
	b.ReportAllocs()
	b.ResetTimer()
	for range b.N {
		if _, err := x.Write(buf); err != nil {
			b.Fatal(err)
		}
	}
	if err := <-done; err != nil {
		b.Fatal(err)
	}
	b.StopTimer()
	_, _ = x.Close(), y.Close()
}

// zeroCopy moves b.N messages by Buffers, two under way on each side.
func zeroCopy(b *testing.B, p *pair, x, y *sdp.Conn, size int) {
	b.SetBytes(int64(size))
	var out, in [2]*sdp.Buffer
	for i := range out {
		out[i], in[i] = newBuffer(b, p.client, size), newBuffer(b, p.server, size)
	}
	done := make(chan error, 1)
	go func() {
		done <- pipeline(b.N, func(i int) (*sdp.Transfer, error) { return y.StartRead(in[i%2], 0, size, true) })
	}()
	b.ReportAllocs()
	b.ResetTimer()
	err := pipeline(b.N, func(i int) (*sdp.Transfer, error) { return x.StartWrite(out[i%2], 0, size) })
	if err != nil {
		b.Fatal(err)
	}
	if err := <-done; err != nil {
		b.Fatal(err)
	}
	b.StopTimer()
	_, _ = x.Close(), y.Close()
}

// pipeline starts n transfers, with two under way.
func pipeline(n int, start func(int) (*sdp.Transfer, error)) error {
	var under [2]*sdp.Transfer
	for i := range n + 2 {
		if t := under[i%2]; t != nil {
			if _, err := t.Wait(); err != nil {
				return err
			}
			under[i%2] = nil
		}
		if i >= n {
			continue
		}
		t, err := start(i)
		if err != nil {
			return err
		}
		under[i%2] = t
	}
	return nil
}

// A round trip of 64 bytes.
func BenchmarkConn_roundTrip(b *testing.B) {
	const size = 64
	run := func(b *testing.B, x, y net.Conn) {
		done := make(chan struct{})
		go func() {
			defer close(done)
			buf := make([]byte, size)
			for {
				if _, err := io.ReadFull(y, buf); err != nil {
					return
				}
				if _, err := y.Write(buf); err != nil {
					return
				}
			}
		}()
		buf := make([]byte, size)
		b.ReportAllocs()
		b.ResetTimer()
		for range b.N {
			if _, err := x.Write(buf); err != nil {
				b.Fatal(err)
			}
			if _, err := io.ReadFull(x, buf); err != nil {
				b.Fatal(err)
			}
		}
		b.StopTimer()
		_ = x.Close()
		<-done
		_ = y.Close()
	}
	b.Run("TCP", func(b *testing.B) {
		x, y := tcpPair(b)
		run(b, x, y)
	})
	for _, tr := range transports {
		b.Run(tr.name, func(b *testing.B) {
			x, y := newPair(b, tr.open).dial(b)
			run(b, x, y)
		})
	}
}

// A message costs no allocation: neither to send, nor to receive.
func TestConn_allocates(t *testing.T) {
	eachTransport(t, func(t *testing.T, open func(testing.TB, string) rdma.Device) {
		a, b := newPair(t, open).dial(t)
		buf, got := make([]byte, 64), make([]byte, 64)
		once := func() {
			if _, err := a.Write(buf); err != nil {
				t.Fatal(err)
			}
			if _, err := io.ReadFull(b, got); err != nil {
				t.Fatal(err)
			}
		}
		for range 200 {
			once()
		}
		if n := testing.AllocsPerRun(500, once); n >= 1 {
			t.Errorf("%v allocations per message, want none", n)
		}
		_, _ = a.Close(), b.Close()
	})
}
