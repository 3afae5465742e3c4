// SPDX-License-Identifier: Apache-2.0

package script

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/smcr-io/kube-smcr/test/vm/peer/report"
)

func echoClient(r *run) error {
	buf := r.readBuffer()
	end := time.Now().Add(r.spec.For)
	var rtts []time.Duration
	for i := 0; ; i++ {
		if r.spec.For > 0 && (r.hadEnough() || !time.Now().Before(end)) || r.spec.For == 0 && i == r.spec.Count {
			break
		}
		start := time.Now()
		if err := r.write(int64(r.spec.Size)); err != nil {
			return err
		}
		if err := r.read(int64(r.spec.Size), buf); err != nil {
			return err
		}
		r.stalled(start)
		rtts = append(rtts, time.Since(start))
		if err := r.sleep(r.spec.Every); err != nil {
			return err
		}
	}
	if len(rtts) > 0 {
		slices.Sort(rtts)
		r.r.Rounds, r.r.RTTMedian = len(rtts), ms(rtts[len(rtts)/2])
	}
	return nil
}

func (r *run) hadEnough() bool {
	select {
	case <-r.spec.Enough:
		return true
	default:
		return false
	}
}

// echoServer answers until the stream ends between two messages.
func echoServer(r *run) error {
	buf := r.readBuffer()
	for ; ; r.r.Rounds++ {
		n, err := io.ReadFull(r.c, buf[:r.spec.Size])
		if e := r.in.check(buf[:n]); e != nil {
			return e
		}
		switch {
		case errors.Is(err, io.EOF):
			r.r.End = report.EndEOF
			return nil
		case err != nil:
			return fmt.Errorf("read after %d bytes: %w", r.in.pos, err)
		}
		if err := r.write(int64(r.spec.Size)); err != nil {
			return err
		}
	}
}

// sizes are messages that end just before, at and after what buffers, packets
// and rings are made of.
func (r *run) sizes(each func(n int64) error) error {
	for range r.spec.Count {
		for n := int64(1); n <= int64(r.spec.Size); n *= 2 {
			for _, n := range []int64{n - 1, n, n + 1} {
				if err := each(n); err != nil {
					return err
				}
				r.r.Rounds++
			}
		}
	}
	return nil
}

func sizesClient(r *run) error {
	buf := r.readBuffer()
	return r.sizes(func(n int64) error {
		if err := r.write(n); err != nil {
			return err
		}
		return r.read(n, buf)
	})
}

func sizesServer(r *run) error {
	buf := r.readBuffer()
	if err := r.sizes(func(n int64) error {
		if err := r.read(n, buf); err != nil {
			return err
		}
		return r.write(n)
	}); err != nil {
		return err
	}
	return r.expectEOF()
}

// bulkClient is whoever sends.
func bulkClient(r *run) error {
	if err := r.write(r.spec.Bytes); err != nil {
		return err
	}
	t, err := readTally(r.c)
	if err != nil {
		return err
	}
	if err := t.agree(&r.out); err != nil {
		return err
	}
	return r.close()
}

func bulkServer(r *run) error {
	if err := r.read(r.spec.Bytes, r.readBuffer()); err != nil {
		return err
	}
	return r.tell()
}

// tell says what was received and waits until the sender is satisfied.
func (r *run) tell() error {
	if _, err := r.c.Write(tally{r.in.pos, r.in.sum}.append(nil)); err != nil {
		return fmt.Errorf("send the sum: %w", err)
	}
	return r.close()
}

// close ends our direction and waits for the end of the other.
func (r *run) close() error {
	if err := r.c.CloseWrite(); err != nil {
		return fmt.Errorf("end the stream: %w", err)
	}
	return r.expectEOF()
}

func slowServer(r *run) error {
	if err := r.sleep(r.spec.Pause); err != nil {
		return err
	}
	buf := make([]byte, r.spec.Size)
	for left := r.spec.Bytes; left > 0; {
		n := min(left, int64(len(buf)))
		if err := r.read(n, buf); err != nil {
			return err
		}
		left -= n
		if err := r.sleep(r.spec.Every); err != nil {
			return err
		}
	}
	return r.tell()
}

// duplex is the same at both ends.
func duplex(r *run) error {
	wrote := make(chan error, 1)
	go func() { wrote <- r.write(r.spec.Bytes) }()
	err := r.read(r.spec.Bytes, r.readBuffer())
	if err != nil {
		_ = r.c.SetDeadline(time.Unix(1, 0)) // ends the writer
	}
	if err := errors.Join(err, <-wrote); err != nil {
		return err
	}
	if _, err := r.c.Write(tally{r.in.pos, r.in.sum}.append(nil)); err != nil {
		return fmt.Errorf("send the sum: %w", err)
	}
	t, err := readTally(r.c)
	if err != nil {
		return err
	}
	if err := t.agree(&r.out); err != nil {
		return err
	}
	return r.close()
}

