// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/smcr-io/kube-smcr/internal/cni"
	"github.com/smcr-io/kube-smcr/internal/config"
	"github.com/smcr-io/kube-smcr/internal/linux"
	"github.com/smcr-io/kube-smcr/internal/records"
)

// TestAdopter: which pods get a record of ours, and which lose it.
func TestAdopter(t *testing.T) {
	type ns struct {
		name  string
		inode uint64
		ip    string
	}
	adoptedA := cni.Attachment{
		ContainerID: "adopted-ua", IfName: "eth0", NetNSID: 1, Network: adoptedNetwork,
		Pod: records.Pod{Namespace: "shop", Name: "a", UID: "ua"}, IPs: []netip.Prefix{netip.MustParsePrefix("10.0.0.1/24")},
	}
	byPlugin := func(id string, inode uint64) cni.Attachment {
		r := adoptedA
		r.ContainerID, r.NetNSID, r.Network = id, inode, "kindnet"
		return r
	}
	pod := func(uid string, in bool) config.Verdict {
		return config.Verdict{Namespace: "shop", Name: uid[1:], UID: uid, NodeUID: uid, OptedIn: in}
	}
	// The pod "a" is static, and what is recorded of it has its own UID. UID is that of its mirror.
	mirrored := func(nodeUID string) config.Verdict {
		return config.Verdict{Namespace: "shop", Name: "a", UID: "ua", NodeUID: nodeUID, OptedIn: true}
	}
	static := func(r cni.Attachment) cni.Attachment {
		r.Pod.UID = "d4"
		return r
	}
	tests := []struct {
		name       string
		pods       []config.Verdict
		namespaces []ns
		records    []cni.Attachment
		passes     int
		want       []string // container IDs
	}{
		{"opted in", []config.Verdict{pod("ua", true)}, []ns{{"x", 9, "10.0.0.9"}, {"y", 1, "10.0.0.1"}}, nil, 2, []string{"adopted-ua"}},
		{"the plugin is given a pass first", []config.Verdict{pod("ua", true)}, []ns{{"y", 1, "10.0.0.1"}}, nil, 1, nil},
		{"not opted in", []config.Verdict{pod("ua", false)}, []ns{{"y", 1, "10.0.0.1"}}, nil, 3, nil},
		{"in the node's network, of which the addresses are no pod's", []config.Verdict{pod("uh", true)}, []ns{{"y", 1, "10.0.0.1"}}, nil, 3, nil},
		{"no namespace", []config.Verdict{pod("ua", true)}, []ns{{"y", 1, "10.0.0.7"}, {"gone", 0, ""}}, nil, 3, nil},
		{"namespace of another record", []config.Verdict{pod("ua", true)}, []ns{{"y", 1, "10.0.0.1"}}, []cni.Attachment{func() cni.Attachment {
			r := byPlugin("c1", 1)
			r.Pod.UID = "other"
			return r
		}()}, 3, []string{"c1"}},
		{"has a record", []config.Verdict{pod("ua", true)}, []ns{{"y", 1, "10.0.0.1"}}, []cni.Attachment{byPlugin("c1", 1)}, 3, []string{"c1"}},
		{"stays adopted", []config.Verdict{pod("ua", true)}, []ns{{"y", 1, "10.0.0.1"}}, []cni.Attachment{adoptedA}, 3, []string{"adopted-ua"}},
		{"stays while opted out", []config.Verdict{pod("ua", false)}, []ns{{"y", 1, "10.0.0.1"}}, []cni.Attachment{adoptedA}, 3, []string{"adopted-ua"}},
		{"static", []config.Verdict{mirrored("d4")}, []ns{{"y", 1, "10.0.0.1"}}, nil, 2, []string{"adopted-ua"}},
		{"static, has a record", []config.Verdict{mirrored("d4")}, []ns{{"y", 1, "10.0.0.1"}, {"z", 2, "10.0.0.1"}}, []cni.Attachment{static(byPlugin("c1", 1))}, 3, []string{"c1"}},
		{"static, of an earlier mirror", []config.Verdict{mirrored("d4")}, []ns{{"y", 1, "10.0.0.1"}}, []cni.Attachment{static(adoptedA)}, 3, []string{"adopted-ua"}},
		{"static, made anew with other contents", []config.Verdict{mirrored("d5")}, nil, []cni.Attachment{static(adoptedA)}, 1, nil},
		{"a pod that claims to be another one", []config.Verdict{pod("ua", true), {Namespace: "evil", Name: "m", UID: "um", NodeUID: "ua", OptedIn: true}}, []ns{{"y", 1, "10.0.0.1"}}, nil, 3, []string{"adopted-ua"}},
		{"a pod that claims to be one that is gone", []config.Verdict{{Namespace: "evil", Name: "m", UID: "um", NodeUID: "ua", OptedIn: true}}, nil, []cni.Attachment{adoptedA}, 1, nil},
		{"pod is gone", []config.Verdict{pod("ub", false)}, nil, []cni.Attachment{adoptedA}, 1, nil},
		{"on two interfaces", []config.Verdict{pod("ua", true)}, []ns{{"y", 1, "10.0.0.1"}}, []cni.Attachment{adoptedA, func() cni.Attachment {
			r := adoptedA
			r.IfName = "net1"
			return r
		}()}, 3, []string{"adopted-ua", "adopted-ua"}},
		{"namespace is gone", []config.Verdict{pod("ua", true)}, nil, []cni.Attachment{adoptedA}, 1, nil},
		{"new sandbox in the place of the old one", []config.Verdict{pod("ua", true)}, []ns{{"y", 2, "10.0.0.1"}}, []cni.Attachment{adoptedA}, 1, nil},
		{"new sandbox without the plugin", []config.Verdict{pod("ua", true)}, []ns{{"x", 1, "10.0.0.1"}}, []cni.Attachment{func() cni.Attachment {
			r := adoptedA
			r.NetNSID = 7
			return r
		}()}, 2, []string{"adopted-ua"}},
		{"new sandbox", []config.Verdict{pod("ua", true)}, []ns{{"z", 2, "10.0.0.1"}}, []cni.Attachment{adoptedA, byPlugin("c2", 2)}, 1, []string{"c2"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			dir := t.TempDir()
			store := cni.NewStore(filepath.Join(dir, "data"))
			for _, r := range tt.records {
				r.NetNS = filepath.Join(dir, "netns", "y")
				if err := store.Write(r); err != nil {
					t.Fatal(err)
				}
			}
			if err := store.MakeDir(); err != nil {
				t.Fatal(err)
			}
			a := newAdopter(store, slog.New(slog.DiscardHandler))
			a.sandboxes = func() (sandboxes, error) { return nil, nil }
			a.namespaces = filepath.Join(dir, "netns")
			if err := os.Mkdir(a.namespaces, 0o755); err != nil {
				t.Fatal(err)
			}
			at := map[string]ns{}
			for _, n := range tt.namespaces {
				path := filepath.Join(a.namespaces, n.name)
				at[path] = n
				if err := os.WriteFile(path, nil, 0o600); err != nil {
					t.Fatal(err)
				}
			}
			a.look = func(path string) (map[string][]netip.Prefix, uint64, error) {
				n := at[path]
				if n.inode == 0 {
					return nil, 0, linux.ErrGone
				}
				return map[string][]netip.Prefix{"eth0": {netip.PrefixFrom(netip.MustParseAddr(n.ip), 24)}}, n.inode, nil
			}
			a.inode = func(path string) (uint64, error) {
				if at[path].inode == 0 {
					return 0, linux.ErrGone
				}
				return at[path].inode, nil
			}
			for range tt.passes {
				ips := map[string][]netip.Addr{"ua": {netip.MustParseAddr("10.0.0.1")}}
				if err := a.pass(tt.pods, ips); err != nil {
					t.Fatal(err)
				}
			}
			records, junk, err := store.List()
			if err != nil || len(junk) > 0 {
				t.Fatal(err, junk)
			}
			var got []string
			for _, r := range records {
				got = append(got, r.ContainerID)
				if r.Network == adoptedNetwork && (r.Pod != onNode(tt.pods[0]) || r.NetNSID != 1 || r.IPs[0] != adoptedA.IPs[0]) {
					t.Errorf("record %+v", r)
				}
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("records (-want +got):\n%s", diff)
			}
		})
	}
}

