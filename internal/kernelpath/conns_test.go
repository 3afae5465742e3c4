// SPDX-License-Identifier: Apache-2.0

package kernelpath

import (
	"net/netip"
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

// Of the sockets of the node's network those are a pod's under which is a connection of its cgroup, or a listener.
func TestTCPSockets_isForeign(t *testing.T) {
	const ours, others = 7, 8
	listener := func(port string, cgroup uint64) linux.TCPSocket {
		return linux.TCPSocket{TCPConn: linux.TCPConn{Local: netip.MustParseAddrPort("0.0.0.0:" + port)}, Listens: true, Cgroup: cgroup}
	}
	socks := ofCgroups([]linux.TCPSocket{
		{TCPConn: tcp("10.0.0.50:40000", "10.0.0.1:6379"), Cgroup: ours},
		{TCPConn: tcp("10.0.0.50:40001", "10.0.0.1:6379"), Cgroup: others},
		{TCPConn: tcp("10.0.0.50:40002", "10.0.0.1:6379"), Cgroup: ours},
		{TCPConn: tcp("10.0.0.50:40002", "10.0.0.2:6379"), Cgroup: others},
		listener("80", ours), listener("81", others), listener("82", others), listener("82", ours), listener("82", others),
	}, map[uint64]bool{ours: true})
	listens := func(port uint16) smcnl.Socket {
		return with(connection(1, "", port, 0), func(s *smcnl.Socket) { s.State = smcnl.StateListen })
	}
	for _, tt := range []struct {
		name   string
		socket smcnl.Socket
		want   bool
	}{
		{"the pod's connection", connection(1, smcnl.Client, 40000, 6379), false},
		{"another's", connection(1, smcnl.Client, 40001, 6379), true},
		{"one of both", connection(1, smcnl.Client, 40002, 6379), false},
		{"one that is not listed", connection(1, smcnl.Client, 40003, 6379), false},
		{"the pod's listener", listens(80), false},
		{"another's listener", listens(81), true},
		{"listeners of both", listens(82), false},
		{"one that is not listed", listens(83), false},
		{"without ports", with(connection(1, "", 0, 0), func(s *smcnl.Socket) { s.State = smcnl.StateInit }), false},
	} {
		if got := socks.isForeign(&tt.socket); got != tt.want {
			t.Errorf("%s: %t", tt.name, got)
		}
	}
	got := joined([]smcnl.Socket{connection(1, smcnl.Client, 40000, 6379), connection(2, smcnl.Client, 40001, 6379), connection(3, smcnl.Client, 40002, 6379)}, socks)
	if len(got) != 2 || got[0].Local.Addr().String() != "10.0.0.50" || !got[1].Local.Addr().IsUnspecified() {
		t.Errorf("connections %+v", got)
	}
}
