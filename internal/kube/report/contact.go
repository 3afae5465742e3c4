// SPDX-License-Identifier: Apache-2.0

package report

import (
	"cmp"
	"sync"
	"time"
)

// Contact is what a reporter knows of the API server.
type Contact struct {
	// Told says that the API server has had the SMCRNode as this agent wants it at least once
	// since Run began.
	Told bool
	// Refused is why the API server does not take the SMCRNode; nil: it takes it, or was not
	// asked.
	Refused error
	// Away is why the API server is not reached, and Since since when; nil: it is reached, or
	// was not asked.
	Away  error
	Since time.Time
}

// Contact returns what the reporter knows of the API server now. Any goroutine may call it.
func (r *Reporter) Contact() Contact { return r.contact.get() }

// A caller is a part of a reporter that calls the API server by connections of its own.
type caller uint8

const (
	callerReports caller = iota
	callerLease
	callers
)

// contact keeps a Contact. Its methods may be called by any goroutine.
type contact struct {
	mu      sync.Mutex // guards what is below
	told    bool
	refused error
	away    [callers]outage
	over    *pastOutage // nil: none that is still to be told
}

// outage is since when and why the API server is not reached.
type outage struct {
	since time.Time
	err   error // nil: it is reached
}

// pastOutage is an outage that is over.
type pastOutage struct {
	outage
	took time.Duration
}

func (c *contact) get() Contact {
	c.mu.Lock()
	defer c.mu.Unlock()
	o := c.longest()
	return Contact{Told: c.told, Refused: c.refused, Away: o.err, Since: o.since}
}

// longest is the longest outage of those of all callers.
func (c *contact) longest() (out outage) {
	for _, o := range c.away {
		if o.err != nil && (out.err == nil || o.since.Before(out.since)) {
			out = o
		}
	}
	return out
}

// lost notes that a caller got no answer.
func (c *contact) lost(who caller, err error, now time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	o := &c.away[who]
	o.since, o.err = cmp.Or(o.since, now), err
}

// found notes that a caller got an answer.
func (c *contact) found(who caller, now time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	was := c.longest()
	c.away[who] = outage{}
	if took := now.Sub(was.since); was.err != nil && c.longest().err == nil && took >= outageNoted {
		c.over = &pastOutage{was, took}
	}
}

// past returns an outage that is over, once; nil if there was none.
func (c *contact) past() *pastOutage {
	c.mu.Lock()
	defer c.mu.Unlock()
	o := c.over
	c.over = nil
	return o
}

// tell notes that the SMCRNode is there as it is wanted.
func (c *contact) tell() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.told, c.refused = true, nil
}

// refuse notes that the API server does not take the SMCRNode.
func (c *contact) refuse(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.refused = err
}

// reset forgets everything: Run begins anew.
func (c *contact) reset() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.told, c.refused, c.away, c.over = false, nil, [callers]outage{}, nil
}
