// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/smcr-io/kube-smcr/internal/testenv"
)

// TestEnv is the environment variable that names guests that are up: tests then
// use those, as the test before left them, and leave them up.
const TestEnv = "KUBE_SMCR_TEST_VM"

// ForTest starts guests for a test, which is skipped where that cannot be, and
// ends them with it. A test fails if a kernel complained. When it fails, the
// consoles go to its log, and consoles and captures to out/test-vm/TEST of the
// checkout. A test has no reason to give its lab a name. Tests bound times, and
// measure none: the guests have coarse timers.
func ForTest(t *testing.T, cfg Config) *Lab {
	t.Helper()
	testenv.Need(t, testenv.VM)
	if cfg.Log == nil {
		cfg.Log = t.Output()
	}
	cfg.CoarseTimers = true
	l, err := upForTest(t, cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for _, line := range l.Complaints() {
			t.Errorf("a kernel complained: %s", line)
		}
		if t.Failed() {
			l.keepLogs(t)
		}
		if err := l.Close(); err != nil {
			t.Errorf("end the guests: %v", err)
		}
	})
	return l
}

func upForTest(t *testing.T, cfg Config) (*Lab, error) {
	t.Helper()
	name := os.Getenv(TestEnv)
	if name == "" {
		return Up(context.Background(), cfg)
	}
	l, err := Open(name)
	if err == nil {
		l.cfg.Log = cfg.Log
		if l.Guests() < cfg.Guests {
			t.Fatalf("%s has %d guests, the test wants %d", name, l.Guests(), cfg.Guests)
		}
		if len(cfg.Kernels) > 0 && !slices.Equal(l.cfg.Kernels, cfg.Kernels) {
			t.Fatalf("%s has kernels %v, the test wants %v", name, l.cfg.Kernels, cfg.Kernels)
		}
		if l.cfg.PFs < cfg.PFs {
			t.Fatalf("%s has %d PFs in each guest, the test wants %d", name, l.cfg.PFs, cfg.PFs)
		}
	}
	return l, err
}

// keepLogs saves what may explain a failure.
func (l *Lab) keepLogs(t *testing.T) {
	t.Helper()
	for _, g := range l.guests {
		t.Logf("%s", g.console.excerpt())
	}
	out, err := checkoutDir("out", "test-vm", strings.ReplaceAll(t.Name(), "/", "-"))
	if err == nil {
		err = l.SaveLogs(out)
	}
	if err != nil {
		t.Logf("save the logs: %v", err)
		return
	}
	t.Logf("consoles and captures are in %s", out)
}

// SaveLogs copies consoles and captures to a directory.
func (l *Lab) SaveLogs(dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	files := map[string]string{}
	for _, g := range l.guests {
		files[g.consoleFile()] = g.Name() + ".console.log"
		files[g.logFile()] = g.Name() + ".qemu.log"
	}
	captures, err := filepath.Glob(filepath.Join(l.dir, "captures", "*.pcap"))
	if err != nil {
		return err
	}
	for _, c := range captures {
		files[c] = filepath.Base(c)
	}
	for from, to := range files {
		if err := copyFile(from, filepath.Join(dir, to)); err != nil {
			return err
		}
	}
	return nil
}

func copyFile(from, to string) (err error) {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer func() { _ = in.Close() }()
	out, err := os.Create(to)
	if err != nil {
		return err
	}
	_, err = io.Copy(out, in)
	if err2 := out.Close(); err == nil {
		err = err2
	}
	return err
}

// checkoutDir is a directory of the checkout that the test runs in.
func checkoutDir(elem ...string) (string, error) {
	dir, err := os.Getwd()
	for err == nil {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			break
		}
		if dir == filepath.Dir(dir) {
			return "", os.ErrNotExist
		}
		dir = filepath.Dir(dir)
	}
	return filepath.Join(append([]string{dir}, elem...)...), err
}
