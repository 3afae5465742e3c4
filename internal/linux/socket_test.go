// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// inbound is a pod behind a wire that adds the SMC-R option to the SYNs of
// its peer: an application and the agent's transparent listener.
type inbound struct {
	pod, peer  *NetNS
	app, agent *net.TCPListener
	dst        netip.AddrPort
	wire       *optionWire
}

func newInbound(t *testing.T, f ipFamily, change func(*RedirectConfig)) *inbound {
	t.Helper()
	in := &inbound{}
	in.pod, in.peer, in.wire = newWiredPair(t)
	in.app = listen(t, in.pod, nil, f.pod, 0)
	in.dst = in.app.Addr().(*net.TCPAddr).AddrPort()
	in.agent = listen(t, in.pod, Controls(ControlTransparent, marked), f.loopback, testInPort)
	cfg := testConfig(f)
	if change != nil {
		change(&cfg)
	}
	install(t, in.pod, cfg)
	return in
}

func (in *inbound) answer(t *testing.T) {
	t.Helper()
	answer(t, in.app, "app")
	answer(t, in.agent, "agent")
}

func TestRedirect_inboundWholeChain(t *testing.T) {
	for _, f := range families {
		t.Run(f.name, func(t *testing.T) {
			in := newInbound(t, f, nil)
			in.wire.addOption(true)
			client := mustDial(t, in.peer, nil, in.dst)
			carried := mustAccept(t, in.agent)
			if got := carried.LocalAddr().(*net.TCPAddr).AddrPort(); got != in.dst {
				t.Errorf("the agent's connection is to %v, want %v", got, in.dst)
			}
			if got, want := carried.RemoteAddr().String(), client.LocalAddr().String(); got != want {
				t.Errorf("the agent's connection is from %v, want %v", got, want)
			}
			ctx, cancel := context.WithTimeout(t.Context(), waitLimit)
			defer cancel()
			toApp, err := DialFrom(ctx, in.pod, f.peer, testAppMark, in.dst)
			mustDo(t, err)
			defer func() { _ = toApp.Close() }()
			mustDo(t, toApp.SetDeadline(time.Now().Add(waitLimit)))
			app := mustAccept(t, in.app)
			if got := app.RemoteAddr().(*net.TCPAddr).AddrPort().Addr(); got != f.peer {
				t.Errorf("the application sees client %v, want %v", got, f.peer)
			}
			exchange(t, client, carried)
			exchange(t, toApp, app)
			mustDo(t, toApp.CloseWrite())
			if b, err := io.ReadAll(app); err != nil || len(b) > 0 {
				t.Errorf("half close: the application read %q, %v", b, err)
			}
		})
	}
}

func TestRedirect_inboundOnlyWithOption(t *testing.T) {
	for _, f := range families {
		t.Run(f.name, func(t *testing.T) {
			in := newInbound(t, f, nil)
			in.answer(t)
			want(t, served(t, in.peer, nil, in.dst), "app")
			in.wire.addOption(true)
			want(t, served(t, in.peer, nil, in.dst), "agent")
			in.wire.addOption(false)
			want(t, served(t, in.peer, nil, in.dst), "app")
		})
	}
}

// TestRedirect_inboundLinkLocal: the agent could not connect to the application under a client's link-local
// IPv6 address, so the client has the application's own connection. Under one of IPv4 it can.
func TestRedirect_inboundLinkLocal(t *testing.T) {
	for i, c := range []struct{ client, want string }{{"169.254.1.1", "agent"}, {"fe80::99", "app"}} {
		t.Run(families[i].name, func(t *testing.T) {
			in := newInbound(t, families[i], nil)
			in.answer(t)
			in.wire.addOption(true)
			client := netip.MustParseAddr(c.client)
			for ns, a := range map[*NetNS]netip.Addr{in.peer: client, in.pod: client.Next()} {
				mustDo(t, inNetlink(ns, func(h *netlink.Handle) error { return upWith(h, "eth0", netip.PrefixFrom(a, families[i].bits)) })())
			}
			from := func(_, _ string, raw syscall.RawConn) error {
				return errors.Join(
					withFD(raw, func(fd int) error { return unix.BindToDevice(fd, "eth0") }), // the zone
					boundTo(netip.AddrPortFrom(client, 0))("", "", raw))
			}
			want(t, served(t, in.peer, from, in.dst), c.want)
		})
	}
}

