// SPDX-License-Identifier: Apache-2.0

package smcr_test

import (
	"net"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/smcr"
)

// Somebody else's write to the socket that WriteTo writes to may wait as long
// as it wants: the stack does not.
func TestConn_writeToABusySocket(t *testing.T) {
	p := newPair(t)
	a, b := p.dial(t)
	c, d := p.dial(t)
	x, y := tcpPair(t)
	go func() { _, _ = b.WriteTo(x) }()
	exchange(t, a, y2(y, b))
	started := make(chan struct{})
	go func() { close(started); _, _ = x.Write(make([]byte, 64<<20)) }() // nobody reads y
	<-started
	tick := time.NewTicker(100 * time.Millisecond)
	<-tick.C
	tick.Stop()
	if _, err := a.Write([]byte("small")); err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		<-time.After(50 * time.Millisecond)
		if _, err := c.Write([]byte("x")); err != nil {
			t.Error(err)
		}
		if _, err := d.Read(make([]byte, 1)); err != nil {
			t.Error(err)
		}
	}()
	select {
	case <-done:
	case <-time.After(3 * time.Second):
		t.Error("another connection of the stack hangs")
	}
	_, _ = x.Close(), y.Close()
	<-done
	for _, c := range []*smcr.Conn{a, b, c, d} {
		_ = c.Close()
	}
}

// duplex reads from one connection and writes to another.
type duplex struct {
	net.Conn
	w net.Conn
}

func (d duplex) Write(p []byte) (int, error) { return d.w.Write(p) }

func y2(r, w net.Conn) net.Conn { return duplex{r, w} }
