// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sync/errgroup"
)

func TestPF(t *testing.T) {
	l := ForTest(t, Config{Guests: 2, PFs: 2, NUMA: true})
	ctx := limited(t)
	var vfs [2][]VF
	var making errgroup.Group
	for i := range vfs {
		making.Go(func() error {
			for pf := range 2 {
				made, err := l.Guest(i).MakeVFs(ctx, l.Guest(i).PF(pf), 2)
				if err != nil {
					return err
				}
				vfs[i] = append(vfs[i], made...)
			}
			return nil
		})
	}
	if err := making.Wait(); err != nil {
		t.Fatal(err)
	}
	t.Run("names", func(t *testing.T) {
		want := []VF{
			{Index: 0, PCI: "0000:41:10.0", NetDev: "pf0v0"},
			{Index: 1, PCI: "0000:41:10.2", NetDev: "pf0v1"},
			{Index: 0, PCI: "0000:81:10.0", NetDev: "pf1v0"},
			{Index: 1, PCI: "0000:81:10.2", NetDev: "pf1v1"},
		}
		if diff := cmp.Diff(want, vfs[0]); diff != "" {
			t.Errorf("VFs (-want +got):\n%s", diff)
		}
	})
	t.Run("NUMA nodes", func(t *testing.T) {
		out, err := l.Guest(0).Shell(ctx, "cat /sys/class/net/pf?/device/numa_node /sys/bus/pci/devices/0000:81:10.2/numa_node")
		if got := strings.Fields(out); err != nil || !cmp.Equal(got, []string{"0", "1", "1"}) {
			t.Errorf("pf0, pf1 and a VF of pf1 are on nodes %v, %v; want 0, 1, 1", got, err)
		}
	})
	g, peer := l.Guest(0), l.Guest(1)
	ping := func() error {
		_, err := peer.Run(ctx, "ping", "-c1", "-W1", "-s8192", "-Mdo", "10.1.0.1")
		return err
	}
	t.Run("vfio", func(t *testing.T) {
		_, err := l.Guest(0).Shell(ctx, `modprobe vfio_pci; cd /sys/bus/pci/devices/0000:81:10.2
			echo 0000:81:10.2 >driver/unbind; echo vfio-pci >driver_override; echo 0000:81:10.2 >/sys/bus/pci/drivers_probe
			readlink driver | grep vfio-pci`)
		if err != nil {
			t.Error(err)
		}
	})
	t.Run("between guests and PFs", func(t *testing.T) {
		const configure = "ip link set $0 mtu 9000 up; ip address add $1 dev $0"
		for guest, args := range map[*Guest][2]string{g: {"pf0v1", "10.1.0.1/24"}, peer: {"pf1v0", "10.1.0.2/24"}} {
			if _, err := guest.Run(ctx, "bash", "-euc", configure, args[0], args[1]); err != nil {
				t.Fatal(err)
			}
		}
		if err := poll(ctx, "a ping of one packet of 8 KiB", time.Minute, ping); err != nil {
			t.Error(err)
		}
	})
	t.Run("the PF's link", func(t *testing.T) {
		if err := g.SetPFLink(0, false); err != nil {
			t.Fatal(err)
		}
		if err := ping(); !Exited(err, 1) {
			t.Errorf("a ping while it is cut: %v, want exit code 1", err)
		}
		if err := g.SetPFLink(0, true); err != nil {
			t.Fatal(err)
		}
		if err := poll(ctx, "a ping with the link restored", time.Minute, ping); err != nil {
			t.Error(err)
		}
	})
	t.Run("a PF that is down", func(t *testing.T) {
		carrier := func(want string) {
			t.Helper()
			err := poll(ctx, "carrier "+want+" at the VF", time.Minute, func() error {
				_, err := g.Run(ctx, "grep", "-q", want, "/sys/class/net/pf0v1/carrier")
				return err
			})
			if err != nil {
				t.Error(err)
			}
		}
		for _, c := range [][2]string{{"down", "0"}, {"up", "1"}} {
			if _, err := g.Run(ctx, "ip", "link", "set", "pf0", c[0]); err != nil {
				t.Fatal(err)
			}
			carrier(c[1])
		}
	})
	t.Run("too many", func(t *testing.T) {
		if _, err := l.Guest(0).MakeVFs(ctx, "pf1", 8); err == nil || !strings.Contains(err.Error(), "make 8 VFs of pf1") {
			t.Errorf("8 VFs: %v", err)
		}
	})
}

func TestParseVFs(t *testing.T) {
	for _, c := range []struct{ name, out, want string }{
		{"no name", "0 0000:01:10.0\n", "want number, PCI address and network device"},
		{"no number", "x 0000:01:10.0 pf0v0\n", "invalid syntax"},
	} {
		t.Run(c.name, func(t *testing.T) {
			if _, err := parseVFs(c.out); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("error %v, want %q", err, c.want)
			}
		})
	}
}
