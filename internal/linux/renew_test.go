// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// generation is the number of the ruleset in force in ns. Each transaction makes another one.
func generation(t *testing.T, ns *NetNS) uint32 {
	t.Helper()
	var id uint32
	mustDo(t, ns.Do(func() error {
		c, err := netlink.Dial(unix.NETLINK_NETFILTER, nil)
		if err != nil {
			return err
		}
		defer c.Close()
		answers, err := c.Execute(netlink.Message{
			Header: netlink.Header{Type: unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_GETGEN, Flags: netlink.Request},
			Data:   make([]byte, nfgenSize),
		})
		if err != nil {
			return err
		}
		ad, err := netlink.NewAttributeDecoder(answers[0].Data[nfgenSize:])
		if err != nil {
			return err
		}
		ad.ByteOrder = binary.BigEndian
		for ad.Next() {
			if ad.Type() == unix.NFTA_GEN_ID {
				id = ad.Uint32()
			}
		}
		return ad.Err()
	}))
	if id == 0 {
		t.Fatal("no generation")
	}
	return id
}

// TestRedirect_renewsWithoutTransaction: a renewal waits for no transaction, since it is none, unless something in the
// pod keeps its packet from the rule.
func TestRedirect_renewsWithoutTransaction(t *testing.T) {
	const early = "type filter hook output priority -400; "
	for _, tt := range []struct {
		name, commands string
		transaction    bool
	}{
		{"alone", "", false},
		{"a firewall", "table inet f { chain o { type filter hook output priority 0; drop; }; }", false},
		{"nothing is tracked", "table inet f { chain o { " + early + "notrack; }; }", false},
		{"dropped before", "table inet f { chain o { " + early + "ip protocol udp drop; }; }", true},
		{"marked anew", "table inet f { chain o { " + early + "meta mark set 1; }; }", true},
		{"our chain emptied", "flush chain inet " + tableName + " " + chainRenew, true},
	} {
		for _, f := range families {
			t.Run(tt.name+"/"+f.name, func(t *testing.T) {
				const ttl = 2 * time.Second
				pod, r, _ := outbound(t, f, func(c *RedirectConfig) { c.FailOpenTTL = ttl })
				if tt.commands != "" {
					nft(t, pod, tt.commands)
				}
				waitFor(t, "an element that is to be renewed", func() bool { return aliveFor(t, pod) < ttl*2/3 })
				before := generation(t, pod)
				mustDo(t, r.Renew())
				if left := aliveFor(t, pod); left < ttl*2/3 {
					t.Errorf("diverts for another %v, want %v", left, ttl)
				}
				if by := generation(t, pod) != before; by != tt.transaction {
					t.Errorf("renewed by a transaction: %v, want %v", by, tt.transaction)
				}
			})
		}
	}
}

// aliveFor is how long the diversion lasts.
func aliveFor(t *testing.T, ns *NetNS) (left time.Duration) {
	t.Helper()
	mustDo(t, ns.Do(func() error {
		return eachElement(aliveSet(kubeTable()), func(e element) bool {
			left = max(left, e.expires)
			return true
		})
	}))
	return left
}

// TestRedirect_renewsOften: what expired and is not collected yet, and what changes of the table replaced, keeps no element from
// being added.
func TestRedirect_renewsOften(t *testing.T) {
	pod, r, _ := outbound(t, families[0], func(c *RedirectConfig) { c.FailOpenTTL = minFailOpenTTL })
	p, err := openPulse(pod, r.mark)
	mustDo(t, err)
	t.Cleanup(p.close)
	for range 20 {
		waitFor(t, "the end", func() bool { return aliveFor(t, pod) == 0 })
		sent := time.Now()
		if _, err := p.beat(); err != nil && time.Since(sent) < minFailOpenTTL/2 {
			t.Fatal(err)
		}
	}
	cfg := r.cfg
	cfg.FailOpenTTL = time.Minute
	for range 10 {
		mustDo(t, errors.Join(r.Renew(), r.Update(cfg)))
	}
	mustDo(t, r.Renew())
	if left := aliveFor(t, pod); left < cfg.FailOpenTTL/2 {
		t.Errorf("diverts for another %v, want %v", left, cfg.FailOpenTTL)
	}
}

