// SPDX-License-Identifier: Apache-2.0

package cni

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"go.uber.org/goleak"

	"github.com/smcr-io/kube-smcr/internal/files"
	"github.com/smcr-io/kube-smcr/internal/records"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

var equalPrefixes = cmp.Options{
	cmp.Comparer(func(a, b netip.Prefix) bool { return a == b }),
	cmp.Comparer(func(a, b netip.Addr) bool { return a == b }),
}

func testAttachment(id, ifName string) Attachment {
	return Attachment{
		SchemaVersion: SchemaVersion, ContainerID: id, IfName: ifName,
		NetNS: "/run/netns/x", NetNSID: 4026531840, Network: "podnet",
		Pod:     records.Pod{Namespace: "shop", Name: "cart-0", UID: "11-22"},
		IPs:     []netip.Prefix{netip.MustParsePrefix("10.1.2.3/24"), netip.MustParsePrefix("fd00::3/64")},
		Created: time.Date(2026, 1, 2, 3, 4, 5, 6, time.UTC),
	}
}

func TestStore_roundTrip(t *testing.T) {
	s := NewStore(filepath.Join(t.TempDir(), "deep", "data"))
	if as, junk, err := s.List(); len(as)+len(junk) != 0 || err != nil {
		t.Fatalf("list of a missing directory: %v, %v, %v", as, junk, err)
	}
	must(t, s.Delete("c1", "eth0"))
	want := []Attachment{testAttachment("c1", "eth0"), testAttachment("c2", "eth0"), testAttachment("c2", "net1")}
	want[2].Devices = []AttachedDevice{
		{ID: "0000:01:10.2", PCI: "0000:01:10.2", RDMA: []string{"rxe0"}, NetDev: "eth3", PF: "eth1", VF: 1, NUMANode: 1, Rail: 1, Mode: "move"},
		{ID: "eth1", NetDev: "eth1", VF: -1, NUMANode: -1, Mode: "ipvlan"},
	}
	for _, a := range want {
		must(t, s.Write(a))
	}
	got, junk, err := s.List()
	must(t, err)
	if diff := cmp.Diff(want, got, equalPrefixes); diff != "" || len(junk) > 0 {
		t.Error(diff, junk)
	}
	one, err := s.Get("c2", "net1")
	must(t, err)
	if diff := cmp.Diff(want[2], one, equalPrefixes); diff != "" {
		t.Error(diff)
	}
	must(t, errors.Join(s.Delete("c2", "net1"), s.Delete("c2", "net1")))
	if _, err := s.Get("c2", "net1"); !errors.Is(err, ErrNoAttachment) {
		t.Errorf("get after delete: %v, want ErrNoAttachment", err)
	}
	if _, err := s.Get("../c2", "net1"); !errors.Is(err, ErrNoAttachment) {
		t.Errorf("get of a path: %v, want ErrNoAttachment", err)
	}
}

