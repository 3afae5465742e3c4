// SPDX-License-Identifier: Apache-2.0

package install

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// A host is a node's directories.
type host struct {
	t        *testing.T
	bin, etc string
	source   string
	log      *logs
}

// logs collects what is logged at the level of a warning.
type logs struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logs) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logs) count(text string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Count(l.b.String(), text)
}

func newHost(t *testing.T) *host {
	t.Helper()
	d := t.TempDir()
	h := &host{t: t, bin: filepath.Join(d, "bin"), etc: filepath.Join(d, "net.d"), source: filepath.Join(d, "smcr-cni"), log: &logs{}}
	must(t, os.Mkdir(h.bin, 0o755))
	must(t, os.Mkdir(h.etc, 0o700))
	must(t, os.WriteFile(h.source, []byte("#!program of version 1"), 0o555))
	return h
}

func (h *host) installer() *Installer {
	h.t.Helper()
	in, err := New(Config{
		BinSource: h.source, BinDir: h.bin, ConfDir: h.etc, Plugin: PluginConf{DataDir: "/run/kube-smcr"},
		Log: slog.New(slog.NewTextHandler(h.log, &slog.HandlerOptions{Level: slog.LevelWarn})),
	})
	must(h.t, err)
	in.grace = time.Millisecond // no container runtime reads these files
	return in
}

// run runs an installer until the test, or the returned function, ends it.
func (h *host) run(in *Installer) (stop func()) {
	ctx, cancel := context.WithCancel(h.t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := in.Run(ctx); err != nil {
			h.t.Errorf("Run = %v", err)
		}
	}()
	var once sync.Once
	stop = func() { once.Do(func() { cancel(); <-done }) }
	h.t.Cleanup(stop)
	return stop
}

func (h *host) conf(name string) string { return filepath.Join(h.etc, name) }

// write replaces a file as careful owners do.
func (h *host) write(name, text string) {
	h.t.Helper()
	temp := filepath.Join(h.etc, ".owner-"+name)
	must(h.t, os.WriteFile(temp, []byte(text), 0o644))
	must(h.t, os.Rename(temp, h.conf(name)))
}

func (h *host) types(name string) string {
	b, err := os.ReadFile(h.conf(name))
	if err != nil {
		return err.Error()
	}
	if _, err := parseList(b); err != nil {
		return err.Error()
	}
	return strings.Join(typesOf(h.t, b), " ")
}

// names are the files of both directories, but for those under construction.
func (h *host) names() (out []string) {
	h.t.Helper()
	for _, d := range []string{h.bin, h.etc} {
		entries, err := os.ReadDir(d)
		must(h.t, err)
		for _, e := range entries {
			out = append(out, filepath.Base(d)+"/"+e.Name())
		}
	}
	return out
}

func (h *host) wait(what string, cond func() bool) {
	h.t.Helper()
	for end := time.Now().Add(30 * time.Second); !cond(); {
		if time.Now().After(end) {
			h.t.Fatalf("%s: not after 30 s", what)
		}
		time.Sleep(2 * time.Millisecond) // polls cond
	}
}

func TestInstaller_life(t *testing.T) {
	h := newHost(t)
	in := h.installer()
	stop := h.run(in)
	h.wait("waiting", func() bool { return in.Status().State == StateWaiting })
	kindnet := readTestdata(t, "10-kindnet.conflist")
	h.write("10-kindnet.conflist", kindnet)
	h.wait("installed", func() bool { return in.Status().Working() })
	if got := h.types("10-kindnet.conflist"); got != "ptp portmap smcr-cni" {
		t.Errorf("plugins %s", got)
	}
	for name, mode := range map[string]fs.FileMode{h.conf("10-kindnet.conflist"): 0o644, filepath.Join(h.bin, "smcr-cni"): 0o755} {
		if st, err := os.Stat(name); err != nil || st.Mode() != mode {
			t.Errorf("%s: %v, %v; want mode %v", name, st.Mode(), err, mode)
		}
	}
	want := Status{State: StateInstalled, File: "10-kindnet.conflist", Network: "kindnet", CNIVersion: "0.3.1", Repairs: 1, Copies: 1}
	got := in.Status()
	got.Since = time.Time{}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}

	// The owner writes it again; somebody removes the binary, or spoils it.
	h.write("10-kindnet.conflist", strings.Replace(kindnet, "1500", "9000", 1))
	h.wait("repaired", func() bool { return h.types("10-kindnet.conflist") == "ptp portmap smcr-cni" })
	must(t, os.Remove(filepath.Join(h.bin, "smcr-cni")))
	same := func() bool {
		b, _ := os.ReadFile(filepath.Join(h.bin, "smcr-cni"))
		return string(b) == "#!program of version 1"
	}
	h.wait("binary is back", same)
	must(t, os.WriteFile(filepath.Join(h.bin, "smcr-cni"), []byte("#!program of version X"), 0o755))
	h.wait("binary is good again", same)

	// The end of Run leaves all in place; a second one finds nothing to do.
	stop()
	if diff := cmp.Diff([]string{"bin/smcr-cni", "net.d/10-kindnet.conflist"}, h.names()); diff != "" {
		t.Error(diff)
	}
	in = h.installer()
	h.run(in)
	h.wait("installed", func() bool { return in.Status().Working() })
	if s := in.Status(); s.Repairs != 0 || s.Copies != 0 {
		t.Errorf("a second installer wrote: %+v", s)
	}
}

