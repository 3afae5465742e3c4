// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"

	"golang.org/x/sys/unix"
)

// agentArgument starts this program as the agent.
const agentArgument = "agent"

func main() {
	if len(os.Args) == 2 && os.Args[1] == agentArgument {
		fatal(serve())
	}
	if os.Getpid() != 1 {
		fatal(errors.New("this is the first process of a guest; see package lab"))
	}
	if err := boot(); err != nil {
		fatal(fmt.Errorf("boot: %w", err))
	}
	agent := exec.Command("/proc/self/exe", agentArgument)
	agent.Stdout, agent.Stderr = os.Stdout, os.Stderr
	agent.Env = []string{"PATH=" + copies + ":/usr/local/bin:/usr/bin:/usr/sbin", "HOME=/root", "LC_ALL=C", "TMPDIR=/tmp"}
	if err := agent.Start(); err != nil {
		fatal(fmt.Errorf("start the agent: %w", err))
	}
	fatal(reap(agent.Process.Pid))
}

// reap waits for whatever ends. It returns when the agent has.
func reap(agent int) error {
	for {
		var status unix.WaitStatus
		pid, err := unix.Wait4(-1, &status, 0, nil)
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return fmt.Errorf("wait for processes: %w", err)
		case pid == agent:
			return fmt.Errorf("the agent ended with status %#x", status)
		}
	}
}

// fatal lets the kernel panic, which the host sees: a guest without its first
// process is of no use.
func fatal(err error) {
	fmt.Fprintln(os.Stderr, "guest:", err)
	os.Exit(1)
}
