// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	"errors"
	"fmt"

	"github.com/smcr-io/kube-smcr/pkg/smcr/linkgroup"
)

// QueuePairAccount is charged for the queue pairs of a stack, one for each link. A device
// has a limited number of them, which stacks may have to share. Its methods are called
// while the stack's state is held: they must neither block nor call methods of the stack
// or its connections.
type QueuePairAccount interface {
	// TakeQP charges one queue pair of the device with this name. It reports false if
	// there is none left for the stack.
	TakeQP(device string) bool
	// GiveQP takes a charge back.
	GiveQP(device string)
}

// errQueuePairs means that the account has no queue pair for a link.
var errQueuePairs = errors.New("smcr: the stack has its share of the device's queue pairs")

// queuePairError is why there is no queue pair for a link over a device: errQueuePairs, or what the device lacks.
type queuePairError struct {
	rnic *rnic
	err  error
}

func (e *queuePairError) Error() string { return fmt.Sprintf("%v: %s", e.err, e.rnic.dev.Name()) }
func (e *queuePairError) Unwrap() error { return e.err }

// charge takes a link's queue pair from the account.
//
// A server offers its client a second link at first contact, which may be over the same
// device. So the first link is had only if there is a queue pair more: now its group can
// be given up, and idle groups can give way for it.
func (l *link) charge() error {
	s := l.g.s
	if s.cfg.QueuePairs == nil {
		return nil
	}
	if !s.takeQP(l.rnic) {
		return &queuePairError{l.rnic, errQueuePairs}
	}
	l.charged = true
	if l.g.lg == nil && l.g.role == linkgroup.Server {
		if !s.takeQP(l.rnic) {
			return &queuePairError{l.rnic, errQueuePairs}
		}
		s.cfg.QueuePairs.GiveQP(l.rnic.dev.Name())
	}
	return nil
}

// takeQP takes a queue pair of a device from the account. Links that linger make place for
// it.
func (s *Stack) takeQP(r *rnic) bool {
	for !s.cfg.QueuePairs.TakeQP(r.dev.Name()) {
		if !s.lingering.makePlaceOn(r) {
			return false
		}
	}
	return true
}

// discharge gives the queue pair back.
func (l *link) discharge() {
	if l.charged {
		l.charged = false
		l.g.s.cfg.QueuePairs.GiveQP(l.rnic.dev.Name())
	}
}
