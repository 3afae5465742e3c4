// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
)

// The address plan is the same in each cluster: nothing of it is visible
// outside of the cluster's namespaces. N is the number of a node, from 1 on.
//
//	10.250.0.1      control plane, eth0 of the machines' first network
//	10.250.0.(10+N) eth0 of node N: Kubernetes, the pods' traffic, and RoCE
//	10.251.0.(10+N) eth1 of node N: a second network for RoCE
//	10.244.N.0/24   pods of node N
//	10.96.0.0/16    services
//
// With IPv6 the same again: fd00:250::, fd00:251::, fd00:10:244:N::/64,
// fd00:10:96::/112.

// networks are the networks between the machines.
var networks = [...]struct {
	bridge, nic string
	octet       byte // 10.OCTET.0.0/24
}{
	{bridge: "br0", nic: "eth0", octet: 250},
	{bridge: "br1", nic: "eth1", octet: 251},
}

const (
	controlPlaneHost = 1
	podCIDR4         = "10.244.0.0/16"
	podCIDR6         = "fd00:10:244::/48"
	serviceCIDR4     = "10.96.0.0/16"
	serviceCIDR6     = "fd00:10:96::/112"
	apiServerVIP     = "10.96.0.1"
	apiServerPort    = "6443"
)

func nodeHost(n int) byte { return byte(10 + n) }

func address4(network int, host byte) netip.Prefix {
	return netip.PrefixFrom(netip.AddrFrom4([4]byte{10, networks[network].octet, 0, host}), 24)
}

func address6(network int, host byte) netip.Prefix {
	return netip.MustParsePrefix(fmt.Sprintf("fd00:%d::%d/64", networks[network].octet, host))
}

// hardware is the MAC address of a machine: it is the same after a reboot, so
// that the others' neighbour entries hold.
func hardware(network int, host byte) net.HardwareAddr {
	return net.HardwareAddr{0x02, 0x00, 10, networks[network].octet, 0, host}
}

func pods4(n int) netip.Prefix {
	return netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 244, byte(n), 0}), 24)
}

func pods6(n int) netip.Prefix {
	return netip.MustParsePrefix(fmt.Sprintf("fd00:10:244:%d::/64", n))
}

// haveIPv6 says whether this machine has IPv6: then the cluster has two
// families, IPv4 first.
func haveIPv6() bool {
	if _, err := os.Stat("/proc/net/if_inet6"); err != nil {
		return false
	}
	off, err := os.ReadFile("/proc/sys/net/ipv6/conf/default/disable_ipv6")
	return err == nil && strings.TrimSpace(string(off)) == "0"
}
