// SPDX-License-Identifier: Apache-2.0

package kernelpath

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/internal/testenv"
)

// A machine whose kernel has no SMC, as most that run this, is told so; another one the next thing
// that is missing, or nothing.
func TestProbe(t *testing.T) {
	testenv.Need(t, testenv.Root, testenv.NetAdmin)
	_, serr := openSocket(unix.AF_INET, protocolSMC)
	err := Probe(bpffs(t))
	t.Logf("socket of SMC: %v; probe: %v", serr, err)
	var missing *MissingError
	switch {
	case err != nil && !errors.As(err, &missing):
		t.Errorf("%v is no MissingError", err)
	case serr != nil && missing == nil:
		t.Errorf("nothing is missing, and a socket of SMC is %v", serr)
	case errors.Is(serr, unix.EPROTONOSUPPORT):
		if missing.Missing != NoSMC && missing.Missing != NoProtocol {
			t.Errorf("%s is missing, and a socket of SMC is %v", missing.Missing, serr)
		}
		for _, want := range []string{string(missing.Missing), "protocol not supported", missing.Missing.Need()} {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("%v does not say %q", err, want)
			}
		}
	}
}

// Without a BPF file system nothing else is tried, so that no module is loaded. What is looked at is
// not made.
func TestProbe_noPins(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "bpf")
	for _, d := range []string{dir, filepath.Join(dir, "deeper"), t.TempDir()} {
		var missing *MissingError
		if err := Probe(d); !errors.As(err, &missing) || missing.Missing != NoPins {
			t.Errorf("of %s is missing: %v", d, err)
		}
	}
	if _, err := os.Stat(dir); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the directory is there: %v", err)
	}
}

// In a guest nothing is missing.
func TestProbe_guest(t *testing.T) {
	need(t)
	if err := Probe(Dir); err != nil {
		t.Error(err)
	}
}

// A Prober stops at the first thing that is missing, looks again at what may change, and does not try the program
// again when that worked.
func TestProber(t *testing.T) {
	var tried []string
	failing := ""
	step := func(name string) func() error {
		return func() error {
			tried = append(tried, name)
			if name == failing {
				return errors.New(name)
			}
			return nil
		}
	}
	p := Prober{pins: step("pins"), protocol: step("protocol"), program: step("program"), smc: step("smc")}
	for _, tt := range []struct{ failing, want string }{
		{"pins", "pins"},
		{"protocol", "pins protocol"},
		{"program", "pins protocol program"},
		{"smc", "pins protocol program smc"},
		{"smc", "pins protocol smc"},
		{"", "pins protocol smc"},
		{"protocol", "pins protocol"},
	} {
		tried, failing = nil, tt.failing
		err := p.Probe()
		if got := strings.Join(tried, " "); got != tt.want {
			t.Errorf("%s fails: tried %q, want %q", tt.failing, got, tt.want)
		}
		if tt.failing == "" && err != nil || tt.failing != "" && (err == nil || err.Error() != tt.failing) {
			t.Errorf("%s fails: %v", tt.failing, err)
		}
	}
}

func TestMissing_needs(t *testing.T) {
	for _, m := range []Missing{
		NoRights, NoSMC, NoProtocol, NoBPF, NoBTF, NoHook, Refused, NoPins, NoEffect, NoVersion2, NoDevice,
	} {
		if m.Need() == "" {
			t.Errorf("%s does not say what to do", m)
		}
	}
}
