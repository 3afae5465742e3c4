// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/internal/testenv"
)

// wireNet is a node with a pod, and a namespace on its fabric that is another
// node, a configured peer and a stranger, by their addresses.
type wireNet struct {
	node, pod, outside *NetNS
}

// wireFamily are the addresses of a wireNet of one IP version.
type wireFamily struct {
	name                                       string
	bits                                       int
	node, other, stranger, podGateway, podAddr netip.Addr
	peer                                       netip.Addr   // behind the other node
	far                                        netip.Addr   // a node that is reached by an interface of no device
	peers, pods                                netip.Prefix // of peer, of podAddr
	plain                                      netip.Addr   // the node's, not a device's
	service                                    netip.Addr
}

func wireFamilies() []wireFamily {
	a, p := netip.MustParseAddr, netip.MustParsePrefix
	return []wireFamily{
		{
			"IPv4", 24, a("10.41.0.1"), a("10.41.0.2"), a("10.41.0.66"), a("10.42.0.1"), a("10.42.0.2"), a("10.43.0.9"),
			a("10.45.0.2"), p("10.43.0.0/24"), p("10.42.0.0/24"), a("10.45.0.1"), a("10.96.0.1"),
		},
		{
			"IPv6", 64, a("fd41::1"), a("fd41::2"), a("fd41::66"), a("fd42::1"), a("fd42::2"), a("fd43::9"),
			a("fd45::2"), p("fd43::/64"), p("fd42::/64"), a("fd45::1"), a("fd96::1"),
		},
	}
}

func newWireNet(t testing.TB) *wireNet {
	t.Helper()
	testenv.Need(t, testenv.Program("nft"))
	w := &wireNet{node: newNS(t), pod: newNS(t), outside: newNS(t)}
	// Nothing but the filter is to stop what is spoofed.
	for _, name := range []string{
		"net/ipv4/ip_forward", "net/ipv6/conf/all/forwarding", "net/ipv4/conf/all/accept_local", "net/ipv4/conf/default/accept_local",
	} {
		giveSysctl(t, w.node, name, "1")
	}
	for _, ns := range []*NetNS{w.node, w.pod, w.outside} {
		giveSysctl(t, ns, "net/ipv4/conf/all/rp_filter", "0")
		giveSysctl(t, ns, "net/ipv4/conf/default/rp_filter", "0")
	}
	w.join(t, w.node, "fabric0", w.outside)
	w.join(t, w.node, "other0", w.outside)
	w.join(t, w.node, "pod0", w.pod)
	for _, f := range wireFamilies() {
		full := f.node.BitLen()
		w.address(t, w.node, "fabric0", f.node, f.bits)
		w.address(t, w.outside, "fabric0", f.other, f.bits)
		w.address(t, w.outside, "fabric0", f.stranger, f.bits)
		w.address(t, w.outside, "lo", f.peer, full)
		w.address(t, w.node, "other0", f.plain, f.bits)
		w.address(t, w.outside, "other0", f.far, f.bits)
		w.address(t, w.node, "pod0", f.podGateway, f.bits)
		w.address(t, w.pod, "pod0", f.podAddr, f.bits)
		w.route(t, w.pod, netip.PrefixFrom(f.node, 0).Masked(), f.podGateway)
		w.route(t, w.node, f.peers, f.other)
		w.route(t, w.outside, f.pods, f.node)
	}
	return w
}

func (w *wireNet) join(t testing.TB, a *NetNS, name string, b *NetNS) {
	t.Helper()
	mustDo(t, inNetlink(a, func(h *netlink.Handle) error {
		la := netlink.NewLinkAttrs()
		la.Name = name
		return h.LinkAdd(&netlink.Veth{LinkAttrs: la, PeerName: name, PeerNamespace: netlink.NsFd(b.fd)})
	})())
	for _, ns := range []*NetNS{a, b} {
		mustDo(t, inNetlink(ns, func(h *netlink.Handle) error {
			l, err := h.LinkByName(name)
			if err != nil {
				return err
			}
			return h.LinkSetUp(l)
		})())
	}
}

