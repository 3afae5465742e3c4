// SPDX-License-Identifier: Apache-2.0

package smcnl

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
)

var compareAddrs = cmpopts.EquateComparable(netip.Addr{}, netip.AddrPort{})

// answers are what a kernel 6.12 answered, one message per line, without the
// header of generic netlink.
func answers(t testing.TB, name string) [][]byte {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("testdata", name+".hex"))
	if err != nil {
		t.Fatal(err)
	}
	var msgs [][]byte
	for line := range strings.Lines(string(text)) {
		b, err := hex.DecodeString(strings.TrimSpace(line))
		if err != nil {
			t.Fatal(err)
		}
		msgs = append(msgs, b)
	}
	return msgs
}

func TestDecode_counters(t *testing.T) {
	c, err := decodeStats(answers(t, "stats")[0])
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range answers(t, "fallbacks") {
		if err := decodeFallback(m, &c); err != nil {
			t.Fatal(err)
		}
	}
	want := Counters{
		ClientV2: 11, ServerV2: 11,
		Fallbacks:       map[Fallback]uint64{{Server, clc.ReasonPeerNoSMC}: 1, {Server, clc.ReasonNoDev}: 2},
		ServerFallbacks: 3,
		RxBytes:         4738289, TxBytes: 4742384, RxCalls: 472, TxCalls: 18679, Urgent: 6,
		Rx: Buffers{Full: 65, Small: 41, Reused: 18, Allocated: 4},
		Tx: Buffers{Full: 18409, Reused: 18, Allocated: 4},
	}
	if diff := cmp.Diff(want, c); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

// TestCounters_differAcrossWrap: the kernel counts each kind of fallback in 16 bits.
func TestCounters_differAcrossWrap(t *testing.T) {
	noDev, declined := Fallback{Server, clc.ReasonNoDev}, Fallback{Client, clc.ReasonPeerDecl}
	before := Counters{Fallbacks: map[Fallback]uint64{noDev: 65530, declined: 65535}}
	after := Counters{Fallbacks: map[Fallback]uint64{noDev: 4}}
	if diff := cmp.Diff(map[Fallback]uint64{noDev: 10, declined: 1}, after.Sub(before).Fallbacks); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

func TestCounters_differ(t *testing.T) {
	before := Counters{ClientV2: 3, RxBytes: 10, Fallbacks: map[Fallback]uint64{{Server, clc.ReasonNoDev}: 2, {Client, clc.ReasonPeerDecl}: 1}, ClientFallbacks: 1, ServerFallbacks: 2}
	after := before
	after.ClientV2, after.RxBytes, after.ServerFallbacks = 5, 30, 3
	after.Fallbacks = map[Fallback]uint64{{Server, clc.ReasonNoDev}: 3, {Client, clc.ReasonPeerDecl}: 1}
	want := Counters{ClientV2: 2, RxBytes: 20, Fallbacks: map[Fallback]uint64{{Server, clc.ReasonNoDev}: 1}, ServerFallbacks: 1}
	if diff := cmp.Diff(want, after.Sub(before)); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

func TestCounters_throughJSON(t *testing.T) {
	want := Counters{Fallbacks: map[Fallback]uint64{{Server, clc.ReasonNoDev}: 2, {Client, 0x12345678}: 1}}
	text, err := json.Marshal(want)
	if err != nil {
		t.Fatal(err)
	}
	var got Counters
	if err := json.Unmarshal(text, &got); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got:\n%s\n%s", diff, text)
	}
}

func TestDecode_groups(t *testing.T) {
	got, err := decodeGroups(answers(t, "links"))
	if err != nil {
		t.Fatal(err)
	}
	peer := netip.MustParseAddr("10.0.0.2")
	want := []Group{{
		ID: 0x300, Role: Server, Redundancy: "ASYMMETRIC PEER", PNetID: "NETA", Conns: 1, Version: 2, Release: 1,
		EID: "SMCV2-DEFAULT-UEID", PeerHost: "g2", MaxConns: 255, MaxLinks: 2, SendBufBytes: 65536, RMBBytes: 65536,
		Links: []Link{
			{ID: 1, Device: "rxe0", Port: 1, GID: netip.MustParseAddr("10.0.0.1"), PeerGID: peer, Conns: 1, State: "ACTIVE", UserID: 0x301, PeerUserID: 0x1},
			{ID: 2, Device: "rxe1", Port: 1, GID: netip.MustParseAddr("10.0.0.11"), PeerGID: peer, State: "ACTIVE", UserID: 0x302, PeerUserID: 0x1000001},
		},
	}}
	if diff := cmp.Diff(want, got, compareAddrs); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

func TestDecode_sockets(t *testing.T) {
	var got []Socket
	for _, m := range answers(t, "sockets") {
		s, err := decodeSocket(m)
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, s)
	}
	local := netip.MustParseAddrPort("10.0.0.1:5000")
	want := []Socket{
		{State: "ACTIVE", Mode: "SMCR", Local: local, Peer: netip.MustParseAddrPort("10.0.0.2:52340"), Token: 0x18, SendBufBytes: 65536, RMBEBytes: 65536, PeerRMBEBytes: 524288, LinkID: 1, Inode: 901, Cookie: 30, Device: "rxe0", GID: netip.MustParseAddr("10.0.0.1"), PeerGID: netip.MustParseAddr("10.0.0.2"), Role: Server},
		{State: "LISTEN", Mode: "SMCR", Local: local, Peer: netip.MustParseAddrPort("0.0.0.0:0"), Inode: 888, Cookie: 29},
	}
	if diff := cmp.Diff(want, got, compareAddrs); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

func TestDecode_devices(t *testing.T) {
	var got []Device
	for _, m := range answers(t, "devices") {
		d, err := decodeDevice(m)
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, d)
	}
	want := []Device{
		{Name: "rxe0", Ports: []Port{{Number: 1, PNetID: "LAB", PNetIDByUser: true, NetDev: 2, Active: true}}},
		{Name: "rxe1", Ports: []Port{{Number: 1, NetDev: 3, Active: true}}},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

func TestDecode_system(t *testing.T) {
	got, err := decodeSystem(answers(t, "system")[0])
	if diff := cmp.Diff(System{Version: 2, Release: 1, Hostname: "g1", SMCRv2: true}, got); diff != "" || err != nil {
		t.Errorf("%v, -want +got:\n%s", err, diff)
	}
}

// A socket of TCP's families says which one.
func TestDecodeSocket_family(t *testing.T) {
	msg := bytes.Clone(answers(t, "sockets")[0])
	for family, want := range map[byte]bool{unix.AF_INET: false, unix.AF_INET6: true, 43: false} {
		msg[0] = family
		if s, err := decodeSocket(msg); err != nil || s.IPv6 != want {
			t.Errorf("family %d: %+v, %v", family, s, err)
		}
	}
}

// The directions that have ended are in an attribute.
func TestDecodeSocket_shutdown(t *testing.T) {
	msg := bytes.Clone(answers(t, "sockets")[1])
	i := bytes.Index(msg, []byte("\x05\x00\x03\x00"))
	if i < 0 {
		t.Fatal("the answer has no such attribute")
	}
	msg[i+4] = 2
	if s, err := decodeSocket(msg); err != nil || s.Shutdown != ShutSend {
		t.Errorf("%+v, %v", s, err)
	}
}

// What a kernel sends is cut at every place: an error or less, never a panic.
func TestDecode_cutAnswers(t *testing.T) {
	for name, decode := range map[string]func([]byte){
		"stats":     func(b []byte) { _, _ = decodeStats(b) },
		"fallbacks": func(b []byte) { _ = decodeFallback(b, &Counters{}) },
		"links":     func(b []byte) { _, _ = decodeGroups([][]byte{b}) },
		"sockets":   func(b []byte) { _, _ = decodeSocket(b) },
		"system":    func(b []byte) { _, _ = decodeSystem(b) },
		"devices":   func(b []byte) { _, _ = decodeDevice(b) },
	} {
		t.Run(name, func(t *testing.T) {
			for _, m := range answers(t, name) {
				for n := range m {
					decode(m[:n])
				}
			}
		})
	}
	if _, err := decodeGroups(answers(t, "links")[1:]); err == nil {
		t.Error("a link without its group was taken")
	}
}

// The kernel numbers the sides: 1 is a server and 0 a client.
func TestDecodeFallback_client(t *testing.T) {
	msg := []byte("\x08\x01\x00\x00\x34\x00\x08\x80\x05\x00\x01\x00\x00\x00\x00\x00\x0c\x00\x02\x00\x00\x00\x00\x00\x00\x00\x00\x00" +
		"\x0c\x00\x03\x00\x01\x00\x00\x00\x00\x00\x00\x00\x08\x00\x04\x00\x00\x00\x01\x03\x06\x00\x05\x00\x01\x00\x00\x00")
	var got Counters
	if err := decodeFallback(msg[4:], &got); err != nil {
		t.Fatal(err)
	}
	want := Counters{Fallbacks: map[Fallback]uint64{{Client, clc.ReasonPeerNoSMC}: 1}, ClientFallbacks: 1}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

// What an entry of the pnet table does not have the kernel calls "n/a", which would be the name of something.
func TestDecodePNet(t *testing.T) {
	for _, tt := range []struct {
		a    attrs
		want PNet
	}{
		{attrs{1: []byte("NET\x00"), 2: []byte("eth0\x00"), 3: []byte("n/a\x00"), 4: {255}}, PNet{Name: "NET", NetDev: "eth0"}},
		{attrs{1: []byte("NET\x00"), 2: []byte("n/a\x00"), 3: []byte("mlx5_0\x00"), 4: {2}}, PNet{Name: "NET", Device: "mlx5_0", Port: 2}},
	} {
		if got := decodePNet(tt.a); got != tt.want {
			t.Errorf("%+v, want %+v", got, tt.want)
		}
	}
}
