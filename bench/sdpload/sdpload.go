// SPDX-License-Identifier: Apache-2.0

package sdpload

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"time"

	"github.com/smcr-io/kube-smcr/bench/load"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/iwarp"
	"github.com/smcr-io/kube-smcr/pkg/sdp"
)

// Way is how the bytes of a stream move. It is the second byte of a connection.
type Way byte

// Ways.
const (
	Bcopy Way = 'b' // by Write and Read
	Read  Way = 'r' // from Buffer to Buffer: each read is for a whole message, which the server's device fetches
	Write Way = 'w' // from Buffer to Buffer: the server advertises its Buffers, and the client's device writes into them in turn
)

const (
	maxSize = 1 << 20
	depth   = 4 // Buffers of each side, at most

	headerBytes = 8  // kind, way, 2 of nothing, size of a message
	replyBytes  = 24 // what came, what the server's library copied of both streams, and what its device fetched

	// zcopySize is below the shortest message that is measured, so that Buffers are never copied because they are short.
	zcopySize = 32 << 10

	// settled is from how many bytes on most of a stream moves as it should.
	settled = 64 << 20

	// lateLimit is more than any measurement may take: a connection that stalls is an error.
	lateLimit = 20 * time.Second
)

// Config is a stack for loads. FPDUs are as long as they can be.
func Config(d rdma.Device, noCRC bool) sdp.Config {
	return sdp.Config{Device: d, NoCRC: noCRC, MaxULPDU: iwarp.MaxOwnULPDU, ZcopySize: zcopySize}
}

// Serve answers the connections of a listener of the stack until it is closed.
func Serve(s *sdp.Stack, l net.Listener) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		go func() {
			_ = answer(s, c.(*sdp.Conn)) // the client sees what counts
			_ = c.Close()                // likewise
		}()
	}
}

// answer does what the client asks for.
func answer(s *sdp.Stack, c *sdp.Conn) error {
	var h [headerBytes]byte
	if _, err := io.ReadFull(c, h[:]); err != nil {
		return err
	}
	size := binary.BigEndian.Uint32(h[4:])
	if size == 0 || size > maxSize {
		return fmt.Errorf("message of %d bytes", size)
	}
	if load.Kind(h[0]) == load.Echo {
		return answerEcho(c, make([]byte, size))
	}
	total, err := receive(s, c, Way(h[1]), int(size))
	if err != nil {
		return err
	}
	i := c.Info()
	b := make([]byte, 0, replyBytes)
	for _, v := range []uint64{total, i.BytesCopied, i.BytesRead} {
		b = binary.BigEndian.AppendUint64(b, v)
	}
	_, err = c.Write(b)
	return err
}

func answerEcho(c *sdp.Conn, buf []byte) error {
	for {
		if _, err := io.ReadFull(c, buf); err != nil {
			return err
		}
		if _, err := c.Write(buf); err != nil {
			return err
		}
	}
}

// receive reads to the end of the stream.
func receive(s *sdp.Stack, c *sdp.Conn, w Way, size int) (total uint64, err error) {
	if w == Bcopy {
		n, err := io.CopyBuffer(io.Discard, struct{ io.Reader }{c}, make([]byte, size))
		return uint64(n), err
	}
	err = throughBuffers(s, depth, size, func(b *sdp.Buffer, last *sdp.Transfer) (*sdp.Transfer, error) {
		if last != nil {
			n, err := last.Wait()
			total += uint64(n)
			if err != nil {
				return nil, err
			}
		}
		return c.StartRead(b, 0, size, w == Read)
	})
	if errors.Is(err, io.EOF) {
		err = nil
	}
	return total, err
}

