// SPDX-License-Identifier: Apache-2.0

package rocev2

import (
	"testing"
	"time"
)

func TestDelayedACK_waits(t *testing.T) {
	const d = time.Millisecond
	t0 := time.Unix(100, 0)
	type packet struct {
		n          int
		send, asks bool
	}
	many := func(n int, p packet) []packet {
		s := make([]packet, n)
		for i := range s {
			s[i] = p
		}
		return s
	}
	small, full := packet{n: 64, send: true}, packet{n: 1024}
	for name, tt := range map[string]struct {
		delay   time.Duration
		packets []packet
		urgent  bool
	}{
		"a question":                   {d, []packet{small}, false},
		"a device that does not delay": {0, []packet{small}, true},
		"a full packet that asks":      {d, []packet{{n: 1024, asks: true}}, true},
		"questions":                    {d, many(maxKeptPackets+2, small), false},
		"one question too many":        {d, many(maxKeptPackets+3, small), true},
		"a stream's first message":     {d, append(many(8, full), small), false},
		"a stream's second message":    {d, append(many(8, full), small, small), true},
		"a window of others":           {d, many(maxHeldPackets, full), false},
		"more than a window of others": {d, many(maxHeldPackets+1, full), true},
	} {
		t.Run(name, func(t *testing.T) {
			a := delayedACK{due: true}
			for _, p := range tt.packets {
				a.received(t0, tt.delay, p.n, p.send, p.asks)
			}
			if a.isUrgent() != tt.urgent {
				t.Errorf("urgent %t, want %t", a.isUrgent(), tt.urgent)
			}
			if a.expire(t0.Add(tt.delay)); !a.isUrgent() {
				t.Error("it still waits when its time is over")
			}
		})
	}
}

func TestDelayedACK_stop(t *testing.T) {
	for _, due := range []bool{false, true} {
		a := delayedACK{due: due}
		if due {
			a.received(time.Unix(100, 0), time.Millisecond, 64, true, false)
		}
		if a.stop(); a.isUrgent() != due || !a.at.IsZero() || a.pkts != 0 {
			t.Errorf("due %t: %+v", due, a)
		}
	}
}

// An ACK that was kept back on trial, while the peer waited for it, is not kept back for a while.
func TestDelayedACK_trial(t *testing.T) {
	const d = time.Millisecond
	now := time.Unix(100, 0)
	var a delayedACK
	question := func() (kept bool) {
		a.due = true
		a.received(now, d, 64, true, false)
		return a.keep()
	}
	ask := func() int {
		for n := 1; n <= maxPause; n++ {
			if question() {
				return n
			}
			a.sent()
		}
		t.Fatal("no ACK was kept back")
		return 0
	}
	first := ask()
	now = now.Add(keptDelays * d)
	if a.expire(now); !a.isUrgent() {
		t.Fatal("a kept ACK waits for ever")
	}
	a.sent()
	now = now.Add(d / 2)
	if again := ask(); again < 2*minPause || again <= first {
		t.Errorf("another trial after %d answers, want %d at least", again, 2*minPause)
	}
}

// A peer that has gone on without ACKs many times is not taken for one that waits for them because it was
// silent once, and went on at once by chance when the timer had sent one.
func TestDelayedACK_silenceByChance(t *testing.T) {
	// A question of many packets is one, however many these are.
	var many patience
	many.lazy = true
	for n := range 10 {
		if n == 1 {
			many.keep(1)
		}
		many.received(time.Unix(100, 0), time.Millisecond, n)
	}
	if many.goesOn != 1 {
		t.Errorf("ten packets are %d questions after an answer", many.goesOn)
	}
	const d = time.Millisecond
	now := time.Unix(100, 0)
	var a delayedACK
	question := func() (kept bool) {
		now = now.Add(d / 10)
		a.due = true
		a.received(now, d, 64, true, false)
		if kept = a.keep(); !kept {
			a.sent()
		}
		return kept
	}
	silence := func() {
		if !question() {
			question() // the one before had as many packets as an ACK may stand for
		}
		now = now.Add(keptDelays * d)
		if a.expire(now); !a.isUrgent() {
			t.Fatal("a kept ACK waits for ever")
		}
		a.sent()
	}
	until := func(want bool) (n int) {
		for n = 1; question() != want; n++ {
			if n > maxPause {
				t.Fatal("it never changes")
			}
		}
		return n
	}
	until(true)
	for range 3 { // peers that wait are tried more and more rarely
		silence()
		until(true)
	}
	if a.patience.pause <= 2*minPause {
		t.Fatalf("a pause of %d after three trials in vain", a.patience.pause)
	}
	for range 2 * enoughGoesOn {
		question()
	}
	silence()
	if n := until(true); n > minPause+2 {
		t.Errorf("the next trial is %d answers later, want %d", n, minPause)
	}
}
