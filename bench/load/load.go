// SPDX-License-Identifier: Apache-2.0

package load

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/smcr-io/kube-smcr/bench/report"
)

// Load is one measurement: the same code for every path, so that only the
// path makes the difference.
type Load struct {
	Kind      Kind          `json:"kind,omitempty"`
	SizeBytes int           `json:"sizeBytes,omitempty"` // of a message or of a write
	Conns     int           `json:"conns,omitempty"`
	Duration  time.Duration `json:"duration,omitempty"`
	Max       int           `json:"max,omitempty"` // operations per connection; 0: no bound
}

// Kind is the first byte of a connection: what the server shall do.
type Kind byte

const (
	Echo   Kind = 'e' // send every message of SizeBytes back
	Stream Kind = 's' // read to the end, then say how many bytes came
	Setup  Kind = 'c' // one byte back: the connection works
	Idle   Kind = 'i' // likewise, and it stays open
)

// Result is what a load gave.
type Result struct {
	Ops     int           `json:"ops"`
	Bytes   int64         `json:"bytes"`
	Copied  int64         `json:"copied,omitempty"` // bytes that the libraries of both ends copied, each as often as it was; 0: not counted
	Elapsed time.Duration `json:"elapsed"`
	P50     time.Duration `json:"p50"`
	P99     time.Duration `json:"p99"`
}

// DialFunc opens a connection and tells whether SMC-R carries it, and a
// function to be called after its end.
type DialFunc func(ctx context.Context) (c net.Conn, end func() error, err error)

const (
	headerBytes = 8
	// lateLimit is more than any measurement may take: a path that stalls is
	// an error, not a wait for ever.
	lateLimit = 20 * time.Second
	// warmTurns and warmBytes are what goes before round trips that count, whichever is less.
	warmTurns, warmBytes = 100, 4 << 20
	// timesRoom is for the times of round trips, so that they need no memory meanwhile.
	timesRoom = 1 << 16
)

func (l Load) header() []byte {
	b := make([]byte, headerBytes)
	b[0] = byte(l.Kind)
	binary.BigEndian.PutUint32(b[4:], uint32(l.SizeBytes))
	return b
}

// Held are connections that stay open without a goroutine that looks at them.
type Held struct {
	mu    sync.Mutex // guards conns
	conns []net.Conn
}

func (h *Held) Add(c net.Conn) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.conns = append(h.conns, c)
}

func (h *Held) Close() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	var err error
	for _, c := range h.conns {
		err = errors.Join(err, c.Close())
	}
	h.conns = nil
	return err
}

// Serve answers the connections of a listener until it is closed.
func Serve(l net.Listener, h *Held) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		go func() {
			stays, _ := answer(c) // the client sees what counts
			if stays {
				h.Add(c)
				return
			}
			_ = c.Close() // likewise
		}()
	}
}

// answer does what the client asks for; stays means that the connection is to
// be kept.
func answer(c net.Conn) (stays bool, err error) {
	var h [headerBytes]byte
	if _, err := io.ReadFull(c, h[:]); err != nil {
		return false, err
	}
	size := binary.BigEndian.Uint32(h[4:])
	if size > 1<<24 {
		return false, fmt.Errorf("message of %d bytes", size)
	}
	switch Kind(h[0]) {
	case Echo:
		return false, answerEcho(c, make([]byte, size))
	case Stream:
		return false, answerStream(c, make([]byte, size))
	case Setup:
		_, err := c.Write(h[:1])
		_, _ = c.Read(h[:]) // the client closes first
		return false, err
	case Idle:
		_, err := c.Write(h[:1])
		return err == nil, err
	}
	return false, fmt.Errorf("unknown load %q", h[0])
}

func answerEcho(c net.Conn, buf []byte) error {
	for {
		if _, err := io.ReadFull(c, buf); err != nil {
			return err
		}
		if _, err := c.Write(buf); err != nil {
			return err
		}
	}
}

func answerStream(c net.Conn, buf []byte) error {
	var total uint64
	for {
		n, err := c.Read(buf)
		total += uint64(n)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
	}
	var b [8]byte
	binary.BigEndian.PutUint64(b[:], total)
	_, err := c.Write(b[:])
	return err
}

