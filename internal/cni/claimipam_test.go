// SPDX-License-Identifier: Apache-2.0

package cni

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/google/go-cmp/cmp"

	"github.com/smcr-io/kube-smcr/internal/devices/claims"
	"github.com/smcr-io/kube-smcr/internal/devices/vf"
	"github.com/smcr-io/kube-smcr/internal/records"
)

// pool is an IPAM plugin that notes each call with the pool that its configuration names, and what it is given. Its
// route leaves the gateway out, and its DEL fails while there is a file "away".
const pool = `in=$(cat)
dir=$(dirname "$0")
echo "$in" > "$dir/in.$CNI_COMMAND"
echo "$CNI_ARGS" > "$dir/args.$CNI_COMMAND"
echo "$CNI_COMMAND $CNI_CONTAINERID $CNI_IFNAME $(echo "$in" | sed -n 's/.*"pool":"\([a-z]*\)".*/\1/p')" >> "$dir/calls"
[ "$CNI_COMMAND" != ADD ] || echo '{"cniVersion":"1.1.0","ips":[{"address":"10.97.2.2/24","gateway":"10.97.2.1"}],"routes":[{"dst":"10.50.0.0/16"},{"dst":"0.0.0.0/0"}]}'
if [ "$CNI_COMMAND" = DEL ] && [ -e "$dir/away" ]; then echo '{"cniVersion":"1.1.0","code":11,"msg":"no way to the pool"}'; exit 1; fi
`

// claimNode is a node whose network has smcr-cni with this IPAM behind another plugin, with a pod that claimed a VF.
func claimNode(t *testing.T, version, ipam string) (n *node, run *runHere, ipamDir string, relist func(ipam string)) {
	t.Helper()
	in := func(script string) string { // the results of 0.3.1 say the version of an address
		return strings.NewReplacer(`"cniVersion":"1.1.0"`, `"cniVersion":"`+version+`"`, `"address":`, `"version":"4","address":`).Replace(script)
	}
	ipamDir = scriptIPAM(t, "ks-ipam", in(pool))
	list := func(ipam string) string {
		return `{"cniVersion":"` + version + `","name":"podnet","plugins":[{"type":"ks-before"},{"type":"smcr-cni","dataDir":"$DATA"` + ipam + `}]}`
	}
	n, run = newWiringNode(t, []string{scriptIPAM(t, "ks-before", in(before)), ipamDir}, list(ipam))
	must(t, claims.NewStore(n.data).Write(claims.Claim{
		Namespace: "shop", Name: "nic", UID: "c-1", Pods: []records.Pod{{Namespace: "shop", Name: "cart-0", UID: "u1"}},
		Devices: []claims.Device{{ID: "0000:41:10.1", Request: "nic", Pool: "n1", Name: "a"}},
	}))
	return n, run, ipamDir, func(ipam string) {
		l, err := libcni.ConfListFromBytes([]byte(strings.ReplaceAll(list(ipam), "$DATA", n.data)))
		must(t, err)
		n.list = l
	}
}

// The chart's value of ipam may be changed while pods run: addresses go back to where they came from.
func TestWire_ipamChanges(t *testing.T) {
	needWiring(t)
	blue, green := `,"ipam":{"type":"ks-ipam","pool":"blue"}`, `,"ipam":{"type":"ks-ipam","pool":"green"}`
	for _, tt := range []struct {
		name, before, after, calls string
		lose                       bool
	}{
		{name: "another pool", before: blue, after: green, calls: "ADD c1 smcr0 blue\nCHECK c1 smcr0 blue\nDEL c1 smcr0 blue\n"},
		{name: "none any more", before: blue, after: "", calls: "ADD c1 smcr0 blue\nCHECK c1 smcr0 blue\nDEL c1 smcr0 blue\n"},
		{name: "none at first", before: "", after: green, calls: ""},
		{name: "the record is lost", before: blue, after: blue, lose: true, calls: "ADD c1 smcr0 blue\nCHECK c1 smcr0 blue\nDEL c1 smcr0 blue\n"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			n, run, ipamDir, relist := claimNode(t, "1.1.0", tt.before)
			rt := runtimeConf("c1", newNS(t))
			n.add(t, rt)
			relist(tt.after)
			n.do(t, func(ctx context.Context) error { return n.cni.CheckNetworkList(ctx, n.list, rt) })
			if tt.lose {
				must(t, n.store.Delete("c1", "eth0"))
			}
			n.do(t, func(ctx context.Context) error { return n.cni.DelNetworkList(ctx, n.list, rt) })
			run.host.home(t)
			calls, err := os.ReadFile(filepath.Join(ipamDir, "calls"))
			if !errors.Is(err, fs.ErrNotExist) {
				must(t, err)
			}
			if diff := cmp.Diff(tt.calls, string(calls)); diff != "" {
				t.Errorf("calls of the IPAM plugin (-want +got):\n%s", diff)
			}
		})
	}
}

