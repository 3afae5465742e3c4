// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"
)

// The host puts programs into hostBin. Reading one from there takes longer than most
// commands do, and each start reads it anew, so commands run copies.
const (
	hostBin = "/host/bin"
	copies  = "/run/bin"
	// unfinished is how the name of a program ends that is still being built.
	unfinished = ".new"
)

// programs keeps the copies as new as what they are of.
type programs struct {
	mu       sync.Mutex // held while it copies
	from, to string
	seen     time.Time // when from had changed last, when all was copied
}

// refresh copies the programs that are new or other ones. The host renames what it has
// built, which changes the directory, and takes longer for each than a file system's
// clock ticks. So while the directory is as it was, no program is asked for: each
// question goes to the host, and the emulator takes milliseconds for it.
func (p *programs) refresh() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	dir, err := os.Stat(p.from)
	if errors.Is(err, fs.ErrNotExist) {
		return nil // the host has built none
	}
	if err != nil {
		return fmt.Errorf("look for programs: %w", err)
	}
	if dir.ModTime().Equal(p.seen) {
		return nil
	}
	all, err := os.ReadDir(p.from)
	if err != nil {
		return fmt.Errorf("look for programs: %w", err)
	}
	if err := os.MkdirAll(p.to, 0o755); err != nil {
		return fmt.Errorf("look for programs: %w", err)
	}
	for _, e := range all {
		if e.IsDir() || strings.HasSuffix(e.Name(), unfinished) {
			continue
		}
		if err := p.copy(e.Name()); err != nil {
			return fmt.Errorf("copy the program %s: %w", e.Name(), err)
		}
	}
	p.seen = dir.ModTime()
	return nil
}

// copy copies a program unless the copy is as old and as long. The old copy may be
// running.
func (p *programs) copy(name string) error {
	from, to := filepath.Join(p.from, name), filepath.Join(p.to, name)
	info, err := os.Stat(from)
	if err != nil {
		return err
	}
	if old, err := os.Stat(to); err == nil && old.Size() == info.Size() && old.ModTime().Equal(info.ModTime()) {
		return nil
	}
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer func() { _ = in.Close() }()
	out, err := os.OpenFile(to+unfinished, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, info.Mode().Perm())
	if err != nil {
		return err
	}
	if _, err = io.Copy(out, in); err != nil {
		return errors.Join(err, out.Close())
	}
	if err := out.Close(); err != nil {
		return err
	}
	if err := os.Chtimes(to+unfinished, info.ModTime(), info.ModTime()); err != nil {
		return err
	}
	return os.Rename(to+unfinished, to)
}

// find is the copy of a program that the host calls by where it put it.
func (p *programs) find(command string) string {
	if dir, name := filepath.Split(command); filepath.Clean(dir) == p.from {
		return filepath.Join(p.to, name)
	}
	return command
}