func TestRedirect_inboundListenersOnly(t *testing.T) {
	for _, f := range families {
		t.Run(f.name, func(t *testing.T) {
			in := newInbound(t, f, nil)
			in.wire.addOption(true)
			closed := netip.AddrPortFrom(f.pod, in.dst.Port()^1)
			want(t, served(t, in.peer, nil, closed), "refused")
			elsewhere := listenDual(t, in.pod, loopbackOf(f.pod))
			want(t, served(t, in.peer, nil, netip.AddrPortFrom(f.pod, elsewhere)), "refused") // somebody listens there on another address
			answer(t, in.agent, "agent")
			for name, wildcard := range map[string]netip.Addr{
				"wildcard": wildcardOf(f.pod), "dual stack": netip.IPv6Unspecified(),
			} {
				t.Run(name, func(t *testing.T) {
					app := listenDual(t, in.pod, wildcard)
					want(t, served(t, in.peer, nil, netip.AddrPortFrom(f.pod, app)), "agent")
				})
			}
		})
	}
}

// TestAttack_forgedSYN: SYNs with the option that come from nowhere make half a connection each at the
// agent's listener, and nobody connects to the application because of them, not even to see whether it
// listens.
func TestAttack_forgedSYN(t *testing.T) {
	const syns = 20
	for _, f := range families {
		t.Run(f.name, func(t *testing.T) {
			in := newInbound(t, f, nil)
			in.wire.addOption(true)
			in.wire.forged.Store(true)
			startConnects(t, in.peer, syns, func(int) netip.AddrPort { return in.dst })
			half := func() (n int) {
				for _, name := range []string{"tcp", "tcp6"} {
					for line := range strings.Lines(in.proc(t, name)) {
						if fields := strings.Fields(line); len(fields) > 3 && fields[3] == "03" { // SYN_RECV
							n++
						}
					}
				}
				return n
			}
			deadline := time.Now().Add(waitLimit)
			for half() < syns {
				if time.Now().After(deadline) {
					t.Fatalf("%d connections are half open, want %d", half(), syns)
				}
				time.Sleep(10 * time.Millisecond) // polls the kernel's table
			}
			lines := strings.Split(in.proc(t, "snmp"), "\n")
			for i, line := range lines {
				names, values := strings.Fields(line), []string(nil)
				if strings.HasPrefix(line, "Tcp: RtoAlgorithm") {
					values = strings.Fields(lines[i+1])
				}
				for k := range values {
					if (names[k] == "ActiveOpens" || names[k] == "PassiveOpens") && values[k] != "0" {
						t.Errorf("%s is %s, want 0", names[k], values[k])
					}
				}
			}
			for name, l := range map[string]*net.TCPListener{"app": in.app, "agent": in.agent} {
				mustDo(t, l.SetDeadline(time.Unix(1, 0)))
				if c, err := l.Accept(); err == nil {
					t.Errorf("the %s has a connection from %v", name, c.RemoteAddr())
				}
			}
		})
	}
}

// proc reads a file about the network of the pod.
func (in *inbound) proc(t testing.TB, name string) (text string) {
	t.Helper()
	mustDo(t, in.pod.Do(func() error {
		b, err := os.ReadFile("/proc/thread-self/net/" + name)
		text = string(b)
		return err
	}))
	return text
}

func loopbackOf(a netip.Addr) netip.Addr {
	if a.Is4() {
		return netip.MustParseAddr("127.0.0.1")
	}
	return netip.IPv6Loopback()
}

func wildcardOf(a netip.Addr) netip.Addr {
	if a.Is4() {
		return netip.IPv4Unspecified()
	}
	return netip.IPv6Unspecified()
}

// listenDual listens like most servers do: on [::] for both families. It
// returns the port.
func listenDual(t *testing.T, ns *NetNS, wildcard netip.Addr) uint16 {
	t.Helper()
	var ln net.Listener
	mustDo(t, ns.Do(func() (err error) {
		network := "tcp"
		if wildcard.Is4() {
			network = "tcp4"
		}
		ln, err = net.Listen(network, netip.AddrPortFrom(wildcard, 0).String())
		return err
	}))
	t.Cleanup(func() { _ = ln.Close() })
	return ln.Addr().(*net.TCPAddr).AddrPort().Port()
}

