// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/smcr-io/kube-smcr/internal/cni"
	"github.com/smcr-io/kube-smcr/internal/config"
	"github.com/smcr-io/kube-smcr/internal/linux"
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
		Pod: cni.Pod{Namespace: "shop", Name: "a", UID: "ua"}, IPs: []netip.Prefix{netip.MustParsePrefix("10.0.0.1/24")},
	}
	byPlugin := func(id string, inode uint64) cni.Attachment {
		r := adoptedA
		r.ContainerID, r.NetNSID, r.Network = id, inode, "kindnet"
		return r
	}
	pod := func(uid string, in bool) config.Verdict {
		return config.Verdict{Namespace: "shop", Name: uid[1:], UID: uid, OptedIn: in}
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
		{"the plugin's turn first", []config.Verdict{pod("ua", true)}, []ns{{"y", 1, "10.0.0.1"}}, nil, 1, nil},
		{"not opted in", []config.Verdict{pod("ua", false)}, []ns{{"y", 1, "10.0.0.1"}}, nil, 3, nil},
		{"no namespace", []config.Verdict{pod("ua", true)}, []ns{{"y", 1, "10.0.0.7"}, {"gone", 0, ""}}, nil, 3, nil},
		{"namespace of another record", []config.Verdict{pod("ua", true)}, []ns{{"y", 1, "10.0.0.1"}}, []cni.Attachment{func() cni.Attachment {
			r := byPlugin("c1", 1)
			r.Pod.UID = "other"
			return r
		}()}, 3, []string{"c1"}},
		{"has a record", []config.Verdict{pod("ua", true)}, []ns{{"y", 1, "10.0.0.1"}}, []cni.Attachment{byPlugin("c1", 1)}, 3, []string{"c1"}},
		{"stays adopted", []config.Verdict{pod("ua", true)}, []ns{{"y", 1, "10.0.0.1"}}, []cni.Attachment{adoptedA}, 3, []string{"adopted-ua"}},
		{"stays while opted out", []config.Verdict{pod("ua", false)}, []ns{{"y", 1, "10.0.0.1"}}, []cni.Attachment{adoptedA}, 3, []string{"adopted-ua"}},
		{"pod is gone", []config.Verdict{pod("ub", false)}, nil, []cni.Attachment{adoptedA}, 1, nil},
		{"new sandbox", []config.Verdict{pod("ua", true)}, []ns{{"z", 2, "10.0.0.1"}}, []cni.Attachment{adoptedA, byPlugin("c2", 2)}, 1, []string{"c2"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			dir := t.TempDir()
			store := cni.NewStore(filepath.Join(dir, "data"))
			for _, r := range tt.records {
				r.NetNS = "/run/netns/y"
				if err := store.Write(r); err != nil {
					t.Fatal(err)
				}
			}
			if err := store.MakeDir(); err != nil {
				t.Fatal(err)
			}
			a := newAdopter(store, slog.New(slog.DiscardHandler))
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
				if r.Network == adoptedNetwork && (r.Pod != adoptedA.Pod || r.NetNSID != 1 || r.IPs[0] != adoptedA.IPs[0]) {
					t.Errorf("record %+v", r)
				}
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("records (-want +got):\n%s", diff)
			}
		})
	}
}
