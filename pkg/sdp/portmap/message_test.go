// SPDX-License-Identifier: Apache-2.0

package portmap

import (
	"bytes"
	"encoding/hex"
	"errors"
	"net/netip"
	"strings"
	"testing"
	"time"
)

// bytesOf reads hexadecimal digits with blanks between them.
func bytesOf(t testing.TB, text string) []byte {
	t.Helper()
	b, err := hex.DecodeString(strings.Join(strings.Fields(text), ""))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func addrPort(text string) netip.AddrPort { return netip.MustParseAddrPort(text) }

const handle = 0x1122334455667788

// TestSection7_3_Messages: every message is 48 bytes as figure 17 has them.
func TestSection7_3_Messages(t *testing.T) {
	v4 := "11223344 55667788 0a000001 00000000 00000000 00000000 0a000002 00000000 00000000 00000000"
	cp, ap := addrPort("10.0.0.1:40000"), addrPort("10.0.0.2:5001")
	for _, c := range []struct {
		name string
		m    Message
		want string
	}{
		{"PMReq", Message{Type: Request, Handle: handle, CP: cp, AP: ap}, "04000000 13899c40 " + v4},
		{"PMAccept", Message{Type: Accept, CacheTime: 40, Handle: handle, CP: cp, AP: ap}, "14280000 13899c40 " + v4},
		{"PMAck", Message{Type: Ack, Handle: handle, CP: cp, AP: ap}, "24000000 13899c40 " + v4},
		{"PMDeny", Message{Type: Deny, Handle: handle, CP: cp, AP: ap}, "34000000 13899c40 " + v4},
		{
			"IPv6",
			Message{Type: Accept, CacheTime: 40, Handle: handle, CP: addrPort("[fd00::1]:40000"), AP: addrPort("[fd00::2]:35001")},
			"16280000 88b99c40 11223344 55667788 fd000000 00000000 00000000 00000001 fd000000 00000000 00000000 00000002",
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			want := bytesOf(t, c.want)
			if got := c.m.Append([]byte("before")); !bytes.Equal(got, append([]byte("before"), want...)) || len(want) != Len {
				t.Errorf("%v is\n%x, want\n%x", c.m, got, want)
			}
			if got, err := ParseMessage(want); err != nil || got != c.m {
				t.Errorf("read %v, %v; want %v", got, err, c.m)
			}
		})
	}
	zone := Message{Type: Request, Handle: handle, CP: addrPort("[fe80::1%eth0]:1"), AP: addrPort("[fe80::2%eth0]:2")}
	if got, err := ParseMessage(zone.Append(nil)); err != nil || got.CP != addrPort("[fe80::1]:1") || got.AP != addrPort("[fe80::2]:2") {
		t.Errorf("zones: %v, %v", got, err)
	}
	for _, m := range []Message{{CP: cp}, {AP: ap}, {CP: cp, AP: addrPort("[fd00::2]:35001")}} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%v was written", m)
				}
			}()
			m.Append(nil)
		}()
	}
}

// TestSection7_3_Iwpmd: what rdma-core's iwpmd 44.0 has put on the wire.
func TestSection7_3_Iwpmd(t *testing.T) {
	for _, c := range []struct{ name, text, want string }{
		{"PMReq", "0400e6d3 1ce7e6d3 0000557b bfc43a50 0a000001 00000000 00000000 00000000 0a000002 cb7f7b55 00003800 00000000 0a000001 00000000 00000000 00003089", "PMReq 0000557bbfc43a50 from 10.0.0.1:59091 to 10.0.0.2:7399"},
		{"PMAck", "24280000 1ce7e6d3 0000557b bfc43a50 0a000001 00000000 00000000 00000000 0a000002 cb7f7b55 00003800 00000000", "PMAck 0000557bbfc43a50 from 10.0.0.1:59091 to 10.0.0.2:7399"},
		{"PMAccept", "14000000 1c209c40 11223344 55667788 0a000002 00000000 00000000 00000000 0a000001 00000000 00000000 00000000", "PMAccept 1122334455667788 from 10.0.0.2:40000 to 10.0.0.1:7200"},
		{"PMDeny", "34000000 1c219c41 11223344 55667789 0a000002 00000000 00000000 00000000 0a000001 00000000 00000000 00000000", "PMDeny 1122334455667789 from 10.0.0.2:40001 to 10.0.0.1:7201"},
	} {
		m, err := ParseMessage(bytesOf(t, c.text))
		if err != nil || m.String() != c.want || m.CacheTime != 0 {
			t.Errorf("%s: %v, PmTime %d, %v; want %s", c.name, m, m.CacheTime, err, c.want)
		}
	}
}