// TestRedirect_inboundForwarded: what a pod forwards goes on, also to a port on which a program of the pod listens on the
// wildcard address. What comes to an address that the pod has by a local route only ends there.
func TestRedirect_inboundForwarded(t *testing.T) {
	for i, beyond := range []struct{ net, pod, far, routed string }{
		{"10.99.8.0/24", "10.99.8.2", "10.99.8.1", "10.99.9.7"},
		{"fd99:8::/64", "fd99:8::2", "fd99:8::1", "fd99:9::7"},
	} {
		f := families[i]
		t.Run(f.name, func(t *testing.T) {
			in := newInbound(t, f, nil)
			far := newNS(t)
			new(wireNet).join(t, in.pod, "eth1", far)
			giveSysctl(t, in.pod, []string{"net/ipv4/ip_forward", "net/ipv6/conf/all/forwarding"}[i], "1")
			bits := "/" + strconv.Itoa(f.pod.BitLen())
			for ns, commands := range map[*NetNS]string{
				in.pod:  "address add " + beyond.pod + bits + " dev eth1 nodad\nroute add " + beyond.net + " dev eth1\nroute add local " + beyond.routed + " dev lo\n",
				far:     "address add " + beyond.far + bits + " dev eth1 nodad\nroute add " + beyond.net + " dev eth1\nroute add " + f.all().String() + " via " + beyond.pod + "\n",
				in.peer: "route add " + beyond.net + " via " + f.pod.String() + "\nroute add " + beyond.routed + " via " + f.pod.String() + "\n",
			} {
				inNS(t, ns, commands, "ip", "-batch", "-")
			}
			answer(t, in.agent, "agent")
			port := listenDual(t, in.pod, wildcardOf(f.pod))
			server := netip.AddrPortFrom(netip.MustParseAddr(beyond.far), port)
			answer(t, listen(t, far, nil, server.Addr(), port), "far")
			for _, option := range []bool{false, true} {
				in.wire.addOption(option)
				want(t, served(t, in.peer, nil, server), "far")
			}
			for _, own := range []string{f.pod.String(), beyond.pod, beyond.routed} {
				want(t, served(t, in.peer, nil, netip.AddrPortFrom(netip.MustParseAddr(own), port)), "agent")
			}
		})
	}
}

func TestRedirect_inboundPorts(t *testing.T) {
	f := families[0]
	in := newInbound(t, f, nil)
	in.answer(t)
	in.wire.addOption(true)
	for _, c := range []struct {
		name string
		in   func(p uint16) []PortRange
		want string
	}{
		{"none", func(uint16) []PortRange { return nil }, "app"},
		{"port", func(p uint16) []PortRange { return []PortRange{{p, p}} }, "agent"},
		{"up to the last", func(p uint16) []PortRange { return []PortRange{{p, 65535}} }, "agent"},
		{"below", func(p uint16) []PortRange { return []PortRange{{0, p - 1}} }, "app"},
		{"above", func(p uint16) []PortRange { return []PortRange{{p + 1, 65535}, {p + 3, p + 4}} }, "app"},
		{"around", func(p uint16) []PortRange { return []PortRange{{p - 1, p}, {p + 1, p + 1}} }, "agent"},
	} {
		t.Run(c.name, func(t *testing.T) {
			cfg := testConfig(f)
			cfg.InboundAll, cfg.Inbound = false, c.in(in.dst.Port())
			install(t, in.pod, cfg)
			want(t, served(t, in.peer, nil, in.dst), c.want)
		})
	}
}

// TestRedirect_inboundExcept: the SYNs of some clients go to the application, but
// for those to ports that are diverted always.
func TestRedirect_inboundExcept(t *testing.T) {
	for _, f := range families {
		in := newInbound(t, f, nil)
		in.answer(t)
		in.wire.addOption(true)
		other, port := f.peer.Next(), in.dst.Port()
		for _, c := range []struct {
			name   string
			except []netip.Addr
			always []PortRange
			want   string
		}{
			{"nobody", nil, nil, "agent"},
			{"nobody, with ports", nil, []PortRange{{port, port}}, "agent"},
			{"the client", []netip.Addr{f.peer}, nil, "app"},
			{"another one", []netip.Addr{other}, nil, "agent"},
			{"both", []netip.Addr{other, f.peer}, nil, "app"},
			{"the client, this port stays", []netip.Addr{f.peer}, []PortRange{{port, port}}, "agent"},
			{"the client, other ports stay", []netip.Addr{f.peer}, []PortRange{{1, port - 1}, {port + 1, 65535}}, "app"},
		} {
			t.Run(f.name+"/"+c.name, func(t *testing.T) {
				cfg := testConfig(f)
				cfg.InboundExcept, cfg.InboundAlways = c.except, c.always
				install(t, in.pod, cfg)
				want(t, served(t, in.peer, nil, in.dst), c.want)
			})
		}
	}
}

