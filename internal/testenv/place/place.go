// SPDX-License-Identifier: Apache-2.0

package place

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// LockFile is the name of the lock in a directory.
const LockFile = "lock"

// ErrInUse says that somebody else owns a directory.
var ErrInUse = errors.New("the directory is in use")

// TryLock makes and locks a directory. The directory is the caller's until all processes that
// have the file have closed it.
func TryLock(dir string) (*os.File, error) {
	for {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return nil, err
		}
		name := filepath.Join(dir, LockFile)
		f, err := os.OpenFile(name, os.O_CREATE|os.O_RDWR, 0o600)
		if errors.Is(err, fs.ErrNotExist) {
			continue // the directory was removed meanwhile
		}
		if err != nil {
			return nil, err
		}
		if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
			_ = f.Close()
			if errors.Is(err, unix.EWOULDBLOCK) {
				return nil, fmt.Errorf("lock %s: %w", name, ErrInUse)
			}
			return nil, fmt.Errorf("lock %s: %w", name, err)
		}
		ours, err := f.Stat()
		theirs, err2 := os.Stat(name)
		if err == nil && err2 == nil && os.SameFile(ours, theirs) {
			return f, nil
		}
		_ = f.Close() // we locked a file that is removed
	}
}

// Remove removes a directory and the files in it, but follows no mount: files that are
// mounted there belong to others. Then they stay, and so does the directory.
func Remove(dir string) error {
	mounts, err := mountsBelow(dir)
	if err != nil {
		return fmt.Errorf("remove %s: %w", dir, err)
	}
	if len(mounts) > 0 {
		return fmt.Errorf("remove %s: something is mounted on %s; unmount it first", dir, strings.Join(mounts, ", "))
	}
	return os.RemoveAll(dir)
}

// mountsBelow returns the mount points that are a directory or below it.
func mountsBelow(dir string) ([]string, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, err
	}
	if parent, err := filepath.EvalSymlinks(filepath.Dir(dir)); err == nil {
		dir = filepath.Join(parent, filepath.Base(dir))
	}
	info, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	return mountPoints(string(info), dir), nil
}

// mountPoints returns the mount points of a mountinfo that are dir or below dir. The mount point is
// the fifth field of a line, with spaces and the like in octal.
func mountPoints(mountinfo, dir string) []string {
	const field = 4
	plain := strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`)
	var out []string
	for line := range strings.Lines(mountinfo) {
		words := strings.Fields(line)
		if len(words) <= field {
			continue
		}
		if at := plain.Replace(words[field]); at == dir || strings.HasPrefix(at, dir+"/") {
			out = append(out, at)
		}
	}
	return out
}

// Names are the names of the directories in a directory. There are none if that does not exist.
func Names(dir string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	var names []string
	for _, e := range entries {
		if e.IsDir() {
			names = append(names, e.Name())
		}
	}
	return names, nil
}
