// SPDX-License-Identifier: Apache-2.0

package afsmc

import (
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// helperEnv makes TestWithoutPreemption the program that starts itself anew.
const helperEnv = "KUBE_SMCR_TEST_AFSMC_HELPER"

func TestWithoutPreemption(t *testing.T) {
	if os.Getenv(helperEnv) != "" {
		if err := WithoutPreemption(); err != nil {
			t.Fatal(err)
		}
		t.Logf("GODEBUG is %q, process %d", os.Getenv("GODEBUG"), os.Getpid())
		return
	}
	for before, want := range map[string]string{
		"":                              "asyncpreemptoff=1",
		"gctrace=0":                     "gctrace=0,asyncpreemptoff=1",
		"asyncpreemptoff=1,gctrace=0":   "asyncpreemptoff=1,gctrace=0",
		"asyncpreemptoff=0,panicnil=1":  "asyncpreemptoff=0,panicnil=1,asyncpreemptoff=1",
		"asyncpreemptoff=10,panicnil=1": "asyncpreemptoff=10,panicnil=1,asyncpreemptoff=1",
	} {
		program, err := os.Executable()
		if err != nil {
			t.Fatal(err)
		}
		cmd := exec.Command(program, "-test.run=^TestWithoutPreemption$", "-test.v")
		cmd.Env = append(os.Environ(), helperEnv+"=1", "GODEBUG="+before)
		out, err := cmd.CombinedOutput()
		if line := "GODEBUG is " + strconv.Quote(want) + ", process " + strconv.Itoa(cmd.Process.Pid); err != nil || !strings.Contains(string(out), line) {
			t.Errorf("with GODEBUG=%q: %v, want %q in:\n%s", before, err, line, out)
		}
	}
}

// Signals come all the time while connect waits.
func TestConnect_noSignalEndsIt(t *testing.T) {
	l, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Close(l) }()
	loopback := &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}
	if err := unix.Bind(l, loopback); err != nil {
		t.Fatal(err)
	}
	if err := unix.Listen(l, 0); err != nil { // has room for one
		t.Fatal(err)
	}
	to, err := unix.Getsockname(l)
	if err != nil {
		t.Fatal(err)
	}
	socket := func() int {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = unix.Close(fd) })
		// Otherwise the kernel goes on by itself after a signal.
		if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &unix.Timeval{Sec: 20}); err != nil {
			t.Fatal(err)
		}
		return fd
	}
	if err := connect(socket(), to); err != nil {
		t.Fatal(err)
	}
	fd := socket()
	ended := make(chan error, 1)
	go func() { ended <- connect(fd, to) }()
	for sent := 0; ; {
		select {
		case err := <-ended:
			if err != nil {
				t.Errorf("after %d signals: %v", sent, err)
			}
			return
		default:
		}
		threads, err := os.ReadDir("/proc/self/task")
		if err != nil {
			t.Fatal(err)
		}
		for _, th := range threads {
			if id, err := strconv.Atoi(th.Name()); err == nil && unix.Tgkill(os.Getpid(), id, unix.SIGURG) == nil {
				sent++
			}
		}
		if sent > 1000 && sent < 1000+len(threads)+1 { // it waits for room by now
			if _, _, err := unix.Accept4(l, unix.SOCK_CLOEXEC); err != nil {
				t.Fatal(err)
			}
		}
	}
}
