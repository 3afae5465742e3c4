// SPDX-License-Identifier: Apache-2.0

package kernelpath

import (
	"errors"
	"fmt"
	"net/netip"
	"regexp"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/test/vm/lab"
	"github.com/smcr-io/kube-smcr/test/vm/peer/drive"
)

// veths: unmodified programs of pods that have a veth only, in the ways that CNIs wire them: behind a bridge, with a network of the
// node's own; and with an address for itself, and a route to it. Another pod of the client's node is never a peer.
func veths(t *testing.T, l *lab.Lab) {
	build(t, l)
	for i := range l.Guests() { // policies select the pods of other scenarios, too
		_, err := l.Guest(i).Shell(t.Context(), "for ns in $(ls /run/netns); do kill $(ip netns pids $ns) || true; done; ip -all netns delete; rm -rf /run/smcr /sys/fs/bpf/kube-smcr")
		if err != nil {
			t.Fatal(err)
		}
	}
	b := &vethBed{bed: bed{newBridged(t, l.Guest(0), "db", "10.244.0.50"), newRouted(t, l.Guest(1), "app", "10.244.1.51")}}
	b.beside = newRouted(t, l.Guest(1), "beside", "10.244.1.52")
	b.odd = newRouted(t, l.Guest(1), "odd", l.Guest(1).Addr(0).String())
	for n, via := range map[*node]*node{b.server: b.client, b.client: b.server} {
		n.sh(t, fmt.Sprintf("sysctl -qw net.ipv4.ip_forward=1; ip route add %s via %s", netip.PrefixFrom(netip.MustParseAddr(via.addr), 24).Masked(), via.Addr(0)))
	}
	b.before = map[*node]string{b.server: b.server.wiring(t), b.client: b.client.wiring(t)}
	for _, sub := range []struct {
		name string
		run  func(*vethBed, *testing.T)
	}{
		{"notAsked", (*vethBed).notAsked},
		{"attached", (*vethBed).attached},
		{"wiring", (*vethBed).wiring},
		{"policy", (*vethBed).policy},
		{"sameNode", (*vethBed).sameNode},
		{"oddAddress", (*vethBed).oddAddress},
		{"agentKilled", (*vethBed).agentKilled},
		{"linkDown", (*vethBed).linkDown},
		{"podGone", (*vethBed).podGone},
		{"detached", (*vethBed).detached},
	} {
		t.Run(sub.name, func(t *testing.T) { sub.run(b, t) })
	}
}

// vethBed is two nodes, each with a pod that has a veth.
type vethBed struct {
	bed
	beside, odd *node // pods of the client's node; the address of the second is the node's, too
	before      map[*node]string
}

// newBridged is a guest whose pod is behind a bridge.
func newBridged(t *testing.T, g *lab.Guest, pod, addr string) *node {
	t.Helper()
	n := &node{Guest: g, pod: pod, addr: addr}
	router := netip.PrefixFrom(netip.MustParseAddr(addr), 24).Masked().Addr().Next()
	n.wire(t, fmt.Sprintf(`ip link add cni0 mtu 9000 type bridge; ip address add %[2]s/24 dev cni0; ip link set cni0 up
		ip link set host-%[1]s master cni0
		ip -n %[1]s address add %[3]s/24 dev eth0; ip -n %[1]s route add default via %[2]s`, pod, router, addr))
	return n
}

// newRouted is a guest whose pod has a route of its own.
func newRouted(t *testing.T, g *lab.Guest, pod, addr string) *node {
	t.Helper()
	n := &node{Guest: g, pod: pod, addr: addr}
	n.wire(t, fmt.Sprintf(`ip route add %[2]s dev host-%[1]s scope link metric 9
		ip -n %[1]s address add %[2]s/32 dev eth0; ip -n %[1]s route add 169.254.1.1 dev eth0 scope link
		ip -n %[1]s neigh add 169.254.1.1 lladdr $(cat /sys/class/net/host-%[1]s/address) dev eth0 nud permanent; ip -n %[1]s route add default via 169.254.1.1`, pod, addr))
	return n
}

// wire makes the pod with its veth, and attaches it.
func (n *node) wire(t *testing.T, script string) {
	t.Helper()
	n.sh(t, "kernelsmc ueid flush; kernelsmc pnet flush; "+fmt.Sprintf(`ip netns add %[1]s
		ip link add host-%[1]s mtu 9000 type veth peer name eth0 mtu 9000 netns %[1]s
		ip link set host-%[1]s up; ip -n %[1]s link set lo up; ip -n %[1]s link set eth0 up
		`, n.pod)+script)
	if err := n.asPod().CNI(t.Context(), "ADD"); err != nil {
		t.Fatal(err)
	}
}

