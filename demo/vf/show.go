// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"text/tabwriter"

	types100 "github.com/containernetworking/cni/pkg/types/100"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/test/vm/lab"
	"github.com/smcr-io/kube-smcr/test/vm/lab/image"
	"github.com/smcr-io/kube-smcr/test/vm/vf/report"
)

// pod is the one on each node.
const pod = "web"

// kernels let the VFs of the first node move into its pod, and keep those of the
// second in the host.
var kernels = [...]image.Kernel{image.NetNS, image.SMC}

// plugin is the configuration of smcr-cni as Multus has it.
const plugin = `{
  "type": "smcr-cni", "capabilities": {"deviceID": true},
  "vlan": 100, "mtu": 4000, "trust": "on",
  "ipam": {"type": "host-local", "ranges": [[{"subnet": "10.1.0.0/24", "rangeStart": "10.1.0.%[1]d0", "rangeEnd": "10.1.0.%[1]d9"}]]}
}`

// agentConf is the configuration of an agent that knows no device for all pods.
const agentConf = `node:
  holdSYNs: false # emulated, a rendezvous may take longer than a SYN is held
  name: %s
  devices: []
  eids: [SMCV2-DEFAULT-UEID]
  metricsAddress: none
policies:
- {name: all}
`

// prepare gives each node what its administrator does once. The VFs of the second
// have an address in the host, which RDMA has its own from.
const prepare = `modprobe -a ib_uverbs rdma_rxe ipvlan
n=0
for vf in pf0v0 pf1v0; do
	ip link set $vf mtu 4200 up
	rdma link add rxe$n type rxe netdev $vf
	[ $(hostname) = g0 ] || ip address add 10.1.0.10$n/24 dev $vf noprefixroute
	n=$((n+1))
done
ip netns add ` + pod + `; ip -n ` + pod + ` link set lo up
mkdir -p ` + dataDir

// serve starts the agent, and looks until it answers or ends.
const serve = `node-agent --config /host/%[1]s.yaml >/run/agent.log 2>&1 </dev/null &
while kill -0 $! 2>/dev/null; do ! smcrctl status >/dev/null 2>&1 || exit 0; sleep 0.1; done; cat /run/agent.log >&2; exit 1`

// wired is a VF of a pod.
type wired struct {
	node            *lab.Guest
	ifName, pf, pci string
	address         string
	add, del        float64 // seconds
}

// story is what parts hand on.
type story struct {
	*demo
	before [len(kernels)]report.Host
	vfs    [len(kernels)][2]wired // of the pod of each node
}

func (d *demo) show(ctx context.Context) error {
	s := &story{demo: d}
	for _, part := range []struct {
		title string
		do    func(context.Context) error
	}{
		{"Two nodes with two SR-IOV NICs each", s.nodes},
		{"A pod on each node gets two VFs", s.wire},
		{"Its programs do not know of SMC-R", s.traffic},
		{"A VF is lost", s.lose},
		{"The pods end", s.end},
	} {
		d.Title("%s", part.title)
		if err := part.do(ctx); err != nil {
			return fmt.Errorf("%s: %w", part.title, err)
		}
	}
	return nil
}

func (s *story) nodes(ctx context.Context) error {
	if err := s.up(ctx, lab.Config{PFs: 2, NUMA: true, Kernels: kernels[:]}, 2); err != nil {
		return err
	}
	err := s.each(func(i int, g *lab.Guest) error {
		if _, err := g.Shell(ctx, prepare); err != nil {
			return err
		}
		if err := s.write(g.Name()+".yaml", fmt.Sprintf(agentConf, g.Name())); err != nil {
			return err
		}
		if err := s.network(g.Name(), fmt.Sprintf(plugin, i+1)); err != nil {
			return err
		}
		var err error
		if s.before[i], err = host(ctx, g); err != nil {
			return err
		}
		_, err = g.Shell(ctx, fmt.Sprintf(serve, g.Name()))
		return err
	})
	if err != nil {
		return err
	}
	if _, err := s.see(ctx, 0, "smcrctl devices | grep -A9 'FOR PODS'"); err != nil {
		return err
	}
	for i, want := range []string{"move into pods", "stay in the host"} {
		out, err := s.lab.Guest(i).Shell(ctx, "uname -r; smcrctl preflight | grep -i 'vf' || true")
		if err != nil {
			return err
		}
		release, finding, _ := strings.Cut(out, "\n")
		s.Say("%s: Linux %s: VFs with soft RoCE %s.\n%s", s.lab.Guest(i).Name(), release, want, strings.TrimRight(finding, "\n"))
	}
	return nil
}

