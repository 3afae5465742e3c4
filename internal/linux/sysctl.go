// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// setSysctl sets a variable below /proc/sys of the calling thread's network
// namespace.
//
// A container that is not privileged has /proc/sys mounted read-only, whatever its
// capabilities. There, setSysctl writes through a mount of proc of its own, which no other
// process sees and which ends with the call. That takes CAP_SYS_ADMIN, which the agent has
// anyway to enter namespaces.
func setSysctl(name, value string) error {
	err := os.WriteFile("/proc/sys/"+name, []byte(value), 0)
	if !errors.Is(err, unix.EROFS) {
		return err
	}
	proc, perr := mountProc()
	if perr != nil {
		return errors.Join(err, perr)
	}
	defer unix.Close(proc)
	fd, perr := unix.Openat(proc, "sys/"+name, unix.O_WRONLY|unix.O_CLOEXEC, 0)
	if perr != nil {
		return errors.Join(err, fmt.Errorf("open it in a proc file system of our own: %w", perr))
	}
	defer unix.Close(fd)
	if _, perr := unix.Write(fd, []byte(value)); perr != nil {
		return fmt.Errorf("write it in a proc file system of our own: %w", perr)
	}
	return nil
}

// mountProc makes a mount of proc that is not attached to any directory.
func mountProc() (int, error) {
	proc, err := unix.Fsopen("proc", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return -1, fmt.Errorf("fsopen proc: %w", err)
	}
	defer unix.Close(proc)
	if err := unix.FsconfigCreate(proc); err != nil {
		return -1, fmt.Errorf("create proc file system: %w", err)
	}
	mount, err := unix.Fsmount(proc, unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV|unix.MOUNT_ATTR_NOEXEC)
	if err != nil {
		return -1, fmt.Errorf("mount proc: %w", err)
	}
	return mount, nil
}

// SetSysctl sets a variable below /proc/sys in ns, as in
// "net/ipv6/conf/eth0/accept_ra". The error is fs.ErrNotExist if the kernel does
// not have it.
func SetSysctl(ns *NetNS, name, value string) error {
	if err := ns.Do(func() error { return setSysctl(name, value) }); err != nil {
		return fmt.Errorf("set sysctl %s: %w", strings.ReplaceAll(name, "/", "."), err)
	}
	return nil
}

// Sysctl returns the value of such a variable in ns. The error is fs.ErrNotExist if the kernel does
// not have it.
func Sysctl(ns *NetNS, name string) (value string, err error) {
	err = ns.Do(func() error {
		b, err := os.ReadFile("/proc/sys/" + name)
		value = strings.TrimSpace(string(b))
		return err
	})
	if err != nil {
		return "", fmt.Errorf("read sysctl %s: %w", strings.ReplaceAll(name, "/", "."), err)
	}
	return value, nil
}
