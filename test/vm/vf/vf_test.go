// SPDX-License-Identifier: Apache-2.0

package vf

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/smcr-io/kube-smcr/test/vm/lab"
	"github.com/smcr-io/kube-smcr/test/vm/vf/report"
)

// suite is two nodes.
type suite struct {
	nodes [2]*node
}

// TestVF has one pair of guests for all cases. What concerns one node only runs on
// both at the same time, with the way of wiring that the kernel of each is for.
func TestVF(t *testing.T) {
	s := newSuite(t)
	t.Run("node", func(t *testing.T) {
		for _, n := range s.nodes {
			t.Run(n.Name(), func(t *testing.T) {
				t.Parallel()
				t.Run("settings", n.settings)
				t.Run("killed", n.killed)
				t.Run("lost", n.lost)
				if n.index == 0 {
					t.Run("exclusive", n.exclusive)
					t.Run("ipam", n.ipam)
					t.Run("badInput", n.badInput)
				} else {
					t.Run("pfGoesDown", n.pfGoesDown)
					t.Run("reboot", n.reboot)
				}
			})
		}
	})
	t.Run("vlans", s.vlans)
	t.Run("churn", s.churn)
	t.Run("traffic", s.traffic)
}

func newSuite(t *testing.T) *suite {
	t.Helper()
	l := lab.ForTest(t, lab.Config{PFs: 2, NUMA: true, Kernels: kernels[:]})
	s := &suite{}
	for i := range s.nodes {
		s.nodes[i] = &node{Guest: l.Guest(i), lab: l, index: i}
	}
	built := make(chan error, 1)
	go func() { built <- build(t.Context(), l) }()
	s.both(t, func(t *testing.T, n *node) { n.setUp(t) })
	if err := <-built; err != nil {
		t.Fatal(err)
	}
	return s
}

// build builds what the guests run.
func build(ctx context.Context, l *lab.Lab) error {
	if err := l.BuildNode(ctx); err != nil {
		return err
	}
	for _, b := range []struct {
		pkg string
		opt lab.BuildOptions
	}{
		{"/test/vm/vf/driver", lab.BuildOptions{}},
		{"/cmd/cni-plugin", lab.BuildOptions{Name: "smcr-cni-crash", Tags: []string{"smcrcrash"}}},
	} {
		if _, err := l.Build(ctx, module+b.pkg, b.opt); err != nil {
			return err
		}
	}
	_, err := l.BuildCNIPlugins(ctx)
	return err
}

// both does something on both nodes at the same time.
func (s *suite) both(t *testing.T, do func(*testing.T, *node)) {
	t.Helper()
	var running sync.WaitGroup
	for _, n := range s.nodes {
		running.Go(func() { do(t, n) })
	}
	running.Wait()
	if t.Failed() {
		t.FailNow()
	}
}

// settings: the PF sets what the configuration says, CHECK sees what somebody
// changes, and DEL brings everything back.
func (n *node) settings(t *testing.T) {
	vf := n.vfs[1]
	t.Run("all", func(t *testing.T) {
		n.unchanged(t)
		conf := n.conf(t, "settings", map[string]any{
			"mode": n.mode(), "mac": "02:00:00:00:00:77", "vlan": 100, "vlanQoS": 3, "spoofchk": "off", "trust": "on", "max_tx_rate": 200, "mtu": 2000,
		})
		p := n.addPod(t, "settings")
		p.add(conf, "net1", vf.PCI)
		got := n.host(t).VFs[fmt.Sprintf("pf0 %d", vf.Index)]
		want := report.VF{
			MAC: "02:00:00:00:00:77", Own: got.Own, VLAN: 100, QoS: 3, Proto: got.Proto, Trust: true, LinkState: got.LinkState, MaxRate: 200, Driver: "igbvf",
		}
		if got != want {
			t.Errorf("the VF is %+v, want %+v", got, want)
		}
		if out := p.sh("cat /sys/class/net/net1/{address,mtu}"); out != "02:00:00:00:00:77\n2000" {
			t.Errorf("the pod's interface has %q", out)
		}
		p.must("check", conf, "net1", vf.PCI)
		for _, c := range []struct{ change, back, property string }{
			{"ip link set pf0 vf 1 vlan 200 qos 3", "ip link set pf0 vf 1 vlan 100 qos 3", "vlan"},
			{"ip link set pf0 vf 1 spoofchk on", "ip link set pf0 vf 1 spoofchk off", "spoof"},
			{"ip -n settings link set net1 mtu 1400", "ip -n settings link set net1 mtu 2000", "mtu"},
			{"ip -n settings address flush dev net1", "", "address"},
		} {
			n.sh(t, c.change)
			if got := p.call("check", conf, "net1", vf.PCI); got.Error == nil || !strings.Contains(strings.ToLower(got.Error.Error()), c.property) {
				t.Errorf("CHECK after %s: %v, want an error about %s", c.change, got.Error, c.property)
			}
			n.sh(t, c.back)
		}
	})
	n.choseMAC(t, vf)
	t.Run("what igb lacks", func(t *testing.T) {
		n.unchanged(t)
		p := n.addPod(t, "lacks")
		conf := n.conf(t, "lacks", map[string]any{"link_state": "disable", "min_tx_rate": 10})
		p.add(conf, "net1", vf.PCI)
		conf = n.conf(t, "required", map[string]any{"link_state": "disable", "requiredSettings": []string{"link_state"}})
		c := p.call("add", conf, "net2", n.vfs[0].PCI)
		if c.Error == nil || !strings.Contains(c.Error.Error(), "link") {
			t.Errorf("a required link state: %v", c.Error)
		}
		p.must("del", conf, "net2", n.vfs[0].PCI)
	})
}

