// SPDX-License-Identifier: Apache-2.0

package synopt

import (
	"errors"
	"fmt"
	"path/filepath"
)

// ErrNotTracked says that the program never saw a socket connect: it has
// another mark, was made in another cgroup, or by a process that has left the
// one of [Open]. Its SYN carried no option, so the connection is plain TCP.
var ErrNotTracked = errors.New("socket is not tracked by the SMC-R option program")

// Config says which sockets get the option.
type Config struct {
	// CgroupPath is the directory of the cgroup v2 whose sockets the program
	// sees. "" is the process's own.
	CgroupPath string
	// Mark is the SO_MARK that selects sockets within the cgroup, and that
	// ControlDial and ControlListen set. Required: 0 is the mark of every
	// socket that has none.
	Mark uint32
}

// Validate says what is wrong with the configuration. It does not look at the
// machine.
func (c Config) Validate() error {
	if c.Mark == 0 {
		return errors.New("mark is 0, which selects every unmarked socket: choose another")
	}
	if c.CgroupPath != "" && !filepath.IsAbs(c.CgroupPath) {
		return fmt.Errorf("cgroup path %q is not absolute", c.CgroupPath)
	}
	return nil
}

// An UnsupportedError says that this machine, or this process on it, cannot
// write the option, so that every connection stays plain TCP.
type UnsupportedError struct {
	// What could not be done.
	What string
	// Need is what is missing and what to do about it.
	Need string
	// Err is the system's answer.
	Err error
}

func (e *UnsupportedError) Error() string {
	return fmt.Sprintf("%s: %v: needs %s", e.What, e.Err, e.Need)
}

func (e *UnsupportedError) Unwrap() error { return e.Err }
