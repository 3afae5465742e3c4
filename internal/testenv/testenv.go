// SPDX-License-Identifier: Apache-2.0

package testenv

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"

	"github.com/smcr-io/kube-smcr/internal/testenv/clustertools"
)

// RequireEnv is the environment variable that lists the requirements whose
// absence is a failure and not a skip.
const RequireEnv = "KUBE_SMCR_CI_REQUIRE"

// RDMADeviceEnv is the environment variable that names the RDMA device that
// tests may use, as in "rxe0".
const RDMADeviceEnv = "KUBE_SMCR_RDMA_DEVICE"

// InGuestEnv is the environment variable by which what runs tests in a guest tells them so.
const InGuestEnv = "KUBE_SMCR_IN_GUEST"

// A Requirement is one thing a test needs from its machine. Its text is the
// name that [RequireEnv] lists.
type Requirement string

const (
	// Root is user id 0.
	Root Requirement = "root"
	// NetAdmin is CAP_NET_ADMIN and CAP_SYS_ADMIN: the test makes network
	// namespaces, links, addresses and routes.
	NetAdmin Requirement = "netadmin"
	// BPF is the bpf system call with the right to load network programs and
	// to attach them to a cgroup v2.
	BPF Requirement = "bpf"
	// Nftables is nf_tables in the kernel, and the right to use it.
	Nftables Requirement = "nftables"
	// ClusterTools is that the programs of a Kubernetes cluster are built:
	// `make cluster-tools`, or see package clustertools. Envtest asks for it, and
	// together with Root and NetAdmin it is what the local cluster needs.
	ClusterTools Requirement = "clustertools"
	// VM is what it takes to run guests: QEMU, and the programs that build their
	// image, which package test/vm/lab/image does when it is not in the cache.
	VM Requirement = "vm"
	// RDMADevice is that [RDMADeviceEnv] names an RDMA device of the kernel. No
	// machine has one just so: "all" does not mean it, and test/vm/verbs lists it
	// for its guests.
	RDMADevice Requirement = "rdmadevice"
	// InGuest is that [InGuestEnv] is set: the test runs in a guest of test/vm, whose kernel has what
	// it tries, and which nobody else uses. "all" does not mean it.
	InGuest Requirement = "inguest"
	// Tshark is the tshark program.
	Tshark Requirement = programPrefix + "tshark"
)

const programPrefix = "program:"

// Program is the requirement that the program called name is in PATH.
func Program(name string) Requirement {
	return Requirement(programPrefix + name)
}

// Need skips the test at the first requirement that this machine does not
// meet, or fails it when [RequireEnv] lists that requirement. The outcome of the
// test depends on the machine, then ([Builds]).
func Need(t testing.TB, reqs ...Requirement) {
	t.Helper()
	if len(reqs) > 0 {
		Builds("machine")
	}
	for _, r := range reqs {
		err := r.check()
		if err == nil {
			continue
		}
		if listed(os.Getenv(RequireEnv), r) {
			t.Fatalf("needs %s, which %s lists as required: %v", r, RequireEnv, err)
		}
		t.Skipf("needs %s: %v", r, err)
	}
}

// listed reports whether a list as in [RequireEnv] contains r.
func listed(list string, r Requirement) bool {
	for name := range strings.SplitSeq(list, ",") {
		switch strings.ToLower(strings.TrimSpace(name)) {
		case "":
		case strings.ToLower(string(r)):
			return true
		case "all":
			if r != RDMADevice && r != InGuest {
				return true
			}
		}
	}
	return false
}

// check returns nil if the machine meets r, and otherwise what is missing.
func (r Requirement) check() error {
	if name, ok := strings.CutPrefix(string(r), programPrefix); ok {
		if _, err := exec.LookPath(name); err != nil {
			return fmt.Errorf("find program: %w", err)
		}
		return nil
	}
	switch r {
	case Root:
		if uid := os.Getuid(); uid != 0 {
			return fmt.Errorf("user id is %d, not 0", uid)
		}
		return nil
	case NetAdmin:
		return haveCaps(capNetAdmin, capSysAdmin)
	case BPF:
		return checkBPF()
	case ClusterTools:
		_, err := clustertools.Built()
		return err
	case Nftables:
		return checkNftables()
	case VM:
		return checkVM()
	case RDMADevice:
		if os.Getenv(RDMADeviceEnv) == "" {
			return fmt.Errorf("%s names none", RDMADeviceEnv)
		}
		return nil
	case InGuest:
		if os.Getenv(InGuestEnv) == "" {
			return fmt.Errorf("%s is not set", InGuestEnv)
		}
		return nil
	default:
		return errors.New("unknown requirement")
	}
}

// checkVM looks for the programs. It runs none: they are of this architecture or
// not here.
func checkVM() error {
	for _, name := range []string{"qemu-system-x86_64", "mke2fs", "depmod", "apt-get", "dpkg-deb", "xz", "zstd", "tar"} {
		if _, err := exec.LookPath(name); err == nil {
			continue
		}
		if _, err := os.Stat("/usr/sbin/" + name); err != nil { // where others than root do not look
			return fmt.Errorf("find program %s, with which guests are made; run: make deps", name)
		}
	}
	return nil
}

// haveCaps returns an error that names the first of caps that the calling thread does not
// have in its effective set. /proc/self is no answer: it tells of the first thread of the
// process, which another test may have left without rights.
func haveCaps(caps ...capability) error {
	status, err := os.ReadFile("/proc/thread-self/status")
	if err != nil {
		return fmt.Errorf("read capabilities: %w", err)
	}
	set, err := effectiveCaps(string(status))
	if err != nil {
		return err
	}
	for _, c := range caps {
		if set&(1<<c) == 0 {
			return fmt.Errorf("%v is missing", c)
		}
	}
	return nil
}

// effectiveCaps reads the CapEff line of a status file in /proc.
func effectiveCaps(status string) (uint64, error) {
	for line := range strings.Lines(status) {
		hex, ok := strings.CutPrefix(line, "CapEff:")
		if !ok {
			continue
		}
		set, err := strconv.ParseUint(strings.TrimSpace(hex), 16, 64)
		if err != nil {
			return 0, fmt.Errorf("parse CapEff of /proc/thread-self/status: %w", err)
		}
		return set, nil
	}
	return 0, errors.New("no CapEff line in /proc/thread-self/status")
}

// A capability is a bit number of a Linux capability set.
type capability uint

const (
	capNetAdmin capability = 12
	capSysAdmin capability = 21
	capBPF      capability = 39
)

// String returns the name the manual page gives the capability.
func (c capability) String() string {
	switch c {
	case capNetAdmin:
		return "CAP_NET_ADMIN"
	case capSysAdmin:
		return "CAP_SYS_ADMIN"
	case capBPF:
		return "CAP_BPF"
	default:
		return fmt.Sprintf("capability %d", uint(c))
	}
}
