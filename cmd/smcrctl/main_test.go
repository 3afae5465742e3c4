// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/linux"
	"github.com/smcr-io/kube-smcr/pkg/smcr/synopt"
)

var ap = netip.MustParseAddrPort

// fakeAgent answers on a socket of the test.
func fakeAgent(t *testing.T) string {
	t.Helper()
	now := time.Now()
	conn := agentapi.Conn{
		ID: 3, Pod: "shop/web", Direction: "outbound", Source: ap("192.0.2.5:40000"), Dest: ap("192.0.2.7:6379"),
		Mode: "SMC-R", Opened: now, LinkGroup: 1, Link: 1, State: "ACTIVE", BytesSent: 5 << 20, BytesRecv: 12,
	}
	answers := map[string]any{
		agentapi.PathStatus: agentapi.Status{
			APIVersion: agentapi.Version, Node: "node-a", Version: "v1", Started: now, Accelerating: true,
			Devices: []agentapi.Device{
				{Name: "soft0", Provider: "soft", Address: "192.0.2.1", Interface: "eth1", MTU: 4096, Port: "ACTIVE"},
				{Name: "soft1", Provider: "soft", Address: "198.51.100.1", MTU: 1024, Port: "DOWN"},
			},
			Policies: []string{"cache"}, Pods: agentapi.PodCount{Attached: 2, Ready: 1, Failed: 1},
			Problems: []string{"1 pods could not be set up: see attachments"},
			Reasons:  map[agentapi.Code]uint64{"PEERNOSMC": 4},
		},
		agentapi.PathLinks: agentapi.Links{LinkGroups: []agentapi.LinkGroup{{
			ID: 1, Pod: "shop/web", Role: "client", State: "ACTIVE", Redundancy: "SINGLE", PeerID: "0102", Dialect: "linux", Version: 1, Conns: 1, RMBBytes: 2 << 20, Opened: now,
			Links: []agentapi.Link{
				{ID: 1, State: "ACTIVE", Device: "soft0", LocalGID: "::ffff:192.0.2.1", LocalQPN: 17, PeerGID: "::ffff:192.0.2.2", PeerQPN: 18, MTU: 4096, BytesSent: 1 << 31},
				{ID: 2, State: "ADD_LINK", Device: "soft1", LocalGID: "::ffff:198.51.100.1", LocalQPN: 19, PeerGID: "::ffff:198.51.100.2", PeerQPN: 20, MTU: 1024},
			},
		}, {ID: 2, Pod: "shop/web", Role: "server", State: "ACTIVE", Dialect: "linux", Version: 2, EID: "SHOP.EXAMPLE", Opened: now}}},
		agentapi.PathConns: agentapi.Conns{Conns: []agentapi.Conn{conn}},
		agentapi.PathAttachments: agentapi.Attachments{
			Attachments: []agentapi.Attachment{{Pod: "shop/web", Interface: "eth0", State: agentapi.StateFailed, Detail: "network namespace is gone"}},
			Bypasses:    []agentapi.Bypass{{Pod: "shop/web", Dest: ap("192.0.2.9:80"), Reason: "PEERNOSMC", Until: now.Add(time.Hour)}},
			Malformed:   []string{`attachment file "x": junk`},
		},
	}
	mux := http.NewServeMux()
	write := func(w http.ResponseWriter, v any) {
		if err := json.NewEncoder(w).Encode(v); err != nil {
			t.Error(err)
		}
	}
	for path, v := range answers {
		mux.HandleFunc(path, func(w http.ResponseWriter, _ *http.Request) { write(w, v) })
	}
	mux.HandleFunc(agentapi.PathExplain, func(w http.ResponseWriter, req *http.Request) {
		switch req.URL.Query().Get("dst") {
		case "192.0.2.7:6379":
			write(w, agentapi.Explanation{Verdict: "on SMC-R: 1 connections now", Live: []agentapi.Conn{conn}})
		case "192.0.2.9:80":
			write(w, agentapi.Explanation{
				Verdict: "plain TCP", Code: "PEERNOSMC", Advice: "run the agent there", Policy: "cache", Required: true,
				Bypassed: &agentapi.Bypass{Until: now}, Recent: []agentapi.Decision{{Mode: "TCP", Reason: "PEERNOSMC", PeerDeclined: true, Count: 7, Last: now}},
			})
		default:
			w.WriteHeader(http.StatusBadRequest)
			write(w, agentapi.Problem{Error: "want ADDRESS:PORT"})
		}
	})
	socket := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	s := &http.Server{Handler: mux, ReadHeaderTimeout: time.Second}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = s.Serve(l)
	}()
	t.Cleanup(func() {
		_ = s.Close()
		<-done
	})
	return socket
}

