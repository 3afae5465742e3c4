// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"github.com/vishvananda/netns"
)

const (
	// namePrefix begins the names of all labs; the process id follows.
	namePrefix = "ks-"
	// nsDir is where named namespaces are.
	nsDir = "/run/netns"
)

// Leftovers lists what is still there of a closed lab: namespaces, its
// directory, and processes in the lab's directory.
func (l *Lab) Leftovers() ([]string, error) {
	var out []string
	names, err := namespaces()
	if err != nil {
		return nil, err
	}
	for _, n := range names {
		if strings.HasPrefix(n, l.Prefix) {
			out = append(out, "network namespace "+n)
		}
	}
	if _, err := os.Lstat(l.Dir); l.Dir != "" && err == nil {
		out = append(out, "directory "+l.Dir)
	}
	procs, err := processesIn(l.Dir)
	for _, p := range procs {
		out = append(out, p.String())
	}
	return out, err
}

// process is a process that works in a lab's directory.
type process struct {
	pid  int
	comm string
}

func (p process) String() string { return fmt.Sprintf("process %d (%s)", p.pid, p.comm) }

// processesIn lists the processes in or below a directory.
func processesIn(dir string) ([]process, error) {
	if dir == "" {
		return nil, nil
	}
	links, err := filepath.Glob("/proc/[0-9]*/cwd")
	if err != nil {
		return nil, err
	}
	var out []process
	for _, link := range links {
		cwd, err := os.Readlink(link)
		if err != nil {
			continue // it ended while we looked
		}
		cwd = strings.TrimSuffix(cwd, " (deleted)")
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(link)))
		if err != nil || cwd != dir && !strings.HasPrefix(cwd, dir+"/") {
			continue
		}
		comm, err := os.ReadFile(filepath.Join(filepath.Dir(link), "comm"))
		if err != nil {
			continue // likewise
		}
		out = append(out, process{pid, strings.TrimSpace(string(comm))})
	}
	return out, nil
}

// Sweep removes the processes, namespaces and directories of labs whose own
// process was killed before it could. It returns what it removed.
func Sweep() ([]string, error) {
	names, err := namespaces()
	if err != nil {
		return nil, err
	}
	dirs, err := filepath.Glob(filepath.Join(os.TempDir(), namePrefix+"*"))
	if err != nil {
		return nil, err
	}
	var (
		out  []string
		errs []error
	)
	for _, d := range dirs {
		if !dead(filepath.Base(d)) {
			continue
		}
		procs, err := processesIn(d)
		errs = append(errs, err)
		for _, p := range procs {
			if err := syscall.Kill(p.pid, syscall.SIGKILL); err == nil {
				out = append(out, p.String())
			}
		}
		if err := os.RemoveAll(d); err != nil {
			errs = append(errs, err)
			continue
		}
		out = append(out, "directory "+d)
	}
	for _, n := range names {
		if !dead(n) {
			continue
		}
		if err := netns.DeleteNamed(n); err != nil {
			errs = append(errs, fmt.Errorf("remove network namespace %s: %w", n, err))
			continue
		}
		out = append(out, "network namespace "+n)
	}
	return out, errors.Join(errs...)
}

// dead says whether a name is of a lab whose process is not there any more.
func dead(name string) bool {
	pid, ok := labPID(name)
	return ok && errors.Is(syscall.Kill(pid, 0), syscall.ESRCH)
}

// labPID reads the process id from a name such as ks-1234-5f3a-node1.
func labPID(name string) (int, bool) {
	rest, ok := strings.CutPrefix(name, namePrefix)
	id, after, more := strings.Cut(rest, "-")
	pid, err := strconv.Atoi(id)
	if !ok || !more || err != nil || pid <= 1 || len(after) < 4 {
		return 0, false
	}
	_, err = strconv.ParseUint(after[:4], 16, 16)
	return pid, err == nil
}

func namespaces() ([]string, error) {
	entries, err := os.ReadDir(nsDir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list network namespaces: %w", err)
	}
	var out []string
	for _, e := range entries {
		out = append(out, e.Name())
	}
	return out, nil
}
