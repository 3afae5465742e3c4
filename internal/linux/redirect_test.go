// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/google/nftables"
	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/internal/undo"
)

// outbound sets up a pod with redirection: a server of the peer and the
// agent's listener both answer with their name.
func outbound(t *testing.T, f ipFamily, change func(*RedirectConfig)) (pod *NetNS, r *Redirect, dst netip.AddrPort) {
	t.Helper()
	pod, peer := newPair(t)
	server := listen(t, peer, nil, f.peer, 0)
	answer(t, server, "server")
	answer(t, listen(t, pod, marked, f.loopback, testOutPort), "agent")
	cfg := testConfig(f)
	if change != nil {
		change(&cfg)
	}
	return pod, install(t, pod, cfg), server.Addr().(*net.TCPAddr).AddrPort()
}

func want(t *testing.T, got, want string) {
	t.Helper()
	if got != want {
		t.Fatalf("the connection reached %q, want %q", got, want)
	}
}

func TestRedirect_outboundOriginalDestination(t *testing.T) {
	for _, f := range families {
		t.Run(f.name, func(t *testing.T) {
			pod, _ := newPair(t)
			agent := listen(t, pod, marked, f.loopback, testOutPort)
			install(t, pod, testConfig(f))
			dst := netip.AddrPortFrom(f.peer, 4711) // nothing listens there
			app := mustDial(t, pod, nil, dst)
			c := mustAccept(t, agent)
			got, err := OriginalDst(c)
			if err != nil || got != dst {
				t.Fatalf("original destination %v, %v, want %v", got, err, dst)
			}
			if got := app.RemoteAddr().(*net.TCPAddr).AddrPort(); got != dst {
				t.Errorf("the application sees %v as its peer, want %v", got, dst)
			}
			if got := app.LocalAddr().(*net.TCPAddr).AddrPort().Addr(); got != f.pod {
				t.Errorf("the application's own address is %v, want %v", got, f.pod)
			}
			exchange(t, app, c)
		})
	}
}

// TestOriginalDst_direct: a listener knows who was not brought to it by the
// redirection, also when nobody refuses it before.
func TestOriginalDst_direct(t *testing.T) {
	for _, f := range families {
		t.Run(f.name, func(t *testing.T) {
			pod, _ := newPair(t)
			agent := listen(t, pod, marked, f.loopback, testOutPort)
			openDoors(t, install(t, pod, testConfig(f)))
			mustDial(t, pod, nil, netip.AddrPortFrom(f.loopback, testOutPort))
			if dst, err := OriginalDst(mustAccept(t, agent)); !errors.Is(err, ErrNotRedirected) {
				t.Fatalf("original destination %v, %v, want ErrNotRedirected", dst, err)
			}
		})
	}
}

// TestRedirect_halfClosedAndStalled: a connection that its application has half-closed survives that the application reads nothing for
// longer than connection tracking remembers such connections.
func TestRedirect_halfClosedAndStalled(t *testing.T) {
	f := families[0]
	pod, _ := newPair(t)
	giveSysctl(t, pod, "net/netfilter/nf_conntrack_tcp_timeout_close_wait", "1")
	agent := listen(t, pod, marked, f.loopback, testOutPort)
	install(t, pod, testConfig(f))
	app := mustDial(t, pod, nil, netip.AddrPortFrom(f.peer, 9))
	conn := mustAccept(t, agent)
	mustDo(t, app.CloseWrite())
	if _, err := io.ReadAll(conn); err != nil {
		t.Fatal(err)
	}
	sent := 0
	mustDo(t, conn.SetWriteDeadline(time.Now().Add(5*time.Second))) // until the probes of the closed window are more than a second apart
	for {
		n, err := conn.Write(make([]byte, 1<<20))
		if sent += n; err != nil {
			break
		}
	}
	mustDo(t, conn.CloseWrite())
	mustDo(t, app.SetDeadline(time.Now().Add(waitLimit)))
	if n, err := io.Copy(io.Discard, app); int(n) != sent || err != nil {
		t.Errorf("got %d of %d bytes, %v", n, sent, err)
	}
}

