// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// A Keeper is the agent's end of the process that keeps its queues: see [KeepQueues]. If the process reads
// nothing, Keep and Release return an error that is [os.ErrDeadlineExceeded] after keeperReadPatience.
type Keeper struct {
	mu   sync.Mutex // makes each message whole
	conn *net.UnixConn
	next uint32
}

// NewKeeper makes the pair of sockets. child is for the keeper's process, as its only
// descriptor besides the standard ones. The caller closes child once the process runs.
func NewKeeper() (k *Keeper, child *os.File, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, os.NewSyscallError("socketpair", err)
	}
	child = os.NewFile(uintptr(fds[1]), "keeper")
	own := os.NewFile(uintptr(fds[0]), "keeper")
	c, err := net.FileConn(own)
	if err = errors.Join(err, own.Close()); err != nil {
		return nil, nil, errors.Join(fmt.Errorf("connect to the keeper of queues: %w", err), child.Close())
	}
	return &Keeper{conn: c.(*net.UnixConn)}, child, nil
}

// Keep gives the keeper's process a copy of the queue's socket. Release takes the copy back, by
// the number that Keep returns.
func (k *Keeper) Keep(ns *NetNS, q *Queue) (number uint32, err error) {
	var list *os.File // what /proc says of this namespace's queues
	err = ns.Do(func() (err error) {
		list, err = os.Open(queueList)
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("keep queue %d in %s: %w", q.number, ns, err)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.next++
	b := binary.BigEndian.AppendUint32([]byte{keeperAdd}, k.next)
	b = binary.BigEndian.AppendUint16(b, q.number)
	cerr := q.raw.Control(func(fd uintptr) {
		if err = k.conn.SetWriteDeadline(time.Now().Add(keeperReadPatience)); err == nil {
			_, _, err = k.conn.WriteMsgUnix(b, unix.UnixRights(int(fd), int(list.Fd())), nil)
		}
	})
	if err = errors.Join(cerr, err, list.Close()); err != nil {
		return 0, fmt.Errorf("keep queue %d in %s: %w", q.number, ns, err)
	}
	return k.next, nil
}

// Release takes the copy back, so that closing the queue unbinds it.
func (k *Keeper) Release(number uint32) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	err := k.conn.SetWriteDeadline(time.Now().Add(keeperReadPatience))
	if err == nil {
		_, err = k.conn.Write(binary.BigEndian.AppendUint32([]byte{keeperRemove}, number))
	}
	if err != nil {
		return fmt.Errorf("take a queue back from its keeper: %w", err)
	}
	return nil
}

// Close ends the process, which lets all waiting packets go.
func (k *Keeper) Close() error { return k.conn.Close() }

// What a Keeper tells the process.
const (
	keeperAdd    = 1
	keeperRemove = 2
)

const queueList = "/proc/thread-self/net/netfilter/nfnetlink_queue"

// kept is a queue in the keeper's process.
type kept struct {
	queue  uint16
	socket int
	list   *os.File
	marks  []keptMark
	next   time.Time // not before is the list read again
}

// keptMark is the number of the last packet that was queued up to a time.
type keptMark struct {
	at time.Time
	id uint32
}

// KeepQueues is the process that keeps the queues of an agent. KeepQueues lets no packet
// wait for more than [KeeperPatience], whatever the agent does, and lets all packets go when
// the agent ends. TCP does not repeat a SYN whose first copy is still in a queue. So without
// the keeper a SYN in the queue of a stopped agent would wait for as long as its application
// waits. The keeper needs no sign of life from the agent: it reads the kernel's own list,
// which has the number of the last packet of each queue.
//
// It returns when the agent's end of the socket is closed, and only then drains the queues: one
// that is drained while the agent serves it holds nothing any more. report gets what is wrong with
// a single queue. The process has nothing else to do: it should be small, and not be stopped
// together with the agent.
func KeepQueues(socket *os.File, report func(error)) error {
	c, err := net.FileConn(socket)
	if err = errors.Join(err, socket.Close()); err != nil {
		return fmt.Errorf("keep queues: %w", err)
	}
	conn := c.(*net.UnixConn)
	queues := map[uint32]*kept{}
	defer func() {
		for _, k := range queues {
			k.close()
		}
		_ = conn.Close()
	}()
	buf, oob := make([]byte, 64), make([]byte, unix.CmsgSpace(2*4))
	for {
		if err := conn.SetReadDeadline(time.Now().Add(keeperInterval)); err != nil {
			return fmt.Errorf("keep queues: %w", err)
		}
		n, oobn, _, _, err := conn.ReadMsgUnix(buf, oob)
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded):
		case n == 0 && (err == nil || errors.Is(err, io.EOF)): // the agent is gone
			for _, k := range queues {
				k.drain()
			}
			return nil
		case err != nil: // the agent lives, and has its queues
			return fmt.Errorf("keep queues: %w", err)
		default:
			if err := obey(queues, buf[:n], oob[:oobn]); err != nil { // one queue's business: the others stay kept
				report(err)
			}
		}
		releaseAll(queues, time.Now())
	}
}

