// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/smcr-io/kube-smcr/internal/testenv"
	"github.com/smcr-io/kube-smcr/internal/testenv/clustertools"
	"github.com/smcr-io/kube-smcr/test/vm/lab/image"
)

// leaseEnv makes this test binary a process that starts guests and waits to be
// killed.
const leaseEnv = "KUBE_SMCR_TEST_VM_LEASE"

func holdLease(name string) {
	_, err := startOnly(name, false)
	fmt.Println("started", err)
	select {}
}

// startOnly starts one guest and does not wait for its boot.
func startOnly(name string, detach bool) (*Lab, error) {
	cfg := Config{Name: name, Guests: 1, MemoryMiB: 256, Detach: detach}
	if err := cfg.setDefaults(); err != nil {
		return nil, err
	}
	img, err := image.Get(context.Background(), image.SMC, os.Stderr)
	if err != nil {
		return nil, err
	}
	dir, lock, err := claim(name)
	if err != nil {
		return nil, err
	}
	defer func() { _ = lock.Close() }()
	l := newLab(cfg, dir)
	return l, l.start(context.Background(), map[image.Kernel]image.Files{image.SMC: img}, image.Installed(), lock)
}

// QEMU ends with the process that started it, and Sweep removes the files that QEMU leaves.
func TestUp_endsWithItsProcess(t *testing.T) {
	testenv.Need(t, testenv.VM)
	name := fmt.Sprintf("lease-%d", os.Getpid())
	defer func() { _ = Down(context.Background(), name) }() // if it did not end
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), leaseEnv+"="+name)
	cmd.Stderr = os.Stderr
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(stdout).ReadString('\n')
	if err != nil || line != "started <nil>\n" {
		t.Errorf("the process that starts guests: %q, %v", line, err)
	}
	if left := leftovers(t, name); len(left) < 2 {
		t.Errorf("there is only %q while it runs", left)
	}
	if _, _, err := claim(name); !errors.Is(err, errInUse) {
		t.Errorf("claim the name of guests that are up: %v", err)
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait() // killed
	err = poll(t.Context(), "the end of QEMU", stopTimeout, func() error {
		if err := Sweep(); err != nil {
			return err
		}
		if left := leftovers(t, name); len(left) > 0 {
			return fmt.Errorf("there is still %q", left)
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}

// Detached guests live on after Forget, and Down ends them.
func TestDown(t *testing.T) {
	testenv.Need(t, testenv.VM)
	name := fmt.Sprintf("down-%d", os.Getpid())
	l, err := startOnly(name, true)
	if err != nil {
		t.Fatal(err)
	}
	keeper := l.keeper
	l.Forget()
	names, err := List()
	if err != nil || !strings.Contains(strings.Join(names, " "), name) {
		t.Errorf("list: %q, %v", names, err)
	}
	if left := leftovers(t, name); len(left) < 2 {
		t.Errorf("there is only %q after Forget", left)
	}
	if err := Down(t.Context(), name); err != nil {
		t.Error(err)
	}
	if left := leftovers(t, name); len(left) > 0 {
		t.Errorf("there is still %q after Down", left)
	}
	if err := Down(t.Context(), name); err != nil {
		t.Errorf("once more: %v", err)
	}
	if _, err := Open(name); err == nil || !strings.Contains(err.Error(), "tools/vm up --name "+name) {
		t.Errorf("open what is down: %v", err)
	}
	if err := keeper.stop(); err != nil {
		t.Error(err)
	}
}

// If QEMU does not start, the error says why.
func TestUp_tellsWhyQEMUEnded(t *testing.T) {
	testenv.Need(t, testenv.VM)
	name := fmt.Sprintf("fail-%d", os.Getpid())
	_, err := Up(t.Context(), Config{Name: name, Guests: 1, MemoryMiB: 1 << 30})
	if err == nil || !strings.Contains(err.Error(), "QEMU ended") || !strings.Contains(err.Error(), "memory") {
		t.Errorf("a guest of a pebibyte: %v", err)
	}
	if left := leftovers(t, name); len(left) > 0 {
		t.Errorf("there is still %q", left)
	}
}

func TestSweep_leavesOthersAlone(t *testing.T) {
	cache := t.TempDir()
	t.Setenv(clustertools.CacheEnv, cache)
	theirs, dead := filepath.Join(cache, "vm", "labs", "Not a lab"), filepath.Join(cache, "vm", "labs", "dead")
	if err := errors.Join(os.MkdirAll(theirs, 0o700), os.MkdirAll(dead, 0o700)); err != nil {
		t.Fatal(err)
	}
	if err := Sweep(); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(theirs); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(dead); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a directory whose lock is free: %v", err)
	}
}

// After a QEMU has ended, its process id may be that of another process, which Down leaves alone.
func TestDown_leavesOthersAlone(t *testing.T) {
	t.Setenv(clustertools.CacheEnv, t.TempDir())
	dir, err := directory("others")
	if err != nil {
		t.Fatal(err)
	}
	// One that only reads what is in the directory.
	reader := exec.Command("sh", "-c", "sleep 600 & wait", dir+"/g0/console")
	reader.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := reader.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = syscall.Kill(-reader.Process.Pid, syscall.SIGKILL)
		_ = reader.Wait()
	})
	for guest, text := range map[string]string{"g0": strconv.Itoa(reader.Process.Pid), "g1": ""} {
		if err := os.MkdirAll(filepath.Join(dir, guest), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, guest, pidFile), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := Down(t.Context(), "others"); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(dir); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the directory: %v", err)
	}
	if err := reader.Process.Signal(syscall.Signal(0)); err != nil {
		t.Errorf("a process that only names the directory: %v", err)
	}
}

func TestConfig(t *testing.T) {
	for _, c := range []struct {
		name string
		cfg  Config
		want string
	}{
		{"capitals", Config{Name: "Lab"}, `name "Lab": want up to 24 lower case letters, digits and dashes`},
		{"long name", Config{Name: strings.Repeat("a", 25)}, `name "aaaaaaaaaaaaaaaaaaaaaaaaa": want up to 24 lower case letters, digits and dashes`},
		{"guests", Config{Guests: 10}, "10 guests: want 1 to 9"},
		{"NICs", Config{NICs: -1}, "-1 NICs: want 1 to 9"},
		{"MTU", Config{MTU: 576}, "an MTU of 576: want 1280, which IPv6 needs, to 65521"},
		{"modules", Config{Modules: []string{"smc smc_diag"}}, `module "smc smc_diag": one name, please`},
		{"zero", Config{}, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			got := ""
			if err := c.cfg.setDefaults(); err != nil {
				got = err.Error()
			}
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("error (-want +got):\n%s", diff)
			}
		})
	}
}

// TestLoadConfig: who opens guests that somebody else started has them say nothing, and can let them say something.
func TestLoadConfig(t *testing.T) {
	t.Setenv(clustertools.CacheEnv, t.TempDir())
	dir, err := directory("config")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	want := Config{Name: "config", Guests: 3, Detach: true}
	if err := newLab(want, dir).saveConfig(); err != nil {
		t.Fatal(err)
	}
	got, at, err := loadConfig("config")
	if err != nil || at != dir || got.Guests != want.Guests || got.Log == nil {
		t.Errorf("%+v, %s, %v; want %d guests, and a Log", got, at, err, want.Guests)
	}
}