// TestStore_writeWhatCanBeRead: what a reader refuses is not written, and the record before stays.
func TestStore_writeWhatCanBeRead(t *testing.T) {
	ip := netip.MustParsePrefix("10.1.2.3/24")
	for _, tt := range []struct {
		name, want string
		change     func(a *Attachment)
	}{
		{"no namespace", "no netns", func(a *Attachment) { a.NetNS = "" }},
		{"addresses", "65 addresses, at most 64", func(a *Attachment) { a.IPs = slices.Repeat([]netip.Prefix{ip}, maxIPs+1) }},
		{"devices", "devices, at most 33", func(a *Attachment) { a.Devices = make([]AttachedDevice, maxDevices+1) }},
		{"addresses of a device", "more than 64 addresses", func(a *Attachment) {
			a.Devices = []AttachedDevice{{IPs: slices.Repeat([]netip.Prefix{ip}, maxIPs+1)}}
		}},
		{"routes", "at most 262144 are allowed", func(a *Attachment) {
			a.Devices = []AttachedDevice{{Routes: slices.Repeat([]AttachedRoute{{Dst: ip}}, 10000)}}
		}},
		{"IPAM that is longer with its lines", "at most 262144 are allowed", func(a *Attachment) {
			a.IPAM = json.RawMessage(strings.Repeat("[", 1000) + strings.Repeat("]", 1000))
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s, a := NewStore(t.TempDir()), testAttachment("c1", "eth0")
			must(t, s.Write(a))
			bad := a
			tt.change(&bad)
			if err := s.Write(bad); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("write: %v, want %q", err, tt.want)
			}
			got, err := s.Get("c1", "eth0")
			must(t, err)
			if diff := cmp.Diff(a, got, equalPrefixes); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestStore_keysThatJoinEqually(t *testing.T) {
	s := NewStore(t.TempDir())
	must(t, s.Write(testAttachment("a-b", "c")))
	if err := s.Write(testAttachment("a", "b-c")); err == nil || !strings.Contains(err.Error(), `"a-b"`) {
		t.Errorf("write: %v, want an error that names the other container", err)
	}
	must(t, s.Delete("a", "b-c"))
	if _, err := s.Get("a", "b-c"); !errors.Is(err, ErrNoAttachment) {
		t.Errorf("get: %v, want ErrNoAttachment", err)
	}
	if _, err := s.Get("a-b", "c"); err != nil {
		t.Errorf("the other record is gone: %v", err)
	}
}

func TestStore_junk(t *testing.T) {
	s := NewStore(t.TempDir())
	must(t, s.Write(testAttachment("good", "eth0")))
	write := func(name, text string) {
		must(t, os.WriteFile(filepath.Join(s.Dir(), name), []byte(text), 0o600))
	}
	valid, err := os.ReadFile(filepath.Join(s.Dir(), "good-eth0.json"))
	must(t, err)
	write("README", "hello")
	write("a-empty.json", "")
	write("a-cut.json", string(valid[:len(valid)/2]))
	write("a-copy.json", string(valid))
	write("a-new.json", strings.Replace(string(valid), `"schemaVersion": 1`, `"schemaVersion": 2`, 1))
	write("a-huge.json", strings.Repeat(" ", maxRecordBytes)+string(valid))
	write("a-array.json", "[]")
	write("a-devices.json", strings.Replace(string(valid), `"ips"`, `"devices": [`+strings.Repeat(`{},`, maxDevices)+`{}], "ips"`, 1))
	write("a-nons.json", strings.Replace(string(valid), "/run/netns/x", "", 1))
	write(".tmp-123", "half")
	must(t, os.Mkdir(filepath.Join(s.Dir(), "dir.json"), 0o700))
	must(t, syscall.Mkfifo(filepath.Join(s.Dir(), "pipe.json"), 0o600))
	must(t, os.Symlink("/nowhere", filepath.Join(s.Dir(), "link.json")))
	as, junk, err := s.List()
	must(t, err)
	if len(as) != 1 || as[0].ContainerID != "good" {
		t.Errorf("records %v, want the good one", as)
	}
	var names []string
	for _, j := range junk {
		names = append(names, j.Name)
		if j.Err == nil || !strings.Contains(j.Error(), j.Name) {
			t.Errorf("junk error %v does not name its file", j)
		}
	}
	want := []string{
		"README", "a-array.json", "a-copy.json", "a-cut.json", "a-devices.json", "a-empty.json", "a-huge.json", "a-new.json", "a-nons.json", "dir.json",
		"link.json", "pipe.json",
	}
	if diff := cmp.Diff(want, names); diff != "" {
		t.Error(diff)
	}
	var je *JunkError
	if _, err := s.Get("a", "cut"); !errors.As(err, &je) {
		t.Errorf("get of junk: %v, want a JunkError", err)
	}
	must(t, s.Delete("a", "cut"))
	must(t, s.Write(testAttachment("a", "empty"))) // junk gives way
	if _, err := s.Get("a", "empty"); err != nil {
		t.Error(err)
	}
}

func TestStore_readersSeeWholeRecords(t *testing.T) {
	s := NewStore(t.TempDir())
	must(t, s.MakeDir())
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for i := range 3 {
		wg.Go(func() {
			a := testAttachment("c", fmt.Sprintf("eth%d", i))
			for range 100 {
				must(t, errors.Join(s.Write(a), s.Delete("c", a.IfName)))
			}
		})
	}
	wg.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
			}
			if _, junk, err := s.List(); err != nil || len(junk) > 0 {
				t.Errorf("list: %v, %v", junk, err)
				return
			}
		}
	})
	time.AfterFunc(100*time.Millisecond, func() { close(stop) })
	wg.Wait()
	entries, err := os.ReadDir(s.Dir())
	must(t, err)
	if len(entries) > 0 {
		t.Errorf("%d files are left", len(entries))
	}
}

