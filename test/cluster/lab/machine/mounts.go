// SPDX-License-Identifier: Apache-2.0

package machine

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// boot makes the machine's file system its root.
func boot(spec Spec) error {
	if err := unix.Sethostname([]byte(spec.Name)); err != nil {
		return fmt.Errorf("set the host name: %w", err)
	}
	hierarchies, err := hostHierarchies() // while we see the host's mounts
	if err != nil {
		return err
	}
	b := &builder{root: spec.Root}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("keep mounts from the host: %w", err)
	}
	b.bind(spec.Root, "/", false)
	b.system()
	b.mount("proc", "/proc", "proc", "")
	b.mount("sysfs", "/sys", "sysfs", "")
	b.bind("/dev", "/dev", true)
	b.mount("tmpfs", "/run", "tmpfs", "mode=755")
	b.mount("tmpfs", "/tmp", "tmpfs", "mode=1777")
	b.directory("/run/netns")
	b.directory("/run/lock")
	b.link("../run", "/var/run")
	b.directory("/var/lib")
	b.directory("/var/tmp")
	b.directory("/root")
	b.bind(spec.Logs, "/var/log", false)
	for _, bind := range spec.Binds {
		b.bind(bind.From, bind.To, false)
		b.readOnly(bind.To)
	}
	b.cgroups(hierarchies)
	b.mount("bpf", "/sys/fs/bpf", "bpf", "mode=700")
	b.settings()
	if b.err != nil {
		return b.err
	}
	if err := pivot(spec.Root); err != nil {
		return err
	}
	return leaveCgroupRoot(hierarchies)
}

// pivot makes root the root of this mount namespace. Mounts made from now on
// are seen by the mount namespaces made from it, as systemd has it.
func pivot(root string) error {
	old, err := os.Open("/")
	if err != nil {
		return fmt.Errorf("open the old root: %w", err)
	}
	defer func() { _ = old.Close() }()
	if err := unix.Chdir(root); err != nil {
		return fmt.Errorf("enter the new root: %w", err)
	}
	if err := unix.PivotRoot(".", "."); err != nil {
		return fmt.Errorf("change the root to %s: %w", root, err)
	}
	// The old root now lies over the new one.
	if err := unix.Fchdir(int(old.Fd())); err != nil {
		return fmt.Errorf("enter the old root: %w", err)
	}
	if err := unix.Unmount(".", unix.MNT_DETACH); err != nil {
		return fmt.Errorf("unmount the old root: %w", err)
	}
	if err := unix.Chdir("/"); err != nil {
		return fmt.Errorf("enter the new root: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SHARED, ""); err != nil {
		return fmt.Errorf("share mounts with containers: %w", err)
	}
	return nil
}

// A builder builds a root directory. Its first error ends what it does.
type builder struct {
	root string
	err  error
}

func (b *builder) at(name string) string { return filepath.Join(b.root, name) }

func (b *builder) do(what, name string, f func() error) {
	if b.err == nil {
		if err := f(); err != nil {
			b.err = fmt.Errorf("%s %s: %w", what, name, err)
		}
	}
}

func (b *builder) directory(name string) {
	b.do("make directory", name, func() error { return os.MkdirAll(b.at(name), 0o755) })
}

func (b *builder) mount(source, name, kind, options string) {
	b.directory(name)
	b.do("mount "+kind+" on", name, func() error { return unix.Mount(source, b.at(name), kind, 0, options) })
}

func (b *builder) bind(from, name string, recursive bool) {
	b.directory(name)
	flags := uintptr(unix.MS_BIND)
	if recursive {
		flags |= unix.MS_REC
	}
	b.do("bind "+from+" to", name, func() error { return unix.Mount(from, b.at(name), "", flags, "") })
}

func (b *builder) readOnly(name string) {
	b.do("make read only", name, func() error {
		return unix.Mount("", b.at(name), "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, "")
	})
}

func (b *builder) link(target, name string) {
	b.directory(filepath.Dir(name))
	b.do("link", name, func() error {
		if err := os.Symlink(target, b.at(name)); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
		return nil
	})
}

func (b *builder) file(name, text string) {
	b.do("write", name, func() error {
		if err := os.MkdirAll(filepath.Dir(b.at(name)), 0o755); err != nil {
			return err
		}
		return os.WriteFile(b.at(name), []byte(text), 0o644)
	})
}

// system gives the machine the host's programs and libraries, and the few files
// of /etc without which they do not run.
func (b *builder) system() {
	for _, name := range [...]string{"/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64"} {
		info, err := os.Lstat(name)
		switch {
		case errors.Is(err, fs.ErrNotExist):
		case err != nil:
			b.do("look at", name, func() error { return err })
		case info.Mode()&fs.ModeSymlink != 0:
			target, err := os.Readlink(name)
			b.do("read link", name, func() error { return err })
			b.link(target, name)
		default:
			b.bind(name, name, true)
			b.readOnly(name)
		}
	}
	for _, name := range [...]string{
		"/etc/passwd", "/etc/group", "/etc/nsswitch.conf", "/etc/protocols", "/etc/services",
		"/etc/os-release", "/etc/ld.so.cache", "/etc/ethertypes",
	} {
		text, err := os.ReadFile(name)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		b.do("read", name, func() error { return err })
		b.file(name, string(text))
	}
	// iptables is a link into this directory, on Debian.
	alternatives, err := os.ReadDir("/etc/alternatives")
	if err == nil {
		b.directory("/etc/alternatives")
	}
	for _, e := range alternatives {
		name := filepath.Join("/etc/alternatives", e.Name())
		if target, err := os.Readlink(name); err == nil {
			b.link(target, name)
		}
	}
	host := filepath.Base(b.root)
	if name, err := os.Hostname(); err == nil {
		host = name
	}
	b.file("/etc/hostname", host+"\n")
	b.file("/etc/hosts", "127.0.0.1 localhost\n::1 localhost\n127.0.1.1 "+host+"\n")
	b.file("/etc/resolv.conf", "")
	if _, err := os.Stat(b.at("/etc/machine-id")); err != nil {
		b.file("/etc/machine-id", randomHex()+"\n")
	}
}

// settings hides the host's settings that no namespace isolates and that
// kubelet writes: it finds there what it wants. Each boot has an id of its own,
// by which kubelet knows that the machine was off.
func (b *builder) settings() {
	id := randomHex()
	for _, s := range [...]struct{ name, value string }{
		{"vm/overcommit_memory", "1"},
		{"vm/panic_on_oom", "0"},
		{"kernel/panic", "10"},
		{"kernel/panic_on_oops", "1"},
		{"kernel/keys/root_maxkeys", "1000000"},
		{"kernel/keys/root_maxbytes", "25000000"},
		{"kernel/random/boot_id", strings.Join([]string{id[:8], id[8:12], id[12:16], id[16:20], id[20:]}, "-")},
	} {
		if _, err := os.Stat("/proc/sys/" + s.name); err != nil {
			continue
		}
		own := "/run/settings/" + s.name
		b.file(own, s.value+"\n")
		b.do("bind", s.name, func() error {
			return unix.Mount(b.at(own), b.at("/proc/sys/"+s.name), "", unix.MS_BIND, "")
		})
	}
}

func randomHex() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // it never fails
	return fmt.Sprintf("%x", b)
}
