// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"io"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
)

func addrPort(s string) netip.AddrPort { return netip.MustParseAddrPort(s) }

// shown is what a function prints; in a bubble of synctest ages are exact.
func shown(t *testing.T, print func(w io.Writer, now time.Time) error) string {
	t.Helper()
	var b strings.Builder
	synctest.Test(t, func(t *testing.T) {
		if err := print(&b, time.Now()); err != nil {
			t.Error(err)
		}
	})
	// Editors take blanks at the ends of lines away.
	lines := strings.Split(b.String(), "\n")
	for i := range lines {
		lines[i] = strings.TrimRight(lines[i], " ")
	}
	return strings.Join(lines, "\n")
}

func conn(now time.Time) agentapi.Conn {
	return agentapi.Conn{
		ID: 3, Pod: "shop/web", Direction: "outbound", Source: addrPort("192.0.2.5:40000"), Dest: addrPort("192.0.2.7:6379"),
		Mode: "SMC-R", LinkGroup: 1, Link: 2, State: "ACTIVE", BytesSent: 5 << 20, BytesRecv: 12, Opened: now.Add(-3 * time.Hour),
	}
}

func TestPrint(t *testing.T) {
	until := time.Date(2000, 1, 1, 0, 1, 0, 0, time.UTC).Local().Format("15:04:05 MST") // a minute after synctest's beginning
	for _, tt := range []struct {
		name  string
		print func(w io.Writer, now time.Time) error
		want  string
	}{
		{"table", func(w io.Writer, _ time.Time) error {
			return Table(w, Row("NAME", "AGE"), Row("web-0", "3d"), Row("", 7))
		}, `
NAME   AGE
web-0  3d
-      7
`},
		{"status", func(w io.Writer, now time.Time) error {
			return PrintStatus(w, agentapi.Status{
				Node: "node-a", Version: "v1", Started: now.Add(-90 * time.Second), Accelerating: true, Policies: []string{"cache", "db"},
				Devices:    []agentapi.Device{{Name: "soft0", Provider: "soft", Address: "192.0.2.1", Interface: "eth1", MTU: 4096, Port: "ACTIVE"}},
				Pods:       agentapi.PodCount{Attached: 2, Ready: 1, Failed: 1},
				Conns:      agentapi.ConnSums{Live: 3, LiveSMCR: 2, TotalSMCR: 9, TotalTCP: 4, Reset: 1, BytesSMCR: 3 << 30, BytesTCP: 2048, Kernel: &agentapi.KernelSums{Pods: 2, Live: 6, LiveSMCR: 5, TotalSMCR: 8, TotalTCP: 7}},
				LinkGroups: 1, NodeBudget: agentapi.Budget{MemoryBytes: 1 << 40, MemoryUsedBytes: 1536, Conns: 100, ConnsUsed: 2, RoomConns: 90, RoomPeers: 60, SocketBytes: 256 << 20, SocketUsedBytes: 5 << 18},
				Problems: []string{"one"}, Reasons: map[agentapi.Code]uint64{"PEERNOSMC": 4, agentapi.CodeNoPolicy: 1},
			})
		}, `
node         node-a
agent        v1, up 1m30s
state        carrying connections over SMC-R
device       soft0: soft, 192.0.2.1 on eth1, MTU 4096, port ACTIVE
policies     cache, db
pods         2 attached, 1 ready, 1 failed
link groups  1
connections  3 now, 2 of them on SMC-R
since start  9 on SMC-R (3.0 GiB), 4 on TCP (2.0 KiB), 1 reset
of kernels   2 pods, 6 connections now, 5 of them on SMC-R; 8 on SMC-R, 7 on TCP since start
budget       1.5 KiB of 1.0 TiB memory, 2 of 100 connections
room         for 90 connections on SMC-R, or for one with each of 60 peers
plain TCP    0 of 0 relays, 0 of 0 connections being set up
sockets      1.2 MiB of 256.0 MiB of buffers, if they were full
problem      one

NOT ON SMC-R  COUNT  MEANING
NO_POLICY     1      ` + agentapi.CodeNoPolicy.Text() + `
PEERNOSMC     4      ` + agentapi.Code("PEERNOSMC").Text() + `
`},
		{"link groups", func(w io.Writer, now time.Time) error {
			return PrintLinks(w, agentapi.Links{LinkGroups: []agentapi.LinkGroup{
				{
					ID: 1, Pod: "shop/web", Role: "client", PeerID: "7-02", State: "ACTIVE", Dialect: "linux", Version: 1, Redundancy: "SYMMETRIC",
					Conns: 2, RMBBytes: 1 << 20, Opened: now.Add(-5 * time.Second),
					Links: []agentapi.Link{
						{ID: 1, State: "ACTIVE", Device: "soft0", LocalGID: "::ffff:192.0.2.1", PeerGID: "::ffff:192.0.2.2", LocalQPN: 4, PeerQPN: 5, MTU: 4096, BytesSent: 1, BytesRecv: 2},
						{ID: 2, State: "ACTIVE", Device: "soft1", LocalGID: "fd00::1", PeerGID: "fd00::2", LocalQPN: 6, PeerQPN: 7, MTU: 1024},
					},
				},
				{
					ID: 768, Datapath: "Kernel", Role: "client", State: "ACTIVE", Dialect: "linux", Version: 2, EID: "KUBE-SMCR", Redundancy: "SINGLE", Conns: 1, RMBBytes: 1 << 16,
					Links: []agentapi.Link{{ID: 1, State: "ACTIVE", Device: "mlx5_0", LocalGID: "192.0.2.1", PeerGID: "192.0.2.2"}},
				},
				{ID: 2, Pod: "shop/db", Role: "server", PeerID: "8-02", State: "CLOSED", Version: 2, EID: "KUBE-SMCR", Redundancy: "NONE", Error: "link lost", Opened: now.Add(-72 * time.Hour)},
			}, Problem: "one is missing"})
		}, `
GROUP  POD       DATAPATH  ROLE    STATE               REDUNDANCY  PEER ID  VERSION       CONNS  RMBS      LINK  LINK STATE  DEVICE  LOCAL           PEER            MTU   SENT  RECEIVED  AGE
1      shop/web  Agent     client  ACTIVE              SYMMETRIC   7-02     v1 linux      2      1.0 MiB   1     ACTIVE      soft0   192.0.2.1 qp 4  192.0.2.2 qp 5  4096  1 B   2 B       5s
-      -         -         -       -                   -           -        -             -      -         2     ACTIVE      soft1   fd00::1 qp 6    fd00::2 qp 7    1024  0 B   0 B       5s
768    -         Kernel    client  ACTIVE              SINGLE      -        v2 KUBE-SMCR  1      64.0 KiB  1     ACTIVE      mlx5_0  192.0.2.1       192.0.2.2       -     -     -         -
2      shop/db   Agent     server  CLOSED (link lost)  NONE        8-02     v2 KUBE-SMCR  0      0 B       -     -           -       -               -               -     -     -         3d
problem: one is missing
`},
		{"no link groups", func(w io.Writer, _ time.Time) error { return PrintLinks(w, agentapi.Links{}) }, `
no link groups
`},
		{"connections", func(w io.Writer, now time.Time) error {
			tcp := conn(now)
			tcp.ID, tcp.Mode, tcp.Reason, tcp.LinkGroup, tcp.State = 4, "TCP", "PEERNOSMC", 0, ""
			kernels := conn(now)
			kernels.ID, kernels.Datapath, kernels.LinkGroup, kernels.Opened = 17, "Kernel", 768, time.Time{}
			return PrintConns(w, agentapi.Conns{Conns: []agentapi.Conn{conn(now), tcp, kernels}})
		}, `
ID  POD       DATAPATH  DIRECTION  SOURCE           DESTINATION     MODE   REASON     GROUP  STATE   SENT     RECEIVED  AGE
3   shop/web  Agent     outbound   192.0.2.5:40000  192.0.2.7:6379  SMC-R  -          1/2    ACTIVE  5.0 MiB  12 B      3h0m
4   shop/web  Agent     outbound   192.0.2.5:40000  192.0.2.7:6379  TCP    PEERNOSMC  -      -       -        -         3h0m
17  shop/web  Kernel    outbound   192.0.2.5:40000  192.0.2.7:6379  SMC-R  -          768/2  ACTIVE  -        -         -
`},
		{"no connections", func(w io.Writer, _ time.Time) error { return PrintConns(w, agentapi.Conns{Problem: "no module"}) }, `
no connections
problem: no module
`},
		{"attachments", func(w io.Writer, now time.Time) error {
			return PrintAttachments(w, agentapi.Attachments{
				Attachments: []agentapi.Attachment{{
					Pod: "shop/web", Interface: "eth0", State: agentapi.StateReady, NetNS: "/run/netns/x", Policies: []string{"a", "b"},
					Addresses: []netip.Prefix{netip.MustParsePrefix("192.0.2.5/24"), netip.MustParsePrefix("fd00::5/64")},
				}, {Pod: "shop/db", Interface: "eth0", State: agentapi.StateReady, NetNS: "/run/netns/y", Policies: []string{"k"}, Datapath: "Kernel"}},
				Bypasses:  []agentapi.Bypass{{Pod: "shop/web", Dest: addrPort("192.0.2.9:80"), Reason: "PEERNOSMC", Until: now.Add(time.Minute)}},
				Malformed: []string{"x.json: not JSON"},
			})
		}, `
POD       INTERFACE  STATE  ADDRESSES                POLICIES  NETNS         DETAIL
shop/web  eth0       ready  192.0.2.5/24,fd00::5/64  a,b       /run/netns/x  -
shop/db   eth0       ready  -                        k         /run/netns/y  datapath Kernel

POD       NOT DIVERTED  REASON     FOR
shop/web  192.0.2.9:80  PEERNOSMC  1m0s
ignored: x.json: not JSON
`},
		{"explanation", func(w io.Writer, now time.Time) error {
			return PrintExplanation(w, agentapi.Explanation{
				Verdict: "plain TCP", Code: "PEERNOSMC", Advice: "install it there", Pod: "shop/web", Policy: "db", Required: true, Unresolved: []string{"kv"},
				Problem: "a pod is not seen", Bypassed: &agentapi.Bypass{Until: now.Add(time.Minute).UTC()},
				Live: []agentapi.Conn{conn(now)},
				Recent: []agentapi.Decision{
					{Direction: "outbound", Mode: "TCP", Reason: "PEERNOSMC", Detail: "seen", Count: 2, Last: now.Add(-time.Minute)},
					{Direction: "inbound", Mode: "TCP", Reason: "MEM", PeerDeclined: true, Count: 1, Last: now},
				},
			})
		}, `
verdict             plain TCP
reason              PEERNOSMC
what to do          install it there
pod                 shop/web
policy              db
not in force        kv: the controller has not resolved the peers yet; until then the form from before is in force; of a new policy nothing where a pod that it selects ran before, else all but the peers that are to be found
mode                Required: connections without SMC-R are reset
problem             a pod is not seen
not diverted until  ` + until + `

ID  POD       DATAPATH  DIRECTION  SOURCE           DESTINATION     MODE   REASON  GROUP  STATE   SENT     RECEIVED  AGE
3   shop/web  Agent     outbound   192.0.2.5:40000  192.0.2.7:6379  SMC-R  -       1/2    ACTIVE  5.0 MiB  12 B      3h0m

LAST      COUNT  SEEN FROM  MODE  REASON     DETAIL
1m0s ago  2      outbound   TCP   PEERNOSMC  seen
0s ago    1      inbound    TCP   MEM        the peer: ` + agentapi.Code("MEM").Text() + `
`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if diff := cmp.Diff(strings.TrimPrefix(tt.want, "\n"), shown(t, tt.print)); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}

// TestPrintStatus_wire: who may send RoCE packets is said in any case, but where
// there is no device.
func TestPrintStatus_wire(t *testing.T) {
	for _, tt := range []struct {
		name string
		wire agentapi.Wire
		want string
	}{
		{"filtered", agentapi.Wire{State: agentapi.WireFiltered, Allowed: 7}, "RoCE packets of 7 addresses and networks"},
		{
			"dropped",
			agentapi.Wire{State: agentapi.WireFiltered, Allowed: 1, Detail: "no routes", Dropped: map[string]uint64{"unknown-source": 2, "malformed": 1}},
			"RoCE packets of 1 addresses and networks: no routes; dropped: 1 malformed, 2 unknown-source",
		},
		{"open", agentapi.Wire{State: agentapi.WireOpen, Detail: "name them"}, "RoCE packets of everybody: name them"},
		{"pending", agentapi.Wire{State: agentapi.WirePending}, "RoCE packets not filtered by this agent yet"},
		{"failed", agentapi.Wire{State: agentapi.WireFailed, Detail: "in problems"}, "RoCE packets not filtered as wanted"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got := shown(t, func(w io.Writer, _ time.Time) error { return PrintStatus(w, agentapi.Status{Wire: tt.wire}) })
			if !strings.Contains(got, "wire         "+tt.want+"\n") {
				t.Errorf("want %q in\n%s", tt.want, got)
			}
		})
	}
	got := shown(t, func(w io.Writer, _ time.Time) error { return PrintStatus(w, agentapi.Status{}) })
	if strings.Contains(got, "wire") {
		t.Errorf("without a device:\n%s", got)
	}
}

// TestPrintStatus_state: the state is in one word of a person's.
func TestPrintStatus_state(t *testing.T) {
	for _, tt := range []struct {
		name   string
		status agentapi.Status
		want   string
	}{
		{"draining", agentapi.Status{Draining: true, Accelerating: true}, "stopping"},
		{"no pod", agentapi.Status{}, "ready, no pod is attached that a policy selects"},
		{"not possible", agentapi.Status{Problems: []string{"no device"}}, "everything is plain TCP"},
		{"works in spite of problems", agentapi.Status{Accelerating: true, Problems: []string{"a port"}}, "carrying connections over SMC-R"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got := shown(t, func(w io.Writer, _ time.Time) error { return PrintStatus(w, tt.status) })
			if !strings.Contains(got, "state        "+tt.want+"\n") {
				t.Errorf("want state %q in\n%s", tt.want, got)
			}
		})
	}
}

// TestLine: rows without columns, too, are one line.
func TestLine(t *testing.T) {
	if got, want := Line("a\x1b[2J\nnode n2\tb\r"), "a?[2J; node n2?b?"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
	got := shown(t, func(w io.Writer, _ time.Time) error {
		return PrintAttachments(w, agentapi.Attachments{Malformed: []string{"\x1b[2J\nnode n2"}})
	})
	if !strings.HasSuffix(got, "\nignored: ?[2J; node n2\n") {
		t.Errorf("%q", got)
	}
	got = shown(t, func(w io.Writer, _ time.Time) error {
		return PrintLinks(w, agentapi.Links{Problem: "\x1b[2J\nnode n2"})
	})
	if want := "no link groups\nproblem: ?[2J; node n2\n"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

// TestRow: what peers and users write begins no row or column, and does nothing to the terminal.
func TestRow(t *testing.T) {
	got := Row("status", "Fallback\nverdict\ton SMC-R\x1b[2K\u009b1A\u202e", "", 7, "Größe 1 µs")
	if want := "status\tFallback?verdict?on SMC-R?[2K?1A?\t-\t7\tGröße 1 µs"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}
