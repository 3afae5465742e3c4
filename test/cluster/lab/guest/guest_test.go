// SPDX-License-Identifier: Apache-2.0

package guest

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/internal/testenv"
	"github.com/smcr-io/kube-smcr/internal/testenv/clustertools"
	"github.com/smcr-io/kube-smcr/test/cluster/lab"
	clusterimage "github.com/smcr-io/kube-smcr/test/cluster/lab/image"
	"github.com/smcr-io/kube-smcr/test/vm/lab/image"
)

func TestConfig(t *testing.T) {
	cfg := Config{Config: lab.Config{Name: "x"}, VFs: 4}
	if err := cfg.setDefaults(); err != nil {
		t.Fatal(err)
	}
	if cfg.Nodes != 1 || cfg.Guests != 2 || cfg.External != 2 || cfg.ProxyMode != "nftables" {
		t.Errorf("by default %+v, want one node of this machine and two guests", cfg)
	}
	if g := cfg.guests("disk"); g.Name != "nodes-x" || g.Guests != 2 || g.PFs != pfs || !g.NUMA || len(g.Kernels) != 1 || g.Kernels[0] != image.NetNS || g.Detach {
		t.Errorf("guests with VFs are %+v", g)
	}
	cfg.KernelSMC = true
	if g := cfg.guests("disk"); g.PFs != pfs || len(g.Kernels) != 0 {
		t.Errorf("guests with VFs and the kernel's SMC-R are %+v, want the usual kernel, which has that", g)
	}
	for _, tt := range []struct {
		name string
		cfg  Config
		want string
	}{
		{"a long name", Config{Config: lab.Config{Name: strings.Repeat("x", maxNameLen+1)}}, "up to 18"},
		{"fewer guests than one", Config{Guests: -1}, "-1 guests"},
		{"fewer VFs than none", Config{VFs: -1}, "-1 VFs"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if err := tt.cfg.setDefaults(); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("error %v, want %q in it", err, tt.want)
			}
		})
	}
}

func TestNetwork(t *testing.T) {
	got := network(lab.External{
		Addresses: []netip.Prefix{netip.MustParsePrefix("192.0.2.12/24"), netip.MustParsePrefix("2001:db8::12/64")},
		Routes:    []lab.Route{{To: netip.MustParsePrefix("0.0.0.0/0"), Via: netip.MustParseAddr("192.0.2.1")}},
	})
	want := `ip address replace 192.0.2.12/24 dev eth0
ip address replace 2001:db8::12/64 dev eth0 nodad
ip route replace 0.0.0.0/0 via 192.0.2.1 dev eth0
`
	if got != want {
		t.Errorf("the commands are\n%s, want\n%s", got, want)
	}
}

// Who opens a cluster knows what its guests have.
func TestHas_saved(t *testing.T) {
	dir := t.TempDir()
	want := has{VFs: 4, KernelSMC: true}
	if err := want.save(dir); err != nil {
		t.Fatal(err)
	}
	if got, err := loadHas(dir); err != nil || got != want {
		t.Errorf("%+v, %v; want %+v", got, err, want)
	}
	if _, err := loadHas(t.TempDir()); err == nil {
		t.Error("guests that nothing is known of have something")
	}
}

func TestParseFree(t *testing.T) {
	for _, tt := range []struct {
		name, text string
		want       int
		err        bool
	}{
		{"of Linux", "MemTotal:       24602828 kB\nMemFree:        19602828 kB\nMemAvailable:    2097152 kB\n", 2048, false},
		{"without it", "MemTotal: 1 kB\n", 0, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got, err := parseFree(tt.text); got != tt.want || (err != nil) != tt.err {
				t.Errorf("parseFree() = %d, %v; want %d", got, err, tt.want)
			}
		})
	}
}

