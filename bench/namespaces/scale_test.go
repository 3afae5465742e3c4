// SPDX-License-Identifier: Apache-2.0

package main

import "testing"

func TestCrowd(t *testing.T) {
	for _, tt := range []struct {
		crowd
		name string
		each int
	}{
		{crowd{10, 1}, "10 idle", 112},
		{crowd{10000, 1}, "10000 idle", 12600},
		{crowd{10000, 100}, "10000 idle, 100 stacks", 225},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := tt.String(); got != tt.name {
				t.Errorf("it is called %q", got)
			}
			if got := tt.crowd.each(); got != tt.each {
				t.Errorf("each stack may have %d connections, want %d", got, tt.each)
			}
		})
	}
}

// The base of the comparison is the first one, and has one stack: its path is what others are held to.
func TestCrowds(t *testing.T) {
	all, err := crowds()
	if err != nil {
		t.Fatal(err)
	}
	names := map[string]bool{}
	for _, c := range all {
		if c.conns < c.stacks || c.conns < all[0].conns || names[c.String()] {
			t.Errorf("%v beside %v", c, all[0])
		}
		names[c.String()] = true
	}
	if all[0].stacks != 1 || len(all) < 4 {
		t.Errorf("crowds are %v", all)
	}
}