// The addresses of claimed VFs come from ipam in the entry, which the installer writes and keeps.
func TestInstaller_ipam(t *testing.T) {
	h := newHost(t)
	var log bytes.Buffer
	with := func(ipam string) *Installer {
		in, err := New(Config{
			BinSource: h.source, BinDir: h.bin, ConfDir: h.etc,
			Plugin: PluginConf{DataDir: "/run/kube-smcr", IPAM: []byte(ipam)}, Log: slog.New(slog.NewTextHandler(&log, nil)),
		})
		must(t, err)
		return in
	}
	entry := func() map[string]any {
		t.Helper()
		l, err := parseList(mustRead(t, h.conf("10-kindnet.conflist")))
		must(t, err)
		var fields map[string]any
		last := l.plugins[len(l.plugins)-1]
		must(t, json.Unmarshal(l.text[last.from:last.to], &fields))
		return fields
	}
	h.write("10-kindnet.conflist", readTestdata(t, "10-kindnet.conflist"))
	in := with(`{"type":"whereabouts","range":"192.0.2.0/24"}`)
	in.pass()
	want := map[string]any{"type": "whereabouts", "range": "192.0.2.0/24"}
	if diff := cmp.Diff(want, entry()["ipam"]); diff != "" {
		t.Errorf("ipam of the entry (-want +got):\n%s", diff)
	}
	missing := "there is no IPAM plugin " + filepath.Join(h.bin, "whereabouts") + ", so pods that claimed VFs do not start"
	if s := in.Status(); !s.Working() || !strings.Contains(s.Detail, missing) {
		t.Errorf("status without the IPAM plugin: %+v", s)
	}
	must(t, os.WriteFile(filepath.Join(h.bin, "whereabouts"), []byte("#!program"), 0o755))
	in.pass()
	if s := in.Status(); !s.Working() || s.Detail != "" {
		t.Errorf("status with the IPAM plugin: %+v", s)
	}

	text := string(mustRead(t, h.conf("10-kindnet.conflist")))
	h.write("10-kindnet.conflist", strings.Replace(text, "192.0.2.0/24", "198.51.100.0/24", 1))
	in.pass()
	if diff := cmp.Diff(want, entry()["ipam"]); diff != "" {
		t.Errorf("ipam of the entry after an edit by hand (-want +got):\n%s", diff)
	}
	log.Reset()
	with("").pass()
	if got, has := entry()["ipam"]; has || !strings.Contains(log.String(), "fieldsRemoved=[ipam]") {
		t.Errorf("ipam %v without a configured one; the log says\n%s", got, &log)
	}
}

