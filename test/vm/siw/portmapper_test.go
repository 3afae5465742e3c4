// SPDX-License-Identifier: Apache-2.0

package siw

import (
	"errors"
	"net"
	"net/netip"
	"os"
	"strconv"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma/softiwarp"
	"github.com/smcr-io/kube-smcr/pkg/sdp/portmap"
	"github.com/smcr-io/kube-smcr/pkg/sdp/portmapper"
)

// testPortMapper has rdma-core's iwpmd as the other side of our port mapper: it asks and is asked for
// the programs of the guest, which do not know of it. It is the last test with siw, so that no other
// one has iwpmd in its way.
func (b *bed) testPortMapper(t *testing.T) {
	b.start(t, "iwpmd", "--systemd") // in the foreground
	if _, err := b.guest.Shell(t.Context(), "until ss -Hlnu sport = :"+strconv.Itoa(portmapper.Port)+" | grep -q .; do sleep 0.02; done"); err != nil {
		t.Fatalf("wait for iwpmd: %v", err)
	}
	t.Run("we ask", b.testAskIwpmd)
	t.Run("PMAck", b.testAckIwpmd)
	t.Run("iwpmd asks", b.testIwpmdAsks)
}

// testAskIwpmd looks up servers of the guest.
func (b *bed) testAskIwpmd(t *testing.T) {
	c, err := portmapper.NewClient(portmapper.ClientConfig{})
	if err != nil {
		t.Fatal(err)
	}
	lookup := func(service, cp netip.AddrPort) (netip.AddrPort, error) {
		var sdp netip.AddrPort
		return sdp, b.inNS(t, func() (err error) {
			sdp, err = c.Lookup(limited(t), service, cp)
			return err
		})
	}
	cp := netip.AddrPortFrom(b.host.Addr(), 40000)
	_, at := b.serve(t, "rping", "-s", "-P", "-a", b.guest.Addr(0).String())
	sdp, err := lookup(at, cp)
	if err != nil {
		t.Fatal(err)
	}
	p := b.newPeer(t, 2, pingInfoBytes)
	b.dial(t, p, sdp, softiwarp.ConnectOptions{})
	p.ping(t, pingBytes, 0)
	b.disconnect(t, p)

	_, at = b.serve(t, "rping", "-s", "-P", "-a", b.guest.Addr6(0).String())
	six := netip.AddrPortFrom(b.guest.Addr6(0), at.Port())
	if sdp, err := lookup(six, netip.AddrPortFrom(b.host.Addr6(), 40000)); err != nil || sdp != six {
		t.Errorf("a server of IPv6 is at %v, %v; want %v", sdp, err, six)
	}

	var denied *portmapper.LookupError
	if sdp, err = lookup(netip.AddrPortFrom(at.Addr(), 1), cp); !errors.As(err, &denied) || denied.Reason != portmapper.Denied {
		t.Errorf("a port where nobody listens: %v, %v; want that it is denied", sdp, err)
	}
	if st := c.Stats(); st.Mapped != 2 || len(st.Discarded) != 0 {
		t.Errorf("%+v", st)
	}
}

// testAckIwpmd: iwpmd repeats a PMAccept until our PMAck, and then no more.
func (b *bed) testAckIwpmd(t *testing.T) {
	_, at := b.serve(t, "rping", "-s", "-P", "-a", b.guest.Addr(0).String())
	var u *net.UDPConn
	err := b.inNS(t, func() (err error) {
		u, err = net.DialUDP("udp4", nil, net.UDPAddrFromAddrPort(netip.AddrPortFrom(at.Addr(), portmapper.Port)))
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = u.Close() }()
	hear := func(patience time.Duration) (portmap.Message, time.Time, error) {
		in := make([]byte, 100)
		_ = u.SetReadDeadline(time.Now().Add(patience))
		n, err := u.Read(in)
		if err != nil {
			return portmap.Message{}, time.Time{}, err
		}
		m, err := portmap.ParseMessage(in[:n])
		return m, time.Now(), err
	}
	cp := netip.AddrPortFrom(b.host.Addr(), 40001)
	l := portmap.NewLookup(time.Now(), portmap.LookupConfig{Service: at, CP: cp, Handle: 0x0123456789abcdef})
	out, _ := l.Poll(nil)
	if _, err := u.Write(out); err != nil {
		t.Fatal(err)
	}
	first, heard, err := hear(caseTimeout)
	if err != nil || first.Type != portmap.Accept {
		t.Fatalf("%v, %v; want a PMAccept", first, err)
	}
	second, again, err := hear(caseTimeout)
	if err != nil || second != first {
		t.Fatalf("%v, %v; want %v again", second, err, first)
	}
	if v := l.HandleDatagram(first.Append(nil)); v != portmap.Taken {
		t.Fatalf("%v is %v", first, v)
	}
	if v := l.HandleDatagram(second.Append(nil)); v != portmap.Late {
		t.Errorf("%v again is %v", second, v)
	}
	ack, ok := l.Poll(nil)
	if !ok {
		t.Fatal("there is no PMAck")
	}
	if _, err := u.Write(ack); err != nil {
		t.Fatal(err)
	}
	t.Logf("iwpmd repeats after %v", again.Sub(heard))
	crossed := 0
	for {
		m, _, err := hear(again.Sub(heard) + 500*time.Millisecond)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			break
		}
		if crossed++; err != nil || crossed > 1 { // one may have been on its way
			t.Fatalf("%v, %v after the PMAck", m, err)
		}
	}
}

// testIwpmdAsks has a client of the guest find our server, which listens elsewhere than the
// client was told.
func (b *bed) testIwpmdAsks(t *testing.T) {
	var s *portmapper.Server
	err := b.inNS(t, func() (err error) {
		s, err = portmapper.Listen(netip.AddrPortFrom(b.host.Addr(), portmapper.Port), portmapper.ServerConfig{CacheTime: 10 * time.Second})
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}()
	l := b.listen(t)
	service, sdp := netip.AddrPortFrom(b.host.Addr(), firstPort-1), netip.MustParseAddrPort(l.Addr().String())
	if err := s.Map(service, sdp); err != nil {
		t.Fatal(err)
	}
	ping := func(port string) {
		t.Helper()
		client := b.start(t, "rping", "-c", "-V", "-a", b.host.Addr().String(), "-p", port, "-C", "1", "-S", strconv.Itoa(pingBytes))
		p := b.newPeer(t, 2, pingInfoBytes)
		accept(t, l, p, softiwarp.ConnectOptions{})
		p.pong(t, pingBytes)
		p.disconnected(t)
		client.done(t)
	}
	ping(strconv.Itoa(firstPort - 1))
	if st := s.Stats(); st.Accepted == 0 || st.Acked != 1 || st.Pending != 0 || st.Malformed != 0 || st.DeniedForeign != 0 {
		t.Errorf("after a PMAccept: %+v", st)
	}
	ping(portOf(l)) // denied, so it goes where it was told
	if st := s.Stats(); st.DeniedUnknown == 0 || st.Acked != 1 || st.Pending != 0 || st.Malformed != 0 || st.StrayAcks != 0 {
		t.Errorf("after a PMDeny: %+v", st)
	}
}