func (w *wireNet) address(t testing.TB, ns *NetNS, ifname string, a netip.Addr, bits int) {
	t.Helper()
	mustDo(t, inNetlink(ns, func(h *netlink.Handle) error {
		l, err := h.LinkByName(ifname)
		if err != nil {
			return err
		}
		na, err := netlink.ParseAddr(netip.PrefixFrom(a, bits).String())
		if err != nil {
			return err
		}
		na.Flags = unix.IFA_F_NODAD
		return h.AddrAdd(l, na)
	})())
	if a.Is4() || a.IsLinkLocalUnicast() {
		return
	}
	awaitOwnRoute(t, ns, a)
}

func (w *wireNet) route(t testing.TB, ns *NetNS, to netip.Prefix, gateway netip.Addr) {
	t.Helper()
	mustDo(t, inNetlink(ns, func(h *netlink.Handle) error {
		return h.RouteReplace(&netlink.Route{
			Dst: &net.IPNet{IP: to.Addr().AsSlice(), Mask: net.CIDRMask(to.Bits(), to.Addr().BitLen())}, Gw: gateway.AsSlice(),
		})
	})())
}

func (w *wireNet) config() WireConfig {
	cfg := WireConfig{Interfaces: []string{"fabric0"}}
	for _, f := range wireFamilies() {
		cfg.Own = append(cfg.Own, f.node)
		cfg.Nodes = append(cfg.Nodes, f.other, f.far)
		cfg.Peers = append(cfg.Peers, f.peers)
	}
	return cfg
}

func (w *wireNet) filter(t testing.TB, cfg WireConfig) *WireFilter {
	t.Helper()
	f, err := InstallWireFilter(w.node, cfg)
	mustDo(t, err)
	t.Cleanup(func() { mustDo(t, f.Close()) })
	if err := f.Lacks(); err != nil {
		t.Fatal(err)
	}
	return f
}

// nft runs commands of nft in a namespace.
func nft(t testing.TB, ns *NetNS, commands string) string {
	t.Helper()
	var out []byte
	mustDo(t, ns.Do(func() (err error) {
		cmd := exec.Command("nft", "-f", "-")
		cmd.Stdin = strings.NewReader(commands)
		if out, err = cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("nft %s: %w: %s", commands, err, out)
		}
		return nil
	}))
	return string(out)
}

// receiver is a socket that counts what arrives.
type receiver struct {
	c *net.UDPConn
}

func (w *wireNet) receive(t testing.TB, ns *NetNS, at netip.AddrPort) receiver {
	t.Helper()
	var c *net.UDPConn
	mustDo(t, ns.Do(func() (err error) {
		c, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(at))
		return err
	}))
	t.Cleanup(func() { _ = c.Close() })
	return receiver{c}
}

// got reads what has arrived, and counts the packets of a size.
func (r receiver) got(t testing.TB, size int) (n int) {
	t.Helper()
	b := make([]byte, 1<<16)
	for {
		mustDo(t, r.c.SetReadDeadline(time.Now().Add(time.Millisecond)))
		k, err := r.c.Read(b)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return n
		}
		mustDo(t, err)
		if k == size {
			n++
		}
	}
}

// send sends a datagram from any address, as who may make raw packets can.
func (w *wireNet) send(t testing.TB, ns *NetNS, from netip.Addr, to netip.AddrPort, size int) {
	t.Helper()
	mustDo(t, ns.Do(func() error {
		c, err := (&net.ListenConfig{Control: ControlTransparent}).ListenPacket(t.Context(), "udp", netip.AddrPortFrom(from, 0).String())
		if err != nil {
			return err
		}
		_, err = c.(*net.UDPConn).WriteToUDPAddrPort(make([]byte, size), to)
		return errors.Join(err, c.Close())
	}))
}

