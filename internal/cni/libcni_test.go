// SPDX-License-Identifier: Apache-2.0

package cni

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"testing"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/internal/linux"
	"github.com/smcr-io/kube-smcr/internal/records"
	"github.com/smcr-io/kube-smcr/internal/testenv"
)

// pluginDir is where distributions put the reference plugins.
const pluginDir = "/usr/lib/cni"

// newNS makes a network namespace that ends with the test.
func newNS(t *testing.T) *linux.NetNS {
	t.Helper()
	path := filepath.Join(t.TempDir(), fmt.Sprintf("ks-%08x", rand.Uint32()))
	must(t, os.WriteFile(path, nil, 0o400))
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends here
		err := unix.Unshare(unix.CLONE_NEWNET)
		if err == nil {
			err = unix.Mount("/proc/thread-self/ns/net", path, "", unix.MS_BIND, "")
		}
		done <- err
	}()
	must(t, <-done)
	t.Cleanup(func() { must(t, errors.Join(unix.Unmount(path, unix.MNT_DETACH), os.Remove(path))) })
	ns, err := linux.OpenNetNS(path)
	must(t, err)
	t.Cleanup(func() { must(t, ns.Close()) })
	return ns
}

// buildPlugin builds smcr-cni and returns its directory.
func buildPlugin(t *testing.T) string {
	t.Helper()
	testenv.Builds("cmd/cni-plugin")
	dir := t.TempDir()
	cmd := exec.Command("go", "build", "-o", filepath.Join(dir, "smcr-cni"), "../../cmd/cni-plugin")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build smcr-cni: %v\n%s", err, out)
	}
	return dir
}

// A node is a namespace in which libcni runs plugins, as a container runtime
// does on a machine.
type node struct {
	ns    *linux.NetNS
	cni   *libcni.CNIConfig
	list  *libcni.NetworkConfigList
	store Store
	data  string
}

func newNode(t *testing.T, path []string, list string) *node {
	t.Helper()
	n := &node{ns: newNS(t), data: t.TempDir()}
	n.store = NewStore(n.data)
	n.cni = libcni.NewCNIConfigWithCacheDir(path, t.TempDir(), nil)
	expanded := os.Expand(list, func(k string) string {
		return map[string]string{"DATA": n.data, "IPAM": t.TempDir()}[k]
	})
	var err error
	n.list, err = libcni.ConfListFromBytes([]byte(expanded))
	must(t, err)
	return n
}

// do runs f in the node's namespace, where the plugins' processes start too.
func (n *node) do(t *testing.T, f func(ctx context.Context) error) {
	t.Helper()
	must(t, n.ns.Do(func() error { return f(t.Context()) }))
}

func (n *node) add(t *testing.T, rt *libcni.RuntimeConf) *types100.Result {
	t.Helper()
	var r types.Result
	n.do(t, func(ctx context.Context) (err error) {
		r, err = n.cni.AddNetworkList(ctx, n.list, rt)
		return err
	})
	res, err := types100.NewResultFromResult(r)
	must(t, err)
	return res
}

func runtimeConf(id string, ns *linux.NetNS) *libcni.RuntimeConf {
	return &libcni.RuntimeConf{
		ContainerID: id, NetNS: ns.Path(), IfName: "eth0",
		Args: [][2]string{{"IgnoreUnknown", "1"}, {"K8S_POD_NAMESPACE", "shop"}, {"K8S_POD_NAME", "cart-0"}, {"K8S_POD_UID", "u1"}},
	}
}

// podAddresses are the global addresses of eth0 in ns.
func podAddresses(t *testing.T, ns *linux.NetNS) (out []netip.Prefix) {
	t.Helper()
	must(t, ns.Do(func() error {
		it, err := net.InterfaceByName("eth0")
		if err != nil {
			return err
		}
		addrs, err := it.Addrs()
		for _, a := range addrs {
			if p := netip.MustParsePrefix(a.String()); !p.Addr().IsLinkLocalUnicast() {
				out = append(out, p)
			}
		}
		return err
	}))
	return out
}

