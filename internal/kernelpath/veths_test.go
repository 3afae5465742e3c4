// SPDX-License-Identifier: Apache-2.0

package kernelpath

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/smcr-io/kube-smcr/internal/linux"
	"github.com/smcr-io/kube-smcr/internal/smcnl"
)

// vethBench is the guest with its RNIC as node, and a pod with a veth.
type vethBench struct {
	*testing.T
	c      *Chooser
	record string
	pod    *linux.NetNS
	cfg    PodConfig
	rnic   smcnl.Device
	before string
}

const vethPodName = "veth-pod"

func newVethBench(t *testing.T) *vethBench {
	need(t)
	b := &vethBench{T: t, record: filepath.Join(t.TempDir(), "veths.json")}
	b.c = mustOpen(t, Config{Veths: NewVeths(b.record)})
	t.Cleanup(func() { mustClose(t, b.c) })
	b.run("ip", "netns", "add", vethPodName)
	t.Cleanup(func() { _ = exec.Command("ip", "netns", "delete", vethPodName).Run() })
	var err error
	if b.pod, err = linux.OpenNetNS("/run/netns/" + vethPodName); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = b.pod.Close() })
	host, err := linux.CurrentNetNS()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = host.Close() }()
	gateway, addr := netip.MustParseAddr("10.9.0.1"), netip.MustParseAddr("10.9.0.2")
	vethTo(t, host, b.pod, gateway, addr)
	t.Cleanup(func() { _ = exec.Command("ip", "link", "delete", "pod0").Run() })
	b.cfg = PodConfig{Filter: linux.OptionFilterConfig{Peers: []linux.OutboundRule{{Prefix: netip.MustParsePrefix("0.0.0.0/0")}}}, Veth: true, Addresses: []netip.Addr{addr}}
	devices, err := smcnl.Devices()
	if err != nil || len(devices) == 0 {
		t.Fatalf("%v, %v", devices, err)
	}
	b.rnic = devices[0]
	b.before = b.state()
	return b
}

func (b *vethBench) at() linux.Place { return linux.In(b.pod) }

func (b *vethBench) run(command ...string) string {
	b.Helper()
	out, err := exec.CommandContext(b.Context(), command[0], command[1:]...).CombinedOutput()
	if err != nil {
		b.Fatalf("%v: %v\n%s", command, err, out)
	}
	return string(out)
}

// state is all that attach may change.
func (b *vethBench) state() string {
	b.Helper()
	var pnets [2][]smcnl.PNet
	host, err := smcnl.PNets()
	if err != nil {
		b.Fatal(err)
	}
	pnets[0] = host
	err = b.pod.Do(func() (err error) {
		pnets[1], err = smcnl.PNets()
		return err
	})
	if err != nil {
		b.Fatal(err)
	}
	chosen, err := b.c.Chosen(b.at())
	if err != nil {
		b.Fatal(err)
	}
	_, err = os.Stat(b.record)
	return fmt.Sprintf("%v\n%schosen %t\nrecord %t\n", pnets, b.run("sh", "-c", "ip -o -4 address | sed 's/^[0-9]*: //; s/valid_lft.*//'; ip -4 route show table all; ls /sys/class/net"), chosen, !errors.Is(err, fs.ErrNotExist))
}

func (b *vethBench) mustBeAsBefore(what string) {
	b.Helper()
	if now := b.state(); now != b.before {
		b.Errorf("%s: there is\n%s\nbefore there was\n%s", what, now, b.before)
	}
}

func (b *vethBench) mustHave(what string, words ...string) {
	b.Helper()
	now := b.state()
	for _, w := range words {
		if !strings.Contains(now, w) {
			b.Errorf("%s: there is no %q in\n%s", what, w, now)
		}
	}
}

func (b *vethBench) attach() {
	b.Helper()
	if err := b.c.Fit(b.at(), b.cfg); err != nil {
		b.Fatal(err)
	}
	for range 2 {
		if err := b.c.Attach(b.at(), b.cfg); err != nil {
			b.Fatal(err)
		}
	}
}

func (b *vethBench) purge() {
	b.Helper()
	if err := b.c.Purge(b.at(), b.cfg); err != nil {
		b.Fatal(err)
	}
}

// What a pod with a veth needs comes and goes with it.
func TestVeths(t *testing.T) {
	b := newVethBench(t)
	b.attach()
	b.mustHave("attached", "{KUBESMCR  "+b.rnic.Name+" 1}", "{KUBESMCR eth0  0}", "10.9.0.2/32 scope host kube-smcr-veth", "peer 10.0.0.0/8 scope global", "chosen true", "record true")
	b.purge()
	b.mustBeAsBefore("given up")
	b.attach()
	if left, err := b.c.Detach(b.at(), b.cfg); left || err != nil {
		t.Errorf("left %t, %v", left, err)
	}
	b.mustBeAsBefore("detached")
	// Another process, that removes all.
	b.attach()
	if err := errors.Join(b.c.Forget(b.choice()), linux.SweepOptionFilter(b.at()), NewVeths(b.record).Remove(), NewVeths(b.record).Remove()); err != nil {
		t.Error(err)
	}
	b.mustBeAsBefore("removed")
}

func (b *vethBench) choice() Choice {
	b.Helper()
	c, err := choiceOf(b.at())
	if err != nil {
		b.Fatal(err)
	}
	return c
}