// wiring is what the node's network has, and the pod's, but for what changes by itself.
func (n *node) wiring(t *testing.T) string {
	t.Helper()
	out := n.sh(t, fmt.Sprintf(`ip -o -4 address; ip -o link; ip rule; ip -4 route show table all; nft list tables; kernelsmc pnet list; ls /run/smcr | grep -v -e sock -e lock
		nsenter --net=/run/netns/%s sh -c 'ip -o -4 address; ip rule; ip -4 route show table all; kernelsmc pnet list'`, n.pod))
	out = regexp.MustCompile(`(valid_lft|preferred_lft) \S+`).ReplaceAllString(out, "")
	out = strings.ReplaceAll(out, "state UNKNOWN", "state UP") // a new bridge's, until the kernel has looked at its ports
	return regexp.MustCompile(` +\n`).ReplaceAllString(out, "\n")
}

// configureVeth writes the configuration.
func (n *node) configureVeth(t *testing.T, veth bool, policies string) {
	t.Helper()
	policies = strings.ReplaceAll(policies, "10.0.0.0/24", "10.0.0.0/8")
	text := strings.Replace(agentConfig, "policies:", fmt.Sprintf("  kernelPath: {veth: %t}\npolicies:", veth), 1)
	n.sh(t, "mkdir -p /run/smcr; cat >/run/kp.yaml <<'EOF'\n"+fmt.Sprintf(text, n.Name(), policies)+"EOF\n")
}

// load keeps plain TCP connections busy, between pods and from outside of them, until stop is called. stop fails the test if one of them
// broke, or if one could not be opened meanwhile.
func (b *vethBed) load(t *testing.T) (stop func(t *testing.T)) {
	t.Helper()
	cli := fmt.Sprintf("redis-cli -h %s -p %d", b.server.addr, unselected)
	for n, by := range map[*node][]string{b.server: {cli}, b.client: {cli, b.client.inPod(cli)}} {
		n.sh(t, "rm -f /run/load-*; mkdir -p /run/loads; touch /run/load")
		for i, command := range by {
			n.sh(t, fmt.Sprintf(`touch /run/loads/long-%[2]d /run/loads/short-%[2]d
				(trap 'rm /run/loads/long-%[2]d' EXIT; while [ -e /run/load ]; do echo PING; sleep 0.01; done | %[1]s >/run/load-long-%[2]d 2>&1) </dev/null >/dev/null 2>&1 &
				(trap 'rm /run/loads/short-%[2]d' EXIT; while [ -e /run/load ]; do timeout 20 %[1]s PING; sleep 0.1; done >/run/load-short-%[2]d 2>&1) </dev/null >/dev/null 2>&1 &`, command, i))
		}
	}
	return func(t *testing.T) {
		t.Helper()
		for n, files := range map[*node]int{b.server: 2, b.client: 4} {
			out := n.sh(t, "rm /run/load; while ls /run/loads | grep -q .; do sleep 0.1; done; for f in /run/load-*; do echo $f $(sort $f | uniq -c | sort -rn); done")
			t.Logf("%s: answers: %s", n.Name(), out)
			if all := regexp.MustCompile(`(?m)^\S+ [0-9]+ PONG$`).FindAllString(out, -1); len(all) != files {
				t.Errorf("%s: TCP connections were disturbed: %s", n.Name(), out)
			}
		}
	}
}

// notAsked: without the setting such a pod is not fit, and the agent names the setting.
func (b *vethBed) notAsked(t *testing.T) {
	b.startRedis(t)
	for _, n := range []*node{b.server, b.client} {
		n.sh(t, "ping -c 1 -W 5 "+b.server.addr)
	}
	b.client.sh(t, b.client.inPod(fmt.Sprintf("redis-cli -h %s -p %d PING", b.server.addr, unselected)))
	b.server.configureVeth(t, false, kernelPolicy(selected))
	b.server.startAgent(t)
	b.server.awaitPod(t, "the pod is not fit", func(a agentapi.Attachment) bool {
		return a.State == agentapi.StateFailed && strings.Contains(a.Detail, "kernelPath.veth")
	})
	b.awaitAsBefore(t)
	b.server.endAgent(t, unix.SIGTERM)
}

// awaitAsBefore waits until the server's node is wired as before: its agent tidies after a pod shows what it became.
func (b *vethBed) awaitAsBefore(t *testing.T) {
	t.Helper()
	b.server.eventually(t, "the node is as before", func() error {
		if got := b.server.wiring(t); got != b.before[b.server] {
			return fmt.Errorf("it has %s\nbefore it had %s", got, b.before[b.server])
		}
		return nil
	})
}

