// SPDX-License-Identifier: Apache-2.0

package linkgroup

import (
	"errors"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/smcr/llc"
)

// formed is a group with one link.
func formed(role Role) (*Group, *link) {
	g := New(Config{Role: role, Rand: rand.New(rand.NewPCG(1, 2))})
	g.AddFirstLink(Endpoint{})
	l := g.links.first()
	l.id = 1
	g.becomeActive(time.Unix(1, 0))
	g.out.list = nil
	return g, l
}

// Messages that a peer in this role may not send are refused or dropped, and change nothing.
func TestSide_wrongDirection(t *testing.T) {
	now := time.Unix(1, 0)
	for _, role := range []Role{Client, Server} {
		t.Run(role.String(), func(t *testing.T) {
			response := llc.Header{Response: role == Client} // as in the messages that this side sends, not as in those that it gets
			g, l := formed(role)
			if err := g.side.handleConfirmLink(g, now, l, llc.ConfirmLink{Header: response}); !errors.Is(err, ErrProtocol) {
				t.Errorf("CONFIRM LINK: %v", err)
			}
			if err := g.side.handleContinuation(g, now, l, llc.AddLinkContinuation{Header: llc.Header{Response: role == Client}}); err != nil {
				t.Errorf("ADD LINK CONTINUATION: %v", err)
			}
			g.side.handleRequestAddLink(g, now, l, llc.RequestAddLink{Header: llc.Header{Response: role == Server}})
			if g.Discarded != 2 {
				t.Errorf("%d messages were discarded, want 2", g.Discarded)
			}
			if g.adding.isUnderWay() || len(g.requests.line) > 0 || len(l.queue) > 0 || len(g.out.list) > 0 {
				t.Error("something follows")
			}
		})
	}
}

// A server offers links, a client asks for them (RFC 7609 §3.5.5.1.2).
func TestSide_retry(t *testing.T) {
	g, _ := formed(Server)
	g.side.retry(g)
	if !g.requests.has(exchangeAddLink) {
		t.Error("the server offers no link")
	}
	g, _ = formed(Client)
	g.side.retry(g)
	if len(g.requests.line) > 0 || len(g.out.list) != 1 || g.out.list[0].Event != EventWantLink {
		t.Errorf("the client does not look for an RNIC: %+v", g.out.list)
	}
	for _, role := range []Role{Client, Server} {
		g, _ := formed(role)
		g.growth.forbid(llc.DeleteOperator, ourOperator)
		if g.side.retry(g); len(g.requests.line) > 0 || len(g.out.list) > 0 {
			t.Errorf("%v: a link although an operator has taken one out of service", role)
		}
	}
}
