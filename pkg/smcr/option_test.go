// SPDX-License-Identifier: Apache-2.0

package smcr_test

import (
	"errors"
	"sync"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/smcr-io/kube-smcr/pkg/smcr"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
)

// fakeOption stands for the TCP option: both sides see it, or not, or one of them cannot
// tell, or cannot prepare its socket.
type fakeOption struct {
	offered    bool
	err        error // of the side that dials
	synErr     error // of the side that listens
	controlErr error
}

func (o fakeOption) ControlDial(string, string, syscall.RawConn) error   { return o.controlErr }
func (o fakeOption) ControlListen(string, string, syscall.RawConn) error { return o.controlErr }
func (o fakeOption) PeerOffered(syscall.Conn) (bool, error)              { return o.offered, o.err }
func (o fakeOption) SYNOffered(syscall.Conn) (bool, error)               { return o.offered, o.synErr }

var errOption = errors.New("the kernel does not say")

// RFC 7609 §3.1: a side that did not see the option is TCP by itself, and puts no CLC
// message on the connection. What a side cannot look up is reported to the hook, and says
// nothing about the peer: the reason is an internal error, at client and server alike.
func TestOption_withoutItNoCLC(t *testing.T) {
	for _, tc := range []struct {
		name           string
		option         smcr.Option
		client, server clc.Reason
		failed         []string // what the hooks of both stacks are told
	}{
		{"the stack has none", nil, clc.ReasonPeerNoSMC, clc.ReasonPeerNoSMC, nil},
		{"not offered", fakeOption{}, clc.ReasonPeerNoSMC, clc.ReasonPeerNoSMC, nil},
		{"the client cannot tell", fakeOption{err: errOption}, clc.ReasonInternal, clc.ReasonPeerNoSMC, []string{"TCP option"}},
		{"the server cannot tell", fakeOption{synErr: errOption}, clc.ReasonPeerNoSMC, clc.ReasonInternal, []string{"TCP option"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var mu sync.Mutex
			var failed []string
			p := newPair(t, func(c *smcr.Config) {
				c.Option = tc.option
				c.Hooks.Failed = func(what string, err error) {
					mu.Lock()
					defer mu.Unlock()
					failed = append(failed, what)
					if !errors.Is(err, errOption) {
						t.Errorf("%s: %v", what, err)
					}
				}
			})
			a, b := p.dial(t)
			if a.Mode() != smcr.ModeTCP || a.Reason() != tc.client || b.Mode() != smcr.ModeTCP || b.Reason() != tc.server {
				t.Errorf("client is %v, %v, server is %v, %v", a.Mode(), a.Reason(), b.Mode(), b.Reason())
			}
			exchange(t, a, b) // would meet a CLC message
			_, _ = a.Close(), b.Close()
			mu.Lock()
			defer mu.Unlock()
			if d := cmp.Diff(tc.failed, failed); d != "" {
				t.Error(d)
			}
		})
	}
}

// A socket that cannot be prepared is an error: without the option the connection would
// be TCP, and nobody would know why.
func TestOption_controlFails(t *testing.T) {
	s := newStack(t, newFakeFabric().device("c", 1), func(c *smcr.Config) { c.Option = fakeOption{controlErr: errOption} })
	if _, err := smcr.Listen(t.Context(), s, "tcp", "127.0.0.1:0"); !errors.Is(err, errOption) {
		t.Errorf("listen: %v", err)
	}
	p := newPair(t)
	if _, err := (&smcr.Dialer{Stack: s}).DialContext(t.Context(), "tcp", p.l.Addr().String()); !errors.Is(err, errOption) {
		t.Errorf("dial: %v", err)
	}
}