func TestInstaller_uninstall(t *testing.T) {
	h := newHost(t)
	in := h.installer()
	calico, cilium := readTestdata(t, "10-calico.conflist"), readTestdata(t, "05-cilium.conf")
	h.write("05-cilium.conf", cilium)
	h.write("10-calico.conflist", calico)
	stop := h.run(in)
	h.wait("installed", func() bool { return in.Status().Working() })
	if got := h.types("05-cilium-kube-smcr.conflist"); got != "cilium-cni smcr-cni" {
		t.Errorf("plugins %s", got)
	}
	must(t, os.Remove(h.conf("05-cilium.conf")))
	h.wait("follows", func() bool { return h.types("10-calico.conflist") == "calico bandwidth portmap smcr-cni" })
	h.write("05-cilium.conf", cilium)
	h.wait("follows back", func() bool {
		return h.types("05-cilium-kube-smcr.conflist") == "cilium-cni smcr-cni" && h.types("10-calico.conflist") == "calico bandwidth portmap"
	})
	stop()
	must(t, os.WriteFile(h.conf(".kube-smcr-1.tmp"), nil, 0o600))
	h.write("20-other.conflist", string(short(t, "aOb")))
	for range 2 { // it may be asked for twice
		must(t, in.Uninstall(t.Context()))
		if diff := cmp.Diff([]string{"net.d/05-cilium.conf", "net.d/10-calico.conflist", "net.d/20-other.conflist"}, h.names()); diff != "" {
			t.Error(diff)
		}
	}
	for name, want := range map[string]string{"05-cilium.conf": cilium, "10-calico.conflist": calico, "20-other.conflist": string(short(t, "ab"))} {
		b, err := os.ReadFile(h.conf(name))
		must(t, err)
		if diff := cmp.Diff(want, string(b)); diff != "" {
			t.Errorf("%s: %s", name, diff)
		}
	}
	// A binary of that name that is not the plugin stays.
	must(t, os.WriteFile(filepath.Join(h.bin, "smcr-cni"), []byte("#!/bin/sh"), 0o755))
	must(t, in.Uninstall(t.Context()))
	if !slices.Contains(h.names(), "bin/smcr-cni") {
		t.Error("removed somebody else's program")
	}
}

// TestInstaller_rival: an owner that always writes its own version is repaired a
// few times, and then left alone for a while.
func TestInstaller_rival(t *testing.T) {
	h := newHost(t)
	in := h.installer()
	flannel := readTestdata(t, "10-flannel.conflist")
	h.write("10-flannel.conflist", flannel)
	h.run(in)
	fights := 0
	h.wait("contested", func() bool {
		if strings.HasSuffix(h.types("10-flannel.conflist"), "smcr-cni") {
			fights++
			h.write("10-flannel.conflist", flannel)
		}
		return in.Status().State == StateContested
	})
	if fights != maxRepairsPerMinute {
		t.Errorf("repaired %d times, want %d", fights, maxRepairsPerMinute)
	}
	if s := in.Status(); !strings.Contains(s.Detail, "10-flannel.conflist") || !strings.Contains(s.Detail, "cni.exclusive") {
		t.Errorf("detail %q", s.Detail)
	}
	if n := h.log.count("keeps changing"); n != 1 {
		t.Errorf("said %d times", n)
	}
	if got := h.types("10-flannel.conflist"); got != "flannel portmap" {
		t.Errorf("plugins %s", got)
	}
}

// TestInstaller_rivalGivesUp moves the clock: after a quiet minute all is well.
func TestInstaller_rivalGivesUp(t *testing.T) {
	h := newHost(t)
	in := h.installer()
	now := time.Now()
	in.now = func() time.Time { return now }
	for range maxRepairsPerMinute + 1 {
		h.write("10-x.conflist", string(short(t, "a")))
		in.pass()
	}
	if s := in.Status(); s.State != StateContested {
		t.Fatalf("state %+v", s)
	}
	now = now.Add(61 * time.Second)
	in.pass() // repairs; whether that lasts is not known yet
	if s := in.Status(); s.State != StateContested || h.types("10-x.conflist") != "a smcr-cni" {
		t.Errorf("after a minute: %+v, plugins %s", s, h.types("10-x.conflist"))
	}
	now = now.Add(61 * time.Second)
	in.pass()
	if s := in.Status(); s.State != StateInstalled {
		t.Errorf("after a quiet minute: %+v", s)
	}
	if n := h.log.count("keeps changing"); n != 1 {
		t.Errorf("said %d times", n)
	}
}

