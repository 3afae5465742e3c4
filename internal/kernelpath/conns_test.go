// SPDX-License-Identifier: Apache-2.0

package kernelpath

import (
	"slices"
	"testing"

	"github.com/smcr-io/kube-smcr/internal/linux"
	"github.com/smcr-io/kube-smcr/internal/smcnl"
)

// A connection has the addresses of the only TCP connection with its ports, and the side that opened it.
func TestJoined(t *testing.T) {
	fellBack := func(s *smcnl.Socket) { s.Mode, s.Role = smcnl.ModeTCP, "" }
	socks := []smcnl.Socket{
		with(connection(1, "", 6379, 0), func(s *smcnl.Socket) { s.State = smcnl.StateListen }),
		connection(2, smcnl.Server, 6379, 50000),
		connection(3, smcnl.Client, 40000, 6379),
		with(connection(4, "", 6379, 50001), fellBack),
		with(connection(5, "", 40001, 6379), fellBack),
		connection(6, smcnl.Server, 6379, 50002),
		with(connection(7, "", 40002, 6379), func(s *smcnl.Socket) { s.State = smcnl.StateInit }),
		with(connection(8, "", 40003, 0), func(s *smcnl.Socket) { s.State = smcnl.StateInit }),
		with(connection(9, smcnl.Client, 40004, 6379), func(s *smcnl.Socket) { s.State = smcnl.StateClosed }),
	}
	conns := byPorts([]linux.TCPConn{
		tcp("10.0.0.50:6379", "10.0.0.1:50000"),
		tcp("10.0.0.50:40000", "10.0.0.2:6379"),
		tcp("10.0.0.50:6379", "10.0.0.3:50001"),
		tcp("10.0.0.50:40001", "10.0.0.4:6379"),
		tcp("10.0.0.50:6379", "10.0.0.5:50002"), tcp("10.0.0.50:6379", "10.0.0.6:50002"),
	})
	type seen struct {
		cookie  uint64
		peer    string
		inbound bool
	}
	var got []seen
	for _, c := range joined(socks, conns) {
		got = append(got, seen{c.Cookie, c.Peer.String(), c.Inbound})
	}
	want := []seen{
		{2, "10.0.0.1:50000", true},
		{3, "10.0.0.2:6379", false},
		{4, "10.0.0.3:50001", true},
		{5, "10.0.0.4:6379", false},
		{6, "0.0.0.0:50002", true}, // of one of two peers
		{7, "0.0.0.0:6379", false},
	}
	if !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}
