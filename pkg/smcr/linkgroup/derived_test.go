// SPDX-License-Identifier: Apache-2.0

package linkgroup

import (
	"reflect"
	"testing"
	"time"
)

// What derive counts is what the parts kept, and set gives all of that to parts that know nothing.
func TestDerive(t *testing.T) {
	g, _, l := pair(Client)
	c := writing(t, g, l)
	c.becomeZombie(time.Unix(1, 0))
	want := derive(g)
	if err := want.check(g); err != nil {
		t.Fatal(err)
	}
	if want.present != 3 || want.n != 1 || want.zombies != 1 || want.conns[1] != 1 || want.awaits[0] != 0 || want.rmbs[0] != (rmbCounts{1, 1}) {
		t.Errorf("%+v", want)
	}
	(&derived{rmbs: make([]rmbCounts, len(want.rmbs))}).set(g)
	if want.check(g) == nil {
		t.Error("a group that counts nothing is right")
	}
	if again := derive(g); !reflect.DeepEqual(again, want) {
		t.Errorf("%+v depends on what the parts keep, and was %+v", again, want)
	}
	want.set(g)
	if err := want.check(g); err != nil {
		t.Error(err)
	}
}
