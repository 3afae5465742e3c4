// SPDX-License-Identifier: Apache-2.0

package apps

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/smcr-io/kube-smcr/internal/testenv"
	"github.com/smcr-io/kube-smcr/test/netns/lab"
)

var (
	long = flag.Bool("apps.long", false, "run all parts of the suites, not only short ones")
	only = flag.String("apps.parts", "", "run these parts, separated by commas, instead")
	show = flag.String("apps.show", "", "write what the suites write to files in this directory")
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// TestApplications runs the suites in all modes and compares what they say.
func TestApplications(t *testing.T) {
	testenv.Need(t, testenv.Root, testenv.NetAdmin, testenv.BPF, testenv.Nftables)
	for _, p := range []string{"setpriv", "nsenter", "unshare", "bash", filepath.Join(cniDir, "bridge"), filepath.Join(cniDir, "host-local")} {
		testenv.Need(t, testenv.Program(p))
	}
	bin := build(t)
	swept, err := lab.Sweep()
	t.Logf("left by runs that were killed, and removed: %q, %v", swept, err)
	var beds [modes]*bed
	for m := range modes {
		if beds[m], err = newBed(t.Context(), m, bin); err != nil {
			t.Fatalf("make the bed %v: %v", m, err)
		}
		t.Cleanup(func() {
			if err := beds[m].close(); err != nil {
				t.Errorf("remove the bed %v: %v", m, err)
			}
		})
	}
	for _, s := range []suite{memcached, curl, redis} {
		t.Run(s.name, func(t *testing.T) { compare(t, s, beds) })
	}
}

// build builds our programs. They are static: the devices of these nodes are in
// software.
func build(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	for binary, command := range map[string]string{"node-agent": "node-agent", "smcr-cni": "cni-plugin"} {
		testenv.Builds("cmd/" + command)
		cmd := exec.Command("go", "build", "-o", filepath.Join(dir, binary), "../../../cmd/"+command)
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("build %s: %v\n%s", binary, err, out)
		}
	}
	return dir
}

// compare runs a suite's parts in all modes.
func compare(t *testing.T, s suite, beds [modes]*bed) {
	for _, p := range s.programs {
		testenv.Need(t, testenv.Program(p))
	}
	ctx, cancel := context.WithTimeout(t.Context(), buildTimeout)
	defer cancel()
	from, err := sources[s.name].get(ctx, s.name, os.Stderr)
	if err != nil {
		t.Fatal(err)
	}
	for _, b := range beds {
		if err := b.copy(ctx, s.name, from); err != nil {
			t.Fatal(err)
		}
		if err := s.prepare(ctx, b); err != nil {
			t.Fatalf("change the suite for the bed %v: %v", b.mode, err)
		}
	}
	todo := parts(t, s, from)
	if len(todo) == 0 {
		return // other parts were asked for
	}
	before := carried(t, beds)
	var sums [modes]sum
	for _, part := range todo {
		t.Run(part, func(t *testing.T) { comparePart(t, s, part, beds, &sums) })
	}
	for m := range modes {
		t.Logf("%-5v  %v", m, sums[m])
		if m != plain && carried(t, beds)[m] == before[m] {
			t.Errorf("no connection of %s was on SMC-R in the mode %v", s.name, m)
		}
	}
}

// carried is how many connections were on SMC-R so far, by mode.
func carried(t *testing.T, beds [modes]*bed) (out [modes]uint64) {
	t.Helper()
	for m := smcr; m < modes; m++ {
		var err error
		if out[m], err = beds[m].carried(t.Context()); err != nil {
			t.Fatalf("ask the client's agent of the bed %v: %v", m, err)
		}
	}
	return out
}

// parts are the parts of a suite that are run.
func parts(t *testing.T, s suite, dir string) []string {
	t.Helper()
	all, err := s.all(dir)
	if err != nil || len(all) == 0 {
		t.Fatalf("the suite has %d parts: %v", len(all), err)
	}
	for part := range s.leftOut {
		if !slices.Contains(all, part) {
			t.Errorf("the part %q, which is left out, is not there", part)
		}
	}
	if *only != "" {
		asked := strings.Split(*only, ",")
		return slices.DeleteFunc(asked, func(part string) bool { return !slices.Contains(all, part) && !slices.Contains(s.quick, part) })
	}
	if !*long {
		return s.quick
	}
	return slices.DeleteFunc(all, func(part string) bool { return s.leftOut[part] != "" })
}

