// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"fmt"
	"io"
	"net"
	"net/netip"
	"testing"

	"github.com/smcr-io/kube-smcr/internal/testenv"
)

// testJoin talks with guests in both directions and by both versions of IP, twice: who has
// gone can come again.
func testJoin(t *testing.T, l *Lab) {
	testenv.Need(t, testenv.NetAdmin)
	for range 2 {
		h, err := l.Join(limited(t))
		if err != nil {
			t.Fatal(err)
		}
		for i := range l.Guests() {
			g := l.Guest(i)
			for _, at := range [][2]netip.Addr{{h.Addr(), g.Addr(0)}, {h.Addr6(), g.Addr6(0)}} {
				testJoined(t, h, g, at[0], at[1])
			}
		}
		if err := h.Close(); err != nil {
			t.Error(err)
		}
	}
}

func testJoined(t *testing.T, h *Host, g *Guest, ours, theirs netip.Addr) {
	t.Helper()
	ctx := limited(t)
	listener, err := h.Listen(ctx, netip.AddrPortFrom(ours, 0))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = listener.Close() }()
	deadline, _ := ctx.Deadline()
	if err := listener.SetDeadline(deadline); err != nil {
		t.Fatal(err)
	}
	const said = "many times more than a packet has"
	ip := map[bool]string{true: "TCP4", false: "TCP6"}[ours.Is4()]
	p, err := g.Start(ctx, "bash", "-c", fmt.Sprintf("yes %q | head -n 1000 | socat -u - %s:%v,bind=%v", said, ip, listener.Addr(), netip.AddrPortFrom(theirs, 0)))
	if err != nil {
		t.Fatal(err)
	}
	in, err := listener.AcceptTCP()
	if err != nil {
		text, _ := io.ReadAll(p.Stderr)
		t.Fatalf("wait for %s: %v; it ended with %v: %s", g.Name(), err, p.Wait(), text)
	}
	if from := in.RemoteAddr().(*net.TCPAddr).AddrPort().Addr(); from != theirs {
		t.Errorf("%v connected, want %v", from, theirs)
	}
	text, err := io.ReadAll(in)
	if err != nil || len(text) != 1000*len(said+"\n") {
		t.Errorf("it sent %d bytes, %v", len(text), err)
	}
	if err := in.Close(); err != nil {
		t.Error(err)
	}
	if err := p.Wait(); err != nil {
		t.Error(err)
	}
	const port = 7000
	p, err = g.Start(ctx, "socat", "-u", fmt.Sprintf("%s-LISTEN:%d,reuseaddr", ip, port), "STDOUT")
	if err != nil {
		t.Fatal(err)
	}
	var out *net.TCPConn
	err = poll(ctx, "the guest's listener", bootTimeout, func() error {
		out, err = h.Dial(ctx, netip.AddrPortFrom(theirs, port))
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := out.Write([]byte(said)); err != nil {
		t.Error(err)
	}
	if err := out.Close(); err != nil {
		t.Error(err)
	}
	if got, err := io.ReadAll(p.Stdout); err != nil || string(got) != said {
		t.Errorf("the guest got %q, %v", got, err)
	}
	if err := p.Wait(); err != nil {
		t.Error(err)
	}
}
