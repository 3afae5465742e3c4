// SPDX-License-Identifier: Apache-2.0

package cni

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/google/go-cmp/cmp"

	"github.com/smcr-io/kube-smcr/internal/devices/claims"
	"github.com/smcr-io/kube-smcr/internal/devices/vf"
	"github.com/smcr-io/kube-smcr/internal/records"
)

// After a reboot, addresses of claimed VFs are still taken in what host-local keeps, and nothing else knows of them in a network of CNI
// 0.3.1, whose DEL has no result of ADD.
func TestWire_hostLocalReboot(t *testing.T) {
	needWiring(t)
	kept := t.TempDir()
	n, run, _, _ := claimNode(t, "0.3.1", `,"ipam":{"type":"host-local","dataDir":"`+kept+`","subnet":"10.97.2.0/24"}`)
	n.cni.Path = append(n.cni.Path, buildReference(t, "ipam/host-local"))
	must(t, claims.NewStore(n.data).Write(claims.Claim{
		Namespace: "shop", Name: "nic", UID: "c-1", Pods: []records.Pod{{Namespace: "shop", Name: "cart-0", UID: "u1"}},
		Devices: []claims.Device{{ID: "0000:41:10.0", IfName: "roce0"}, {ID: "0000:41:10.1"}},
	}))
	rt := runtimeConf("c1", newNS(t))
	n.add(t, rt)
	must(t, os.WriteFile(filepath.Join(kept, "podnet", "10.97.2.99"), []byte("c9\r\nsmcr0"), 0o600))
	addresses := func() (out []string) {
		t.Helper()
		files, err := filepath.Glob(filepath.Join(kept, "podnet", "10.*"))
		must(t, err)
		for _, f := range files {
			out = append(out, filepath.Base(f))
		}
		return out
	}
	if diff := cmp.Diff([]string{"10.97.2.2", "10.97.2.3", "10.97.2.99"}, addresses()); diff != "" {
		t.Fatalf("addresses of ADD (-want +got):\n%s", diff)
	}
	must(t, run.host.Collect(t.Context(), func(vf.Owner) bool { return false }))
	must(t, os.RemoveAll(n.data))
	rt.NetNS = ""
	n.do(t, func(ctx context.Context) error { return n.cni.DelNetworkList(ctx, n.list, rt) })
	if diff := cmp.Diff([]string{"10.97.2.99"}, addresses()); diff != "" {
		t.Errorf("addresses after DEL (-want +got):\n%s", diff)
	}
}

func TestKeptNames(t *testing.T) {
	dir := t.TempDir()
	podnet := filepath.Join(dir, "podnet")
	must(t, os.Mkdir(podnet, 0o700))
	for name, text := range map[string]string{
		"10.0.0.2": "c1\r\nsmcr0", "fd00::2": "c1\r\nroce0", "10.0.0.3": "c2\r\nsmcr1", "10.0.0.4": "c1", "10.0.0.5": "c1\r\n../x", "10.0.0.6": "",
		"10.0.0.7": strings.Repeat("c1\r\n", maxKeptBytes), "lock": "c1\r\nsmcr2", "last_reserved_ip.0": "c1\r\nsmcr3",
	} {
		must(t, os.WriteFile(filepath.Join(podnet, name), []byte(text), 0o600))
	}
	must(t, syscall.Mkfifo(filepath.Join(podnet, "10.0.0.8"), 0o600))
	conf := func(fields string) NetConf {
		t.Helper()
		c, err := ParseNetConf([]byte(`{"cniVersion":"0.3.1","name":"podnet","type":"smcr-cni"` + fields + `}`))
		must(t, err)
		return c
	}
	for _, tt := range []struct {
		name, conf, ifName string
		want               []string
		said               string
	}{
		{"host-local", `,"ipam":{"type":"host-local","dataDir":"` + dir + `"}`, "eth0", []string{"smcr0", "roce0"}, ""},
		{"a further network of the pod", `,"ipam":{"type":"host-local","dataDir":"` + dir + `"}`, "net1", nil, ""},
		{"another IPAM plugin", `,"ipam":{"type":"whereabouts","dataDir":"` + dir + `"}`, "eth0", nil, ""},
		{"no address yet", `,"ipam":{"type":"host-local","dataDir":"` + dir + `/none"}`, "eth0", nil, ""},
		{"a file in the directory's place", `,"ipam":{"type":"host-local","dataDir":"` + podnet + `/lock"}`, "eth0", nil, "not a directory"},
		{"a directory that is none", `,"ipam":{"type":"host-local","dataDir":5}`, "eth0", nil, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var said strings.Builder
			got, err := Plugin{Stderr: &said}.keptNames(conf(tt.conf), &skel.CmdArgs{ContainerID: "c1", IfName: tt.ifName})
			must(t, err)
			if diff := cmp.Diff(tt.want, got); diff != "" || !strings.Contains(said.String(), tt.said) {
				t.Errorf("said %q, names (-want +got):\n%s", said.String(), diff)
			}
		})
	}
	scarce(t, func() {
		_, err := Plugin{}.keptNames(conf(`,"ipam":{"type":"host-local","dataDir":"`+dir+`"}`), &skel.CmdArgs{ContainerID: "c1", IfName: "eth0"})
		wantAgain(t, err)
	})
}