// TestInstaller_twoAtOnce: the second stands by, and takes over when the first
// ends. Neither undoes what the other does.
func TestInstaller_twoAtOnce(t *testing.T) {
	h := newHost(t)
	h.write("10-x.conflist", string(short(t, "a")))
	first, second := h.installer(), h.installer()
	stop := h.run(first)
	h.wait("first works", func() bool { return first.Status().Working() })
	must(t, os.WriteFile(h.conf(".kube-smcr-of-the-first.tmp"), nil, 0o600))
	h.run(second)
	h.wait("second stands by", func() bool { return second.Status().State == StateStandby })
	if !slices.Contains(h.names(), "net.d/.kube-smcr-of-the-first.tmp") {
		t.Error("the second removed the first one's file")
	}
	stop()
	h.wait("second works", func() bool { return second.Status().Working() })
	h.write("10-x.conflist", string(short(t, "b")))
	h.wait("second repairs", func() bool { return h.types("10-x.conflist") == "b smcr-cni" })
}

// TestInstaller_busyOwner: an owner that writes all the time, in place or by
// rename, never loses what it wrote.
func TestInstaller_busyOwner(t *testing.T) {
	const writes = 300
	for _, style := range []string{"rename", "in place"} {
		t.Run(style, func(t *testing.T) {
			h := newHost(t)
			in := h.installer()
			in.now = func() time.Time { return time.Time{}.Add(time.Hour) }
			text := func(n int) string {
				return strings.Replace(string(short(t, "ab")), `"name":"n"`, fmt.Sprintf(`"name":"n%d"`, n), 1)
			}
			write := func(n int) {
				if style == "rename" {
					h.write("10-x.conflist", text(n))
				} else {
					must(t, os.WriteFile(h.conf("10-x.conflist"), []byte(text(n)), 0o600))
				}
			}
			write(0)
			stop, done := make(chan struct{}), make(chan struct{})
			go func() {
				defer close(done)
				for {
					select {
					case <-stop:
						return
					default:
						in.writes = nil // no guard: this is about every single exchange
						in.pass()
					}
				}
			}()
			for n := range writes {
				write(n)
				got, err := os.ReadFile(h.conf("10-x.conflist"))
				must(t, err)
				if want := fmt.Sprintf(`"name":"n%d"`, n); len(got) > 0 && !strings.Contains(string(got), want) {
					// For a moment the installer's file stands there; what it
					// took out goes back at once.
					h.wait("write "+want+" is there", func() bool {
						got, _ := os.ReadFile(h.conf("10-x.conflist"))
						return strings.Contains(string(got), want)
					})
				}
			}
			close(stop)
			<-done
			in.writes = nil
			in.pass()
			b, err := os.ReadFile(h.conf("10-x.conflist"))
			must(t, err)
			if !strings.Contains(string(b), fmt.Sprintf(`"name":"n%d"`, writes-1)) || h.types("10-x.conflist") != "a b smcr-cni" {
				t.Errorf("in the end: %s", b)
			}
			if diff := cmp.Diff([]string{"bin/smcr-cni", "net.d/10-x.conflist"}, h.names()); diff != "" {
				t.Error(diff)
			}
			t.Logf("%d repairs", in.Status().Repairs)
		})
	}
}

// TestInstaller_badDirectories: everything that can lie around in a directory.
func TestInstaller_badDirectories(t *testing.T) {
	h := newHost(t)
	in := h.installer()
	must(t, os.Mkdir(h.conf("00-dir.conflist"), 0o700))
	must(t, os.WriteFile(h.conf("01-huge.conflist"), bytes.Repeat([]byte(" "), maxConfBytes+1), 0o600))
	must(t, syscall.Mkfifo(h.conf("02-pipe.conf"), 0o600))
	must(t, os.Symlink("/none/at/all", h.conf("03-link.conflist")))
	must(t, os.WriteFile(h.conf("04-notes.txt"), nil, 0o600))
	elsewhere := filepath.Join(t.TempDir(), "list")
	must(t, os.WriteFile(elsewhere, short(t, "a"), 0o600))
	must(t, os.Symlink(elsewhere, h.conf("05-link.conflist")))
	now := time.Now()
	in.now = func() time.Time { return now }
	in.pass()
	if s := in.Status(); s.State != StateWaiting || !strings.Contains(s.Detail, "01-huge.conflist has more than") {
		t.Errorf("at first: %+v", s)
	}
	now = now.Add(invalidGrace)
	in.pass()
	s := in.Status()
	if s.State != StateInstalled || s.File != "05-link-kube-smcr.conflist" {
		t.Errorf("later: %+v", s)
	}
	for _, want := range []string{"01-huge.conflist has more", "02-pipe.conf is not a regular file", "03-link.conflist is a symbolic link to /none/at/all"} {
		if !strings.Contains(s.Detail, want) {
			t.Errorf("detail %q does not say %q", s.Detail, want)
		}
	}
	if b, err := os.ReadFile(elsewhere); err != nil || !bytes.Equal(b, short(t, "a")) {
		t.Errorf("the target of the link changed: %s, %v", b, err)
	}
	if got := h.types("05-link-kube-smcr.conflist"); got != "a smcr-cni" {
		t.Errorf("plugins %s", got)
	}
}

