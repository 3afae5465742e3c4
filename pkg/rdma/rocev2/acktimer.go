// SPDX-License-Identifier: Apache-2.0

package rocev2

import (
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// ackTimer is the ACK timer of IBTA 9.7.6.1.3: after a time without progress everything
// outstanding is sent again, until no retry is left.
type ackTimer struct {
	at      time.Time // due; zero: does not run
	timeout time.Duration
	retries int // left until there is progress
	limit   int // of retries
}

// start takes the attributes of the queue pair.
func (a *ackTimer) start(attr *rdma.QPAttr) {
	a.timeout, a.limit = rdma.ACKTimeout(attr.Timeout), int(attr.RetryCount)
	a.retries = a.limit
}

// run starts the timer if it does not run.
func (a *ackTimer) run(now time.Time) {
	if a.at.IsZero() && a.timeout != 0 {
		// From one retry to the next more patience, within the four times the
		// timeout that the standard allows: who does not answer may be a program
		// that gets no processor for a while, and eight tries in a row find it so.
		a.at = now.Add(a.timeout << min(a.limit-a.retries, maxTimeoutShift))
	}
}

// progress stops the timer and gives all retries back.
func (a *ackTimer) progress() {
	a.retries = a.limit
	a.at = time.Time{}
}

// due reports whether the timer runs and its time has come.
func (a *ackTimer) due(now time.Time) bool { return !a.at.IsZero() && !now.Before(a.at) }

// retry stops the timer and uses up a retry. It reports false if none is left.
func (a *ackTimer) retry() bool {
	a.at = time.Time{}
	if a.retries == 0 {
		return false
	}
	a.retries--
	return true
}

// stop stops the timer.
func (a *ackTimer) stop() { a.at = time.Time{} }
