// SPDX-License-Identifier: Apache-2.0

package smcr_test

import (
	"errors"
	"net"
	"net/netip"
	"strings"
	"syscall"
	"testing"

	"github.com/smcr-io/kube-smcr/pkg/smcr"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
)

// An address that has its share of a listener's rendezvous gets a reset, and others are
// served.
func TestListener_shareOfAnAddress(t *testing.T) {
	p := newPair(t, func(c *smcr.Config) { c.Hooks.Failed = nil }) // of 1,024 it would say the same
	from := netip.MustParseAddr("127.0.0.9")
	for range smcr.MaxRendezvousWith {
		dialFrom(t, from, p.l.Addr().String()) // says nothing
	}
	d := net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(from, 0))}
	c, err := d.DialContext(t.Context(), "tcp", p.l.Addr().String())
	switch {
	case err == nil:
		wantReset(t, c)
		_ = c.Close()
	case !errors.Is(err, syscall.ECONNRESET): // the reset may come before connect returns
		t.Fatal(err)
	}
	a, b := p.dial(t) // from another one
	exchange(t, a, b)
	_, _ = a.Close(), b.Close()
}

// The error of a connection that would be TCP names the side that declined and says why.
func TestFallbackError(t *testing.T) {
	for _, c := range []struct {
		declined bool
		who      string
	}{{false, "this side declined"}, {true, "the peer declined"}} {
		err := &smcr.FallbackError{Reason: clc.ReasonMem, PeerDeclined: c.declined}
		if s := err.Error(); !strings.Contains(s, c.who) || !strings.Contains(s, clc.ReasonMem.Text()) {
			t.Errorf("%q does not say that %s, and why", s, c.who)
		}
	}
}