// asUser is send by a program of another user, without capabilities.
func (w *wireNet) asUser(t testing.TB, uid int, from netip.Addr, to netip.AddrPort, size int) {
	t.Helper()
	var err error
	onDisposableThread(func() {
		if err = unix.Setns(w.node.fd, unix.CLONE_NEWNET); err != nil {
			return
		}
		if _, _, e := unix.RawSyscall(unix.SYS_SETFSUID, uintptr(uid), 0, 0); e != 0 {
			err = e
			return
		}
		var fd int
		domain, sa := unix.AF_INET6, unix.Sockaddr(&unix.SockaddrInet6{Port: int(to.Port()), Addr: to.Addr().As16()})
		var local unix.Sockaddr = &unix.SockaddrInet6{Addr: from.As16()}
		if to.Addr().Is4() {
			domain, sa = unix.AF_INET, &unix.SockaddrInet4{Port: int(to.Port()), Addr: to.Addr().As4()}
			local = &unix.SockaddrInet4{Addr: from.As4()}
		}
		if fd, err = unix.Socket(domain, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0); err != nil {
			return
		}
		err = errors.Join(unix.Bind(fd, local), unix.Sendto(fd, make([]byte, size), 0, sa), unix.Close(fd))
		if errors.Is(err, unix.EPERM) {
			err = nil // the kernel tells the sender
		}
	})
	mustDo(t, err)
}

