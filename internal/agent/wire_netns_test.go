// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/testenv"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/rocev2"
)

// wireText names the other node's devices as the only peers.
func wireText(other *testNode) string {
	return fmt.Sprintf("  takeover: true\n  wire: {peers: [%s]}\n", strings.Join(other.roce, ", "))
}

// newWireLab is a lab whose agents filter RoCE packets, with so many devices each.
func newWireLab(t testing.TB, devices int) *lab {
	t.Helper()
	testenv.Need(t, testenv.Program("nft"))
	l := newLab(t)
	l.a.roce, l.b.roce = l.a.roce[:devices], l.b.roce[:devices]
	l.a.configure(t, l.option, wireText(l.b)+preferAll)
	l.b.configure(t, l.option, wireText(l.a)+preferAll)
	return l
}

// wireTables counts the filters in a namespace.
func (s *space) wireTables(t testing.TB) int {
	t.Helper()
	var out []byte
	must(t, s.ns.Do(func() (err error) {
		out, err = exec.Command("nft", "list", "tables").Output()
		return err
	}))
	return strings.Count(string(out), "kube-smcr-wire")
}

// TestAgent_filtersWire: connections of two agents that filter are on SMC-R, with
// links of each device; the table ends with its agent, and one that is not a
// peer's is on plain TCP.
func TestAgent_filtersWire(t *testing.T) {
	l := newWireLab(t, 2)
	l.a.start(t)
	l.b.start(t)
	ln := l.b.pod.listen(t, podB+":0")
	serve(t, ln, echo)
	once := func() {
		t.Helper()
		c, err := l.a.pod.dial(t, ln.Addr().String())
		must(t, err)
		exchange(t, c, 100_000)
	}
	once()
	for _, n := range []*testNode{l.a, l.b} {
		eventually(t, func() string {
			links := value(n.client.Links(t.Context()))(t)
			if len(links.LinkGroups) != 1 || links.LinkGroups[0].Redundancy != "SYMMETRIC" {
				return fmt.Sprintf("node %s: %+v", n.name, links)
			}
			return ""
		})
		s := n.status(t)
		if s.Wire.State != agentapi.WireFiltered || s.Wire.Detail != "" || len(s.Wire.Dropped) != 0 || s.Conns.TotalSMCR != 1 {
			t.Errorf("node %s: %+v, connections %+v", n.name, s.Wire, s.Conns)
		}
		if k := n.host.wireTables(t); k != 1 {
			t.Errorf("node %s: %d tables", n.name, k)
		}
	}
	for _, n := range []*testNode{l.a, l.b} {
		must(t, n.stop())
		if k := n.host.wireTables(t); k != 0 {
			t.Errorf("node %s: %d tables after the end", n.name, k)
		}
	}
	// b does not know a.
	l.b.configure(t, l.option, "  wire: {peers: [10.99.0.0/24]}\n"+preferAll)
	l.a.start(t)
	l.b.start(t)
	once()
	s := l.b.status(t)
	if s.Wire.Dropped["unknown-source"] == 0 || s.Conns.TotalSMCR != 0 {
		t.Errorf("a stranger: %+v, connections %+v", s.Wire, s.Conns)
	}
}

// TestLinuxHost_addresses: the IPv4 addresses are those of one interface of the host.
func TestLinuxHost_addresses(t *testing.T) {
	one, other := newSpace(t), newSpace(t)
	join(t, "roce0", one, other, []string{"192.0.2.1/24", "192.0.2.9/24", "198.51.100.7/32", "2001:db8::1/64"}, []string{"192.0.2.2/24"})
	join(t, "eth0", one, other, []string{"203.0.113.1/24"}, []string{"203.0.113.2/24"})
	h := linuxHost{one.path}
	got := value(h.addresses("roce0"))(t)
	slices.SortFunc(got, netip.Addr.Compare)
	if want := addrs("192.0.2.1", "192.0.2.9", "198.51.100.7"); !slices.Equal(got, want) {
		t.Errorf("addresses %v, want %v", got, want)
	}
	if got, err := h.addresses("roce1"); err == nil {
		t.Errorf("an interface that is not there has the addresses %v", got)
	}
}

// TestHandover_wire: over handover, crash, restart and end there is one table, of
// the agent that manages the node, and connections go on.
func TestHandover_wire(t *testing.T) {
	testenv.Need(t, testenv.Program("nft"))
	l := newSpaces(t)
	l.attach(t)
	l.a.writeConfig(t, wireText(l.b)+preferAll)
	l.b.writeConfig(t, wireText(l.a)+preferAll)
	l.b.spawn(t)
	first := l.a.succeed(t, "first")
	ln := l.b.pod.listen(t, podB+":0")
	serve(t, ln, echo)
	c, err := l.a.pod.dial(t, ln.Addr().String())
	must(t, err)
	pingOnce(t, c)
	tables := func(what string, want int) {
		t.Helper()
		if k := l.a.host.wireTables(t); k != want {
			t.Errorf("%s: %d tables, want %d", what, k, want)
		}
	}
	second := l.a.succeed(t, "second")
	tables("after the handover", 1)
	pingOnce(t, c)
	must(t, c.Close())
	must(t, first.kill(syscall.SIGTERM))
	tables("after the end of the first", 1)
	_ = second.kill(os.Kill)
	tables("after a crash", 1)
	third := l.a.succeed(t, "third")
	tables("after the restart", 1)
	if s := l.a.status(t); s.Wire.State != agentapi.WireFiltered || len(s.Wire.Dropped) != 0 {
		t.Errorf("status %+v", s.Wire)
	}
	must(t, third.kill(syscall.SIGTERM))
	tables("after the end", 0)
}

