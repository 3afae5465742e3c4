// SPDX-License-Identifier: Apache-2.0

package rocev2

import "time"

// probeTimer repeats early what gets no answer. IBTA's ACK timeout is a
// constant that has to outlast the slowest fabric (Linux's SMC-R asks for
// 134 ms), far too long to find out that the last packet of a burst was lost.
// The probe comes after a few measured round-trip times, goes back like the
// timeout does, but does not use up a retry.
type probeTimer struct {
	at       time.Time // due; zero: does not run
	interval time.Duration
	srtt     time.Duration // 0: not measured
	rttvar   time.Duration

	// One packet is measured at a time, and never one that was sent again.
	measuring bool
	psn       uint64 // acknowledged when una is beyond
	since     time.Time
}

const (
	// minProbe is well above the time that a busy host takes to schedule
	// the peer; a probe in vain costs a window of duplicates.
	minProbe = 5 * time.Millisecond
	maxProbe = time.Second
)

// measure starts a measurement with the packet before nxt, sent now.
func (p *probeTimer) measure(now time.Time, nxt uint64) {
	if !p.measuring {
		p.measuring, p.psn, p.since = true, nxt, now
	}
}

// run starts the timer if it does not run.
func (p *probeTimer) run(now time.Time) {
	if p.at.IsZero() && p.interval != 0 {
		p.at = now.Add(p.interval)
	}
}

// acked notes that una moved to psn.
func (p *probeTimer) acked(now time.Time, una uint64) {
	p.at = time.Time{}
	if !p.measuring || una < p.psn {
		if p.srtt != 0 {
			p.interval = p.base()
		}
		return
	}
	p.measuring = false
	rtt := now.Sub(p.since)
	if p.srtt == 0 {
		p.srtt, p.rttvar = rtt, rtt/2
	} else {
		// RFC 6298 section 2.
		p.rttvar += ((rtt - p.srtt).Abs() - p.rttvar) / 4
		p.srtt += (rtt - p.srtt) / 8
	}
	p.interval = p.base()
}

func (p *probeTimer) base() time.Duration {
	return min(max(p.srtt+4*p.rttvar, minProbe), maxProbe)
}

func (p *probeTimer) due(now time.Time) bool { return !p.at.IsZero() && !now.Before(p.at) }

// backOff doubles the interval after a probe.
func (p *probeTimer) backOff() { p.interval = min(2*p.interval, maxProbe) }

// stop stops the timer, and the measurement: it would take the wrong packet.
func (p *probeTimer) stop() {
	p.measuring = false
	p.at = time.Time{}
}
