// SPDX-License-Identifier: Apache-2.0

package kernelpath

import (
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/internal/linux"
	"github.com/smcr-io/kube-smcr/internal/smcnl"
)

// What becomes of a connection whose socket is opened: it is ended if the filter refuses the addresses that the
// socket has, and lives on if not, or if its file is another one's by now.
func TestEndAll(t *testing.T) {
	ok := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	ok(err)
	defer func() { ok(l.Close()) }()
	at := l.Addr().(*net.TCPAddr).AddrPort()
	for _, tt := range []struct {
		name  string
		allow uint16 // a port
		other uint64 // added to the inode
		want  fate
	}{
		{"refused", at.Port() - 1, 0, isEnded},
		{"allowed", at.Port(), 0, isAllowed},
		{"another file", at.Port() - 1, 1, isGone},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c, err := net.Dial("tcp4", at.String())
			ok(err)
			defer func() { _ = c.Close() }()
			server, err := l.Accept()
			ok(err)
			defer func() { _ = server.Close() }()
			f, err := c.(*net.TCPConn).File()
			ok(err)
			defer func() { _ = f.Close() }()
			st, err := f.Stat()
			ok(err)
			s := suspect{cookie: 7, inode: st.Sys().(*syscall.Stat_t).Ino + tt.other, role: smcnl.Client}
			filter := linux.OptionFilterConfig{Peers: []linux.OutboundRule{{
				Prefix: netip.PrefixFrom(at.Addr(), at.Addr().BitLen()), Ports: []linux.PortRange{{First: tt.allow, Last: tt.allow}},
			}}}
			missing := suspect{cookie: 8, inode: 1}
			all := endAll([]suspect{s, missing}, map[uint64]linux.SocketFile{s.inode: {PID: os.Getpid(), FD: int(f.Fd())}}, new(tcpSockets).judge(filter))
			if len(all) != 1 || all[0].cookie != 7 || all[0].fate != tt.want {
				t.Fatalf("%+v, want fate %d of the one that was found", all, tt.want)
			}
			if tt.want == isEnded {
				if all[0].conn.Peer != at || all[0].conn.Role != smcnl.Client {
					t.Errorf("ended %+v, want that to %v", all[0].conn, at)
				}
				if n, err := server.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
					t.Errorf("the peer read %d bytes, %v", n, err)
				}
				return
			}
			ok(server.SetDeadline(time.Now().Add(10 * time.Second)))
			_, err = c.Write([]byte("x"))
			ok(err)
			_, err = io.ReadFull(server, make([]byte, 1))
			ok(err)
		})
	}
}

// A refusal of the system leaves a connection, and its error says which it was.
func TestOutcome_become(t *testing.T) {
	for _, tt := range []struct {
		err  error
		want fate
	}{
		{nil, isEnded}, {linux.ErrNotHeld, isGone}, {syscall.ENOTCONN, isGone}, {linux.ErrNoInsight, isLeft}, {syscall.EINTR, isLeft},
	} {
		var o outcome
		if o.become(tt.err); o.fate != tt.want || (o.err != nil) != (tt.want == isLeft) {
			t.Errorf("%v: %+v, want %d", tt.err, o, tt.want)
		}
	}
}