// TestAttack_spray: who is not on the node's fabric cannot end a link group by
// packets with a peer's address, the right queue pair and all packet sequence
// numbers.
func TestAttack_spray(t *testing.T) {
	l := newWireLab(t, 1) // no other link to go to
	l.a.start(t)
	l.b.start(t)
	ln := l.b.pod.listen(t, podB+":0")
	serve(t, ln, echo)
	c, err := l.a.pod.dial(t, ln.Addr().String())
	must(t, err)
	pingOnce(t, c)

	// The attacker is where pods are: behind an interface of the node.
	evil := newSpace(t)
	join(t, "evil", evil, l.b.host, []string{"10.79.0.2/24"}, []string{"10.79.0.1/24"})
	src, dst := netip.MustParseAddr(l.a.roce[0]), netip.MustParseAddr(l.b.roce[0])
	evil.links(t, func(h *netlink.Handle) error {
		lo, err := h.LinkByName("lo")
		if err != nil {
			return err
		}
		addr, err := netlink.ParseAddr(src.String() + "/32")
		if err != nil {
			return err
		}
		return errors.Join(h.AddrAdd(lo, addr), h.RouteAdd(&netlink.Route{
			Dst: &net.IPNet{IP: dst.AsSlice(), Mask: net.CIDRMask(32, 32)}, Gw: net.ParseIP("10.79.0.1"),
		}))
	})
	must(t, l.b.host.ns.Do(func() error {
		return errors.Join(os.WriteFile("/proc/sys/net/ipv4/conf/all/rp_filter", []byte("0"), 0), os.WriteFile("/proc/sys/net/ipv4/conf/evil/rp_filter", []byte("0"), 0))
	}))
	var qpn rdma.QPN
	for _, k := range value(l.b.client.Links(t.Context()))(t).LinkGroups[0].Links {
		if strings.HasSuffix(k.LocalGID, dst.String()) {
			qpn = rdma.QPN(k.LocalQPN)
		}
	}
	if qpn == 0 {
		t.Fatal("no link at the first device")
	}
	must(t, evil.ns.Do(func() error { return spray(src, dst, qpn) }))
	must(t, c.SetDeadline(time.Now().Add(waitLimit))) // what it had may be over

	eventually(t, func() string {
		if s := l.b.status(t); s.Wire.Dropped["wrong-interface"] == 0 {
			return fmt.Sprintf("nothing is counted: %+v", s.Wire)
		}
		return ""
	})
	pingOnce(t, c)
	groups := value(l.b.client.Links(t.Context()))(t).LinkGroups
	if s := l.b.status(t); len(groups) != 1 || groups[0].State != "ACTIVE" || s.Conns.LiveSMCR != 1 {
		t.Errorf("link groups %+v, connections %+v", groups, s.Conns)
	}
}

// spray sends a packet with every packet sequence number, twice: of so many at
// once a socket loses some.
func spray(src, dst netip.Addr, qpn rdma.QPN) error {
	const (
		batch      = 64
		length     = 16 // of BTH and ICRC
		psnAt      = 8  // with AckReq and the bits that are reserved, which are zero
		crcAt      = 12
		checkEvery = 255 * batch // multiples of 255 have any bits set
	)
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	err = errors.Join(
		unix.Bind(fd, &unix.SockaddrInet4{Addr: src.As4()}),
		unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_DO),
		unix.SetsockoptInt(fd, unix.SOL_UDP, unix.UDP_SEGMENT, length))
	if err != nil {
		return err
	}
	name, err := unix.Getsockname(fd)
	if err != nil {
		return err
	}
	icrc := rocev2.NewICRC(rocev2.Addresses{Src: src, SrcPort: uint16(name.(*unix.SockaddrInet4).Port), Dst: dst, DstPort: rocev2.Port})
	appended := func(out []byte, id, psn int) []byte {
		pkt := rocev2.Packet{BTH: rocev2.BTH{OpCode: rocev2.SendMiddle, PKey: 0xffff, DestQP: qpn, PSN: rdma.PSN(psn)}}
		at := len(out)
		out = pkt.AppendHeader(out)
		return binary.LittleEndian.AppendUint32(out, icrc.Sum(uint16(id), out[at:], nil, 0))
	}
	appendedBatch := func(out []byte, psn int) []byte {
		for i := range batch {
			out = appended(out, i, psn+i)
		}
		return out
	}
	to := &unix.SockaddrInet4{Addr: dst.As4(), Port: rocev2.Port}
	first := appendedBatch(nil, 0)
	out, one := slices.Clone(first), make([]byte, 0, length)
	for n := 0; n < 2<<24; n += batch {
		psn := n % (1 << 24)
		// CRCs are linear: what the number of a batch adds to that of its first packet, it adds to all.
		one = appended(one[:0], 0, psn)
		added := binary.LittleEndian.Uint32(one[crcAt:]) ^ binary.LittleEndian.Uint32(first[crcAt:])
		for i := range batch {
			p, of := out[i*length:], first[i*length:]
			binary.BigEndian.PutUint32(p[psnAt:], uint32(psn|i))
			binary.LittleEndian.PutUint32(p[crcAt:], binary.LittleEndian.Uint32(of[crcAt:])^added)
		}
		if psn%checkEvery == 0 && !bytes.Equal(out, appendedBatch(nil, psn)) {
			return fmt.Errorf("packets from %d on are not what they are to be", psn)
		}
		if err := unix.Sendto(fd, out, 0, to); err != nil {
			return fmt.Errorf("send from %d on: %w", psn, err)
		}
	}
	return nil
}