func TestInstaller_noDirectory(t *testing.T) {
	for _, dir := range []string{"bin", "net.d"} {
		t.Run(dir, func(t *testing.T) {
			h := newHost(t)
			in := h.installer()
			path := filepath.Join(filepath.Dir(h.bin), dir)
			must(t, os.Remove(path))
			stop := h.run(in)
			h.wait("broken", func() bool {
				s := in.Status()
				return s.State == StateBroken && strings.Contains(s.Detail, path) && strings.Contains(s.Detail, "mount")
			})
			stop()
			if dir == "net.d" {
				must(t, in.Uninstall(t.Context()))
			}
		})
	}
}

// TestInstaller_binaryFirst: a list never names a program that is not there.
func TestInstaller_binaryFirst(t *testing.T) {
	h := newHost(t)
	h.write("10-x.conflist", string(short(t, "aO")))
	must(t, os.Remove(h.bin))
	in := h.installer()
	in.pass()
	if s := in.Status(); s.State != StateBroken || h.types("10-x.conflist") != "a" {
		t.Errorf("without a binary: %+v, plugins %s", s, h.types("10-x.conflist"))
	}
	must(t, os.Mkdir(h.bin, 0o755))
	in.pass()
	if s := in.Status(); s.State != StateInstalled || h.types("10-x.conflist") != "a smcr-cni" {
		t.Errorf("with it: %+v, plugins %s", s, h.types("10-x.conflist"))
	}
	// An older version's binary does, while it cannot be replaced; but a new
	// list waits for a new binary.
	must(t, os.Remove(h.source))
	in = h.installer()
	h.write("10-x.conflist", string(short(t, "ao")))
	in.pass()
	if s := in.Status(); s.State != StateBroken || h.types("10-x.conflist") != "a smcr-cni" {
		t.Errorf("with an old binary: %+v, plugins %s", s, h.types("10-x.conflist"))
	}
	if b, _ := os.ReadFile(h.conf("10-x.conflist")); !bytes.Equal(b, short(t, "ao")) {
		t.Errorf("the list changed: %s", b)
	}
}

// TestInstaller_downgrade: a configuration that the older binary would refuse is
// changed before that is installed.
func TestInstaller_downgrade(t *testing.T) {
	h := newHost(t)
	must(t, os.WriteFile(filepath.Join(h.bin, "smcr-cni"), []byte("#!program of version 2"), 0o755))
	h.write("10-x.conflist", strings.Replace(string(short(t, "ao")), `"dataDir"`, `"later":1,"dataDir"`, 1))
	in := h.installer()
	must(t, os.Remove(h.source)) // so that the order shows
	in.pass()
	if l := mustList(t, mustRead(t, h.conf("10-x.conflist"))); !l.chained(in.entry) {
		t.Error("the list was not changed first")
	}
}

func mustRead(t testing.TB, path string) []byte {
	t.Helper()
	b, err := os.ReadFile(path)
	must(t, err)
	return b
}

func TestConfig_validate(t *testing.T) {
	good := Config{BinSource: "/a", BinDir: "/b", ConfDir: "/c"}
	for _, tt := range []struct {
		name string
		edit func(*Config)
		want string
	}{
		{"good", func(*Config) {}, ""},
		{"relative", func(c *Config) { c.BinDir = "opt/cni/bin" }, `BinDir "opt/cni/bin" is not an absolute path`},
		{"plugin's directory", func(c *Config) { c.Plugin.DataDir = "x" }, `dataDir: "x" is not an absolute path`},
		{"plugin's directory, as deep as volumes are", func(c *Config) { c.Plugin.DataDir = "/a/b/c/d/e" }, "dataDir: /a/b/c/d/e is more than 4 directories deep"},
		{"plugin's directory, as deep as may be", func(c *Config) { c.Plugin.DataDir = "/a/b/c/d" }, ""},
		{"IPAM plugin without a name", func(c *Config) { c.Plugin.IPAM = []byte(`{"range":"192.0.2.0/24"}`) }, `IPAM "{\"range\":\"192.0.2.0/24\"}" has no type`},
		{"IPAM that is no JSON", func(c *Config) { c.Plugin.IPAM = []byte("type: dhcp") }, "CNI installation: "},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := good
			tt.edit(&c)
			err := c.Validate()
			if (err == nil) != (tt.want == "") || err != nil && !strings.Contains(err.Error(), tt.want) {
				t.Errorf("error %v, want %q", err, tt.want)
			}
			if _, nerr := New(c); (nerr == nil) != (err == nil) {
				t.Errorf("New: %v", nerr)
			}
		})
	}
}

