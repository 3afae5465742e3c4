// SPDX-License-Identifier: Apache-2.0

package siw

import (
	"bufio"
	"context"
	"encoding/json"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"

	"github.com/smcr-io/kube-smcr/test/vm/lab"
)

// demoRole has the program of demo/upgrade play a role.
const demoRole = "KUBE_SMCR_DEMO_IWARP"

// demoMiB is what each operation of the demo moves.
const demoMiB = 4

// testDemo has the two programs of "make demo-iwarp" talk to each other, one of them in the guest on siw:
// first the server, then the client. They are nobody's, and say themselves what holds.
func (b *bed) testDemo(t *testing.T) {
	program, err := b.lab.Build(t.Context(), "github.com/smcr-io/kube-smcr/demo/upgrade", lab.BuildOptions{CGO: true})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := b.guest.Shell(t.Context(), "chmod 0666 /dev/infiniband/rdma_cm /dev/infiniband/uverbs*"); err != nil {
		t.Fatal(err)
	}
	local := filepath.Join(b.lab.Share(), "bin", filepath.Base(program))
	there := func(t *testing.T, role string, args ...string) *demoProgram {
		t.Helper()
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), caseTimeout)
		t.Cleanup(cancel)
		p, err := b.guest.StartIn(ctx, "/", []string{demoRole + "=" + role}, append([]string{program, "siw", b.guest.Addr(0).String()}, args...)...)
		if err != nil {
			t.Fatal(err)
		}
		return &demoProgram{name: "siw's " + role, lines: bufio.NewScanner(p.Stdout), errors: p.Stderr, wait: p.Wait}
	}
	here := func(t *testing.T, role string, args ...string) *demoProgram {
		t.Helper()
		cmd := exec.CommandContext(limited(t), local, append([]string{"direct", b.host.Addr().String()}, args...)...)
		cmd.Env = append(os.Environ(), demoRole+"="+role)
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		errs, err := cmd.StderrPipe()
		if err == nil {
			err = b.inNS(t, cmd.Start)
		}
		if err != nil {
			t.Fatal(err)
		}
		return &demoProgram{name: "softiwarp's " + role, lines: bufio.NewScanner(out), errors: errs, wait: cmd.Wait}
	}
	for _, c := range []struct {
		name           string
		server, client func(*testing.T, string, ...string) *demoProgram
	}{{"server", there, here}, {"client", here, there}} {
		t.Run(c.name, func(t *testing.T) {
			server := c.server(t, "server")
			client := c.client(t, "client", server.follow(t, 1), strconv.Itoa(demoMiB))
			client.follow(t, 5) // its rights, the connection, SEND, WRITE, READ
			server.follow(t, 0)
		})
	}
}

// demoProgram is the server or the client.
type demoProgram struct {
	name   string
	lines  *bufio.Scanner // of JSON
	errors io.Reader
	wait   func() error
}

// follow takes so many statements, which are to hold, until the program says where it listens, or ends.
func (p *demoProgram) follow(t *testing.T, checks int) (addr string) {
	t.Helper()
	for p.lines.Scan() {
		var l struct {
			Check, Detail, Addr string
			Holds               bool
		}
		if err := json.Unmarshal(p.lines.Bytes(), &l); err != nil {
			t.Fatalf("%s says %q: %v", p.name, p.lines.Text(), err)
		}
		if l.Check != "" {
			checks--
			t.Logf("%s: %s: %s", p.name, l.Check, l.Detail)
			if !l.Holds {
				t.Errorf("%s: not so: %s: %s", p.name, l.Check, l.Detail)
			}
		}
		if addr = l.Addr; addr != "" {
			break
		}
	}
	if addr == "" {
		said, _ := io.ReadAll(p.errors) // what there is
		if err := p.wait(); err != nil {
			t.Fatalf("%s: %v: %s", p.name, err, said)
		}
	}
	if checks != 0 {
		t.Errorf("%s makes %d statements less than it should", p.name, checks)
	}
	return addr
}
