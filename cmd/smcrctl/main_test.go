// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"net"
	"net/http"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/preflight"
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
				{ID: 1, State: "ACTIVE", Device: "soft0", PCI: "0000:01:10.2", LocalGID: "::ffff:192.0.2.1", LocalQPN: 17, PeerGID: "::ffff:192.0.2.2", PeerQPN: 18, MTU: 4096, BytesSent: 1 << 31},
				{ID: 2, State: "ADD_LINK", Device: "soft1", LocalGID: "::ffff:198.51.100.1", LocalQPN: 19, PeerGID: "::ffff:198.51.100.2", PeerQPN: 20, MTU: 1024},
			},
		}, {ID: 2, Pod: "shop/web", Role: "server", State: "ACTIVE", Dialect: "linux", Version: 2, EID: "SHOP.EXAMPLE", Opened: now}}},
		agentapi.PathConns: agentapi.Conns{Conns: []agentapi.Conn{conn, {Pod: "shop/db"}}}, // of all pods, as an old agent, whatever is asked
		agentapi.PathDevices: agentapi.Devices{Problem: "look for VFs: permission denied", Devices: []agentapi.PodDevice{
			{ID: "0000:01:10.2", PF: "eth1", VF: 1, Interface: "net1", RDMA: []string{"mlx5_2"}, NUMANode: 1, Rail: 0, State: agentapi.DevicePod, Pods: []string{"shop/web"}, Used: &agentapi.Device{Address: "192.0.2.8"}},
			{ID: "eth4", VF: -1, NUMANode: -1, Rail: -1, State: agentapi.DeviceUp},
		}},
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
			write(w, agentapi.Explanation{Verdict: "on SMC-R: 1 connection now", Live: []agentapi.Conn{conn}})
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
	return serve(t, mux)
}

// serve answers with h on a Unix socket.
func serve(t *testing.T, h http.Handler) (socket string) {
	t.Helper()
	socket = filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	s := &http.Server{Handler: h, ReadHeaderTimeout: time.Second}
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
		{"links", []string{"links"}, 0, []string{"192.0.2.1 qp 17", "192.0.2.2 qp 18", "v1 linux", "v2 SHOP.EXAMPLE", "2.0 GiB", "4096", "SINGLE", "soft0 0000:01:10.2", "soft1", "ADD_LINK", "198.51.100.1 qp 19"}},
		{"conns", []string{"conns"}, 0, []string{"192.0.2.5:40000", "192.0.2.7:6379", "SMC-R", "1/1", "5.0 MiB", "12 B"}},
		{"conns of a pod", []string{"conns", "--pod", "shop/db", "-o", "json"}, 0, []string{"\"conns\": [\n    {\n      \"id\": 0,\n      \"pod\": \"shop/db\""}},
		{"attachments", []string{"attachments"}, 0, []string{"network namespace is gone", "192.0.2.9:80", "ignored: attachment file"}},
		{"explain yes", []string{"explain", "shop/web", "192.0.2.7:6379"}, 0, []string{"on SMC-R", "192.0.2.5:40000"}},
		{"explain no", []string{"explain", "shop/web", "192.0.2.9:80"}, exitNot, []string{"plain TCP", "what to do", "run the agent there", "the peer: ", "Required: "}},
		{"explain junk", []string{"explain", "shop/web", "x"}, exitUsage, []string{"refused: want ADDRESS:PORT"}},
		{"explain with one argument", []string{"explain", "x"}, exitUsage, []string{"accepts 2 arg(s)", "see smcrctl explain --help"}},
		{"devices", []string{"devices"}, 0, []string{"USED BY THE AGENT", "soft0", "192.0.2.1", "FOR PODS", "0000:01:10.2", "shop/web", "mlx5_2", "192.0.2.8", "hardware verbs are not in this build of the agent", "problem: look for VFs: permission denied"}},
		{"devices json", []string{"devices", "-o", "json"}, 0, []string{`"devices": [`, `"built": false`, `"name": "soft1"`, `"forPods": [`, `"pods": [`, `"problem": "look for VFs: permission denied"`}},
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

// TestDevices_agentRefuses: what the kernel has is listed, and why not what the agent has. That no agent runs is no problem.
func TestDevices_agentRefuses(t *testing.T) {
	for socket, want := range map[string]bool{serve(t, http.NotFoundHandler()): true, filepath.Join(t.TempDir(), "none"): false} {
		var stdout, stderr bytes.Buffer
		if code := run(t.Context(), []string{"--socket", socket, "devices"}, &stdout, &stderr); code != 0 {
			t.Fatalf("exit code %d: %s", code, stderr.String())
		}
		if strings.Contains(stdout.String(), "problem: ") != want {
			t.Errorf("a problem is told: %v, want %v\n%s", !want, want, stdout.String())
		}
	}
}

func TestPrintDevices(t *testing.T) {
	inv := preflight.Inventory{
		Verbs: preflight.Verbs{Built: true},
		Devices: []preflight.RDMADevice{
			{Name: "mlx5_0", Driver: "mlx5_core", Firmware: "28.1", NUMANode: 1, Ports: []preflight.RDMAPort{{
				Number: 1, State: "ACTIVE", Interface: "eth2", RateGbps: 100, MTU: 4096, Why: "GID 3, RoCE v2, 192.0.2.1 of eth2: the first IPv4 address",
			}}},
			{Name: "rxe0", Driver: "rxe", NUMANode: -1},
		},
		Agent: []agentapi.Device{
			{Name: "mlx5_0", Provider: "verbs", Address: "192.0.2.1", Port: "ACTIVE", MTU: 4096, Choice: "GID 3"},
			{Name: "mlx5_1", Provider: "verbs", Port: "DOWN", Missing: "it is gone"},
		},
	}
	want := `DEVICE  PORT  STATE   DRIVER     FIRMWARE  NUMA  INTERFACE  MTU   GBIT/S  GID
mlx5_0  1     ACTIVE  mlx5_core  28.1      1     eth2       4096  100     GID 3, RoCE v2, 192.0.2.1 of eth2: the first IPv4 address
rxe0    -     -       rxe        -         -     -          -     -       it has no ports

USED BY THE AGENT  PROVIDER  PORT    ADDRESS    MTU   WHY
mlx5_0             verbs     ACTIVE  192.0.2.1  4096  GID 3
mlx5_1             verbs     DOWN    -          -     it is gone
`
	var b bytes.Buffer
	if err := printDevices(&b, inv); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, b.String()); diff != "" {
		t.Errorf("printed (-want +got):\n%s", diff)
	}
}

func TestPrintPreflight(t *testing.T) {
	r := preflight.Report{Checks: []preflight.Check{
		{Name: "kernel", Result: preflight.OK, Detail: "Linux 6.1"},
		{Name: "nftables", Result: preflight.Fail, Detail: "odd\nthing", Means: "no pod", Advice: "load it"},
	}}
	want := `CHECK     RESULT  DETAIL
kernel    OK      Linux 6.1
nftables  FAIL    odd; thing
                  -> no pod
                  -> load it
`
	var b bytes.Buffer
	if err := printPreflight(&b, r); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, b.String()); diff != "" {
		t.Errorf("printed (-want +got):\n%s", diff)
	}
}