// TestAttack_foreignPackets sends RoCE packets of those who must not, in all ways
// to the node's device and from its pod to others', beside those of the ones who
// may.
func TestAttack_foreignPackets(t *testing.T) {
	const whole = 48 // any packet but a short one
	noReason := numWireReasons
	for _, f := range wireFamilies() {
		port := func(a netip.Addr) netip.AddrPort { return netip.AddrPortFrom(a, rocePort) }
		podsToo := func(c *WireConfig) { c.Peers = append(c.Peers, f.pods) }
		masquerade := "table inet cni { chain post { type nat hook postrouting priority srcnat; oifname fabric0 masquerade; }; }"
		dnat := fmt.Sprintf("table inet cni { chain pre { type nat hook prerouting priority dstnat; ip daddr %[1]s udp dport 4791 dnat ip to %[2]s; }; }", f.service, f.node)
		if f.service.Is6() {
			dnat = strings.NewReplacer("ip daddr", "ip6 daddr", "dnat ip to", "dnat ip6 to").Replace(dnat)
		}
		tests := []struct {
			name   string
			pod    bool // the sender is the pod, else outside
			from   netip.Addr
			to     netip.AddrPort
			at     netip.Addr // where it would arrive, if not at to
			size   int
			change func(*WireConfig)
			nft    string // of somebody else
			want   WireReason
		}{
			{name: "another node", from: f.other, to: port(f.node), want: noReason},
			{name: "a configured peer", from: f.peer, to: port(f.node), want: noReason},
			{name: "a node by another interface, as routed", from: f.far, to: port(f.node), want: noReason},
			{name: "a stranger", from: f.stranger, to: port(f.node), want: WireUnknownSource},
			{name: "a stranger's other traffic", from: f.stranger, to: netip.AddrPortFrom(f.node, 4790), want: noReason},
			{name: "a stranger, to what is no device", from: f.stranger, to: port(f.plain), want: noReason},
			{name: "the node's own address from outside", from: f.node, to: port(f.node), want: WireOwnAddress},
			{name: "less than a RoCE packet", from: f.other, to: port(f.node), size: minRoCE - 8 - 1, want: WireMalformed},
			{name: "the shortest RoCE packet", from: f.other, to: port(f.node), size: minRoCE - 8, want: noReason},
			{name: "a pod", pod: true, from: f.podAddr, to: port(f.node), want: WireUnknownSource},
			{name: "a pod as another node", pod: true, from: f.other, to: port(f.node), want: WireWrongInterface},
			{name: "a pod as a routed node", pod: true, from: f.far, to: port(f.node), want: WireWrongInterface},
			{name: "a pod as a configured peer", pod: true, from: f.peer, to: port(f.node), want: WireWrongInterface},
			{name: "a pod in a configured network", pod: true, from: f.podAddr, to: port(f.node), change: podsToo, want: WireWrongInterface},
			{name: "a pod as its node", pod: true, from: f.node, to: port(f.node), want: WireOwnAddress},
			{name: "a pod through a Service", pod: true, from: f.podAddr, to: port(f.service), at: f.node, nft: dnat, want: WireUnknownSource},
			{name: "a pod as another node, through a Service", pod: true, from: f.other, to: port(f.service), at: f.node, nft: dnat, want: WireWrongInterface},
			{name: "a pod to another node", pod: true, from: f.podAddr, to: port(f.other), want: WireForwarded},
			{name: "a pod to another node, masqueraded", pod: true, from: f.podAddr, to: port(f.other), nft: masquerade, want: WireForwarded},
			{name: "a pod as its node, to another", pod: true, from: f.node, to: port(f.other), want: WireOwnAddress},
			{name: "a pod as a third node, to another", pod: true, from: f.far, to: port(f.other), want: WireWrongInterface},
			{name: "a pod in a configured network, to another node", pod: true, from: f.podAddr, to: port(f.other), change: podsToo, want: WireWrongInterface},
			{name: "a pod to a configured peer", pod: true, from: f.podAddr, to: port(f.peer), want: WireForwarded},
			{name: "a pod's other traffic to another node", pod: true, from: f.podAddr, to: netip.AddrPortFrom(f.other, 4790), want: noReason},
			{name: "a pod to a stranger", pod: true, from: f.podAddr, to: port(f.stranger), want: noReason},
		}
		for _, tt := range tests {
			t.Run(f.name+"/"+tt.name, func(t *testing.T) {
				w := newWireNet(t)
				cfg := w.config()
				if tt.change != nil {
					tt.change(&cfg)
				}
				if tt.nft != "" {
					nft(t, w.node, tt.nft)
				}
				filter := w.filter(t, cfg)
				at, sender := netip.AddrPortFrom(tt.to.Addr(), tt.to.Port()), w.outside
				if tt.at.IsValid() {
					at = port(tt.at)
				}
				if tt.pod {
					sender = w.pod
				}
				where := w.node
				if at.Addr() == f.other || at.Addr() == f.peer || at.Addr() == f.stranger {
					where = w.outside
				}
				if tt.size == 0 {
					tt.size = whole
				}
				r := w.receive(t, where, at)
				w.send(t, sender, tt.from, tt.to, tt.size)
				var drops WireDrops
				arrived := 0
				waitFor(t, "the packet to arrive or to be counted", func() bool {
					var err error
					drops, err = filter.Drops()
					mustDo(t, err)
					arrived += r.got(t, tt.size)
					return arrived > 0 || drops != WireDrops{}
				})
				want := WireDrops{}
				if tt.want != noReason {
					want[tt.want] = 1
				}
				if drops != want || arrived > 0 != (tt.want == noReason) {
					t.Errorf("%d arrived, dropped %v, want %v\n%s", arrived, drops, want, nft(t, w.node, "list table inet "+wireTableName))
				}
			})
		}
	}
}

