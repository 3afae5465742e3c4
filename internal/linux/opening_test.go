// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"context"
	"errors"
	"net/netip"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/nftables"
	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/internal/synqueue"
)

// openings counts the connections that are noted as being opened.
func (h *held) openings(t testing.TB) (n int) {
	t.Helper()
	mustDo(t, h.pod.Do(func() error {
		c, err := nftables.New()
		if err != nil {
			return err
		}
		for _, name := range []string{setOpening4, setOpening6} {
			s, err := c.GetSetByName(kubeTable(), name)
			if err != nil {
				return err
			}
			elems, err := c.GetSetElements(s)
			if err != nil {
				return err
			}
			n += len(elems)
		}
		return nil
	}))
	return n
}

// TestHold_simultaneousOpenRequired: the peer does not open what must be on SMC-R, neither while the
// pod's SYN is held nor while it waits for TCP to repeat it, also if the rules are changed
// meanwhile; then the verdict decides. A program that listens is reached, and so is a port that must not be on SMC-R.
func TestHold_simultaneousOpenRequired(t *testing.T) {
	for _, f := range families {
		for name, caught := range map[string]WhenCaught{"some": CaughtDrop, "all": CaughtDivert} {
			t.Run(f.name+"/"+name, func(t *testing.T) {
				h := newHeld(t, f)
				asked := make(chan synqueue.Conn, 16)
				var refuse atomic.Bool // what is asked for
				h.serve(t, HolderConfig{
					Table: synqueue.Config{Deadline: 300 * time.Millisecond},
					Late:  func(synqueue.Conn) synqueue.Decision { return synqueue.Drop },
					Ask: func(h *Holder, c synqueue.Conn, _ bool) {
						if refuse.Load() {
							_, _ = h.Answer(c, synqueue.Reset, synqueue.Finding{})
							return
						}
						asked <- c
					},
				}, QueueConfig{})
				const must, may = 4721, 4722 // of the peer
				cfg := testHoldConfig(t, f)
				cfg.WhenCaught = caught
				if caught == CaughtDrop {
					cfg.Required = []OutboundRule{{Prefix: f.all(), Ports: []PortRange{{must, must}}}}
				}
				h.install(t, cfg)
				own := func(port uint16) netip.AddrPort { return netip.AddrPortFrom(f.pod, port) }
				peer := func(port uint16) netip.AddrPort { return netip.AddrPortFrom(f.peer, port) }
				opens := func(from, to netip.AddrPort) (result chan error) {
					result = make(chan error, 1)
					ctx := t.Context()
					go func() {
						ctx, cancel := context.WithTimeout(ctx, waitLimit)
						defer cancel()
						c, err := DialInNS(ctx, h.pod, boundTo(from), netip.Addr{}, to)
						if c != nil {
							_ = c.Close()
						}
						result <- err
					}()
					return result
				}
				refused := func(when string) {
					t.Helper()
					if _, err := dialNS(t, h.peer, boundTo(peer(must)), own(4711)); !errors.Is(err, unix.ECONNREFUSED) {
						t.Errorf("%s: the peer's connect() came to %v, want that it is refused", when, err)
					}
				}
				result := opens(own(4711), peer(must))
				c := <-asked
				refused("held")
				waitFor(t, "the verdict", func() bool { return h.holder.Counters().Verdicts[synqueue.Drop] == 1 })
				refused("dropped")
				mustDo(t, h.rules.Update(cfg))
				refused("dropped, and the rules are new")
				if n := h.openings(t); n != 1 {
					t.Errorf("%d connections are noted, want one", n)
				}
				// Another one, which has a port of the pod on which nobody opens anything.
				l := listen(t, h.pod, nil, f.pod, 0)
				answer(t, l, "application")
				want(t, served(t, h.peer, boundTo(peer(must)), addrOf(l)), "application")

				refuse.Store(true)
				_, err := h.holder.Answer(c, synqueue.Reset, synqueue.Finding{})
				mustDo(t, err)
				if err := <-result; !errors.Is(err, unix.ECONNREFUSED) {
					t.Errorf("the pod's connect() came to %v, want that it is refused", err)
				}
				waitFor(t, "the end of the note", func() bool { return h.openings(t) == 0 })
				if caught != CaughtDrop {
					return
				}
				refuse.Store(false)
				result = opens(own(4712), peer(may))
				for c = range asked { // a repeated SYN to the other port may have been asked for, too
					if c.Dst == peer(may) {
						break
					}
				}
				p, err := dialNS(t, h.peer, boundTo(peer(may)), own(4712))
				mustDo(t, err)
				defer func() { _ = p.Close() }()
				mustDo(t, <-result)
			})
		}
	}
}

// TestHold_simultaneousOpenBefore: the peer's SYN came before the pod's own was noted, which is so for some
// microseconds, and here because nobody looks at SYNs that come. The answer to it is refused: neither
// is connected.
func TestHold_simultaneousOpenBefore(t *testing.T) {
	for _, f := range families {
		t.Run(f.name, func(t *testing.T) {
			h := newHeld(t, f)
			asked := make(chan synqueue.Conn, 1)
			h.serve(t, HolderConfig{
				Table: synqueue.Config{Deadline: waitLimit},
				Ask:   func(_ *Holder, c synqueue.Conn, _ bool) { asked <- c },
			}, QueueConfig{})
			a, b := netip.AddrPortFrom(f.pod, 4711), netip.AddrPortFrom(f.peer, 4721)
			cfg := testHoldConfig(t, f)
			cfg.WhenCaught, cfg.Required = CaughtDrop, []OutboundRule{{Prefix: f.all()}}
			h.install(t, cfg)
			h.rules.conn.FlushChain(&nftables.Chain{Table: kubeTable(), Name: chainOpening})
			mustDo(t, h.rules.conn.Flush())
			result := make(chan error, 1)
			go func() {
				_, err := dialNS(t, h.pod, boundTo(a), b)
				result <- err
			}()
			<-asked
			if _, err := dialNS(t, h.peer, boundTo(b), a); !errors.Is(err, unix.ECONNREFUSED) {
				t.Errorf("the peer's connect() came to %v, want that it is refused", err)
			}
			if err := <-result; !errors.Is(err, unix.ECONNRESET) {
				t.Errorf("the pod's connect() came to %v, want a reset", err)
			}
		})
	}
}
