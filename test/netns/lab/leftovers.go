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
)

const (
	// namePrefix begins the names of all labs; the process id follows.
	namePrefix = "ks-"
	// nsDir is where named namespaces are.
	nsDir = "/run/netns"
	// hexDigits is the length of the random number in a lab's name.
	hexDigits = 4
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
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(link)))
		if err != nil || !isIn(cwd, dir) {
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

// isIn says whether a working directory is dir or below it.
func isIn(cwd, dir string) bool {
	cwd = strings.TrimSuffix(cwd, " (deleted)")
	return cwd == dir || strings.HasPrefix(cwd, dir+"/")
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
