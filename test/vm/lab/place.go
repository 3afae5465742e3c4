// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/smcr-io/kube-smcr/internal/testenv/clustertools"
	"github.com/smcr-io/kube-smcr/internal/testenv/place"
)

// Every lab has a directory, as package place says. The lock of the directory is passed to the lab's
// QEMUs, so it is held as long as one of them runs.

const configFile = "config.json"

// errInUse says that a lab of the wanted name is up.
var errInUse = errors.New("guests of this name are up already; end them with: go run ./tools/vm down")

func labs() (string, error) {
	cache, err := clustertools.CacheDir()
	return filepath.Join(cache, "vm", "labs"), err
}

func directory(name string) (string, error) {
	if !namePattern.MatchString(name) {
		return "", fmt.Errorf("name %q: want lower case letters, digits and dashes", name)
	}
	all, err := labs()
	return filepath.Join(all, name), err
}

// claim makes and locks the directory of a lab. What a dead lab left in the directory is removed.
func claim(name string) (dir string, lock *os.File, err error) {
	if dir, err = directory(name); err != nil {
		return "", nil, err
	}
	if lock, err = tryLock(dir); err != nil {
		return "", nil, err
	}
	entries, err := os.ReadDir(dir)
	for _, e := range entries {
		if e.Name() != place.LockFile && err == nil {
			err = place.Remove(filepath.Join(dir, e.Name()))
		}
	}
	if err != nil {
		return "", nil, errors.Join(err, lock.Close())
	}
	return dir, lock, nil
}

// tryLock makes and locks a directory, and returns errInUse if somebody else holds the lock.
func tryLock(dir string) (*os.File, error) {
	lock, err := place.TryLock(dir)
	if errors.Is(err, place.ErrInUse) {
		return nil, errInUse
	}
	return lock, err
}

// removeLab removes the directory of a lab whose QEMUs have ended.
func removeLab(dir string) error {
	lock, err := tryLock(dir)
	if err != nil {
		return err
	}
	return errors.Join(place.Remove(dir), lock.Close())
}

// List returns the names of the labs that have a directory, up or not.
func List() ([]string, error) {
	all, err := labs()
	if err != nil {
		return nil, err
	}
	return place.Names(all)
}

// Sweep removes the directories of labs whose QEMUs are gone.
func Sweep() error {
	names, err := List()
	if err != nil {
		return err
	}
	var errs []error
	for _, name := range names {
		dir, err := directory(name)
		if err != nil {
			continue // no lab has such a name
		}
		if err := removeLab(dir); err != nil && !errors.Is(err, errInUse) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// Down ends the lab of a name, or removes what a dead lab of that name left, and returns when
// nothing is left. It is no error if there is no such lab.
func Down(ctx context.Context, name string) error {
	dir, err := directory(name)
	if err != nil {
		return err
	}
	if _, err := os.Stat(dir); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	files, err := filepath.Glob(filepath.Join(dir, "*", pidFile))
	if err != nil {
		return err
	}
	for _, file := range files {
		if err := killRecorded(dir, file); err != nil {
			return err
		}
	}
	return poll(ctx, "the end of guests "+name, stopTimeout, func() error { return removeLab(dir) })
}

// killRecorded kills the QEMU whose process ID is in a file. The number may be that of another
// process by now, so the process is killed only if its command line is that of a QEMU of this
// directory. A file without a number is left by a program that was killed while it wrote the file.
func killRecorded(dir, file string) error {
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil || pid <= 1 {
		return nil
	}
	process, err := os.FindProcess(pid) // by pidfd, which stays with the process when the number is used again
	if err != nil {
		return err
	}
	defer func() { _ = process.Release() }()
	line, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	if err != nil || !isQEMU(string(line), dir) {
		return nil
	}
	if err := process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("kill QEMU %d: %w", pid, err)
	}
	return nil
}

// isQEMU says whether a command line is that of a QEMU of a directory. Each argument in the command
// line ends with a zero byte, as in /proc/PID/cmdline.
func isQEMU(line, dir string) bool {
	program, args, _ := strings.Cut(line, "\x00")
	return strings.HasPrefix(filepath.Base(program), "qemu-system-") && strings.Contains(args, dir+"/")
}

func (l *Lab) saveConfig() error {
	text, err := json.Marshal(l.cfg)
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(l.dir, configFile), text, 0o600)
}

func loadConfig(name string) (Config, string, error) {
	dir, err := directory(name)
	if err != nil {
		return Config{}, "", err
	}
	text, err := os.ReadFile(filepath.Join(dir, configFile))
	if errors.Is(err, fs.ErrNotExist) {
		return Config{}, "", fmt.Errorf("no guests %q are up; start them with: go run ./tools/vm up --name %s", name, name)
	}
	cfg := Config{Log: io.Discard} // that of whoever started them
	if err == nil {
		err = json.Unmarshal(text, &cfg)
	}
	return cfg, dir, err
}

// poll calls condition until that returns nil. After timeout it returns the last error.
func poll(ctx context.Context, what string, timeout time.Duration, condition func() error) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	for {
		err := condition()
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait for %s: %w (last: %w)", what, ctx.Err(), err)
		case <-time.After(pollInterval):
		}
	}
}