// TestRedirect_renewsWithoutRoute: a packet that cannot be sent keeps no diversion from being renewed.
func TestRedirect_renewsWithoutRoute(t *testing.T) {
	const ttl = 2 * time.Second
	pod, r, _ := outbound(t, families[0], func(c *RedirectConfig) { c.FailOpenTTL = ttl })
	inNS(t, pod, "rule add pref 10 lookup local\nrule del pref 0\nrule add pref 5 to 127.0.0.1 unreachable\n", "ip", "-batch", "-")
	waitFor(t, "an element that is to be renewed", func() bool { return aliveFor(t, pod) < ttl*2/3 })
	before := generation(t, pod)
	mustDo(t, r.Renew())
	if left := aliveFor(t, pod); left < ttl*2/3 || generation(t, pod) == before {
		t.Errorf("diverts for another %v, want %v by a transaction", left, ttl)
	}
	inNS(t, pod, "", "ip", "rule", "del", "pref", "5")
	before = generation(t, pod)
	mustDo(t, r.Renew())
	if generation(t, pod) != before {
		t.Error("still renewed by a transaction")
	}
}

// TestRedirect_renewsMeanwhile: who has the diversion's mutex for a transaction that waits does not keep a renewal.
func TestRedirect_renewsMeanwhile(t *testing.T) {
	_, r, _ := outbound(t, families[0], nil)
	r.mu.Lock()
	defer r.mu.Unlock()
	done := make(chan error, 1)
	go func() {
		_, err := r.Caught()
		done <- errors.Join(err, r.Renew())
	}()
	select {
	case err := <-done:
		mustDo(t, err)
	case <-time.After(10 * time.Second):
		t.Error("a renewal waits for a transaction")
	}
}

// TestRedirect_renewsBesideTransaction: while a transaction waits, what it would renew is renewed.
func TestRedirect_renewsBesideTransaction(t *testing.T) {
	const ttl = 2 * time.Second
	pod, r, _ := outbound(t, families[0], func(c *RedirectConfig) { c.FailOpenTTL = ttl })
	begin := time.Now()
	mustDo(t, r.renewMeanwhile(ttl, func() error {
		waitFor(t, "the TTL", func() bool { return time.Since(begin) > 3*ttl/2 })
		if left := aliveFor(t, pod); left == 0 {
			t.Error("the diversion has ended")
		}
		return r.renewLocked(time.Hour)
	}))
	waitFor(t, "the TTL", func() bool { return time.Since(begin) > 2*ttl }) // nothing renews any more
	if left := aliveFor(t, pod); left < time.Hour/2 {
		t.Errorf("diverts for another %v, want %v", left, time.Hour)
	}
}

// TestRedirect_endedIsNotRenewed: neither a removed redirection nor one that was left to a successor is renewed by the agent
// that gave it up.
func TestRedirect_endedIsNotRenewed(t *testing.T) {
	for _, tt := range []struct {
		name string
		end  func(*Redirect) error
	}{
		{"removed", (*Redirect).Remove},
		{"released", func(r *Redirect) error { return r.Release(0) }},
		{"closed", (*Redirect).Close},
	} {
		t.Run(tt.name, func(t *testing.T) {
			pod, r, _ := outbound(t, families[0], nil)
			mustDo(t, tt.end(r))
			before := aliveFor(t, pod)
			if err := r.Renew(); !errors.Is(err, ErrClosed) {
				t.Errorf("renew: %v, want %v", err, ErrClosed)
			}
			if left := aliveFor(t, pod); left > before {
				t.Errorf("diverts for another %v, %v before", left, before)
			}
		})
	}
}

// TestRedirect_afterSetWithoutPackets: the table of an earlier version, whose set "alive" takes no element from a rule, is
// followed by one whose does, also where the table is changed in place.
func TestRedirect_afterSetWithoutPackets(t *testing.T) {
	for _, f := range families {
		t.Run(f.name, func(t *testing.T) {
			h := newHeld(t, f)
			mustDo(t, h.pod.Do(func() error {
				c, err := newNFT()
				if err != nil {
					return err
				}
				table := c.AddTable(kubeTable())
				alive := &nftables.Set{Table: table, Name: setAlive, KeyType: nftables.TypeInetProto, HasTimeout: true}
				return errors.Join(c.AddSet(alive, aliveElement(time.Hour)), c.Flush(), c.CloseLasting())
			}))
			h.install(t, testHoldConfig(t, f))
			before := generation(t, h.pod)
			mustDo(t, h.rules.Renew())
			if generation(t, h.pod) != before {
				t.Error("renewed by a transaction")
			}
			mustDo(t, h.rules.Bypass(netip.AddrPortFrom(f.peer, 1), time.Hour))
			mustDo(t, h.rules.Update(testHoldConfig(t, f)))
			mustDo(t, h.rules.Renew())
		})
	}
}
