// SPDX-License-Identifier: Apache-2.0

package smcr_test

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
)

func TestClient_badServers(t *testing.T) {
	decline := clc.Decline{Version: clc.V1, Reason: clc.ReasonNoDevR}.Append(nil)
	for _, tc := range []struct {
		name   string
		answer func(t *testing.T, c net.Conn) // after the Proposal
		reason clc.Reason                     // of the fallback; 0: the dial fails
	}{
		{"echoes the option, speaks no CLC", func(_ *testing.T, c net.Conn) {
			_, _ = c.Write([]byte("SSH-2.0-OpenSSH_9.2p1 Debian-2+deb12u3\r\n"))
		}, 0},
		{"says nothing", func(*testing.T, net.Conn) {}, 0},
		{"closes", func(_ *testing.T, c net.Conn) { _ = c.(*net.TCPConn).CloseWrite() }, 0},
		{"stops in the Accept", func(_ *testing.T, c net.Conn) {
			_, _ = c.Write(clc.Accept{Endpoint: testEndpoint(true)}.Append(nil)[:30])
		}, 0},
		{"declines, and the application speaks at once", func(_ *testing.T, c net.Conn) {
			_, _ = c.Write(decline)
		}, clc.ReasonNoDevR},
		{"names a group that does not exist", func(t *testing.T, c net.Conn) {
			_, _ = c.Write(clc.Accept{Endpoint: testEndpoint(false)}.Append(nil))
			wantDecline(t, c, clc.ReasonSyncErr, true)
		}, clc.ReasonSyncErr},
		{"offers a path MTU that does not exist", func(t *testing.T, c net.Conn) {
			e := testEndpoint(true)
			b := clc.Accept{Endpoint: e}.Append(nil)
			b[50] = b[50]&0xf0 | 9
			_, _ = c.Write(b)
			wantDecline(t, c, clc.ReasonConfigErr, false)
		}, clc.ReasonConfigErr},
		{"never sends CONFIRM LINK", func(t *testing.T, c net.Conn) {
			_, _ = c.Write(clc.Accept{Endpoint: testEndpoint(true)}.Append(nil))
			readMessage(t, c)
			_ = c.SetReadDeadline(time.Now().Add(8 * time.Second))
			wantDecline(t, &patient{c}, clc.ReasonTimeoutCL, false)
		}, clc.ReasonTimeoutCL},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			s := newStack(t, newFakeFabric().device("c", 1), quick)
			addr, served := serveOnce(t, "127.0.0.1:0", tc.answer)
			ctx, cancel := context.WithTimeout(t.Context(), 15*time.Second)
			defer cancel()
			c, err := (&smcr.Dialer{Stack: s}).DialContext(ctx, "tcp", addr)
			peer := <-served
			switch {
			case tc.reason == 0 && err == nil:
				t.Fatal("dial succeeded")
			case tc.reason == 0:
				wantReset(t, peer)
			case err != nil:
				t.Fatal(err)
			default:
				if i := c.(*smcr.Conn).Info(); i.Mode != smcr.ModeTCP || i.Reason != tc.reason {
					t.Errorf("mode %v, reason %v, want TCP, %v", i.Mode, i.Reason, tc.reason)
				}
				exchange(t, c, peer)
				_ = c.Close()
			}
			waitCleanedUp(t, s)
		})
	}
}

// A handshake that cannot be looked up says nothing about the peer.
func TestDialer_requireRefusesFallback(t *testing.T) {
	for _, tc := range []struct {
		name   string
		option fakeOption
		want   clc.Reason
	}{
		{"not offered", fakeOption{}, clc.ReasonPeerNoSMC},
		{"not known", fakeOption{err: errors.New("no memory for its state")}, clc.ReasonInternal},
	} {
		t.Run(tc.name, func(t *testing.T) {
			p := newPair(t, func(c *smcr.Config) { c.Option = tc.option })
			_, err := (&smcr.Dialer{Stack: p.client, Require: true}).DialContext(t.Context(), "tcp", p.l.Addr().String())
			var fe *smcr.FallbackError
			if !errors.As(err, &fe) || fe.Reason != tc.want {
				t.Errorf("error %v, want %v", err, tc.want)
			}
			c, err := p.l.Accept()
			if err != nil {
				t.Fatal(err)
			}
			_ = c.Close()
		})
	}
}

func TestClient_badServersOfVersion2(t *testing.T) {
	for _, tc := range []struct {
		name   string
		edit   func(*clc.Endpoint)
		reason clc.Reason
	}{
		{"an enterprise ID that was not offered", func(e *clc.Endpoint) { e.EID = eids(t, "ACME")[0] }, clc.ReasonNoUEID},
		{"a later release", func(e *clc.Endpoint) { e.Ext.Release = 2 }, clc.ReasonReleaseErr},
		{"too few connections", func(e *clc.Endpoint) { e.Ext.MaxConns = 15 }, clc.ReasonMaxConnErr},
		{"more links than offered", func(e *clc.Endpoint) { e.Ext.MaxLinks = 3 }, clc.ReasonMaxLinkErr},
		{"version 1, which was not offered", func(e *clc.Endpoint) { e.Version = clc.V1 }, clc.ReasonModeUnsupp},
		{"a router that is not there", func(e *clc.Endpoint) { e.Ext.Direct = false }, clc.ReasonNoIndirect},
		{"an RNIC that cannot be reached", func(e *clc.Endpoint) { e.GID = rdma.GIDFromAddr(netip.MustParseAddr("2001:db8::1")) }, clc.ReasonNoRoute},
		{"a group that does not exist", func(e *clc.Endpoint) { e.FirstContact = false }, clc.ReasonSyncErr},
		{"an impossible RMBE", func(e *clc.Endpoint) { e.RMBEIndex = 0 }, clc.ReasonErrRToken},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			s := newStack(t, newFakeFabric().device("c", 1), quick, versions(smcr.VersionsV2))
			addr, served := serveOnce(t, "127.0.0.1:0", func(t *testing.T, c net.Conn) {
				e := endpointV2(t, true)
				tc.edit(&e)
				_, _ = c.Write(clc.Accept{Endpoint: e}.Append(nil))
				wantDecline(t, c, tc.reason, tc.reason == clc.ReasonSyncErr)
			})
			ctx, cancel := context.WithTimeout(t.Context(), 15*time.Second)
			defer cancel()
			c, err := (&smcr.Dialer{Stack: s}).DialContext(ctx, "tcp", addr)
			if err != nil {
				t.Fatal(err)
			}
			<-served
			if i := c.(*smcr.Conn).Info(); i.Mode != smcr.ModeTCP || i.Reason != tc.reason || i.PeerDeclined {
				t.Errorf("mode %v, reason %v, want TCP, %v", i.Mode, i.Reason, tc.reason)
			}
			_ = c.Close()
			waitCleanedUp(t, s)
		})
	}
}
