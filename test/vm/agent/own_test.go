// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
)

// ownDevice is a network interface with soft RoCE that stands for a VF of a pod:
// rail 1 is the guest's second NIC, rail 2 a macvlan child of its first.
type ownDevice struct {
	netdev, rdma string
	rail         int
}

func onRail(rail int) ownDevice {
	return ownDevice{netdev: map[int]string{1: "eth1", 2: "mv0"}[rail], rdma: fmt.Sprintf("own%d", rail), rail: rail}
}

// addr is the device's address on a node.
func (d ownDevice) addr(n *node) string { return fmt.Sprintf("10.0.%d.%d", 10+d.rail, n.index+1) }

// create makes the RDMA device, of whatever name.
func (n *node) create(t *testing.T, d ownDevice) {
	t.Helper()
	n.sh(t, fmt.Sprintf("rdma link add %s type rxe netdev %s", d.rdma, d.netdev))
}

// give writes into the pod's record which devices it has, as the plugin does.
func (p *pod) give(t *testing.T, devices ...ownDevice) {
	t.Helper()
	list := []string{}
	for _, d := range devices {
		list = append(list, fmt.Sprintf(`{"id":%[1]q,"rdma":[%[2]q],"netdev":%[1]q,"vf":-1,"numaNode":-1,"rail":%[3]d,"mode":"ipvlan"}`, d.netdev, d.rdma, d.rail))
	}
	p.sh(t, fmt.Sprintf(`cd /run/smcr/attachments
		tr -d '\n' <%[1]s-eth0.json | sed 's/,[[:space:]]*"devices":.*/}/; s/}[[:space:]]*$/, "devices": [%[2]s]}/' >.tmp-%[1]s
		mv .tmp-%[1]s %[1]s-eth0.json`, p.name, strings.Join(list, ",")))
	want := []string{}
	for _, d := range devices {
		want = append(want, d.netdev)
	}
	p.eventually(t, fmt.Sprintf("pod %s has %v", p.name, want), func() error {
		var as agentapi.Attachments
		if err := p.ask(t, &as, "attachments"); err != nil {
			return err
		}
		for _, a := range as.Attachments {
			if a.ContainerID == p.name && a.State == agentapi.StateReady && a.Reason == agentapi.CodeOK && slices.Equal(slices.Sorted(slices.Values(a.Devices)), slices.Sorted(slices.Values(want))) {
				return nil
			}
		}
		return fmt.Errorf("attachments %+v", as)
	})
}

// ask asks the node's agent, for JSON.
func (n *node) ask(t *testing.T, v any, question ...string) error {
	t.Helper()
	out, err := n.Run(t.Context(), append([]string{"smcrctl", "--socket=/run/smcr/agent.sock", "-o", "json"}, question...)...)
	if err != nil {
		return err
	}
	return json.Unmarshal([]byte(out), v)
}

// over waits until the pod's link group is over these devices.
func (p *pod) over(t *testing.T, redundancy string, devices ...ownDevice) agentapi.LinkGroup {
	t.Helper()
	var want []string
	for _, d := range devices {
		want = append(want, d.rdma)
	}
	slices.Sort(want)
	var found agentapi.LinkGroup
	p.eventually(t, fmt.Sprintf("links of pod %s over %v, %s", p.name, want, redundancy), func() error {
		var ls agentapi.Links
		if err := p.ask(t, &ls, "links"); err != nil {
			return err
		}
		for _, g := range ls.LinkGroups {
			var got []string
			for _, l := range g.Links {
				if l.State == "ACTIVE" {
					got = append(got, l.Device)
				}
			}
			slices.Sort(got)
			if g.Pod == "demo/"+p.name && g.Redundancy == redundancy && slices.Equal(got, want) {
				found = g
				return nil
			}
		}
		return fmt.Errorf("link groups %+v", ls.LinkGroups)
	})
	return found
}

// podDevice is what the agent says of a device.
func (n *node) podDevice(t *testing.T, d ownDevice) (agentapi.PodDevice, error) {
	t.Helper()
	var inv struct {
		ForPods []agentapi.PodDevice `json:"forPods"`
	}
	if err := n.ask(t, &inv, "devices"); err != nil {
		return agentapi.PodDevice{}, err
	}
	for _, x := range inv.ForPods {
		if x.ID == d.netdev {
			return x, nil
		}
	}
	return agentapi.PodDevice{}, fmt.Errorf("no device %s in %+v", d.netdev, inv.ForPods)
}

// load is a program of the client's pod that talks to redis and checks every
// answer; it fails if a connection is reset.
func (s *suite) load(t *testing.T, client *pod) (stop func()) {
	t.Helper()
	p := client.load(t, client.node, 1, "bash", "-c", client.inPod()+fmt.Sprintf(
		"sh -c 'touch /tmp/load-%[1]s; while [ -e /tmp/load-%[1]s ]; do echo PING; sleep 0.02; done | redis-cli -h %[2]s -p %[3]d | sort | uniq -c >/tmp/answers-%[1]s'", client.name, s.server.addr, redisPort))
	return func() {
		t.Helper()
		client.sh(t, "rm /tmp/load-"+client.name)
		err := p.Wait()
		if got := strings.Fields(client.sh(t, "cat /tmp/answers-"+client.name)); err != nil || len(got) != 2 || got[1] != "PONG" {
			t.Errorf("load: %v: answers %q", err, got)
		}
	}
}

