// SPDX-License-Identifier: Apache-2.0

package script

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"syscall"
	"time"

	"github.com/smcr-io/kube-smcr/test/vm/peer/report"
)

// Conn is what scripts need of a connection.
type Conn interface {
	io.ReadWriteCloser
	CloseWrite() error
	// Abort resets the connection, as far as its kind can.
	Abort() error
	// WriteUrgent writes p, whose last byte is urgent; ReadUrgent returns the
	// peer's, syscall.EAGAIN or syscall.EINVAL if there is none yet. Read
	// leaves it out.
	WriteUrgent(p []byte) (int, error)
	ReadUrgent() (byte, error)
	SetDeadline(t time.Time) error
	LocalAddr() net.Addr
	RemoteAddr() net.Addr
}

// A definition is one script.
type definition struct {
	name, text     string
	defaults       Spec
	client, server func(*run) error
}

// definitions is the table of all scripts.
var definitions = []definition{
	{
		name: "echo", text: "count messages of size bytes, or such for a time, each answered by one",
		defaults: Spec{Size: 64, Count: 10}, client: echoClient, server: echoServer,
	},
	{
		name: "sizes", text: "count rounds of messages of sizes around powers of two, each answered by one",
		defaults: Spec{Size: 64 << 10, Count: 1}, client: sizesClient, server: sizesServer,
	},
	{
		name: "bulk", text: "bytes from the client to the server, in writes of size",
		defaults: Spec{Size: 64 << 10, Bytes: 1 << 20}, client: bulkClient, server: bulkServer,
	},
	{
		name: "fetch", text: "bytes from the server to the client, in writes of size",
		defaults: Spec{Size: 64 << 10, Bytes: 1 << 20}, client: bulkServer, server: bulkClient,
	},
	{
		name: "duplex", text: "bytes in both directions at once, in writes of size",
		defaults: Spec{Size: 64 << 10, Bytes: 1 << 20}, client: duplex, server: duplex,
	},
	{
		name: "slow", text: "as bulk, to a server that begins to read after a pause, and pauses between reads of size",
		defaults: Spec{Size: 8 << 10, Bytes: 1 << 20, Pause: 500 * time.Millisecond, Every: time.Millisecond}, client: bulkClient, server: slowServer,
	},
	{
		name: "drip", text: "both ends send size bytes now and then, whatever they get, for a time",
		defaults: Spec{Size: 64, Every: 5 * time.Millisecond, For: 100 * time.Millisecond}, client: dripClient, server: dripServer,
	},
	{
		name: "half", text: "bytes from the client, its end, then bytes from the server, its end",
		defaults: Spec{Size: 16 << 10, Bytes: 256 << 10}, client: halfClient, server: halfServer,
	},
	{
		name: "unread", text: "the client closes while it has not read all that it got",
		defaults: Spec{Size: 4 << 10}, client: unreadClient, server: untilEnd,
	},
	{
		name: "abort", text: "the client resets the connection",
		defaults: Spec{Size: 64}, client: abortClient, server: untilEnd,
	},
	{
		name: "urgent", text: "count times: size bytes of which the last is urgent, then size ordinary ones",
		defaults: Spec{Size: 4, Count: 1}, client: urgentClient, server: urgentServer,
	},
	{
		name: "hold", text: "one message and its answer, then nothing until the time is over or the other end ends it",
		defaults: Spec{Size: 64, For: maxDuration}, client: holdClient, server: untilEnd,
	},
}

func find(name string) (definition, bool) {
	i := slices.IndexFunc(definitions, func(d definition) bool { return d.name == name })
	if i < 0 {
		return definition{}, false
	}
	return definitions[i], true
}

// Names are the scripts' names.
func Names() []string {
	var names []string
	for _, d := range definitions {
		names = append(names, d.name)
	}
	return names
}

// Usage describes the scripts, one per line.
func Usage() string {
	var text string
	for _, d := range definitions {
		text += fmt.Sprintf("  %-8s%s\n", d.name, d.text)
	}
	return text
}

// A run is a script at one end of one connection.
type run struct {
	ctx     context.Context //nolint:containedctx // a run is one call of Dial or Serve
	c       Conn
	spec    Spec
	out, in stream
	aborted bool
	held    func() // called when hold has nothing more to do
	r       *report.Conn
}

// Dial runs the client's part of a script and closes the connection. It calls
// held, if there is one, when the script hold only waits any more.
func Dial(ctx context.Context, c Conn, s Spec, held func()) report.Conn {
	r := newRun(ctx, c, "client")
	r.held = held
	r.begin(s, true)
	return r.play(func() error {
		if _, err := c.Write(s.hello()); err != nil {
			return fmt.Errorf("send the script: %w", err)
		}
		d, _ := find(s.Name) // of a spec that was parsed
		return d.client(r)
	})
}

