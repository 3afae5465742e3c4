// SPDX-License-Identifier: Apache-2.0

// Command sdp shows the Sockets Direct Protocol: two programs of an ordinary user talk text over a TCP connection, and
// one gets a file of the other: over that connection as it is, and after it has become one of SDP in place, once in
// messages and once by Buffers, which this library does not copy.
//
//	demo      makes a file, starts both, compares what they say
//	server    answers "GET HOW" by the length, and sends the file
//	client    asks for it three times, and sums what arrives
//
// Every statement it makes is a check; one that does not hold ends the demo with exit code 1.
//
// # Limitations
//
// Both programs share the processors of one machine, and the device is one in software: it makes copies of its own, and
// the speeds compare no hardware. The packets are those of the loopback interface meanwhile, also of others.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"hash/crc32"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/smcr-io/kube-smcr/demo/transcript"
)

// roleVariable says which of the programs this process is.
const roleVariable = "KUBE_SMCR_DEMO_SDP"

const (
	nobody     = 65534 // user and group
	patience   = 5 * time.Minute
	defaultMiB = 1024
	maxMiB     = 1 << 14
)

// ways are how the file is moved, in the order of the demo.
var ways = [...]string{"tcp", "bcopy", "zcopy"}

func main() {
	if code, is := runRole(os.Args[1:]); is {
		os.Exit(code)
	}
	os.Exit(run(os.Args[1:], os.Stdout, os.Stderr))
}

// runRole is the server or the client, if this process is one.
func runRole(args []string) (code int, is bool) {
	var err error
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	switch role := os.Getenv(roleVariable); role {
	case "":
		return 0, false
	case "server":
		err = serve(ctx, json.NewEncoder(os.Stdout), args[0])
	case "client":
		err = get(ctx, json.NewEncoder(os.Stdout), args[0])
	default:
		err = fmt.Errorf("%s is %q, want server or client", roleVariable, role)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return transcript.ExitFailed, true
	}
	return 0, true
}

func run(args []string, stdout, stderr io.Writer) int {
	fs := flag.NewFlagSet("sdp", flag.ContinueOnError)
	fs.SetOutput(stderr)
	mib := fs.Int("mib", defaultMiB, fmt.Sprintf("size of the file in `MiB`, 1 to %d", maxMiB))
	switch err := fs.Parse(args); {
	case errors.Is(err, flag.ErrHelp):
		return 0
	case err != nil:
		return transcript.ExitUsage
	case fs.NArg() > 0 || *mib < 1 || *mib > maxMiB:
		fmt.Fprintf(stderr, "sdp: want no arguments, and 1 to %d for -mib; -help shows more\n", maxMiB)
		return transcript.ExitUsage
	}
	return transcript.Play("sdp", stdout, stderr, patience, func(ctx context.Context, t *transcript.Transcript) error { return show(ctx, t, *mib) })
}

// said is what a program says: the server where it listens, and both of each way.
type said struct {
	Addr string `json:"addr,omitempty"`

	Way     string        `json:"way,omitempty"`
	Text    string        `json:"text,omitempty"` // what the server answered, before
	Bytes   uint64        `json:"bytes,omitempty"`
	Sum     uint32        `json:"sum,omitempty"`
	Took    time.Duration `json:"took,omitempty"`
	CPU     time.Duration `json:"cpu,omitempty"`
	Packets uint64        `json:"packets,omitempty"`

	Copied   uint64 `json:"copied,omitempty"` // by the library
	ByRDMA   uint64 `json:"byRDMA,omitempty"` // by an RDMA READ or WRITE of this program
	Messages uint64 `json:"messages,omitempty"`
}