// dripClient is over after a time.
func dripClient(r *run) error {
	end := time.Now().Add(r.spec.For)
	wrote := make(chan error, 1)
	go func() {
		wrote <- errors.Join(r.drip(func() bool { return r.hadEnough() || !time.Now().Before(end) }), r.c.CloseWrite())
	}()
	return errors.Join(r.awaitEnd(), <-wrote)
}

// dripServer is over when the client is.
func dripServer(r *run) error {
	var over atomic.Bool
	wrote := make(chan error, 1)
	go func() { wrote <- r.drip(over.Load) }()
	err := r.awaitEnd()
	over.Store(true)
	return errors.Join(err, <-wrote)
}

// drip sends messages with time between them.
func (r *run) drip(over func() bool) error {
	for !over() {
		if err := r.write(int64(r.spec.Size)); err != nil {
			return err
		}
		if err := r.sleep(r.spec.Every); err != nil {
			return err
		}
	}
	return nil
}

func halfClient(r *run) error {
	if err := r.write(r.spec.Bytes); err != nil {
		return err
	}
	if err := r.c.CloseWrite(); err != nil {
		return fmt.Errorf("end the stream: %w", err)
	}
	return r.all()
}

func halfServer(r *run) error {
	if err := r.all(); err != nil {
		return err
	}
	return r.write(r.spec.Bytes)
}

// all reads the peer's whole stream.
func (r *run) all() error {
	if err := r.awaitEnd(); err != nil {
		return err
	}
	if r.r.End != report.EndEOF || r.in.pos != uint64(r.spec.Bytes) {
		return fmt.Errorf("the stream ended by %s after %d bytes, want eof after %d", r.r.End, r.in.pos, r.spec.Bytes)
	}
	return nil
}

// unreadClient closes with all but one byte of the answer unread.
func unreadClient(r *run) error {
	if err := r.write(int64(r.spec.Size)); err != nil {
		return err
	}
	return r.read(1, make([]byte, 1))
}

func abortClient(r *run) error {
	if err := r.write(int64(r.spec.Size)); err != nil {
		return err
	}
	if err := r.read(int64(r.spec.Size), r.readBuffer()); err != nil {
		return err
	}
	r.aborted = true
	return r.c.Abort()
}

// untilEnd answers one message and says how the stream ends.
func untilEnd(r *run) error {
	if err := r.read(int64(r.spec.Size), r.readBuffer()); err != nil {
		return err
	}
	if err := r.write(int64(r.spec.Size)); err != nil {
		return err
	}
	return r.awaitEnd()
}

func holdClient(r *run) error {
	if err := r.write(int64(r.spec.Size)); err != nil {
		return err
	}
	if err := r.read(int64(r.spec.Size), r.readBuffer()); err != nil {
		return err
	}
	if r.held != nil {
		r.held()
	}
	if err := r.c.SetDeadline(time.Now().Add(r.spec.For)); err != nil {
		return fmt.Errorf("set deadline: %w", err)
	}
	if r.ctx.Err() != nil {
		_ = r.c.SetDeadline(time.Unix(1, 0)) // the context's call came before ours
	}
	over := make(chan struct{})
	var early sync.WaitGroup
	early.Go(func() {
		select {
		case <-r.spec.Enough:
			_ = r.c.SetDeadline(time.Unix(1, 0))
		case <-over:
		}
	})
	err := r.awaitEnd()
	close(over)
	early.Wait()
	if err != nil {
		return err
	}
	if r.r.End == report.EndTimeout {
		r.r.End = report.EndOpen
	}
	return nil
}

// urgentMark is the urgent byte; it is not of the stream.
const urgentMark = '!'

func urgentClient(r *run) error {
	size := int64(r.spec.Size)
	for range r.spec.Count {
		if err := r.write(size - 1); err != nil {
			return err
		}
		if _, err := r.c.WriteUrgent([]byte{urgentMark}); err != nil {
			return fmt.Errorf("write urgent byte after %d bytes: %w", r.out.pos, err)
		}
		if err := r.write(size); err != nil {
			return err
		}
		if err := r.read(1, make([]byte, 1)); err != nil { // the server has it
			return err
		}
	}
	return nil
}

// urgentServer looks for the urgent byte before it reads what precedes it.
func urgentServer(r *run) error {
	buf := r.readBuffer()
	for range r.spec.Count {
		for {
			b, err := r.c.ReadUrgent()
			if err == nil && b != urgentMark {
				return fmt.Errorf("%w: the urgent byte is %#x, want %#x", errWrongBytes, b, urgentMark)
			}
			if err == nil {
				break
			}
			if !errors.Is(err, syscall.EAGAIN) && !errors.Is(err, syscall.EINVAL) {
				return fmt.Errorf("read urgent byte after %d bytes: %w", r.in.pos, err)
			}
			if err := r.sleep(time.Millisecond); err != nil {
				return err
			}
		}
		r.r.Urgent++
		if err := r.read(2*int64(r.spec.Size)-1, buf); err != nil {
			return err
		}
		if err := r.write(1); err != nil {
			return err
		}
	}
	return r.expectEOF()
}