func TestStore_badKey(t *testing.T) {
	s := NewStore(t.TempDir())
	for _, key := range [][2]string{{"", "eth0"}, {"a/b", "eth0"}, {".", "eth0"}, {"c", ""}, {"c", "a/b"}, {strings.Repeat("c", 300), "eth0"}} {
		if err := s.Write(testAttachment(key[0], key[1])); err == nil {
			t.Errorf("%q: no error", key)
		}
	}
	if _, err := os.Stat(s.Dir()); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the directory was made: %v", err)
	}
}

func TestStore_collectGarbage(t *testing.T) {
	s := NewStore(t.TempDir())
	for _, id := range []string{"a", "b"} {
		must(t, s.Write(testAttachment(id, "eth0")))
	}
	other := testAttachment("c", "eth0")
	other.Network = "other"
	must(t, s.Write(other))
	must(t, os.WriteFile(filepath.Join(s.Dir(), ".tmp-left"), nil, 0o600))
	lock, err := files.TryLock(filepath.Join(s.Dir(), ".tmp-written"))
	must(t, err)
	must(t, s.CollectGarbage("podnet", owing(t.TempDir()), func(id, _ string) bool { return id == "b" }))
	must(t, lock.Unlock())
	entries, err := os.ReadDir(s.Dir())
	must(t, err)
	var got []string
	for _, e := range entries {
		got = append(got, e.Name())
	}
	if diff := cmp.Diff([]string{".tmp-written", "b-eth0.json", "c-eth0.json"}, got); diff != "" {
		t.Error(diff)
	}
}