// TestAttack_localUserByService: nor does another user by a Service that rewrites the destination of what this
// machine sends, its port too, as kube-proxy does.
func TestAttack_localUserByService(t *testing.T) {
	for _, f := range wireFamilies() {
		for name, to := range map[string]netip.Addr{"another node": f.other, "its own node": f.node} {
			t.Run(f.name+"/"+name, func(t *testing.T) {
				w := newWireNet(t)
				w.route(t, w.node, netip.PrefixFrom(f.service, f.service.BitLen()), f.other)
				const service = "table inet services { chain out { type nat hook output priority -100; ip daddr %s udp dport 53 dnat ip to %s:4791; }; }"
				rules := fmt.Sprintf(service, f.service, to)
				if f.service.Is6() {
					rules = strings.NewReplacer("ip daddr", "ip6 daddr", "dnat ip to", "dnat ip6 to", to.String(), "["+to.String()+"]").Replace(rules)
				}
				nft(t, w.node, rules)
				filter := w.filter(t, w.config())
				where := w.outside
				if to == f.node {
					where = w.node
				}
				r := w.receive(t, where, netip.AddrPortFrom(to, rocePort))
				w.asUser(t, 65534, f.node, netip.AddrPortFrom(f.service, 53), 48)
				drops, arrived := WireDrops{}, 0
				waitFor(t, "the packet to arrive or to be counted", func() bool {
					var err error
					drops, err = filter.Drops()
					mustDo(t, err)
					arrived += r.got(t, 48)
					return arrived > 0 || drops != WireDrops{}
				})
				if want := (WireDrops{WireLocalUser: 1}); drops != want || arrived > 0 {
					t.Errorf("%d arrived, dropped %v, want %v", arrived, drops, want)
				}
			})
		}
	}
}

// TestAttack_localUser: only the agent's user sends to devices from this machine.
func TestAttack_localUser(t *testing.T) {
	w := newWireNet(t)
	filter := w.filter(t, w.config())
	for i, f := range wireFamilies() {
		r := w.receive(t, w.outside, netip.AddrPortFrom(f.other, rocePort))
		own := w.receive(t, w.node, netip.AddrPortFrom(f.node, rocePort))
		for _, to := range []netip.Addr{f.other, f.node} {
			w.asUser(t, 65534, f.node, netip.AddrPortFrom(to, rocePort), 48)
		}
		drops, err := filter.Drops()
		mustDo(t, err)
		if want := (WireDrops{WireLocalUser: uint64(2 * (i + 1))}); drops != want {
			t.Errorf("%s: dropped %v, want %v", f.name, drops, want)
		}
		// The agent's own, to another node and to itself.
		w.asUser(t, os.Geteuid(), f.node, netip.AddrPortFrom(f.other, rocePort), 49)
		w.asUser(t, os.Geteuid(), f.node, netip.AddrPortFrom(f.node, rocePort), 49)
		sent := 0
		waitFor(t, "what the agent sends", func() bool {
			sent += r.got(t, 49) + own.got(t, 49)
			return sent == 2
		})
	}
}

// TestAttack_linkLocal: an address that is good on every link is taken on the
// device's only.
func TestAttack_linkLocal(t *testing.T) {
	w := newWireNet(t)
	other := netip.MustParseAddr("fe80::77")
	w.address(t, w.outside, "fabric0", other, 64)
	w.address(t, w.pod, "pod0", other, 64)
	f := wireFamilies()[1]
	cfg := w.config()
	cfg.Nodes = append(cfg.Nodes, other)
	filter := w.filter(t, cfg)
	r := w.receive(t, w.node, netip.AddrPortFrom(f.node, rocePort))
	w.send(t, w.outside, other.WithZone("fabric0"), netip.AddrPortFrom(f.node, rocePort), 48)
	arrived := 0
	waitFor(t, "a packet by the fabric", func() bool {
		arrived += r.got(t, 48)
		return arrived > 0
	})
	w.send(t, w.pod, other.WithZone("pod0"), netip.AddrPortFrom(f.node, rocePort), 48)
	waitFor(t, "the pod's packet to be counted", func() bool {
		drops, err := filter.Drops()
		mustDo(t, err)
		return drops == WireDrops{WireWrongInterface: 1}
	})
}

