// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"syscall"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// Messages and attributes of linux/netfilter/nfnetlink_queue.h, which x/sys lacks.
const (
	queuePacket       = unix.NFNL_SUBSYS_QUEUE << 8
	queueVerdict      = unix.NFNL_SUBSYS_QUEUE<<8 | 1
	queueConfig       = unix.NFNL_SUBSYS_QUEUE<<8 | 2
	queueVerdictBatch = unix.NFNL_SUBSYS_QUEUE<<8 | 3

	attrPacketHeader  = 1  // id, protocol, hook
	attrVerdictHeader = 2  // verdict, id
	attrMark          = 3  //
	attrPayload       = 10 //
	attrCapLen        = 13 // the size of the packet, if it is more than what was copied

	attrConfigCommand = 1 // command, 0, family
	attrConfigParams  = 2 // bytes to copy, mode
	attrConfigMaxLen  = 3
	attrConfigMask    = 4
	attrConfigFlags   = 5

	nfDrop   = 0
	nfAccept = 1

	nlaTypeMask = 1<<14 - 1 // without the flags of an attribute

	commandBind  = 1
	copyPacket   = 2
	flagFailOpen = 1 << 0
	flagGSO      = 1 << 2 // do not compute checksums for us: we only look
)

// ErrQueueTaken means that another socket has bound the queue.
var ErrQueueTaken = errors.New("queue is bound by another socket")

// QueueConfig says which packets a [Queue] gets, and what of them.
type QueueConfig struct {
	Number uint16
	// MaxLen is how many packets the kernel holds; further ones go on at once.
	// Default: DefaultQueueLen.
	MaxLen int
	// CopyBytes is what is copied of a packet. Default: DefaultQueueCopy.
	CopyBytes int
}

// A Queue is a netfilter queue of a network namespace: packets for which a rule says
// so wait in it for a verdict. One socket at a time has it. The kernel accepts packets
// at once for which there is no room in the queue or in its socket, and, if the
// rule has the flag "bypass", those that come while nobody has bound it. It drops
// those that wait when the socket is closed, and when anybody takes a base chain of any
// table out of the namespace.
//
// Receive is for one goroutine, the other methods for several.
type Queue struct {
	number uint16
	conn   *netlink.Conn
	raw    syscall.RawConn
	read   func(fd uintptr) bool // what Receive does with the socket, made once

	bufs    [queueBatch][]byte // for one message each
	sizes   [queueBatch]int
	got     int
	readErr error
	batch   QueueBatch

	mu       sync.Mutex // guards what is below
	write    func(fd uintptr)
	writing  []byte
	writeErr error
}

// A QueueBatch is what one call of [Queue.Receive] brought. It is valid until the
// next one.
type QueueBatch struct {
	Packets []QueuedPacket
	// Gone are packets that a verdict was given for and that were not in the queue any
	// more.
	Gone []uint32
	// Overrun: the socket was full, packets went on without a verdict.
	Overrun bool
	// Broken counts messages of the kernel that could not be read.
	Broken int
}

// A QueuedPacket waits for its verdict.
type QueuedPacket struct {
	ID      uint32
	Hook    uint8 // as in NF_INET_LOCAL_OUT
	Mark    uint32
	Payload []byte // from its IP header on
	Cut     bool   // Payload is not all of it
}

// OpenQueue binds a queue in ns. The error is [ErrQueueTaken] if somebody else has it,
// and a *FeatureError if the kernel has no queues.
func OpenQueue(ns *NetNS, cfg QueueConfig) (*Queue, error) {
	if cfg.MaxLen <= 0 {
		cfg.MaxLen = DefaultQueueLen
	}
	if cfg.CopyBytes <= 0 {
		cfg.CopyBytes = DefaultQueueCopy
	}
	q := &Queue{number: cfg.Number}
	for i := range q.bufs {
		q.bufs[i] = make([]byte, cfg.CopyBytes+queueHeaderRoom)
	}
	q.batch.Packets = make([]QueuedPacket, 0, queueBatch)
	err := ns.Do(func() (err error) {
		q.conn, err = netlink.Dial(unix.NETLINK_NETFILTER, nil)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("bind queue %d in %s: %w", cfg.Number, ns, feature("netfilter queues", "load the module nfnetlink", err))
	}
	q.raw, err = q.conn.SyscallConn()
	if err == nil {
		q.read, q.write = q.readSocket, q.writeSocket
		err = errors.Join(q.conn.SetReadBuffer(cfg.MaxLen*queuePacketBytes), q.conn.SetOption(netlink.CapAcknowledge, true))
	}
	if err == nil {
		err = q.configure(cfg)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("bind queue %d in %s: %w", cfg.Number, ns, err), q.conn.Close())
	}
	return q, nil
}

