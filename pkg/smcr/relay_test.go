// SPDX-License-Identifier: Apache-2.0

package smcr_test

import (
	"io"
	"net"
	"testing"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
)

// BenchmarkRelayTCP compares relays of TCP on loopback: ours, which looks for
// urgent data, and io.Copy, which splices and loses it.
func BenchmarkRelayTCP(b *testing.B) {
	for name, relay := range map[string]func(dst, src *net.TCPConn) (int64, error){
		"RelayTCP": smcr.RelayTCP,
		"splice":   func(dst, src *net.TCPConn) (int64, error) { return io.Copy(dst, src) },
	} {
		for _, size := range []int{64, 64 << 10} {
			b.Run(name+"/"+map[int]string{64: "roundtrip64", 64 << 10: "stream64K"}[size], func(b *testing.B) {
				program, near := tcpPair(b)
				far, peer := tcpPair(b)
				ended := make(chan struct{}, 3)
				for _, p := range [][2]net.Conn{{far, near}, {near, far}} {
					go func() {
						_, _ = relay(p[0].(*net.TCPConn), p[1].(*net.TCPConn)) // the benchmark ends it
						ended <- struct{}{}
					}()
				}
				go func() {
					if size == 64 {
						_, _ = io.Copy(peer, struct{ io.Reader }{peer})
					} else {
						_, _ = io.Copy(io.Discard, struct{ io.Reader }{peer})
					}
					ended <- struct{}{}
				}()
				buf := make([]byte, size)
				b.SetBytes(int64(size))
				b.ReportAllocs()
				for b.Loop() {
					if _, err := program.Write(buf); err != nil {
						b.Fatal(err)
					}
					if size == 64 {
						if _, err := io.ReadFull(program, buf); err != nil {
							b.Fatal(err)
						}
					}
				}
				_, _, _, _ = program.Close(), near.Close(), far.Close(), peer.Close()
				for range 3 {
					<-ended
				}
			})
		}
	}
}

// BenchmarkRelay is one message through the relays of two nodes and back.
// ReadFrom is RelayFrom without urgent data.
func BenchmarkRelay(b *testing.B) {
	for name, from := range map[string]func(c *smcr.Conn, r *net.TCPConn) (int64, error){
		"RelayFrom": (*smcr.Conn).RelayFrom,
		"ReadFrom":  func(c *smcr.Conn, r *net.TCPConn) (int64, error) { return c.ReadFrom(r) },
	} {
		b.Run(name, func(b *testing.B) {
			c, s := newSoftPair(b, rdma.MTU1024).dial(b)
			program, near := tcpPair(b)
			far, peer := tcpPair(b)
			ended := make(chan struct{}, 5)
			for c, t := range map[*smcr.Conn]*net.TCPConn{c: near.(*net.TCPConn), s: far.(*net.TCPConn)} {
				go func() { _, _ = from(c, t); ended <- struct{}{} }()
				go func() { _, _ = c.RelayTo(t); ended <- struct{}{} }()
			}
			go func() { _, _ = io.Copy(peer, struct{ io.Reader }{peer}); ended <- struct{}{} }()
			buf := make([]byte, 64)
			b.ReportAllocs()
			for b.Loop() {
				if _, err := program.Write(buf); err != nil {
					b.Fatal(err)
				}
				if _, err := io.ReadFull(program, buf); err != nil {
					b.Fatal(err)
				}
			}
			_, _, _, _, _, _ = program.Close(), near.Close(), far.Close(), peer.Close(), c.Close(), s.Close()
			for range 5 {
				<-ended
			}
		})
	}
}
