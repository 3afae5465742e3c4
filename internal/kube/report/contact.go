// SPDX-License-Identifier: Apache-2.0

package report

import (
	"cmp"
	"sync"
	"time"
)

// Contact is what a reporter knows of the API server.
type Contact struct {
	// Told says that the API server has had the SMCRNode as this agent wants it, once since
	// Run began.
	Told bool
	// Refused is why the API server does not take the SMCRNode, nil: it does, or was not asked.
	Refused error
	// Away is why the API server is not reached, nil: it is, or was not asked. Since says since when.
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
}

// outage is since when and why a caller does not reach the API server.
type outage struct {
	since time.Time // zero: it does
	err   error
}

func (c *contact) get() Contact {
	c.mu.Lock()
	defer c.mu.Unlock()
	out := Contact{Told: c.told, Refused: c.refused}
	for _, o := range c.away {
		if o.err != nil && (out.Away == nil || o.since.Before(out.Since)) {
			out.Away, out.Since = o.err, o.since
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
func (c *contact) found(who caller) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.away[who] = outage{}
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
	c.told, c.refused, c.away = false, nil, [callers]outage{}
}