// TestWireFilter_untracked: connection tracking, which somebody else uses, has
// nothing to do with packets to and from devices, dropped ones included; and a
// hostPort of a pod does not get them.
func TestWireFilter_untracked(t *testing.T) {
	w := newWireNet(t)
	nft(t, w.node, fmt.Sprintf(`table inet cni {
		chain post { type nat hook postrouting priority srcnat; oifname "fabric0" masquerade; }
		chain pre { type nat hook prerouting priority dstnat; udp dport 4791 fib daddr type local dnat ip to %s; }
	}`, wireFamilies()[0].podAddr))
	w.filter(t, w.config())
	f := wireFamilies()[0]
	at := netip.AddrPortFrom(f.node, rocePort)
	in, out := w.receive(t, w.node, at), w.receive(t, w.outside, netip.AddrPortFrom(f.other, rocePort))
	w.send(t, w.outside, f.other, at, 48)
	w.send(t, w.outside, f.stranger, at, 48)
	w.send(t, w.node, f.node, netip.AddrPortFrom(f.other, rocePort), 48)
	seen := 0
	waitFor(t, "packets both ways", func() bool {
		seen += in.got(t, 48) + out.got(t, 48)
		return seen == 2
	})
	var count []byte
	mustDo(t, w.node.Do(func() (err error) {
		count, err = os.ReadFile("/proc/sys/net/netfilter/nf_conntrack_count")
		return err
	}))
	if n := strings.TrimSpace(string(count)); n != "0" {
		t.Errorf("%s connections are tracked", n)
	}
}

// wireTables lists the tables of ours in a namespace.
func wireTables(t testing.TB, ns *NetNS) int {
	t.Helper()
	return strings.Count(nft(t, ns, "list tables"), wireTableName)
}

// TestWireFilter_oneTable: whatever agents come and go, there is one table, the
// youngest's, until its owner removes it, and tables of others stay as they are.
func TestWireFilter_oneTable(t *testing.T) {
	w := newWireNet(t)
	foreign := "table inet firewall {\n\tchain in {\n\t\ttype filter hook input priority filter; policy accept;\n\t\tudp dport 4791 counter packets 0 bytes 0 accept\n\t}\n}\n"
	nft(t, w.node, foreign)
	before := nft(t, w.node, "list table inet firewall")
	has := func(what string, tables int, stranger bool) {
		t.Helper()
		if n := wireTables(t, w.node); n != tables {
			t.Errorf("%s: %d tables, want %d", what, n, tables)
		}
		if tables > 0 {
			text := nft(t, w.node, "list set inet "+wireTableName+" nodes4")
			if got := strings.Contains(text, wireFamilies()[0].stranger.String()); got != stranger {
				t.Errorf("%s: the younger's peer is in the set: %t", what, got)
			}
		}
		if after := nft(t, w.node, "list table inet firewall"); after != before {
			t.Errorf("%s: the table of somebody else is %s, was %s", what, after, before)
		}
	}
	older := w.filter(t, w.config())
	has("one agent", 1, false)
	cfg := w.config()
	cfg.Nodes = append(cfg.Nodes, wireFamilies()[0].stranger)
	younger := w.filter(t, cfg)
	has("after the handover", 1, true)
	mustDo(t, older.Close())
	mustDo(t, older.Remove()) // it gave the table up
	has("after the end of the older", 1, true)
	if err := older.Update(w.config()); !errors.Is(err, ErrClosed) {
		t.Errorf("Update of the older = %v", err)
	}
	mustDo(t, younger.Close()) // as if it were killed
	again := w.filter(t, w.config())
	has("after a crash", 1, false)
	mustDo(t, again.Remove())
	has("after the end", 0, false)
	w.filter(t, w.config())
	mustDo(t, SweepWireFilter(w.node))
	has("swept", 0, false)
	mustDo(t, SweepWireFilter(w.node))
}