func FuzzParseAttachment(f *testing.F) {
	dir := f.TempDir()
	s := NewStore(dir)
	must(f, s.Write(testAttachment("c1", "eth0")))
	b, err := os.ReadFile(filepath.Join(s.Dir(), "c1-eth0.json"))
	must(f, err)
	f.Add(b)
	f.Add([]byte(`{"schemaVersion":1,"containerID":"a","ifName":"b","netns":"/x","ips":[]}`))
	f.Add([]byte(`{}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		a, err := ParseAttachment(b)
		if err != nil {
			return
		}
		if text, err := json.MarshalIndent(a, "", "  "); err == nil && len(text) >= maxRecordBytes {
			return // it became longer by its lines
		}
		s := NewStore(t.TempDir())
		if err := s.Write(a); err != nil {
			t.Fatalf("a record that was read cannot be written: %v", err)
		}
		got, err := s.Get(a.ContainerID, a.IfName)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(a, got, equalPrefixes, cmpopts.EquateEmpty()); diff != "" {
			t.Error(diff)
		}
	})
}

func FuzzParseNetConf(f *testing.F) {
	f.Add([]byte(`{"cniVersion":"1.0.0","name":"n","type":"smcr-cni","prevResult":{"ips":[{"interface":0,"address":"10.0.0.1/8"}],"interfaces":[{"name":"eth0","sandbox":"/x"}]}}`))
	f.Add([]byte(`{"cniVersion":"1.1.0","cni.dev/valid-attachments":[{"containerID":"a","ifname":"b"}],"dataDir":"/x","required":true}`))
	f.Add([]byte(`{"cniVersion":"1.1.0","name":"rocenet","type":"smcr-cni","deviceID":"0000:03:02.0","mac":"CA:FE:C0:FF:EE:00","vlan":1000,"ipam":{"type":"static"}}`))
	f.Add([]byte(`{"name":"n","type":"smcr-cni","deviceID":"eth1/17","runtimeConfig":{"mac":"02:00:00:00:00:01"},"prevResult":{"ips":[{"address":"10.0.0.1/8"}]}}`))
	f.Add([]byte(`{"name":"n","type":"smcr-cni","vlan":"5","mode":"x","deviceID":"a b","ipam":{"type":"static"},"cni.dev/valid-attachments":null}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		c, _, err := parseAnyNetConf(b)
		if f, ferr := c.former(); ferr == nil {
			if id, _ := f.deviceID(); !filepath.IsAbs(f.DataDir) || !filepath.IsAbs(f.AgentSocket) || f.agentTimeout() <= 0 || strings.ContainsAny(id, "/\x00 ") {
				t.Errorf("read %+v", f)
			}
		} else if err == nil {
			t.Errorf("accepted, but not for DEL: %v", ferr)
		}
		if c, err = ParseNetConf(b); err != nil {
			return
		}
		if !filepath.IsAbs(c.DataDir) || !filepath.IsAbs(c.AgentSocket) || c.agentTimeout() <= 0 {
			t.Errorf("accepted %+v", c)
		}
		_, _ = c.addresses("eth0")
		_, _ = c.previous()
		if id, _ := c.deviceID(); strings.ContainsAny(id, "/\x00 ") || c.wires("eth0") && id == "" {
			t.Errorf("accepted device %q", id)
		}
		c.settings()
	})
}

func FuzzReadAnswer(f *testing.F) {
	f.Add("HTTP/1.1 200 OK\r\n\r\n")
	f.Add("HTTP/1.1 503 Service Unavailable\r\nA: b\r\n\r\nno\n")
	f.Add("")
	f.Fuzz(func(t *testing.T, s string) {
		err := readAnswer(strings.NewReader(s))
		if err == nil && !strings.HasPrefix(s, "HTTP/1.") {
			t.Errorf("took %q for a success", s)
		}
	})
}

func TestReadAnswer(t *testing.T) {
	for _, c := range []struct{ name, answer, want string }{
		{"success", "HTTP/1.1 200 OK\r\nA: b\r\n\r\n", ""},
		{"no content", "HTTP/1.0 204\r\n\r\n", ""},
		{"refused with a reason", "HTTP/1.1 403 Forbidden\r\nA: b\r\n\r\nnot you\nmore", "agent answers 403 Forbidden: not you"},
		{"refused without", "HTTP/1.1 500 Oops\r\n", "agent answers 500 Oops: "},
		{"continue is no answer", "HTTP/1.1 100 Continue\r\n\r\n", "agent answers 100 Continue: "},
		{"closed", "", "read answer: unexpected EOF"},
		{"cut", "HTTP/1.1 200", "read answer: unexpected EOF"},
		{"not HTTP", "SSH-2.0-x\n", `answer "SSH-2.0-x" is not HTTP`},
		{"bad status", "HTTP/1.1 2OO OK\n", `answer "HTTP/1.1 2OO OK" is not HTTP`},
		{"long status", "HTTP/1.1 0200 OK\n", `answer "HTTP/1.1 0200 OK" is not HTTP`},
	} {
		t.Run(c.name, func(t *testing.T) {
			got := ""
			if err := readAnswer(strings.NewReader(c.answer)); err != nil {
				got = err.Error()
			}
			if got != c.want {
				t.Errorf("error %q, want %q", got, c.want)
			}
		})
	}
}
