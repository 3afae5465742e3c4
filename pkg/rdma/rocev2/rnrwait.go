// SPDX-License-Identifier: Apache-2.0

package rocev2

import (
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// rnrForever is the RNR retry count that means without end.
const rnrForever = 7

// rnrWait is the wait that a peer without receive buffers asks for with an RNR NAK
// (IBTA 9.7.5.2.8): nothing is sent before its end.
type rnrWait struct {
	until time.Time // zero: no wait
	tries int       // RNR NAKs left until there is progress
	limit int       // of RNR NAKs, or rnrForever
}

// start takes the attributes of the queue pair.
func (w *rnrWait) start(attr *rdma.QPAttr) {
	w.limit = int(attr.RNRRetry)
	w.tries = w.limit
}

// isRunning reports whether the peer asked for a wait that was not found over by ended.
func (w *rnrWait) isRunning() bool { return !w.until.IsZero() }

// ended ends a wait whose time has come, and reports whether there is none now.
func (w *rnrWait) ended(now time.Time) bool {
	if !w.until.IsZero() && now.Before(w.until) {
		return false
	}
	w.until = time.Time{}
	return true
}

// retry uses up a try. It reports false if none is left.
func (w *rnrWait) retry() bool {
	if w.limit == rnrForever {
		return true
	}
	if w.tries == 0 {
		return false
	}
	w.tries--
	return true
}

// progress gives all tries back.
func (w *rnrWait) progress() { w.tries = w.limit }

// stop ends the wait.
func (w *rnrWait) stop() { w.until = time.Time{} }