// An IPAM plugin that cannot take an address back gets it at the next DEL, although that one finds no record, no device,
// and in old versions no result of ADD; and although the network has another IPAM plugin by then.
func TestWire_ipamAway(t *testing.T) {
	needWiring(t)
	blue := `,"ipam":{"type":"ks-ipam","pool":"blue"}`
	for _, tt := range []struct {
		name, version, after string
		dels                 int // in vain
		gc                   bool
		again                string // call of a DEL after all is given back, by the pod's claims
	}{
		{"version 0.3.1", "0.3.1", blue, 2, false, "DEL c1 smcr0 blue\n"},
		{"another pool", "1.1.0", `,"ipam":{"type":"ks-ipam","pool":"green"}`, 2, false, "DEL c1 smcr0 green\n"},
		{"no IPAM plugin any more", "1.1.0", "", 2, false, ""},
		{"another pool, by GC", "1.1.0", `,"ipam":{"type":"ks-ipam","pool":"green"}`, 2, true, ""},
		{"no IPAM plugin any more, by GC", "1.1.0", "", 2, true, ""},
		{"another pool, by GC without DEL", "1.1.0", `,"ipam":{"type":"ks-ipam","pool":"green"}`, 0, true, ""},
		{"no IPAM plugin any more, by GC without DEL", "1.1.0", "", 0, true, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			n, run, ipamDir, relist := claimNode(t, tt.version, blue)
			rt := runtimeConf("c1", newNS(t))
			n.add(t, rt)
			relist(tt.after)
			away := filepath.Join(ipamDir, "away")
			must(t, os.WriteFile(away, nil, 0o600))
			for range tt.dels {
				if err := n.ns.Do(func() error { return n.cni.DelNetworkList(t.Context(), n.list, rt) }); err == nil {
					t.Error("DEL says that an address was given back that was not")
				}
				run.host.home(t) // all the same
			}
			must(t, os.Remove(away))
			if tt.gc { // the runtime has given the pod up
				gc := libcni.NewCNIConfigWithCacheDir(n.cni.Path, t.TempDir(), run) // one that knows the pod would call DEL first
				n.do(t, func(ctx context.Context) error {
					return gc.GCNetworkList(ctx, n.list, &libcni.GCArgs{ValidAttachments: []types.GCAttachment{}})
				})
			}
			for i := 0; i < 2 && !tt.gc; i++ {
				n.do(t, func(ctx context.Context) error { return n.cni.DelNetworkList(ctx, n.list, rt) })
			}
			run.host.home(t)
			calls, err := os.ReadFile(filepath.Join(ipamDir, "calls"))
			must(t, err)
			want := "ADD c1 smcr0 blue\n" + strings.Repeat("DEL c1 smcr0 blue\n", tt.dels+1) + tt.again
			// Without a record and a result the interface is the one that the call is about.
			if got := regexp.MustCompile(`(DEL c1 eth0|GC) .*\n`).ReplaceAllString(string(calls), ""); got != want {
				t.Errorf("calls of the IPAM plugin %q, want %q", got, want)
			}
			args, err := os.ReadFile(filepath.Join(ipamDir, "args.DEL"))
			must(t, err)
			if !strings.Contains(string(args), "K8S_POD_NAME=cart-0;") {
				t.Errorf("the IPAM plugin's last DEL has the arguments %q, which name no pod", args)
			}
			if as, junk, err := owing(n.data).List(); len(as)+len(junk) != 0 || err != nil {
				t.Errorf("left: %v, %v, %v", as, junk, err)
			}
		})
	}
}

