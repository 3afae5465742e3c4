// SPDX-License-Identifier: Apache-2.0

package kernelpath

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/internal/testenv"
	"github.com/smcr-io/kube-smcr/test/vm/lab"
	"github.com/smcr-io/kube-smcr/test/vm/peer/drive"
)

// patience bounds what is waited for in a guest, which is slow, and slower if
// others work on this machine.
const patience = 2 * time.Minute

// module is this project.
const module = "github.com/smcr-io/kube-smcr"

func TestKernelPath(t *testing.T) {
	l := lab.ForTest(t, lab.Config{})
	if err := drive.Build(t.Context(), l); err != nil {
		t.Fatal(err)
	}
	for i := range l.Guests() {
		if err := drive.SetUpKernel(t.Context(), l.Guest(i), 0); err != nil {
			t.Fatal(err)
		}
	}
	t.Run("program", func(t *testing.T) { program(t, l) })
	t.Run("faults", func(t *testing.T) { faults(t, l) })
	t.Run("pods", func(t *testing.T) { pods(t, l) })
	t.Run("hosts", func(t *testing.T) { hosts(t, l) })
	t.Run("veths", func(t *testing.T) { veths(t, l) })
}

// programPatience is for all tests of internal/kernelpath, one after the other, some 40 s where nobody else works.
const programPatience = 10 * time.Minute

// program runs the tests of internal/kernelpath. They end in time in the guest itself: what goes on there would disturb
// those that come next.
func program(t *testing.T, l *lab.Lab) {
	tests, err := l.Build(t.Context(), module+"/internal/kernelpath", lab.BuildOptions{Test: true})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), programPatience+patience)
	defer cancel()
	out, err := l.Guest(0).Shell(ctx, fmt.Sprintf("cd /tmp && %s=1 %s=all timeout -s KILL %.0f %s -test.v 2>&1",
		testenv.InGuestEnv, testenv.RequireEnv, programPatience.Seconds(), tests))
	const least = 30
	if n := strings.Count(out, "--- PASS: "); n < least && err == nil {
		err = fmt.Errorf("%d tests passed, want %d or more", n, least)
	}
	if err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}
