// SPDX-License-Identifier: Apache-2.0

package sockets

import (
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// freePorts finds ports that follow each other and that nobody has.
func freePorts(t *testing.T) int {
	t.Helper()
	for range 100 {
		l, err := net.Listen("tcp", "0.0.0.0:0")
		if err != nil {
			t.Fatal(err)
		}
		first := l.Addr().(*net.TCPAddr).Port
		all := []net.Listener{l}
		for i := 1; i < Ports && err == nil; i++ {
			if l, err = net.Listen("tcp", fmt.Sprintf(":%d", first+i)); err == nil {
				all = append(all, l)
			}
		}
		for _, l := range all {
			if cerr := l.Close(); cerr != nil {
				t.Fatal(cerr)
			}
		}
		if err == nil {
			return first
		}
	}
	t.Fatal("no free ports")
	return 0
}

// On TCP what is tried is what programs expect of it.
func TestProber_tcp(t *testing.T) {
	first := freePorts(t)
	ready, failed := make(chan struct{}), make(chan error, 1)
	go func() { failed <- Serve(first, func() { close(ready) }) }() // until the process ends
	select {
	case <-ready:
	case err := <-failed:
		t.Fatal(err)
	}
	p := Prober{Server: netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), uint16(first)), Want: unix.IPPROTO_TCP}
	rows, err := p.Run()
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]string{}
	for _, r := range rows {
		if r.Name == "" || r.Result == "" {
			t.Errorf("row %+v", r)
		}
		if _, twice := got[r.Name]; twice {
			t.Errorf("two trials are called %q", r.Name)
		}
		got[r.Name] = r.Result
	}
	for _, want := range []Row{
		{"SO_DOMAIN", "2"},
		{"SO_PROTOCOL", "6"},
		{"TCP_NODELAY", "1"},
		{"SO_KEEPALIVE", "1"},
		{"connect to a port on which nobody listens", "ECONNREFUSED"},
		{"connect without blocking to a port on which nobody listens: events", "EINPROGRESS, then IN OUT ERR HUP, SO_ERROR ECONNREFUSED"},
		{"an IPv6 socket to an IPv4-mapped address", "works"},
		{"a listener for both families, its client's being IPv4", "works"},
		{"TCP_DEFER_ACCEPT: accept waits for the first byte", "yes"},
		{"TCP_SAVED_SYN of what was accepted", "there"},
		{"SO_REUSEPORT: two listeners on one port", "ok"},
		{"shutdown of a listener wakes accept", "shutdown: ok; accept: EINVAL"},
		{"MSG_PEEK, then MSG_WAITALL", `"abc", "abcdef"`},
		{"MSG_TRUNC discards bytes", `4 bytes, copied: no; then "ef"`},
		{"urgent data: event, SIOCATMARK, MSG_OOB, then the rest", `PRI; "ab", mark 1, "X", "cd"`},
		{"MSG_ZEROCOPY", `"abcd"`},
		{"mmap, for TCP_ZEROCOPY_RECEIVE", "ok"},
		{"sendfile", "1000000 bytes"},
		{"splice from one connection into another", "5000 bytes"},
		{"SO_TIMESTAMPNS: recvmsg gives the time", "yes"},
		{"TCP_INQ: recvmsg gives the bytes that are left", "yes"},
		{"TCP_INFO counts the bytes of the connection", "yes"},
		{"SIOCOUTQ when the peer has read everything", "0"},
		{"SO_RCVLOWAT: poll waits for more bytes", "yes"},
		{"epoll, edge triggered, of room to send", "works"},
		{"SCM_RIGHTS", `"abc"`},
		{"the peer closes: events, recv", "IN RDHUP; end of stream"},
		{"the peer closes: send, later", "EPIPE"},
		{"half close", "1000000 bytes"},
		{"the peer closes with SO_LINGER 0: recv", "ECONNRESET"},
		{"the peer closes with unread data: recv", "ECONNRESET"},
	} {
		if got[want.Name] != want.Result {
			t.Errorf("%s: %q, want %q", want.Name, got[want.Name], want.Result)
		}
	}
}

func TestTable(t *testing.T) {
	tcp := []Row{{"SO_TYPE", "1"}, {"SO_PROTOCOL", "6"}}
	table, err := Table(Run{"TCP", tcp}, Run{"SMC-R", []Row{{"SO_TYPE", "1"}, {"SO_PROTOCOL", "256|"}}})
	want := `| what a program does | TCP | SMC-R | matters for |
|---|---|---|---|
| SO_PROTOCOL | 6 | 256\| | programs that ask a socket they were given whether it is TCP |

The same everywhere, with what it was tried with: SO_TYPE.
`
	if err != nil || table != want {
		t.Errorf("%v\n%s\nwant\n%s", err, table, want)
	}
	if _, err := Table(Run{"TCP", tcp}, Run{"SMC-R", tcp[:1]}); err == nil {
		t.Error("a run without a trial was taken")
	}
	if _, err := Table(Run{"TCP", tcp}, Run{"SMC-R", []Row{{"SO_TYPE", "2"}, {"SO_PROTOCOL", "6"}}}); err == nil || !strings.Contains(err.Error(), "SO_TYPE") {
		t.Errorf("a difference without a reason: %v", err)
	}
}

// What came of an option on three kinds of sockets is written once where it is the same.
func TestStates(t *testing.T) {
	for _, tt := range []struct{ asNew, connected, accepted, want string }{
		{"1", "1", "1", "1"},
		{"1", "1", "2", "1; accepted: 2"},
		{"1", "2", "2", "2; before connect: 1"},
		{"1", "2", "1", "1; connected: 2"},
		{"1", "2", "3", "before connect: 1; connected: 2; accepted: 3"},
	} {
		if got := states(tt.asNew, tt.connected, tt.accepted); got != tt.want {
			t.Errorf("%q, want %q", got, tt.want)
		}
	}
}
