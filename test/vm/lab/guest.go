// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"github.com/smcr-io/kube-smcr/test/vm/lab/wire"
)

var (
	// ErrUnresponsive says that a guest does not answer: its kernel hangs, or its
	// QEMU is stopped.
	ErrUnresponsive = errors.New("the guest does not answer")

	errClosed = errors.New("the guests are closed")
	errReset  = errors.New("the guest was reset")
)

// An ExitError is how a command ended that did not end well.
type ExitError struct {
	Guest   string
	Command string
	Code    int // -1 if a signal ended it
	Signal  int
	Stderr  string
}

func (e *ExitError) Error() string {
	how := fmt.Sprintf("exit code %d", e.Code)
	if e.Signal != 0 {
		how = fmt.Sprintf("signal %d", e.Signal)
	}
	text := fmt.Sprintf("%s: %s: %s", e.Guest, e.Command, how)
	if s := strings.TrimSpace(e.Stderr); s != "" {
		text += ": " + s
	}
	return text
}

// A Guest is one of the guests.
type Guest struct {
	lab     *Lab
	index   int
	console *console

	connecting sync.Mutex // held by whoever makes the link

	mu     sync.Mutex
	link   *link // nil while there is none
	failed error // why there is none, and will not be without a reset
}

func newGuest(l *Lab, index int) *Guest {
	g := &Guest{lab: l, index: index}
	g.console = &console{guest: g, file: g.consoleFile()}
	return g
}

// Name is the guest's host name: g0, g1 and so on.
func (g *Guest) Name() string { return fmt.Sprintf("g%d", g.index) }

// Addr is the IPv4 address of a NIC, from 0.
func (g *Guest) Addr(nic int) netip.Addr { return wire.Addr(g.index, nic) }

// Addr6 is the IPv6 address of a NIC, from 0.
func (g *Guest) Addr6(nic int) netip.Addr { return wire.Addr6(g.index, nic) }

// NetDev is the guest's name of a NIC, from 0.
func (g *Guest) NetDev(nic int) string { return wire.NetDev(nic) }

func (g *Guest) dir() string             { return filepath.Join(g.lab.dir, g.Name()) }
func (g *Guest) consoleFile() string     { return filepath.Join(g.dir(), "console.log") }
func (g *Guest) logFile() string         { return filepath.Join(g.dir(), "qemu.log") }
func (g *Guest) monitorSocket() string   { return filepath.Join(g.dir(), "monitor") }
func (g *Guest) portSocket(n int) string { return filepath.Join(g.dir(), fmt.Sprintf("port%d", n)) }

// Run runs a command, without a shell and without input, and returns what it
// printed. The error is an *ExitError if the command ran and ended with another
// code than 0. When ctx ends, which is after five minutes if ctx does not say, the
// command and its process group are killed.
func (g *Guest) Run(ctx context.Context, command ...string) (string, error) {
	if _, ok := ctx.Deadline(); !ok {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, runTimeout)
		defer cancel()
	}
	p, err := g.Start(ctx, command...)
	if err != nil {
		return "", err
	}
	_ = p.Stdin.Close()
	var stdout bytes.Buffer
	_, _ = stdout.ReadFrom(p.Stdout) // Wait says what ended it
	err = p.Wait()
	var exit *ExitError
	if errors.As(err, &exit) {
		stderr, _ := io.ReadAll(p.Stderr)
		exit.Stderr = string(stderr)
	}
	return stdout.String(), err
}

// Shell runs a script of the shell as Run runs a command. It ends with the first
// command that fails.
func (g *Guest) Shell(ctx context.Context, script string) (string, error) {
	return g.Run(ctx, "bash", "-euc", script)
}