// TestAttack_adoptForeignAddress: which network namespace is a pod's, when several have the pod's
// address. A pod with NET_ADMIN gave itself the address of another pod, and was taken for that pod.
func TestAttack_adoptForeignAddress(t *testing.T) {
	victim, mallory := config.Verdict{Namespace: "shop", Name: "a", UID: "ua", NodeUID: "ua"}, config.Verdict{Namespace: "evil", Name: "m", UID: "um", NodeUID: "um"}
	a, m := onNode(victim), onNode(mallory)
	claims := records.Pod{Namespace: "evil", Name: "m", UID: "ua"} // as the UID of the other one
	at := func(name string, ips ...string) candidate {
		p := candidate{name: name, ifs: map[string][]netip.Prefix{}}
		for i, ip := range ips {
			p.ifs[fmt.Sprint("eth", i)] = []netip.Prefix{netip.MustParsePrefix(ip)}
		}
		return p
	}
	own := at("a", "10.0.0.1/24", "fd00::1/64")
	tests := []struct {
		name       string
		candidates []candidate
		runtime    sandboxes
		want       string // its namespace
		refused    bool
	}{
		{"alone", []candidate{own, at("m", "10.0.0.2/24")}, nil, "a", false},
		{"not there", []candidate{at("m", "10.0.0.2/24")}, nil, "", false},
		{"another one has an address, too", []candidate{own, at("m", "10.0.0.2/24", "10.0.0.1/32")}, nil, "", true},
		{"another one before it", []candidate{at("m", "10.0.0.1/24", "fd00::1/64"), own}, nil, "", true},
		{"another one alone", []candidate{at("m", "10.0.0.2/24", "10.0.0.1/24", "fd00::1/64")}, nil, "", true},
		{"another one alone, with one address", []candidate{at("m", "10.0.0.1/24")}, nil, "", true},
		{"overlapping networks", []candidate{own, at("x", "172.16.0.9/24", "10.0.0.1/24")}, nil, "", true},
		{"the runtime says", []candidate{at("m", "10.0.0.2/24", "10.0.0.1/24", "fd00::1/64"), own}, sandboxes{a: "a"}, "a", false},
		{"the runtime says that the other one is another's", []candidate{at("m", "10.0.0.1/24", "fd00::1/64"), own}, sandboxes{m: "m"}, "a", false},
		{"the runtime says that the only one is another's", []candidate{at("m", "10.0.0.1/24", "fd00::1/64")}, sandboxes{m: "m"}, "", false},
		{"the runtime says that another one has the UID", []candidate{at("m", "10.0.0.1/24", "fd00::1/64"), own}, sandboxes{claims: "m"}, "a", false},
		{"the runtime says one that is gone", []candidate{at("m", "10.0.0.1/24", "fd00::1/64")}, sandboxes{a: "a"}, "", false},
		{"the runtime says one with other addresses", []candidate{at("a", "10.0.0.7/24"), at("m", "10.0.0.1/24", "fd00::1/64")}, sandboxes{a: "a"}, "", true},
	}
	ips := []netip.Addr{netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("fd00::1")}
	owners := map[netip.Addr][]config.Verdict{ips[0]: {victim}, ips[1]: {victim}, netip.MustParseAddr("10.0.0.2"): {mallory}}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, err := locate(victim, ips, owners, tt.candidates, tt.runtime)
			if errors.Is(err, errUncertain) != tt.refused {
				t.Errorf("error %v, want refused %t", err, tt.refused)
			}
			name := ""
			if got != nil {
				name = got.name
			}
			if name != tt.want {
				t.Errorf("namespace %q, want %q", name, tt.want)
			}
		})
	}
}