func TestRedirect_inboundFailsOpen(t *testing.T) {
	for _, f := range families {
		t.Run(f.name+"/no listener", func(t *testing.T) {
			in := newInbound(t, f, nil)
			in.answer(t)
			in.wire.addOption(true)
			want(t, served(t, in.peer, nil, in.dst), "agent")
			mustDo(t, in.agent.Close())
			want(t, served(t, in.peer, nil, in.dst), "app")
		})
		t.Run(f.name+"/hung agent", func(t *testing.T) {
			in := newInbound(t, f, func(c *RedirectConfig) { c.FailOpenTTL = 200 * time.Millisecond })
			in.answer(t)
			in.wire.addOption(true)
			waitFor(t, "failing open", func() bool { return served(t, in.peer, nil, in.dst) == "app" })
		})
	}
}

func TestDialFrom_avoidsTheClientsConnections(t *testing.T) {
	for _, f := range families {
		t.Run(f.name, func(t *testing.T) {
			pod, peer := newPair(t)
			install(t, pod, testConfig(f))
			app := listen(t, pod, nil, f.pod, 0)
			dst := app.Addr().(*net.TCPAddr).AddrPort()
			client := mustDial(t, peer, nil, dst)
			conn := mustAccept(t, app)
			tuple := func(remote netip.AddrPort) bool {
				t.Helper()
				free, err := pod.tupleFree(dst, remote)
				mustDo(t, err)
				return free
			}
			taken := client.LocalAddr().(*net.TCPAddr).AddrPort()
			if tuple(taken) {
				t.Errorf("%v is called free, but it is connected", taken)
			}
			if other := netip.AddrPortFrom(taken.Addr(), taken.Port()^1); !tuple(other) {
				t.Errorf("%v is called taken, but nobody has it", other)
			}
			mustDo(t, client.Close())
			_, err := io.ReadAll(conn)
			mustDo(t, err)
		})
	}
}

// TestDialFrom_linkLocal: a client's link-local address of IPv4 is taken like any other.
func TestDialFrom_linkLocal(t *testing.T) {
	pod, _ := newPair(t)
	install(t, pod, testConfig(families[0]))
	app := listen(t, pod, nil, families[0].pod, 0)
	client := netip.MustParseAddr("169.254.1.1")
	c, err := DialFrom(timeout(t, waitLimit), pod, client, testAppMark, addrOf(app))
	mustDo(t, err)
	defer func() { _ = c.Close() }()
	if got := mustAccept(t, app).RemoteAddr().(*net.TCPAddr).AddrPort().Addr(); got != client {
		t.Errorf("the application sees client %v, want %v", got, client)
	}
}

func TestDialFrom_refuses(t *testing.T) {
	ns := newNS(t)
	install(t, ns, testConfig(families[0]))
	dst := netip.AddrPortFrom(families[0].loopback, 1)
	for _, c := range []struct {
		name   string
		client string
		dst    netip.AddrPort
	}{
		{"mixed families", "fd99::1", dst},
		{"link-local", "fe80::1", netip.AddrPortFrom(families[1].loopback, 1)},
		{"closed port", "127.0.0.1", dst},
	} {
		t.Run(c.name, func(t *testing.T) {
			conn, err := DialFrom(t.Context(), ns, netip.MustParseAddr(c.client), testAppMark, c.dst)
			if err == nil {
				_ = conn.Close()
				t.Fatal("dial succeeded")
			}
			var oe *net.OpError
			if !errors.As(err, &oe) || oe.Op != "dial" {
				t.Errorf("error %v is no dial error", err)
			}
		})
	}
}

