// SPDX-License-Identifier: Apache-2.0

package smcrtest_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"

	"github.com/smcr-io/kube-smcr/pkg/smcr/smcrtest"
)

// Scenarios are files in testdata:
//
//	world [linux=0|1] [two-devices] [rfc] [rmbe=BYTES] [send=BYTES] [trace]
//	connect NAME [from=0|1]      and until it stands, or failed
//	write NAME side=0|1 n=BYTES
//	read NAME side=0|1 [n=BYTES]
//	shutdown|close|abort NAME side=0|1
//	kill-link [side=0|1] [of=0|1]   at both sides without side=
//	run DURATION
//	state
//	finish
//
// With trace, the messages under way are part of the output, but for TEST LINK.
func TestWorld_scenarios(t *testing.T) {
	files := 0
	datadriven.Walk(t, "testdata/scenarios", func(t *testing.T, path string) {
		files++
		s := &scenario{}
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			out := s.run(t, d)
			if err := s.w.Check(); err != nil && d.Cmd != "finish" {
				out += "\n" + err.Error()
			}
			lines := append(s.lines, strings.TrimSpace(out))
			s.lines = nil
			return strings.Join(lines, "\n")
		})
	})
	if files == 0 {
		t.Fatal("no scenarios")
	}
}

type scenario struct {
	w     *smcrtest.World
	lines []string
}

func (s *scenario) run(t *testing.T, d *datadriven.TestData) string {
	if d.Cmd == "world" {
		s.world(t, d)
		return ""
	}
	name, side, n := "", 0, 1<<30
	if len(d.CmdArgs) > 0 && len(d.CmdArgs[0].Vals) == 0 {
		name = d.CmdArgs[0].Key
	}
	d.MaybeScanArgs(t, "side", &side)
	d.MaybeScanArgs(t, "n", &n)
	switch d.Cmd {
	case "connect":
		from := 0
		d.MaybeScanArgs(t, "from", &from)
		s.w.Connect(from, name)
		s.w.Run(10 * time.Millisecond)
		return s.w.Describe(name)
	case "write":
		return fmt.Sprintf("%d bytes", s.w.Write(name, side, n))
	case "read":
		return fmt.Sprintf("%d bytes", s.w.Read(name, side, n))
	case "shutdown":
		s.w.Shutdown(name, side)
	case "close":
		s.w.Close(name, side)
	case "abort":
		s.w.Abort(name, side)
	case "kill-link":
		of := 0
		if !d.HasArg("side") {
			side = -1
		}
		d.MaybeScanArgs(t, "of", &of)
		s.w.KillLink(of, side)
	case "run":
		dur, err := time.ParseDuration(name)
		if err != nil {
			t.Fatal(err)
		}
		s.w.Run(dur)
	case "state":
		var b strings.Builder
		for _, n := range s.w.Names() {
			fmt.Fprintln(&b, s.w.Describe(n))
		}
		for _, g := range s.w.Groups() {
			fmt.Fprintln(&b, g)
		}
		return b.String()
	case "finish":
		if err := s.w.Finish(); err != nil {
			return err.Error()
		}
		return "ok"
	default:
		t.Fatalf("unknown command %q", d.Cmd)
	}
	return ""
}

func (s *scenario) world(t *testing.T, d *datadriven.TestData) {
	cfg := smcrtest.Config{Seed: 1, RFC: d.HasArg("rfc"), LinuxTwoDevices: d.HasArg("two-devices")}
	if linux := -1; d.MaybeScanArgs(t, "linux", &linux) {
		cfg.Linux[linux] = true
	}
	if size := uint32(0); d.MaybeScanArgs(t, "rmbe", &size) {
		cfg.RMBESizes = []uint32{size}
	}
	if size := uint32(0); d.MaybeScanArgs(t, "send", &size) {
		cfg.SendBuffers = []uint32{size}
	}
	s.w = smcrtest.New(cfg)
	if d.HasArg("trace") {
		s.w.Trace(func(format string, args ...any) {
			if line := fmt.Sprintf(format, args...); !strings.Contains(line, "TEST LINK") {
				s.lines = append(s.lines, line)
			}
		})
	}
}
