// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"bytes"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// Leftovers returns what there is on this machine of the cluster of that name:
// nothing, once it is down.
func Leftovers(name string) ([]string, error) {
	dir, err := directory(name)
	if err != nil {
		return nil, err
	}
	var left []string
	if _, err := os.Lstat(dir); err == nil {
		left = append(left, "directory "+dir)
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, fmt.Errorf("look for mounts: %w", err)
	}
	for line := range strings.Lines(string(mounts)) {
		if strings.Contains(line, dir+"/") {
			left = append(left, "mount "+strings.TrimSpace(line))
		}
	}
	err = filepath.WalkDir("/sys/fs/cgroup", func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() && d.Name() == cgroupOf(dir) {
			left = append(left, "cgroup "+path)
			return fs.SkipDir
		}
		return nil // another cgroup that has gone meanwhile
	})
	if err != nil {
		return nil, fmt.Errorf("look for cgroups: %w", err)
	}
	processes, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		return nil, err
	}
	for _, p := range processes {
		cgroup, err := os.ReadFile(filepath.Join(p, "cgroup"))
		if err != nil {
			continue // it has ended
		}
		line, _ := os.ReadFile(filepath.Join(p, "cmdline"))
		if bytes.Contains(cgroup, []byte("/"+cgroupOf(dir)+"/")) || bytes.Contains(line, []byte(dir)) {
			left = append(left, fmt.Sprintf("process %s: %s", filepath.Base(p), bytes.ReplaceAll(line, []byte{0}, []byte{' '})))
		}
	}
	return left, nil
}
