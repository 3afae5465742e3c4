// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/smcr-io/kube-smcr/internal/testenv/clustertools"
	"github.com/smcr-io/kube-smcr/internal/testenv/place"
)

// Every cluster has a directory, as package place says. The cluster's supervisor holds the lock of
// the directory.

// errInUse says that a cluster of the wanted name is up.
var errInUse = errors.New("a cluster of this name is up already; end it with: make cluster-down")

func clusters() (string, error) {
	cache, err := clustertools.CacheDir()
	return filepath.Join(cache, "clusters"), err
}

func directory(name string) (string, error) {
	all, err := clusters()
	return filepath.Join(all, name), err
}

// claim makes and locks the directory of a cluster. What a dead cluster left in the directory is
// removed.
func claim(name string) (dir string, lock *os.File, err error) {
	if dir, err = directory(name); err != nil {
		return "", nil, err
	}
	for {
		if lock, err = tryLock(dir); err != nil {
			return "", nil, err
		}
		_, err := os.Stat(filepath.Join(dir, configFile))
		if errors.Is(err, fs.ErrNotExist) {
			return dir, lock, nil
		}
		if err := errors.Join(remove(dir), lock.Close()); err != nil {
			return "", nil, err
		}
	}
}

// tryLock makes and locks a directory, and returns errInUse if somebody else holds the lock.
func tryLock(dir string) (*os.File, error) {
	lock, err := place.TryLock(dir)
	if errors.Is(err, place.ErrInUse) {
		return nil, errInUse
	}
	return lock, err
}

// List returns the names of the clusters that have a directory, up or not.
func List() ([]string, error) {
	all, err := clusters()
	if err != nil {
		return nil, err
	}
	return place.Names(all)
}

// Sweep removes what clusters left whose supervisor was killed.
func Sweep() error {
	names, err := List()
	if err != nil {
		return err
	}
	var errs []error
	for _, name := range names {
		if !namePattern.MatchString(name) {
			continue // no cluster has such a name
		}
		dir, err := directory(name)
		if err != nil {
			return err
		}
		lock, err := tryLock(dir)
		if errors.Is(err, errInUse) {
			continue
		}
		if err != nil {
			errs = append(errs, err)
			continue
		}
		errs = append(errs, remove(dir), lock.Close())
	}
	return errors.Join(errs...)
}

// Down ends the cluster of a name, or removes what a dead cluster of that name left, and returns
// when nothing is left. It is no error if there is no such cluster.
func Down(ctx context.Context, name string) error {
	if !namePattern.MatchString(name) {
		return fmt.Errorf("cluster name %q: want lower case letters, digits and dashes", name)
	}
	dir, err := directory(name)
	if err != nil {
		return err
	}
	if _, err := os.Stat(dir); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	// An error of Dial means that the supervisor does not listen yet, or not any more.
	_, _ = ask(ctx, dir, request{Op: opDown})
	var lock *os.File
	err = poll(ctx, "the end of cluster "+name, stopTimeout, func() error {
		if lock, err = tryLock(dir); err != nil {
			return err
		}
		return nil
	})
	if err != nil {
		return err
	}
	if err := errors.Join(remove(dir), lock.Close()); err != nil {
		return err
	}
	// The supervisor gives its lock back a moment before it ends.
	return poll(ctx, "the end of the supervisor of cluster "+name, stopTimeout, func() error {
		left, err := Leftovers(name)
		if err == nil && slices.ContainsFunc(left, func(l string) bool { return strings.Contains(l, " supervise "+dir+" ") }) {
			err = fmt.Errorf("there is still %q", left)
		}
		return err
	})
}