// attached: with it connections are on SMC-R, from the first one on, and none of TCP breaks meanwhile.
func (b *vethBed) attached(t *testing.T) {
	stop := b.load(t)
	b.server.configureVeth(t, true, kernelPolicy(selected))
	b.client.configureVeth(t, true, kernelPolicy(selected, clientOnly))
	b.startAgents(t)
	stop(t)
	stop = b.load(t)
	b.server.startRedis(t, selected)
	b.server.startRedis(t, clientOnly)
	b.expect(t, map[int]bool{selected: true})
	b.expect(t, map[int]bool{selected: true})
	stop(t)
}

// wiring: what is there is that which is needed. Nobody answers for the pod's address on other segments.
func (b *vethBed) wiring(t *testing.T) {
	for _, n := range []*node{b.server, b.client} {
		out := n.sh(t, "ip -o -4 address show dev kube-smcr-veth; ip -o link show dev kube-smcr-veth")
		if !strings.Contains(out, n.addr+"/32 scope host") || !strings.Contains(out, "state DOWN") {
			t.Errorf("%s: %s", n.Name(), out)
		}
		if out := n.sh(t, "ip route show table local; ip route show table all proto 226"); strings.Contains(out, n.addr) {
			t.Errorf("%s: routes %s", n.Name(), out)
		}
		if out := n.sh(t, "ip route get "+n.addr); strings.Contains(out, "local") || strings.Contains(out, " dev lo") {
			t.Errorf("%s: packets to the pod take %s", n.Name(), out)
		}
		if out := n.sh(t, "ip -o -4 address show dev eth0"); !strings.Contains(out, n.Addr(0).String()+" peer 10.0.0.0/8") {
			t.Errorf("%s: %s", n.Name(), out)
		}
		if out := n.sh(t, "ip route show dev eth0"); strings.Contains(out, "10.0.0.0/8") {
			t.Errorf("%s: %s", n.Name(), out)
		}
		if out := n.sh(t, "kernelsmc pnet list; nsenter --net=/run/netns/"+n.pod+" kernelsmc pnet list"); strings.Count(out, "KUBESMCR") != 2 {
			t.Errorf("%s: %s", n.Name(), out)
		}
	}
	// A node answers for all its addresses on all its interfaces.
	out := b.client.sh(t, fmt.Sprintf(`ping -c 1 -W 5 -I %[1]s %[2]s >/dev/null; ping -c 1 -W 5 -I %[1]s %[3]s >/dev/null || ip neigh show dev %[1]s`, b.client.NetDev(1), b.server.Addr(1), b.server.addr))
	if !regexp.MustCompile(regexp.QuoteMeta(b.server.Addr(1).String())+" lladdr").MatchString(out) || regexp.MustCompile(regexp.QuoteMeta(b.server.addr)+" lladdr").MatchString(out) {
		t.Errorf("on another segment the server's node is to answer for its own address, and not for its pod's: %q", out)
	}
	k, err := drive.Kernel(t.Context(), b.client.Guest)
	if err != nil {
		t.Fatal(err)
	}
	for _, g := range k.Groups {
		for _, l := range g.Links {
			if l.GID != b.client.Addr(0) || l.PeerGID != b.server.Addr(0) {
				t.Errorf("link group %+v is not between the nodes' own addresses", g)
			}
		}
	}
}

// policy: both ends' policies select what is on SMC-R.
func (b *vethBed) policy(t *testing.T) {
	b.expect(t, map[int]bool{selected: true, clientOnly: false})
}

// sameNode: between pods of one node there is plain TCP at once.
func (b *vethBed) sameNode(t *testing.T) {
	b.beside.startRedis(t, selected)
	before, began := b.client.counters(t), time.Now()
	out := b.client.sh(t, b.client.inPod(fmt.Sprintf("redis-cli -h %s -p %d PING", b.beside.addr, selected)))
	took := time.Since(began)
	if d := b.client.counters(t).Sub(before); out != "PONG" || d.ClientV2 != 0 || d.ClientFallbacks != 1 || took > 3*time.Second {
		t.Errorf("%q in %v: %+v", out, took, d)
	}
	e := ask[agentapi.Explanation](t, b.client, fmt.Sprintf("explain demo/app %s:%d", b.beside.addr, selected))
	if e.Code != agentapi.CodeSameNode {
		t.Errorf("%+v", e)
	}
}

