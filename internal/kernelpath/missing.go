// SPDX-License-Identifier: Apache-2.0

package kernelpath

import "fmt"

// A Missing is the first thing that a machine lacks for the kernel's SMC-R as datapath.
type Missing string

// What may be missing, about in the order in which it is tried: NoPins is first, and NoRights may be at
// any place.
const (
	// NoRights: this process may not do it.
	NoRights Missing = "NoRights"
	// NoSMC: the kernel was built without SMC, or has not its module.
	NoSMC Missing = "NoSMC"
	// NoProtocol: the kernel has SMC as a family only (AF_SMC), and not as a protocol of TCP's.
	NoProtocol Missing = "NoProtocol"
	// NoBPF: the kernel cannot load programs of this kind.
	NoBPF Missing = "NoBPF"
	// NoBTF: the kernel does not say where the fields of its types are.
	NoBTF Missing = "NoBTF"
	// NoHook: the kernel does not ask programs for the protocol of a socket.
	NoHook Missing = "NoHook"
	// Refused: the verifier of the kernel does not accept the program.
	Refused Missing = "Refused"
	// NoPins: the directory for the pins is not in a BPF file system.
	NoPins Missing = "NoPins"
	// NoEffect: the program is at work, and a socket was TCP all the same.
	NoEffect Missing = "NoEffect"
	// NoVersion2: the kernel's SMC-R is version 1 only, which has no RoCEv2.
	NoVersion2 Missing = "NoVersion2"
	// NoDevice: SMC-R has no RDMA device with an active port.
	NoDevice Missing = "NoDevice"
)

// Need is what is needed, and what to do about it.
func (m Missing) Need() string {
	switch m {
	case NoRights:
		return "root, or CAP_BPF, CAP_PERFMON and CAP_NET_ADMIN, and a seccomp profile that allows bpf"
	case NoSMC:
		return "a kernel with CONFIG_SMC (which needs CONFIG_DIBS from Linux 6.18 on) and its module smc, as Debian's 6.12"
	case NoProtocol:
		return "Linux 6.11 or later"
	case NoBPF:
		return "a kernel with CONFIG_BPF_SYSCALL and CONFIG_BPF_JIT, and on arm64 Linux 6.4 or later"
	case NoBTF:
		return "a kernel with CONFIG_DEBUG_INFO_BTF"
	case NoHook:
		return "Linux 6.6 or later with CONFIG_MPTCP, of which the hook is a part"
	case Refused:
		return "a kernel whose verifier takes the program; please report this with the verifier's log"
	case NoPins:
		return "a BPF file system at the directory: mount -t bpf bpf /sys/fs/bpf; with the chart kernelPath.enabled, which gives the agent that of the node"
	case NoEffect:
		return "no other program that decides first on update_socket_protocol (bpftool link)"
	case NoVersion2:
		return "a kernel with SMC-R version 2"
	case NoDevice:
		return "an RDMA device for RoCE with an active port, as rdma link shows it"
	}
	return ""
}

// A MissingError says what this machine lacks.
type MissingError struct {
	Missing Missing
	// Err is the system's answer.
	Err error
}

func (e *MissingError) Error() string {
	return fmt.Sprintf("the kernel's SMC-R as datapath: %s: %v: needs %s", e.Missing, e.Err, e.Missing.Need())
}

func (e *MissingError) Unwrap() error { return e.Err }
