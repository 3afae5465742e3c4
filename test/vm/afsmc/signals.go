// SPDX-License-Identifier: Apache-2.0

package afsmc

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// noPreemption is the setting of Go's runtime with which it sends no signals to its
// own threads.
const noPreemption = "asyncpreemptoff=1"

// WithoutPreemption starts the program anew in this process with GODEBUG=asyncpreemptoff=1,
// unless it has that. A program calls it before anything else.
//
// Go's runtime sends SIGURG to a thread to preempt it. The kernel's SMC waits for room
// to send in a way that a signal ends: close then goes on although the peer was told
// nothing, and the peer's connection stays open.
func WithoutPreemption() error {
	settings := os.Getenv("GODEBUG")
	if slices.Contains(strings.Split(settings, ","), noPreemption) {
		return nil
	}
	program, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find this program: %w", err)
	}
	if settings != "" {
		settings += ","
	}
	env := slices.DeleteFunc(os.Environ(), func(v string) bool { return strings.HasPrefix(v, "GODEBUG=") })
	env = append(env, "GODEBUG="+settings+noPreemption)
	return fmt.Errorf("start %s anew: %w", program, syscall.Exec(program, os.Args, env))
}

// connect connects with a blocking call that no signal ends. One that is interrupted
// cannot be repeated: the kernel's SMC says EISCONN as soon as TCP is connected, while
// its own rendezvous has not begun.
func connect(fd int, to unix.Sockaddr) (err error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var all, before unix.Sigset_t
	for i := range all.Val {
		all.Val[i] = ^all.Val[i]
	}
	if err := unix.PthreadSigmask(unix.SIG_SETMASK, &all, &before); err != nil {
		return fmt.Errorf("block signals: %w", err)
	}
	defer func() { err = errors.Join(err, unix.PthreadSigmask(unix.SIG_SETMASK, &before, nil)) }()
	return unix.Connect(fd, to)
}