// Of the disks those stay that were used last.
func TestForgetDisks(t *testing.T) {
	cache := t.TempDir()
	t.Setenv(clustertools.CacheEnv, cache)
	for age := range keptDisks + 2 {
		dir := filepath.Join(cache, diskPrefix+fmt.Sprint(age))
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, diskFile), nil, 0o600); err != nil {
			t.Fatal(err)
		}
		when := time.Now().Add(-time.Duration(age) * time.Hour)
		if err := os.Chtimes(dir, when, when); err != nil {
			t.Fatal(err)
		}
	}
	for name, age := range map[string]time.Duration{"left.new": 2 * unfinishedAge, "begun.new": 0} {
		dir, when := filepath.Join(cache, diskPrefix+name), time.Now().Add(-age)
		if err := errors.Join(os.Mkdir(dir, 0o755), os.Chtimes(dir, when, when)); err != nil {
			t.Fatal(err)
		}
	}
	if err := forgetDisks(); err != nil {
		t.Fatal(err)
	}
	if left, err := filepath.Glob(filepath.Join(cache, diskPrefix+"*.new")); err != nil || len(left) != 1 || filepath.Base(left[0]) != "node-begun.new" {
		t.Errorf("of disks that were not finished there are %q, %v; want the one begun now", left, err)
	}
	for age := range keptDisks + 2 {
		_, err := os.Stat(filepath.Join(cache, diskPrefix+fmt.Sprint(age)))
		if (err == nil) != (age < keptDisks) {
			t.Errorf("the disk used %d hours ago: %v", age, err)
		}
	}
}

// The same files make the same disk, others another one; one that is there is taken as it is.
func TestDisk_kept(t *testing.T) {
	t.Setenv(clustertools.CacheEnv, t.TempDir())
	tools := t.TempDir()
	for _, p := range programs {
		if err := os.WriteFile(filepath.Join(tools, p), []byte(p), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	archive := filepath.Join(tools, "image.tar")
	made := map[string]bool{}
	for _, content := range []string{"one", "two", "one"} {
		if err := os.WriteFile(archive, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		dir, err := diskDir(tools, []string{archive})
		if err != nil {
			t.Fatal(err)
		}
		made[dir] = true
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		want := filepath.Join(dir, diskFile)
		if err := os.WriteFile(want, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		if got, err := disk(t.Context(), tools, []string{archive}, t.Output()); err != nil || got != want {
			t.Errorf("disk() = %s, %v; want %s", got, err, want)
		}
	}
	if len(made) != 2 {
		t.Errorf("two sets of files have %d disks", len(made))
	}
	if _, err := disk(t.Context(), tools, []string{filepath.Join(tools, "missing.tar")}, t.Output()); err == nil {
		t.Error("an archive that is not there is on a disk")
	}
}

// A disk has the programs of a node, and the images as its containerd keeps them.
func TestDisk_made(t *testing.T) {
	testenv.Need(t, testenv.Root, testenv.ClusterTools)
	tools, err := clustertools.Built()
	if err != nil {
		t.Fatal(err)
	}
	t.Setenv(clustertools.CacheEnv, t.TempDir())
	archive := filepath.Join(t.TempDir(), "image.tar")
	const content = "in the image of a test"
	err = clusterimage.Write(archive, clusterimage.Image{Ref: "test.local/image:1", Files: []clusterimage.File{{Name: "etc/marker", Content: []byte(content)}}})
	if err != nil {
		t.Fatal(err)
	}
	file, err := disk(t.Context(), tools, []string{archive}, t.Output())
	if err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]string{
		"/opt/tools/containerd": "Type: regular    Mode:  0755",
		"/opt/tools/kubelet":    `Fast link dest: "kube"`,
		"/opt/tools/runc":       `Fast link dest: "/usr/sbin/runc"`,
		"/opt/cni/bin/bridge":   "Type: regular",
		"/var/lib/containerd/io.containerd.snapshotter.v1.overlayfs/snapshots/1/fs/etc/marker": fmt.Sprintf("Size: %d", len(content)),
	} {
		out, err := exec.CommandContext(t.Context(), "debugfs", "-R", "stat "+path, file).CombinedOutput()
		if err != nil || !strings.Contains(string(out), want) {
			t.Errorf("%s on the disk: %v, %s; want %q", path, err, out, want)
		}
	}
	if mounts, err := os.ReadFile("/proc/self/mountinfo"); err != nil || strings.Contains(string(mounts), filepath.Dir(file)) {
		t.Errorf("something is still mounted there: %v", err)
	}
}

// To end a cluster that is not there is no error, and neither is a name that is too long for guests.
func TestDown_nothing(t *testing.T) {
	t.Setenv(clustertools.CacheEnv, t.TempDir())
	for _, name := range []string{"a", strings.Repeat("a", maxNameLen+1)} {
		if err := Down(t.Context(), name); err != nil {
			t.Errorf("Down(%s): %v", name, err)
		}
		if left, err := Leftovers(name); err != nil || len(left) > 0 {
			t.Errorf("Leftovers(%s) = %q, %v", name, left, err)
		}
	}
	if err := Sweep(t.Context()); err != nil {
		t.Error(err)
	}
}