func TestTransparentDst(t *testing.T) {
	for _, f := range families {
		t.Run(f.name, func(t *testing.T) {
			pod, _ := newPair(t)
			want(t, served(t, pod, nil, netip.AddrPortFrom(f.peer, 9)), "refused") // the addresses are in use
			for _, c := range []struct {
				name string
				at   netip.Addr
				port uint16 // of the listener for diverted connections
				want error
			}{
				{"loopback", f.loopback, testOutPort, ErrNotRedirected},
				{"its own port", f.pod, testInPort, ErrNotRedirected},
				{"diverted", f.pod, testOutPort, nil},
			} {
				ln := listen(t, pod, nil, c.at, testInPort)
				mustDial(t, pod, nil, addrOf(ln))
				dst, err := TransparentDst(mustAccept(t, ln), c.port)
				if !errors.Is(err, c.want) || err == nil && dst != addrOf(ln) {
					t.Errorf("%s: %v, %v, want %v", c.name, dst, err, c.want)
				}
				mustDo(t, ln.Close())
			}
		})
	}
}

func addrOf(ln *net.TCPListener) netip.AddrPort { return ln.Addr().(*net.TCPAddr).AddrPort() }

// openDoors takes away the rules that refuse what was not diverted.
func openDoors(t *testing.T, r *Redirect) {
	t.Helper()
	r.conn.FlushChain(&nftables.Chain{Table: kubeTable(), Name: chainDoors})
	mustDo(t, r.conn.Flush())
}

// TestRedirect_doors: who connects to a listener of the agent is refused, and who
// is brought there is not; a program on the same port of another address has its
// connections.
func TestRedirect_doors(t *testing.T) {
	for _, f := range families {
		t.Run(f.name, func(t *testing.T) {
			pod, _, dst := outbound(t, f, nil)
			answer(t, listen(t, pod, Controls(ControlTransparent, marked), f.loopback, testInPort), "agent")
			for _, port := range []uint16{testOutPort, testInPort} {
				answer(t, listen(t, pod, nil, f.pod, port), "program")
				want(t, served(t, pod, nil, netip.AddrPortFrom(f.loopback, port)), "refused")
				want(t, served(t, pod, boundTo(netip.AddrPortFrom(f.pod, 0)), netip.AddrPortFrom(f.loopback, port)), "refused")
				want(t, served(t, pod, nil, netip.AddrPortFrom(f.pod, port)), "program")
			}
			want(t, served(t, pod, nil, dst), "agent")
		})
	}
}

func TestRedirect_leavesAlone(t *testing.T) {
	for _, f := range families {
		t.Run(f.name, func(t *testing.T) {
			pod, _, dst := outbound(t, f, nil)
			want(t, served(t, pod, nil, dst), "agent")
			t.Run("the agent's sockets", func(t *testing.T) {
				want(t, served(t, pod, marked, dst), "server")
			})
			t.Run("the agent's sockets towards the application", func(t *testing.T) {
				own := listen(t, pod, nil, f.pod, 0)
				answer(t, own, "own")
				want(t, served(t, pod, ControlMark(testAppMark), own.Addr().(*net.TCPAddr).AddrPort()), "own")
			})
			t.Run("loopback", func(t *testing.T) {
				own := listen(t, pod, nil, f.pod, 0)
				answer(t, own, "own")
				want(t, served(t, pod, nil, own.Addr().(*net.TCPAddr).AddrPort()), "own")
			})
		})
	}
}

