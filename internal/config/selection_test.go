// SPDX-License-Identifier: Apache-2.0

package config

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// The interfaces of a pod have one redirection: a policy counts once, however many of them it selects, and what an exclusion takes
// from the policy of one is left of the policy of another.
func TestNode_interfaces(t *testing.T) {
	eth0, net1 := Pod{Name: "a", Interface: "eth0"}, Pod{Name: "a", Interface: "net1"}
	n := mustParse(t, minimal+"policies:\n- {name: p, mode: Required}\n")
	for i := range 200 {
		n.Policies[0].Peers = append(n.Policies[0].Peers, netip.MustParsePrefix(fmt.Sprintf("10.0.%d.%d/32", i/100, 2*(i%100))))
		n.Policies[0].Ports = append(n.Policies[0].Ports, PortRange{uint16(2 * i), uint16(2 * i)})
	}
	ports := n.Policies[0].Ports
	for name, inbound := range map[string]func(...Pod) ([]PortRange, bool){"of all": n.InboundPorts, "required": n.InboundPortsRequired} {
		if got, all := inbound(eth0, net1); len(got) != len(ports) || all {
			t.Errorf("ports %s: %d of %d, all %t", name, len(got), len(ports), all)
		}
	}
	n.Policies[0].Ports = ports[:2]
	exactly, err := n.Exactly(eth0, net1)
	if err != nil {
		t.Error(err)
	}
	for name, got := range map[string][]Selection{"Outbound": n.Outbound(eth0, net1), "OutboundRequired": n.OutboundRequired(eth0, net1), "Exactly": exactly} {
		if diff := cmp.Diff(n.Outbound(eth0), got, comparers); diff != "" || len(got) != 200 {
			t.Errorf("%s has %d selections (-those of one interface +got):\n%s", name, len(got), diff)
		}
	}

	n = mustParse(t, minimal+"policies:\n"+
		"- {name: a, pods: {interfaces: [eth0]}, peers: {cidrs: [10.0.0.0/8], except: [10.1.0.0/16]}}\n"+
		"- {name: b, pods: {interfaces: [net1]}, peers: {cidrs: [10.1.2.0/24]}}\n")
	if sel := n.Outbound(eth0, net1); !diverted(sel, netip.MustParseAddrPort("10.1.2.3:80")) || diverted(sel, netip.MustParseAddrPort("10.1.3.3:80")) {
		t.Errorf("selections %v", sel)
	}
}