// throughBuffers goes through n Buffers in turn until next fails, and then waits for what is under way: nothing moves
// any more, or it moves out. next waits for what the Buffer was used for, and uses it again.
func throughBuffers(s *sdp.Stack, n, size int, next func(*sdp.Buffer, *sdp.Transfer) (*sdp.Transfer, error)) (err error) {
	var bufs [depth]*sdp.Buffer
	var under [depth]*sdp.Transfer
	for i := 0; err == nil; i = (i + 1) % n {
		if bufs[i] == nil {
			if bufs[i], err = s.AllocBuffer(size); err != nil {
				break
			}
		}
		under[i], err = next(bufs[i], under[i])
	}
	for i, b := range bufs {
		if under[i] != nil {
			if _, werr := under[i].Wait(); !errors.Is(werr, io.EOF) {
				err = errors.Join(err, werr)
			}
		}
		if b != nil {
			err = errors.Join(err, b.Close())
		}
	}
	return err
}

// Load is the client: it makes a load, and closes the connection.
func Load(s *sdp.Stack, c *sdp.Conn, l load.Load, w Way) (r load.Result, err error) {
	defer func() { err = errors.Join(err, c.Close()) }()
	if err := c.SetDeadline(time.Now().Add(lateLimit)); err != nil {
		return r, err
	}
	h := binary.BigEndian.AppendUint32([]byte{byte(l.Kind), byte(w), 0, 0}, uint32(l.SizeBytes))
	if _, err := c.Write(h); err != nil {
		return r, err
	}
	if l.Kind == load.Echo {
		buf := make([]byte, l.SizeBytes)
		return l.RoundTrips(func() error {
			if _, err := c.Write(buf); err != nil {
				return err
			}
			_, err := io.ReadFull(c, buf)
			return err
		})
	}
	begin := time.Now()
	if r.Ops, err = send(s, c, w, l.SizeBytes, begin.Add(l.Duration)); err != nil {
		return r, err
	}
	if err := c.CloseWrite(); err != nil {
		return r, err
	}
	var b [replyBytes]byte
	if _, err := io.ReadFull(c, b[:]); err != nil {
		return r, fmt.Errorf("wait for the server's count: %w", err)
	}
	r.Bytes, r.Elapsed = int64(r.Ops)*int64(l.SizeBytes), time.Since(begin)
	if got := binary.BigEndian.Uint64(b[:]); got != uint64(r.Bytes) {
		return r, fmt.Errorf("wrote %d bytes, %d arrived", r.Bytes, got)
	}
	i := c.Info()
	r.Copied = int64(binary.BigEndian.Uint64(b[8:]) + i.BytesCopied)
	return r, w.check(r, binary.BigEndian.Uint64(b[16:]), i.BytesWritten)
}

// check says whether bytes moved as they should have, but for those that move while both ends find out what pays.
func (w Way) check(r load.Result, read, written uint64) error {
	moved := written
	switch {
	case w == Bcopy || r.Bytes < settled:
		return nil
	case w == Read:
		moved = read
	}
	if moved < uint64(r.Bytes)/2 {
		return fmt.Errorf("of %d bytes %d were fetched by READ and %d sent by WRITE", r.Bytes, read, written)
	}
	return nil
}

// errLate ends the use of Buffers when the time is up.
var errLate = errors.New("sdpload: the time is up")

// send writes messages until then.
func send(s *sdp.Stack, c *sdp.Conn, w Way, size int, until time.Time) (messages int, err error) {
	if w == Bcopy {
		for buf := make([]byte, size); time.Now().Before(until); messages++ {
			if _, err := c.Write(buf); err != nil {
				return messages, err
			}
		}
		return messages, nil
	}
	n := depth
	if w == Write { // a second one would be offered to the server, which would fetch it
		n = 1
	}
	err = throughBuffers(s, n, size, func(b *sdp.Buffer, last *sdp.Transfer) (*sdp.Transfer, error) {
		if last != nil {
			if _, err := last.Wait(); err != nil {
				return nil, err
			}
		}
		if !time.Now().Before(until) {
			return nil, errLate
		}
		messages++
		return c.StartWrite(b, 0, size)
	})
	if errors.Is(err, errLate) {
		err = nil
	}
	return messages, err
}