func TestRedirect_selects(t *testing.T) {
	for _, f := range families {
		port := func(p uint16) []PortRange { return []PortRange{{p, p}} }
		exact := netip.PrefixFrom(f.peer, f.peer.BitLen())
		for _, c := range []struct {
			name  string
			rules func(port uint16) []OutboundRule
			want  string
		}{
			{"nothing", func(uint16) []OutboundRule { return nil }, "server"},
			{"prefix", func(uint16) []OutboundRule { return []OutboundRule{{Prefix: f.all()}} }, "agent"},
			{"host", func(uint16) []OutboundRule { return []OutboundRule{{Prefix: exact}} }, "agent"},
			{"everything", func(uint16) []OutboundRule {
				return []OutboundRule{{Prefix: netip.PrefixFrom(f.pod, 0)}}
			}, "agent"},
			{"port", func(p uint16) []OutboundRule { return []OutboundRule{{Prefix: f.all(), Ports: port(p)}} }, "agent"},
			{"another port", func(p uint16) []OutboundRule {
				return []OutboundRule{{Prefix: f.all(), Ports: port(p + 1)}}
			}, "server"},
			{"another host", func(uint16) []OutboundRule {
				return []OutboundRule{{Prefix: netip.PrefixFrom(f.peer.Next().Next(), f.peer.BitLen())}}
			}, "server"},
			{"excluded host", func(uint16) []OutboundRule {
				return []OutboundRule{{Prefix: exact, Exclude: true}, {Prefix: f.all()}}
			}, "server"},
			{"excluded port", func(p uint16) []OutboundRule {
				return []OutboundRule{{Prefix: f.all()}, {Prefix: f.all(), Ports: port(p), Exclude: true}}
			}, "server"},
			{"another port excluded", func(p uint16) []OutboundRule {
				return []OutboundRule{{Prefix: f.all()}, {Prefix: f.all(), Ports: port(p + 1), Exclude: true}}
			}, "agent"},
			{"overlapping", func(p uint16) []OutboundRule {
				return []OutboundRule{
					{Prefix: f.all(), Ports: []PortRange{{1, 65535}}}, {Prefix: exact, Ports: []PortRange{{p, 65535}}},
				}
			}, "agent"},
		} {
			t.Run(f.name+"/"+c.name, func(t *testing.T) {
				pod, r, dst := outbound(t, f, nil)
				cfg := testConfig(f)
				cfg.Outbound = c.rules(dst.Port())
				mustDo(t, r.Update(cfg))
				want(t, served(t, pod, nil, dst), c.want)
			})
		}
	}
}

func TestRedirect_bypass(t *testing.T) {
	for _, f := range families {
		t.Run(f.name, func(t *testing.T) {
			pod, r, dst := outbound(t, f, nil)
			mustDo(t, r.Bypass(dst, time.Minute))
			want(t, served(t, pod, nil, dst), "server")
			mustDo(t, r.Update(testConfig(f)))
			want(t, served(t, pod, nil, dst), "server") // the cache outlives an update
			// Again, and shorter: the new time counts.
			mustDo(t, r.Bypass(dst, 50*time.Millisecond))
			waitFor(t, "the end of the bypass", func() bool { return served(t, pod, nil, dst) == "agent" })
			mustDo(t, r.Bypass(dst, time.Minute)) // the element has expired, and may still be there
			want(t, served(t, pod, nil, dst), "server")
			mustDo(t, r.Forget())
			want(t, served(t, pod, nil, dst), "agent")
			mustDo(t, r.Update(testConfig(f)))
			want(t, served(t, pod, nil, dst), "agent")
		})
	}
}

// TestRedirect_bypassFull: a full cache forgets what ends first, in the kernel,
// too.
func TestRedirect_bypassFull(t *testing.T) {
	f := families[0]
	pod, r, dst := outbound(t, f, nil)
	mustDo(t, r.Bypass(dst, time.Minute))
	for i := range maxBypass - 1 {
		mustDo(t, r.Bypass(netip.AddrPortFrom(f.peer, uint16(i)), time.Hour))
	}
	want(t, served(t, pod, nil, dst), "server")
	for i := range 10 {
		mustDo(t, r.Bypass(netip.AddrPortFrom(f.peer.Next(), uint16(i+1)), time.Hour))
	}
	want(t, served(t, pod, nil, dst), "agent")
	if n := len(r.bypass); n != maxBypass {
		t.Errorf("%d entries, want %d", n, maxBypass)
	}
	mustDo(t, r.Bypass(dst, time.Hour))
	want(t, served(t, pod, nil, dst), "server")
	mustDo(t, r.Update(testConfig(f)))
	want(t, served(t, pod, nil, dst), "server")
}

