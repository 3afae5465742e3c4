// SPDX-License-Identifier: Apache-2.0

package verbs

import (
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/smcr-io/kube-smcr/internal/testenv"
)

// TestWithoutCgo builds and tests the package as the static programs have it.
func TestWithoutCgo(t *testing.T) {
	if !Built {
		return // this is it
	}
	testenv.Builds("...") // other files of this package
	cmd := exec.CommandContext(t.Context(), "go", "test", "-count=1", "-run=^(TestOpen_notBuilt|TestDevices.*)$", "-v", ".")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "--- PASS: TestOpen_notBuilt") {
		t.Errorf("%v: %v\n%s", cmd, err, out)
	}
}