// exclusive: the RDMA subsystem keeps devices apart by network namespace. Soft RoCE that
// is made again on the pod's interface belongs to the host nevertheless, where the agent
// finds it, and the pod has no device.
func (n *node) exclusive(t *testing.T) {
	n.sh(t, "rdma system set netns exclusive") // which works only while there are no pods
	t.Cleanup(func() { n.sh(t, "rdma system set netns shared") })
	n.unchanged(t)
	vf := n.vfs[0]
	conf := n.conf(t, "exclusive", nil)
	p := n.addPod(t, "exclusive")
	p.add(conf, "net1", vf.PCI)
	p.must("check", conf, "net1", vf.PCI)
	if in, out := p.sh("rdma link"), n.sh(t, "rdma link show rxe0/1"); in != "" || !strings.Contains(out, "ACTIVE") || strings.Contains(out, "netdev") {
		t.Errorf("the pod has %q, the host %q: want nothing, and a device whose interface is elsewhere", in, out)
	}
	p.must("del", conf, "net1", vf.PCI)
}

// choseMAC fails the test unless a VF's MAC is its driver's choice, as it was.
func (n *node) choseMAC(t *testing.T, vf lab.VF) {
	t.Helper()
	if how := n.sh(t, "cat /sys/class/net/"+vf.NetDev+"/addr_assign_type"); how != "1" {
		t.Errorf("%s: the MAC of %s is of type %s, not chosen by its driver", n.Name(), vf.NetDev, how)
	}
}

// vlans: pods see each other in the same VLAN, and only there.
func (s *suite) vlans(t *testing.T) {
	var pods [3]*pod
	var address [3]string
	for i, vlan := range []int{100, 100, 200} {
		n := s.nodes[min(i, 1)]
		if i < 2 {
			n.unchanged(t)
		}
		conf := n.conf(t, fmt.Sprintf("vlan%d", vlan), map[string]any{"vlan": vlan})
		pods[i] = n.addPod(t, fmt.Sprintf("vlan%d-%d", vlan, i))
		address[i] = pods[i].add(conf, "net1", n.vfs[i].PCI)
	}
	s.nodes[0].eventually(t, "a pod reaches one of its VLAN", func() error {
		_, err := pods[0].try("ping -c1 -W1 " + address[1])
		return err
	})
	if out, err := pods[0].try("ping -c2 -W1 " + address[2]); !lab.Exited(err, 1) {
		t.Errorf("a ping to another VLAN: %v, %s", err, out)
	}
}

// records is where attachments are recorded.
const records = dataDir + "/attachments"

// pfUp sets pf0 up and waits until its VFs have a carrier. They find out at once what
// their PF does when their drivers are reset, else after 10 s. It is not by taking them
// down: igbvf can deadlock with its own reset then, and keeps the lock of all interfaces.
const pfUp = `ip link set pf0 up
	up() { for try in $(seq 300); do [ "$(cat /sys/class/net/$1/carrier)" = 0 ] || return 0; sleep 0.1; done; echo "$1 has no carrier"; return 1; }
	up pf0
	for vf in pf0v0 pf0v1; do ethtool -r $vf; done
	for vf in pf0v0 pf0v1; do up $vf; done`

// twoADDs: a runtime makes two calls for one container at once; one of them makes the
// interface, and the other says what is in its way.
func (n *node) twoADDs(t *testing.T) {
	n.unchanged(t)
	conf := n.conf(t, "twice", nil)
	p := n.addPod(t, "twice")
	var calls [2]report.Call
	var running sync.WaitGroup
	for i := range calls {
		running.Go(func() { calls[i] = p.call("add", conf, "net1", n.vfs[i].PCI) })
	}
	running.Wait()
	for i, c := range calls {
		other := calls[1-i]
		if c.Error == nil && other.Error == nil {
			t.Error("both have succeeded")
		}
		if c.Error != nil && (c.Error.Code == 0 || other.Error != nil) {
			t.Errorf("ADD: %v; and at the same time: %v", c.Error, other.Error)
		}
	}
	for i, c := range calls {
		if c.Error == nil {
			p.must("check", conf, "net1", n.vfs[i].PCI)
			p.must("del", conf, "net1", n.vfs[i].PCI)
		}
	}
}

