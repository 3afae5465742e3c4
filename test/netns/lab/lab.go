// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/internal/linux"
	"github.com/smcr-io/kube-smcr/internal/testenv/place"
	"github.com/smcr-io/kube-smcr/internal/undo"
)

// Names of the interfaces inside a node.
const (
	Trunk    = "trunk" // joins the bridges, carries the pods' TCP
	bridge   = "pods0"
	podIf    = "eth0"
	underlay = "underlay" // and a number: carries RoCE packets
	fabric   = "fabric"   // the namespace of the switches
)

// Config says how to build a lab. The zero value is a good lab.
type Config struct {
	// MTU of all links; 9000 if 0.
	MTU int
	// RNICs of each node, each with a network of its own: 1 to 8; 2 if 0.
	RNICs int
	// Switched puts a switch between the RNICs of a network, so that one
	// node does not see what happens to the port of the other. Otherwise a
	// cable joins them, which is faster.
	Switched bool
	// Routed gives the pods of each node an IP subnet of their own, as
	// Kubernetes does; the nodes are routers between them. Otherwise all pods
	// share a subnet.
	Routed bool
	// TCPCongestion is TCP's congestion control in all namespaces, like "cubic"; if empty, the one that
	// the machine gives to new ones.
	TCPCongestion string
	// PluginDirs are searched for CNI plugins, the first one first. Needed for
	// pods only.
	PluginDirs []string
}

// Lab is two nodes that are connected. Close it after use.
type Lab struct {
	// Prefix begins the name of every namespace of the lab.
	Prefix string
	// Dir is the lab's directory; everybody may read it.
	Dir   string
	Nodes [2]*Node

	cfg        Config
	lock       *os.File     // of Dir: Sweep leaves alone what it is held for
	fabric     *linux.NetNS // nil unless switched
	pluginDirs []string

	mu   sync.Mutex // guards what is below: processes are started by several goroutines
	undo undo.Stack
}

// Node is a namespace that stands for a machine.
type Node struct {
	// Name is node1 or node2.
	Name string
	NS   *linux.NetNS
	// RNICs are the node's interfaces for RoCE packets.
	RNICs []RNIC
	// Dir is the node's directory below the lab's.
	Dir string

	lab   *Lab
	index int
}

// RNIC is a network interface that carries RoCE packets.
type RNIC struct {
	Name    string
	Address netip.Addr

	prefix netip.Prefix
	mac    net.HardwareAddr
}

// podPrefixes returns the subnets of the node's pods, of IPv4 and IPv6.
func (n *Node) podPrefixes() [2]netip.Prefix {
	var subnet byte
	if n.lab.cfg.Routed {
		subnet = byte(1 + n.index)
	}
	return [2]netip.Prefix{
		netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 89, subnet, 0}), 24),
		netip.PrefixFrom(netip.AddrFrom16([16]byte{0: 0xfd, 1: 0x89, 7: subnet}), 64),
	}
}

// trunkAddrs returns the node's addresses between the nodes, if they are routers.
func (n *Node) trunkAddrs() [2]netip.Prefix {
	host := byte(1 + n.index)
	return [2]netip.Prefix{
		netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 88, 0, host}), 24),
		netip.PrefixFrom(netip.AddrFrom16([16]byte{0: 0xfd, 1: 0x88, 15: host}), 64),
	}
}

