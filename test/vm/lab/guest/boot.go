// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// settings are what the host says on the kernel's command line.
type settings struct {
	name    string
	guest   int
	nics    int
	pfs     int
	mtu     int
	modules []string
}

func readSettings() (settings, error) {
	line, err := os.ReadFile("/proc/cmdline")
	if err != nil {
		return settings{}, err
	}
	values := map[string]string{}
	for field := range strings.FieldsSeq(string(line)) {
		if key, value, ok := strings.Cut(field, "="); ok && strings.HasPrefix(key, "lab.") {
			values[strings.TrimPrefix(key, "lab.")] = value
		}
	}
	s := settings{name: values["name"]}
	var errs []error
	for key, p := range map[string]*int{"guest": &s.guest, "nics": &s.nics, "pfs": &s.pfs, "mtu": &s.mtu} {
		*p, err = strconv.Atoi(values[key])
		errs = append(errs, err)
	}
	if m := values["modules"]; m != "" {
		s.modules = strings.Split(m, ",")
	}
	return s, errors.Join(errs...)
}

// boot makes a system of the initramfs and the disk.
func boot() error {
	if err := mountAll([]mount{
		{"proc", "/proc", "proc", 0, ""}, {"sysfs", "/sys", "sysfs", 0, ""}, {"devtmpfs", "/dev", "devtmpfs", 0, ""},
	}); err != nil {
		return err
	}
	s, err := readSettings()
	if err != nil {
		return fmt.Errorf("read the command line: %w", err)
	}
	if err := loadBootModules(); err != nil {
		return err
	}
	if err := root(); err != nil {
		return err
	}
	if err := unix.Sethostname([]byte(s.name)); err != nil {
		return fmt.Errorf("set the host name: %w", err)
	}
	// Registered memory is locked memory.
	unlimited := unix.Rlimit{Cur: unix.RLIM_INFINITY, Max: unix.RLIM_INFINITY}
	if err := unix.Setrlimit(unix.RLIMIT_MEMLOCK, &unlimited); err != nil {
		return fmt.Errorf("lift the limit of locked memory: %w", err)
	}
	for _, name := range s.modules {
		if text, err := exec.Command("/usr/sbin/modprobe", "-a", name).CombinedOutput(); err != nil {
			return fmt.Errorf("load module %s: %w: %s", name, err, text)
		}
	}
	if err := network(s); err != nil {
		return fmt.Errorf("set the network up: %w", err)
	}
	return nil
}

type mount struct {
	source, target, fstype string
	flags                  uintptr
	data                   string
}

func mountAll(list []mount) error {
	for _, m := range list {
		if err := os.MkdirAll(m.target, 0o755); err != nil {
			return err
		}
		if err := unix.Mount(m.source, m.target, m.fstype, m.flags, m.data); err != nil {
			return fmt.Errorf("mount %s (%s): %w", m.target, m.fstype, err)
		}
	}
	return nil
}

// loadBootModules loads what the host put into the initramfs, in the order of
// the names.
func loadBootModules() error {
	files, err := filepath.Glob("/modules/*.ko")
	if err != nil {
		return err
	}
	slices.Sort(files)
	for _, name := range files {
		f, err := os.Open(name)
		if err != nil {
			return err
		}
		err = unix.FinitModule(int(f.Fd()), "", 0)
		_ = f.Close()
		if err != nil && !errors.Is(err, fs.ErrExist) {
			return fmt.Errorf("load %s: %w", name, err)
		}
	}
	return nil
}

// root mounts the disk with memory over it, moves there, and mounts what a
// system has.
func root() error {
	err := mountAll([]mount{
		{"/dev/vda", "/disk", "ext4", unix.MS_RDONLY, ""},
		{"tmpfs", "/memory", "tmpfs", 0, "size=75%"},
	})
	if err != nil {
		return err
	}
	for _, dir := range []string{"/memory/upper", "/memory/work"} {
		if err := os.Mkdir(dir, 0o755); err != nil {
			return err
		}
	}
	if err := mountAll([]mount{{"overlay", "/new", "overlay", 0, "lowerdir=/disk,upperdir=/memory/upper,workdir=/memory/work"}}); err != nil {
		return err
	}
	for _, dir := range []string{"/proc", "/sys", "/dev"} {
		if err := unix.Mount(dir, "/new"+dir, "", unix.MS_MOVE, ""); err != nil {
			return fmt.Errorf("move %s: %w", dir, err)
		}
	}
	if err := os.Chdir("/new"); err != nil {
		return err
	}
	if err := unix.Mount(".", "/", "", unix.MS_MOVE, ""); err != nil {
		return fmt.Errorf("move the root: %w", err)
	}
	if err := unix.Chroot("."); err != nil {
		return fmt.Errorf("enter the root: %w", err)
	}
	if err := os.Chdir("/"); err != nil {
		return err
	}
	err = mountAll([]mount{
		{"devpts", "/dev/pts", "devpts", 0, ""},
		{"tmpfs", "/dev/shm", "tmpfs", 0, ""},
		{"tmpfs", "/run", "tmpfs", 0, ""},
		{"tmpfs", "/tmp", "tmpfs", 0, ""},
		{"cgroup2", "/sys/fs/cgroup", "cgroup2", 0, ""},
		{"bpf", "/sys/fs/bpf", "bpf", 0, ""},
		{"debugfs", "/sys/kernel/debug", "debugfs", 0, ""},
		{"tracefs", "/sys/kernel/tracing", "tracefs", 0, ""},
		{"host", "/host", "9p", 0, "trans=virtio,version=9p2000.L,msize=512000,cache=readahead"},
	})
	if err != nil {
		return err
	}
	// ip netns keeps its namespaces there, and wants it shared.
	if err := os.MkdirAll("/run/netns", 0o755); err != nil {
		return err
	}
	return unix.Mount("", "/", "", unix.MS_REC|unix.MS_SHARED, "")
}
