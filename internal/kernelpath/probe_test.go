// SPDX-License-Identifier: Apache-2.0

package kernelpath

import (
	"errors"
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
	err := Probe()
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
		for _, want := range []string{string(missing.Missing), "protocol not supported", missing.Missing.need()} {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("%v does not say %q", err, want)
			}
		}
	}
}

// In a guest nothing is missing.
func TestProbe_guest(t *testing.T) {
	need(t)
	if err := Probe(); err != nil {
		t.Error(err)
	}
}

func TestMissing_needs(t *testing.T) {
	for _, m := range []Missing{
		NoRights, NoSMC, NoProtocol, NoBPF, NoBTF, NoHook, Refused, NoPins, NoEffect, NoVersion2, NoDevice,
	} {
		if m.need() == "" {
			t.Errorf("%s does not say what to do", m)
		}
	}
}
