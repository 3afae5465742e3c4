// SPDX-License-Identifier: Apache-2.0

package main

import (
	"testing"

	"github.com/smcr-io/kube-smcr/bench/load"
)

// What opening connections costs is taken off what is measured on them, and not off itself.
func TestPathsOf_startCost(t *testing.T) {
	p := pathsOf([]*way{{name: "a"}})[0]
	for kind, want := range map[load.Kind]bool{load.Echo: true, load.Stream: true, load.Setup: false} {
		if got := p.StartCost(load.Load{Kind: kind}); got != want {
			t.Errorf("of %c: %v, want %v", kind, got, want)
		}
	}
}
