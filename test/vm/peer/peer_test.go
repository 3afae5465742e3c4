// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"github.com/smcr-io/kube-smcr/internal/testenv"
	"github.com/smcr-io/kube-smcr/test/vm/peer/report"
	"github.com/smcr-io/kube-smcr/test/vm/peer/script"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// pair runs a server and a client of this program in this process.
func pair(t *testing.T, serve, dial string) (server, client *report.Report) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	r, w := io.Pipe()
	ended := make(chan error, 1)
	go func() {
		err := serveCommand(ctx, strings.Fields(serve), w)
		_ = w.Close()
		ended <- err
	}()
	d := json.NewDecoder(r)
	server = &report.Report{}
	var first report.Line
	for first.Listening == "" {
		if err := d.Decode(&first); err != nil {
			t.Fatalf("server: %v: %v", err, <-ended)
		}
		server.Add(first)
	}
	read := make(chan error, 1)
	go func() {
		for {
			var l report.Line
			if err := d.Decode(&l); err != nil {
				read <- err
				return
			}
			server.Add(l)
		}
	}()
	var out bytes.Buffer
	if err := dialCommand(t.Context(), append(strings.Fields(dial), "-to", first.Listening), &out); err != nil {
		t.Errorf("client: %v", err)
	}
	cancel()
	if err := <-ended; err != nil {
		t.Errorf("server: %v", err)
	}
	if err := <-read; !errors.Is(err, io.EOF) {
		t.Errorf("server's output: %v", err)
	}
	client, err := report.Read(&out)
	if err != nil {
		t.Error(err)
	}
	for name, r := range map[string]*report.Report{"client": client, "server": server} {
		if err := r.Check(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	return server, client
}

// all is every script, with little to do.
const all = "echo,sizes:size=4K,bulk:bytes=300000,fetch:bytes=300000,duplex:bytes=300000,slow:bytes=100000:size=32K:pause=10ms," +
	"half:bytes=100000,unread,abort,urgent:count=3,hold:for=20ms,drip"

func ends(r *report.Report) map[string]string {
	m := make(map[string]string)
	for _, c := range r.Conns {
		s, _, _ := strings.Cut(c.Script, ":")
		m[s] = c.End
	}
	return m
}

func checkEnds(t *testing.T, server, client *report.Report) {
	t.Helper()
	if diff := cmp.Diff(map[string]string{
		"echo": "", "sizes": "", "bulk": "eof", "fetch": "eof", "duplex": "eof", "drip": "eof", "slow": "eof",
		"half": "eof", "unread": "", "abort": "", "urgent": "", "hold": "open",
	}, ends(client)); diff != "" {
		t.Errorf("ends at the client (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(map[string]string{
		"echo": "eof", "sizes": "eof", "bulk": "eof", "fetch": "eof", "duplex": "eof", "drip": "eof", "slow": "eof",
		"half": "eof", "unread": "reset", "abort": "reset", "urgent": "eof", "hold": "eof",
	}, ends(server)); diff != "" {
		t.Errorf("ends at the server (-want +got):\n%s", diff)
	}
}

func TestPeer_runsEveryScriptOverTCP(t *testing.T) {
	server, client := pair(t, "-stack tcp -listen 127.0.0.1:0", "-stack tcp -conns 3 -do "+all)
	checkEnds(t, server, client)
	if n := 3 * len(script.Names()); len(client.Conns) != n || len(server.Conns) != n {
		t.Errorf("%d connections at the client, %d at the server, want %d", len(client.Conns), len(server.Conns), n)
	}
}

func TestPeer_runsEveryScriptOverTheEngine(t *testing.T) {
	testenv.Need(t, testenv.BPF)
	server, client := pair(t, "-device soft:127.93.0.1 -listen 127.0.0.1:0", "-device soft:127.93.0.2 -require -conns 3 -do "+all)
	checkEnds(t, server, client)
	for name, r := range map[string]*report.Report{"client": client, "server": server} {
		for _, c := range r.Conns {
			if !c.Engine.SMCR() {
				t.Errorf("%s: %s is not SMC-R: %+v", name, c.Script, c.Engine)
			}
		}
		if r.End == nil || r.End.Stats == nil || r.End.Stats.ConnsSMCR != uint64(len(r.Conns)) || len(r.Groups) == 0 {
			t.Errorf("%s: the end is %+v, with %d changes of groups", name, r.End, len(r.Groups))
		}
	}
}

func TestPeer_saysWhyItIsTCP(t *testing.T) {
	testenv.Need(t, testenv.BPF)
	server, client := pair(t, "-device soft:127.93.0.3 -decline 0x03020000 -listen 127.0.0.1:0", "-device soft:127.93.0.4 -do half")
	for name, r := range map[string]*report.Report{"client": client, "server": server} {
		if len(r.Conns) != 1 {
			t.Fatalf("%s: %d connections", name, len(r.Conns))
		}
		got := *r.Conns[0].Engine
		got.SetupMS = 0
		want := report.Engine{Mode: "TCP", Reason: 0x03020000, ReasonName: "IPSEC", PeerDeclined: name == "client"}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

func TestPeer_refusesWrongFlags(t *testing.T) {
	for name, args := range map[string][]string{
		"no command": nil,
		"unknown":    {"listen"},
		"stack":      {"dial", "-stack", "ib"},
		"script":     {"dial", "-stack", "tcp", "-do", "sing"},
		"parameter":  {"dial", "-stack", "tcp", "-do", "echo:size=0"},
	} {
		t.Run(name, func(t *testing.T) {
			if code := run(args); code != exitUsage {
				t.Errorf("exit code %d, want %d", code, exitUsage)
			}
		})
	}
}

func TestUsesKernel(t *testing.T) {
	for args, want := range map[string]bool{
		"serve -stack kernel -listen 10.0.0.1:5000": true,
		"dial --stack=kernel -to 10.0.0.1:5000":     true,
		"dial -stack engine -kernel-buffer 1000":    false,
	} {
		if got := usesKernel(strings.Fields(args)); got != want {
			t.Errorf("%s: %t", args, got)
		}
	}
}
