// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"log"
	"math/rand/v2"
	"net"
	"os"
	"os/signal"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/smcr-io/kube-smcr/test/vm/afsmc"
)

func main() {
	log.SetFlags(0)
	if slices.ContainsFunc(os.Args, isSMC) {
		if err := afsmc.WithoutPreemption(); err != nil {
			log.Fatalf("traffic: %v", err)
		}
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	err := run(ctx, os.Args[1:], os.Stdout)
	stop()
	if err != nil {
		log.Fatalf("traffic: %v", err)
	}
}

// smcFlag is the flag for sockets of the kernel's SMC.
const smcFlag = "smc"

func isSMC(arg string) bool { return strings.TrimLeft(arg, "-") == smcFlag }

func run(ctx context.Context, args []string, out io.Writer) error {
	if len(args) < 2 {
		return errors.New("want serve, full, once, connect, cross, load or hold, and an address")
	}
	fs := flag.NewFlagSet("traffic", flag.ContinueOnError)
	c := client{address: args[1], out: json.NewEncoder(out)}
	fs.DurationVar(&c.interval, "interval", 20*time.Millisecond, "pause after each connection or message")
	fs.IntVar(&c.size, "bytes", 4096, "bytes of each message")
	timeout := fs.Duration("timeout", exchangeTimeout, "of connect and cross: the program's own")
	retries := fs.Int("syn-retries", 0, "of connect: SYNs after the first one, 0 for the system's setting")
	blocking := fs.Bool("blocking", false, "of connect: on a socket that blocks, with a timeout of the socket")
	mapped := fs.Bool("mapped", false, "of connect: an IPv4 address on an IPv6 socket, which blocks")
	at := fs.Int64("at", 0, "of cross: when to connect, in milliseconds since 1970")
	fs.IntVar(&c.workers, "workers", 2, "of load: connections at a time")
	fs.BoolVar(&c.smc, smcFlag, false, "of serve, once, load and hold: sockets of the kernel's SMC, as smc_run makes them; addresses are numbers")
	if err := fs.Parse(args[2:]); err != nil {
		return err
	}
	switch args[0] {
	case "serve":
		return serve(ctx, args[1], c.smc)
	case "full":
		return full(ctx, args[1])
	case "once":
		return c.once(ctx)
	case "connect":
		if *blocking || *mapped {
			return connectBlocking(args[1], *mapped, *timeout, out)
		}
		return connect(ctx, args[1], *timeout, *retries, out)
	case "cross":
		return cross(ctx, args[1], time.UnixMilli(*at), *timeout, out)
	case "load":
		return c.load(ctx)
	case "hold":
		return c.hold(ctx)
	default:
		return fmt.Errorf("%s is not serve, full, once, connect, cross, load or hold", args[0])
	}
}

// connect says what connect() came to, and after how long. That is no error, whatever it is.
func connect(ctx context.Context, address string, timeout time.Duration, retries int, out io.Writer) error {
	d := net.Dialer{Timeout: timeout, Control: func(_, _ string, c syscall.RawConn) error {
		if retries == 0 {
			return nil
		}
		var set error
		err := c.Control(func(fd uintptr) {
			set = syscall.SetsockoptInt(int(fd), syscall.IPPROTO_TCP, syscall.TCP_SYNCNT, retries)
		})
		return errors.Join(err, set)
	}}
	began := time.Now()
	conn, err := d.DialContext(ctx, "tcp", address)
	took := time.Since(began).Milliseconds()
	what, err := outcome(err)
	if err != nil {
		return err
	}
	if conn != nil {
		defer func() { _ = conn.Close() }()
	}
	_, err = fmt.Fprintf(out, "%s after %d ms\n", what, took)
	return err
}

// outcome says what connect() came to. An error that connect() does not have is an error.
func outcome(err error) (string, error) {
	var errno syscall.Errno
	var timedOut net.Error
	switch {
	case err == nil:
		return "connected", nil
	case errors.As(err, &errno):
		return errno.Error(), nil
	case errors.As(err, &timedOut) && timedOut.Timeout():
		return "own timeout", nil
	default:
		return "", err
	}
}

// serve sends back what comes, until ctx ends.
func serve(ctx context.Context, address string, smc bool) error {
	l, err := listenOn(ctx, address, smc)
	if err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { _ = l.Close() })
	defer stop()
	for {
		c, err := l.Accept()
		if errors.Is(err, net.ErrClosed) || errors.Is(err, os.ErrClosed) {
			return nil
		}
		if err != nil {
			return err
		}
		go func() { // ends with the connection or the process
			defer func() { _ = c.Close() }()
			_, _ = io.Copy(c, c)
		}()
	}
}

func listenOn(ctx context.Context, address string, smc bool) (net.Listener, error) {
	if smc {
		l, err := afsmc.Listen(address, 0)
		if err != nil {
			return nil, err
		}
		return l, nil
	}
	var lc net.ListenConfig
	return lc.Listen(ctx, "tcp", address)
}