// Run does the load and waits for its end.
func (l Load) Run(ctx context.Context, dial DialFunc) (Result, error) {
	switch l.Kind {
	case Echo:
		return l.runEcho(ctx, dial)
	case Stream:
		return l.runStreams(ctx, dial)
	case Setup:
		return l.runSetups(ctx, dial)
	case Idle: // see Hold
	}
	return Result{}, fmt.Errorf("unknown load %q", l.Kind)
}

// closing ends a connection and what was made for it.
func closing(c net.Conn, end func() error) error {
	err := c.Close()
	if end != nil {
		err = errors.Join(err, end())
	}
	return err
}

// runEcho makes round trips on all connections at once.
func (l Load) runEcho(ctx context.Context, dial DialFunc) (Result, error) {
	var wg sync.WaitGroup
	conns := max(l.Conns, 1)
	errs, times, took := make([]error, conns), make([][]time.Duration, conns), make([]time.Duration, conns)
	for i := range conns {
		wg.Go(func() { times[i], took[i], errs[i] = l.echo(ctx, dial) })
	}
	wg.Wait()
	return l.roundTrips(slices.Concat(times...), slices.Max(took)), errors.Join(errs...)
}

// echo makes round trips on one connection.
func (l Load) echo(ctx context.Context, dial DialFunc) (times []time.Duration, took time.Duration, err error) {
	c, end, err := dial(ctx)
	if err != nil {
		return nil, 0, err
	}
	defer func() { err = errors.Join(err, closing(c, end)) }()
	if err := c.SetDeadline(time.Now().Add(lateLimit)); err != nil {
		return nil, 0, err
	}
	if _, err := c.Write(l.header()); err != nil {
		return nil, 0, err
	}
	buf := make([]byte, l.SizeBytes)
	turn := func() error {
		if _, err := c.Write(buf); err != nil {
			return err
		}
		_, err := io.ReadFull(c, buf)
		return err
	}
	return l.turns(turn)
}

// RoundTrips makes round trips of SizeBytes for the duration, one after the other, and measures each.
func (l Load) RoundTrips(turn func() error) (Result, error) {
	times, took, err := l.turns(turn)
	return l.roundTrips(times, took), err
}

// turns measures each turn.
func (l Load) turns(turn func() error) (times []time.Duration, took time.Duration, err error) {
	for range min(warmTurns, 1+warmBytes/(1+l.SizeBytes)) { // until everything is warm
		if err := turn(); err != nil {
			return nil, 0, err
		}
	}
	times = make([]time.Duration, 0, timesRoom/max(l.Conns, 1))
	begin := time.Now()
	last := begin
	for last.Sub(begin) < l.Duration {
		if err := turn(); err != nil {
			return nil, 0, err
		}
		now := time.Now()
		times = append(times, now.Sub(last))
		last = now
	}
	return times, last.Sub(begin), nil
}

// roundTrips sums round trips up.
func (l Load) roundTrips(times []time.Duration, took time.Duration) Result {
	return Result{
		Ops: len(times), Bytes: int64(len(times)) * int64(l.SizeBytes), Elapsed: took,
		P50: report.Quantile(times, 0.5), P99: report.Quantile(times, 0.99),
	}
}

// runStreams writes on all connections for the duration, and counts until the
// last byte has arrived.
func (l Load) runStreams(ctx context.Context, dial DialFunc) (Result, error) {
	conns := make([]net.Conn, l.Conns)
	for i := range conns {
		c, _, err := dial(ctx)
		if err != nil {
			return Result{}, err
		}
		defer c.Close() //nolint:errcheck // its end was awaited
		if err := c.SetDeadline(time.Now().Add(lateLimit)); err != nil {
			return Result{}, err
		}
		if _, err := c.Write(l.header()); err != nil {
			return Result{}, err
		}
		conns[i] = c
	}
	var wg sync.WaitGroup
	var total, writes atomic.Int64
	errs := make([]error, len(conns))
	begin := time.Now()
	for i, c := range conns {
		wg.Go(func() {
			n, w, err := l.stream(c, begin.Add(l.Duration))
			total.Add(n)
			writes.Add(w)
			errs[i] = err
		})
	}
	wg.Wait()
	return Result{Ops: int(writes.Load()), Bytes: total.Load(), Elapsed: time.Since(begin)}, errors.Join(errs...)
}

