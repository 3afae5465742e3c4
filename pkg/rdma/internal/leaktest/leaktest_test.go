// SPDX-License-Identifier: Apache-2.0

package leaktest

import (
	"errors"
	"os"
	"testing"
)

// tests stand for those of a package.
type tests func() int

func (f tests) Run() int { return f() }

func TestRun(t *testing.T) {
	pass := func() int { return 0 }
	leave := func() int {
		for range allowed + 1 {
			f, err := os.Open("/dev/null")
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = f.Close() })
		}
		return 0
	}
	nothing := func() error { return nil }
	something := func() error { return errors.New("something is left, as this test wants it") }
	for _, tt := range []struct {
		name string
		run  tests
		left []func() error
		want int
	}{
		{"nothing is left", pass, []func() error{nothing}, 0},
		{"descriptors are left", leave, nil, 1},
		{"something else is left", pass, []func() error{nothing, something}, 1},
		{"the tests fail", func() int { return 2 }, []func() error{something}, 2},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := Run(tt.run, tt.left...); got != tt.want {
				t.Errorf("exit code %d, want %d", got, tt.want)
			}
		})
	}
}