func TestCommands(t *testing.T) {
	socket := fakeAgent(t)
	tests := []struct {
		name string
		args []string
		code int
		want []string // in stdout, or stderr when the code is not 0 or 4
	}{
		{"status", []string{"status"}, 0, []string{"node-a", "carrying connections over SMC-R", "soft0: soft, 192.0.2.1 on eth1, MTU 4096, port ACTIVE", "soft1: soft, 198.51.100.1, MTU 1024, port DOWN", "problem", "PEERNOSMC", "does not speak SMC"}},
		{"status json", []string{"status", "-o", "json"}, 0, []string{`"apiVersion": "smcr.io/agent/v1"`, `"PEERNOSMC": 4`, `"interface": "eth1"`, `"port": "DOWN"`}},
		{"links", []string{"links"}, 0, []string{"192.0.2.1 qp 17", "192.0.2.2 qp 18", "v1 linux", "v2 SHOP.EXAMPLE", "2.0 GiB", "4096", "SINGLE", "soft0", "soft1", "ADD_LINK", "198.51.100.1 qp 19"}},
		{"conns", []string{"conns"}, 0, []string{"192.0.2.5:40000", "192.0.2.7:6379", "SMC-R", "1/1", "5.0 MiB", "12 B"}},
		{"attachments", []string{"attachments"}, 0, []string{"network namespace is gone", "192.0.2.9:80", "ignored: attachment file"}},
		{"explain yes", []string{"explain", "shop/web", "192.0.2.7:6379"}, 0, []string{"on SMC-R", "192.0.2.5:40000"}},
		{"explain no", []string{"explain", "shop/web", "192.0.2.9:80"}, exitNot, []string{"plain TCP", "what to do", "run the agent there", "the peer: ", "Required: "}},
		{"explain junk", []string{"explain", "shop/web", "x"}, exitError, []string{"refused: want ADDRESS:PORT"}},
		{"explain with one argument", []string{"explain", "x"}, exitUsage, []string{"accepts 2 arg(s)", "see smcrctl explain --help"}},
		{"unknown command", []string{"stat"}, exitUsage, []string{"unknown command"}},
		{"unknown flag", []string{"status", "--sock", "x"}, exitUsage, []string{"unknown flag"}},
		{"unknown output", []string{"status", "-o", "yaml"}, exitUsage, []string{"want table or json"}},
		{"no agent", []string{"status", "--socket", "/nowhere/s"}, exitNotRunning, []string{"the node agent is not running: nothing answers on /nowhere/s", "start node-agent"}},
		{"help", []string{"--help"}, 0, []string{"Exit codes:", "smcrctl explain shop/web-1", "preflight"}},
		{"version", []string{"--version"}, 0, []string{"smcrctl version"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var stdout, stderr bytes.Buffer
			args := tt.args
			if !strings.Contains(strings.Join(args, " "), "--socket") {
				args = append([]string{"--socket", socket}, args...)
			}
			if code := run(t.Context(), args, &stdout, &stderr); code != tt.code {
				t.Errorf("exit code %d, want %d\n%s%s", code, tt.code, stdout.String(), stderr.String())
			}
			out := stdout.String()
			if tt.code != 0 && tt.code != exitNot {
				out = stderr.String()
			}
			for _, w := range tt.want {
				if !strings.Contains(out, w) {
					t.Errorf("no %q in\n%s", w, out)
				}
			}
		})
	}
}

func TestExamine(t *testing.T) {
	good := func(t *testing.T) machine {
		dir := t.TempDir()
		for name, text := range map[string]string{
			"sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n",
			"proc/self/cgroup":                          "1:cpu:/x\n0::/kube\n",
		} {
			if err := os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o700); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		ok := func() error { return nil }
		return machine{
			sysfs: filepath.Join(dir, "sys"), proc: filepath.Join(dir, "proc"),
			release: func() (string, error) { return "6.1.0-13-amd64", nil },
			option:  ok, netns: ok, nftables: ok, tproxy: ok, transparent: ok, sysctl: ok,
			roceSocket: func(context.Context) error { return nil },
		}
	}
	tests := []struct {
		name   string
		spoil  func(*machine)
		check  string
		want   result
		detail string
		advice string
	}{
		{"all good", func(*machine) {}, "RDMA devices", resultOK, "mlx5_0 (4: ACTIVE)", ""},
		{"old kernel", func(m *machine) { m.release = func() (string, error) { return "5.4.0", nil } }, "kernel", resultWarn, "Linux 5.4.0", "use Linux 5.10"},
		{"odd kernel", func(m *machine) { m.release = func() (string, error) { return "plan9", nil } }, "kernel", resultWarn, "plan9", "not understood"},
		{"not root", func(m *machine) { m.uid = 1000 }, "privileges", resultFail, "user id 1000", "run as root"},
		{"no cgroup v2", func(m *machine) { m.proc = "/nowhere" }, "cgroup v2", resultWarn, "no such file", ""},
		{"no BPF", func(m *machine) {
			m.option = func() error { return &synopt.UnsupportedError{What: "load", Need: "root", Err: syscall.EPERM} }
		}, "TCP option (eBPF sock_ops)", resultWarn, "load: operation not permitted", "needs root; everything stays plain TCP"},
		{"no nftables", func(m *machine) {
			m.nftables = func() error { return &linux.FeatureError{Feature: "nft", Remedy: "load it", Err: syscall.ENOENT} }
		}, "nftables", resultFail, "nft: no such file", "load it"},
		{"another error", func(m *machine) { m.tproxy = func() error { return errors.New("odd") } }, "nftables tproxy", resultFail, "odd", ""},
		{"no RDMA", func(m *machine) { m.sysfs = "/nowhere" }, "RDMA devices", resultWarn, "none", "soft in node.devices"},
		{"port in use", func(m *machine) { m.roceSocket = func(context.Context) error { return syscall.EADDRINUSE } }, "software RoCE", resultWarn, "in use", "rxe"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			m := good(t)
			tt.spoil(&m)
			r := examine(t.Context(), m)
			if r.Worst != tt.want {
				t.Errorf("worst %s, want %s: %+v", r.Worst, tt.want, r)
			}
			for _, c := range r.Checks {
				if c.Name != tt.check {
					if c.Result != resultOK {
						t.Errorf("%s is %s too", c.Name, c.Result)
					}
				} else if c.Result != tt.want || !strings.Contains(c.Detail, tt.detail) || !strings.Contains(c.Advice, tt.advice) {
					t.Errorf("%+v", c)
				}
			}
			var b bytes.Buffer
			if err := printReport(&b, r); err != nil || !strings.Contains(b.String(), tt.advice) {
				t.Errorf("report %q, %v", b.String(), err)
			}
		})
	}
}