// The runtime's list of valid attachments has eth0 alone: GC must not give back the address of the VF beside it.
func TestWire_gcOfClaims(t *testing.T) {
	needWiring(t)
	n, run, ipamDir, _ := claimNode(t, "1.1.0", `,"ipam":{"type":"ks-ipam","pool":"blue"}`)
	n.add(t, runtimeConf("c1", newNS(t)))
	valid := func(attachments ...types.GCAttachment) (out []types.GCAttachment) {
		t.Helper()
		n.do(t, func(ctx context.Context) error {
			return n.cni.GCNetworkList(ctx, n.list, &libcni.GCArgs{ValidAttachments: attachments})
		})
		b, err := os.ReadFile(filepath.Join(ipamDir, "in.GC"))
		must(t, err)
		var conf wireConf
		must(t, json.Unmarshal(b, &conf))
		return *conf.ValidAttachments
	}
	eth0 := types.GCAttachment{ContainerID: "c1", IfName: "eth0"}
	if diff := cmp.Diff([]types.GCAttachment{eth0, {ContainerID: "c1", IfName: "smcr0"}}, valid(eth0)); diff != "" {
		t.Errorf("attachments that are valid to the IPAM plugin (-want +got):\n%s", diff)
	}
	if len(run.host.owners) != 1 {
		t.Errorf("GC took the VF from a pod that runs: %v", run.host.owners)
	}
	other := types.GCAttachment{ContainerID: "c9", IfName: "eth0"}
	if diff := cmp.Diff([]types.GCAttachment{other}, valid(other)); diff != "" {
		t.Errorf("attachments that are valid to the IPAM plugin when the pod is gone (-want +got):\n%s", diff)
	}
	run.host.home(t)

	rt := runtimeConf("c1", newNS(t))
	n.add(t, rt)
	// CRI-O knows nothing of a pod that Multus put into the network, and says null.
	fresh := libcni.NewCNIConfigWithCacheDir(n.cni.Path, t.TempDir(), run)
	err := n.ns.Do(func() error { return fresh.GCNetworkList(t.Context(), n.list, &libcni.GCArgs{}) })
	if err == nil || !strings.Contains(err.Error(), "cni.dev/valid-attachments; is missing") || len(run.host.owners) != 1 {
		t.Errorf("GC without a list: %v, and the pod that runs has %d VFs, want 1", err, len(run.host.owners))
	}
	n.do(t, func(ctx context.Context) error { return n.cni.DelNetworkList(ctx, n.list, rt) })
	run.host.home(t)
}