// TestDialFrom_reset: a reset that the kernel sends for the pod without a socket gets to the agent, though its destination is the
// client: that of a port where nobody listens, and that for bytes which come long after the application has closed.
func TestDialFrom_reset(t *testing.T) {
	for _, f := range families {
		t.Run(f.name, func(t *testing.T) {
			pod, _ := newPair(t)
			install(t, pod, testConfig(f))
			app := listen(t, pod, nil, f.pod, 0)
			c, err := DialFrom(timeout(t, waitLimit), pod, f.peer, testAppMark, addrOf(app))
			mustDo(t, err)
			defer func() { _ = c.Close() }()
			conn := mustAccept(t, app)
			raw, err := conn.SyscallConn()
			mustDo(t, err)
			mustDo(t, raw.Control(func(fd uintptr) { // the kernel forgets the closed connection soon
				err = unix.SetsockoptInt(int(fd), unix.SOL_TCP, unix.TCP_LINGER2, 1)
			}))
			mustDo(t, errors.Join(err, conn.Close(), app.Close()))
			waitFor(t, "the kernel to forget the application's connection", func() bool {
				free, err := pod.tupleFree(addrOf(app), c.LocalAddr().(*net.TCPAddr).AddrPort())
				mustDo(t, err)
				return free
			})
			mustDo(t, c.SetDeadline(time.Now().Add(waitLimit)))
			if b, err := io.ReadAll(c); len(b) > 0 || err != nil && !errors.Is(err, syscall.ECONNRESET) {
				t.Errorf("after the application closed: %q, %v", b, err)
			}
			for err = nil; err == nil; { // until the reset has come, at the latest behind a full buffer
				_, err = c.Write(make([]byte, 64<<10))
			}
			if !errors.Is(err, syscall.ECONNRESET) && !errors.Is(err, syscall.EPIPE) {
				t.Errorf("bytes that come late: %v, want a reset", err)
			}
			again, err := DialFrom(timeout(t, waitLimit), pod, f.peer, testAppMark, addrOf(app))
			if err == nil {
				_ = again.Close()
			}
			if !errors.Is(err, syscall.ECONNREFUSED) {
				t.Errorf("nobody listens: %v, want ECONNREFUSED", err)
			}
		})
	}
}

func TestDialInNS(t *testing.T) {
	f := families[0]
	pod, peer := newPair(t)
	server := listen(t, peer, nil, f.peer, 0)
	dst := server.Addr().(*net.TCPAddr).AddrPort()
	t.Run("local address", func(t *testing.T) {
		second := netip.MustParseAddr("127.0.0.9")
		own := listen(t, pod, nil, f.loopback, 0)
		c, err := DialInNS(t.Context(), pod, nil, second, own.Addr().(*net.TCPAddr).AddrPort())
		mustDo(t, err)
		defer func() { _ = c.Close() }()
		if got := mustAccept(t, own).RemoteAddr().(*net.TCPAddr).AddrPort().Addr(); got != second {
			t.Errorf("connected from %v, want %v", got, second)
		}
	})
	t.Run("mapped destination", func(t *testing.T) {
		mapped := netip.AddrPortFrom(netip.AddrFrom16(f.peer.As16()), dst.Port())
		mustDial(t, pod, nil, mapped)
		mustAccept(t, server)
	})
	t.Run("refused", func(t *testing.T) {
		pod.stock.close()
		before := openFDs(t)
		for range 10 {
			_, err := DialInNS(t.Context(), pod, nil, netip.Addr{}, netip.AddrPortFrom(f.peer, 1))
			if !errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, ErrUnsent) {
				t.Fatalf("dial: %v, want ECONNREFUSED", err)
			}
		}
		pod.stock.close()
		if after := openFDs(t); after != before {
			t.Errorf("%d files are open, %d before", after, before)
		}
	})
	t.Run("control fails", func(t *testing.T) {
		boom := errors.New("boom")
		control := func(_, _ string, _ syscall.RawConn) error { return boom }
		if _, err := DialInNS(t.Context(), pod, control, netip.Addr{}, dst); !errors.Is(err, boom) || !errors.Is(err, ErrUnsent) {
			t.Fatalf("dial: %v, want boom, %v", err, ErrUnsent)
		}
	})
	t.Run("canceled", func(t *testing.T) {
		// Nobody answers for this address on the wire; without a neighbour
		// the SYN waits for longer than the test.
		silent := netip.AddrPortFrom(f.peer.Next().Next().Next(), 1)
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
		defer cancel()
		if _, err := DialInNS(ctx, pod, nil, netip.Addr{}, silent); !errors.Is(err, context.DeadlineExceeded) {
			t.Fatalf("dial: %v, want the context's error", err)
		}
	})
	t.Run("foreign local address", func(t *testing.T) {
		_, err := DialInNS(t.Context(), pod, nil, netip.MustParseAddr("192.0.2.1"), dst)
		if !errors.Is(err, syscall.EADDRNOTAVAIL) || !errors.Is(err, ErrUnsent) {
			t.Fatalf("dial: %v, want EADDRNOTAVAIL, %v", err, ErrUnsent)
		}
	})
	t.Run("no route", func(t *testing.T) {
		_, err := DialInNS(t.Context(), pod, nil, netip.Addr{}, netip.MustParseAddrPort("192.0.2.1:80"))
		if !errors.Is(err, syscall.ENETUNREACH) || !errors.Is(err, ErrUnsent) {
			t.Fatalf("dial: %v, want ENETUNREACH, %v", err, ErrUnsent)
		}
	})
}