type client struct {
	address  string
	interval time.Duration
	size     int
	workers  int
	smc      bool

	mu  sync.Mutex // guards what is below
	out *json.Encoder
	sum Sum
	// firstFailure is when the first failure was noted.
	firstFailure time.Time
}

// Sum is a line of the output: what happened so far.
type Sum struct {
	// OK and Failed count connections of load and messages of hold. Of those that failed, Reset
	// counts those that were connected before.
	OK     int `json:"ok"`
	Failed int `json:"failed"`
	Reset  int `json:"reset"`
	// Errors counts the failures by their text.
	Errors map[string]int `json:"errors,omitempty"`
	// WorstMillis is the longest that one of the good ones took.
	WorstMillis int64 `json:"worstMillis"`
	// FailingMillis is the time from the first failure to the last.
	FailingMillis int64 `json:"failingMillis,omitempty"`
	// Ended is set when hold's connection has ended.
	Ended bool `json:"ended,omitempty"`
}

func (c *client) note(took time.Duration, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err == nil {
		c.sum.OK++
		c.sum.WorstMillis = max(c.sum.WorstMillis, took.Milliseconds())
		return
	}
	if c.sum.Failed == 0 {
		c.firstFailure = time.Now()
	}
	c.sum.Failed++
	// Only a connection that stood is reset: a SYN is refused.
	var op *net.OpError
	if !errors.As(err, &op) || op.Op != "dial" || errors.Is(err, syscall.ECONNRESET) {
		c.sum.Reset++
	}
	c.sum.FailingMillis = time.Since(c.firstFailure).Milliseconds()
	if c.sum.Errors == nil {
		c.sum.Errors = map[string]int{}
	}
	c.sum.Errors[reason(err)]++
}

// reason is the text of an error without addresses, so that equal ones are
// counted together.
func reason(err error) string {
	var op *net.OpError
	if errors.As(err, &op) {
		return op.Op + ": " + op.Err.Error()
	}
	return err.Error()
}

func (c *client) report() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.out.Encode(c.sum); err != nil {
		log.Fatalf("traffic: %v", err)
	}
}

// reportUntil writes a line each second and one at the end.
func (c *client) reportUntil(ctx context.Context) {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			c.report()
			return
		case <-tick.C:
			c.report()
		}
	}
}

// load makes connections until ctx ends.
func (c *client) load(ctx context.Context) error {
	var group sync.WaitGroup
	for range c.workers {
		group.Go(func() {
			for ctx.Err() == nil {
				began := time.Now()
				err := c.once(ctx)
				if ctx.Err() != nil {
					return // our own end is no failure
				}
				c.note(time.Since(began), err)
				pause(ctx, c.interval)
			}
		})
	}
	c.reportUntil(ctx)
	group.Wait()
	return nil
}

// exchangeTimeout is what a test takes for never: connections that wait for a
// dead agent wait less.
const exchangeTimeout = 15 * time.Second

// once makes a connection, lets a message go there and back, and closes it.
func (c *client) once(ctx context.Context) error {
	conn, err := c.dial(ctx)
	if err != nil {
		return err
	}
	if err := c.exchange(conn); err != nil {
		_ = conn.Close()
		return err
	}
	return conn.Close()
}

func (c *client) dial(ctx context.Context) (net.Conn, error) {
	if c.smc {
		conn, err := afsmc.Dial(c.address, 0)
		if err != nil {
			return nil, &net.OpError{Op: "dial", Net: smcFlag, Err: err}
		}
		return conn, nil
	}
	d := net.Dialer{Timeout: exchangeTimeout}
	return d.DialContext(ctx, "tcp", c.address)
}

func (c *client) exchange(conn net.Conn) error {
	message := make([]byte, c.size)
	for i := range message {
		message[i] = byte(rand.Uint32())
	}
	if err := conn.SetDeadline(time.Now().Add(exchangeTimeout)); err != nil {
		return err
	}
	if _, err := conn.Write(message); err != nil {
		return err
	}
	answer := make([]byte, len(message))
	if _, err := io.ReadFull(conn, answer); err != nil {
		return fmt.Errorf("answer: %w", err)
	}
	if !bytes.Equal(answer, message) {
		return errors.New("the answer is not the message")
	}
	return nil
}

// hold keeps one connection busy until it ends or ctx does.
func (c *client) hold(ctx context.Context) error {
	conn, err := c.dial(ctx)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	reporting, stop := context.WithCancel(ctx)
	var group sync.WaitGroup
	group.Go(func() { c.reportUntil(reporting) })
	defer group.Wait()
	defer stop()
	for ctx.Err() == nil {
		began := time.Now()
		err := c.exchange(conn)
		c.note(time.Since(began), err)
		if err != nil {
			c.mu.Lock()
			c.sum.Ended = true
			c.mu.Unlock()
			c.report()
			<-ctx.Done() // stay for whoever reads the log: the pod must not restart
			return nil
		}
		pause(ctx, c.interval)
	}
	return nil
}

func pause(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}