// releaseAll looks at the queues whose time has come.
func releaseAll(queues map[uint32]*kept, now time.Time) {
	for _, k := range queues {
		if now.Before(k.next) {
			continue
		}
		// After an error the queue stays the agent's, which may serve it: it is looked at again. To drain it would end
		// the hold of a pod for want of memory for one message.
		_ = k.release(now)
	}
}

// obey does what a message of the agent says.
func obey(queues map[uint32]*kept, b, oob []byte) error {
	var fds []int
	if msgs, err := unix.ParseSocketControlMessage(oob); err == nil && len(msgs) == 1 {
		fds, _ = unix.ParseUnixRights(&msgs[0])
	}
	switch {
	case len(b) == 7 && b[0] == keeperAdd && len(fds) == 2:
		queues[binary.BigEndian.Uint32(b[1:])] = &kept{
			queue: binary.BigEndian.Uint16(b[5:]), socket: fds[0], list: os.NewFile(uintptr(fds[1]), queueList),
		}
		return nil
	case len(b) == 5 && b[0] == keeperRemove && len(fds) == 0:
		number := binary.BigEndian.Uint32(b[1:])
		if k := queues[number]; k != nil {
			delete(queues, number)
			k.close()
		}
		return nil
	default:
		for _, fd := range fds {
			unix.Close(fd)
		}
		return fmt.Errorf("a queue is not kept: message of %d bytes with %d descriptors: perhaps the keeper may not open more files (ulimit -n)", len(b), len(fds))
	}
}

// drain lets all packets go, and all that come until the queue is closed.
func (k *kept) drain() {
	_, _ = unix.Write(k.socket, appendDrain(nil, k.queue)) // after an error there is nothing to be done
}

func (k *kept) close() {
	unix.Close(k.socket)
	_ = k.list.Close()
}

// release lets go the packets that have waited for too long. The kernel tells the number of
// the last packet, and not how long a packet has waited, so release remembers the numbers
// that it saw in marks. For example:
//
//	0.0 s   packets wait, the last one is 17: mark 17
//	0.3 s   packets wait, the last one is 20: mark 20
//	0.7 s   packets wait, and mark 17 is older than [KeeperPatience] less two intervals:
//	        all packets up to 17 are let go
func (k *kept) release(now time.Time) error {
	waiting, last, err := k.look(now)
	if err != nil {
		return err
	}
	if waiting == 0 {
		k.marks = append(k.marks[:0], keptMark{now, last})
		return nil
	}
	old := -1
	for i, m := range k.marks {
		if now.Sub(m.at) >= KeeperPatience-2*keeperInterval {
			old = i
		}
	}
	if old >= 0 {
		id := k.marks[old].id
		b := appendQueueHeader(nil, queueVerdictBatch, k.queue, id)
		b = appendAttr(b, attrVerdictHeader, append(be32(nfAccept), be32(id)...))
		if _, err := unix.Write(k.socket, end(b, 0)); err != nil {
			return os.NewSyscallError("write", err)
		}
		k.marks = append(k.marks[:0], k.marks[old+1:]...)
	}
	k.marks = append(k.marks, keptMark{now, last})
	return nil
}

// look reads the line of the queue: its number, who has it, how many wait, ..., and as the
// eighth the number of the last packet. A pod's programs can bind queues, too, and many: the more
// of the list was read, the later is the next look.
func (k *kept) look(now time.Time) (waiting int, last uint32, err error) {
	list := io.NewSectionReader(k.list, 0, queueListBytes)
	waiting, last, err = parseQueueList(list, k.queue)
	read, _ := list.Seek(0, io.SeekCurrent) // only tells, and cannot fail
	k.next = now.Add(time.Duration(read/keeperLookBytes) * keeperInterval)
	return waiting, last, err
}

// parseQueueList reads no further than the line.
func parseQueueList(list io.Reader, queue uint16) (waiting int, last uint32, err error) {
	number := strconv.AppendUint(nil, uint64(queue), 10)
	lines := bufio.NewScanner(list)
	for lines.Scan() {
		if !bytes.HasPrefix(bytes.TrimLeft(lines.Bytes(), " "), number) {
			continue
		}
		f := strings.Fields(lines.Text())
		if len(f) < 8 || f[0] != string(number) {
			continue
		}
		waiting, err = strconv.Atoi(f[2])
		id, ierr := strconv.ParseUint(f[7], 10, 32)
		return waiting, uint32(id), errors.Join(err, ierr)
	}
	if err := lines.Err(); err != nil {
		return 0, 0, fmt.Errorf("look at queue %d: %w", queue, err)
	}
	return 0, 0, fmt.Errorf("queue %d is not in the list", queue)
}