// Serve reads from the client which script it is, runs the server's part and
// closes the connection.
func Serve(ctx context.Context, c Conn) report.Conn {
	r := newRun(ctx, c, "server")
	return r.play(func() error {
		s, _, err := readHello(c)
		if err != nil {
			return err
		}
		r.begin(s, false)
		d, _ := find(s.Name)
		return d.server(r)
	})
}

func newRun(ctx context.Context, c Conn, role string) *run {
	return &run{ctx: ctx, c: c, r: &report.Conn{Role: role, Local: c.LocalAddr().String(), Peer: c.RemoteAddr().String()}}
}

func (r *run) begin(s Spec, client bool) {
	r.spec, r.r.Script = s, s.String()
	r.out, r.in = newStream(s.Seed, client), newStream(s.Seed, !client)
}

func (r *run) play(f func() error) report.Conn {
	start := time.Now()
	// What blocks ends with the context.
	stop := context.AfterFunc(r.ctx, func() { _ = r.c.SetDeadline(time.Unix(1, 0)) })
	err := f()
	stop()
	if err != nil && r.ctx.Err() != nil {
		err = fmt.Errorf("%w (%w)", err, context.Cause(r.ctx))
	}
	if err != nil {
		r.r.Err = err.Error()
		_ = r.c.Abort() // the error before it is what counts
	} else if err := r.c.Close(); err != nil && !r.aborted {
		r.r.Err = fmt.Sprintf("close: %v", err)
	}
	r.r.TookMS = ms(time.Since(start))
	r.r.Sent, r.r.Received, r.r.SumSent, r.r.SumReceived = r.out.pos, r.in.pos, r.out.sum, r.in.sum
	return *r.r
}

func ms(d time.Duration) float64 { return d.Seconds() * 1e3 }

// stalled takes the time of one operation into the report.
func (r *run) stalled(since time.Time) { r.r.StallMS = max(r.r.StallMS, ms(time.Since(since))) }

// write sends the next n bytes of the stream, each write of the script's size.
func (r *run) write(n int64) error {
	for n > 0 {
		b := r.out.next(int(min(n, int64(r.spec.Size))))
		start := time.Now()
		k, err := r.c.Write(b)
		r.stalled(start)
		r.out.add(b[:k])
		n -= int64(k)
		if err != nil {
			return fmt.Errorf("write after %d bytes: %w", r.out.pos, err)
		}
	}
	return nil
}

// read takes exactly n bytes and checks them.
func (r *run) read(n int64, buf []byte) error {
	for n > 0 {
		k, err := r.c.Read(buf[:min(n, int64(len(buf)))])
		if e := r.in.check(buf[:k]); e != nil {
			return e
		}
		n -= int64(k)
		if err != nil && n > 0 {
			return fmt.Errorf("read after %d bytes: %w", r.in.pos, err)
		}
	}
	return nil
}

// readBuffer is large enough for any message.
func (r *run) readBuffer() []byte { return make([]byte, max(r.spec.Size, 64<<10)) }

// awaitEnd reads until the stream ends, one way or the other, and says how.
func (r *run) awaitEnd() error {
	buf := r.readBuffer()
	for {
		n, err := r.c.Read(buf)
		if e := r.in.check(buf[:n]); e != nil {
			return e
		}
		if err == nil {
			continue
		}
		switch {
		case errors.Is(err, io.EOF):
			r.r.End = report.EndEOF
			if c, ok := r.c.(interface{ EndState() string }); ok {
				r.r.EndState = c.EndState()
			}
		case errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.ECONNABORTED), errors.Is(err, syscall.ENOTCONN):
			r.r.End = report.EndReset
		case errors.Is(err, os.ErrDeadlineExceeded):
			r.r.End = report.EndTimeout
		default:
			return fmt.Errorf("read after %d bytes: %w", r.in.pos, err)
		}
		return nil
	}
}

// expectEOF is awaitEnd where the peer must end the stream in order.
func (r *run) expectEOF() error {
	at := r.in.pos
	if err := r.awaitEnd(); err != nil {
		return err
	}
	if r.r.End != report.EndEOF || r.in.pos != at {
		return fmt.Errorf("the stream ended by %s after %d more bytes, want eof", r.r.End, r.in.pos-at)
	}
	return nil
}

// sleep waits, or until the context ends.
func (r *run) sleep(d time.Duration) error {
	if d <= 0 {
		return nil
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-r.ctx.Done():
		return context.Cause(r.ctx)
	}
}
