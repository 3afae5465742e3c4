// SPDX-License-Identifier: Apache-2.0

package synopt

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// waitTime bounds every wait for something that happens at once on an idle
// machine.
const waitTime = 20 * time.Second

// A host is one end of a network of two, in a network namespace without a
// name: it goes away with the test, however that ends.
type host struct {
	ns     *os.File
	v4, v6 netip.Addr
}

// do runs f on a thread inside the host.
func (h *host) do(t testing.TB, f func() error) {
	t.Helper()
	done := make(chan error, 1)
	go func() {
		// The thread is not unlocked: it ends with the goroutine.
		runtime.LockOSThread()
		if err := unix.Setns(int(h.ns.Fd()), unix.CLONE_NEWNET); err != nil {
			done <- fmt.Errorf("enter network namespace: %w", err)
			return
		}
		done <- f()
	}()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}

// sysctl sets a variable below /proc/sys/net of the host.
func (h *host) sysctl(t testing.TB, name, value string) {
	t.Helper()
	h.do(t, func() error { return os.WriteFile("/proc/sys/net/"+name, []byte(value), 0) })
}

// nft loads a rule set into the host.
func (h *host) nft(t testing.TB, rules string) {
	t.Helper()
	h.do(t, func() error {
		if out, err := exec.Command("nft", rules).CombinedOutput(); err != nil {
			return fmt.Errorf("nft %s: %w: %s", rules, err, out)
		}
		return nil
	})
}

func (h *host) addr(v6 bool) netip.Addr {
	if v6 {
		return h.v6
	}
	return h.v4
}

// newHosts makes two hosts joined by a veth pair.
func newHosts(t testing.TB) (client, server *host) {
	t.Helper()
	client = newHost(t, "192.0.2.1", "2001:db8::1")
	server = newHost(t, "192.0.2.2", "2001:db8::2")

	h := client.netlink(t)
	veth := &netlink.Veth{
		LinkAttrs:     netlink.LinkAttrs{Name: "ks0"},
		PeerName:      "ks0",
		PeerNamespace: netlink.NsFd(int(server.ns.Fd())),
	}
	if err := h.LinkAdd(veth); err != nil {
		t.Fatalf("add veth pair: %v", err)
	}
	s := server.netlink(t)
	client.up(t, h)
	server.up(t, s)
	waitLink(t, h)
	waitLink(t, s)
	return client, server
}

func newHost(t testing.TB, v4, v6 string) *host {
	t.Helper()
	type result struct {
		ns  *os.File
		err error
	}
	done := make(chan result, 1)
	go func() {
		runtime.LockOSThread()
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			done <- result{err: fmt.Errorf("make network namespace: %w", err)}
			return
		}
		ns, err := os.Open("/proc/thread-self/ns/net")
		done <- result{ns: ns, err: err}
	}()
	r := <-done
	if r.err != nil {
		t.Fatal(r.err)
	}
	t.Cleanup(func() { _ = r.ns.Close() })
	return &host{ns: r.ns, v4: netip.MustParseAddr(v4), v6: netip.MustParseAddr(v6)}
}

func (h *host) netlink(t testing.TB) *netlink.Handle {
	t.Helper()
	n, err := netlink.NewHandleAt(netns.NsHandle(h.ns.Fd()), unix.NETLINK_ROUTE)
	if err != nil {
		t.Fatalf("open netlink: %v", err)
	}
	t.Cleanup(n.Close)
	return n
}

// up gives the host's end of the veth pair its addresses and sets it up.
func (h *host) up(t testing.TB, n *netlink.Handle) {
	t.Helper()
	link, err := n.LinkByName("ks0")
	if err != nil {
		t.Fatalf("find veth: %v", err)
	}
	for _, a := range []string{h.v4.String() + "/24", h.v6.String() + "/64"} {
		addr, err := netlink.ParseAddr(a)
		if err != nil {
			t.Fatal(err)
		}
		addr.Flags = unix.IFA_F_NODAD // usable at once
		if err := n.AddrAdd(link, addr); err != nil {
			t.Fatalf("add address %s: %v", a, err)
		}
	}
	if err := n.LinkSetUp(link); err != nil {
		t.Fatalf("set veth up: %v", err)
	}
}