// wire gives the pods their VFs, and shows how they are wired and what the agents make of them.
func (s *story) wire(ctx context.Context) error {
	s.Say("The network, as in a NetworkAttachmentDefinition; Multus adds the deviceID:\n\n%s\n", fmt.Sprintf(plugin, 1))
	if err := s.addVFs(ctx); err != nil {
		return err
	}
	for i := range s.lab.Guests() {
		g := s.lab.Guest(i)
		out, err := s.see(ctx, i, "ip link show pf0 | grep 'vf 0'; ip -n "+pod+" -br address | grep net")
		if err != nil {
			return err
		}
		s.Check(g.Name()+"'s VF is in the VLAN, and trusted", strings.Contains(out, "vlan 100") && strings.Contains(out, "trust on"), "the PF says so")
		child := strings.Contains(out, "net1@")
		if kernels[i] == image.NetNS {
			s.Check("the VF itself is in g0's pod", !child, "its soft RoCE was made again there")
		} else {
			s.Check("g1's pod has an ipvlan child", child, "the VF stays in the host, where soft RoCE works with this kernel")
		}
	}
	s.awaitServed(ctx)
	return nil
}

// addVFs gives the pods their VFs by calls of ADD.
func (s *story) addVFs(ctx context.Context) error {
	return s.each(func(i int, g *lab.Guest) error {
		for n := range s.vfs[i] {
			pf := g.PF(n)
			out, err := g.Shell(ctx, "basename $(readlink /sys/class/net/"+pf+"/device/virtfn0)")
			if err != nil {
				return err
			}
			w := wired{node: g, ifName: fmt.Sprintf("net%d", n+1), pf: pf, pci: strings.TrimSpace(out)}
			c, err := call(ctx, g, w.ifName, w.pci, "add")
			if err != nil {
				return err
			}
			var result types100.Result
			if err := json.Unmarshal(c.Result, &result); err != nil || len(result.IPs) == 0 {
				return fmt.Errorf("the result of ADD has no address: %s: %w", c.Result, err)
			}
			w.add, w.address = c.Seconds, result.IPs[0].Address.IP.String()
			s.vfs[i][n] = w
		}
		return nil
	})
}

// awaitServed checks that each agent serves its pod on the pod's VFs.
func (s *story) awaitServed(ctx context.Context) {
	for i := range s.lab.Guests() {
		g := s.lab.Guest(i)
		s.eventually(ctx, "the agent of "+g.Name()+" serves the pod on its VFs, and on nothing else", func() (string, error) {
			d, err := ask[struct {
				ForPods []agentapi.PodDevice `json:"forPods"`
			}](ctx, g, "devices")
			if err != nil {
				return "", err
			}
			var used []string
			for _, p := range d.ForPods {
				if len(p.Pods) > 0 && p.Used != nil {
					used = append(used, p.ID)
				}
			}
			if len(used) != len(s.vfs[i]) {
				err = fmt.Errorf("it uses %v", used)
			}
			return strings.Join(used, ", "), err
		})
	}
}

func (s *story) traffic(ctx context.Context) error {
	const server = "ip netns exec " + pod + ` redis-server --bind 0.0.0.0 --save '' --protected-mode no >/run/redis.log 2>&1 </dev/null &
		for i in $(seq 100); do ip netns exec ` + pod + ` redis-cli ping 2>/dev/null | grep -q PONG && exit 0; sleep 0.1; done; cat /run/redis.log; exit 1`
	if _, err := s.lab.Guest(0).Shell(ctx, server); err != nil {
		return err
	}
	s.Say("redis runs in g0's pod, its benchmark in g1's:\n")
	client := s.lab.Guest(1)
	if _, err := s.see(ctx, 1, "ip netns exec "+pod+" redis-benchmark -h "+s.vfs[0][0].address+" -n 100 -c 4 -d 1000 -t set,get -q | tr '\\r' '\\n' | grep requests"); err != nil {
		return err
	}
	var g agentapi.LinkGroup
	s.eventually(ctx, "the pods share one link group with a link on each NIC", func() (string, error) {
		var err error
		g, err = group(ctx, client, "SYMMETRIC")
		return "either NIC may fail", err
	})
	if _, err := s.see(ctx, 1, "smcrctl links"); err != nil {
		return err
	}
	on := make([]string, 0, len(g.Links))
	for _, l := range g.Links {
		on = append(on, l.PCI)
	}
	s.Check("its links are on the pod's VFs", strings.Join(on, " ") == s.vfs[1][0].pci+" "+s.vfs[1][1].pci, "%s", strings.Join(on, " and "))
	st, err := ask[agentapi.Status](ctx, client, "status")
	if err != nil {
		return err
	}
	s.Check("all connections were on SMC-R", st.Conns.TotalSMCR > 0 && st.Conns.TotalTCP == 0, "%d on SMC-R, %d on TCP", st.Conns.TotalSMCR, st.Conns.TotalTCP)
	return nil
}