// A list never has the plugin with a data directory that the plugin refuses: no pod would start.
func TestInstaller_dataDir(t *testing.T) {
	h := newHost(t)
	way := filepath.Join(filepath.Dir(t.TempDir()), "way")
	must(t, os.Mkdir(way, 0o755))
	c := h.installer().c
	c.Plugin.DataDir = filepath.Join(way, "data")
	in, err := New(c)
	must(t, err)
	h.write("10-kindnet.conflist", readTestdata(t, "10-kindnet.conflist"))
	for _, tt := range []struct {
		mode  os.FileMode
		state State
		types string
	}{
		{0o775, StateBroken, "ptp portmap"},
		{0o755, StateInstalled, "ptp portmap smcr-cni"},
		{0o775, StateBroken, "ptp portmap"},
	} {
		must(t, os.Chmod(way, tt.mode)) // whatever the umask
		in.pass()
		s := in.Status()
		if s.State != tt.state || h.types("10-kindnet.conflist") != tt.types || s.File != "10-kindnet.conflist" {
			t.Errorf("with mode %o: %+v, list %s", tt.mode, s, h.types("10-kindnet.conflist"))
		}
		broken := s.State == StateBroken
		if broken != strings.Contains(s.Detail, way+" may be written by others than root") {
			t.Errorf("with mode %o: %q", tt.mode, s.Detail)
		}
	}
}

func TestApply_changed(t *testing.T) {
	a, b := []byte("a"), []byte("b")
	for _, tt := range []struct {
		name string
		have []byte
		c    change
		want []byte
	}{
		{"changed", b, change{old: a, new: []byte("c")}, b},
		{"gone", nil, change{old: a, new: b}, nil},
		{"appeared", a, change{new: b}, a},
		{"removal of a changed one", b, change{old: a}, b},
	} {
		t.Run(tt.name, func(t *testing.T) {
			d := t.TempDir()
			path := filepath.Join(d, "x")
			if tt.have != nil {
				must(t, os.WriteFile(path, tt.have, 0o600))
			}
			tt.c.name = "x"
			if err := apply(d, tt.c); !errors.Is(err, errChanged) {
				t.Errorf("error %v", err)
			}
			got, _ := os.ReadFile(path)
			if !bytes.Equal(got, tt.want) {
				t.Errorf("is %q, want %q", got, tt.want)
			}
			if entries, _ := os.ReadDir(d); len(entries) > 1 || tt.have == nil && len(entries) > 0 {
				t.Errorf("left %v", entries)
			}
		})
	}
}

// TestRun_replaced: a directory that was removed on the node is still there by its mount, and what is in the
// new one is not seen. Run ends, and says why.
func TestRun_replaced(t *testing.T) {
	for _, of := range []func(h *host) *string{func(h *host) *string { return &h.etc }, func(h *host) *string { return &h.bin }} {
		h := newHost(t)
		dir := of(h)
		f, err := os.Open(*dir)
		must(t, err)
		defer func() { must(t, f.Close()) }()
		must(t, os.Remove(*dir))
		must(t, os.Mkdir(*dir, 0o755))
		*dir = fmt.Sprintf("/proc/self/fd/%d", f.Fd()) // as a mount shows it
		in := h.installer()
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		if err := in.Run(ctx); !errors.Is(err, ErrReplaced) {
			t.Errorf("Run = %v, want %v", err, ErrReplaced)
		}
		want := *dir + " was removed or replaced on the node: the agent starts again"
		if s := in.Status(); s.State != StateBroken || s.Detail != want {
			t.Errorf("%s: %s, want %s: %s", s.State, s.Detail, StateBroken, want)
		}
	}
}
