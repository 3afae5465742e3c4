// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestRead(t *testing.T) {
	want := []Message{
		{Kind: Hello, Payload: bytes.Repeat([]byte{7}, NonceBytes)},
		{Kind: Stdout, Stream: 1 << 31, Payload: bytes.Repeat([]byte("x"), MaxPayload)},
		{Kind: Ping, Payload: []byte{}},
	}
	var b []byte
	for _, m := range want {
		b = m.Append(b)
	}
	r := bytes.NewReader(b)
	for _, w := range want {
		got, err := Read(r)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(w, got); diff != "" {
			t.Errorf("message (-want +got):\n%s", diff)
		}
	}
	if _, err := Read(r); !errors.Is(err, io.EOF) {
		t.Errorf("after the last: %v", err)
	}
}

func TestRead_refuses(t *testing.T) {
	whole := Message{Kind: Stdin, Stream: 3, Payload: []byte("abc")}.Append(nil)
	for _, c := range []struct {
		name  string
		bytes []byte
		want  string
	}{
		{"junk", []byte("not a message"), "it begins with 0x6e6f7420"},
		{"a cut payload", whole[:len(whole)-1], "unexpected EOF"},
		{"a cut header", whole[:5], "unexpected EOF"},
		{"a large payload", Message{Kind: Stdin, Payload: make([]byte, MaxPayload+1)}.Append(nil), "payload of 32769 bytes"},
	} {
		t.Run(c.name, func(t *testing.T) {
			if _, err := Read(bytes.NewReader(c.bytes)); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("error %v, want one with %q", err, c.want)
			}
		})
	}
}

func TestAwaitHello(t *testing.T) {
	nonce := []byte("0123456789abcdef")
	hello := Message{Kind: Hello, Payload: nonce}.Append(nil)
	for _, c := range []struct {
		name   string
		before []byte
	}{
		{"nothing before", nil},
		{"junk before", []byte("what another host left")},
		{"another's greeting before", Message{Kind: Hello, Payload: []byte("fedcba9876543210")}.Append(nil)},
		{"half of it before", hello[:len(hello)-1]},
	} {
		t.Run(c.name, func(t *testing.T) {
			after := Message{Kind: Pong, Payload: []byte{}}
			r := bufio.NewReader(bytes.NewReader(after.Append(append(append([]byte(nil), c.before...), hello...))))
			if err := AwaitHello(r, nonce); err != nil {
				t.Fatal(err)
			}
			got, err := Read(r)
			if diff := cmp.Diff(after, got); diff != "" || err != nil {
				t.Errorf("the next message: %v (-want +got):\n%s", err, diff)
			}
		})
	}
	if err := AwaitHello(bufio.NewReader(bytes.NewReader(hello)), []byte("another nonce...")); !errors.Is(err, io.EOF) {
		t.Errorf("another's greeting only: %v", err)
	}
}

func FuzzRead(f *testing.F) {
	f.Add(Message{Kind: Start, Stream: 1, Payload: []byte(`{"args":["true"]}`)}.Append(nil))
	f.Add(Message{Kind: Exit, Stream: 1, Payload: []byte(`{"code":3}`)}.Append(nil)[:9])
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := Read(bytes.NewReader(b))
		if err == nil && !bytes.HasPrefix(b, m.Append(nil)) {
			t.Errorf("%v is not what %x begins with", m, b)
		}
	})
}

func TestPlan(t *testing.T) {
	if got := Addr(1, 1).String() + " " + Addr6(1, 1).String() + " " + MAC(1, 1) + " " + NetDev(1); got != "10.0.0.12 fd00::c 52:54:00:00:01:02 eth1" {
		t.Errorf("NIC 1 of guest 1: %s", got)
	}
	seen := map[string]bool{}
	for guest := range MaxGuests {
		for nic := range MaxNICs {
			for _, a := range []string{Addr(guest, nic).String(), Addr6(guest, nic).String(), MAC(guest, nic)} {
				if seen[a] {
					t.Errorf("NIC %d of guest %d shares %s", nic, guest, a)
				}
				seen[a] = true
			}
		}
	}
}
