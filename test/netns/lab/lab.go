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

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"

	"github.com/smcr-io/kube-smcr/internal/linux"
)

// Names of the interfaces inside a node.
const (
	Underlay = "underlay" // carries the RoCE packets
	Trunk    = "trunk"    // joins the bridges, carries the pods' TCP
	bridge   = "pods0"
	podIf    = "eth0"
)

// Config says how to build a lab. The zero value is a good lab.
type Config struct {
	// MTU of all links; 9000 if 0.
	MTU int
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

	mtu        int
	pluginDirs []string
	undo       linux.Undo
}

// Node is a namespace that stands for a machine.
type Node struct {
	// Name is node1 or node2.
	Name string
	NS   *linux.NetNS
	// Address is the node's address on the underlay.
	Address netip.Addr
	// Dir is the node's directory below the lab's.
	Dir string

	lab   *Lab
	index int
}

// Prefixes of the pods' network.
var (
	podPrefix4      = netip.MustParsePrefix("10.89.0.0/24")
	podPrefix6      = netip.MustParsePrefix("fd89::/64")
	underlayAddress = [2]string{"192.168.89.1/24", "192.168.89.2/24"}
)

// PodPrefixes returns the subnets that all pods share, of IPv4 and IPv6.
func PodPrefixes() []netip.Prefix { return []netip.Prefix{podPrefix4, podPrefix6} }

// New builds a lab, or leaves nothing behind.
func New(cfg Config) (*Lab, error) {
	l := &Lab{
		Prefix: fmt.Sprintf("%s%d-%04x", namePrefix, os.Getpid(), rand.Uint32()&0xffff),
		mtu:    cfg.MTU,
	}
	for _, d := range cfg.PluginDirs {
		abs, err := filepath.Abs(d)
		if err != nil {
			return nil, fmt.Errorf("lab: %w", err)
		}
		l.pluginDirs = append(l.pluginDirs, abs)
	}
	if l.mtu == 0 {
		l.mtu = defaultMTU
	}
	steps := []linux.Step{{Name: "make directory", Do: l.makeDir, Undo: func() error { return os.RemoveAll(l.Dir) }}}
	for i := range l.Nodes {
		n := &Node{Name: fmt.Sprintf("node%d", i+1), lab: l, index: i}
		l.Nodes[i] = n
		steps = append(steps, linux.Step{Name: "make " + n.Name, Do: n.build, Undo: n.remove})
	}
	steps = append(steps,
		linux.Step{Name: "connect the nodes with the underlay", Do: func() error { return l.connect(Underlay) }},
		linux.Step{Name: "connect the nodes with the trunk", Do: func() error { return l.connect(Trunk) }},
		linux.Step{Name: "make bridges", Do: func() error {
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
func (l *Lab) Close() error { return l.undo.Back() }

// onClose remembers what Close is to take back.
func (l *Lab) onClose(what string, f func() error) {
	// A step that does nothing cannot fail and take back everything.
	_ = l.undo.Run(linux.Step{Name: what, Do: func() error { return nil }, Undo: f})
}

func (l *Lab) makeDir() error {
	dir, err := os.MkdirTemp("", l.Prefix+"-")
	if err != nil {
		return err
	}
	l.Dir = dir
	return os.Chmod(dir, 0o755)
}

func (n *Node) build() error {
	n.Dir = filepath.Join(n.lab.Dir, n.Name)
	if err := os.Mkdir(n.Dir, 0o755); err != nil {
		return err
	}
	addr, err := netip.ParsePrefix(underlayAddress[n.index])
	if err != nil {
		return err
	}
	n.Address = addr.Addr()
	n.NS, err = n.lab.makeNS(n.Name)
	return err
}

func (n *Node) remove() error { return n.lab.removeNS(n.Name, n.NS) }

func (l *Lab) nsName(name string) string { return l.Prefix + "-" + name }

// makeNS makes a named namespace with loopback up.
func (l *Lab) makeNS(name string) (*linux.NetNS, error) {
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends here
		h, err := netns.NewNamed(l.nsName(name))
		if err == nil {
			err = h.Close()
		}
		done <- err
	}()
	if err := <-done; err != nil {
		return nil, fmt.Errorf("make network namespace %s: %w", l.nsName(name), err)
	}
	ns, err := linux.OpenNetNS(filepath.Join(nsDir, l.nsName(name)))
	if err == nil {
		err = ns.Do(func() error { return setUp("lo") })
	}
	if err != nil {
		return nil, errors.Join(err, l.removeNS(name, ns))
	}
	return ns, nil
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
func (l *Lab) connect(name string) (err error) {
	peer, err := os.Open(l.Nodes[1].NS.Path())
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, peer.Close()) }()
	err = l.Nodes[0].NS.Do(func() error {
		return netlink.LinkAdd(&netlink.Veth{
			LinkAttrs: netlink.LinkAttrs{Name: name, MTU: l.mtu},
			PeerName:  name, PeerNamespace: netlink.NsFd(int(peer.Fd())), PeerMTU: uint32(l.mtu),
		})
	})
	if err != nil {
		return fmt.Errorf("make veth %s: %w", name, err)
	}
	for i, n := range l.Nodes {
		err := n.NS.Do(func() error {
			if name == Underlay {
				if err := addAddress(name, underlayAddress[i]); err != nil {
					return err
				}
			}
			return setUp(name)
		})
		if err != nil {
			return fmt.Errorf("%s of %s: %w", name, n.Name, err)
		}
	}
	return nil
}

func (n *Node) makeBridge() error {
	return n.NS.Do(func() error {
		br := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: bridge, MTU: n.lab.mtu}}
		if err := netlink.LinkAdd(br); err != nil {
			return fmt.Errorf("make bridge %s: %w", bridge, err)
		}
		trunk, err := netlink.LinkByName(Trunk)
		if err != nil {
			return fmt.Errorf("find %s: %w", Trunk, err)
		}
		if err := netlink.LinkSetMaster(trunk, br); err != nil {
			return fmt.Errorf("put %s into the bridge: %w", Trunk, err)
		}
		return setUp(bridge)
	})
}

// SplitSegments makes the underlay carry every packet by itself, as a wire
// does, instead of whole batches of them: a capture then shows packets. It
// costs speed, so it is switched off again.
func (l *Lab) SplitSegments(on bool) error {
	segments := maxSegments
	if on {
		segments = 1
	}
	for _, n := range l.Nodes {
		err := n.NS.Do(func() error {
			link, err := netlink.LinkByName(Underlay)
			if err != nil {
				return err
			}
			return netlink.LinkSetGSOMaxSegs(link, segments)
		})
		if err != nil {
			return fmt.Errorf("gso_max_segs of %s on %s: %w", Underlay, n.Name, err)
		}
	}
	return nil
}

// maxSegments is the kernel's default (GSO_MAX_SEGS).
const maxSegments = 65535

func addAddress(link, prefix string) error {
	l, err := netlink.LinkByName(link)
	if err != nil {
		return fmt.Errorf("find %s: %w", link, err)
	}
	ip, ipnet, err := net.ParseCIDR(prefix)
	if err != nil {
		return err
	}
	ipnet.IP = ip
	if err := netlink.AddrAdd(l, &netlink.Addr{IPNet: ipnet}); err != nil {
		return fmt.Errorf("give %s the address %s: %w", link, prefix, err)
	}
	return nil
}

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

// UnderlayBytes returns what the node received and sent on the underlay.
func (n *Node) UnderlayBytes() (rx, tx uint64, err error) { return linkBytes(n.NS, Underlay) }
