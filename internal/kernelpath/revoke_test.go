// SPDX-License-Identifier: Apache-2.0

package kernelpath

import (
	"errors"
	"net/netip"
	"slices"
	"testing"

	"github.com/smcr-io/kube-smcr/internal/linux"
	"github.com/smcr-io/kube-smcr/internal/smcnl"
)

// A connection of the pod 10.0.0.50 in the tests below. The kernel tells ports only.
func connection(cookie uint64, role smcnl.Side, local, peer uint16) smcnl.Socket {
	port := func(p uint16) netip.AddrPort { return netip.AddrPortFrom(netip.IPv4Unspecified(), p) }
	return smcnl.Socket{
		State: smcnl.StateActive, Mode: smcnl.ModeSMCR, Local: port(local), Peer: port(peer),
		Cookie: cookie, Inode: 1000 + cookie, Role: role,
	}
}

func with(s smcnl.Socket, change func(*smcnl.Socket)) smcnl.Socket {
	change(&s)
	return s
}

func tcp(local, peer string) linux.TCPConn {
	return linux.TCPConn{Local: netip.MustParseAddrPort(local), Peer: netip.MustParseAddrPort(peer)}
}

// Only live connections on SMC-R that the filter refuses are ended, whichever side of the service the pod is;
// where ports do not tell which connection it is, the socket is asked.
func TestPlanRevocation(t *testing.T) {
	filter := linux.OptionFilterConfig{
		Peers: []linux.OutboundRule{{Prefix: netip.MustParsePrefix("10.0.0.0/24"), Ports: []linux.PortRange{{First: 6379, Last: 6379}}}},
		Never: []netip.Addr{netip.MustParseAddr("10.0.0.9")},
	}
	conns := byPorts([]linux.TCPConn{
		tcp("10.0.0.50:40000", "10.0.0.1:6379"),
		tcp("10.0.0.50:40001", "10.0.0.1:6380"),
		tcp("10.0.0.50:40002", "10.0.0.9:6379"),
		tcp("10.0.0.50:6379", "10.0.0.1:6380"),
		tcp("10.0.0.50:6380", "10.0.0.1:6379"),
		// One client port, two clients.
		tcp("10.0.0.50:6379", "10.0.0.2:50000"), tcp("10.0.0.50:6379", "10.9.0.2:50000"),
		tcp("10.0.0.50:6379", "10.0.0.3:50001"), tcp("10.0.0.50:6379", "10.0.0.4:50001"),
	})
	for _, tt := range []struct {
		name                        string
		socket                      smcnl.Socket
		refused, allowed, unsettled bool
	}{
		{name: "client of a selected port", socket: connection(1, smcnl.Client, 40000, 6379), allowed: true},
		{name: "client of another port", socket: connection(1, smcnl.Client, 40001, 6380), refused: true},
		{name: "client of a peer on the node", socket: connection(1, smcnl.Client, 40002, 6379), refused: true},
		{name: "server of a selected port", socket: connection(1, smcnl.Server, 6379, 6380), allowed: true},
		{name: "server of another port", socket: connection(1, smcnl.Server, 6380, 6379), refused: true},
		{name: "one of two peers is refused", socket: connection(1, smcnl.Server, 6379, 50000), refused: true},
		{name: "none of two peers is", socket: connection(1, smcnl.Server, 6379, 50001), allowed: true},
		{name: "the TCP connection is not listed", socket: connection(1, smcnl.Client, 40009, 6379), refused: true},
		{name: "a socket that has addresses", socket: with(connection(1, smcnl.Client, 0, 0), func(s *smcnl.Socket) {
			s.Local, s.Peer = netip.MustParseAddrPort("10.0.0.50:1"), netip.MustParseAddrPort("10.0.0.7:6379")
		}), allowed: true},
		{name: "known from before", socket: connection(77, smcnl.Client, 40001, 6380), allowed: true},
		{name: "half closed", socket: with(connection(1, smcnl.Client, 40001, 6380), func(s *smcnl.Socket) {
			s.State, s.Shutdown = "PEERCLOSEWAIT1", smcnl.ShutSend
		}), refused: true},
		{name: "ended before", socket: with(connection(1, smcnl.Client, 40001, 6380), func(s *smcnl.Socket) {
			s.State, s.Shutdown = "PEERCLOSEWAIT1", smcnl.ShutBoth
		})},
		{name: "not accepted yet", socket: with(connection(1, smcnl.Server, 6380, 40000), func(s *smcnl.Socket) { s.Inode = 0 }), unsettled: true},
		{name: "not accepted yet, and allowed", socket: with(connection(1, smcnl.Server, 6379, 50001), func(s *smcnl.Socket) { s.Inode = 0 }), allowed: true},
		{name: "rendezvous under way", socket: with(connection(1, "", 40001, 6380), func(s *smcnl.Socket) { s.State = smcnl.StateInit }), unsettled: true},
		{name: "not connected", socket: with(connection(1, "", 40001, 0), func(s *smcnl.Socket) { s.State = smcnl.StateInit })},
		{name: "listens", socket: with(connection(1, "", 6380, 0), func(s *smcnl.Socket) { s.State = smcnl.StateListen })},
		{name: "fell back", socket: with(connection(1, smcnl.Client, 40001, 6380), func(s *smcnl.Socket) { s.Mode = smcnl.ModeTCP })},
		{name: "its link group is gone", socket: connection(1, "", 40001, 6380)},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p := planRevocation([]smcnl.Socket{tt.socket}, conns, conns.judge(filter), map[uint64]bool{77: true})
			var want plan
			if tt.refused {
				want.refused = []suspect{{cookie: tt.socket.Cookie, inode: tt.socket.Inode, role: tt.socket.Role}}
				if under := conns.under(&tt.socket); len(under) == 1 {
					want.refused[0].certain = under[0]
				}
			}
			if tt.allowed {
				want.allowed = []uint64{tt.socket.Cookie}
			}
			want.unsettled = tt.unsettled
			if !slices.Equal(p.refused, want.refused) || !slices.Equal(p.allowed, want.allowed) || p.unsettled != want.unsettled {
				t.Errorf("%+v, want %+v", p, want)
			}
		})
	}
}

