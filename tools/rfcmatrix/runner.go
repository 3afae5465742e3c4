// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"
)

// Limits of a run.
const (
	// testTimeout bounds a test with all functions on.
	testTimeout = 5 * time.Minute
	// A test without a function may wait for what does not come: it is over after
	// patience and slowdown times what it takes with the function.
	patience = 10 * time.Second
	slowdown = 2
)

// runner runs tests with one function off, and remembers what came of it.
type runner struct {
	root, tmp, overlay, cache string

	mu       sync.Mutex // guards what is below
	binaries map[string]*binary
	baseline map[string]*healthy
}

// binary is the test binary of a package; its sum stands for the sources and the test
// data.
type binary struct {
	once sync.Once
	path string
	sum  string
	err  error
}

// healthy is a test with all functions on.
type healthy struct {
	once sync.Once
	took time.Duration
	err  error
}

func newRunner(root, tmp string, functions []target) (*runner, error) {
	file, err := overlay(root, tmp, functions)
	if err != nil {
		return nil, err
	}
	r := &runner{root: root, tmp: tmp, overlay: file, binaries: map[string]*binary{}, baseline: map[string]*healthy{}}
	if dir, err := os.UserCacheDir(); err == nil {
		r.cache = filepath.Join(dir, "kube-smcr", "rfcmatrix")
		if err := os.MkdirAll(r.cache, 0o755); err != nil {
			return nil, err
		}
	}
	return r, nil
}

// survives reports whether all tests of a claim pass although its function is off. It
// begins with those that take the least time.
func (r *runner) survives(c claim) (bool, error) {
	type timed struct {
		test reference
		took time.Duration
	}
	var tests []timed
	for _, t := range c.tests {
		took, err := r.healthy(t)
		if err != nil {
			return false, err
		}
		tests = append(tests, timed{t, took})
	}
	slices.SortStableFunc(tests, func(a, b timed) int { return cmp.Compare(a.took, b.took) })
	for _, t := range tests {
		if passed, err := r.passes(t.test, c.target(), t.took); err != nil || !passed {
			return false, err
		}
	}
	return true, nil
}

// healthy runs a test with all functions on, once, and returns how long it took.
func (r *runner) healthy(t reference) (time.Duration, error) {
	r.mu.Lock()
	h := r.baseline[t.name]
	if h == nil {
		h = &healthy{}
		r.baseline[t.name] = h
	}
	r.mu.Unlock()
	h.once.Do(func() {
		b, err := r.build(t.dir)
		if err != nil {
			h.err = err
			return
		}
		start := time.Now()
		out, err := r.run(b, t, "", testTimeout)
		h.took = time.Since(start)
		want := "--- PASS: " + t.test
		if t.subtest != "" {
			want += "/"
		}
		switch {
		case err != nil:
			h.err = fmt.Errorf("%s fails with all functions on: %w\n%s", t.name, err, out)
		case !bytes.Contains(out, []byte(want)):
			h.err = fmt.Errorf("%s: nothing ran, or it was skipped", t.name)
		}
	})
	return h.took, h.err
}

// passes runs a test with a function off, unless the outcome is known already.
func (r *runner) passes(t reference, off target, took time.Duration) (bool, error) {
	b, err := r.build(t.dir)
	if err != nil {
		return false, err
	}
	key := sha256.Sum256([]byte(strings.Join([]string{b.sum, t.name, off.String()}, "\n")))
	known := filepath.Join(r.cache, hex.EncodeToString(key[:16]))
	if r.cache != "" {
		if v, err := os.ReadFile(known); err == nil {
			return string(v) == "passed", nil
		}
	}
	_, err = r.run(b, t, off.String(), patience+slowdown*took)
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		return false, err
	}
	outcome := map[bool]string{true: "passed", false: "failed"}[err == nil]
	if r.cache != "" {
		if err := os.WriteFile(known, []byte(outcome), 0o600); err != nil {
			return false, err
		}
	}
	return err == nil, nil
}

// run runs one test in a process of its own.
func (r *runner) run(b *binary, t reference, off string, limit time.Duration) ([]byte, error) {
	pattern := "^" + t.test + "$"
	if t.subtest != "" { // a table may add to the name
		pattern += "/^" + regexp.QuoteMeta(strings.ReplaceAll(t.subtest, " ", "_"))
	}
	// The test's own time-out prints all goroutines; ours comes if that hangs, too.
	ctx, cancel := context.WithTimeout(context.Background(), limit+patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, b.path, "-test.run="+pattern, "-test.v", "-test.failfast", "-test.timeout="+limit.String())
	cmd.Dir = filepath.Join(r.root, t.dir)
	cmd.Env = append(os.Environ(), offEnv+"="+off)
	cmd.WaitDelay = time.Second
	return cmd.CombinedOutput()
}

// build makes the test binary of a package, once.
func (r *runner) build(dir string) (*binary, error) {
	r.mu.Lock()
	b := r.binaries[dir]
	if b == nil {
		b = &binary{path: filepath.Join(r.tmp, strings.ReplaceAll(dir, "/", "-")+".test")}
		r.binaries[dir] = b
	}
	r.mu.Unlock()
	b.once.Do(func() {
		cmd := exec.Command("go", "test", "-c", "-trimpath", "-buildvcs=false", "-vet=off", "-overlay", r.overlay, "-o", b.path, "./"+dir)
		cmd.Dir = r.root
		if out, err := cmd.CombinedOutput(); err != nil {
			b.err = fmt.Errorf("build the tests of %s: %w\n%s", dir, err, out)
			return
		}
		b.sum, b.err = sumOf(b.path, filepath.Join(r.root, dir, "testdata"))
	})
	return b, b.err
}

// sumOf is a hash of files and of all files in directories; one that is not there
// counts as empty.
func sumOf(paths ...string) (string, error) {
	h := sha256.New()
	for _, p := range paths {
		err := filepath.WalkDir(p, func(name string, d fs.DirEntry, err error) error {
			if errors.Is(err, fs.ErrNotExist) {
				return nil
			}
			if err != nil || d.IsDir() {
				return err
			}
			f, err := os.Open(name)
			if err != nil {
				return err
			}
			fmt.Fprintf(h, "%s\n", d.Name())
			_, err = io.Copy(h, f)
			return errors.Join(err, f.Close())
		})
		if err != nil {
			return "", err
		}
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}
