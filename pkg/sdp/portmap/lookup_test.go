// SPDX-License-Identifier: Apache-2.0

package portmap

import (
	"bytes"
	"testing"
	"time"
)

var (
	began   = time.Unix(1_000_000, 0)
	cpAddr  = addrPort("10.0.0.1:40000")
	service = addrPort("10.0.0.2:5001")
	sdpAddr = addrPort("10.0.0.2:35001")
)

func newLookup() *Lookup {
	return NewLookup(began, LookupConfig{Service: service, CP: cpAddr, Handle: handle})
}

// sent returns what a lookup wants to send; a type of -1 is nothing.
func sent(t testing.TB, l *Lookup) (Message, bool) {
	t.Helper()
	b, ok := l.Poll(nil)
	if !ok {
		return Message{}, false
	}
	m, err := ParseMessage(b)
	if err != nil {
		t.Fatal(err)
	}
	return m, true
}

func answer(typ Type) Message {
	m := Message{Type: typ, Handle: handle, CP: cpAddr, AP: service}
	if typ == Accept || typ == Ack {
		m.AP = sdpAddr
	}
	if typ == Accept {
		m.CacheTime = 40
	}
	return m
}

// TestSection7_5_1_Table: what each event does in each state, and what is sent then.
func TestSection7_5_1_Table(t *testing.T) {
	other := answer(Accept)
	other.Handle++
	bad := answer(Accept)
	bad.AP = addrPort("127.0.0.1:22")
	events := []struct {
		name    string
		do      func(*Lookup) Verdict
		to      State // from WAITING
		verdict Verdict
		late    Verdict // in all other states
		sends   bool
	}{
		{"PMAccept", func(l *Lookup) Verdict { return l.HandleDatagram(answer(Accept).Append(nil)) }, Accepted, Taken, Late, true},
		{"PMDeny", func(l *Lookup) Verdict { return l.HandleDatagram(answer(Deny).Append(nil)) }, Denied, Taken, Late, false},
		{"PMReq", func(l *Lookup) Verdict { return l.HandleDatagram(answer(Request).Append(nil)) }, Waiting, NotAnswer, NotAnswer, false},
		{"PMAck", func(l *Lookup) Verdict { return l.HandleDatagram(answer(Ack).Append(nil)) }, Waiting, NotAnswer, NotAnswer, false},
		{"another's", func(l *Lookup) Verdict { return l.HandleDatagram(other.Append(nil)) }, Waiting, Stranger, Stranger, false},
		{"bad address", func(l *Lookup) Verdict { return l.HandleDatagram(bad.Append(nil)) }, Waiting, BadAddress, Late, false},
		{"rubbish", func(l *Lookup) Verdict { return l.HandleDatagram([]byte("rubbish")) }, Waiting, Malformed, Malformed, false},
		{"unreachable", func(l *Lookup) Verdict { l.HandleUnreachable(); return Taken }, Unreachable, Taken, Taken, false},
		{"too early", func(l *Lookup) Verdict { l.HandleTimeout(began.Add(DefaultTimeout - 1)); return Taken }, Waiting, Taken, Taken, false},
		{"timeout", func(l *Lookup) Verdict { l.HandleTimeout(began.Add(DefaultTimeout)); return Taken }, Waiting, Taken, Taken, true},
	}
	into := map[State]func(*Lookup){
		Waiting:     func(*Lookup) {},
		Accepted:    func(l *Lookup) { l.HandleDatagram(answer(Accept).Append(nil)) },
		Denied:      func(l *Lookup) { l.HandleDatagram(answer(Deny).Append(nil)) },
		Unreachable: func(l *Lookup) { l.HandleUnreachable() },
		NoAnswer: func(l *Lookup) {
			for range DefaultTries {
				at, _ := l.NextTimeout()
				l.HandleTimeout(at)
			}
		},
	}
	for from, enter := range into {
		for _, e := range events {
			l := newLookup()
			sent(t, l)
			enter(l)
			sent(t, l)
			if l.State() != from {
				t.Fatalf("state %v, want %v", l.State(), from)
			}
			to, verdict, sends := e.to, e.verdict, e.sends
			if from != Waiting {
				to, verdict, sends = from, e.late, false
			}
			got := e.do(l)
			_, sending := l.Poll(nil)
			if got != verdict || l.State() != to || sending != sends {
				t.Errorf("%v, %s: %v, %v, sends: %v; want %v, %v, %v", from, e.name, got, l.State(), sending, verdict, to, sends)
			}
			if _, waits := l.NextTimeout(); waits != (to == Waiting) {
				t.Errorf("%v, %s: waits: %v in %v", from, e.name, waits, to)
			}
		}
	}
}

// TestSection7_5_1_Retransmission: the same PMReq is sent again, as often as there are tries, and then no more.
func TestSection7_5_1_Retransmission(t *testing.T) {
	l := newLookup()
	first, ok := l.Poll(nil)
	if want := answer(Request).Append(nil); !ok || !bytes.Equal(first, want) {
		t.Fatalf("sends %x, want %x", first, want)
	}
	now := began
	for i := range DefaultTries {
		at, waiting := l.NextTimeout()
		if want := now.Add(DefaultTimeout << i); !waiting || !at.Equal(want) {
			t.Fatalf("try %d: waits until %v, want %v", i+1, at, want)
		}
		now = at
		l.HandleTimeout(now)
		b, ok := l.Poll(nil)
		if last := i == DefaultTries-1; ok == last || ok && !bytes.Equal(b, first) {
			t.Fatalf("try %d: sends %x, want %x unless it was the last", i+1, b, first)
		}
	}
	if l.State() != NoAnswer {
		t.Errorf("%v after %v", l.State(), now.Sub(began))
	}
	if d := now.Sub(began); d != 3750*time.Millisecond {
		t.Errorf("gives up after %v", d)
	}
	short := NewLookup(began, LookupConfig{Service: service, CP: cpAddr, Tries: 1, Timeout: time.Millisecond})
	short.HandleTimeout(began.Add(time.Millisecond))
	if short.State() != NoAnswer {
		t.Errorf("one try: %v", short.State())
	}
	for _, c := range []LookupConfig{{Tries: -1}, {Tries: MaxTries + 1}, {Timeout: -1}, {Timeout: MaxTimeout + 1}} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%+v was taken", c)
				}
			}()
			NewLookup(began, c)
		}()
	}
}

