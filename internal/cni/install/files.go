// SPDX-License-Identifier: Apache-2.0

package install

import (
	"bytes"
	"crypto/sha256"
	"debug/buildinfo"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/smcr-io/kube-smcr/internal/files"
	"github.com/smcr-io/kube-smcr/internal/linux"
)

// tempPattern matches temporary files. Runtimes ignore this extension, and scan ignores
// names that begin with a dot.
const tempPattern = ".kube-smcr-*.tmp"

// errChanged means that a file was changed after it was read.
var errChanged = errors.New("another program changed it at the same time")

// scan reads the configurations of a directory, in the order of their names.
func scan(dir string) ([]file, error) {
	d, err := os.Open(dir)
	if err != nil {
		return nil, fmt.Errorf("read configurations: %w", err)
	}
	entries, err := d.ReadDir(-1)
	if err = errors.Join(err, d.Close()); err != nil {
		return nil, fmt.Errorf("read configurations: %w", err)
	}
	entries = slices.DeleteFunc(entries, func(e fs.DirEntry) bool {
		// Runtimes use hidden files too. To an installer they are files that their owner
		// is about to rename: it would rename a file that was exchanged for one, too.
		return e.IsDir() || strings.HasPrefix(e.Name(), ".") || !slices.Contains([]string{".conf", ".conflist", ".json"}, filepath.Ext(e.Name()))
	})
	if len(entries) > maxFiles {
		return nil, fmt.Errorf("read configurations: %s has %d, at most %d are looked at: remove those that nobody needs", dir, len(entries), maxFiles)
	}
	slices.SortFunc(entries, func(a, b fs.DirEntry) int { return strings.Compare(a.Name(), b.Name()) })
	var files []file
	for _, e := range entries {
		f := file{name: e.Name()}
		path := filepath.Join(dir, f.name)
		if e.Type()&fs.ModeSymlink != 0 {
			if f.link, err = os.Readlink(path); err != nil {
				f.link = "an unknown place"
			}
		}
		f.text, f.err = readConf(path)
		switch {
		case f.err != nil && f.link != "":
			f.err = fmt.Errorf("is a symbolic link to %s, which cannot be read from here: %w; mount the directory of that file too", f.link, f.err)
		case errors.Is(f.err, fs.ErrNotExist):
			continue // removed after ReadDir
		}
		f.parse()
		files = append(files, f)
	}
	return files, nil
}

// readConf reads a regular file, through symbolic links. It does not block on a pipe.
func readConf(path string) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }() // only read
	st, err := f.Stat()
	switch {
	case err != nil:
		return nil, err
	case !st.Mode().IsRegular():
		return nil, errors.New("is not a regular file")
	}
	text, err := io.ReadAll(io.LimitReader(f, maxConfBytes+1))
	if err == nil && len(text) > maxConfBytes {
		err = fmt.Errorf("has more than %d bytes", maxConfBytes)
	}
	return text, err
}

// writeTemp writes a temporary file and returns its path. The file gets mode; if like is
// not nil, it gets the mode of like, and for root the owner of like.
func writeTemp(dir string, r io.Reader, mode fs.FileMode, like fs.FileInfo) (path string, err error) {
	return files.WriteTemp(dir, tempPattern, r, func(f *os.File) error {
		if like != nil {
			mode = like.Mode().Perm()
			if st, ok := like.Sys().(*syscall.Stat_t); ok && os.Geteuid() == 0 {
				if err := f.Chown(int(st.Uid), int(st.Gid)); err != nil {
					return err
				}
			}
		}
		return f.Chmod(mode)
	})
}

// apply makes a change in a directory. The error is errChanged if the file is not
// what it was when the change was decided.
func apply(dir string, c change) error {
	path := filepath.Join(dir, c.name)
	st, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist) && c.old == nil:
	case errors.Is(err, fs.ErrNotExist):
		return errChanged
	case err != nil:
		return err
	case c.old == nil || !st.Mode().IsRegular():
		return errChanged
	}
	if c.new == nil {
		return remove(dir, c)
	}
	const mode = 0o600 // as CNI's documentation asks for: configurations may have secrets
	temp, err := writeTemp(dir, bytes.NewReader(c.new), mode, st)
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	if c.old == nil {
		err = os.Link(temp, path) // unlike a rename, Link fails if a file has appeared
		if errors.Is(err, fs.ErrExist) {
			err = errChanged
		}
	} else {
		err = replace(temp, path, c)
	}
	if rerr := os.Remove(temp); !errors.Is(rerr, fs.ErrNotExist) {
		err = errors.Join(err, rerr)
	}
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	if err := files.SyncDir(dir); err != nil {
		return err
	}
	if now, err := readConf(path); err != nil || !bytes.Equal(now, c.new) {
		return errChanged
	}
	return nil
}

// replace exchanges a file with temp. If the file that comes out is not c.old, its owner
// wrote it in between, and replace exchanges the two again, so that the owner's file is
// back in place (see the timeline in the package's doc). The owner may write yet another
// time before that, and so on, up to maxSwaps. The caller removes temp.
func replace(temp, path string, c change) error {
	placed, expected := c.new, c.old
	for n := range maxSwaps {
		err := linux.Exchange(temp, path)
		if n == 0 && errors.Is(err, linux.ErrNoExchange) {
			return replacePlain(temp, path, c)
		}
		if err != nil {
			return err
		}
		got, err := readConf(temp)
		if err == nil && bytes.Equal(got, expected) {
			// A program that opened the file before the exchange may still write into it.
			time.Sleep(overlapWait)
			got, err = readConf(temp)
		}
		switch {
		case err != nil:
			return errors.Join(err, linux.Exchange(temp, path))
		case !bytes.Equal(got, expected):
		case n == 0:
			return nil
		default:
			return errChanged
		}
		placed, expected = got, placed
	}
	return errChanged
}

