// SPDX-License-Identifier: Apache-2.0

package vf

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// marked is a wiring of which the alias has everything.
func marked() Wiring {
	return Wiring{
		Device: Device{ID: "0000:41:10.2", VF: -1, SoftRDMA: kindRXE, RDMA: []string{"rxe0"}},
		Owner: Owner{
			ContainerID: strings.Repeat("0f", 32), IfName: "eth0", NetNSID: 4026532312,
			NetNS: "/var/run/netns/cni-01234567-89ab-cdef-0123-456789abcdef",
		},
		IfName: "net1", Mode: ModeMove,
		Original: Original{Name: "ens1f0v0", MAC: "0a:00:00:00:00:01", MTU: 9000, Up: true, RDMA: []string{"rxe0"}},
	}
}

func TestAlias(t *testing.T) {
	long := marked()
	long.Owner.ContainerID = strings.Repeat("c", maxContainerIDBytes)
	long.Original.RDMA = []string{strings.Repeat("r", 40)}
	long.Device.RDMA = long.Original.RDMA
	for _, tt := range []struct {
		name string
		w    Wiring
		want func(*Wiring)
	}{
		{"everything", marked(), func(*Wiring) {}},
		{"too long", long, func(w *Wiring) { w.Owner.NetNS, w.Owner.NetNSID = "", 0 }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			a := tt.w.alias()
			if len(a) > maxAliasBytes {
				t.Fatalf("alias of %d bytes: %s", len(a), a)
			}
			got, ok := parseAlias(a)
			if !ok {
				t.Fatalf("alias %q is not understood", a)
			}
			want := tt.w
			tt.want(&want)
			if got.Owner.NetNS == "" {
				got.Owner.NetNSID = want.Owner.NetNSID // useless alone
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("alias (-want +got):\n%s", diff)
			}
		})
	}
}

func TestParseAlias_refuses(t *testing.T) {
	w := marked()
	good := w.alias()
	for name, alias := range map[string]string{
		"empty":            "",
		"somebody else's":  "uplink to rack 7",
		"another version":  strings.Replace(good, aliasMark, "kube-smcr/2", 1),
		"no owner":         strings.Replace(good, " c="+w.Owner.ContainerID, "", 1),
		"path as a name":   strings.Replace(good, "n=ens1f0v0", "n=../x", 1),
		"path as an ID":    strings.Replace(good, "d=0000:41:10.2", "d=../../x", 1),
		"MTU of nothing":   strings.Replace(good, "m=9000", "m=0", 1),
		"no MAC":           strings.Replace(good, "a=0a:00", "a=zz:00", 1),
		"unknown kind":     strings.Replace(good, "r=rxe,", "r=mlx5,", 1),
		"unknown mode":     strings.Replace(good, "o=move", "o=copy", 1),
		"word without key": good + " word",
	} {
		t.Run(name, func(t *testing.T) {
			if w, ok := parseAlias(alias); ok {
				t.Errorf("alias %q is taken as %+v", alias, w)
			}
		})
	}
}

// FuzzParseAlias: what is taken can be written again, and means the same.
func FuzzParseAlias(f *testing.F) {
	w := marked()
	f.Add(w.alias())
	w.Mode, w.IfName = ModeIPVlan, "eth0"
	f.Add(w.alias())
	f.Fuzz(func(t *testing.T, s string) {
		w, ok := parseAlias(s)
		if !ok {
			return
		}
		if checkID(w.Device.ID) != nil || !validName(w.IfName) || !validName(w.Original.Name) {
			t.Fatalf("alias %q gives %+v", s, w)
		}
		again := w.alias()
		if w2, ok := parseAlias(again); !ok || w2.Device.ID != w.Device.ID || w2.Original.Name != w.Original.Name {
			t.Fatalf("alias %q, written again %q, gives %+v", s, again, w2)
		}
	})
}

func FuzzParseJournal(f *testing.F) {
	w := marked()
	b, err := json.Marshal(journal{Version: journalVersion, Boot: "b", Complete: true, Wiring: w})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Add([]byte(`{"version":1}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		j, err := parseJournal(b)
		if err != nil {
			return
		}
		if w := j.Wiring; checkID(w.Device.ID) != nil || !validName(w.IfName) || !validName(w.Original.Name) {
			t.Fatalf("journal %q gives %+v", b, w)
		}
	})
}