// TestSection7_4_Ack: the PMAck has all of the PMAccept but type and PmTime, and is sent once.
func TestSection7_4_Ack(t *testing.T) {
	for _, first := range []bool{true, false} { // before and after a retransmission was due, which is then not sent
		l := newLookup()
		if !first {
			sent(t, l)
			l.HandleTimeout(began.Add(DefaultTimeout))
		}
		a := answer(Accept)
		a.AP = addrPort("10.0.0.9:9999") // another host than was asked for
		l.HandleDatagram(a.Append(nil))
		ack, ok := sent(t, l)
		want := a
		want.Type, want.CacheTime = Ack, 0
		if !ok || ack != want {
			t.Errorf("sends %v, want %v", ack, want)
		}
		if got, cache := l.Answer(); got != a.AP || cache != 40 {
			t.Errorf("the answer is %v for %d", got, cache)
		}
		l.HandleDatagram(a.Append(nil))
		if m, ok := sent(t, l); ok {
			t.Errorf("sends %v after another PMAccept", m)
		}
	}
}

// TestLookup_strangers: an answer counts only with all of AssocHandle, CpPort and CpIPAddr (§7.5), whatever its ApPort.
func TestLookup_strangers(t *testing.T) {
	for name, edit := range map[string]func(*Message){
		"AssocHandle": func(m *Message) { m.Handle = 1 },
		"CpPort":      func(m *Message) { m.CP = addrPort("10.0.0.1:40001") },
		"CpIPAddr":    func(m *Message) { m.CP = addrPort("10.0.0.3:40000") },
	} {
		for _, typ := range []Type{Accept, Deny} {
			l, m := newLookup(), answer(typ)
			edit(&m)
			if v := l.HandleDatagram(m.Append(nil)); v != Stranger || l.State() != Waiting {
				t.Errorf("%v with another %s: %v, %v", typ, name, v, l.State())
			}
		}
	}
	l, m := newLookup(), answer(Deny)
	m.AP = addrPort("0.0.0.0:0")
	if v := l.HandleDatagram(m.Append(nil)); v != Taken || l.State() != Denied {
		t.Errorf("PMDeny without an ApPort: %v, %v", v, l.State())
	}
	zone := NewLookup(began, LookupConfig{Service: addrPort("[fe80::2%eth0]:1"), CP: addrPort("[fe80::1%eth0]:2")})
	a := Message{Type: Accept, CP: addrPort("[fe80::1]:2"), AP: addrPort("[fe80::2]:3")}
	if v := zone.HandleDatagram(a.Append(nil)); v != Taken {
		t.Errorf("an address with a zone: %v", v)
	}
}

// TestLookup_badAddresses: nobody is sent to himself or to no host by somebody else.
func TestLookup_badAddresses(t *testing.T) {
	for _, c := range []struct {
		service, cp, sdp string
		good             bool
	}{
		{"10.0.0.2:1", "10.0.0.1:9", "10.0.0.2:2", true},
		{"10.0.0.2:1", "10.0.0.1:9", "192.0.2.77:2", true},
		{"127.0.0.1:1", "127.0.0.1:9", "127.0.0.2:2", true},
		{"[::1]:1", "[::1]:9", "[::1]:2", true},
		{"[fd00::2]:1", "[fd00::1]:9", "[fd00::3]:2", true},
		{"10.0.0.2:1", "10.0.0.1:9", "10.0.0.2:0", false},
		{"10.0.0.2:1", "10.0.0.1:9", "0.0.0.0:2", false},
		{"10.0.0.2:1", "10.0.0.1:9", "224.0.0.1:2", false},
		{"10.0.0.2:1", "10.0.0.1:9", "255.255.255.255:2", false},
		{"10.0.0.2:1", "10.0.0.1:9", "127.0.0.1:2", false},
		{"[fd00::2]:1", "[fd00::1]:9", "[::]:2", false},
		{"[fd00::2]:1", "[fd00::1]:9", "[::1]:2", false},
		{"[fd00::2]:1", "[fd00::1]:9", "[ff02::1]:2", false},
		{"[fd00::2]:1", "[fd00::1]:9", "[::ffff:127.0.0.1]:2", false},
		{"[fd00::2]:1", "[fd00::1]:9", "[::ffff:10.0.0.1]:2", false},
	} {
		l := NewLookup(began, LookupConfig{Service: addrPort(c.service), CP: addrPort(c.cp)})
		v := l.HandleDatagram(Message{Type: Accept, CP: addrPort(c.cp), AP: addrPort(c.sdp)}.Append(nil))
		if want := map[bool]Verdict{true: Taken, false: BadAddress}[c.good]; v != want {
			t.Errorf("%s is at %s: %v, want %v", c.service, c.sdp, v, want)
		}
	}
	l := newLookup()
	six := Message{Type: Accept, Handle: handle, CP: addrPort("[::ffff:10.0.0.1]:40000"), AP: addrPort("[fd00::1]:2")}
	if v := l.HandleDatagram(six.Append(nil)); v != Stranger {
		t.Errorf("an answer of IPv6 to a question of IPv4: %v", v)
	}
}