// A list that names the plugin may have a delegate, as of Multus, whose list names it too: the second call for a pod leaves what
// the first one made. The DEL by the outer list gives the addresses back by the name of the network that they are of.
func TestWire_twice(t *testing.T) {
	needWiring(t)
	n, run, ipamDir, _ := claimNode(t, "1.1.0", `,"ipam":{"type":"ks-ipam","pool":"blue"}`)
	ours := n.list.Plugins[1].Bytes
	once := n.list
	relist := func(old, replacement string) {
		t.Helper()
		l, err := libcni.ConfListFromBytes([]byte(strings.Replace(string(n.list.Bytes), old, replacement, 1)))
		must(t, err)
		n.list = l
	}
	relist(`{"type":"ks-before"}`, `{"type":"ks-before"},`+string(ours))
	if len(n.list.Plugins) != 3 {
		t.Fatalf("list %s", n.list.Bytes)
	}
	rt, twice := runtimeConf("c1", newNS(t)), n.list
	relist(`}]}`, `,"required":true}]}`) // of the second one alone
	var ce *types.Error
	err := n.ns.Do(func() error { _, err := n.cni.AddNetworkList(t.Context(), n.list, rt); return err })
	if !errors.As(err, &ce) || ce.Code != types.ErrTryAgainLater {
		t.Errorf("ADD without the agent that is required: %v, want code %d", err, types.ErrTryAgainLater)
	}
	n.do(t, func(ctx context.Context) error { return n.cni.DelNetworkList(ctx, n.list, rt) })
	run.host.home(t)
	must(t, os.Remove(filepath.Join(ipamDir, "calls")))
	n.list = twice
	var names []string
	made := n.add(t, rt)
	for _, it := range made.Interfaces {
		names = append(names, it.Name)
	}
	if diff := cmp.Diff([]string{"br0", "eth0", "smcr0"}, names); diff != "" {
		t.Errorf("interfaces of the result (-want +got):\n%s", diff)
	}
	n.do(t, func(ctx context.Context) error { return n.cni.CheckNetworkList(ctx, n.list, rt) })
	addAgain(t, n, rt)
	checkAs(t, n, run, rt, "outer", ours, made) // as CRI-O asks behind ADD
	n.list = once
	relist(`"name":"podnet"`, `"name":"outer"`)
	n.do(t, func(ctx context.Context) error { return n.cni.DelNetworkList(ctx, n.list, rt) })
	run.host.home(t)
	if diff := cmp.Diff([]string{"ADD c1 smcr0 blue", "CHECK c1 smcr0 blue", "CHECK c1 smcr0 blue", "CHECK c1 smcr0 blue", "DEL c1 smcr0 blue"}, ipamCalls(t, ipamDir)); diff != "" {
		t.Errorf("calls of the IPAM plugin (-want +got):\n%s", diff)
	}
	b, err := os.ReadFile(filepath.Join(ipamDir, "in.DEL"))
	must(t, err)
	var conf NetConf
	if must(t, json.Unmarshal(b, &conf)); conf.Name != "podnet" {
		t.Errorf("the IPAM plugin is to give back an address of network %q", conf.Name)
	}
}

// checkAs is CHECK by a network of this name.
func checkAs(t *testing.T, n *node, run *runHere, rt *libcni.RuntimeConf, network string, plugin []byte, made any) {
	t.Helper()
	var conf map[string]any
	must(t, json.Unmarshal(plugin, &conf))
	conf["cniVersion"], conf["name"], conf["prevResult"] = "1.1.0", network, made
	b, err := json.Marshal(conf)
	must(t, err)
	p := Plugin{Host: func(string) Host { return run.host }, Stderr: io.Discard}
	if err := p.check(&skel.CmdArgs{ContainerID: rt.ContainerID, IfName: rt.IfName, Netns: rt.NetNS, Path: strings.Join(n.cni.Path, ":"), StdinData: b}); err != nil {
		t.Errorf("CHECK by network %q: %v", network, err)
	}
}

// A second ADD of a pod whose claimed VF is there already is refused: the record that DEL needs to give the address back stays.
func TestWire_claimsAgain(t *testing.T) {
	needWiring(t)
	n, run, ipamDir, _ := claimNode(t, "1.1.0", `,"ipam":{"type":"ks-ipam","pool":"blue"}`)
	rt := runtimeConf("c1", newNS(t))
	n.add(t, rt)
	addAgain(t, n, rt)
	n.do(t, func(ctx context.Context) error { return n.cni.CheckNetworkList(ctx, n.list, rt) })
	n.do(t, func(ctx context.Context) error { return n.cni.DelNetworkList(ctx, n.list, rt) })
	run.host.home(t)
	calls, err := os.ReadFile(filepath.Join(ipamDir, "calls"))
	must(t, err)
	if diff := cmp.Diff("ADD c1 smcr0 blue\nCHECK c1 smcr0 blue\nDEL c1 smcr0 blue\n", string(calls)); diff != "" {
		t.Errorf("calls of the IPAM plugin (-want +got):\n%s", diff)
	}
}

