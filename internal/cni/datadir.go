// SPDX-License-Identifier: Apache-2.0

package cni

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
)

// trustedConf reads a configuration whose data directory the plugin may use.
func trustedConf(b []byte) (NetConf, error) {
	c, err := ParseNetConf(b)
	if err != nil {
		return NetConf{}, err
	}
	return c, c.checkDataDir()
}

// CheckDataDir tells why ADD would refuse every pod because of a data directory, as the directory is on
// this machine now.
func CheckDataDir(dir string) error { return NetConf{DataDir: dir}.checkDataDir() }

// CheckDataDirName is CheckDataDir as far as the name of the directory alone decides.
func CheckDataDirName(dir string) error {
	if dir = filepath.Clean(dir); dir == DefaultDataDir {
		return nil
	}
	if err := checkDepth(dir); err != nil {
		return confError("dataDir", "%v", err)
	}
	return nil
}

// checkDataDir refuses a data directory that others than root may change. Whoever may write a network's
// configuration names the directory, for example the owner of a namespace in a
// NetworkAttachmentDefinition. If it were in a volume of a pod, the pod's programs could write the
// records and journals by which the plugin goes, or links that lead to files that the plugin would
// write. The default directory is not checked: whatever the node's owner has done there, pods start.
func (c NetConf) checkDataDir() error {
	dir := filepath.Clean(c.DataDir)
	if dir == DefaultDataDir {
		return nil
	}
	if err := checkWay(dir, maxLinks); err != nil {
		return confError("dataDir", "%v", err)
	}
	for _, name := range [...]string{"attachments", "claims", "devices", "locks", "owing"} {
		sub := filepath.Join(dir, name)
		st, err := os.Lstat(sub)
		switch {
		case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ENOTDIR): // root makes it, or nobody can
		case err != nil:
			return confError("dataDir", "%v", err)
		case st.Mode()&fs.ModeSymlink != 0:
			return confError("dataDir", "%s is a link, which is not followed there", sub)
		default:
			if err := ofRoot(sub, st, false); err != nil {
				return confError("dataDir", "%v", err)
			}
		}
	}
	return nil
}

// checkWay refuses a directory that others than root may replace or change, and so one that has such a
// directory on the way to it. Up to links links on the way, such as /var/run, are followed. A
// directory that is missing is no reason, as root makes it.
func checkWay(dir string, links int) error {
	if err := checkDepth(dir); err != nil {
		return err
	}
	names := namesOf(dir)
	for i := range len(names) + 1 {
		at := "/" + filepath.Join(names[:i]...)
		st, err := os.Lstat(at)
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR) {
			return nil
		}
		if err != nil {
			return err
		}
		if err := ofRoot(at, st, i < len(names)); err != nil {
			return err
		}
		if st.Mode()&fs.ModeSymlink == 0 {
			continue // the next name is not there if this is no directory
		}
		to, err := os.Readlink(at)
		if err != nil || links == 0 {
			return fmt.Errorf("%s: too many links: %w", at, errors.Join(err, syscall.ELOOP))
		}
		if !filepath.IsAbs(to) {
			to = filepath.Join(filepath.Dir(at), to)
		}
		if isMagic(at, to) {
			return fmt.Errorf("%s leads elsewhere than to %s, as it says: into a container, perhaps", at, to)
		}
		return checkWay(filepath.Join(to, filepath.Join(names[i:]...)), links-1)
	}
	return nil
}

func namesOf(dir string) []string { return strings.Split(strings.Trim(dir, "/"), "/") }

func checkDepth(dir string) error {
	if len(namesOf(dir)) > maxDataDirDepth {
		return fmt.Errorf("%s is more than %d directories deep, as volumes of pods and files of containers are", dir, maxDataDirDepth)
	}
	return nil
}

// isMagic tells whether a link leads elsewhere than it says, as those of /proc/PID/root and /proc/PID/cwd do.
func isMagic(link, to string) bool {
	there, err := os.Stat(link)
	if err != nil {
		return false // what is not there is made by root, or nobody can
	}
	said, err := os.Stat(to)
	return err != nil || !os.SameFile(there, said)
}

// ofRoot refuses a file or directory that others than root may change. A sticky directory such as /tmp
// may be on the way: others may add files to it, but not replace what is there.
func ofRoot(name string, st fs.FileInfo, mayBeSticky bool) error {
	owner := int(st.Sys().(*syscall.Stat_t).Uid)
	if owner != 0 && owner != os.Geteuid() {
		return fmt.Errorf("%s belongs to user %d, not to root", name, owner)
	}
	sticky := mayBeSticky && st.Mode()&fs.ModeSticky != 0
	if st.IsDir() && st.Mode().Perm()&0o022 != 0 && !sticky {
		return fmt.Errorf("%s may be written by others than root: chmod go-w", name)
	}
	return nil
}
