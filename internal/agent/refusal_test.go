// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"testing"
	"time"
)

func TestRefusals(t *testing.T) {
	at := func(d time.Duration) time.Time { return time.Unix(1000, 0).Add(d) }
	one, two := errors.New("one"), errors.New("two")
	var r refusals
	for i, step := range []struct {
		err error
		at  time.Duration
		log bool
	}{
		{one, 0, true},
		{one, time.Second, false},
		{two, 2 * time.Second, false},
		{one, refusalPause + time.Second, true},
		{one, refusalPause + 2*time.Second, false},
		{one, 2 * refusalShown, true},
	} {
		if got := r.note(step.err, at(step.at)); got != step.log {
			t.Errorf("step %d: to be logged %t, want %t", i, got, step.log)
		}
	}
	if r.recent(at(2*refusalShown)) == "" || r.recent(at(4*refusalShown)) != "" {
		t.Error("a refusal is not shown, or for ever")
	}
}
