// SPDX-License-Identifier: Apache-2.0

package smcr_test

import (
	"io"
	"testing"

	"github.com/smcr-io/kube-smcr/pkg/smcr"
)

// The reader knows what the peer knows of it; else each read asks the machine.
func TestConn_announcedFollows(t *testing.T) {
	p := newPair(t, small)
	a, b := p.dial(t)
	go func() { _, _ = a.Write(make([]byte, 1<<20)) }()
	if _, err := io.ReadFull(b, make([]byte, 1<<20)); err != nil {
		t.Fatal(err)
	}
	if d, m := smcr.Announced(b); d != m || m == 0 {
		t.Errorf("data path: %d, machine: %d", d, m)
	}
	_, _ = a.Close(), b.Close()
}