// New builds a lab, or leaves nothing behind.
func New(cfg Config) (*Lab, error) {
	l := &Lab{
		Prefix: fmt.Sprintf("%s%d-%04x", namePrefix, os.Getpid(), rand.Uint32()&0xffff),
		cfg:    cfg,
	}
	for _, d := range cfg.PluginDirs {
		abs, err := filepath.Abs(d)
		if err != nil {
			return nil, fmt.Errorf("lab: %w", err)
		}
		l.pluginDirs = append(l.pluginDirs, abs)
	}
	if l.cfg.MTU == 0 {
		l.cfg.MTU = defaultMTU
	}
	if l.cfg.RNICs == 0 {
		l.cfg.RNICs = defaultRNICs
	}
	if l.cfg.RNICs < 1 || l.cfg.RNICs > maxRNICs {
		return nil, fmt.Errorf("lab: %d RNICs, want 1 to %d", l.cfg.RNICs, maxRNICs)
	}
	steps := []undo.Step{{Name: "make directory", Do: l.makeDir, Undo: l.removeDir}}
	for i := range l.Nodes {
		n := &Node{Name: fmt.Sprintf("node%d", i+1), lab: l, index: i}
		l.Nodes[i] = n
		steps = append(steps, undo.Step{Name: "make " + n.Name, Do: n.build, Undo: n.remove})
	}
	if cfg.Switched {
		steps = append(steps, undo.Step{Name: "make switches", Do: l.makeFabric, Undo: func() error { return l.removeNS(fabric, l.fabric) }})
	}
	for i := range l.cfg.RNICs {
		steps = append(steps, undo.Step{Name: fmt.Sprintf("connect the nodes with underlay %d", i), Do: func() error { return l.connectRNICs(i) }})
	}
	steps = append(steps,
		undo.Step{Name: "connect the nodes with the trunk", Do: func() error { return l.connect(Trunk) }},
		undo.Step{Name: "make bridges", Do: func() error {
			return errors.Join(l.Nodes[0].makeBridge(), l.Nodes[1].makeBridge())
		}},
	)
	if err := l.undo.Run(steps...); err != nil {
		return nil, fmt.Errorf("lab: %w", err)
	}
	return l, nil
}

// Close removes the lab: the processes, the pods, the nodes, the directory. It
// goes on after an error.
func (l *Lab) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.undo.Back()
}

// onClose remembers what Close is to take back.
func (l *Lab) onClose(what string, f func() error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.undo.Did(what, f)
}

// makeDir makes the directory. It gets its name when it is locked, so that no
// Sweep finds it before.
func (l *Lab) makeDir() error {
	made, err := os.MkdirTemp("", "."+l.Prefix+"-")
	if err != nil {
		return err
	}
	dir := filepath.Join(filepath.Dir(made), strings.TrimPrefix(filepath.Base(made), "."))
	l.lock, err = place.TryLock(made)
	if err == nil {
		err = os.Chmod(made, 0o755)
	}
	if err == nil {
		err = os.Rename(made, dir)
	}
	if err != nil {
		return errors.Join(err, os.RemoveAll(made), l.lock.Close())
	}
	l.Dir = dir
	return nil
}

func (l *Lab) removeDir() error { return errors.Join(place.Remove(l.Dir), l.lock.Close()) }

func (n *Node) build() error {
	n.Dir = filepath.Join(n.lab.Dir, n.Name)
	if err := os.Mkdir(n.Dir, 0o755); err != nil {
		return err
	}
	for i := range n.lab.cfg.RNICs {
		addr := netip.AddrFrom4([4]byte{192, 168, byte(89 + i), byte(1 + n.index)})
		n.RNICs = append(n.RNICs, RNIC{
			Name: fmt.Sprintf("%s%d", underlay, i), Address: addr, prefix: netip.PrefixFrom(addr, 24),
			mac: net.HardwareAddr{0x02, 0x89, 0, 0, byte(i), byte(1 + n.index)},
		})
	}
	var err error
	if n.NS, err = n.lab.makeNS(n.Name); err != nil || !n.lab.cfg.Routed {
		return err
	}
	// A router finds its neighbours by its link-local address, which duplicate
	// address detection would keep from it for a second.
	err = n.NS.Do(func() error { return os.WriteFile("/proc/sys/net/ipv6/conf/default/accept_dad", []byte("0"), 0) })
	if err != nil {
		return errors.Join(fmt.Errorf("switch duplicate address detection off: %w", err), n.remove())
	}
	return nil
}

func (n *Node) remove() error { return n.lab.removeNS(n.Name, n.NS) }

func (l *Lab) nsName(name string) string { return l.Prefix + "-" + name }