// TestWireFilter_update: counters go on over updates, and when somebody deleted
// TestWireFilter_removeOwn: who managed the machine before takes away its own table,
// and leaves a successor's.
func TestWireFilter_removeOwn(t *testing.T) {
	w := newWireNet(t)
	older := w.filter(t, w.config())
	younger := w.filter(t, w.config())
	mustDo(t, older.RemoveOwn())
	if n := wireTables(t, w.node); n != 1 {
		t.Errorf("%d tables after the end of the older filter, want the younger one's", n)
	}
	mustDo(t, younger.Update(w.config())) // is another table, and its own
	mustDo(t, younger.RemoveOwn())
	if n := wireTables(t, w.node); n != 0 {
		t.Errorf("%d tables after the end of the younger filter", n)
	}
	mustDo(t, younger.RemoveOwn()) // closed
	ns, err := OpenNetNS(w.node.Path())
	mustDo(t, err)
	short, err := InstallWireFilter(ns, w.config())
	mustDo(t, err)
	mustDo(t, ns.Close()) // the filter does not need it any more
	mustDo(t, short.Update(w.config()))
	mustDo(t, short.RemoveOwn())
	if n := wireTables(t, w.node); n != 0 {
		t.Errorf("%d tables after the end of a filter whose namespace's handle was closed", n)
	}
	gone := w.filter(t, w.config())
	mustDo(t, SweepWireFilter(w.node))
	mustDo(t, gone.RemoveOwn())
	late := w.filter(t, w.config())
	mustDo(t, late.Close())
	mustDo(t, late.RemoveOwn())
	if n := wireTables(t, w.node); n != 1 {
		t.Errorf("%d tables, want the one that was given up", n)
	}
}

// the table.
func TestWireFilter_update(t *testing.T) {
	w := newWireNet(t)
	f := wireFamilies()[0]
	filter := w.filter(t, w.config())
	dropped := func(want uint64) {
		t.Helper()
		w.send(t, w.outside, f.stranger, netip.AddrPortFrom(f.node, rocePort), 48)
		waitFor(t, fmt.Sprintf("%d dropped packets", want), func() bool {
			d, err := filter.Drops()
			mustDo(t, err)
			return d == WireDrops{WireUnknownSource: want}
		})
	}
	dropped(1)
	mustDo(t, filter.Update(w.config()))
	dropped(2)
	nft(t, w.node, "delete table inet "+wireTableName)
	if d, err := filter.Drops(); !errors.Is(err, ErrNoTable) || d[WireUnknownSource] != 2 {
		t.Errorf("Drops of a deleted table = %v, %v", d, err)
	}
	mustDo(t, filter.Update(w.config()))
	dropped(3)
}

// TestWireFilter_failsWhole: after a transaction that the kernel refuses, and a
// configuration that cannot be used, the old table stands.
func TestWireFilter_failsWhole(t *testing.T) {
	w := newWireNet(t)
	filter := w.filter(t, w.config())
	before := nft(t, w.node, "list table inet "+wireTableName)
	for name, try := range map[string]func() error{
		"refused by the kernel": func() error {
			rs := &ruleset{conn: filter.conn, table: wireTable()}
			rs.dropTable()
			rs.conn.AddTable(rs.table)
			rules := renderWire(WireConfig{}, true)
			rs.addWire(rules, WireDrops{})
			rs.rule(&nftables.Chain{Name: chainInput}, []expr.Any{&expr.Verdict{Kind: expr.VerdictGoto, Chain: "missing"}})
			return rs.commit()
		},
		"too many": func() error { return filter.Update(WireConfig{Nodes: make([]netip.Addr, maxWireNodes+1)}) },
	} {
		if err := try(); err == nil {
			t.Errorf("%s: no error", name)
		}
		if after := nft(t, w.node, "list table inet "+wireTableName); after != before {
			t.Errorf("%s: the table is %s, was %s", name, after, before)
		}
	}
}

// TestWireFilter_largest: as many addresses and networks as are allowed fit into
// one transaction.
func TestWireFilter_largest(t *testing.T) {
	w := newWireNet(t)
	cfg := w.config()
	a, p := netip.MustParseAddr("fd99::1"), netip.MustParseAddr("fd98::1")
	for len(cfg.Nodes) < maxWireNodes {
		cfg.Nodes = append(cfg.Nodes, a)
		a = a.Next()
	}
	for len(cfg.Peers) < maxWirePeers {
		cfg.Peers = append(cfg.Peers, netip.PrefixFrom(p, 128))
		p = p.Next().Next()
	}
	filter := w.filter(t, w.config())
	mustDo(t, filter.Update(cfg))
	mustDo(t, filter.Update(cfg))
}