// configure binds the queue and says all about it in one message: between two, packets
// would be dropped.
func (q *Queue) configure(cfg QueueConfig) error {
	const ownSequence = 0 // no packet has this number
	b := appendQueueHeader(nil, queueConfig, q.number, ownSequence)
	binary.NativeEndian.PutUint16(b[6:], unix.NLM_F_REQUEST|unix.NLM_F_ACK)
	b = appendAttr(b, attrConfigCommand, []byte{commandBind, 0, 0, unix.AF_UNSPEC})
	b = appendAttr(b, attrConfigParams, append(be32(uint32(cfg.CopyBytes)), copyPacket))
	b = appendAttr(b, attrConfigMaxLen, be32(uint32(cfg.MaxLen)))
	b = appendAttr(b, attrConfigMask, be32(flagFailOpen|flagGSO))
	b = appendAttr(b, attrConfigFlags, be32(flagFailOpen|flagGSO))
	if err := q.send(end(b, 0)); err != nil {
		return err
	}
	if err := q.conn.SetReadDeadline(time.Now().Add(queueAnswerTime)); err != nil {
		return err
	}
	for {
		q.got, q.readErr = 0, nil
		if err := errors.Join(q.raw.Read(q.read), q.readErr); err != nil {
			return err
		}
		var early QueueBatch
		for i := range q.got {
			b := q.bufs[i][:q.sizes[i]]
			if len(b) >= nlHeaderSize+4 && binary.NativeEndian.Uint16(b[4:]) == unix.NLMSG_ERROR {
				switch code := unix.Errno(-int32(binary.NativeEndian.Uint32(b[nlHeaderSize:]))); code {
				case 0:
					err := q.acceptAll(early.Packets)
					return errors.Join(err, q.conn.SetReadDeadline(time.Time{}))
				case unix.EPERM, unix.EBUSY:
					return ErrQueueTaken
				default:
					return feature("netfilter queues", "load the module nfnetlink_queue (CONFIG_NETFILTER_NETLINK_QUEUE)", code)
				}
			}
			early.parse(b)
		}
		if err := q.acceptAll(early.Packets); err != nil { // before anybody can judge them
			return err
		}
	}
}

func (q *Queue) acceptAll(packets []QueuedPacket) error {
	if len(packets) == 0 {
		return nil
	}
	v := q.NewVerdicts()
	for _, p := range packets {
		v.Accept(p.ID)
	}
	return q.Send(v)
}

// Receive waits until there are packets or news about them, until ctx ends, or for so long:
// the error is os.ErrDeadlineExceeded then. The zero time is no limit.
func (q *Queue) Receive(ctx context.Context, until time.Time) (*QueueBatch, error) {
	if err := q.conn.SetReadDeadline(until); err != nil {
		return nil, fmt.Errorf("receive from queue %d: %w", q.number, err)
	}
	if err := ctx.Err(); err != nil { // before, or else wake ends the wait
		return nil, err
	}
	q.got, q.readErr = 0, nil
	if err := q.raw.Read(q.read); err != nil {
		return nil, fmt.Errorf("receive from queue %d: %w", q.number, err)
	}
	q.batch.Packets, q.batch.Gone = q.batch.Packets[:0], q.batch.Gone[:0]
	q.batch.Overrun, q.batch.Broken = false, 0
	if q.readErr != nil {
		if !errors.Is(q.readErr, unix.ENOBUFS) {
			return nil, fmt.Errorf("receive from queue %d: %w", q.number, q.readErr)
		}
		q.batch.Overrun = true
	}
	for i := range q.got {
		q.batch.parse(q.bufs[i][:q.sizes[i]])
	}
	return &q.batch, nil
}

