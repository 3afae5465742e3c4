// SPDX-License-Identifier: Apache-2.0

package linkgroup

import (
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// The shell gets every output once, in order, appended to the slice that it passes. The box keeps no
// reference to an output, and uses its memory again.
func TestOutbox(t *testing.T) {
	var b outbox
	err := errors.New("gone")
	b.event(EventReady, nil)
	b.link(&link{index: 2}, err)
	b.rmb(EventRMBRefused, 7)
	first := Output{Kind: OutCloseLink, Link: 1}
	got := b.moveTo([]Output{first})
	want := []Output{
		first,
		{Kind: OutEvent, Event: EventReady},
		{Kind: OutEvent, Event: EventLink, Link: 2, Err: err},
		{Kind: OutEvent, Event: EventRMBRefused, RMB: 7},
	}
	if d := cmp.Diff(want, got, cmp.Comparer(func(a, b error) bool { return errors.Is(a, b) })); d != "" {
		t.Error(d)
	}
	for _, o := range b.list[:cap(b.list)] {
		if o.Err != nil || o.RMB != 0 {
			t.Errorf("the box keeps %+v", o)
		}
	}
	if again := b.moveTo(nil); len(again) != 0 {
		t.Errorf("%d outputs come twice", len(again))
	}
	dst := make([]Output, 0, 8)
	if n := testing.AllocsPerRun(100, func() { b.put(first); dst = b.moveTo(dst[:0]) }); n != 0 {
		t.Errorf("%v allocations for an output", n)
	}
}

// People read these names in logs: each value has a name of its own, and a value that is not known
// is shown as its number.
func TestOutput_names(t *testing.T) {
	seen := map[string]bool{}
	for k := EventPointOfNoReturn; k <= EventLink; k++ {
		seen[k.String()] = true
	}
	for f := FaultConfirmLinkTimeout; f <= FaultLink; f++ {
		seen[f.String()] = true
	}
	for k := OutReceive; k <= OutEvent; k++ {
		seen[k.String()] = true
	}
	for o := noOperator; o <= ourOperator; o++ {
		seen[o.String()] = true
	}
	if want := int(EventLink+1) + int(FaultLink+1) + int(OutEvent+1) + int(ourOperator+1); len(seen) != want {
		t.Errorf("%d names of %d values: %v", len(seen), want, seen)
	}
	if k, f := (EventLink + 1).String(), (FaultLink + 1).String(); k != "EventKind(10)" || f != "SetupFault(5)" {
		t.Errorf("values without a name are called %s and %s", k, f)
	}
	if k, o := (OutEvent + 1).String(), (ourOperator + 1).String(); k != "OutputKind(6)" || o != "operator(3)" {
		t.Errorf("values without a name are called %s and %s", k, o)
	}
}

// The reason why a first contact failed is found in the error, behind the step at which it failed.
func TestSetupError(t *testing.T) {
	for _, c := range []struct {
		err  *SetupError
		want string
		is   error
	}{
		{&SetupError{Fault: FaultAddLinkTimeout}, "first contact: ADD LINK timeout", nil},
		{&SetupError{Fault: FaultLink, Err: ErrStalled}, "first contact: link failure: no acknowledgements", ErrStalled},
	} {
		if got := c.err.Error(); got != c.want || c.is != nil && !errors.Is(c.err, c.is) || c.is == nil && c.err.Unwrap() != nil {
			t.Errorf("error %q, want %q", got, c.want)
		}
	}
}
