// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os/exec"
	"strings"

	"github.com/vishvananda/netlink"
)

// roce is the UDP port of RoCEv2.
const roce = 4791

// makeFabric makes a namespace with a switch for each network of RNICs.
func (l *Lab) makeFabric() (err error) {
	if l.fabric, err = l.makeNS(fabric); err != nil {
		return err
	}
	for i := range l.cfg.RNICs {
		name := switchName(i)
		err := l.fabric.Do(func() error {
			if err := netlink.LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: name, MTU: l.cfg.MTU}}); err != nil {
				return fmt.Errorf("make switch %s: %w", name, err)
			}
			return setUp(name)
		})
		if err != nil {
			return errors.Join(err, l.removeNS(fabric, l.fabric))
		}
	}
	return nil
}

func switchName(i int) string { return fmt.Sprintf("switch%d", i) }

// connectRNICs joins the nodes' RNICs of a network by a cable or a switch.
func (l *Lab) connectRNICs(i int) error {
	if l.fabric != nil {
		return errors.Join(l.Nodes[0].Plug(i), l.Nodes[1].Plug(i))
	}
	r := l.Nodes[0].RNICs[i]
	attrs := netlink.LinkAttrs{Name: r.Name, HardwareAddr: r.mac}
	if err := l.veth(l.Nodes[0].NS, attrs, l.Nodes[1].NS, r.Name); err != nil {
		return err
	}
	return errors.Join(l.Nodes[0].settleRNIC(i), l.Nodes[1].settleRNIC(i))
}

// settleRNIC gives a new interface its addresses and sets it up.
func (n *Node) settleRNIC(i int) error {
	r := n.RNICs[i]
	err := n.NS.Do(func() error {
		link, err := netlink.LinkByName(r.Name)
		if err != nil {
			return err
		}
		// The same address as before, as of a NIC that comes back: the peer
		// remembers it.
		if err := netlink.LinkSetHardwareAddr(link, r.mac); err != nil {
			return err
		}
		ipnet := &net.IPNet{IP: r.Address.AsSlice(), Mask: net.CIDRMask(r.prefix.Bits(), r.Address.BitLen())}
		if err := netlink.AddrAdd(link, &netlink.Addr{IPNet: ipnet}); err != nil {
			return err
		}
		return netlink.LinkSetUp(link)
	})
	if err != nil {
		return fmt.Errorf("set up %s of %s: %w", r.Name, n.Name, err)
	}
	return nil
}

// SetPort sets the port of an RNIC up or down, as an administrator does.
func (n *Node) SetPort(rnic int, up bool) error {
	name := n.RNICs[rnic].Name
	err := n.NS.Do(func() error {
		link, err := netlink.LinkByName(name)
		if err == nil && up {
			return netlink.LinkSetUp(link)
		} else if err == nil {
			return netlink.LinkSetDown(link)
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("set %s of %s up, %t: %w", name, n.Name, up, err)
	}
	return nil
}

// Unplug takes an RNIC out of the node, with its addresses. Only of a switched
// network, because the other end of a cable would vanish too.
func (n *Node) Unplug(rnic int) error {
	name := n.RNICs[rnic].Name
	if n.lab.fabric == nil {
		return fmt.Errorf("unplug %s of %s: the network is not switched", name, n.Name)
	}
	err := n.NS.Do(func() error {
		link, err := netlink.LinkByName(name)
		if err == nil {
			err = netlink.LinkDel(link)
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("unplug %s of %s: %w", name, n.Name, err)
	}
	return nil
}

// Plug puts an RNIC into the node, with its addresses, and its port up.
func (n *Node) Plug(rnic int) error {
	l, r := n.lab, n.RNICs[rnic]
	if l.fabric == nil {
		return fmt.Errorf("plug %s into %s: the network is not switched", r.Name, n.Name)
	}
	port := fmt.Sprintf("%s-%d", n.Name, rnic)
	if err := l.veth(n.NS, netlink.LinkAttrs{Name: r.Name, HardwareAddr: r.mac}, l.fabric, port); err != nil {
		return err
	}
	err := l.fabric.Do(func() error {
		br, err := netlink.LinkByName(switchName(rnic))
		if err != nil {
			return err
		}
		link, err := netlink.LinkByName(port)
		if err != nil {
			return err
		}
		if err := netlink.LinkSetMaster(link, br); err != nil {
			return err
		}
		return netlink.LinkSetUp(link)
	})
	if err != nil {
		return fmt.Errorf("plug %s into the switch: %w", r.Name, err)
	}
	return n.settleRNIC(rnic)
}

// Deafen makes RoCE packets that arrive at an RNIC vanish, or ends that. Ports
// and addresses stay as they are: nobody is told.
func (n *Node) Deafen(ctx context.Context, rnic int, deaf bool) error {
	name := n.RNICs[rnic].Name
	table := "inet lab-deaf-" + name
	// add before delete makes it the same whether there is one or not.
	rules := fmt.Sprintf("add table %[1]s\ndelete table %[1]s\n", table)
	if deaf {
		rules += fmt.Sprintf("table %s { chain in { type filter hook prerouting priority -300; iifname %q udp dport %d drop; }; }\n", table, name, roce)
	}
	ctx, cancel := context.WithTimeout(ctx, toggleTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, "nft", "-f", "-")
	cmd.Stdin = strings.NewReader(rules)
	var said strings.Builder
	cmd.Stderr = &said
	err := n.NS.Do(cmd.Start)
	if err == nil {
		err = cmd.Wait()
	}
	if err != nil {
		return fmt.Errorf("deafen %s of %s, %t: %w: %s", name, n.Name, deaf, err, strings.TrimSpace(said.String()))
	}
	return nil
}