// What is somebody else's is used, and stays.
func TestVeths_foreign(t *testing.T) {
	b := newVethBench(t)
	pnet := smcnl.PNet{Name: "OTHERS", Device: b.rnic.Name, Port: 1}
	if err := smcnl.AddPNet(pnet); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = smcnl.RemovePNet(pnet.Name) }()
	b.before = b.state()
	b.attach()
	b.mustHave("attached", "{OTHERS eth0  0}")
	b.purge()
	b.mustBeAsBefore("given up")
	inPod := func(f func() error) {
		t.Helper()
		if err := b.pod.Do(f); err != nil {
			t.Fatal(err)
		}
	}
	inPod(func() error { return smcnl.AddPNet(smcnl.PNet{Name: "OTHERS", NetDev: "lo"}) })
	b.before = b.state()
	b.attach()
	b.purge()
	b.mustBeAsBefore("given up, with another interface in the same physical network")
	inPod(func() error { return smcnl.AddPNet(smcnl.PNet{Name: "OTHERS", NetDev: "eth0"}) })
	b.before = b.state()
	b.attach()
	b.purge()
	b.mustBeAsBefore("given up, with the pod's interface in the same physical network before")
}

// Pods that cannot be served are told why, and nothing is left of a try.
func TestVeths_refused(t *testing.T) {
	b := newVethBench(t)
	must := func(what, want string, cfg PodConfig, attach bool) {
		t.Helper()
		err := b.c.Fit(b.at(), cfg)
		if attach && err == nil {
			err = b.c.Attach(b.at(), cfg)
		}
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", what, err, want)
		}
		b.mustBeAsBefore(what)
	}
	without := b.cfg
	without.Veth = false
	must("without the setting", "kernelPath.veth", without, false)
	if err := b.c.Fit(b.at(), without); !errors.Is(err, ErrUnfit) {
		t.Error(err)
	}
	others := b.cfg
	others.Addresses = []netip.Addr{netip.MustParseAddr("10.9.0.3")}
	must("with no address that its network gave it", "nor is there a veth", others, false)

	if err := b.pod.Do(func() error { return smcnl.AddPNet(smcnl.PNet{Name: "MINE", NetDev: "eth0"}) }); err != nil {
		t.Fatal(err)
	}
	b.before = b.state()
	must("in another physical network", "is in physical network MINE, and the RNIC in KUBESMCR", b.cfg, true)
	if err := b.pod.Do(func() error { return smcnl.RemovePNet("MINE") }); err != nil {
		t.Fatal(err)
	}

	lo, err := netlink.LinkByName("lo")
	if err != nil {
		t.Fatal(err)
	}
	own := &netlink.Addr{IPNet: &net.IPNet{IP: b.cfg.Addresses[0].AsSlice(), Mask: net.CIDRMask(32, 32)}}
	if err := netlink.AddrAdd(lo, own); err != nil {
		t.Fatal(err)
	}
	b.before = b.state()
	must("with an address of the node", "10.9.0.2 is also one of the node itself, of its interface lo", b.cfg, true)
	if err := netlink.AddrDel(lo, own); err != nil {
		t.Fatal(err)
	}

	if err := netlink.LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: linux.ShadowLink}}); err != nil {
		t.Fatal(err)
	}
	b.before = b.state()
	must("with somebody else's interface of that name", "of kind bridge, which is somebody else's", b.cfg, true)
	b.run("ip", "link", "delete", linux.ShadowLink)
}

// What others take away is mended, and what pods had that are gone is taken away.
func TestVeths_keep(t *testing.T) {
	b := newVethBench(t)
	b.attach()
	was := b.state()
	host, err := linux.CurrentNetNS()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = host.Close() }()
	rec, err := NewVeths(b.record).read()
	if err != nil || len(rec.RNIC.Inets) != 1 {
		t.Fatalf("%+v, %v", rec, err)
	}
	if err := errors.Join(linux.SetShadows(host, nil), smcnl.RemovePNet(ourPNet), linux.RemoveInet(host, rec.RNIC.Index, rec.RNIC.Inets[0])); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := NewVeths(b.record).Keep(); err != nil {
			t.Fatal(err)
		}
		if now := b.state(); now != was {
			t.Errorf("there is\n%s\nbefore there was\n%s", now, was)
		}
	}
	b.run("ip", "link", "set", linux.ShadowLink, "up") // with its routes
	if err := NewVeths(b.record).Keep(); err != nil {
		t.Fatal(err)
	}
	b.run("ip", "link", "set", linux.ShadowLink, "down")
	if now := b.state(); now != was {
		t.Errorf("there is\n%s\nbefore there was\n%s", now, was)
	}
	// The handle keeps the namespace, which has no name any more.
	b.run("ip", "netns", "delete", vethPodName)
	if err := errors.Join(NewVeths(b.record).Keep(), b.c.Forget(b.choice())); err != nil {
		t.Fatal(err)
	}
	now := b.state()
	if i := slices.IndexFunc([]string{"kube-smcr-veth", "peer 10.0.0.0/8", b.rnic.Name + " 1", "record true"}, func(w string) bool { return strings.Contains(now, w) }); i >= 0 {
		t.Errorf("of a pod that is gone there is left\n%s", now)
	}
}
