// SPDX-License-Identifier: Apache-2.0

package smcr_test

import (
	"errors"
	"net"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/internal/conntest"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
)

// A program must not notice that its connection is not TCP: each script ends
// the same way over both.
func TestConn_closesLikeTCP(t *testing.T) {
	for _, script := range conntest.Scripts() {
		t.Run(script, func(t *testing.T) {
			t.Parallel()
			tcp := func() (x, y conntest.Conn) {
				a, b := tcpPair(t)
				return a.(conntest.Conn), b.(conntest.Conn)
			}
			for _, v := range []smcr.VersionSet{smcr.VersionsV1, smcr.VersionsV2} {
				p := newPair(t, versions(v))
				t.Log("versions", v)
				conntest.Check(t, script, 50*time.Millisecond, tcp, func() (x, y conntest.Conn) {
					a, b := p.dial(t)
					return a, b
				})
			}
		})
	}
}

// The deadline of a connection that is closed is refused as package net refuses it: with one error, which is a net.Error.
func TestConn_deadlineOfAClosed(t *testing.T) {
	a, b := newPair(t, small).dial(t)
	_, _ = a.Close(), b.Close()
	err := a.SetDeadline(time.Time{})
	if _, ok := err.(net.Error); !ok || !errors.Is(err, net.ErrClosed) { //nolint:errorlint // it is to be one, and not to have one in it
		t.Errorf("%T: %v", err, err)
	}
}
