// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"io"
	"net"
	"testing"
	"time"
)

// BenchmarkAgent compares the whole transparent path with TCP on the same
// wires: agents' processes, so that they have their own schedulers.
func BenchmarkAgent(b *testing.B) {
	for _, path := range []string{"direct", "carried"} {
		b.Run(path, func(b *testing.B) {
			l := newProcessLab(b)
			if path == "carried" {
				l.b.spawn(b)
				l.a.spawn(b)
			}
			ln := l.b.pod.listen(b, podB+":0")
			serve(b, ln, echo)
			b.Run("roundtrip64", func(b *testing.B) {
				c := benchDial(b, l, ln)
				buf := make([]byte, 64)
				for b.Loop() {
					if err := trip(c, buf); err != nil {
						b.Fatal(err)
					}
				}
			})
			b.Run("setup", func(b *testing.B) {
				for b.Loop() {
					c := benchDial(b, l, ln)
					if err := trip(c, make([]byte, 1)); err != nil {
						b.Fatal(err)
					}
					_ = c.Close()
				}
			})
			sink := l.b.pod.listen(b, podB+":0")
			serve(b, sink, func(c *net.TCPConn) { _, _ = io.Copy(io.Discard, struct{ io.Reader }{c}) })
			b.Run("stream64K", func(b *testing.B) {
				c := benchDial(b, l, sink)
				buf := make([]byte, 64<<10)
				b.SetBytes(int64(len(buf)))
				for b.Loop() {
					if _, err := c.Write(buf); err != nil {
						b.Fatal(err)
					}
				}
			})
			if path == "carried" && l.a.status(b).Conns.TotalSMCR == 0 {
				b.Errorf("nothing was on SMC-R: %+v", l.a.status(b))
			}
		})
	}
}

func benchDial(b *testing.B, l *lab, ln *net.TCPListener) *net.TCPConn {
	b.Helper()
	c, err := l.a.pod.dial(b, ln.Addr().String())
	must(b, err)
	must(b, c.SetDeadline(time.Time{}))
	return c
}

func trip(c *net.TCPConn, buf []byte) error {
	_, werr := c.Write(buf)
	_, rerr := io.ReadFull(c, buf)
	return errors.Join(werr, rerr)
}