// A pod gets as many claimed VFs as a record may have, by which CHECK and DEL know them. With more, ADD fails and takes
// all of them back: with a record that nobody can read their addresses would be lost.
func TestWire_manyClaims(t *testing.T) {
	needWiring(t)
	for _, tt := range []struct {
		name string
		vfs  int
	}{{"more than a network has", 17}, {"most", maxDevices}, {"too many", maxDevices + 1}} {
		t.Run(tt.name, func(t *testing.T) {
			n, run, ipamDir, _ := claimNode(t, "1.1.0", `,"ipam":{"type":"ks-ipam","pool":"blue"}`)
			var more []vf.Device
			claim := claims.Claim{Namespace: "shop", Name: "nic", UID: "c-1", Pods: []records.Pod{{Namespace: "shop", Name: "cart-0", UID: "u1"}}}
			for i := range tt.vfs {
				if i >= len(run.host.devices) {
					more = append(more, testVF(i))
				}
				claim.Devices = append(claim.Devices, claims.Device{ID: testVF(i).ID})
			}
			maps.Copy(run.host.devices, newFakeHost(t, n.ns, more...).devices)
			must(t, claims.NewStore(n.data).Write(claim))
			rt := runtimeConf("c1", newNS(t))
			if tt.vfs > maxDevices {
				addFails(t, n, run, rt, types.ErrIOFailure, fmt.Sprintf("%d devices, at most %d are allowed", tt.vfs, maxDevices))
			} else {
				n.add(t, rt)
				if a, err := n.store.Get("c1", "eth0"); err != nil || len(a.Devices) != tt.vfs {
					t.Errorf("record with %d devices, %v", len(a.Devices), err)
				}
				n.do(t, func(ctx context.Context) error { return n.cni.CheckNetworkList(ctx, n.list, rt) })
				n.do(t, func(ctx context.Context) error { return n.cni.DelNetworkList(ctx, n.list, rt) })
				run.host.home(t)
			}
			calls, err := os.ReadFile(filepath.Join(ipamDir, "calls"))
			must(t, err)
			if add, del := strings.Count(string(calls), "ADD"), strings.Count(string(calls), "DEL"); add != tt.vfs || del != tt.vfs {
				t.Errorf("the IPAM plugin gave %d addresses, and got %d back", add, del)
			}
		})
	}
}

// An attachment whose record is lost gives back the addresses of all interfaces that the host, or the runtime by
// the result of ADD, knows it has: also after a reboot, when there is no journal either.
func TestUnrecorded(t *testing.T) {
	const eth0, smcr0 = `{"name":"eth0","sandbox":"/run/netns/a"}`, `{"name":"smcr0","sandbox":"/run/netns/a"}`
	owned := testVF(0)
	owned.State, owned.PodIfName, owned.Owner = vf.StatePod, "smcr0", &vf.Owner{ContainerID: "c1", IfName: "eth0"}
	others := owned
	others.PodIfName, others.Owner = "smcr7", &vf.Owner{ContainerID: "c2", IfName: "eth0"}
	for _, tt := range []struct {
		name, conf string
		devices    []vf.Device
		want       []string
	}{
		{"no IPAM plugin", `"prevResult":{"interfaces":[` + eth0 + `,` + smcr0 + `]}`, nil, nil},
		{"a pod without claims", `"ipam":{"type":"x"},"prevResult":{"interfaces":[{"name":"br0"},` + eth0 + `]}`, []vf.Device{others}, nil},
		{"by the host", `"ipam":{"type":"x"},"prevResult":{}`, []vf.Device{owned, others}, []string{"smcr0"}},
		{"by the result", `"ipam":{"type":"x"},"prevResult":{"interfaces":[{"name":"br0"},` + eth0 + `,` + smcr0 + `]}`, nil, []string{"smcr0"}},
		{"by both", `"ipam":{"type":"x"},"prevResult":{"interfaces":[` + eth0 + `,` + smcr0 + `]}`, []vf.Device{owned}, []string{"smcr0"}},
		{"its own interface", `"ipam":{"type":"x"},"deviceID":"0000:41:10.0"`, nil, []string{"eth0"}},
		{"junk", `"ipam":{"type":"x"},"prevResult":{"interfaces":7}`, nil, nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c, err := ParseNetConf([]byte(`{"cniVersion":"1.1.0","name":"podnet","type":"smcr-cni",` + tt.conf + `}`))
			must(t, err)
			h := &fakeHost{devices: map[string]vf.Device{}}
			for _, d := range tt.devices {
				h.devices[d.Owner.ContainerID] = d
			}
			p := Plugin{Host: func(string) Host { return h }, Stderr: io.Discard}
			got, err := p.unrecorded(c, &skel.CmdArgs{ContainerID: "c1", IfName: "eth0"})
			must(t, err)
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("interfaces (-want +got):\n%s", diff)
			}
		})
	}
}