// wake ends a Receive that waits. Who calls it ends that one's context before.
func (q *Queue) wake() { _ = q.conn.SetReadDeadline(time.Unix(1, 0)) }

// readSocket reads all messages that are there, each of which the kernel sends by
// itself. done is false if there is none.
func (q *Queue) readSocket(fd uintptr) (done bool) {
	for q.got < queueBatch {
		n, err := unix.Read(int(fd), q.bufs[q.got])
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case errors.Is(err, unix.EAGAIN):
			return q.got > 0
		case err != nil:
			q.readErr = err
			return true
		}
		q.sizes[q.got] = n
		q.got++
	}
	return true
}

// parse reads one message.
func (qb *QueueBatch) parse(b []byte) {
	if len(b) < nlHeaderSize+nfgenSize {
		qb.Broken++
		return
	}
	switch binary.NativeEndian.Uint16(b[4:]) {
	case unix.NLMSG_ERROR: // the answer to a verdict, whose sequence is the packet's number
		if binary.NativeEndian.Uint32(b[nlHeaderSize:]) != 0 {
			qb.Gone = append(qb.Gone, binary.NativeEndian.Uint32(b[8:]))
		}
		return
	case queuePacket:
	default:
		return
	}
	var p QueuedPacket
	known := false
	rest := b[nlHeaderSize+nfgenSize:]
	for len(rest) >= unix.SizeofNlAttr {
		size := int(binary.NativeEndian.Uint16(rest))
		kind := binary.NativeEndian.Uint16(rest[2:]) & nlaTypeMask
		if size < unix.SizeofNlAttr {
			break
		}
		cut := size > len(rest) // a message longer than our buffer
		value := rest[unix.SizeofNlAttr:min(size, len(rest))]
		switch {
		case kind == attrPacketHeader && len(value) >= 7:
			p.ID, p.Hook, known = binary.BigEndian.Uint32(value), value[6], true
		case kind == attrMark && len(value) >= 4:
			p.Mark = binary.BigEndian.Uint32(value)
		case kind == attrPayload:
			p.Payload, p.Cut = value, p.Cut || cut
		case kind == attrCapLen:
			p.Cut = true
		}
		rest = rest[min((size+unix.NLA_ALIGNTO-1)&^(unix.NLA_ALIGNTO-1), len(rest)):]
	}
	if !known { // nothing that a verdict could name
		qb.Broken++
		return
	}
	qb.Packets = append(qb.Packets, p)
}

// Verdicts collects verdicts for [Queue.Send].
type Verdicts struct {
	number uint16
	b      []byte
}

// NewVerdicts returns an empty collection, which can be used again and again.
func (q *Queue) NewVerdicts() *Verdicts { return &Verdicts{number: q.number} }

// Accept lets a packet go on.
func (v *Verdicts) Accept(id uint32) { v.add(id, nfAccept, 0) }

// AcceptMarked lets a packet go on with a mark, which chains see that come after the one
// that queued it.
func (v *Verdicts) AcceptMarked(id, mark uint32) { v.add(id, nfAccept, mark) }

// Drop ends a packet.
func (v *Verdicts) Drop(id uint32) { v.add(id, nfDrop, 0) }

func (v *Verdicts) add(id, verdict, mark uint32) {
	start := len(v.b)
	b := appendQueueHeader(v.b, queueVerdict, v.number, id)
	b = append(b, 0, 0, 0, 0)
	fixAttr(b[len(b)-unix.SizeofNlAttr:], 12, attrVerdictHeader)
	b = binary.BigEndian.AppendUint32(b, verdict)
	b = binary.BigEndian.AppendUint32(b, id)
	if mark != 0 {
		b = append(b, 0, 0, 0, 0)
		fixAttr(b[len(b)-unix.SizeofNlAttr:], 8, attrMark)
		b = binary.BigEndian.AppendUint32(b, mark)
	}
	v.b = end(b, start)
}

