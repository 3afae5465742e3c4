// SPDX-License-Identifier: Apache-2.0

package linkgroup

import (
	"testing"

	"github.com/smcr-io/kube-smcr/pkg/smcr/llc"
)

// RFC 7609 §2.2.2: the smaller numbers hold; a client may leave the links to the server.
func TestTerms_settleLimits(t *testing.T) {
	for _, c := range []struct {
		name           string
		terms          terms
		links, conns   uint8
		wantL, wantC   int
		refused, offer bool
	}{
		{"the peer's are smaller", terms{role: Server, version: 2, release: 1, offered: 8, maxLinks: 8, maxConns: 200}, 3, 100, 3, 100, false, true},
		{"ours are smaller", terms{role: Server, version: 2, release: 1, offered: 2, maxLinks: 2, maxConns: 50}, 3, 100, 2, 50, false, true},
		{"CLC has said nothing about connections", terms{role: Server, version: 1, maxLinks: 2, maxConns: 50}, 3, 10, 2, 50, false, true},
		{"a client leaves it to the server", terms{role: Server, version: 1, maxLinks: 2, maxConns: 50}, 0, 0, 2, 50, false, true},
		{"a server that allows none", terms{role: Client, version: 1, maxLinks: 2, maxConns: 50}, 0, 0, 2, 50, true, true},
		{"one link of a Linux that waits for the offer", terms{role: Server, version: 1, maxLinks: 1, maxConns: 50}, 2, 0, 1, 50, false, true},
		{"one link by CLC", terms{role: Server, version: 2, release: 1, offered: 1, maxLinks: 1, maxConns: 50}, 1, 50, 1, 50, false, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			c.terms.dialect = llc.DialectLinux
			err := c.terms.settleLimits(llc.ConfirmLink{MaxLinks: c.links, MaxConns: c.conns})
			if (err != nil) != c.refused || int(c.terms.maxLinks) != c.wantL || c.terms.maxConns != c.wantC {
				t.Errorf("%v: %d links, %d connections", err, c.terms.maxLinks, c.terms.maxConns)
			}
			if got := c.terms.offersSecond(); got != c.offer {
				t.Errorf("a second link is offered: %t", got)
			}
		})
	}
}

// The dialect is Linux's unless the peer wants eye catchers in both directions and we may.
func TestTerms_settleDialect(t *testing.T) {
	for _, c := range []struct {
		name  string
		terms terms
		flags llc.ConfirmLinkFlags
		ok    bool
		want  llc.Dialect
	}{
		{"Linux", terms{version: 1, allowRFC: true}, noEyeCatcher, true, llc.DialectLinux},
		{"RFC", terms{version: 1, allowRFC: true}, 0, true, llc.DialectRFC},
		{"RFC, not allowed", terms{version: 1}, 0, false, llc.DialectLinux},
		{"RFC, version 2", terms{version: 2, allowRFC: true}, 0, false, llc.DialectLinux},
	} {
		t.Run(c.name, func(t *testing.T) {
			c.terms.dialect = llc.DialectLinux
			if ok := c.terms.settleDialect(c.flags); ok != c.ok || c.terms.dialect != c.want {
				t.Errorf("%t, %v", ok, c.terms.dialect)
			}
		})
	}
}

// Numbers in host order are in that of the peer's host: Linux goes by the number of RTokens in ADD LINK.
func TestTerms_addLink_order(t *testing.T) {
	for big, want := range map[bool][2]byte{false: {1, 0}, true: {0, 1}} {
		v2 := terms{version: llc.Version2, dialect: llc.DialectLinux, bigEndian: big}
		m := v2.addLink(&link{})
		m.Ext = llc.AddLinkExt{Pairs: make([]llc.RTokenPair, 1)}
		b := m.Append(nil)
		if got := [2]byte(b[70:72]); got != want {
			t.Errorf("big-endian %t: the number of RTokens is %x, want %x", big, got, want)
		}
		length := [2]byte{byte(len(b)), 0}
		if big {
			length = [2]byte{0, byte(len(b))}
		}
		if got := [2]byte(b[1:3]); got != length {
			t.Errorf("big-endian %t: the length is %x, want %x", big, got, length)
		}
	}
}