// An interface without a name gets one that no other device of the pod has: else ADD would fail for ever.
func TestClaimed_names(t *testing.T) {
	data := t.TempDir()
	must(t, claims.NewStore(data).Write(claims.Claim{
		Namespace: "shop", Name: "nics", UID: "c-1", Pods: []records.Pod{{Namespace: "shop", Name: "cart-0", UID: "u1"}},
		Devices: []claims.Device{{ID: "a"}, {ID: "b", IfName: "smcr0"}, {ID: "c"}, {ID: "d"}, {ID: "e", IfName: "smcr3"}},
	}))
	p := Plugin{Host: func(string) Host { return &fakeHost{} }, Stderr: io.Discard}
	var got []string
	requests, err := p.claimed(NetConf{DataDir: data}, Attachment{ContainerID: "c1", IfName: "eth0", Pod: records.Pod{UID: "u1"}})
	must(t, err)
	for _, r := range requests {
		got = append(got, r.device+" "+r.ifName)
	}
	if diff := cmp.Diff([]string{"a smcr1", "b smcr0", "c smcr2", "d smcr4", "e smcr3"}, got); diff != "" {
		t.Errorf("interfaces (-want +got):\n%s", diff)
	}
}

// scarce calls f without any descriptors but those that are open.
func scarce(t *testing.T, f func()) {
	t.Helper()
	var limit syscall.Rlimit
	must(t, syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit))
	must(t, syscall.Setrlimit(syscall.RLIMIT_NOFILE, &syscall.Rlimit{Cur: 1, Max: limit.Max}))
	f()
	must(t, syscall.Setrlimit(syscall.RLIMIT_NOFILE, &limit))
}

// wantAgain fails unless err is the CNI error for a call that is to come again, for want of descriptors.
func wantAgain(t *testing.T, err error) {
	t.Helper()
	var e *types.Error
	if !errors.As(err, &e) || e.Code != types.ErrTryAgainLater || !strings.Contains(e.Details, "too many open files") {
		t.Errorf("error %v, want code %d", err, types.ErrTryAgainLater)
	}
}

// A pod does not start without the devices that it claimed because the records of claims could not be read for want of
// descriptors: its ADD is tried again. A directory of claims that is broken stops no pod.
func TestClaimed_unread(t *testing.T) {
	data := t.TempDir()
	store := claims.NewStore(data)
	must(t, store.Write(claims.Claim{
		Namespace: "shop", Name: "nics", UID: "c-1", Pods: []records.Pod{{Namespace: "shop", Name: "cart-0", UID: "u1"}}, Devices: []claims.Device{{ID: "a"}},
	}))
	p := Plugin{Host: func(string) Host { return &fakeHost{} }, Stderr: io.Discard}
	a := Attachment{ContainerID: "c1", IfName: "eth0", Pod: records.Pod{UID: "u1"}}
	scarce(t, func() {
		_, err := p.claimed(NetConf{DataDir: data}, a)
		wantAgain(t, err)
	})
	must(t, store.RemoveAll())
	must(t, os.WriteFile(store.Dir(), nil, 0o600))
	if got, err := p.claimed(NetConf{DataDir: data}, a); len(got) > 0 || err != nil {
		t.Errorf("with a file in the place of the directory: %+v, error %v", got, err)
	}
}

