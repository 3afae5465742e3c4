// SPDX-License-Identifier: Apache-2.0

package testenv

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// checkBPF asks for the capabilities first, because the kernel looks at them
// only after it has looked at the rest of a request.
func checkBPF() error {
	if err := haveCaps(capNetAdmin); err != nil {
		return err
	}
	if err := haveCaps(capBPF); err != nil {
		if haveCaps(capSysAdmin) != nil {
			return err
		}
	}
	// An empty BPF_MAP_CREATE is refused as invalid by a kernel that has the
	// call, and with another error where there is none or a filter forbids it.
	if _, _, errno := unix.Syscall(unix.SYS_BPF, unix.BPF_MAP_CREATE, 0, 0); errno != unix.EINVAL && errno != 0 {
		return fmt.Errorf("bpf system call: %w", errno)
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return fmt.Errorf("look for a cgroup v2 mount: %w", err)
	}
	if !strings.Contains(string(mounts), " - cgroup2 ") {
		return errors.New("no cgroup v2 is mounted")
	}
	return nil
}

// checkNftables asks the kernel for the generation of its rule set: the one
// nf_tables request that needs no table.
func checkNftables() error {
	if err := haveCaps(capNetAdmin); err != nil {
		return err
	}
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_NETFILTER)
	if err != nil {
		return fmt.Errorf("open netfilter netlink socket: %w", err)
	}
	defer func() { _ = unix.Close(fd) }()
	timeout := unix.Timeval{Sec: 2}
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &timeout); err != nil {
		return fmt.Errorf("set netlink timeout: %w", err)
	}

	const headerBytes, nfgenmsgBytes = unix.NLMSG_HDRLEN, 4
	req := make([]byte, 0, headerBytes+nfgenmsgBytes)
	req = binary.NativeEndian.AppendUint32(req, headerBytes+nfgenmsgBytes)
	req = binary.NativeEndian.AppendUint16(req, unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_GETGEN)
	req = binary.NativeEndian.AppendUint16(req, unix.NLM_F_REQUEST)
	req = binary.NativeEndian.AppendUint32(req, 1) // sequence
	req = binary.NativeEndian.AppendUint32(req, 0) // port: the kernel's choice
	req = append(req, unix.AF_UNSPEC, 0, 0, 0)     // nfgenmsg
	if err := unix.Sendto(fd, req, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return fmt.Errorf("ask nf_tables for its generation: %w", err)
	}
	resp := make([]byte, 4096)
	n, _, err := unix.Recvfrom(fd, resp, 0)
	if err != nil {
		return fmt.Errorf("wait for the nf_tables generation: %w", err)
	}
	if n < headerBytes+4 {
		return fmt.Errorf("nf_tables answered with %d bytes", n)
	}
	if binary.NativeEndian.Uint16(resp[4:]) == unix.NLMSG_ERROR {
		errno := -int32(binary.NativeEndian.Uint32(resp[headerBytes:]))
		return fmt.Errorf("ask nf_tables for its generation: %w", unix.Errno(errno))
	}
	return nil
}
