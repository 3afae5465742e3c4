// SPDX-License-Identifier: Apache-2.0

package linkgroup

import (
	"math/rand/v2"
	"testing"
	"time"
)

// A silent link is given up when another one has answered since; the other one is asked
// first, after half of the time. Without another one it has LastLinkTimeout.
func TestLinkTable_blame(t *testing.T) {
	table := tableOf([2]uint8{0, 0}, [2]uint8{1, 1})
	silent, other := &table.at[0], &table.at[1]
	began := time.Unix(100, 0)
	at := func(d time.Duration) tester { return tester{now: began.Add(d), rand: rand.New(rand.NewPCG(1, 2))} }
	const patience = 2 * time.Second
	if due := table.blameDue(silent, began, patience); !due.Equal(began.Add(patience / 2)) {
		t.Errorf("the other link is asked at %v", due)
	}
	if table.isToBlame(silent, began, patience, at(patience/2)) || other.testSent.IsZero() {
		t.Fatal("the silent link is blamed, or the other one not asked")
	}
	if due := table.blameDue(silent, began, patience); !due.IsZero() {
		t.Errorf("something is due at %v although the other link owes its answer", due)
	}
	answer := patience/2 + 600*time.Millisecond // slow: the silent link has as long again
	if asked, err := other.testAnswered(began.Add(answer), other.testData); !asked || err != nil {
		t.Fatal(asked, err)
	}
	due := began.Add(patience/2 + 2*600*time.Millisecond)
	if got := table.blameDue(silent, began, patience); !got.Equal(due) {
		t.Errorf("blame is due at %v, want %v", got, due)
	}
	if table.isToBlame(silent, began, patience, at(patience)) || !table.isToBlame(silent, began, patience, tester{now: due}) {
		t.Error("the silent link is blamed too early, or not at all")
	}
}

// RFC 7609 §4.5.3: after silence TEST LINK; the only link has until LastLinkTimeout.
func TestLinkTable_testFailed(t *testing.T) {
	table := tableOf([2]uint8{0, 0})
	l := &table.at[0]
	began := l.heard
	at := func(d time.Duration) tester { return tester{now: began.Add(d), rand: rand.New(rand.NewPCG(1, 2))} }
	if table.testFailed(l, TestLinkInterval, at(TestLinkInterval-1)) || !l.testSent.IsZero() {
		t.Fatal("tested too early")
	}
	if table.testFailed(l, TestLinkInterval, at(TestLinkInterval)) || len(l.queue) != 1 {
		t.Fatal("no TEST LINK")
	}
	if table.testFailed(l, TestLinkInterval, at(TestLinkInterval+LastLinkTimeout-1)) {
		t.Error("given up too early")
	}
	if !table.testFailed(l, TestLinkInterval, at(TestLinkInterval+LastLinkTimeout)) {
		t.Error("not given up")
	}
	if asked, err := l.testAnswered(began, [16]byte{1}); !asked || err == nil {
		t.Error("a wrong answer is taken")
	}
}

// A link of which acknowledgements come slowly may be silent for longer; one without
// connections, too.
func TestLink_patience(t *testing.T) {
	l := &link{conns: 1}
	if p := l.patience(false); p != StallTimeout {
		t.Errorf("patience %v, want %v", p, StallTimeout)
	}
	now := time.Unix(1, 0)
	l.pace.sent(now, 1)
	l.pace.completed(now.Add(time.Second))
	if p := l.patience(false); p != 4*time.Second {
		t.Errorf("patience %v, want 4 s", p)
	}
	l = &link{}
	if p := l.patience(false); p != QuietStallTimeout {
		t.Errorf("patience of a link without connections %v, want %v", p, QuietStallTimeout)
	}
	if p := l.patience(true); p != StallTimeout {
		t.Errorf("patience of one that carries an exchange %v, want %v", p, StallTimeout)
	}
}
