// SPDX-License-Identifier: Apache-2.0

package claims

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/smcr-io/kube-smcr/internal/records"
)

var (
	began = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	first = Claim{
		SchemaVersion: SchemaVersion, Namespace: "ns", Name: "web-rdma-x", UID: "0a-1", Prepared: began.Add(time.Second),
		Pods:    []records.Pod{{Namespace: "ns", Name: "web", UID: "pod-1"}},
		Devices: []Device{{ID: "0000:01:10.2", Request: "nic", Pool: "node-a", Name: "0000-01-10-2", IfName: "net1"}},
	}
	second = Claim{
		SchemaVersion: SchemaVersion, Namespace: "ns", Name: "shared", UID: "0a-2", Prepared: began,
		Pods:    []records.Pod{{Namespace: "ns", Name: "web", UID: "pod-1"}, {Namespace: "ns", Name: "db", UID: "pod-2"}},
		Devices: []Device{{ID: "soft0", Request: "nic", Pool: "node-a", Name: "soft0", Shared: true}},
	}
)

func TestStore(t *testing.T) {
	s := NewStore(t.TempDir())
	if all, err := s.List(); len(all) > 0 || err != nil {
		t.Errorf("no directory: %v, %v", all, err)
	}
	if _, err := s.Get(first.UID); !errors.Is(err, ErrNoClaim) {
		t.Errorf("no claim: %v", err)
	}
	for _, c := range []Claim{first, second, first} { // idempotent
		if err := s.Write(c); err != nil {
			t.Fatal(err)
		}
	}
	all, err := s.List()
	if diff := cmp.Diff([]Claim{first, second}, all); diff != "" || err != nil {
		t.Errorf("list: %v (-want +got)\n%s", err, diff)
	}
	for pod, want := range map[string][]Device{
		"pod-1": {second.Devices[0], first.Devices[0]}, // in the order of preparation
		"pod-2": {second.Devices[0]},
		"pod-3": nil,
	} {
		got, err := s.OfPod(pod)
		if diff := cmp.Diff(want, got); diff != "" || err != nil {
			t.Errorf("devices of %s: %v (-want +got)\n%s", pod, err, diff)
		}
	}
	for range 2 {
		if err := s.Delete(first.UID); err != nil {
			t.Error(err)
		}
	}
	if got, err := s.Get(second.UID); err != nil || got.Name != second.Name {
		t.Errorf("the other claim: %v, %v", got, err)
	}
	if err := s.RemoveAll(); err != nil {
		t.Error(err)
	}
}

// TestStore_laterPod: a second pod of a claim has the claim's devices once the claim is written again, and
// the first pod keeps them. When the first pod ends, the second one has the devices alone.
func TestStore_laterPod(t *testing.T) {
	s := NewStore(t.TempDir())
	c := first
	for _, tt := range []struct {
		name string
		pods []string
	}{
		{"one pod", []string{"pod-1"}},
		{"another one comes", []string{"pod-1", "pod-2"}},
		{"the first one ends", []string{"pod-2"}},
	} {
		c.Pods = nil
		for _, uid := range tt.pods {
			c.Pods = append(c.Pods, records.Pod{Namespace: "ns", Name: uid, UID: uid})
		}
		if err := s.Write(c); err != nil {
			t.Fatal(err)
		}
		for _, uid := range []string{"pod-1", "pod-2"} {
			var want []Device
			if slices.Contains(tt.pods, uid) {
				want = c.Devices
			}
			got, err := s.OfPod(uid)
			if diff := cmp.Diff(want, got); diff != "" || err != nil {
				t.Errorf("%s: devices of %s: %v (-want +got)\n%s", tt.name, uid, err, diff)
			}
		}
	}
}

// A damaged file does not keep the other files from being read.
func TestStore_junk(t *testing.T) {
	tests := []struct{ name, text, want string }{
		{"no JSON", "{", "parse claim"},
		{"newer", `{"schemaVersion": 2, "uid": "junk"}`, "this program knows 1"},
		{"of another claim", `{"schemaVersion": 1, "uid": "other"}`, "renamed or copied"},
		{"no UID", `{"schemaVersion": 1, "uid": "../x"}`, "is no UID"},
		{"device without ID", `{"schemaVersion": 1, "uid": "junk", "devices": [{}]}`, "device without id"},
		{"too long", strings.Repeat(" ", maxFileBytes+1), "longer than"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			s := NewStore(t.TempDir())
			if err := s.Write(second); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(s.Dir(), "junk.json"), []byte(tt.text), 0o600); err != nil {
				t.Fatal(err)
			}
			got, err := s.OfPod("pod-2")
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("error %v, want %q", err, tt.want)
			}
			if diff := cmp.Diff(second.Devices, got); diff != "" {
				t.Errorf("the good claim (-want +got)\n%s", diff)
			}
		})
	}
}

// TestStore_unread: a claim that could not be read is not one that is over.
func TestStore_unread(t *testing.T) {
	s := NewStore(t.TempDir())
	for _, c := range []Claim{first, second} {
		if err := s.Write(c); err != nil {
			t.Fatal(err)
		}
	}
	for err, want := range map[error]bool{syscall.EMFILE: true, syscall.ENFILE: true, syscall.ENOMEM: true, syscall.EIO: false, errors.New("junk"): false} {
		s.fault = func(name string) error {
			if name == second.UID+suffix {
				return &os.PathError{Op: "open", Path: name, Err: err}
			}
			return nil
		}
		got, lerr := s.List()
		if !errors.Is(lerr, err) || errors.Is(lerr, ErrUnread) != want || len(got) != 1 || got[0].UID != first.UID {
			t.Errorf("%v: %v, %v", err, got, lerr)
		}
	}
	s.fault = nil
	if err := errors.Join(s.RemoveAll(), os.WriteFile(s.Dir(), nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	if got, err := s.OfPod("pod-1"); !errors.Is(err, ErrUnread) || len(got) > 0 {
		t.Errorf("without a directory that can be read: %v, %v", got, err)
	}
}

func TestStore_badUID(t *testing.T) {
	s := NewStore(t.TempDir())
	for _, uid := range []string{"", "..", "a/b", strings.Repeat("a", maxUIDBytes+1)} {
		if err := s.Write(Claim{UID: uid}); err == nil {
			t.Errorf("claim with UID %q was written", uid)
		}
		if err := s.Delete(uid); err != nil {
			t.Errorf("UID %q: %v", uid, err)
		}
		if _, err := s.Get(uid); !errors.Is(err, ErrNoClaim) {
			t.Errorf("UID %q: %v", uid, err)
		}
	}
}

// FuzzParse: Parse returns for every input, and a claim that it accepts can be written and parsed again.
func FuzzParse(f *testing.F) {
	f.Add([]byte(`{"schemaVersion":1,"namespace":"ns","name":"c","uid":"0a","pods":[{"name":"p","uid":"u"}],"devices":[{"id":"soft0","request":"r","pool":"n","name":"soft0"}],"prepared":"2026-01-02T03:04:05Z"}`))
	f.Add([]byte(`{`))
	f.Fuzz(func(t *testing.T, b []byte) {
		c, err := Parse(b)
		if err == nil && checkUID(c.UID) != nil {
			t.Errorf("accepted UID %q", c.UID)
		}
	})
}