func TestRedirect_failsOpen(t *testing.T) {
	for _, f := range families {
		t.Run(f.name, func(t *testing.T) {
			const ttl = 500 * time.Millisecond
			pod, r, dst := outbound(t, f, func(c *RedirectConfig) { c.FailOpenTTL = ttl })
			stop := time.Now().Add(3 * ttl)
			for time.Now().Before(stop) { // renewed: diverted beyond the ttl
				renewed := time.Now()
				mustDo(t, r.Renew())
				got := served(t, pod, nil, dst)
				if d := time.Since(renewed); got != "agent" && d < ttl/2 { // else this test was held up
					t.Fatalf("%v after a renewal the connection reached %q", d, got)
				}
			}
			mustDo(t, r.Renew())
			last := time.Now()
			waitFor(t, "failing open", func() bool { return served(t, pod, nil, dst) == "server" })
			if d := time.Since(last); d < ttl/2 || d > ttl+2*time.Second {
				t.Errorf("failed open after %v, want about %v", d, ttl)
			}
			mustDo(t, r.Renew()) // the agent is back
			want(t, served(t, pod, nil, dst), "agent")
		})
	}
}

func TestRedirect_updateKeepsConnections(t *testing.T) {
	for _, f := range families {
		t.Run(f.name, func(t *testing.T) {
			pod, peer := newPair(t)
			agent := listen(t, pod, marked, f.loopback, testOutPort)
			server := listen(t, peer, nil, f.peer, 0)
			r := install(t, pod, testConfig(f))
			dst := server.Addr().(*net.TCPAddr).AddrPort()
			app := mustDial(t, pod, nil, dst)
			carried := mustAccept(t, agent)
			wire := mustDial(t, pod, marked, dst)
			remote := mustAccept(t, server)
			for range 60 {
				mustDo(t, r.Update(testConfig(f)))
				exchange(t, app, carried)
				exchange(t, wire, remote)
			}
			mustDo(t, r.Remove())
			exchange(t, app, carried)
			exchange(t, wire, remote)
		})
	}
}

// TestEndDiversion: what an agent diverts is over, and connections that it diverted go on. Where there is no agent's
// table, nothing changes.
func TestEndDiversion(t *testing.T) {
	for _, f := range families {
		t.Run(f.name, func(t *testing.T) {
			pod, peer := newPair(t)
			mustDo(t, EndDiversion(pod))
			wantClean(t, pod)
			agent := listen(t, pod, marked, f.loopback, testOutPort)
			server := listen(t, peer, nil, f.peer, 0)
			r := install(t, pod, testConfig(f))
			dst := server.Addr().(*net.TCPAddr).AddrPort()
			app := mustDial(t, pod, nil, dst)
			carried := mustAccept(t, agent)
			mustDo(t, r.Release(time.Minute))
			mustDo(t, EndDiversion(pod))
			exchange(t, app, carried)
			exchange(t, mustDial(t, pod, nil, dst), mustAccept(t, server))
			mustDo(t, EndDiversion(pod)) // once more
			exchange(t, carried, app)
		})
	}
}

// TestRedirect_keepsOlderConnections: connections that the pod has when the table comes go on, whoever opened them: their
// next packet is the first one that connection tracking sees.
func TestRedirect_keepsOlderConnections(t *testing.T) {
	for _, f := range families {
		t.Run(f.name, func(t *testing.T) {
			pod, peer := newPair(t)
			answer(t, listen(t, pod, marked, f.loopback, testOutPort), "agent")
			server := listen(t, peer, nil, f.peer, 0)
			dst := server.Addr().(*net.TCPAddr).AddrPort()
			app, remote := mustDial(t, pod, nil, dst), mustAccept(t, server)
			own := listen(t, pod, nil, f.pod, 0)
			client, accepted := mustDial(t, peer, nil, own.Addr().(*net.TCPAddr).AddrPort()), mustAccept(t, own)
			install(t, pod, testConfig(f))
			exchange(t, app, remote)
			exchange(t, accepted, client)
		})
	}
}