// A sum counts tests in one mode, the first time that they ran.
type sum struct{ passed, failed int }

func (s sum) String() string { return fmt.Sprintf("%5d passed, %3d failed", s.passed, s.failed) }

func (s *sum) add(o outcome) {
	for test, passed := range o {
		switch {
		case passed && test != ends && test != asMany:
			s.passed++
		case !passed:
			s.failed++
		}
	}
}

// comparePart runs a part in all modes, and again if a test fails in one of ours and
// not over plain TCP.
func comparePart(t *testing.T, s suite, part string, beds [modes]*bed, sums *[modes]sum) {
	var records [modes]record
	run := func(n int) {
		var wg sync.WaitGroup
		var took [modes]time.Duration
		for m, b := range beds {
			wg.Go(func() {
				began := time.Now()
				records[m] = append(records[m], runPart(t, s, part, b, n))
				took[m] = time.Since(began).Round(time.Second / 10)
			})
		}
		wg.Wait()
		if !s.stable {
			count(records[plain], records[plain+1:]...)
		}
		t.Logf("run %d took %v", n, took)
	}
	run(0)
	for m := range modes {
		sums[m].add(records[m][0])
	}
	// stops says that over plain TCP the part does not come to its end, and nobody knows why.
	stops := func() bool { return explained(s.name, part, ends, plain) == "" && s.failures(records[plain], ends) > 0 }
	doubtful := func() bool {
		return stops() || slices.ContainsFunc(ours, func(m mode) bool {
			return slices.ContainsFunc(s.suspects(records[plain], records[m]), func(test string) bool { return explained(s.name, part, test, m) == "" })
		})
	}
	for n := 1; n <= repeats && doubtful(); n++ {
		run(n)
	}
	for _, m := range ours {
		for _, test := range s.suspects(records[plain], records[m]) {
			why := explained(s.name, part, test, m)
			often := s.failures(records[m], test)
			switch {
			case why != "":
				t.Logf("%v: %s: failed, as expected: %s", m, test, why)
			case slices.Contains(s.convicted(records[plain], records[m]), test):
				t.Errorf("%v: %s: failed, or was not run, %d times of %d, and never over plain TCP", m, test, often, len(records[m]))
			default:
				t.Logf("%v: %s: failed once of %d times", m, test, len(records[m]))
			}
		}
	}
	if n := s.failures(records[plain], ends); stops() && n >= enough {
		t.Errorf("plain: %s: failed %d times of %d, so that nothing is compared", ends, n, len(records[plain]))
	}
	for _, test := range names(records[plain]) {
		if n := s.failures(records[plain], test); n > 0 {
			t.Logf("plain: %s: failed %d times of %d", test, n, len(records[plain]))
		}
	}
}

// runPart runs a part in one mode.
func runPart(t *testing.T, s suite, part string, b *bed, n int) outcome {
	ctx, cancel := context.WithTimeoutCause(t.Context(), partTimeout, fmt.Errorf("no end after %v", partTimeout))
	defer cancel()
	seen := b.lookBefore(ctx)
	out, err := b.run(ctx, b.dir(s.name), s.command(part)...)
	if text := seen(); text != "" {
		t.Logf("%v: a moment before its time was over:\n%s", b.mode, text)
	}
	o := s.read(out)
	if err != nil {
		t.Logf("%v: %v", b.mode, err)
		o[ends] = false
	}
	if *show != "" {
		name := strings.NewReplacer("/", "_", " ", "_").Replace(fmt.Sprintf("%s-%s-%v-%d", s.name, part, b.mode, n))
		if err := os.WriteFile(filepath.Join(*show, name), []byte(out), 0o644); err != nil {
			t.Error(err)
		}
	}
	return o
}