// Reset empties the collection.
func (v *Verdicts) Reset() { v.b = v.b[:0] }

// Empty tells whether there is nothing to send.
func (v *Verdicts) Empty() bool { return len(v.b) == 0 }

// Send gives the verdicts, in one system call, and empties the collection. For a packet
// that is not in the queue any more the news come by Receive.
func (q *Queue) Send(v *Verdicts) error {
	if v.Empty() {
		return nil
	}
	err := q.send(v.b)
	v.Reset()
	if err != nil {
		return fmt.Errorf("give verdicts in queue %d: %w", q.number, err)
	}
	return nil
}

func (q *Queue) send(b []byte) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.writing = b
	err := q.raw.Control(q.write)
	q.writing = nil
	return errors.Join(err, q.writeErr)
}

// writeSocket sends to the kernel, which takes a message while the call lasts.
func (q *Queue) writeSocket(fd uintptr) {
	_, q.writeErr = unix.Write(int(fd), q.writing)
}

// ReleaseAll accepts every packet that waits.
func (q *Queue) ReleaseAll() error {
	if err := q.send(appendReleaseAll(nil, q.number)); err != nil {
		return fmt.Errorf("release queue %d: %w", q.number, err)
	}
	return nil
}

// appendReleaseAll appends verdicts for all packets of a queue. A batch verdict is for
// the packets up to a number, and the kernel compares numbers as in a circle: two
// verdicts half a circle apart are for every number.
func appendReleaseAll(b []byte, queue uint16) []byte {
	for _, last := range []uint32{1<<31 - 1, 1<<32 - 1} {
		start := len(b)
		b = appendQueueHeader(b, queueVerdictBatch, queue, last)
		b = appendAttr(b, attrVerdictHeader, append(be32(nfAccept), be32(last)...))
		b = end(b, start)
	}
	return b
}

// Drain accepts every packet that waits and all that come from now on. Before Close it
// keeps the kernel from dropping them.
func (q *Queue) Drain() error {
	if err := q.send(appendDrain(nil, q.number)); err != nil {
		return fmt.Errorf("drain queue %d: %w", q.number, err)
	}
	return nil
}

// appendDrain appends that the queue has no room, and verdicts for all packets in it.
func appendDrain(b []byte, queue uint16) []byte {
	start := len(b)
	b = appendQueueHeader(b, queueConfig, queue, 0)
	b = end(appendAttr(b, attrConfigMaxLen, be32(0)), start)
	return appendReleaseAll(b, queue)
}

// Close unbinds the queue unless another process has its socket, too. The kernel drops
// what waits.
func (q *Queue) Close() error { return q.conn.Close() }

// appendQueueHeader appends the headers of a message, whose length end fills in.
func appendQueueHeader(b []byte, kind, queue uint16, sequence uint32) []byte {
	b = append(b, 0, 0, 0, 0)
	b = binary.NativeEndian.AppendUint16(b, kind)
	b = binary.NativeEndian.AppendUint16(b, unix.NLM_F_REQUEST)
	b = binary.NativeEndian.AppendUint32(b, sequence)
	b = binary.NativeEndian.AppendUint32(b, 0)
	b = append(b, unix.AF_UNSPEC, 0)
	return binary.BigEndian.AppendUint16(b, queue)
}

// end fills in the length of the message that begins at start.
func end(b []byte, start int) []byte {
	binary.NativeEndian.PutUint32(b[start:], uint32(len(b)-start))
	return b
}

func appendAttr(b []byte, kind uint16, value []byte) []byte {
	b = append(b, 0, 0, 0, 0)
	fixAttr(b[len(b)-unix.SizeofNlAttr:], unix.SizeofNlAttr+len(value), kind)
	b = append(b, value...)
	for len(b)%unix.NLA_ALIGNTO != 0 {
		b = append(b, 0)
	}
	return b
}

func fixAttr(header []byte, size int, kind uint16) {
	binary.NativeEndian.PutUint16(header, uint16(size))
	binary.NativeEndian.PutUint16(header[2:], kind)
}

func be32(v uint32) []byte { return binary.BigEndian.AppendUint32(nil, v) }