// oddAddress: a pod whose address is the node's is refused, and the address left alone.
func (b *vethBed) oddAddress(t *testing.T) {
	b.client.awaitPod(t, "the pod is refused", func(a agentapi.Attachment) bool {
		return a.Pod == "demo/odd" && a.State == agentapi.StateFailed && strings.Contains(a.Detail, b.odd.addr+" is also one of the node itself")
	})
	if out := b.client.sh(t, "ip -o -4 address show to "+b.odd.addr); strings.Contains(out, "kube-smcr-veth") {
		t.Error(out)
	}
}

// agentKilled: without agents all goes on, and the next ones change nothing.
func (b *vethBed) agentKilled(t *testing.T) {
	was := b.server.wiring(t)
	before := b.client.counters(t)
	b.hold(t, "through", fmt.Sprintf("socat PIPE TCP4:%s:%d", b.server.addr, selected))
	b.client.eventually(t, "a connection is on SMC-R", func() error {
		if d := b.client.counters(t).Sub(before); d.ClientV2 != 1 {
			return fmt.Errorf("%+v", d)
		}
		return nil
	})
	for _, n := range []*node{b.client, b.server} {
		n.endAgent(t, unix.SIGKILL)
	}
	b.expect(t, map[int]bool{selected: true, clientOnly: false})
	b.startAgents(t)
	b.expect(t, map[int]bool{selected: true, clientOnly: false})
	b.mustLive(t, "through")
	if got := b.server.wiring(t); got != was {
		t.Errorf("the node has %s\nbefore it had %s", got, was)
	}
	b.client.sh(t, "kill $(pidof socat)")
}

// linkDown: what others take away or make on the node is mended.
func (b *vethBed) linkDown(t *testing.T) {
	b.server.sh(t, fmt.Sprintf("ip link set kube-smcr-veth up; ip address delete %s peer 10.0.0.0/8 dev eth0", b.server.Addr(0)))
	b.server.eventually(t, "it is mended", func() error {
		out, err := b.server.Shell(t.Context(), "ip -o -4 address show dev eth0; ip route show table local")
		if err == nil && (!strings.Contains(out, "peer 10.0.0.0/8") || strings.Contains(out, "local "+b.server.addr)) {
			err = fmt.Errorf("%s", out)
		}
		return err
	})
	b.expect(t, map[int]bool{selected: true})
	b.server.sh(t, "ip link set kube-smcr-veth down")
}

// podGone: an agent that starts forgets what a pod had that is gone.
func (b *vethBed) podGone(t *testing.T) {
	b.client.endAgent(t, unix.SIGKILL)
	b.client.sh(t, "kill $(cat /run/redis-beside-6379.pid); sleep 1; rm -f /run/smcr/attachments/*beside*; ip netns delete beside")
	b.client.startAgent(t)
	b.client.eventually(t, "its address is gone", func() error {
		out, err := b.client.Shell(t.Context(), "ip -o -4 address show dev kube-smcr-veth")
		if err == nil && (strings.Contains(out, b.beside.addr+"/") || !strings.Contains(out, b.client.addr+"/")) {
			err = fmt.Errorf("%s", out)
		}
		return err
	})
	b.expect(t, map[int]bool{selected: true})
}

// detached: nothing is left on the nodes, and TCP was not disturbed.
func (b *vethBed) detached(t *testing.T) {
	b.client.sh(t, "rm -f /run/smcr/attachments/*odd*; ip netns delete odd")
	stop := b.load(t)
	for _, n := range []*node{b.client, b.server} {
		n.configureVeth(t, true, "[]")
		if err := n.agent.Signal(unix.SIGHUP); err != nil {
			t.Fatal(err)
		}
	}
	b.server.awaitPod(t, "the pod has sockets of SMC from before", func(a agentapi.Attachment) bool {
		return a.State == agentapi.StateIdle && a.Datapath == "Kernel"
	})
	b.server.startRedis(t, selected)
	b.server.startRedis(t, clientOnly)
	for _, n := range []*node{b.client, b.server} {
		n.awaitPod(t, "the pod is detached", func(a agentapi.Attachment) bool {
			return a.Pod == "demo/"+n.pod && a.State == agentapi.StateIdle && a.Datapath == ""
		})
	}
	b.awaitAsBefore(t)
	b.client.eventually(t, "nothing of the veths is left", func() error {
		out := b.client.sh(t, "ip -o address; ip -o link; ip route show table all; kernelsmc pnet list; ls /run/smcr; nsenter --net=/run/netns/app kernelsmc pnet list")
		if regexp.MustCompile(`kube-smcr-veth|peer|KUBESMCR|proto 226|kernel-veths`).MatchString(out) {
			return errors.New(out)
		}
		return nil
	})
	for _, n := range []*node{b.client, b.server} {
		n.endAgent(t, unix.SIGTERM)
	}
	stop(t)
}