// DEL comes again if it cannot see for want of descriptors what addresses the pod may have, and leaves the record until then.
func TestDelIPAM_unread(t *testing.T) {
	c := NetConf{DataDir: t.TempDir()}
	c.IPAM.Type, c.prevResult = "none", json.RawMessage("{}")
	must(t, claims.NewStore(c.DataDir).Write(claims.Claim{
		Namespace: "shop", Name: "nics", UID: "c-1", Pods: []records.Pod{{Namespace: "shop", Name: "cart-0", UID: "u1"}}, Devices: []claims.Device{{ID: "a"}},
	}))
	p := Plugin{Host: func(string) Host { return &fakeHost{} }, Stderr: io.Discard}
	args := &skel.CmdArgs{ContainerID: "c1", IfName: "eth0", Args: podArgs("c1", records.Pod{Namespace: "shop", Name: "cart-0", UID: "u1"})}
	scarce(t, func() {
		_, err := p.giveBack(t.Context(), c, args, Attachment{}, ErrNoAttachment)
		wantAgain(t, err)
		kept, _, err := p.delIPAM(c, args)
		wantAgain(t, err)
		if !kept {
			t.Error("a record that was not read is removed")
		}
	})
	p.Host = func(string) Host { return unlistedHost{&fakeHost{}} }
	_, err := p.giveBack(t.Context(), c, args, Attachment{}, ErrNoAttachment)
	wantAgain(t, err)
}

// A pod without a record keeps its devices while it cannot be seen for want of descriptors what addresses it has: with the devices the next DEL would
// miss the names of their interfaces, and so the addresses.
func TestDel_unread(t *testing.T) {
	dir, detached := t.TempDir(), 0
	h := &fakeHost{detaches: func() { detached++ }}
	args := &skel.CmdArgs{ContainerID: "c1", IfName: "eth0", StdinData: []byte(
		`{"cniVersion":"1.1.0","name":"podnet","type":"smcr-cni","dataDir":"` + dir + `","agentSocket":"` + dir + `/agent.sock","ipam":{"type":"none"},"prevResult":{"cniVersion":"1.1.0"}}`)}
	p := Plugin{Host: func(string) Host { return unlistedHost{h} }, Stderr: io.Discard}
	wantAgain(t, p.del(args))
	if detached != 0 {
		t.Errorf("devices taken back %d times, while it is not known what addresses the pod had", detached)
	}
	p.Host = func(string) Host { return h }
	must(t, p.del(args))
	if detached == 0 {
		t.Error("the next DEL leaves the devices")
	}
}

// unlistedHost is a machine whose devices cannot be listed for want of descriptors.
type unlistedHost struct{ *fakeHost }

func (unlistedHost) Devices() ([]vf.Device, error) { return nil, syscall.EMFILE }

// TestClaimed_first: claimed devices belong to the pod's first attachment, also if Multus calls the plugins of another one before.
func TestClaimed_first(t *testing.T) {
	needWiring(t)
	n, run, ipamDir, relist := claimNode(t, "1.1.0", `,"ipam":{"type":"ks-ipam","pool":"blue"}`)
	pod := newNS(t)
	first, second := runtimeConf("c1", pod), runtimeConf("c1", pod)
	second.IfName = "net1"
	relist("")
	n.add(t, second)
	relist(`,"ipam":{"type":"ks-ipam","pool":"blue"}`)
	n.add(t, first)
	got, err := os.ReadFile(filepath.Join(ipamDir, "calls"))
	must(t, err)
	if string(got) != "ADD c1 smcr0 blue\n" {
		t.Errorf("calls of the IPAM plugin %q", got)
	}
	for _, rt := range []*libcni.RuntimeConf{first, second} {
		n.do(t, func(ctx context.Context) error { return n.cni.DelNetworkList(ctx, n.list, rt) })
	}
	run.host.home(t)
}

