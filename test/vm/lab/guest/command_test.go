// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/smcr-io/kube-smcr/test/vm/lab/wire"
)

// pipe is one whose ends are closed with the test.
func pipe(t *testing.T) (r, w *os.File) {
	t.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = r.Close()
		_ = w.Close()
	})
	return r, w
}

// What a command has printed is sent, also if there was no time to do so before its
// end, and a process that it left keeps its output open.
func TestOutput_finish(t *testing.T) {
	host, port1 := pipe(t)
	ours, theirs := pipe(t)
	o := &output{c: &command{port: &port{file: port1}, stream: 7}, kind: wire.Stdout, pipe: ours, copied: make(chan struct{})}
	long := bytes.Repeat([]byte("0123456789"), 4000) // fits into the pipe, and not into one message
	if _, err := theirs.Write(long); err != nil {
		t.Fatal(err)
	}
	past := time.Unix(1, 0)
	if err := ours.SetReadDeadline(past); err != nil {
		t.Fatal(err)
	}
	o.copy() // it takes nothing
	if err := o.finish(past); err != nil {
		t.Fatal(err)
	}
	if err := port1.Close(); err != nil {
		t.Fatal(err)
	}
	var got []byte
	for {
		m, err := wire.Read(host)
		if err != nil {
			break
		}
		if m.Kind != wire.Stdout || m.Stream != 7 {
			t.Fatalf("message of kind %d for stream %d", m.Kind, m.Stream)
		}
		got = append(got, m.Payload...)
	}
	if !bytes.Equal(got, long) {
		t.Errorf("%d bytes were sent, want %d", len(got), len(long))
	}
}

// A command's outputs come whole and before its end.
func TestCommand_outputs(t *testing.T) {
	host, port1 := pipe(t)
	none := filepath.Join(t.TempDir(), "none")
	p := &port{file: port1, programs: &programs{from: none, to: none}, commands: map[uint32]*command{}}
	for stream, script := range []string{"head -c 100000 /dev/zero; echo told >&2; exit 3", "kill -TERM $$"} {
		payload, err := json.Marshal(wire.Command{Args: []string{"sh", "-c", script}, Dir: t.TempDir()})
		if err != nil {
			t.Fatal(err)
		}
		p.start(uint32(stream), payload)
		var stdout, stderr []byte
		var end wire.Answer
		for ended := false; !ended; {
			m, err := wire.Read(host)
			if err != nil {
				t.Fatal(err)
			}
			switch m.Kind {
			case wire.Stdout:
				stdout = append(stdout, m.Payload...)
			case wire.Stderr:
				stderr = append(stderr, m.Payload...)
			case wire.Exit:
				ended = true
				if err := json.Unmarshal(m.Payload, &end); err != nil {
					t.Fatal(err)
				}
			default: // that it has started
			}
		}
		want, bytesWant, textWant := wire.Answer{Code: -1, Signal: 15}, 0, ""
		if stream == 0 {
			want, bytesWant, textWant = wire.Answer{Code: 3}, 100000, "told\n"
		}
		if diff := cmp.Diff(want, end); diff != "" || len(stdout) != bytesWant || string(stderr) != textWant {
			t.Errorf("%s: %d bytes, %q; end (-want +got):\n%s", script, len(stdout), stderr, diff)
		}
	}
}
