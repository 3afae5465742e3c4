// SPDX-License-Identifier: Apache-2.0

// Command upgrade shows RDMA without rights: two programs of an ordinary user talk text over a TCP
// connection, agree to make it one of RDMA, and go on over the same connection with SEND, RDMA WRITE
// and RDMA READ (package softiwarp).
//
//	demo      starts both, prints what they say, and looks at the wire
//	server    answers a line of text, becomes a Socket Service Point, takes and gives bytes
//	client    asks by a line of text, sends the MPA Request, moves the bytes, compares sums
//
// Every statement it makes is a check; one that does not hold ends the demo with exit code 1.
//
// # Limitations
//
// Both programs and all copies share the processors of one machine, so that the speeds say little.
// Started by root the programs run as nobody, and tcpdump looks at the loopback interface, which takes
// the rights that they do not have; started by another user they run as that, and nobody looks.
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
	"syscall"
	"time"

	"github.com/smcr-io/kube-smcr/demo/transcript"
)

// roleVariable says which of the programs this process is.
const roleVariable = "KUBE_SMCR_DEMO_IWARP"

const (
	nobody   = 65534 // user and group
	patience = 10 * time.Minute
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
	var err error
	switch role := os.Getenv(roleVariable); role {
	case "":
		return 0, false
	case "server":
		err = serve(newTeller(os.Stdout))
	case "client":
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
}

func parseFlags(args []string, stderr io.Writer) (options, int) {
	var o options
	fs := flag.NewFlagSet("iwarp", flag.ContinueOnError)
	fs.SetOutput(stderr)
	fs.IntVar(&o.mebibytes, "mib", 1024, "`MiB` to be sent, written and read: 1 to 65536")
	fs.StringVar(&o.pcap, "pcap", filepath.Join("out", "demo", "iwarp.pcap"), "`FILE` for the capture")
	err := fs.Parse(args)
	switch {
	case errors.Is(err, flag.ErrHelp):
		return o, 0
	case err != nil:
		return o, transcript.ExitUsage
	case fs.NArg() > 0 || o.mebibytes < 1 || o.mebibytes > 65536:
		fmt.Fprintln(stderr, "iwarp: want no arguments, and 1 to 65536 for -mib; -help shows more")
		return o, transcript.ExitUsage
	}
	return o, -1
}

func run(args []string, stdout, stderr io.Writer) int {
	o, code := parseFlags(args, stderr)
	if code >= 0 {
		return code
	}
	ctx, stop, err := transcript.Interruptible()
	if err != nil {
		fmt.Fprintf(stderr, "iwarp: %v\n", err)
		return transcript.ExitFailed
	}
	defer stop()
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	t := transcript.New(stdout)
	if err := show(ctx, t, o); err != nil {
		t.Check("the demo is complete", false, "%v", err)
	}
	return t.Summary(errors.Is(ctx.Err(), context.Canceled))
}

// show runs both programs and prints what they say.
func show(ctx context.Context, t *transcript.Transcript, o options) error {
	t.Title("Two programs without rights")
	server, err := startProgram(ctx, t, "server")
	if err != nil {
		return err
	}
	defer server.end()
	addr, err := server.follow()
	if err != nil {
		return err
	}
	w, err := watch(ctx, addr, o.pcap)
	if err != nil {
		return err
	}
	defer w.end()
	client, err := startProgram(ctx, t, "client", addr, fmt.Sprint(o.mebibytes))
	if err != nil {
		return err
	}
	defer client.end()
	if _, err := client.follow(); err != nil {
		return err
	}
	if _, err := server.follow(); err != nil {
		return err
	}
	t.Title("On the wire")
	return w.show(ctx, t)
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

// program is a child that has no rights.
type program struct {
	name  string
	cmd   *exec.Cmd
	said  bytes.Buffer // to standard error
	lines *bufio.Scanner
	t     *transcript.Transcript
}

func startProgram(ctx context.Context, t *transcript.Transcript, role string, args ...string) (*program, error) {
	cmd := exec.CommandContext(ctx, "/proc/self/exe", args...)
	cmd.Env = append(os.Environ(), roleVariable+"="+role)
	cmd.Dir = "/"
	p := &program{name: role, cmd: cmd, t: t}
	cmd.Stderr = &p.said
	cmd.WaitDelay = endGrace
	if os.Getuid() == 0 {
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, fmt.Errorf("start the %s: %w", role, err)
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start the %s: %w", role, err)
	}
	p.lines = bufio.NewScanner(out)
	return p, nil
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
	if err := errors.Join(p.lines.Err(), p.cmd.Wait()); err != nil {
		return "", fmt.Errorf("%s: %w: %s", p.name, err, bytes.TrimSpace(p.said.Bytes()))
	}
	return "", nil
}

// end ends a program that has not ended.
func (p *program) end() {
	if p.cmd.ProcessState == nil {
		_ = p.cmd.Process.Kill()
		_ = p.cmd.Wait()
	}
}