// AddRXE makes a soft RoCE device rxe<n> on each of these NICs, from 0. It is
// active when AddRXE returns. One that is there already is what was wanted. Soft
// RoCE takes the guest's UDP port 4791.
func (g *Guest) AddRXE(ctx context.Context, nics ...int) error {
	there, err := g.Run(ctx, "rdma", "link")
	if err != nil {
		return err
	}
	for _, n := range nics {
		if strings.Contains(there, fmt.Sprintf("link rxe%d/", n)) {
			continue
		}
		if _, err := g.Run(ctx, "rdma", "link", "add", fmt.Sprintf("rxe%d", n), "type", "rxe", "netdev", g.NetDev(n)); err != nil {
			return err
		}
	}
	// Programs open devices of /dev/infiniband; nobody asks for the module.
	if _, err := g.Run(ctx, "modprobe", "-a", "ib_uverbs", "rdma_ucm"); err != nil {
		return err
	}
	return poll(ctx, "soft RoCE of "+g.Name(), bootTimeout, func() error {
		out, err := g.Run(ctx, "rdma", "link")
		if active := strings.Count(out, "state ACTIVE"); err == nil && active < len(nics) {
			err = fmt.Errorf("%d of %d devices are active: %s", active, len(nics), out)
		}
		return err
	})
}

// RemoveRXE removes the devices that AddRXE made. The kernel waits for programs
// that have one open.
func (g *Guest) RemoveRXE(ctx context.Context, nics ...int) error {
	for _, n := range nics {
		if _, err := g.Run(ctx, "rdma", "link", "delete", fmt.Sprintf("rxe%d", n)); err != nil {
			return err
		}
	}
	return nil
}

// Console is what the kernel and the first process have said so far.
func (g *Guest) Console() string {
	text, err := os.ReadFile(g.consoleFile())
	if err != nil {
		return fmt.Sprintf("(%v)", err)
	}
	return string(bytes.ReplaceAll(text, []byte("\r"), nil))
}

// failure is why nothing can be asked of the guest, or nil.
func (g *Guest) failure() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.failed
}

// fail ends everything that is asked of the guest with that error, now and from
// now on.
func (g *Guest) fail(err error) {
	g.mu.Lock()
	if g.failed == nil {
		g.failed = err
	}
	l := g.link
	g.link = nil
	g.mu.Unlock()
	if l != nil {
		l.close(err)
	}
}

// disconnect closes the port with that error. Another connect may follow.
func (g *Guest) disconnect(err error) {
	g.mu.Lock()
	l := g.link
	g.link, g.failed = nil, nil
	g.mu.Unlock()
	if l != nil {
		l.close(err)
	}
}

// ended says that the guest's QEMU has.
func (g *Guest) ended(err error) {
	if err == nil {
		err = errors.New("exit code 0")
	}
	log, _ := os.ReadFile(g.logFile())
	g.fail(fmt.Errorf("%s: QEMU ended: %w: %s", g.Name(), err, bytes.TrimSpace(log)))
}

// connected returns the link, and makes it if there is none.
func (g *Guest) connected(ctx context.Context) (*link, error) {
	g.connecting.Lock()
	defer g.connecting.Unlock()
	g.mu.Lock()
	l, failed := g.link, g.failed
	g.mu.Unlock()
	if l != nil || failed != nil {
		return l, failed
	}
	return g.connect(ctx)
}

// connect waits until the guest takes commands.
func (g *Guest) connect(ctx context.Context) (*link, error) {
	ctx, cancel := context.WithTimeout(ctx, bootTimeout)
	defer cancel()
	for n := 0; ; n = (n + 1) % wire.Ports {
		if err := g.failure(); err != nil {
			return nil, err
		}
		lock, err := g.lockPort(n)
		if err == nil {
			return g.connectPort(ctx, n, lock)
		}
		if n == wire.Ports-1 {
			if paused := pause(ctx); paused != nil {
				return nil, fmt.Errorf("%s: wait for one of its %d ports: %w (last: %w)", g.Name(), wire.Ports, paused, err)
			}
		}
	}
}