func TestRedirect_repairsTable(t *testing.T) {
	f := families[0]
	pod, r, dst := outbound(t, f, nil)
	mustDo(t, dropTable(r.conn))
	if err := r.Renew(); !errors.Is(err, ErrNoTable) {
		t.Errorf("renew: %v, want ErrNoTable", err)
	}
	if err := r.Bypass(dst, time.Second); !errors.Is(err, ErrNoTable) {
		t.Errorf("bypass: %v, want ErrNoTable", err)
	}
	want(t, served(t, pod, nil, dst), "server")
	mustDo(t, r.Update(testConfig(f)))
	want(t, served(t, pod, nil, dst), "agent")
	mustDo(t, r.Renew())
}

func TestRedirect_largePolicy(t *testing.T) {
	f := families[0]
	pod, r, dst := outbound(t, f, nil)
	cfg := testConfig(f)
	for i := range maxOutboundRules - 1 {
		cfg.Outbound = append(cfg.Outbound, OutboundRule{
			Prefix: netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 3, byte(i), 0}), 24),
		})
	}
	cfg.InboundAll = false
	for i := range maxInboundRanges {
		cfg.Inbound = append(cfg.Inbound, PortRange{uint16(2 * i), uint16(2 * i)})
	}
	mustDo(t, r.Update(cfg))
	want(t, served(t, pod, nil, dst), "agent")
}

func TestRedirect_removeAndSweep(t *testing.T) {
	f := families[0]
	pod, r, dst := outbound(t, f, nil)
	want(t, served(t, pod, nil, dst), "agent")
	mustDo(t, r.Remove())
	want(t, served(t, pod, nil, dst), "server")
	mustDo(t, r.Remove())
	for name, err := range map[string]error{
		"Renew": r.Renew(), "Update": r.Update(testConfig(f)), "Bypass": r.Bypass(dst, time.Second),
	} {
		if !errors.Is(err, ErrClosed) {
			t.Errorf("%s: %v, want ErrClosed", name, err)
		}
	}
	mustDo(t, Sweep(pod))
	wantClean(t, pod)
	mustDo(t, Sweep(pod)) // nothing there
	// A dead agent's table, half of it from another version.
	r = install(t, pod, testConfig(f))
	mustDo(t, r.Close())
	install(t, pod, testConfig(f))
	want(t, served(t, pod, nil, dst), "agent")
}

// TestRedirect_portAgain: a connection of the agent's goes to its destination
// also from a port from which a connection to there was diverted just before,
// however the agent ended that.
func TestRedirect_portAgain(t *testing.T) {
	for _, f := range families {
		for _, end := range []struct {
			name   string
			linger int
			want   error
		}{{"reset", 0, unix.ECONNRESET}, {"in order", -1, io.EOF}} {
			t.Run(f.name+"/"+end.name, func(t *testing.T) {
				pod, peer := newPair(t)
				server := listen(t, peer, nil, f.peer, 0)
				answer(t, server, "server")
				agent := listen(t, pod, marked, f.loopback, testOutPort)
				install(t, pod, testConfig(f))
				dst := server.Addr().(*net.TCPAddr).AddrPort()
				app := mustDial(t, pod, nil, dst)
				from := app.LocalAddr().(*net.TCPAddr).AddrPort()
				c := mustAccept(t, agent)
				mustDo(t, c.SetLinger(end.linger))
				mustDo(t, c.Close())
				if _, err := app.Read(make([]byte, 1)); !errors.Is(err, end.want) {
					t.Fatalf("the application reads %v, want %v", err, end.want)
				}
				mustDo(t, app.Close())
				answer(t, agent, "agent")
				want(t, served(t, pod, Controls(marked, boundTo(from)), dst), "server")
			})
		}
	}
}

// boundTo binds a socket to an address and a port.
func boundTo(a netip.AddrPort) Control {
	return func(_, _ string, c syscall.RawConn) error {
		return withFD(c, func(fd int) error { return unix.Bind(fd, sockaddr(a)) })
	}
}

