// SPDX-License-Identifier: Apache-2.0

// Command upgrade shows RDMA without rights: two programs of an ordinary user talk text over a TCP
// connection, agree to make it one of RDMA, and go on over the same connection with SEND, RDMA WRITE
// and RDMA READ (package softiwarp).
//
//	demo      starts both, prints what they say, and looks at the wire
//	server    answers a line of text, becomes a Socket Service Point, takes and gives bytes
//	client    asks by a line of text, sends the MPA Request, moves the bytes, compares sums
//
// With -siw one of the two is in an emulated guest, on Linux' software iWARP: first the server, then the
// client. The programs are the same, but for how they connect: siw opens its TCP connections in the
// kernel, when rdma_cm asks for one, and upgrades none that a program has. So nobody talks text there.
//
// Every statement it makes is a check; one that does not hold ends the demo with exit code 1.
//
// # Limitations
//
// Both programs and all copies share the processors of one machine, so that the speeds say little, and in a
// guest nothing: it is emulated.
// Started by root the programs become nobody before they do anything, and tcpdump looks at the loopback
// interface, which takes the rights that they do not have; started by another user they run as that, and
// nobody looks. With -siw the demo takes root, for a NIC among the guests; the programs do not, but for the
// limit of locked memory, which root raises for that on siw.
package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"time"

	"github.com/smcr-io/kube-smcr/demo/transcript"
)

// roleVariable says which of the programs this process is.
const roleVariable = "KUBE_SMCR_DEMO_IWARP"

const (
	nobody   = 65534 // user and group
	patience = 10 * time.Minute

	// By default these are moved; in an emulated guest less, so that it takes half a minute.
	defaultMiB, defaultSIWMiB = 1024, 32
	maxMiB                    = 1 << 16

	loopback = "127.0.0.1"
	endGrace = 3 * time.Second
)

func main() {
	if code, is := runRole(os.Args[1:]); is {
		os.Exit(code)
	}
	os.Exit(run(os.Args[1:], os.Stdout, os.Stderr))
}

// runRole is the server or the client, if this process is one.
func runRole(args []string) (code int, is bool) {
	role := os.Getenv(roleVariable)
	if role == "" {
		return 0, false
	}
	var err error
	if os.Getuid() == 0 && slices.Contains(args, kindSIW) {
		err = unlockMemory()
	}
	if err == nil {
		err = dropRights()
	}
	switch {
	case err != nil:
	case role == "server":
		err = serve(newTeller(os.Stdout), args)
	case role == "client":
		err = ask(newTeller(os.Stdout), args)
	default:
		err = fmt.Errorf("%s is %q, want server or client", roleVariable, role)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return transcript.ExitFailed, true
	}
	return 0, true
}

// options are the flags.
type options struct {
	mebibytes int
	pcap      string
	siw       bool
}

func parseFlags(args []string, stderr io.Writer) (options, int) {
	var o options
	fs := flag.NewFlagSet("iwarp", flag.ContinueOnError)
	fs.SetOutput(stderr)
	fs.IntVar(&o.mebibytes, "mib", 0, fmt.Sprintf("`MiB` to be sent, written and read: 1 to %d; 0: %d, and %d with -siw", maxMiB, defaultMiB, defaultSIWMiB))
	fs.BoolVar(&o.siw, "siw", false, "one side is Linux' siw, in an emulated guest")
	fs.StringVar(&o.pcap, "pcap", filepath.Join("out", "demo", "iwarp.pcap"), "`FILE` for the capture")
	err := fs.Parse(args)
	switch {
	case errors.Is(err, flag.ErrHelp):
		return o, 0
	case err != nil:
		return o, transcript.ExitUsage
	case fs.NArg() > 0 || o.mebibytes < 0 || o.mebibytes > maxMiB:
		fmt.Fprintf(stderr, "iwarp: want no arguments, and 0 to %d for -mib; -help shows more\n", maxMiB)
		return o, transcript.ExitUsage
	case o.mebibytes == 0 && o.siw:
		o.mebibytes = defaultSIWMiB
	case o.mebibytes == 0:
		o.mebibytes = defaultMiB
	}
	return o, -1
}

func run(args []string, stdout, stderr io.Writer) int {
	o, code := parseFlags(args, stderr)
	if code >= 0 {
		return code
	}
	play := show
	if o.siw {
		play = showSIW
	}
	return transcript.Play("iwarp", stdout, stderr, patience, func(ctx context.Context, t *transcript.Transcript) error { return play(ctx, t, o) })
}

