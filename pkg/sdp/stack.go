// SPDX-License-Identifier: Apache-2.0

package sdp

import (
	"errors"
	"fmt"
	"sync"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/cm"
)

// Stack is SDP on one device. It owns the device's context, the domain of all [Buffer]s, and its connections.
type Stack struct {
	cfg Config
	ctx rdma.Context
	pd  rdma.PD // of Buffers; each connection has one of its own
	// adapter is the device, if it connects queue pairs itself.
	adapter cm.Device
	events  sync.WaitGroup
	wg      sync.WaitGroup // connections that have something of the device

	mu     sync.Mutex // guards what follows
	conns  map[*Conn]struct{}
	qps    map[rdma.QPN]*Conn
	copies int // calls of ReadFrom and WriteTo, whose Buffers others read and write
	closed bool
	left   bool // Close has left the context to the last of the copies
}

// NewStack opens the device. The device stays the caller's, and is to be closed after the stack.
func NewStack(cfg Config) (*Stack, error) {
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("new SDP stack: %w: %w", rdma.ErrInvalid, err)
	}
	s := &Stack{cfg: cfg.withDefaults(), conns: make(map[*Conn]struct{}), qps: make(map[rdma.QPN]*Conn)}
	s.adapter = adapterOf(&s.cfg)
	var err error
	if s.ctx, err = s.cfg.Device.Open(); err != nil {
		return nil, fmt.Errorf("new SDP stack: open %q: %w", cfg.Device.Name(), err)
	}
	if s.pd, err = s.ctx.AllocPD(); err != nil {
		return nil, fmt.Errorf("new SDP stack: %w", errors.Join(err, s.ctx.Close()))
	}
	s.events.Go(s.watch)
	return s, nil
}

// Close aborts the connections that their program has not closed, waits until all have ended, and closes the context with all Buffers.
// Whatever the peers do, connections end within 2 seconds, and those that were closed before, and still send what was written, within 10
// seconds more. Close does not wait for a [Conn.ReadFrom] or [Conn.WriteTo] whose reader or writer still has a Buffer: the last of these
// closes the context, when it returns.
func (s *Stack) Close() error {
	s.mu.Lock()
	s.closed = true
	conns := make([]*Conn, 0, len(s.conns))
	for c := range s.conns {
		conns = append(conns, c)
	}
	s.mu.Unlock()
	for _, c := range conns {
		c.abortUnlessClosed()
	}
	s.wg.Wait()
	s.mu.Lock()
	s.left = s.copies > 0
	left := s.left
	s.mu.Unlock()
	if left {
		return nil
	}
	return s.closeContext()
}

func (s *Stack) closeContext() error {
	err := s.ctx.Close()
	s.events.Wait()
	return err
}

// beginCopy keeps the context, and so the memory of Buffers, until endCopy. It reports false if the stack is closed.
func (s *Stack) beginCopy() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return false
	}
	s.copies++
	return true
}

func (s *Stack) endCopy() {
	s.mu.Lock()
	s.copies--
	last := s.left && s.copies == 0
	s.mu.Unlock()
	if last {
		_ = s.closeContext() // Close has returned
	}
}

// Conns returns the connections that still have something of the device: those that their program has not closed, or that have not ended.
func (s *Stack) Conns() []*Conn {
	s.mu.Lock()
	defer s.mu.Unlock()
	conns := make([]*Conn, 0, len(s.conns))
	for c := range s.conns {
		conns = append(conns, c)
	}
	return conns
}

// watch gives the events of queue pairs to their connections.
func (s *Stack) watch() {
	for ev := range s.ctx.Events() {
		switch ev.Kind {
		case rdma.EventDisconnected, rdma.EventQPFatal, rdma.EventPathDown:
			if c := s.find(ev.QPN); c != nil {
				c.handleEvent(ev)
			}
		case rdma.EventDeviceFatal:
			for _, c := range s.Conns() {
				c.handleEvent(ev)
			}
		case rdma.EventPortActive, rdma.EventPortDown, rdma.EventGIDChange: // a queue pair that fails for it says so
		}
	}
}

func (s *Stack) find(n rdma.QPN) *Conn {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.qps[n]
}

// add enters a new connection, which has nothing of the device yet, until remove.
func (s *Stack) add(c *Conn) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return fmt.Errorf("SDP stack: %w", rdma.ErrClosed)
	}
	s.conns[c] = struct{}{}
	s.wg.Add(1)
	return nil
}

// named enters the number of a connection's queue pair: events of this number are the connection's, until unnamed.
func (s *Stack) named(n rdma.QPN, c *Conn) {
	s.mu.Lock()
	s.qps[n] = c
	s.mu.Unlock()
}

// unnamed ends named.
func (s *Stack) unnamed(n rdma.QPN) {
	s.mu.Lock()
	delete(s.qps, n)
	s.mu.Unlock()
}

// remove ends add: the connection has nothing of the device any more.
func (s *Stack) remove(c *Conn) {
	s.mu.Lock()
	delete(s.conns, c)
	s.mu.Unlock()
	s.wg.Done()
}
