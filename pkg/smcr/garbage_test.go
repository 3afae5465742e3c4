// SPDX-License-Identifier: Apache-2.0

package smcr_test

import (
	"runtime"
	"testing"
	"time"
	"weak"

	"github.com/smcr-io/kube-smcr/pkg/smcr"
)

// A closed connection is garbage, even with its deadlines far away.
func TestConn_closedIsGarbage(t *testing.T) {
	for _, tc := range []struct {
		name string
		set  func(*smcr.Conn)
	}{
		{"no deadline", func(*smcr.Conn) {}},
		{"deadline", func(c *smcr.Conn) { _ = c.SetDeadline(time.Now().Add(time.Hour)) }},
	} {
		t.Run(tc.name, func(t *testing.T) {
			p := newPair(t, small)
			var ws []weak.Pointer[smcr.Conn]
			func() {
				a, b := p.dial(t)
				tc.set(a)
				exchange(t, a, b)
				_, _ = a.Close(), b.Close()
				ws = append(ws, weak.Make(a), weak.Make(b))
			}()
			waitFor(t, "closed", func() bool { return p.client.Stats().Conns == 0 && p.server.Stats().Conns == 0 })
			waitFor(t, "garbage", func() bool {
				runtime.GC()
				for _, w := range ws {
					if w.Value() != nil {
						return false
					}
				}
				return true
			})
		})
	}
}