// TestRedirect_ipv4Only: without a listener for IPv6, connections of IPv6 to where the agent carries them are refused, and the
// others, and those of IPv4, are as ever. An update ends that when the listener is there.
func TestRedirect_ipv4Only(t *testing.T) {
	for _, f := range families {
		t.Run(f.name, func(t *testing.T) {
			var cfg RedirectConfig
			pod, r, dst := outbound(t, f, func(c *RedirectConfig) {
				c.IPv4Only = true
				c.Outbound[0].Ports = []PortRange{{First: 1, Last: 1}}
				cfg = *c
			})
			want(t, served(t, pod, nil, dst), "server")
			cfg.Outbound = []OutboundRule{{Prefix: f.all()}}
			mustDo(t, r.Update(cfg))
			want(t, served(t, pod, nil, dst), map[bool]string{true: "agent", false: "refused"}[f.pod.Is4()])
			cfg.IPv4Only = false
			mustDo(t, r.Update(cfg))
			want(t, served(t, pod, nil, dst), "agent")
		})
	}
}

// TestRedirect_silentDoors: where the kernel cannot refuse connections, those to the
// agent's listeners are dropped, and diverted ones work.
func TestRedirect_silentDoors(t *testing.T) {
	f := families[0]
	pod, peer := newPair(t)
	server := listen(t, peer, nil, f.peer, 0)
	answer(t, server, "server")
	answer(t, listen(t, pod, marked, f.loopback, testOutPort), "agent")
	r := &Redirect{ns: pod, cfg: testConfig(f), bypass: map[netip.AddrPort]time.Time{}, silent: true}
	var u undo.Stack
	mustDo(t, u.Run(r.installSteps()...))
	t.Cleanup(func() { mustDo(t, u.Back()) })
	for range 2 {
		want(t, served(t, pod, nil, server.Addr().(*net.TCPAddr).AddrPort()), "agent")
		for _, port := range []uint16{testOutPort, testInPort} {
			c, err := DialInNS(timeout(t, 100*time.Millisecond), pod, nil, netip.Addr{}, netip.AddrPortFrom(f.loopback, port))
			if err == nil {
				_ = c.Close()
			}
			if !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("dial port %d: %v, want no answer", port, err)
			}
		}
		mustDo(t, r.Update(r.cfg))
	}
}

// TestRedirect_withoutLacking: the table is made without what the kernel lacks and the table can do without, and
// only then.
func TestRedirect_withoutLacking(t *testing.T) {
	boom := errors.New("boom")
	for _, c := range []struct {
		name             string
		fails            error // the table with all
		refusals, routes error // the probes
		again            error // the table without
		silent, noRoutes bool
		want             error
		tries            int
	}{
		{"there", nil, boom, boom, boom, false, false, nil, 1},
		{"lacking refusals", boom, boom, nil, nil, true, false, nil, 2},
		{"lacking routes", boom, nil, boom, nil, false, true, nil, 2},
		{"lacking both", boom, boom, boom, nil, true, true, nil, 2},
		{"short of memory, and of files", boom, unix.ENOMEM, os.NewSyscallError("socket", unix.EMFILE), nil, false, false, boom, 1},
		{"lacking refusals, as far as can be told", boom, boom, os.ErrDeadlineExceeded, nil, false, false, boom, 1},
		{"something else too", boom, boom, nil, os.ErrInvalid, true, false, os.ErrInvalid, 2},
		{"something else", boom, nil, nil, nil, false, false, boom, 1},
		{"configuration", &ConfigError{}, boom, boom, nil, false, false, &ConfigError{}, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			var r Redirect
			tries := 0
			lacks := r.dispensable()
			for i, err := range []error{c.refusals, c.routes} {
				lacks[i].probe = func() error { return err }
			}
			err := r.withoutLacking(func() error {
				if tries++; tries == 1 {
					return c.fails
				}
				return c.again
			}, lacks)
			if fmt.Sprint(err) != fmt.Sprint(c.want) || r.silent != c.silent || r.noRoutes != c.noRoutes || tries != c.tries {
				t.Errorf("%v after %d tries, silent %t, without routes %t", err, tries, r.silent, r.noRoutes)
			}
		})
	}
	newNS(t) // has the needs of the probes
	mustDo(t, errors.Join(ProbeReject(), ProbeWireRoutes()))
}
