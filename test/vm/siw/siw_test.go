// SPDX-License-Identifier: Apache-2.0

package siw

import (
	"context"
	"fmt"
	"io"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/internal/testenv"
	"github.com/smcr-io/kube-smcr/test/vm/lab"
)

const (
	// caseTimeout bounds one run of two programs in guests that may share a core.
	caseTimeout = time.Minute

	// firstPort is that of the first server. Each has its own: the kernel takes a while
	// to let go of one.
	firstPort = 7200
)

func TestSIW(t *testing.T) {
	// The MTU is what most networks have, so that a message of 4,000 bytes is three segments.
	b := &bed{lab: lab.ForTest(t, lab.Config{NICs: 1, MTU: 1500}), port: firstPort}
	for i := range b.lab.Guests() {
		b.load(t, b.lab.Guest(i))
	}
	t.Run("host", b.testHost)
	t.Run("vectors", b.testVectors)
}

// A bed is the guests, with what a test needs to run programs there.
type bed struct {
	lab  *lab.Lab
	host *lab.Host // this machine, in testHost
	port int       // of the server before
}

// load gives a guest siw with these settings, or as Linux has it.
func (b *bed) load(t *testing.T, g *lab.Guest, settings ...string) {
	t.Helper()
	err := g.LoadSIW(t.Context(), settings...)
	if err == nil {
		err = g.AddSIW(t.Context(), 0)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// delay keeps what guests send on the way for a moment, until the test ends. Otherwise a
// program hangs now and then whose first message comes right behind the Reply: siw sends that
// before it is ready to be told of more.
func (b *bed) delay(t *testing.T) {
	t.Helper()
	for i := range b.lab.Guests() {
		g := b.lab.Guest(i)
		if _, err := g.Run(t.Context(), "tc", "qdisc", "replace", "dev", g.NetDev(0), "root", "netem", "limit", "100000", "delay", "50ms"); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { // t.Context is over by then
			if _, err := g.Run(context.WithoutCancel(t.Context()), "tc", "qdisc", "delete", "dev", g.NetDev(0), "root"); err != nil {
				t.Error(err)
			}
		})
	}
}

// A tool is a program that is server in one guest and client in another.
type tool struct {
	name           string
	server, client []string
	port, to       string // the options for the port and for the server's address
}

// run runs both sides, and returns what the client printed.
func (b *bed) run(t *testing.T, c *tool, server, client *lab.Guest) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), caseTimeout)
	defer cancel()
	port := b.nextPort()
	p, err := server.Start(ctx, append(c.server, c.port, port)...)
	if err != nil {
		t.Fatal(err)
	}
	_ = p.Stdin.Close()
	awaitListener(ctx, t, server, port)
	to := []string{server.Addr(0).String()}
	if c.to != "" {
		to = []string{c.to, to[0]}
	}
	short, cancel := context.WithTimeout(ctx, caseTimeout*3/4) // the server says what it saw
	defer cancel()
	out, err := client.Run(short, append(append(c.client, c.port, port), to...)...)
	if err != nil {
		t.Errorf("client: %v\n%s", err, out)
	}
	if err := p.Wait(); err != nil {
		said, _ := io.ReadAll(io.MultiReader(p.Stdout, p.Stderr)) // it has ended: no error
		t.Errorf("server: %v\n%s", err, said)
	}
	return out
}

func (b *bed) nextPort() string {
	b.port++
	return fmt.Sprint(b.port)
}

// awaitListener waits until a server listens: siw does with a socket of the kernel.
func awaitListener(ctx context.Context, t *testing.T, g *lab.Guest, port string) {
	t.Helper()
	if _, err := g.Shell(ctx, "until ss -Hltn sport = :"+port+" | grep -q .; do sleep 0.05; done"); err != nil {
		t.Fatalf("wait for the server at port %s: %v", port, err)
	}
}

// capture records what is on the wire until stop is called.
func (b *bed) capture(t *testing.T, name string) (stop func() string) {
	t.Helper()
	testenv.Need(t, testenv.Tshark)
	end, err := b.lab.Capture(name)
	if err != nil {
		t.Fatal(err)
	}
	return func() string {
		t.Helper()
		pcap, err := end()
		if err != nil {
			t.Fatal(err)
		}
		return pcap
	}
}