// makeNS makes a named namespace with loopback up.
func (l *Lab) makeNS(name string) (*linux.NetNS, error) {
	done := make(chan error)
	go func() {
		// The thread goes back to where it was and lives on: the processes that it
		// started before would end with it.
		runtime.LockOSThread()
		own, err := netns.Get()
		if err != nil {
			done <- err
			return
		}
		h, err := netns.NewNamed(l.nsName(name))
		if err == nil {
			err = h.Close()
		}
		if serr := netns.Set(own); serr != nil {
			err = errors.Join(err, serr) // and the thread ends here
		} else {
			runtime.UnlockOSThread()
		}
		done <- errors.Join(err, own.Close())
	}()
	if err := <-done; err != nil {
		return nil, fmt.Errorf("make network namespace %s: %w", l.nsName(name), err)
	}
	ns, err := linux.OpenNetNS(filepath.Join(nsDir, l.nsName(name)))
	if err == nil {
		err = ns.Do(func() error { return errors.Join(SetTCPCongestion(l.cfg.TCPCongestion), setUp("lo")) })
	}
	if err != nil {
		return nil, errors.Join(err, l.removeNS(name, ns))
	}
	return ns, nil
}

// SetTCPCongestion sets TCP's congestion control for the sockets that will be made in the namespace of
// the calling thread. An empty name changes nothing.
func SetTCPCongestion(name string) error {
	const dir = "/proc/sys/net/ipv4/"
	if name == "" {
		return nil
	}
	err := os.WriteFile(dir+"tcp_congestion_control", []byte(name), 0)
	if err == nil {
		return nil
	}
	if errors.Is(err, os.ErrPermission) { // only the first namespace may have what not everybody may choose
		return fmt.Errorf("make %q TCP's congestion control of a namespace (add it to the sysctl net.ipv4.tcp_allowed_congestion_control): %w", name, err)
	}
	there, rerr := os.ReadFile(dir + "tcp_available_congestion_control")
	return errors.Join(fmt.Errorf("make %q TCP's congestion control, of which this machine has %q: %w", name, strings.TrimSpace(string(there)), err), rerr)
}

func (l *Lab) removeNS(name string, ns *linux.NetNS) error {
	var err error
	if ns != nil {
		err = ns.Close()
	}
	if derr := netns.DeleteNamed(l.nsName(name)); derr != nil {
		err = errors.Join(err, fmt.Errorf("remove network namespace %s: %w", l.nsName(name), derr))
	}
	return err
}

// connect joins the nodes by a pair of interfaces of this name. The pair goes
// away with a node.
func (l *Lab) connect(name string) error {
	if err := l.veth(l.Nodes[0].NS, netlink.LinkAttrs{Name: name}, l.Nodes[1].NS, name); err != nil {
		return err
	}
	for _, n := range l.Nodes {
		if err := n.NS.Do(func() error { return setUp(name) }); err != nil {
			return fmt.Errorf("%s of %s: %w", name, n.Name, err)
		}
	}
	return nil
}

// veth makes a pair of interfaces in two namespaces.
func (l *Lab) veth(ns *linux.NetNS, attrs netlink.LinkAttrs, peerNS *linux.NetNS, peerName string) (err error) {
	peer, err := os.Open(peerNS.Path())
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, peer.Close()) }()
	attrs.MTU = l.cfg.MTU
	err = ns.Do(func() error {
		return netlink.LinkAdd(&netlink.Veth{
			LinkAttrs: attrs,
			PeerName:  peerName, PeerNamespace: netlink.NsFd(int(peer.Fd())), PeerMTU: uint32(l.cfg.MTU),
		})
	})
	if err != nil {
		return fmt.Errorf("make veth %s: %w", attrs.Name, err)
	}
	return nil
}

