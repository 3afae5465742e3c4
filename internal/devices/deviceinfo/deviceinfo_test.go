// SPDX-License-Identifier: Apache-2.0

package deviceinfo

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestWrite(t *testing.T) {
	path := Path(filepath.Join(t.TempDir(), "dp"), "smcr.io/vf", "0000:41:10.2")
	if got := filepath.Base(path); got != "smcr.io-vf-0000:41:10.2-device.json" {
		t.Errorf("path %s", got)
	}
	must(t, Write(path, PCI{Address: "0000:41:10.2", PF: "0000:41:00.0", RDMA: "mlx5_2,mlx5_3"}))
	b, err := os.ReadFile(path)
	must(t, err)
	want := `{"type":"pci","version":"1.1.0","pci":{"pci-address":"0000:41:10.2","rdma-device":"mlx5_2,mlx5_3","pf-pci-address":"0000:41:00.0"}}`
	if string(b) != want {
		t.Errorf("file\n%s, want\n%s", b, want)
	}
	info, err := Read(path)
	must(t, err)
	if diff := cmp.Diff([]string{"mlx5_2", "mlx5_3"}, info.RDMA()); diff != "" {
		t.Errorf("RDMA devices (-want +got)\n%s", diff)
	}
	must(t, errors.Join(Remove(path), Remove(path), Remove("")))
	if _, err := Read(path); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("removed: %v", err)
	}
}

func TestRead_malformed(t *testing.T) {
	for name, text := range map[string]string{
		"no JSON": "{", "too long": `{"type":"` + strings.Repeat("x", maxBytes) + `"}`, "another form": `{"pci":7}`,
	} {
		path := filepath.Join(t.TempDir(), "x")
		must(t, os.WriteFile(path, []byte(text), 0o600))
		if _, err := Read(path); err == nil || !strings.Contains(err.Error(), path) {
			t.Errorf("%s: error %v, want one that names the file", name, err)
		}
	}
	if got := (Info{Type: "memif"}).RDMA(); got != nil {
		t.Errorf("RDMA devices of another type: %v", got)
	}
}

func TestFind(t *testing.T) {
	dir := t.TempDir()
	if path, err := Find(filepath.Join(dir, "none"), "a"); path != "" || err != nil {
		t.Errorf("no directory: %q, %v", path, err)
	}
	for _, id := range []string{"a", "b", "ba"} {
		must(t, Write(Path(dir, "x.io/y", id), PCI{Address: id}))
	}
	for id, want := range map[string]string{"a": "x.io-y-a-device.json", "b": "x.io-y-b-device.json", "c": ""} {
		path, err := Find(dir, id)
		if err != nil || want == "" && path != "" || want != "" && filepath.Base(path) != want {
			t.Errorf("%s: %q, %v", id, path, err)
		}
	}
}

func TestRemoveOthers(t *testing.T) {
	dir := t.TempDir()
	keep := func(id string) bool { return id == "b" }
	must(t, RemoveOthers(filepath.Join(dir, "none"), "smcr.io/vf", keep))
	for _, path := range []string{Path(dir, "smcr.io/vf", "a"), Path(dir, "smcr.io/vf", "b"), Path(dir, "other.io/vf", "a"), filepath.Join(dir, "smcr.io-vf-notes.txt")} {
		must(t, os.WriteFile(path, nil, 0o600))
	}
	must(t, RemoveOthers(dir, "smcr.io/vf", keep))
	entries, err := os.ReadDir(dir)
	must(t, err)
	var got []string
	for _, e := range entries {
		got = append(got, e.Name())
	}
	if diff := cmp.Diff([]string{"other.io-vf-a-device.json", "smcr.io-vf-b-device.json", "smcr.io-vf-notes.txt"}, got); diff != "" {
		t.Errorf("files (-want +got)\n%s", diff)
	}
}

func TestIsOfCNI(t *testing.T) {
	for path, want := range map[string]bool{
		CNIDir + "/x-device.json":                        true,
		"/run/k8s.cni.cncf.io/devinfo/cni/x-device.json": true,
		"/var/run/k8s.cni.cncf.io/devinfo/cni//a/../x":   true,
		CNIDir:                          false,
		CNIDir + "/.":                   false,
		CNIDir + "/..":                  false,
		CNIDir + "/../dp/x-device.json": false,
		CNIDir + "/a/x-device.json":     false,
		"/etc/kubernetes/kubelet.conf":  false,
		"var/run/k8s.cni.cncf.io/devinfo/cni/x.json":    false,
		"/srv/run/k8s.cni.cncf.io/devinfo/cni/x-device": false,
		"": false,
	} {
		if got := IsOfCNI(path); got != want {
			t.Errorf("%q: %t, want %t", path, got, want)
		}
	}
}