// waitLink waits until the kernel lets packets through the new link, which it
// may do up to a second after the carrier came: until then SYNs are lost.
func waitLink(t testing.TB, n *netlink.Handle) {
	t.Helper()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(waitTime); ; <-tick.C {
		link, err := n.LinkByName("ks0")
		if err != nil {
			t.Fatalf("find veth: %v", err)
		}
		if link.Attrs().OperState == netlink.OperUp {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("veth is still %v after %v", link.Attrs().OperState, waitTime)
		}
	}
}

// listen makes a listener inside the host. A nil option makes a plain one.
func (h *host) listen(t testing.TB, o *Option, v6 bool) *net.TCPListener {
	t.Helper()
	var lc net.ListenConfig
	lc.SetMultipathTCP(false)
	if o != nil {
		lc.Control = o.ControlListen
	}
	var l net.Listener
	h.do(t, func() (err error) {
		l, err = lc.Listen(context.Background(), "tcp", netip.AddrPortFrom(h.addr(v6), 0).String())
		return err
	})
	t.Cleanup(func() { _ = l.Close() })
	return l.(*net.TCPListener)
}

// dial connects from inside the host. A nil option makes a plain connection.
func (h *host) dial(t testing.TB, o *Option, to net.Addr) *net.TCPConn {
	t.Helper()
	d := net.Dialer{Timeout: waitTime}
	if o != nil {
		d.Control = o.ControlDial
	}
	var c net.Conn
	h.do(t, func() (err error) {
		c, err = d.Dial("tcp", to.String())
		return err
	})
	t.Cleanup(func() { _ = c.Close() })
	return c.(*net.TCPConn)
}

func accept(t testing.TB, l *net.TCPListener) *net.TCPConn {
	t.Helper()
	if err := l.SetDeadline(time.Now().Add(waitTime)); err != nil {
		t.Fatal(err)
	}
	c, err := l.AcceptTCP()
	if err != nil {
		t.Fatalf("accept: %v", err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// A wire is a packet socket on a host: everything it sends and receives.
type wire struct {
	fd int
}

// tap begins to record.
func (h *host) tap(t testing.TB) *wire {
	t.Helper()
	w := &wire{fd: -1}
	h.do(t, func() (err error) {
		const allProtocols = unix.ETH_P_ALL<<8&0xff00 | unix.ETH_P_ALL>>8
		w.fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, allProtocols)
		return err
	})
	t.Cleanup(func() { _ = unix.Close(w.fd) })
	timeout := unix.NsecToTimeval(int64(100 * time.Millisecond))
	if err := unix.SetsockoptTimeval(w.fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &timeout); err != nil {
		t.Fatal(err)
	}
	return w
}

// A segment is a TCP packet on the wire.
type segment struct {
	syn, ack bool
	options  int // how many SMC-R options
}

// carries reports whether a receiver sees the option.
func (s segment) carries() bool { return s.options > 0 }

// read returns the TCP packets until enough says so.
func (w *wire) read(t testing.TB, enough func([]segment) bool) []segment {
	t.Helper()
	var segs []segment
	buf := make([]byte, 65536)
	for end := time.Now().Add(waitTime); !enough(segs); {
		if time.Now().After(end) {
			t.Fatalf("no end of the capture after %v: %+v", waitTime, segs)
		}
		n, _, err := unix.Recvfrom(w.fd, buf, 0)
		if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			t.Fatalf("read packet socket: %v", err)
		}
		tcp, err := tcpHeader(buf[:n])
		if err != nil || len(tcp) < tcpHeaderBytes {
			continue // IPv6 neighbour discovery, ARP
		}
		end := int(tcp[12]>>4) * 4
		segs = append(segs, segment{
			syn:     tcp[13]&tcpFlagSYN != 0,
			ack:     tcp[13]&0x10 != 0,
			options: countOptions(tcp[tcpHeaderBytes:end]),
		})
	}
	return segs
}

// countOptions returns 0 where HasOption finds nothing.
func countOptions(tcpOptions []byte) int {
	if !HasOption(tcpOptions) {
		return 0
	}
	return bytes.Count(tcpOptions, []byte{optionKind, optionLen, 0xe2, 0xd4, 0xc3, 0xd9})
}

// count returns how many of segs are as f says.
func count(segs []segment, f func(segment) bool) int {
	n := 0
	for _, s := range segs {
		if f(s) {
			n++
		}
	}
	return n
}

func isSYN(s segment) bool    { return s.syn && !s.ack }
func isSYNACK(s segment) bool { return s.syn && s.ack }
func isData(s segment) bool   { return !s.syn }