// replacePlain is replace for file systems that cannot exchange files. What an owner
// writes between the read and the rename is lost.
func replacePlain(temp, path string, c change) error {
	now, err := readConf(path)
	if err != nil || !bytes.Equal(now, c.old) {
		return errors.Join(errChanged, err)
	}
	return os.Rename(temp, path)
}

// remove removes a file, unless it was changed.
func remove(dir string, c change) error {
	path := filepath.Join(dir, c.name)
	now, err := readConf(path)
	if err != nil || !bytes.Equal(now, c.old) {
		return errors.Join(errChanged, err)
	}
	if err := os.Remove(path); err != nil {
		return fmt.Errorf("remove %s: %w", path, err)
	}
	return files.SyncDir(dir)
}

// removeTemps removes the temporary files of an installer that was killed. The caller has
// the lock, so no other installer is using them.
func removeTemps(dir string) error {
	paths, err := filepath.Glob(filepath.Join(dir, tempPattern))
	errs := []error{err}
	for _, p := range paths {
		errs = append(errs, os.Remove(p))
	}
	return errors.Join(errs...)
}

// A binary is the file of the plugin on the node.
type binary struct {
	source, dir, name string

	want [sha256.Size]byte // the hash of the source, once it was read
	size int64             // the size of the source; 0: it was not read yet
	good fs.FileInfo       // the file on the node when it was last found identical to the source
}

func (b *binary) path() string { return filepath.Join(b.dir, b.name) }

// readSource computes the hash and size that the binary must have.
func (b *binary) readSource() error {
	if b.size > 0 {
		return nil
	}
	sum, n, err := hashFile(b.source)
	if err != nil {
		return fmt.Errorf("read the plugin's binary: %w", err)
	}
	if n == 0 {
		return fmt.Errorf("read the plugin's binary: %s is empty", b.source)
	}
	b.want, b.size = sum, n
	return nil
}

func hashFile(path string) (sum [sha256.Size]byte, n int64, err error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return sum, 0, err
	}
	defer func() { _ = f.Close() }() // only read
	h := sha256.New()
	n, err = io.Copy(h, io.LimitReader(f, maxBinaryBytes+1))
	if err == nil && n > maxBinaryBytes {
		err = fmt.Errorf("%s has more than %d bytes", path, maxBinaryBytes)
	}
	h.Sum(sum[:0])
	return sum, n, err
}

// binaryMode is that of programs: read and executed by all, written by root.
const binaryMode = 0o755

// identical tells whether the binary is in place, with the right mode. It reads the file
// only if size, mode, inode or time differ from the last look.
func (b *binary) identical() (bool, error) {
	st, err := os.Lstat(b.path())
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("look at the plugin's binary: %w", err)
	}
	if st.Mode() != binaryMode || st.Size() != b.size { // the type bits of a regular file's mode are 0
		return false, nil
	}
	if g := b.good; g != nil && os.SameFile(g, st) && g.ModTime().Equal(st.ModTime()) {
		return true, nil
	}
	sum, _, err := hashFile(b.path())
	if err != nil {
		return false, fmt.Errorf("look at the plugin's binary: %w", err)
	}
	if sum != b.want {
		return false, nil
	}
	b.good = st
	return true, nil
}

// install puts the binary in place, in one step: a runtime that executes it finds
// the old one or the new one.
func (b *binary) install() (changed bool, err error) {
	if err := b.readSource(); err != nil {
		return false, err
	}
	same, err := b.identical()
	if same || err != nil {
		return false, err
	}
	src, err := os.Open(b.source)
	if err != nil {
		return false, fmt.Errorf("read the plugin's binary: %w", err)
	}
	defer func() { _ = src.Close() }() // only read
	temp, err := writeTemp(b.dir, src, binaryMode, nil)
	if err != nil {
		return false, fmt.Errorf("install %s: %w", b.path(), err)
	}
	if err := files.Replace(temp, b.path()); err != nil {
		return false, fmt.Errorf("install %s: %w", b.path(), err)
	}
	return true, nil
}

// usable tells whether the binary exists and can be executed, whatever its version.
func (b *binary) usable() bool {
	st, err := os.Stat(b.path())
	return err == nil && st.Mode().IsRegular() && st.Mode()&0o111 != 0 && st.Size() > 0
}

// programPath is the path of the plugin's main package, which is in the build info of
// every version.
const programPath = "github.com/smcr-io/kube-smcr/cmd/cni-plugin"

// remove removes the binary if it is the plugin, whatever its version.
func (b *binary) remove() (bool, error) {
	st, err := os.Lstat(b.path())
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("remove the plugin's binary: %w", err)
	}
	if !st.Mode().IsRegular() {
		return false, nil
	}
	if !b.isPlugin() {
		return false, nil
	}
	if err := os.Remove(b.path()); err != nil {
		return false, fmt.Errorf("remove the plugin's binary: %w", err)
	}
	return true, files.SyncDir(b.dir)
}

// isPlugin tells whether the file is the plugin, whatever its version.
func (b *binary) isPlugin() bool {
	if b.readSource() == nil {
		if sum, _, err := hashFile(b.path()); err == nil && sum == b.want {
			return true
		}
	}
	info, err := buildinfo.ReadFile(b.path())
	return err == nil && info.Path == programPath
}
