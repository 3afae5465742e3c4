// SPDX-License-Identifier: Apache-2.0

package install

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/containernetworking/cni/libcni"

	"github.com/smcr-io/kube-smcr/internal/cni"
	"github.com/smcr-io/kube-smcr/internal/records"
	"github.com/smcr-io/kube-smcr/internal/testenv"
)

// fakePlugin is every plugin of every network: it answers ADD with one address,
// or with the result of the plugin before it.
const fakePlugin = `#!/bin/sh
in=$(cat)
v=$(echo "$in" | sed -n 's/.*"cniVersion":"\([0-9.]*\)".*/\1/p')
case "$CNI_COMMAND" in
VERSION) echo '{"cniVersion":"1.1.0","supportedVersions":["0.3.0","0.3.1","0.4.0","1.0.0","1.1.0"]}';;
ADD) echo '{"cniVersion":"'$v'","interfaces":[{"name":"'$CNI_IFNAME'","sandbox":"'$CNI_NETNS'"}],"ips":[{"version":"4","interface":0,"address":"10.99.9.2/24"}]}';;
esac
`

// TestLibcniExecutes lets libcni load the configurations that the installer changed, and execute them with the
// real plugin.
func TestLibcniExecutes(t *testing.T) {
	testenv.Need(t, testenv.Program("go"), testenv.Program("sh"))
	testenv.Builds("cmd/cni-plugin")
	bin := filepath.Join(t.TempDir(), "smcr-cni")
	build := exec.Command("go", "build", "-trimpath", "-ldflags=-s -w", "-o", bin, "../../../cmd/cni-plugin")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build smcr-cni: %v\n%s", err, out)
	}
	paths, err := filepath.Glob("testdata/net.d/*")
	must(t, err)
	for _, path := range paths {
		t.Run(filepath.Base(path), func(t *testing.T) {
			h := newHost(t)
			h.source = bin
			in := h.installer()
			data := t.TempDir()
			in.entry, err = PluginConf{DataDir: data}.entry()
			must(t, err)
			h.write(filepath.Base(path), string(mustRead(t, path)))
			in.pass()
			s := in.Status()
			if !s.Working() {
				t.Fatalf("%+v", s)
			}
			list, err := libcni.NetworkConfFromFile(h.conf(s.File))
			must(t, err)
			for _, p := range list.Plugins {
				if name := p.Network.Type; name != cni.PluginType {
					must(t, os.WriteFile(filepath.Join(h.bin, name), []byte(fakePlugin), 0o755))
				}
			}
			c := libcni.NewCNIConfigWithCacheDir([]string{h.bin}, t.TempDir(), nil)
			rt := &libcni.RuntimeConf{
				ContainerID: "c1", NetNS: otherNamespace(t), IfName: "eth0",
				Args: [][2]string{{"K8S_POD_NAMESPACE", "shop"}, {"K8S_POD_NAME", "cart-0"}, {"K8S_POD_UID", "u1"}},
			}
			res, err := c.AddNetworkList(t.Context(), list, rt)
			must(t, err)
			b, err := json.Marshal(res)
			must(t, err)
			if !strings.Contains(string(b), "10.99.9.2/24") {
				t.Errorf("result %s", b)
			}
			a, err := cni.NewStore(data).Get("c1", "eth0")
			must(t, err)
			if a.Pod != (records.Pod{Namespace: "shop", Name: "cart-0", UID: "u1"}) || a.Network != s.Network {
				t.Errorf("record %+v", a)
			}
			must(t, c.DelNetworkList(t.Context(), list, rt))
			if as, junk, err := cni.NewStore(data).List(); len(as)+len(junk) != 0 || err != nil {
				t.Errorf("left %v, %v, %v", as, junk, err)
			}
			must(t, in.Uninstall(t.Context())) // the installer knows the real plugin by the build information that Go wrote into the file
			if strings.Contains(strings.Join(h.names(), " "), "smcr") {
				t.Errorf("left %v", h.names())
			}
		})
	}
}

// otherNamespace is a network namespace that is not the test's. The plugin refuses its own namespace, and enters
// no other one.
func otherNamespace(t *testing.T) string {
	t.Helper()
	testenv.Need(t, testenv.Root, testenv.NetAdmin, testenv.Program("unshare"), testenv.Program("sleep"))
	cmd := exec.CommandContext(t.Context(), "unshare", "-n", "sleep", "60")
	must(t, cmd.Start())
	t.Cleanup(func() { _ = cmd.Wait() }) // killed with the test's context
	path := "/proc/" + strconv.Itoa(cmd.Process.Pid) + "/ns/net"
	own, err := os.Readlink("/proc/self/ns/net")
	must(t, err)
	h := &host{t: t}
	h.wait("a namespace", func() bool {
		ns, err := os.Readlink(path)
		return err == nil && ns != own
	})
	return path
}
