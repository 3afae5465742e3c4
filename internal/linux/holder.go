// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"context"
	"errors"
	"os"
	"sync"
	"time"

	"github.com/smcr-io/kube-smcr/internal/synqueue"
)

// HolderConfig is what a [Holder] is made of.
type HolderConfig struct {
	Marks HoldMarks
	Table synqueue.Config
	// Late is what becomes of a SYN that gets no answer in time or has no room. Nil: all pass.
	Late func(c synqueue.Conn) synqueue.Decision
	// Ask finds out where a connection can go, and calls Answer, also from inside. It must not
	// block. held tells whether the connection's SYN waits for the answer.
	Ask func(h *Holder, c synqueue.Conn, held bool)
}

// A Holder gives every packet in a queue a verdict: SYNs that of its table, and what is no SYN
// passes. Its methods may be called from several goroutines.
type Holder struct {
	cfg   HolderConfig
	queue *Queue
	ns    *NetNS

	mu       sync.Mutex // guards what is below, also while the kernel carries verdicts out
	table    *synqueue.Table
	verdicts *Verdicts
	asks     []synqueue.Action
	counters HolderCounters

	shownMu sync.Mutex     // guards shown
	shown   HolderCounters // for Counters
}

// HolderCounters count what a [Holder] did.
type HolderCounters struct {
	synqueue.Counters
	NotSYN  uint64 // packets that passed because they are no SYN
	Gone    uint64 // verdicts that came too late: the kernel had dropped the packet, or somebody else let it go
	Overrun uint64 // times that packets went on because the socket was full
	Broken  uint64 // messages of the kernel that could not be read
}

// Add adds what another [Holder] counted.
func (c *HolderCounters) Add(o HolderCounters) {
	c.Counters.Add(o.Counters)
	c.NotSYN += o.NotSYN
	c.Gone += o.Gone
	c.Overrun += o.Overrun
	c.Broken += o.Broken
}

// OpenHolder binds the first of our queues in ns that nobody has. Another agent that is about to
// end may have one, and another program may, too. Run serves it.
func OpenHolder(ns *NetNS, cfg HolderConfig) (*Holder, error) {
	for number := firstQueue; ; number++ {
		q, err := OpenQueue(ns, QueueConfig{Number: number})
		if err == nil {
			return newHolder(ns, q, cfg), nil
		}
		if !errors.Is(err, ErrQueueTaken) || number == firstQueue+numQueues-1 {
			return nil, err
		}
	}
}

func newHolder(ns *NetNS, q *Queue, cfg HolderConfig) *Holder {
	return &Holder{cfg: cfg, ns: ns, queue: q, table: synqueue.NewTable(cfg.Table), verdicts: q.NewVerdicts()}
}

// Number is the queue's, for [HoldConfig].
func (h *Holder) Number() uint16 { return h.queue.number }

// Keep gives a keeper a copy of the queue's socket, see [Keeper.Keep].
func (h *Holder) Keep(k *Keeper) (number uint32, err error) { return k.Keep(h.ns, h.queue) }

// Close unbinds the queue, unless a keeper has its socket. Run must have returned.
func (h *Holder) Close() error { return h.queue.Close() }

// Run gives verdicts until ctx ends, or the kernel gives an error, and then drains the queue, so that
// SYNs pass. The queue is left open.
func (h *Holder) Run(ctx context.Context) error {
	defer context.AfterFunc(ctx, h.queue.wake)()
	for ctx.Err() == nil {
		b, err := h.queue.Receive(ctx, h.wakeUp())
		if ctx.Err() != nil {
			break
		}
		if err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
			err = h.handle(time.Now(), b)
		}
		if err != nil {
			return errors.Join(err, h.queue.Drain())
		}
	}
	return h.queue.Drain()
}

// wakeUp is when there is something to do if nothing comes, or the zero time.
func (h *Holder) wakeUp() time.Time {
	h.mu.Lock()
	defer h.mu.Unlock()
	at, _ := h.table.Deadline()
	return at
}

// handle takes in what came; b is nil if it is only the time.
func (h *Holder) handle(now time.Time, b *QueueBatch) error {
	h.mu.Lock()
	if b != nil {
		h.counters.Broken += uint64(b.Broken)
		h.counters.Gone += uint64(len(b.Gone))
		if b.Overrun {
			h.counters.Overrun++
		}
		for i := range b.Packets {
			h.handlePacketLocked(now, &b.Packets[i])
		}
	}
	err := h.pollLocked(now)
	h.mu.Unlock()
	h.ask()
	return err
}

// ask asks what the table wants to know. Answers from inside may make the table ask for more.
func (h *Holder) ask() {
	for {
		h.mu.Lock()
		if len(h.asks) == 0 {
			h.mu.Unlock()
			return
		}
		a := h.asks[0]
		h.asks = append(h.asks[:0], h.asks[1:]...)
		h.mu.Unlock()
		h.cfg.Ask(h, a.Conn, a.Kind == synqueue.Ask)
	}
}

func (h *Holder) handlePacketLocked(now time.Time, p *QueuedPacket) {
	s, err := synqueue.ParseSYN(p.Payload)
	if err != nil {
		h.counters.NotSYN++
		h.verdicts.Accept(p.ID)
		return
	}
	late := synqueue.Pass
	if h.cfg.Late != nil {
		late = h.cfg.Late(s.Conn)
	}
	h.table.HandleSYN(now, p.ID, s, late)
}

// pollLocked carries out what the table says.
func (h *Holder) pollLocked(now time.Time) error {
	for a, ok := h.table.Poll(now); ok; a, ok = h.table.Poll(now) {
		mark, marked := h.cfg.Marks.Of(a.Decision)
		switch {
		case a.Kind != synqueue.GiveVerdict:
			h.asks = append(h.asks, a)
		case a.Decision == synqueue.Drop:
			h.verdicts.Drop(a.ID)
		case marked:
			h.verdicts.AcceptMarked(a.ID, mark)
		default:
			h.verdicts.Accept(a.ID)
		}
	}
	err := h.queue.Send(h.verdicts)
	h.shownMu.Lock()
	defer h.shownMu.Unlock()
	h.shown = h.counters
	h.shown.Counters = h.table.Counters()
	return err
}

// Answer decides about a connection for which Ask was called, as [synqueue.Table.Answer] does.
func (h *Holder) Answer(c synqueue.Conn, d synqueue.Decision, f synqueue.Finding) (wasHeld bool, err error) {
	h.mu.Lock()
	now := time.Now()
	wasHeld = h.table.Answer(now, c, d, f)
	err = h.pollLocked(now)
	h.mu.Unlock()
	h.ask()
	return wasHeld, err
}

// Forget forgets what was found out about destinations.
func (h *Holder) Forget() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.table.Forget()
}

// Counters are the counts since the holder was made. They do not wait for verdicts that are being sent: the kernel takes the
// packets through the rest of the namespace's rules meanwhile, which may be many.
func (h *Holder) Counters() HolderCounters {
	h.shownMu.Lock()
	defer h.shownMu.Unlock()
	return h.shown
}