func TestListenInNS_portTaken(t *testing.T) {
	ns := newNS(t)
	ln := listen(t, ns, nil, families[0].loopback, 0)
	_, err := ListenInNS(t.Context(), ns, nil, ln.Addr().(*net.TCPAddr).AddrPort())
	if !errors.Is(err, syscall.EADDRINUSE) {
		t.Fatalf("listen: %v, want EADDRINUSE", err)
	}
}

// TestSection4_5_3_Keepalive: the agents' connections, which stay idle under
// SMC-R, keep the state of proxies and firewalls on their way (RFC 7609
// §4.5.3), on either side.
func TestSection4_5_3_Keepalive(t *testing.T) {
	pod, peer := newPair(t)
	f := families[0]
	ln := listen(t, pod, ControlTransparent, f.pod, 0)
	dst := ln.Addr().(*net.TCPAddr).AddrPort()
	dialed := mustDial(t, peer, nil, dst)
	accepted := mustAccept(t, ln)
	for name, c := range map[string]*net.TCPConn{"dialed": dialed, "accepted": accepted} {
		raw, err := c.SyscallConn()
		mustDo(t, err)
		mustDo(t, withFD(raw, func(fd int) error {
			on, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_KEEPALIVE)
			mustDo(t, err)
			idle, err := unix.GetsockoptInt(fd, unix.SOL_TCP, unix.TCP_KEEPIDLE)
			if on != 1 || idle != 15 {
				t.Errorf("%s: keepalive %d after %d s, want 1 after 15 s", name, on, idle)
			}
			return err
		}))
	}
}

// TestControlDelayACK: a server accepts nothing of a connection that is reset as soon as it stands,
// and gets the data of one that goes on.
func TestControlDelayACK(t *testing.T) {
	pod, peer := newPair(t)
	for _, f := range families {
		t.Run(f.name, func(t *testing.T) {
			server := listen(t, peer, nil, f.peer, 0)
			late := make(map[string]bool) // those whose ACK the kernel has perhaps sent: after 40 ms it does
			for range 20 {
				began := time.Now()
				c, err := dialNS(t, pod, ControlDelayACK, addrOf(server))
				mustDo(t, err)
				from := c.LocalAddr().String()
				mustDo(t, errors.Join(c.SetLinger(0), c.Close()))
				late[from] = time.Since(began) > 30*time.Millisecond
			}
			app, err := dialNS(t, pod, ControlDelayACK, addrOf(server))
			mustDo(t, err)
			_, err = app.Write([]byte("first"))
			mustDo(t, err)
			c := mustAccept(t, server)
			for late[c.RemoteAddr().String()] {
				c = mustAccept(t, server)
			}
			if got, want := c.RemoteAddr().String(), app.LocalAddr().String(); got != want {
				t.Errorf("accepted the connection from %v, want that from %v", got, want)
			}
			buf := make([]byte, 16)
			if n, err := c.Read(buf); string(buf[:n]) != "first" {
				t.Errorf("read %q, %v", buf[:n], err)
			}
			exchange(t, app, c)
		})
	}
}