// TestAdopter_ownAddresses: only addresses that the cluster knows are recorded.
func TestAdopter_ownAddresses(t *testing.T) {
	dir := t.TempDir()
	store := cni.NewStore(dir)
	a := newAdopter(store, slog.New(slog.DiscardHandler))
	a.sandboxes = func() (sandboxes, error) { return nil, nil }
	a.namespaces = filepath.Join(dir, "netns")
	if err := errors.Join(store.MakeDir(), os.Mkdir(a.namespaces, 0o755), os.WriteFile(filepath.Join(a.namespaces, "y"), nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	known := netip.MustParsePrefix("10.0.0.1/24")
	a.look = func(string) (map[string][]netip.Prefix, uint64, error) {
		return map[string][]netip.Prefix{"eth0": {netip.MustParsePrefix("10.0.0.9/24"), known}, "wg0": {netip.MustParsePrefix("10.7.0.1/24")}}, 1, nil
	}
	pods := []config.Verdict{{Namespace: "shop", Name: "a", UID: "ua", NodeUID: "ua", OptedIn: true}}
	for range 2 {
		if err := a.pass(pods, map[string][]netip.Addr{"ua": {known.Addr()}}); err != nil {
			t.Fatal(err)
		}
	}
	records, _, err := store.List()
	if err != nil || len(records) != 1 || len(records[0].IPs) != 1 || records[0].IPs[0] != known {
		t.Errorf("records %+v, %v", records, err)
	}
}

// TestInodeOf: a namespace's inode number, and that of nothing.
func TestInodeOf(t *testing.T) {
	want, err := os.Stat("/proc/self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	st, _ := want.Sys().(*syscall.Stat_t)
	if got, err := inodeOf("/proc/self/ns/net"); err != nil || got != st.Ino {
		t.Errorf("inode %d, %v, want %d", got, err, st.Ino)
	}
	if _, err := inodeOf(filepath.Join(t.TempDir(), "none")); !errors.Is(err, linux.ErrGone) {
		t.Errorf("error %v", err)
	}
}

// TestReadSandboxes: which files of the CNI library are understood, and which are left out.
func TestReadSandboxes(t *testing.T) {
	dir := t.TempDir()
	const uid = `["IgnoreUnknown","1"],["K8S_POD_NAMESPACE","shop"],["K8S_POD_NAME","a"],["K8S_POD_UID","%s"]`
	for name, text := range map[string]string{
		"net-1-eth0":   `{"kind":"cniCacheV1","netns":"/var/run/netns/cni-1","cniArgs":[` + fmt.Sprintf(uid, "u1") + `],"result":{"ips":[]}}`,
		"net-1-net1":   `{"kind":"cniCacheV1","netns":"/var/run/netns/cni-1","cniArgs":[` + fmt.Sprintf(uid, "u1") + `]}`,
		"net-2-eth0":   `{"kind":"cniCacheV1","netns":"/var/run/netns/cni-2","cniArgs":[` + fmt.Sprintf(uid, "u2") + `]}`,
		"net-2b-eth0":  `{"kind":"cniCacheV1","netns":"/var/run/netns/cni-2b","cniArgs":[` + fmt.Sprintf(uid, "u2") + `]}`,
		"net-old-eth0": `{"kind":"cniCacheV1","cniArgs":[` + fmt.Sprintf(uid, "u3") + `]}`,
		"net-raw-eth0": `{"cniVersion":"0.3.1","ips":[]}`,
		"net-bad-eth0": `{"kind":"cniCacheV1","netns":`,
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	got, err := readSandboxes(dir)
	if diff := cmp.Diff(sandboxes{{Namespace: "shop", Name: "a", UID: "u1"}: "cni-1"}, got); diff != "" || err != nil {
		t.Errorf("error %v (-want +got):\n%s", err, diff)
	}
	if got, err := readSandboxes(filepath.Join(dir, "none")); len(got) != 0 || err != nil {
		t.Errorf("without a directory: %v, %v", got, err)
	}
}