// TestWireFilter_withoutRoutes: a kernel that cannot look routes up takes packets
// of nodes by the devices' interfaces only.
func TestWireFilter_withoutRoutes(t *testing.T) {
	for _, routes := range []bool{true, false} {
		found := false
		for _, c := range renderWire(WireConfig{}, routes).chains {
			for _, r := range c.rules {
				for _, e := range r {
					_, fib := e.(*expr.Fib)
					found = found || fib
				}
			}
		}
		if found != routes {
			t.Errorf("routes %t: a rule looks them up: %t", routes, found)
		}
	}
}

func TestWireConfig_Validate(t *testing.T) {
	a := netip.MustParseAddr("192.0.2.1")
	tests := []struct {
		name string
		cfg  WireConfig
		ok   bool
	}{
		{"nothing", WireConfig{}, true},
		{"addresses", WireConfig{Own: []netip.Addr{a}, Nodes: []netip.Addr{a}}, true},
		{"no address", WireConfig{Nodes: []netip.Addr{{}}}, false},
		{"unspecified", WireConfig{Nodes: []netip.Addr{netip.IPv4Unspecified()}}, false},
		{"loopback", WireConfig{Own: []netip.Addr{netip.IPv6Loopback()}}, false},
		{"with a zone", WireConfig{Own: []netip.Addr{netip.MustParseAddr("fe80::1%eth0")}}, false},
		{"IPv4 as IPv6", WireConfig{Nodes: []netip.Addr{netip.MustParseAddr("::ffff:192.0.2.1")}}, false},
		{"no network", WireConfig{Peers: []netip.Prefix{{}}}, false},
		{"long interface", WireConfig{Interfaces: []string{strings.Repeat("x", unix.IFNAMSIZ)}}, false},
		{"too many devices", WireConfig{Own: make([]netip.Addr, maxWireOwn+1)}, false},
		{"too many networks", WireConfig{Peers: make([]netip.Prefix, maxWirePeers+1)}, false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if err := tt.cfg.Validate(); (err == nil) != tt.ok || err != nil && !errors.As(err, new(*ConfigError)) {
				t.Errorf("Validate = %v", err)
			}
		})
	}
}

func TestMergePrefixes(t *testing.T) {
	tests := []struct {
		name, in, want string
	}{
		{"none", "", ""},
		{"one", "10.0.0.0/8", "10.0.0.0-10.255.255.255"},
		{"other family", "fd00::/8", ""},
		{"all", "0.0.0.0/0", "0.0.0.0-255.255.255.255"},
		{"inside", "10.1.0.0/16 10.0.0.0/8 10.1.2.3/32", "10.0.0.0-10.255.255.255"},
		{"twice", "10.0.0.0/8 10.0.0.0/8", "10.0.0.0-10.255.255.255"},
		{"neighbours", "10.1.0.0/16 10.0.0.0/16", "10.0.0.0-10.1.255.255"},
		{"apart", "10.2.0.0/16 10.0.0.0/16", "10.0.0.0-10.0.255.255 10.2.0.0-10.2.255.255"},
		{"up to the end", "255.0.0.0/8 254.0.0.0/8", "254.0.0.0-255.255.255.255"},
		{"behind the end", "255.0.0.0/8 255.255.255.255/32", "255.0.0.0-255.255.255.255"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var in []netip.Prefix
			for _, s := range strings.Fields(tt.in) {
				in = append(in, netip.MustParsePrefix(s))
			}
			var got []string
			for _, r := range mergePrefixes(in, true) {
				got = append(got, fmt.Sprintf("%v-%v", r.first, r.last))
			}
			if s := strings.Join(got, " "); s != tt.want {
				t.Errorf("%s, want %s", s, tt.want)
			}
		})
	}
}

func TestProbeWire(t *testing.T) {
	testenv.Need(t, testenv.Root, testenv.NetAdmin, testenv.Nftables)
	mustDo(t, errors.Join(ProbeWire(), ProbeWireRoutes()))
}
