// SPDX-License-Identifier: Apache-2.0

package smcr_test

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

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

// controlOption notes when it sees a socket.
type controlOption struct {
	fakeOption
	seen *[]string
}

func (o controlOption) ControlDial(string, string, syscall.RawConn) error {
	*o.seen = append(*o.seen, "option")
	return nil
}

// The option sees the socket behind the program's own function, whichever of the two that net.Dialer
// has: of both it heeds ControlContext.
func TestDialer_control(t *testing.T) {
	for _, tc := range []struct {
		control, controlContext bool
		want                    []string
	}{
		{false, false, []string{"option"}},
		{true, false, []string{"Control", "option"}},
		{false, true, []string{"ControlContext", "option"}},
		{true, true, []string{"ControlContext", "option"}},
	} {
		var seen []string
		p := newPair(t, func(c *smcr.Config) { c.Option = controlOption{fakeOption{offered: true}, &seen} })
		d := smcr.Dialer{Stack: p.client}
		if tc.control {
			d.Dialer.Control = func(string, string, syscall.RawConn) error { seen = append(seen, "Control"); return nil }
		}
		if tc.controlContext {
			d.Dialer.ControlContext = func(context.Context, string, string, syscall.RawConn) error {
				seen = append(seen, "ControlContext")
				return nil
			}
		}
		accepted := make(chan net.Conn, 1)
		go func() {
			c, _ := p.l.Accept()
			accepted <- c
		}()
		c, err := d.DialContext(t.Context(), "tcp", p.l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(seen, tc.want) {
			t.Errorf("%+v: seen by %v", tc, seen)
		}
		_, _ = c.Close(), (<-accepted).Close()
	}
}

// A peer that takes the TCP connection and says nothing more is not waited for longer than the program wants,
// and the error is a timeout, as that of net.Dialer.
func TestDialer_timeout(t *testing.T) {
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	p := newPair(t)
	const patience = 50 * time.Millisecond
	for name, dial := range map[string]func() error{
		"Timeout": func() error {
			_, err := (&smcr.Dialer{Stack: p.client, Dialer: net.Dialer{Timeout: patience}}).DialContext(t.Context(), "tcp", l.Addr().String())
			return err
		},
		"Deadline": func() error {
			d := net.Dialer{Timeout: time.Hour, Deadline: time.Now().Add(patience)}
			_, err := (&smcr.Dialer{Stack: p.client, Dialer: d}).DialContext(t.Context(), "tcp", l.Addr().String())
			return err
		},
		"context": func() error {
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			_, err := (&smcr.Dialer{Stack: p.client}).DialContext(ctx, "tcp", l.Addr().String())
			return err
		},
	} {
		err := dial()
		var ne net.Error
		if !errors.As(err, &ne) || !ne.Timeout() || !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