// ownDevices: the pods of both ends have devices for themselves, on two rails.
// They are lost in each way that there is, one and then all, and taken back.
func (s *suite) ownDevices(t *testing.T) {
	client, server := s.clients[1], s.server
	one, two := onRail(1), onRail(2)
	for _, n := range s.nodes {
		n.sh(t, fmt.Sprintf(`ip link add mv0 link eth0 type macvlan mode bridge
			ip address flush dev eth1; ip address add %s/24 dev eth1; ip address add %s/24 dev mv0; ip link set eth1 up; ip link set mv0 up`, one.addr(n), two.addr(n)))
		n.create(t, one)
		n.create(t, two)
	}
	client.startAgent(t, 1)
	defer client.endAgent(t, unix.SIGTERM)
	for _, p := range []*pod{server, client} {
		p.give(t, one)
	}
	defer func() {
		server.give(t) // of all others, it uses the node's device again
		for _, n := range s.nodes {
			n.sh(t, "for d in own1 own2 again1; do rdma link del $d || true; done; ip link del mv0; ip address flush dev eth1")
		}
	}()

	stop := s.load(t, client)
	g := client.over(t, "SINGLE", one)
	if l := g.Links[0]; !strings.HasSuffix(l.LocalGID, one.addr(client.node)) || !strings.HasSuffix(l.PeerGID, one.addr(server.node)) {
		t.Errorf("link %+v", l)
	}
	if d, err := server.podDevice(t, one); err != nil || d.State != agentapi.DevicePod || !slices.Equal(d.Pods, []string{"demo/server"}) || d.Used == nil || d.Used.Address != one.addr(server.node) {
		t.Errorf("device of the pod: %+v, %v", d, err)
	}
	for _, p := range []*pod{server, client} {
		p.give(t, one, two)
	}
	client.over(t, "SYMMETRIC", one, two)

	t.Run("rdmaGone", func(t *testing.T) {
		start := time.Now()
		server.sh(t, "rdma link del "+one.rdma)
		t.Logf("removing the device took %v", time.Since(start))
		client.over(t, "SINGLE", two) // the rails are subnets of their own
		server.eventually(t, "the device is missing", func() error {
			d, err := server.podDevice(t, one)
			if err == nil && d.State != agentapi.DeviceMissing {
				err = fmt.Errorf("device %+v", d)
			}
			return err
		})
		again := one
		again.rdma = "again1" // it is found by its interface
		server.create(t, again)
		server.over(t, "SYMMETRIC", again, two)
		server.sh(t, "rdma link del "+again.rdma)
		server.create(t, one)
		server.over(t, "SYMMETRIC", one, two)
		client.over(t, "SYMMETRIC", one, two)
	})
	t.Run("carrier", func(t *testing.T) {
		if err := server.SetLink(1, false); err != nil {
			t.Fatal(err)
		}
		client.eventually(t, "no link over the rail without carrier", func() error { return client.linksAvoid(t, one, server.node) })
		if err := server.SetLink(1, true); err != nil {
			t.Fatal(err)
		}
		client.over(t, "SYMMETRIC", one, two)
	})
	t.Run("mac", func(t *testing.T) {
		client.sh(t, "ip link set eth1 down; ip link set eth1 address 02:00:00:00:00:77; ip link set eth1 up")
		client.over(t, "SYMMETRIC", one, two)
	})
	t.Run("takenBack", func(t *testing.T) {
		client.give(t, two)
		client.over(t, "SINGLE", two)
		client.sh(t, "rdma link del "+one.rdma) // nobody has it open
		client.create(t, one)
		client.give(t, one, two)
		client.over(t, "SYMMETRIC", one, two)
	})
	stop()
	t.Run("allGone", func(t *testing.T) { s.allGone(t, client, one, two) })
}

// linksAvoid is an error while a link of the pod ends at a device of the peer's
// node.
func (p *pod) linksAvoid(t *testing.T, d ownDevice, peer *node) error {
	t.Helper()
	var ls agentapi.Links
	if err := p.ask(t, &ls, "links"); err != nil {
		return err
	}
	for _, g := range ls.LinkGroups {
		for _, l := range g.Links {
			if strings.HasSuffix(l.PeerGID, d.addr(peer)) && l.State == "ACTIVE" {
				return fmt.Errorf("link %+v", l)
			}
		}
	}
	return nil
}

// allGone: without any of its devices the pod is on plain TCP and not on the
// node's device, and says why.
func (s *suite) allGone(t *testing.T, client *pod, devices ...ownDevice) {
	ping := func(wantSMCR bool) error {
		before, err := client.status(t)
		if err != nil {
			return err
		}
		out, err := client.try(t, client.inPod()+fmt.Sprintf("timeout 60 redis-cli -h %s -p %d ping", s.server.addr, redisPort))
		after, serr := client.status(t)
		if err := errors.Join(err, serr); err != nil {
			return err
		}
		if got := after.Conns.TotalSMCR > before.Conns.TotalSMCR; out != "PONG" || got != wantSMCR {
			return fmt.Errorf("redis says %q, on SMC-R: %t; status %+v", out, got, after)
		}
		return nil
	}
	client.eventually(t, "redis answers over SMC-R", func() error { return ping(true) })
	for _, d := range devices {
		client.sh(t, "rdma link del "+d.rdma)
	}
	client.eventually(t, "redis answers over TCP", func() error { return ping(false) })
	var e agentapi.Explanation
	out := client.sh(t, fmt.Sprintf("smcrctl --socket=/run/smcr/agent.sock -o json explain demo/%s %s:%d || [ $? = 4 ]", client.name, s.server.addr, redisPort))
	err := json.Unmarshal([]byte(out), &e)
	if err != nil || e.Code != agentapi.CodePodDevice || !strings.Contains(e.Verdict, "eth1") && !strings.Contains(e.Verdict, "mv0") {
		t.Errorf("explanation %+v, %v", e, err)
	}
	for _, d := range devices {
		client.create(t, d)
	}
	client.eventually(t, "redis answers over SMC-R again", func() error { return ping(true) })
}
