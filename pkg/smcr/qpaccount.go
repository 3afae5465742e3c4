// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/smcr-io/kube-smcr/pkg/smcr/linkgroup"
)

// QueuePairAccount is charged for the queue pairs of a stack, one for each link. A device
// has a limited number of them, which stacks may have to share. Its methods are called
// while the stack's state is held: they must neither block nor call methods of the stack
// or its connections.
type QueuePairAccount interface {
	// TakeQP charges one queue pair of the device with this name, for a link group with a
	// client as in [MemoryAccount]. An error says why there is none for the stack, [ErrClientShare]
	// that there is for other clients.
	TakeQP(client netip.Addr, device string) error
	// GiveQP takes a charge back.
	GiveQP(client netip.Addr, device string)
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
	client := l.g.client()
	if err := s.takeQP(client, l.rnic); err != nil {
		return err
	}
	l.charged = true
	if l.offersSecond() {
		if err := s.takeQP(client, l.rnic); err != nil {
			return err
		}
		s.cfg.QueuePairs.GiveQP(client, l.rnic.dev.Name())
	}
	return nil
}

// offersSecond reports whether the server will offer a second link behind this one, which is of no group yet.
func (l *link) offersSecond() bool { return l.g.lg == nil && l.g.role == linkgroup.Server }

// share returns ErrClientShare if the client has all queue pairs of the device that it may have: then only its own groups
// make place for it, also where memory is short before that matters.
func (l *link) share() (err error) {
	account, client, device := l.g.s.cfg.QueuePairs, l.g.client(), l.rnic.dev.Name()
	if account == nil {
		return nil
	}
	want, had := 1, 0
	if l.offersSecond() {
		want = 2
	}
	for had < want {
		if err = account.TakeQP(client, device); err != nil {
			break
		}
		had++
	}
	for range had {
		account.GiveQP(client, device)
	}
	if errors.Is(err, ErrClientShare) {
		return ErrClientShare
	}
	return nil
}

// takeQP takes a queue pair of a device from the account. Links that linger make place for
// it: the client's own, where the client has its share.
func (s *Stack) takeQP(client netip.Addr, r *rnic) error {
	for {
		err := s.cfg.QueuePairs.TakeQP(client, r.dev.Name())
		if err == nil {
			return nil
		}
		own := errors.Is(err, ErrClientShare)
		if !s.lingering.makePlace(func(l *link) bool { return l.rnic == r && (!own || l.g.client() == client) }) {
			return &queuePairError{r, fmt.Errorf("%w: %w", errQueuePairs, err)}
		}
	}
}

// discharge gives the queue pair back.
func (l *link) discharge() {
	if l.charged {
		l.charged = false
		l.g.s.cfg.QueuePairs.GiveQP(l.g.client(), l.rnic.dev.Name())
	}
}
