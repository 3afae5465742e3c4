// SPDX-License-Identifier: Apache-2.0

package cni

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/google/go-cmp/cmp"

	"github.com/smcr-io/kube-smcr/internal/devices/claims"
	"github.com/smcr-io/kube-smcr/internal/devices/vf"
	"github.com/smcr-io/kube-smcr/internal/records"
)

// ipamCalls are the calls of the pool in a directory, sorted: some are made at the same time.
func ipamCalls(t *testing.T, dir string) []string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(dir, "calls"))
	if !errors.Is(err, fs.ErrNotExist) {
		must(t, err)
	}
	calls := strings.Split(strings.TrimSpace(string(b)), "\n")
	slices.Sort(calls)
	return calls
}

// An attachment that a VF is taken back from, because no DEL came for it, gives its addresses back, and has no record any more.
func TestWire_former(t *testing.T) {
	needWiring(t)
	for _, tt := range []struct {
		name  string
		uid   string // of the pod that gets the VF then
		ended bool   // the former pod's namespace is gone
	}{{"another sandbox of the same pod", "u1", false}, {"another pod", "u2", true}} {
		t.Run(tt.name, func(t *testing.T) {
			n, run, ipamDir, _ := claimNode(t, "1.1.0", `,"ipam":{"type":"ks-ipam","pool":"blue"}`)
			n.add(t, runtimeConf("c1", newNS(t)))
			must(t, claims.NewStore(n.data).Write(claims.Claim{
				Namespace: "shop", Name: "nic", UID: "c-1", Pods: []records.Pod{{Namespace: "shop", Name: "cart-0", UID: tt.uid}},
				Devices: []claims.Device{{ID: "0000:41:10.1", Request: "nic", Pool: "n1", Name: "a"}},
			}))
			if tt.ended {
				run.host.ended = "c1"
			}
			rt := runtimeConf("c2", newNS(t))
			rt.Args[3][1] = tt.uid
			n.add(t, rt)
			want := []string{"ADD c1 smcr0 blue", "ADD c2 smcr0 blue", "DEL c1 smcr0 blue"}
			if diff := cmp.Diff(want, ipamCalls(t, ipamDir)); diff != "" {
				t.Errorf("calls of the IPAM plugin (-want +got):\n%s", diff)
			}
			if as, junk, err := n.store.List(); len(as) != 1 || as[0].ContainerID != "c2" || len(junk) != 0 || err != nil {
				t.Errorf("records %v, %v, %v, want that of c2", as, junk, err)
			}
			n.do(t, func(ctx context.Context) error { return n.cni.DelNetworkList(ctx, n.list, rt) })
			run.host.home(t)
		})
	}
}

// A VF that its pod keeps takes nothing from the pod.
func TestWire_formerStays(t *testing.T) {
	needWiring(t)
	n, run, ipamDir, _ := claimNode(t, "1.1.0", `,"ipam":{"type":"ks-ipam","pool":"blue"}`)
	first := runtimeConf("c1", newNS(t))
	n.add(t, first)
	must(t, claims.NewStore(n.data).Write(claims.Claim{
		Namespace: "shop", Name: "nic", UID: "c-2", Pods: []records.Pod{{Namespace: "shop", Name: "cart-1", UID: "u2"}},
		Devices: []claims.Device{{ID: "0000:41:10.1", Request: "nic", Pool: "n1", Name: "a"}},
	}))
	rt := runtimeConf("c2", newNS(t))
	rt.Args[3][1] = "u2"
	if err := n.ns.Do(func() error { _, err := n.cni.AddNetworkList(t.Context(), n.list, rt); return err }); err == nil {
		t.Fatal("the VF of another pod was given away")
	}
	if calls := ipamCalls(t, ipamDir); slices.Contains(calls, "DEL c1 smcr0 blue") {
		t.Errorf("calls of the IPAM plugin %q", calls)
	}
	n.do(t, func(ctx context.Context) error { return n.cni.CheckNetworkList(ctx, n.list, first) })
	n.do(t, func(ctx context.Context) error { return n.cni.DelNetworkList(ctx, n.list, first) })
	run.host.home(t)
}

// The DEL after an ADD that was killed while the IPAM plugin gave an address, before anything else was written, gives that address back.
func TestWire_killedBeforeAttach(t *testing.T) {
	needWiring(t)
	n, _, ipamDir, _ := claimNode(t, "1.1.0", `,"ipam":{"type":"ks-ipam","pool":"blue"}`)
	n.do(t, func(ctx context.Context) error { return n.cni.DelNetworkList(ctx, n.list, runtimeConf("c1", newNS(t))) })
	if diff := cmp.Diff([]string{"DEL c1 eth0 blue", "DEL c1 smcr0 blue"}, ipamCalls(t, ipamDir)); diff != "" {
		t.Errorf("calls of the IPAM plugin (-want +got):\n%s", diff)
	}
}

// What DEL gives back without a record has the names that ADD chose, also when the host knows some of the devices.
func TestUnrecorded_claims(t *testing.T) {
	data := t.TempDir()
	must(t, claims.NewStore(data).Write(claims.Claim{
		Namespace: "shop", Name: "nics", UID: "c-1", Pods: []records.Pod{{Namespace: "shop", Name: "cart-0", UID: "u1"}},
		Devices: []claims.Device{{ID: "a"}, {ID: "b"}, {ID: "c"}, {ID: "d", IfName: "roce"}, {ID: "e", Shared: true}},
	}))
	owned := func(name, ifName string) vf.Device {
		return vf.Device{State: vf.StatePod, PodIfName: name, Owner: &vf.Owner{ContainerID: "c1", IfName: ifName}}
	}
	h := &fakeHost{devices: map[string]vf.Device{"a": owned("net1", "net1"), "b": owned("smcr0", "eth0")}}
	p := Plugin{Host: func(string) Host { return h }, Stderr: io.Discard}
	c := NetConf{DataDir: data}
	c.IPAM.Type = "x"
	got, err := p.unrecorded(c, &skel.CmdArgs{ContainerID: "c1", IfName: "eth0", Args: podArgs("c1", records.Pod{Namespace: "shop", Name: "cart-0", UID: "u1"})})
	must(t, err)
	if diff := cmp.Diff([]string{"eth0", "smcr0", "smcr1", "roce"}, got); diff != "" {
		t.Errorf("interfaces (-want +got):\n%s", diff)
	}
}