// TestWire_defaultRoute: the default route that an IPAM plugin gives to everybody takes nothing from the pod's own.
func TestWire_defaultRoute(t *testing.T) {
	table := 7
	_, all4, _ := net.ParseCIDR("0.0.0.0/0")
	_, all6, _ := net.ParseCIDR("::/0")
	_, some, _ := net.ParseCIDR("10.50.0.0/16")
	res := &types100.Result{Routes: []*types.Route{{Dst: *all4}, {Dst: *some}, {Dst: *all6}, {Dst: *all4, Priority: 900}, {Dst: *all4, Table: &table}}}
	var said strings.Builder
	w := wiring{p: Plugin{Stderr: &said}, args: &skel.CmdArgs{IfName: "eth0"}}
	w.dropDefaults("smcr0", res)
	if len(res.Routes) != 3 || res.Routes[0].Dst.String() != "10.50.0.0/16" {
		t.Errorf("routes that are left: %v", res.Routes)
	}
	if strings.Count(said.String(), "smcr0 is left out") != 2 {
		t.Errorf("said %q", said.String())
	}
}

// TestCheck_withoutRecord: a pod without a record is on plain TCP, which is as ADD may have left it: unless
// the network says "required", or a device is in the pod, for which there was a record.
func TestCheck_withoutRecord(t *testing.T) {
	owned := testVF(0)
	owned.State, owned.Owner = vf.StatePod, &vf.Owner{ContainerID: "c1", IfName: "eth0"}
	for _, tt := range []struct {
		name, conf string
		devices    map[string]vf.Device
		want       uint
	}{
		{"plain TCP", "", nil, 0},
		{"required", `,"required":true`, nil, CodeRecord},
		{"with a device", "", map[string]vf.Device{"a": owned}, CodeRecord},
	} {
		pod := newNS(t)
		p := Plugin{Host: func(string) Host { return &fakeHost{devices: tt.devices} }, Stderr: io.Discard}
		err := p.check(&skel.CmdArgs{ContainerID: "c1", IfName: "eth0", Netns: pod.Path(), StdinData: []byte(
			`{"cniVersion":"1.1.0","name":"podnet","type":"smcr-cni","dataDir":"` + t.TempDir() + `"` + tt.conf +
				`,"prevResult":{"cniVersion":"1.1.0","interfaces":[{"name":"eth0","sandbox":"` + pod.Path() + `"}],"ips":[{"interface":0,"address":"10.0.0.2/24"}]}}`)})
		var ce *types.Error
		if errors.As(err, &ce); ce != nil && ce.Code != tt.want || ce == nil && (err != nil || tt.want != 0) {
			t.Errorf("%s: CHECK: %v, want code %d", tt.name, err, tt.want)
		}
	}
}

// TestDeviceInfoElsewhere: a device-info file is in the directory for them, and any other file of the node is left alone.
func TestDeviceInfoElsewhere(t *testing.T) {
	file := filepath.Join(t.TempDir(), "kubelet.conf")
	must(t, os.WriteFile(file, []byte("x"), 0o600))
	var said strings.Builder
	p := Plugin{Host: func(string) Host { return &fakeHost{} }, Stderr: &said}
	args := &skel.CmdArgs{ContainerID: "c1", IfName: "eth0", Netns: newNS(t).Path(), StdinData: []byte(
		`{"cniVersion":"0.3.1","name":"x","type":"smcr-cni","dataDir":"` + t.TempDir() + `","runtimeConfig":{"CNIDeviceInfoFile":"` + file + `"}}`)}
	var ce *types.Error
	if err := p.add(args); !errors.As(err, &ce) || !strings.Contains(ce.Msg, "CNIDeviceInfoFile") {
		t.Errorf("ADD: %v", err)
	}
	if err := p.del(args); err != nil || !strings.Contains(said.String(), "leaves the device-info file") {
		t.Errorf("DEL: %v, said %q", err, said.String())
	}
	if _, err := os.Stat(file); err != nil {
		t.Errorf("the file is gone: %v", err)
	}
}