func (l Load) stream(c net.Conn, until time.Time) (total, writes int64, err error) {
	buf := make([]byte, l.SizeBytes)
	for time.Now().Before(until) {
		n, err := c.Write(buf)
		total += int64(n)
		if err != nil {
			return total, writes, err
		}
		writes++
	}
	half, ok := c.(interface{ CloseWrite() error })
	if !ok {
		return total, writes, fmt.Errorf("%T has no half close", c)
	}
	if err := half.CloseWrite(); err != nil {
		return total, writes, err
	}
	var b [8]byte
	if _, err := io.ReadFull(c, b[:]); err != nil {
		return total, writes, fmt.Errorf("wait for the server's count: %w", err)
	}
	if got := binary.BigEndian.Uint64(b[:]); got != uint64(total) {
		return total, writes, fmt.Errorf("wrote %d bytes, %d arrived", total, got)
	}
	return total, writes, nil
}

// runSetups opens connections one after the other, on Conns goroutines. The
// time of one goes from the call of dial to the first byte from the server:
// behind a proxy the end of dial alone says nothing.
func (l Load) runSetups(ctx context.Context, dial DialFunc) (Result, error) {
	var wg sync.WaitGroup
	errs := make([]error, l.Conns)
	times := make([][]time.Duration, l.Conns)
	begin := time.Now()
	for i := range l.Conns {
		wg.Go(func() {
			for time.Since(begin) < l.Duration && (l.Max == 0 || len(times[i]) < l.Max) {
				d, err := l.setup(ctx, dial)
				if err != nil {
					errs[i] = err
					return
				}
				times[i] = append(times[i], d)
			}
		})
	}
	wg.Wait()
	r := Result{Elapsed: time.Since(begin)}
	var all []time.Duration
	for _, t := range times {
		all = append(all, t...)
	}
	r.Ops, r.P50, r.P99 = len(all), report.Quantile(all, 0.5), report.Quantile(all, 0.99)
	return r, errors.Join(errs...)
}

func (l Load) setup(ctx context.Context, dial DialFunc) (time.Duration, error) {
	begin := time.Now()
	c, end, err := l.open(ctx, dial, begin.Add(lateLimit))
	if err != nil {
		return 0, err
	}
	d := time.Since(begin)
	return d, closing(c, end)
}

// open dials and waits for the server's first byte.
func (l Load) open(ctx context.Context, dial DialFunc, deadline time.Time) (net.Conn, func() error, error) {
	c, end, err := dial(ctx)
	if err != nil {
		return nil, nil, err
	}
	err = c.SetDeadline(deadline)
	if err == nil {
		_, err = c.Write(l.header())
	}
	if err == nil {
		_, err = io.ReadFull(c, make([]byte, 1))
	}
	if err != nil {
		return nil, nil, errors.Join(err, closing(c, end))
	}
	return c, end, nil
}

// Hold opens Conns connections, a few at a time, which stay open.
func (l Load) Hold(ctx context.Context, dial DialFunc, h *Held) (Result, error) {
	const atOnce = 8
	var wg sync.WaitGroup
	var left atomic.Int64
	left.Store(int64(l.Conns))
	errs := make([]error, atOnce)
	begin := time.Now()
	for i := range atOnce {
		wg.Go(func() {
			for errs[i] == nil && left.Add(-1) >= 0 {
				c, _, err := l.open(ctx, dial, time.Now().Add(lateLimit))
				if err == nil {
					err = c.SetDeadline(time.Time{})
					h.Add(c)
				}
				errs[i] = err
			}
		})
	}
	wg.Wait()
	return Result{Ops: l.Conns, Elapsed: time.Since(begin)}, errors.Join(errs...)
}
