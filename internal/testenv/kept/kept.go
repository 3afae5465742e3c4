// SPDX-License-Identifier: Apache-2.0

package kept

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/internal/testenv/clustertools"
)

// Dir returns the directory of the cache for what is made of these things. A name
// begins with prefix, which may have a directory above it.
func Dir(prefix string, of ...any) (string, error) {
	cache, err := clustertools.CacheDir()
	if err != nil {
		return "", err
	}
	h := sha256.New()
	_, _ = fmt.Fprintln(h, of...)
	return filepath.Join(cache, prefix+hex.EncodeToString(h.Sum(nil))[:16]), nil
}

// Make makes a directory of [Dir], unless somebody else did so while it waited:
// there says whether it is complete. What is fill's to use is a directory beside it,
// and what fill returns, in there, becomes the directory. Progress is told in lines
// that begin with who.
func Make(dir, who, what string, progress io.Writer, there func() bool, fill func(tmp string) (made string, err error)) error {
	unlock, err := lock(dir+".lock", who, what, progress)
	if err != nil {
		return err
	}
	defer unlock()
	if there() {
		return nil
	}
	if err := replace(dir, fill); err != nil {
		return fmt.Errorf("build %s: %w", what, err)
	}
	return nil
}

func replace(dir string, fill func(tmp string) (string, error)) error {
	tmp := dir + ".new"
	if err := os.RemoveAll(tmp); err != nil {
		return err
	}
	if err := os.Mkdir(tmp, 0o755); err != nil {
		return err
	}
	made, err := fill(tmp)
	if err != nil {
		return errors.Join(err, os.RemoveAll(tmp))
	}
	if err := os.Rename(made, dir); err != nil {
		return err
	}
	return os.RemoveAll(tmp)
}

// lock makes sure that only one process builds.
func lock(name, who, what string, progress io.Writer) (unlock func(), err error) {
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		return nil, fmt.Errorf("make the directory of %s: %w", what, err)
	}
	f, err := os.OpenFile(name, os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, fmt.Errorf("lock %s: %w", what, err)
	}
	if unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) != nil {
		_, _ = fmt.Fprintf(progress, "%s: waiting for another process that builds %s\n", who, what)
		if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); err != nil {
			return nil, errors.Join(fmt.Errorf("lock %s: %w", name, err), f.Close())
		}
	}
	return func() { _ = f.Close() }, nil
}