// TestSection7_3_1_Fields: what must not be looked at is not, and what must be is.
func TestSection7_3_1_Fields(t *testing.T) {
	good := Message{Type: Request, Handle: handle, CP: addrPort("10.0.0.1:40000"), AP: addrPort("10.0.0.2:5001")}
	with := func(edit func(b []byte) []byte) []byte { return edit(good.Append(nil)) }
	for name, b := range map[string][]byte{
		"reserved":    with(func(b []byte) []byte { b[2], b[3] = 0xff, 0xee; return b }),
		"PmTime":      with(func(b []byte) []byte { b[1] = 7; return b }),
		"behind IPv4": with(func(b []byte) []byte { copy(b[20:32], "rubbish"); copy(b[36:48], "rubbish"); return b }),
		"longer":      with(func(b []byte) []byte { return append(b, "behind it"...) }),
	} {
		if m, err := ParseMessage(b); err != nil || m != good {
			t.Errorf("%s: %v, %v; want %v", name, m, err, good)
		}
	}
	for n := range Len {
		if _, err := ParseMessage(good.Append(nil)[:n]); !errors.Is(err, ErrShort) {
			t.Errorf("%d bytes: %v", n, err)
		}
	}
	for first := range 256 {
		b := with(func(b []byte) []byte { b[0] = byte(first); return b })
		want := error(nil)
		switch ipv := first & 15; {
		case first>>6 != 0:
			want = ErrVersion
		case ipv != 4 && ipv != 6:
			want = ErrIPVersion
		}
		m, err := ParseMessage(b)
		if !errors.Is(err, want) || want == nil && (err != nil || m.Type != Type(first>>4)) {
			t.Errorf("first byte %02x: %v, %v, want %v", first, m, err, want)
		}
	}
}

// TestSection7_3_1_4_CacheTime: what the numbers mean, and which one is told for a time.
func TestSection7_3_1_4_CacheTime(t *testing.T) {
	for v, want := range map[CacheTime]time.Duration{
		OneUse: 0, 1: 250 * time.Millisecond, 40: 10 * time.Second, 127: 31750 * time.Millisecond, 128: 128 * time.Second, 254: 254 * time.Second,
		Forever: MaxCacheTime,
	} {
		if got := v.Duration(); got != want {
			t.Errorf("PmTime %d is %v, want %v", v, got, want)
		}
	}
	for d, want := range map[time.Duration]CacheTime{
		-1: OneUse, 0: OneUse, 249 * time.Millisecond: OneUse, 250 * time.Millisecond: 1, 10 * time.Second: 40, 10*time.Second + 249*time.Millisecond: 40,
		31750 * time.Millisecond: 127, 100 * time.Second: 127, 128*time.Second - 1: 127, 128 * time.Second: 128, 254 * time.Second: 254, 24 * time.Hour: 254,
	} {
		if got := NewCacheTime(d); got != want {
			t.Errorf("%v is told as %d, want %d", d, got, want)
		}
	}
	for v := range Forever {
		if got := NewCacheTime(v.Duration()); got != v {
			t.Errorf("PmTime %d is %v, and that is %d", v, v.Duration(), got)
		}
	}
}

// TestExpiring: nothing is remembered for longer than it says, and never more than there is room for.
func TestExpiring(t *testing.T) {
	now := time.Unix(1000, 0)
	x := NewExpiring[string, int](2)
	want := func(k string, v int, ok bool) {
		t.Helper()
		if got, has := x.Get(now, k); got != v || has != ok {
			t.Errorf("%s is %d, %v; want %d, %v", k, got, has, v, ok)
		}
	}
	want("a", 0, false)
	x.Put("a", 1, now.Add(time.Second))
	x.Put("b", 2, now.Add(2*time.Second))
	want("a", 1, true)
	x.Put("a", 3, now.Add(time.Second)) // now it is the younger one
	x.Put("c", 4, now.Add(time.Second))
	want("b", 0, false)
	want("a", 3, true)
	now = now.Add(time.Second)
	want("a", 0, false)
	want("c", 0, false)
	if x.Len() != 0 {
		t.Errorf("%d things are left", x.Len())
	}
	x.Put("d", 5, now.Add(time.Second))
	x.Drop("d")
	x.Drop("d")
	want("d", 0, false)
}

func TestStrings(t *testing.T) {
	for got, want := range map[string]string{
		Request.String(): "PMReq", Deny.String(): "PMDeny", Type(9).String(): "Type(9)",
		Waiting.String(): "WAITING", Unreachable.String(): "UNREACHABLE", State(9).String(): "State(9)",
		Taken.String(): "taken", BadAddress.String(): "bad address", Verdict(9).String(): "Verdict(9)",
	} {
		if got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

// FuzzParseMessage: what is read is written as it was, but for what nobody looks at.
func FuzzParseMessage(f *testing.F) {
	f.Add(bytesOf(f, "0400e6d3 1ce7e6d3 0000557b bfc43a50 0a000001 00000000 00000000 00000000 0a000002 cb7f7b55 00003800 00000000 0a000001 00000000 00000000 00003089"))
	f.Add(bytesOf(f, "16280000 88b99c40 11223344 55667788 fd000000 00000000 00000000 00000001 fd000000 00000000 00000000 00000002"))
	f.Add([]byte{4})
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := ParseMessage(b)
		if err != nil {
			if len(b) >= Len && b[0]>>6 == 0 && (b[0]&15 == 4 || b[0]&15 == 6) {
				t.Fatalf("a message is refused: %v", err)
			}
			return
		}
		again := m.Append(nil)
		back, err := ParseMessage(again)
		if err != nil || back != m || len(again) != Len || again[0] != b[0] || !bytes.Equal(again[4:20], b[4:20]) || !bytes.Equal(again[32:36], b[32:36]) {
			t.Fatalf("%x is read as %v and written as %x (%v)", b, m, again, err)
		}
	})
}
