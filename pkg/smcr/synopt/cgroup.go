// SPDX-License-Identifier: Apache-2.0

package synopt

import (
	"errors"
	"path"
	"strings"
)

// ownCgroup returns the cgroup v2 path of a process from the text of its
// /proc/PID/cgroup, as seen from the reader's cgroup namespace. Hybrid machines
// list the v1 hierarchies there as well; v2 is the one with number 0 and no
// controllers.
func ownCgroup(procCgroup string) (string, error) {
	for line := range strings.Lines(procCgroup) {
		p, ok := strings.CutPrefix(strings.TrimSuffix(line, "\n"), "0::")
		if ok && strings.HasPrefix(p, "/") {
			return p, nil
		}
	}
	return "", errors.New("no cgroup v2 in /proc/self/cgroup")
}

// cgroupDirs returns where the mounts of a /proc/PID/mountinfo text show the
// cgroup v2 called own: no, one or several directories.
//
// A mount may show only a part of the hierarchy (containers see their own
// cgroup as root of the mount), and both the root of the mount and own are
// relative to the root of the reader's cgroup namespace. Something above that
// root is written with "..", which names no directory below the mount point:
// such a mount cannot be used.
func cgroupDirs(mountinfo, own string) []string {
	var dirs []string
	for line := range strings.Lines(mountinfo) {
		// 38 31 0:29 /root /mount/point rw,relatime shared:1 - cgroup2 cgroup2 rw
		left, right, ok := strings.Cut(line, " - ")
		if !ok || !strings.HasPrefix(right, "cgroup2 ") {
			continue
		}
		fields := strings.Fields(left)
		if len(fields) < 6 {
			continue
		}
		rest, ok := below(unescapeMount(fields[3]), own)
		if !ok {
			continue
		}
		dirs = append(dirs, path.Join(unescapeMount(fields[4]), rest))
	}
	return dirs
}

// below returns the path of p relative to root, and whether p is root or
// something below it that can be named.
func below(root, p string) (string, bool) {
	if root == "/" {
		root = ""
	}
	rest, ok := strings.CutPrefix(p, root)
	if !ok || rest != "" && rest[0] != '/' {
		return "", false
	}
	for part := range strings.SplitSeq(rest, "/") {
		if part == ".." {
			return "", false
		}
	}
	return rest, true
}

// unescapeMount undoes the octal escapes of mountinfo: space, tab, newline and
// backslash.
func unescapeMount(s string) string {
	return strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`).Replace(s)
}