func TestChainedBehindBridge(t *testing.T) {
	testenv.Need(t, testenv.Root, testenv.NetAdmin, testenv.Program("go"),
		testenv.Program(pluginDir+"/bridge"), testenv.Program(pluginDir+"/host-local"))
	path := []string{buildPlugin(t), pluginDir}
	for _, v := range []string{"0.3.1", "0.4.0", "1.0.0"} {
		t.Run(v, func(t *testing.T) {
			n := newNode(t, path, fmt.Sprintf(`{"cniVersion":%q,"name":"podnet","plugins":[
				{"type":"bridge","bridge":"ks0","isGateway":true,"ipam":{"type":"host-local","dataDir":"$IPAM",
				 "ranges":[[{"subnet":"10.99.8.0/24"}],[{"subnet":"fd99:8::/64"}]]}},
				{"type":"smcr-cni","dataDir":"$DATA"}]}`, v))
			pod := newNS(t)
			rt := runtimeConf("c1", pod)
			res := n.add(t, rt)
			a, err := n.store.Get("c1", "eth0")
			must(t, err)
			want := podAddresses(t, pod)
			sortPrefixes(want)
			got := slices.Clone(a.IPs)
			sortPrefixes(got)
			if diff := cmp.Diff(want, got, equalPrefixes); diff != "" || len(want) != 2 {
				t.Errorf("addresses of the record: %s", diff)
			}
			if len(res.IPs) != 2 || len(res.Interfaces) != 3 {
				t.Errorf("result %+v, want the bridge's", res)
			}
			if a.NetNSID != pod.ID() || a.NetNS != pod.Path() || a.Pod != (records.Pod{Namespace: "shop", Name: "cart-0", UID: "u1"}) || a.Network != "podnet" {
				t.Errorf("record %+v", a)
			}
			if v != "0.3.1" { // which has no CHECK
				n.do(t, func(ctx context.Context) error { return n.cni.CheckNetworkList(ctx, n.list, rt) })
				must(t, n.store.Delete("c1", "eth0")) // as if the disk had been full: the pod is on plain TCP
				n.do(t, func(ctx context.Context) error { return n.cni.CheckNetworkList(ctx, n.list, rt) })
			}
			n.add(t, runtimeConf("c2", newNS(t)))
			for range 2 { // DEL twice
				n.do(t, func(ctx context.Context) error {
					return errors.Join(n.cni.DelNetworkList(ctx, n.list, rt), n.cni.DelNetworkList(ctx, n.list, runtimeConf("c2", pod)))
				})
			}
			if as, junk, err := n.store.List(); len(as)+len(junk) != 0 || err != nil {
				t.Errorf("left: %v, %v, %v", as, junk, err)
			}
		})
	}
}

// staticPlugin speaks CNI 1.1, which the reference plugins of distributions do
// not: it gives every pod the same address, and changes nothing.
const staticPlugin = `#!/bin/sh
case "$CNI_COMMAND" in
VERSION) echo '{"cniVersion":"1.1.0","supportedVersions":["1.0.0","1.1.0"]}';;
ADD) cat >/dev/null; echo '{"cniVersion":"1.1.0","interfaces":[{"name":"'$CNI_IFNAME'","sandbox":"'$CNI_NETNS'"}],"ips":[{"interface":0,"address":"10.99.9.2/24"}]}';;
*) cat >/dev/null;;
esac
`

func TestChainedCNI11(t *testing.T) {
	testenv.Need(t, testenv.Root, testenv.NetAdmin, testenv.Program("go"), testenv.Program("sh"))
	static := t.TempDir()
	must(t, os.WriteFile(filepath.Join(static, "ks-static"), []byte(staticPlugin), 0o700))
	n := newNode(t, []string{buildPlugin(t), static}, `{"cniVersion":"1.1.0","name":"podnet","plugins":[
		{"type":"ks-static"},{"type":"smcr-cni","dataDir":"$DATA"}]}`)
	n.do(t, func(ctx context.Context) error { return n.cni.GetStatusNetworkList(ctx, n.list) })
	rts := []*libcni.RuntimeConf{runtimeConf("c1", newNS(t)), runtimeConf("c2", newNS(t))}
	for _, rt := range rts {
		res := n.add(t, rt)
		b, err := json.Marshal(res.IPs)
		must(t, err)
		if diff := cmp.Diff(`[{"interface":0,"address":"10.99.9.2/24"}]`, string(b)); diff != "" {
			t.Error(diff)
		}
		n.do(t, func(ctx context.Context) error { return n.cni.CheckNetworkList(ctx, n.list, rt) })
	}
	// The runtime forgot c1: it is not in the list of a GC.
	n.do(t, func(ctx context.Context) error {
		return n.cni.GCNetworkList(ctx, n.list, &libcni.GCArgs{
			ValidAttachments: []types.GCAttachment{{ContainerID: "c2", IfName: "eth0"}},
		})
	})
	as, junk, err := n.store.List()
	must(t, err)
	if len(as) != 1 || as[0].ContainerID != "c2" || len(junk) != 0 {
		t.Errorf("after GC: %v, %v, want c2", as, junk)
	}
}

func sortPrefixes(p []netip.Prefix) {
	slices.SortFunc(p, func(a, b netip.Prefix) int { return a.Addr().Compare(b.Addr()) })
}
