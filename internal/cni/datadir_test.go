// SPDX-License-Identifier: Apache-2.0

package cni

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"
)

func TestCheckDataDir(t *testing.T) {
	mkdir := func(mode os.FileMode, names ...string) func(t *testing.T, root string) {
		return func(t *testing.T, root string) {
			t.Helper()
			dir := filepath.Join(append([]string{root}, names...)...)
			must(t, os.MkdirAll(dir, 0o755))
			must(t, os.Chmod(dir, mode)) // whatever the umask
		}
	}
	link := func(to string, names ...string) func(t *testing.T, root string) {
		return func(t *testing.T, root string) {
			t.Helper()
			mkdir(0o755, "data")(t, root)
			must(t, os.Symlink(filepath.Join(root, to), filepath.Join(append([]string{root}, names...)...)))
		}
	}
	for _, tt := range []struct {
		name, dir string
		make      func(t *testing.T, root string)
		want      string // "" is allowed
	}{
		{"missing", "data", nil, ""},
		{"made by root", "data", mkdir(0o755, "data", "attachments"), ""},
		{"behind a link of root's", "link", link("data", "link"), ""},
		{"below a sticky directory", "tmp/", mkdir(os.ModeSticky|0o777, "data"), ""},
		{"a sticky directory", "data", mkdir(os.ModeSticky|0o777, "data"), "written by others"},
		{"written by others", "data", mkdir(0o777, "data"), "written by others"},
		{"written by a group", "data", mkdir(0o770, "data"), "written by others"},
		{"below what is written by others", "data/x", mkdir(0o777, "data"), "written by others"},
		{"with records that are written by others", "data", mkdir(0o777, "data", "attachments"), "written by others"},
		{"with journals that are written by others", "data", mkdir(0o777, "data", "devices"), "written by others"},
		{"with records behind a link", "data", link("elsewhere", "data", "attachments"), "attachments is a link"},
		{"with locks behind a link", "data", link("elsewhere", "data", "locks"), "locks is a link"},
		{"behind a link to what is written by others", "link/x", func(t *testing.T, root string) {
			link("open", "link")(t, root)
			mkdir(0o777, "open")(t, root)
		}, "open may be written by others"},
		{"behind a link to itself", "link", link("link", "link"), "too many links"},
		{"a file, in which nothing can be", "data", func(t *testing.T, root string) {
			must(t, os.WriteFile(filepath.Join(root, "data"), nil, 0o600))
		}, ""},
		{"deep, as volumes are", "a/b/c/d", mkdir(0o755, "a", "b", "c", "d"), "deep"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			root := shallowDir(t)
			if tt.make != nil {
				tt.make(t, root)
			}
			err := NetConf{DataDir: filepath.Join(root, tt.dir)}.checkDataDir()
			if tt.want == "" && err != nil || tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)) {
				t.Errorf("%v, want %q", err, tt.want)
			}
		})
	}
}

// TestCheckDataDir_magicLink: the kernel's links to a process's directories lead elsewhere than they say.
func TestCheckDataDir_magicLink(t *testing.T) {
	dir := filepath.Join(shallowDir(t), "cwd")
	must(t, os.Mkdir(dir, 0o755))
	cmd := exec.Command("sleep", "60")
	cmd.Dir = dir
	must(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	link := fmt.Sprintf("/proc/%d/cwd", cmd.Process.Pid)
	if err := (NetConf{DataDir: link}).checkDataDir(); err != nil {
		t.Errorf("a link that leads where it says: %v", err)
	}
	must(t, os.Remove(dir)) // as a directory of another mount namespace has no name here
	if err := (NetConf{DataDir: link}).checkDataDir(); err == nil || !strings.Contains(err.Error(), "leads elsewhere") {
		t.Errorf("a link that leads elsewhere: %v", err)
	}
}

// shallowDir is a directory that is two directories deep, where /tmp is for temporary files.
func shallowDir(t *testing.T) string {
	t.Helper()
	return filepath.Dir(t.TempDir())
}

// TestAttack_dataDir: a network's configuration names a directory of a pod's, from which a link leads to the node's own
// configuration. Nothing is written behind the link, and DEL, which has nothing to take back, does not keep the pod.
func TestAttack_dataDir(t *testing.T) {
	root := shallowDir(t)
	volume, conf := filepath.Join(root, "volume"), filepath.Join(root, "net.d")
	must(t, errors.Join(os.Mkdir(volume, 0o755), os.Mkdir(conf, 0o755), os.Chmod(volume, 0o777)))
	for _, name := range []string{"attachments", "devices", "locks", "owing"} {
		must(t, os.Symlink(conf, filepath.Join(volume, name)))
	}
	pod := newNS(t)
	var said strings.Builder
	p := Plugin{Stdout: io.Discard, Stderr: &said, Now: time.Now, Host: func(string) Host { return &fakeHost{} }}
	args := &skel.CmdArgs{ContainerID: "c1", IfName: "net1", Netns: pod.Path(), StdinData: []byte(
		`{"cniVersion":"1.1.0","name":"x","type":"smcr-cni","dataDir":"` + volume + `","reportStatus":true,"cni.dev/valid-attachments":[],"prevResult":
		{"cniVersion":"1.1.0","interfaces":[{"name":"net1","sandbox":"` + pod.Path() + `"}],"ips":[{"interface":0,"address":"10.0.0.2/24"}]}}`)}
	for verb, f := range map[string]func(*skel.CmdArgs) error{"ADD": p.add, "CHECK": p.check, "GC": p.gc, "STATUS": p.status} {
		var ce *types.Error
		if err := f(args); !errors.As(err, &ce) || !strings.Contains(ce.Msg, "dataDir") {
			t.Errorf("%s: %v", verb, err)
		}
	}
	if err := p.del(args); err != nil || !strings.Contains(said.String(), "dataDir") {
		t.Errorf("DEL: %v, said %q", err, said.String())
	}
	if entries, err := os.ReadDir(conf); err != nil || len(entries) > 0 {
		t.Errorf("behind the link: %v, %v", entries, err)
	}
}