// group is the pod's link group, if it is as redundant as that.
func group(ctx context.Context, g *lab.Guest, redundancy string) (agentapi.LinkGroup, error) {
	ls, err := ask[agentapi.Links](ctx, g, "links")
	if err != nil {
		return agentapi.LinkGroup{}, err
	}
	if len(ls.LinkGroups) != 1 || ls.LinkGroups[0].Redundancy != redundancy {
		return agentapi.LinkGroup{}, fmt.Errorf("there is no group that is %s: %+v", redundancy, ls.LinkGroups)
	}
	return ls.LinkGroups[0], nil
}

func (s *story) lose(ctx context.Context) error {
	const pings, conns = 150, 4
	server, lost := s.lab.Guest(0), s.vfs[0][1]
	s.Say("%d connections ask redis %d times each, while the second VF is taken out of g0's pod:\n", conns, pings)
	load, err := s.lab.Guest(1).Start(ctx, "ip", "netns", "exec", pod, "bash", "-c", fmt.Sprintf(
		"for c in $(seq %d); do (for i in $(seq %d); do echo PING; sleep 0.02; done | redis-cli -h %s) & done | sort | uniq -c", conns, pings, s.vfs[0][0].address))
	if err != nil {
		return err
	}
	s.eventually(ctx, "both links carry connections", func() (string, error) {
		g, err := group(ctx, server, "SYMMETRIC")
		if err == nil && slices.ContainsFunc(g.Links, func(l agentapi.Link) bool { return l.Conns == 0 }) {
			err = fmt.Errorf("links %+v", g.Links)
		}
		return fmt.Sprintf("%d in all", g.Conns), err
	})
	if _, err := s.see(ctx, 0, "ip -n "+pod+" link set "+lost.ifName+" netns 1"); err != nil {
		return err
	}
	s.eventually(ctx, "the group is on the other NIC", func() (string, error) {
		g, err := group(ctx, server, "ASYMMETRIC LOCAL")
		if err == nil && slices.ContainsFunc(g.Links, func(l agentapi.Link) bool { return l.PCI == lost.pci }) {
			err = fmt.Errorf("links %+v", g.Links)
		}
		return "both links end there, as the peer still has two", err
	})
	var answers strings.Builder
	err = load.Stream(nil, &answers, &answers)
	s.Check("every request was answered", err == nil && strings.Join(strings.Fields(answers.String()), " ") == fmt.Sprintf("%d PONG", conns*pings), "%s", answers.String())
	return nil
}

func (s *story) end(ctx context.Context) error {
	err := s.each(func(i int, g *lab.Guest) error {
		for n := range s.vfs[i] {
			w := &s.vfs[i][n]
			c, err := call(ctx, g, w.ifName, w.pci, "del")
			if err != nil {
				return err
			}
			w.del = c.Seconds
		}
		return nil
	})
	if err != nil {
		return err
	}
	w := tabwriter.NewWriter(s.Out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "NODE\tINTERFACE\tADDRESS\tVF\tPF\tADD\tDEL")
	for i := range s.vfs {
		for _, v := range s.vfs[i] {
			fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%.1f s\t%.1f s\n", v.node.Name(), v.ifName, v.address, v.pci, v.pf, v.add, v.del)
		}
	}
	if err := w.Flush(); err != nil {
		return err
	}
	s.Say("")
	for i := range s.lab.Guests() {
		g := s.lab.Guest(i)
		s.eventually(ctx, g.Name()+" is as before", func() (string, error) {
			now, err := host(ctx, g)
			if diffs := s.before[i].Differences(now); err == nil && len(diffs) > 0 {
				err = fmt.Errorf("%s", strings.Join(diffs, "; "))
			}
			return "interfaces, VFs and their settings, RDMA devices, addresses", err
		})
	}
	return nil
}
