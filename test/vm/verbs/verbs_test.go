// SPDX-License-Identifier: Apache-2.0

package verbs

import (
	"bufio"
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/internal/testenv"
	"github.com/smcr-io/kube-smcr/test/vm/lab"
)

// perRun bounds one call of the test program, and so a kernel that hangs in it.
const perRun = 4 * time.Minute

// TestVerbs runs the tests that need a device. Each part of the tests is a program of its own, and
// looks at its end for objects that it left in the kernel.
func TestVerbs(t *testing.T) {
	l := lab.ForTest(t, lab.Config{Guests: 1})
	g := l.Guest(0)
	if err := g.AddRXE(t.Context(), 0); err != nil {
		t.Fatal(err)
	}
	program, err := l.Build(t.Context(), "github.com/smcr-io/kube-smcr/pkg/rdma/verbs", lab.BuildOptions{CGO: true, Test: true})
	if err != nil {
		t.Fatal(err)
	}
	for _, part := range []struct {
		name, run, skip string
		least           int // tests that pass
	}{
		{"conformance", "^TestDevice_conformance$", "", 30},
		{"conformance under load", "^TestDevice_conformanceUnderLoad$", "", 30},
		{"device", "^TestDevice_", "^TestDevice_conformance", 10},
		{"removed", "^TestRXE_removed$", "", 1},
		{"port", "^TestRXE_port$", "", 1},
		{"port without events", "^TestRXE_portUntold$", "", 1},
		{"renamed", "^TestRXE_renamed$", "", 1},
		{"queue pairs", "^TestRXE_queuePairs$", "", 1},
		{"MTU", "^TestRXE_mtu$", "", 1},
		{"refuse", "^TestRXE_refuse$", "", 5},
		{"close", "^TestRXE_closeBesideMessage$", "", 1},
		{"first notification", "^TestRXE_firstNotification$", "", 1},
		{"memlock", "^TestRXE_memlock$", "", 1},
	} {
		t.Run(part.name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), perRun)
			defer cancel()
			out, err := g.Shell(ctx, fmt.Sprintf("%s=rxe0 %s=%s %s -test.v -test.timeout=%v -test.run='%s' -test.skip='%s' 2>&1",
				testenv.RDMADeviceEnv, testenv.RequireEnv, testenv.RDMADevice, program, perRun, part.run, part.skip))
			if n := passed(t, out); n < part.least && err == nil {
				err = fmt.Errorf("%d tests passed, want %d or more", n, part.least)
			}
			if err != nil {
				t.Errorf("%v\n%s", err, out)
			}
		})
	}
}

// passed counts the innermost tests that passed, and logs how long each of them took.
func passed(t *testing.T, out string) (n int) {
	t.Helper()
	for s := bufio.NewScanner(strings.NewReader(out)); s.Scan(); {
		line := strings.TrimSpace(s.Text())
		if what, ok := strings.CutPrefix(line, "--- PASS: "); ok {
			t.Log(what)
			n++
		}
	}
	return n
}
