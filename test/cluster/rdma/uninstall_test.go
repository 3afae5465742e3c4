// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/smcr-io/kube-smcr/test/cluster/lab/guest"
	"github.com/smcr-io/kube-smcr/test/vm/peer/drive"
)

// uninstall: helm uninstall leaves nothing on nodes with RDMA devices, by what their kernels and files say: no
// object of the devices, table, program, rule, record or plugin. Pods go on, on plain TCP.
func uninstall(s *suite) {
	server, dialer := s.pair(load)
	s.carries(s.hw[0], "rxe0", "rxe1")
	before := s.grows(dialer, s.soFar(dialer), 1)
	out, err := s.p.Uninstall(s.Context())
	s.must(err)
	s.Log(out)
	s.grows(dialer, before, 20)
	for _, n := range s.hw {
		s.eventually("the end of the agents of "+n.Name, func() error {
			pods, err := s.p.AgentPods(s.Context(), n.Name)
			if err == nil && len(pods) > 0 {
				err = fmt.Errorf("%s is there", pods[0].Name)
			}
			return err
		})
		s.clean(n)
	}
	for _, p := range []pod{server, dialer} {
		s.eventually("the end of the annotations of "+p.String(), func() error {
			var o corev1.Pod
			if err := s.get(p.ns, p.name, &o); err != nil {
				return err
			}
			for name, value := range o.Annotations {
				if strings.HasPrefix(name, "smcr.io/") {
					return fmt.Errorf("it has %s=%s", name, value)
				}
			}
			return nil
		})
	}
	s.Cleanup(func() { s.endNamespaces(server.ns, "test-"+hold) }) // other pods on these nodes are older than the next plugin
}

// clean fails the test if something of the product is left on a node. What the node had before is the cluster's.
func (s *suite) clean(n *guest.Node) {
	s.Helper()
	run := func(script string) string {
		s.Helper()
		out, err := n.Guest.Shell(s.Context(), script)
		s.must(err)
		return strings.TrimSpace(out)
	}
	for what, script := range map[string]string{
		"objects of RDMA devices":   "for kind in qp cq mr pd ctx; do rdma resource show $kind | grep -v 'comm \\[' || true; done",
		"tables of nftables":        "nft list tables | grep kube-smcr || true",
		"tables in pods":            "for ns in $(ls /run/netns); do nsenter --net=/run/netns/$ns nft list tables | grep kube-smcr || true; done",
		"rules of routes in pods":   "for ns in $(ls /run/netns); do ip -n $ns rule list | grep -vE '^(0|32766|32767):' || true; done",
		"rules of routes":           "ip rule list | grep -vE '^(0|100|101|32766|32767):' || true", // 100 and 101 are the guests' own
		"accepting sockets' marks":  "grep -v '^0$' /proc/sys/net/ipv4/tcp_fwmark_accept || true",
		"records and sockets":       "find /run/kube-smcr /var/lib/kube-smcr ! -type d 2>/dev/null || true",
		"plugins":                   "ls /opt/cni/bin | grep smcr || true",
		"pins":                      "ls /sys/fs/bpf",
		"eBPF programs and links":   "bpftool -j prog list | grep -oE '\"type\":\"[a-z_]+\"' | grep -v cgroup_device || true; bpftool link list",
		"processes of the product":  "pidof node-agent smcr-cni smcrctl || true",
		"enterprise IDs of agents'": "kernelsmc ueid list | grep -v '" + guest.EID + "' || true",
	} {
		if left := run(script); left != "" {
			s.Errorf("%s on %s are left:\n%s", what, n.Name, left)
		}
	}
	e, _ := n.External()
	lists, err := filepath.Glob(filepath.Join(e.Files, "etc/cni/net.d/*"))
	s.must(err)
	for _, file := range lists {
		want, err := os.ReadFile(file)
		s.must(err)
		if got := run("cat /etc/cni/net.d/" + filepath.Base(file)); got != strings.TrimSpace(string(want)) {
			s.Errorf("%s of %s is\n%s, was\n%s", filepath.Base(file), n.Name, got, want)
		}
	}
	if got := run("ls /etc/cni/net.d"); len(strings.Fields(got)) != len(lists) {
		s.Errorf("%s has the networks %s, and had %q", n.Name, got, lists)
	}
	k, err := drive.Kernel(s.Context(), n.Guest)
	s.must(err)
	if len(k.PNets) > 0 {
		text, _ := json.Marshal(k.PNets)
		s.Errorf("the kernel of %s has the physical networks %s", n.Name, text)
	}
}
