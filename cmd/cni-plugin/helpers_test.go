// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"debug/elf"
	"errors"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"
)

// run executes the plugin with the script's environment.
func run(ts *testscript.TestScript, stdin []byte) (out, errb []byte, code int) {
	path, err := exec.LookPath("smcr-cni")
	ts.Check(err)
	cmd := exec.Command(path)
	cmd.Env = []string{"GORACE=atexit_sleep_ms=0"} // else one with the race detector takes a second to end
	for _, k := range []string{
		"CNI_COMMAND", "CNI_CONTAINERID", "CNI_IFNAME", "CNI_NETNS", "CNI_NETNS_OVERRIDE", "CNI_PATH", "CNI_ARGS",
	} {
		cmd.Env = append(cmd.Env, k+"="+ts.Getenv(k))
	}
	var o, e bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewReader(stdin), &o, &e
	err = cmd.Run()
	var ee *exec.ExitError
	if errors.As(err, &ee) {
		return o.Bytes(), e.Bytes(), ee.ExitCode()
	}
	ts.Check(err)
	return o.Bytes(), e.Bytes(), 0
}

func command(t *testing.T, name string, args ...string) string {
	t.Helper()
	cmd := exec.Command(name, args...)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	var errb bytes.Buffer
	cmd.Stderr = &errb
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, errb.String())
	}
	return string(out)
}

// wantStatic fails if the program asks for a dynamic linker.
func wantStatic(t *testing.T, bin string) {
	t.Helper()
	f, err := elf.Open(bin)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	for _, p := range f.Progs {
		if p.Type == elf.PT_INTERP {
			t.Errorf("%s is not static", bin)
		}
	}
}