// show runs both programs and prints what they say.
func show(ctx context.Context, t *transcript.Transcript, o options) error {
	t.Title("Two programs without rights")
	server, err := startProgram(ctx, t, here, "server", kindUpgrade, loopback)
	if err != nil {
		return err
	}
	defer server.end()
	addr, err := server.follow()
	if err != nil {
		return err
	}
	w, err := watch(ctx, addr, o.pcap, "lo", (*exec.Cmd).Start)
	if err != nil {
		return err
	}
	defer w.end()
	client, err := startProgram(ctx, t, here, "client", kindUpgrade, loopback, addr, fmt.Sprint(o.mebibytes))
	if err != nil {
		return err
	}
	defer client.end()
	if err := followBoth(client, server); err != nil {
		return err
	}
	t.Title("On the wire")
	return w.show(ctx, t)
}

// followBoth prints what programs say until both have ended.
func followBoth(client, server *program) error {
	for _, p := range []*program{client, server} {
		if _, err := p.follow(); err != nil {
			return err
		}
	}
	return nil
}

// line is what a program says.
type line struct {
	Title  string `json:"title,omitempty"`
	Say    string `json:"say,omitempty"`
	Check  string `json:"check,omitempty"`
	Holds  bool   `json:"holds,omitempty"`
	Detail string `json:"detail,omitempty"`
	Addr   string `json:"addr,omitempty"` // the server listens there
}

// teller says it.
type teller struct{ enc *json.Encoder }

func newTeller(w io.Writer) *teller { return &teller{json.NewEncoder(w)} }

func (t *teller) tell(l line) error {
	if err := t.enc.Encode(l); err != nil {
		return fmt.Errorf("tell the demo: %w", err)
	}
	return nil
}

func (t *teller) check(what string, holds bool, format string, args ...any) error {
	return t.tell(line{Check: what, Holds: holds, Detail: fmt.Sprintf(format, args...)})
}

// running is a child, on this machine or in a guest.
type running interface {
	Wait() error
	Kill() error // it may have ended
}

// place is where programs run: it starts one that is to play a role.
type place func(ctx context.Context, role string, args []string) (p running, stdout, stderr io.Reader, err error)

// program is a child that has no rights.
type program struct {
	name   string
	p      running
	stderr io.Reader
	lines  *bufio.Scanner
	ended  bool
	t      *transcript.Transcript
}

func startProgram(ctx context.Context, t *transcript.Transcript, at place, role string, args ...string) (*program, error) {
	p, stdout, stderr, err := at(ctx, role, args)
	if err != nil {
		return nil, fmt.Errorf("start the %s: %w", role, err)
	}
	return &program{name: role, p: p, stderr: stderr, lines: bufio.NewScanner(stdout), t: t}, nil
}

// child is a program on this machine.
type child struct{ *exec.Cmd }

func (c child) Kill() error { return c.Process.Kill() }

// here is this machine.
func here(ctx context.Context, role string, args []string) (running, io.Reader, io.Reader, error) {
	return startChild(ctx, role, args, (*exec.Cmd).Start)
}

func startChild(ctx context.Context, role string, args []string, start func(*exec.Cmd) error) (running, io.Reader, io.Reader, error) {
	cmd := exec.CommandContext(ctx, "/proc/self/exe", args...)
	cmd.Env = append(os.Environ(), roleVariable+"="+role)
	cmd.Dir = "/"
	cmd.WaitDelay = endGrace
	said := &bytes.Buffer{}
	cmd.Stderr = said
	stdout, err := cmd.StdoutPipe()
	if err == nil {
		err = start(cmd)
	}
	return child{cmd}, stdout, said, err
}

// follow prints what the program says, until it says where it listens, or ends.
func (p *program) follow() (addr string, err error) {
	for p.lines.Scan() {
		var l line
		if err := json.Unmarshal(p.lines.Bytes(), &l); err != nil {
			return "", fmt.Errorf("%s says %q: %w", p.name, p.lines.Text(), err)
		}
		switch {
		case l.Addr != "":
			return l.Addr, nil
		case l.Title != "":
			p.t.Title("%s", l.Title)
		case l.Check != "":
			p.t.Check(p.name+": "+l.Check, l.Holds, "%s", l.Detail)
		default:
			p.t.Say("  %s", l.Say)
		}
	}
	p.ended = true
	if err := errors.Join(p.lines.Err(), p.p.Wait()); err != nil {
		said, _ := io.ReadAll(p.stderr) // what there is
		return "", fmt.Errorf("%s: %w: %s", p.name, err, bytes.TrimSpace(said))
	}
	return "", nil
}

// end ends a program that has not ended.
func (p *program) end() {
	if !p.ended {
		_ = p.p.Kill()
		_ = p.p.Wait()
	}
}
