// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"syscall"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/linux"
)

// TestAgent_peerEchoesOption: a server, or a device before it, that answers
// the option but does not speak CLC. The connection is lost, the next one goes
// directly, and others do not notice.
func TestAgent_peerEchoesOption(t *testing.T) {
	l := newLab(t)
	l.a.start(t)
	ln := value(linux.ListenInNS(t.Context(), l.b.pod.ns, l.option.ControlListen, netip.MustParseAddrPort(podB+":0")))(t)
	serve(t, ln, echo)
	c, err := l.a.pod.dial(t, ln.Addr().String())
	if err == nil {
		_, err = c.Write([]byte("hello"))
	}
	if err == nil {
		_, err = c.Read(make([]byte, 1))
	}
	if !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("read = %v, want a reset", err)
	}
	e := value(l.a.client.Explain(t.Context(), "test/a", ln.Addr().String()))(t)
	if e.Code != agentapi.CodeRendezvous || e.Bypassed == nil {
		t.Errorf("explanation %+v", e)
	}
	c, err = l.a.pod.dial(t, ln.Addr().String())
	must(t, err)
	exchange(t, c, 1000)
}

// TestAgent_clientWithoutCLC: clients that offer the option and then say
// something else, or nothing, or stop in the middle of a message.
func TestAgent_clientWithoutCLC(t *testing.T) {
	t.Parallel() // the test mostly waits
	l := newLab(t)
	l.b.ttl = time.Minute // where an agent gets no processor time for a second the diversion would end
	l.set(t, l.b, "")
	l.b.start(t)
	ln := l.b.pod.listen(t, podB+":0")
	serve(t, ln, echo)
	dial := func(t *testing.T) *net.TCPConn {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), waitLimit)
		defer cancel()
		c := value(linux.DialInNS(ctx, l.a.pod.ns, l.option.ControlDial, netip.Addr{}, addrPort(ln.Addr())))(t)
		t.Cleanup(func() { _ = c.Close() })
		must(t, c.SetDeadline(time.Now().Add(waitLimit)))
		return c
	}
	for name, text := range map[string]string{
		"other protocol": "GET / HTTP/1.1\r\nHost: x\r\n\r\n",
		"cut short":      "\xe2\xd4\xc3\xd9\x01\x00",
		"huge length":    "\xe2\xd4\xc3\xd9\x01\xff\xff\x10",
	} {
		t.Run(name, func(t *testing.T) {
			c := dial(t)
			value(c.Write([]byte(text)))(t)
			if name == "cut short" {
				must(t, c.CloseWrite())
			}
			if b, err := io.ReadAll(c); !errors.Is(err, syscall.ECONNRESET) || len(b) > 0 {
				a := value(l.b.client.Attachments(t.Context()))(t).Attachments[0]
				t.Errorf("read %d bytes, %v, want a reset; %s %s %s, %+v", len(b), err, a.State, a.Reason, a.Detail, l.b.status(t).Conns)
			}
		})
	}
	silent := dial(t)
	l.a.start(t) // a good client beside the silent one
	c, err := l.a.pod.dial(t, ln.Addr().String())
	must(t, err)
	exchange(t, c, 100_000)
	if b, err := io.ReadAll(silent); !errors.Is(err, syscall.ECONNRESET) || len(b) > 0 {
		t.Errorf("the silent client reads %q, %v, want a reset", b, err)
	}
	eventually(t, func() string {
		if s := l.b.status(t); s.Conns.Live != 0 || s.Conns.TotalSMCR != 1 || s.NodeBudget.ConnsUsed != 0 {
			return fmt.Sprintf("%+v", s)
		}
		return ""
	})
}