// In the node's network the connections of others are left alone, whatever the filter of a pod says.
func TestPlanRevocation_cgroup(t *testing.T) {
	const ours, others = 7, 8
	conns := ofCgroups([]linux.TCPSocket{
		{TCPConn: tcp("10.0.0.50:40000", "10.0.0.1:6379"), Cgroup: ours},
		{TCPConn: tcp("10.0.0.50:40001", "10.0.0.1:6379"), Cgroup: others},
		{TCPConn: tcp("10.0.0.50:40002", "10.0.0.1:6379"), Cgroup: ours},
		{TCPConn: tcp("10.0.0.50:40002", "10.0.0.2:6379"), Cgroup: others},
	}, map[uint64]bool{ours: true})
	refused := conns.judge(linux.OptionFilterConfig{})
	for _, tt := range []struct {
		name                        string
		socket                      smcnl.Socket
		refused, allowed, unsettled bool
	}{
		{name: "the pod's", socket: connection(1, smcnl.Client, 40000, 6379), refused: true},
		{name: "another's", socket: connection(1, smcnl.Client, 40001, 6379), allowed: true},
		{name: "of both", socket: connection(1, smcnl.Client, 40002, 6379), refused: true},
		{name: "another's, not accepted yet", socket: with(connection(1, smcnl.Server, 40001, 6379), func(s *smcnl.Socket) { s.Inode = 0 }), allowed: true},
		{name: "rendezvous of another's", socket: with(connection(1, "", 40001, 6379), func(s *smcnl.Socket) { s.State = smcnl.StateInit })},
		{name: "rendezvous of the pod's", socket: with(connection(1, "", 40000, 6379), func(s *smcnl.Socket) { s.State = smcnl.StateInit }), unsettled: true},
	} {
		p := planRevocation([]smcnl.Socket{tt.socket}, conns, refused, nil)
		if len(p.refused) > 0 != tt.refused || len(p.allowed) > 0 != tt.allowed || p.unsettled != tt.unsettled {
			t.Errorf("%s: %+v", tt.name, p)
		}
	}
	// Whose socket was opened is seen by its addresses, and may not be listed at all.
	for _, c := range []linux.TCPConn{tcp("10.0.0.50:40001", "10.0.0.1:6379"), tcp("10.0.0.50:1", "10.0.0.1:1")} {
		if refused(smcnl.Client, c) {
			t.Errorf("%v is refused", c)
		}
	}
}

// A pod without sockets of SMC has nothing to end, and a filter that allows nothing is that of one that leaves.
func TestRevoke_nothing(t *testing.T) {
	need(t)
	ns, _ := scratch(t)
	r, err := Revoke(linux.In(ns), linux.OptionFilterConfig{}, nil)
	if err != nil || len(r.Ended)+r.Left != 0 || r.Unsettled {
		t.Errorf("%+v, %v", r, err)
	}
}

// Of too many sockets to look through those are judged that were, and it is said that there are more.
func TestRevoke_tooMany(t *testing.T) {
	const known = 4
	var nowhere linux.Place // nobody enters it
	socks := []smcnl.Socket{connection(known, smcnl.Client, 40000, 6379)}
	r, err := revoke(nowhere, socks, linux.ErrTooMuch, linux.OptionFilterConfig{}, []uint64{known})
	if !errors.Is(err, linux.ErrTooMuch) || !slices.Equal(r.Allowed, []uint64{known}) {
		t.Errorf("%+v, %v", r, err)
	}
	r, err = revoke(nowhere, nil, errors.ErrUnsupported, linux.OptionFilterConfig{}, []uint64{known})
	if !errors.Is(err, errors.ErrUnsupported) || len(r.Allowed) > 0 {
		t.Errorf("without a list: %+v, %v", r, err)
	}
}
