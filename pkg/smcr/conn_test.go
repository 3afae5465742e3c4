// SPDX-License-Identifier: Apache-2.0

package smcr_test

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/smcr-io/kube-smcr/pkg/internal/conntest"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
)

// A program must not notice that its connection is not TCP: each script ends
// the same way over both.
func TestConn_closesLikeTCP(t *testing.T) {
	for _, script := range conntest.Scripts() {
		t.Run(script, func(t *testing.T) {
			t.Parallel()
			tick := time.NewTicker(30 * time.Millisecond)
			defer tick.Stop()
			wait := func() { <-tick.C; <-tick.C }
			x, y := tcpPair(t)
			want := conntest.Play(x.(conntest.Conn), y.(conntest.Conn), script, wait)
			_, _ = x.Close(), y.Close()

			for _, v := range []smcr.VersionSet{smcr.VersionsV1, smcr.VersionsV2} {
				p := newPair(t, versions(v))
				a, b := p.dial(t)
				got := conntest.Play(a, b, script, wait)
				_, _ = a.Close(), b.Close()
				if d := cmp.Diff(want, got); d != "" {
					t.Errorf("-TCP +SMC-R, versions %d:\n%s", v, d)
				}
			}
		})
	}
}
