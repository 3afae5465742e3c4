// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/smcr-io/kube-smcr/demo/transcript"
)

const (
	captured = 60 // packets: start-up and the first messages
	shown    = 16 // lines of tshark
	// captureBytes of a packet: loopback's have 64 KiB, and the CRC stands at the end of an FPDU.
	captureBytes = 262144
)

// watcher has tcpdump look at the connection. One without a process does not.
type watcher struct {
	cmd  *exec.Cmd
	file string
	why  string // nobody looks
}

// watch begins to capture what goes to and from a port of an interface.
func watch(ctx context.Context, addr, file, device string, start func(*exec.Cmd) error) (*watcher, error) {
	if os.Getuid() != 0 {
		return &watcher{why: "to look at the wire takes rights, which we do not have: root's demo shows it"}, nil
	}
	for _, tool := range []string{"tcpdump", "tshark"} {
		if _, err := exec.LookPath(tool); err != nil {
			return &watcher{why: tool + " is not there: make deps installs it"}, nil //nolint:nilerr // the rest is shown
		}
	}
	_, port, err := net.SplitHostPort(addr)
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		return nil, fmt.Errorf("make the capture's directory: %w", err)
	}
	cmd := exec.CommandContext(ctx, "tcpdump", "-i", device, "-n", "-U", "-Z", "root", "-s", fmt.Sprint(captureBytes),
		"-c", fmt.Sprint(captured), "-w", file, "tcp port "+port)
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGINT) }
	cmd.WaitDelay = endGrace
	said, err := cmd.StderrPipe()
	if err != nil {
		return nil, err
	}
	if err := start(cmd); err != nil {
		return nil, fmt.Errorf("start tcpdump: %w", err)
	}
	w := &watcher{cmd: cmd, file: file}
	lines := bufio.NewScanner(said)
	for lines.Scan() {
		if strings.Contains(lines.Text(), "listening on") {
			go func() { _, _ = io.Copy(io.Discard, said) }() // ends with tcpdump
			return w, nil
		}
	}
	w.end()
	return nil, errors.New("tcpdump ended before it listened")
}

// end ends tcpdump, if it has not seen enough.
func (w *watcher) end() {
	if w.cmd != nil && w.cmd.ProcessState == nil {
		_ = w.cmd.Process.Signal(syscall.SIGINT)
		_ = w.cmd.Wait()
	}
}

// show prints tshark's lines for the first frames that have bytes.
func (w *watcher) show(ctx context.Context, t *transcript.Transcript) error {
	if w.cmd == nil {
		t.Say("  %s", w.why)
		return nil
	}
	time.Sleep(200 * time.Millisecond) // tcpdump reads what the kernel has kept for it
	w.end()
	cmd := exec.CommandContext(ctx, "tshark", "-n", "-r", w.file, "--disable-protocol", "rpcordma", "-Y", "tcp.len > 0",
		"-T", "fields", "-e", "tcp.srcport", "-e", "tcp.dstport", "-e", "tcp.len", "-e", "_ws.col.Protocol", "-e", "_ws.col.Info")
	out, err := cmd.Output()
	if err != nil {
		return fmt.Errorf("tshark: %w", err)
	}
	for i, l := range strings.Split(strings.TrimSpace(string(out)), "\n") {
		if i < shown {
			t.Say("  %s", strings.ReplaceAll(l, "\t", "  "))
		}
	}
	for _, want := range []string{"MPA Request", "MPA Reply", "Write", "Read Request", "Read Response", "Send"} {
		t.Check("tshark sees an iWARP "+want, strings.Contains(string(out), want), "in %s", w.file)
	}
	return nil
}