// show runs both programs, and compares what they say.
func show(ctx context.Context, t *transcript.Transcript, mib int) error {
	t.Title("A file of %d MiB", mib)
	dir, err := os.MkdirTemp("", "sdp")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	file := filepath.Join(dir, "file")
	sum, err := makeFile(dir, file, mib)
	if err != nil {
		return err
	}
	t.Say("  CRC %08x", sum)

	t.Title("Two programs without rights")
	server, err := start(ctx, "server", file)
	if err != nil {
		return err
	}
	defer server.end()
	var at said
	if err := server.next(&at); err != nil {
		return err
	}
	client, err := start(ctx, "client", at.Addr)
	if err != nil {
		return err
	}
	defer client.end()
	total := uint64(mib) << 20
	t.Say("  way    MiB/s   CPU ms/MiB   packets/MiB   bytes copied by the library/MiB   by RDMA")
	for _, way := range ways {
		var c, s said
		if err := errors.Join(client.next(&c), server.next(&s)); err != nil {
			return err
		}
		t.Say("  %-6s %5.0f   %10.2f   %11.0f   %31.0f   %7.3f", way, float64(mib)/c.Took.Seconds(),
			float64((c.CPU+s.CPU).Microseconds())/1e3/float64(mib), float64(c.Packets)/float64(mib),
			float64(c.Copied+s.Copied)/float64(mib), float64(c.ByRDMA+s.ByRDMA)/float64(total))
		t.Check("all bytes have arrived by "+way, c.Bytes == total && c.Sum == sum, "%d bytes, CRC %08x, after the text %q", c.Bytes, c.Sum, c.Text)
		copied, byRDMA := c.Copied+s.Copied, c.ByRDMA+s.ByRDMA
		switch way {
		case "bcopy":
			t.Check("each byte was copied into a message and out of it", copied == 2*total && byRDMA == 0, "%d bytes copied, %d by RDMA", copied, byRDMA)
		case "zcopy":
			t.Check("the library copied next to nothing", copied < total/100 && byRDMA > total*99/100, "%d bytes copied, %d by RDMA", copied, byRDMA)
		}
	}
	return nil
}

// makeFile writes a file that others may read, and returns its CRC.
func makeFile(dir, name string, mib int) (uint32, error) {
	if err := os.Chmod(dir, 0o755); err != nil {
		return 0, err
	}
	f, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
	if err != nil {
		return 0, err
	}
	sum := crc32.New(crc32.MakeTable(crc32.Castagnoli))
	rng := rand.NewChaCha8([32]byte{1})
	_, err = io.CopyN(io.MultiWriter(f, sum), rng, int64(mib)<<20)
	return sum.Sum32(), errors.Join(err, f.Close())
}

// program is a child that has no rights.
type program struct {
	name string
	cmd  *exec.Cmd
	says *bufio.Scanner
	errs strings.Builder
}

func start(ctx context.Context, role, arg string) (*program, error) {
	p := &program{name: role, cmd: exec.CommandContext(ctx, "/proc/self/exe", arg)}
	p.cmd.Env = append(os.Environ(), roleVariable+"="+role)
	p.cmd.Dir, p.cmd.Stderr = "/", &p.errs
	if os.Getuid() == 0 {
		p.cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
	}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	p.says = bufio.NewScanner(out)
	if err := p.cmd.Start(); err != nil {
		return nil, fmt.Errorf("start the %s: %w", role, err)
	}
	return p, nil
}

// next reads what the program says next.
func (p *program) next(s *said) error {
	if p.says.Scan() {
		return json.Unmarshal(p.says.Bytes(), s)
	}
	p.end()
	return fmt.Errorf("the %s has ended: %s", p.name, strings.TrimSpace(p.errs.String()))
}

// end ends the program, if it has not ended.
func (p *program) end() {
	_ = p.cmd.Process.Kill() // it may have ended
	_ = p.cmd.Wait()
}

// packets returns how many packets the loopback interface has taken in.
func packets() uint64 {
	b, err := os.ReadFile("/sys/class/net/lo/statistics/rx_packets")
	if err != nil {
		return 0
	}
	n, _ := strconv.ParseUint(strings.TrimSpace(string(b)), 10, 64) // the kernel wrote it
	return n
}
