// SPDX-License-Identifier: Apache-2.0

package scrape

import (
	"net/netip"
	"sync"
	"time"
)

// A rate is how often something may happen: once an interval, burst times at once.
type rate struct {
	interval time.Duration
	burst    int
}

// take says whether the event may happen now. due is what the last call returned as next,
// zero at first: the time from which on the full burst is possible again.
func (r rate) take(due, now time.Time) (next time.Time, ok bool) {
	if due.Before(now) {
		due = now
	}
	if due.Sub(now) > time.Duration(r.burst-1)*r.interval {
		return due, false
	}
	return due.Add(r.interval), true
}

// sources bounds how often unknown tokens are reviewed by the API server, for one source
// and for all. A source from which a token was allowed lately is bound by its own rate
// only, so that other sources cannot keep it from being reviewed.
type sources struct {
	mu   sync.Mutex // guards what is below
	each map[netip.Prefix]time.Time
	all  time.Time
}

func newSources() *sources { return &sources{each: map[netip.Prefix]time.Time{}} }

// take says whether an unknown token of a source may be reviewed now.
func (s *sources) take(from netip.Prefix, trusted bool, now time.Time) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	own, ok := sourceReviews.take(s.each[from], now)
	if !ok {
		return false
	}
	if !trusted {
		all, ok := allReviews.take(s.all, now)
		if !ok {
			return false
		}
		s.all = all
	}
	if _, there := s.each[from]; !there && len(s.each) >= maxSources {
		s.forget(now)
	}
	s.each[from] = own
	return true
}

// forget makes room for one more source. It drops the sources that have their full burst
// again; if there are none, the one that will have it soonest.
func (s *sources) forget(now time.Time) {
	var soonest netip.Prefix
	for from, due := range s.each {
		if !due.After(now) {
			delete(s.each, from)
			continue
		}
		if first, there := s.each[soonest]; !there || due.Before(first) {
			soonest = from
		}
	}
	if len(s.each) >= maxSources {
		delete(s.each, soonest)
	}
}

// sourceOf is the source that an address belongs to: an IPv4 address, or the /64 network of
// an IPv6 address, as one host can have all addresses of it. If remote is no address, the
// result is the invalid prefix, which counts as a source too.
func sourceOf(remote string) netip.Prefix {
	ap, err := netip.ParseAddrPort(remote)
	if err != nil {
		return netip.Prefix{}
	}
	addr := ap.Addr().Unmap().WithZone("")
	bits := addr.BitLen()
	if addr.Is6() && !addr.IsLinkLocalUnicast() {
		bits = ipv6Source
	}
	return netip.PrefixFrom(addr, bits).Masked()
}