// badInput: each is an error that says what to do, and the VF is where it was.
func (n *node) badInput(t *testing.T) {
	vf, other := n.vfs[0].PCI, n.vfs[2].PCI
	n.unchanged(t)
	busy := n.addPod(t, "busy")
	busyConf := n.conf(t, "busy", map[string]any{"mode": "move"})
	busy.add(busyConf, "net1", other)
	vfio := n.vfs[3]
	for _, c := range []struct {
		name, device  string
		fields        map[string]any
		prepare, undo string
		want          []string // in the error
	}{
		{name: "no such device", device: "0000:99:10.0", want: []string{"0000:99:10.0", "no such device"}},
		{name: "a PF", device: "0000:41:00.0", want: []string{"physical function"}},
		{name: "another pod's", device: other, want: []string{"belongs to", "busy"}},
		{name: "VLAN out of range", device: vf, fields: map[string]any{"vlan": 5000}, want: []string{"vlan", "4094"}},
		{name: "an unknown field", device: vf, fields: map[string]any{"vlam": 5}, want: []string{"vlam"}},
		{
			name: "a name in use", device: vf, fields: map[string]any{"mode": "move"},
			prepare: "ip -n bad link add net1 type bridge", undo: "ip -n bad link del net1", want: []string{"net1", "in use"},
		},
		{
			name: "IPAM fails after the move", device: vf,
			fields: map[string]any{"mode": "move", "ipam": map[string]any{"type": "host-local", "ranges": "x"}}, want: []string{"host-local"},
		},
		{
			name: "no IPAM plugin", device: vf,
			fields: map[string]any{"mode": "move", "ipam": map[string]any{"type": "nonesuch"}}, want: []string{"nonesuch"},
		},
		{
			name: "bound to vfio", device: vfio.PCI,
			prepare: fmt.Sprintf(`rdma link delete rxe3; modprobe vfio_pci; cd /sys/bus/pci/devices/%[1]s; echo %[1]s >driver/unbind
				echo vfio-pci >driver_override; echo %[1]s >/sys/bus/pci/drivers_probe`, vfio.PCI),
			undo: fmt.Sprintf(`cd /sys/bus/pci/devices/%[1]s; echo %[1]s >driver/unbind; echo igbvf >driver_override; echo %[1]s >/sys/bus/pci/drivers_probe
				echo >driver_override; ip link set $(ls net) name %[2]s; ip link set %[2]s mtu 4200 address %[3]s up; rdma link add rxe3 type rxe netdev %[2]s`,
				vfio.PCI, vfio.NetDev, n.host(t).Links[vfio.NetDev].MAC),
			want: []string{"vfio"},
		},
		{
			name: "the PF is down", device: vf, fields: map[string]any{"mode": "move"},
			prepare: "ip link set pf0 down",
			undo:    pfUp,
			want:    []string{"pf0", "down"},
		},
		{
			name: "a full disk for the record", device: vf, fields: map[string]any{"mode": "move"},
			prepare: "mkdir -p " + records + "; mount -t tmpfs -o size=4k,nr_inodes=3,mode=755 full " + records + "; head -c 4096 /dev/zero >" + records + "/full",
			undo:    "umount " + records,
			want:    []string{"space"},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := n.addPod(t, "bad")
			conf := n.conf(t, "bad", c.fields)
			n.sh(t, c.prepare)
			before := n.host(t)
			got := p.call("add", conf, "net1", c.device)
			if got.Error == nil {
				t.Error("ADD succeeded")
			} else {
				t.Log(got.Error)
				for _, want := range append(c.want, "") {
					if !strings.Contains(strings.ToLower(got.Error.Error()), strings.ToLower(want)) {
						t.Errorf("the error does not say %q", want)
					}
				}
				if got.Error.Code == 0 {
					t.Error("the error has no code")
				}
			}
			for _, d := range before.Differences(n.host(t)) {
				t.Errorf("afterwards: %s", d)
			}
			p.call("del", conf, "net1", c.device)
			n.sh(t, c.undo)
		})
	}
	busy.must("check", busyConf, "net1", other) // nobody has touched it
	t.Run("two ADDs at once", n.twoADDs)
	t.Run("what is no namespace", func(t *testing.T) {
		conf := n.conf(t, "bad", nil)
		got := drive[report.Call](t, n, "call", "-conf", conf, "-container", "bad", "-netns", "/etc/passwd", "-device", vf, "add")
		if got.Error == nil || !strings.Contains(got.Error.Error(), "/etc/passwd") {
			t.Errorf("ADD says %v", got.Error)
		}
	})
}