func (n *Node) makeBridge() error {
	return n.NS.Do(func() error {
		br := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: bridge, MTU: n.lab.cfg.MTU}}
		if err := netlink.LinkAdd(br); err != nil {
			return fmt.Errorf("make bridge %s: %w", bridge, err)
		}
		trunk, err := netlink.LinkByName(Trunk)
		if err != nil {
			return fmt.Errorf("find %s: %w", Trunk, err)
		}
		if n.lab.cfg.Routed {
			return n.makeRouter(br, trunk)
		}
		if err := netlink.LinkSetMaster(trunk, br); err != nil {
			return fmt.Errorf("put %s into the bridge: %w", Trunk, err)
		}
		return setUp(bridge)
	})
}

// makeRouter makes the node a router between its own pods, behind br, and those
// of the other node, behind trunk. The caller is in the node's namespace.
func (n *Node) makeRouter(br, trunk netlink.Link) error {
	for _, file := range []string{"ipv4/ip_forward", "ipv6/conf/all/forwarding"} {
		if err := os.WriteFile("/proc/sys/net/"+file, []byte("1"), 0); err != nil {
			return fmt.Errorf("make %s a router: %w", n.Name, err)
		}
	}
	if err := setUp(bridge); err != nil {
		return err
	}
	other := n.lab.Nodes[1-n.index]
	for i, pods := range n.podPrefixes() {
		for link, p := range map[netlink.Link]netip.Prefix{br: netip.PrefixFrom(gateway(pods), pods.Bits()), trunk: n.trunkAddrs()[i]} {
			if err := netlink.AddrAdd(link, &netlink.Addr{IPNet: ipNet(p), Flags: unix.IFA_F_NODAD}); err != nil {
				return fmt.Errorf("give %s the address %v: %w", link.Attrs().Name, p, err)
			}
		}
		err := netlink.RouteAdd(&netlink.Route{Dst: ipNet(other.podPrefixes()[i]), Gw: other.trunkAddrs()[i].Addr().AsSlice()})
		if err != nil {
			return fmt.Errorf("route to the pods of %s: %w", other.Name, err)
		}
	}
	return nil
}

// gateway is the address of the pods' router.
func gateway(pods netip.Prefix) netip.Addr { return pods.Addr().Next() }

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

// SplitSegments makes the underlays carry every packet by itself, as a wire
// does, instead of whole batches of them: a capture then shows packets. It
// costs speed, so it is switched off again.
func (l *Lab) SplitSegments(on bool) error {
	segments := maxSegments
	if on {
		segments = 1
	}
	for _, n := range l.Nodes {
		for _, r := range n.RNICs {
			err := n.NS.Do(func() error {
				link, err := netlink.LinkByName(r.Name)
				if err != nil {
					return err
				}
				return netlink.LinkSetGSOMaxSegs(link, segments)
			})
			if err != nil {
				return fmt.Errorf("gso_max_segs of %s on %s: %w", r.Name, n.Name, err)
			}
		}
	}
	return nil
}

// maxSegments is the kernel's default (GSO_MAX_SEGS).
const maxSegments = 65535

func setUp(link string) error {
	l, err := netlink.LinkByName(link)
	if err == nil {
		err = netlink.LinkSetUp(l)
	}
	if err != nil {
		return fmt.Errorf("set %s up: %w", link, err)
	}
	return nil
}

// linkBytes returns what an interface of ns received and sent.
func linkBytes(ns *linux.NetNS, link string) (rx, tx uint64, err error) {
	err = ns.Do(func() error {
		l, err := netlink.LinkByName(link)
		if err != nil {
			return err
		}
		if s := l.Attrs().Statistics; s != nil {
			rx, tx = s.RxBytes, s.TxBytes
		}
		return nil
	})
	if err != nil {
		return 0, 0, fmt.Errorf("counters of %s in %s: %w", link, ns, err)
	}
	return rx, tx, nil
}

// UnderlayBytes returns what the node received and sent on its underlays.
func (n *Node) UnderlayBytes() (rx, tx uint64, err error) {
	for _, r := range n.RNICs {
		r, t, err := linkBytes(n.NS, r.Name)
		if err != nil {
			return 0, 0, err
		}
		rx, tx = rx+r, tx+t
	}
	return rx, tx, nil
}
