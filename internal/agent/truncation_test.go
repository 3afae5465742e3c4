// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/smcr-io/kube-smcr/internal/testenv"
)

var attackRounds = flag.Int("attack.rounds", 1, "how often TestAttack_truncation does each of its harms")

// An application never sees an orderly end of data that is not whole, whatever happens
// to the agents at whatever moment: data flows both ways, with a half close.
func TestAttack_truncation(t *testing.T) {
	t.Parallel() // the test mostly waits
	for _, harm := range []struct {
		name string
		do   func(t *testing.T, l *lab, a, b *agentProcess)
	}{
		{"the client's agent is killed", func(_ *testing.T, _ *lab, a, _ *agentProcess) { a.signal(os.Kill) }},
		{"the server's agent is killed", func(_ *testing.T, _ *lab, _, b *agentProcess) { b.signal(os.Kill) }},
		{"the server's agent hangs and is killed", func(_ *testing.T, _ *lab, _, b *agentProcess) {
			b.signal(syscall.SIGSTOP)
			b.stopped()
			b.signal(os.Kill)
		}},
		{"the client's agent ends", func(_ *testing.T, _ *lab, a, _ *agentProcess) { a.signal(syscall.SIGTERM) }},
		{"the server's agent ends", func(_ *testing.T, _ *lab, _, b *agentProcess) { b.signal(syscall.SIGTERM) }},
		{"both agents end", func(_ *testing.T, _ *lab, a, b *agentProcess) {
			a.signal(syscall.SIGTERM)
			b.signal(syscall.SIGTERM)
		}},
		{"the server's agent is killed while it hands over", func(t *testing.T, l *lab, _, b *agentProcess) {
			l.b.process(t, "second")
			b.signal(os.Kill)
		}},
		{"the client's agent hands over", func(t *testing.T, l *lab, _, _ *agentProcess) { l.a.process(t, "second") }},
		{"a link is lost and the client's agent killed", func(t *testing.T, l *lab, a, _ *agentProcess) {
			l.a.host.links(t, func(h *netlink.Handle) error {
				link, err := h.LinkByName("roce0")
				if err != nil {
					return err
				}
				return h.LinkSetDown(link)
			})
			a.signal(os.Kill)
		}},
	} {
		t.Run(harm.name, func(t *testing.T) {
			for range *attackRounds {
				truncate(t, func(l *lab, a, b *agentProcess) { harm.do(t, l, a, b) })
			}
		})
	}
}

// truncate does a harm at some moment of one transfer.
func truncate(t *testing.T, harm func(l *lab, a, b *agentProcess)) {
	l := newHandoverLab(t)
	for _, n := range []*testNode{l.a, l.b} { // what is carried is reset early, in the midst of the data
		n.drain = 50 * time.Millisecond
		n.writeConfig(t, "  takeover: true\n"+preferAll)
	}
	a, b := l.a.succeed(t, "first"), l.b.succeed(t, "first")
	seed := testenv.Seed(t)
	r := rand.New(rand.NewPCG(seed, 0))
	ln := l.b.pod.listen(t, podB+":9000")
	accepted := make(chan *net.TCPConn, 1)
	go func() {
		c, err := ln.AcceptTCP()
		if err != nil {
			t.Error(err)
		}
		accepted <- c
	}()
	client, err := l.a.pod.dialPlain(podB + ":9000")
	must(t, err)
	server := <-accepted
	if server == nil {
		t.FailNow()
	}

	eventually(t, func() string {
		if l.a.status(t).Conns.LiveSMCR != 1 || l.b.status(t).Conns.LiveSMCR != 1 {
			return "the connection is not on SMC-R"
		}
		return ""
	})
	moment := make(chan struct{})
	var once sync.Once
	var wg sync.WaitGroup
	// The kernel tells a program of a reset once: a write that hears of it leaves the
	// end of the data to the read, with TCP as with us.
	var told [2]atomic.Bool
	var mu sync.Mutex // guards short
	var short []func()
	for i, d := range []struct {
		name     string
		from, to *net.TCPConn
	}{{"client to server", client, server}, {"server to client", server, client}} {
		data := make([]byte, 1<<20+r.IntN(15<<20))
		for i := 0; i < len(data); i += 997 {
			data[i] = byte(r.Uint32())
		}
		at := r.IntN(len(data))
		wg.Go(func() {
			_, err := d.from.Write(data)
			if err == nil {
				err = d.from.CloseWrite()
			}
			told[i].Store(err != nil)
		})
		wg.Go(func() {
			got, err := readPast(d.to, at, func() { once.Do(func() { close(moment) }) })
			switch {
			case err == nil && !bytes.Equal(got, data):
				mu.Lock()
				defer mu.Unlock()
				short = append(short, func() {
					if !bytes.HasPrefix(data, got) || !told[1-i].Load() {
						t.Errorf("seed %d, %s: an orderly end after %d of %d bytes, or other ones", seed, d.name, len(got), len(data))
					}
				})
			case err != nil && !errors.Is(err, syscall.ECONNRESET):
				t.Errorf("seed %d, %s: %v after %d of %d bytes, want a reset", seed, d.name, err, len(got), len(data))
			default:
				t.Logf("%s: %d of %d bytes, %v", d.name, len(got), len(data), err)
			}
		})
	}
	<-moment
	harm(l, a, b)
	wg.Wait()
	for _, check := range short {
		check()
	}
	_, _ = client.Close(), server.Close()
}

// readPast reads to the end, and calls f once so many bytes are there, or it ends.
func readPast(c *net.TCPConn, at int, f func()) ([]byte, error) {
	defer f()
	_ = c.SetReadDeadline(time.Now().Add(30 * time.Second))
	var got bytes.Buffer
	buf := make([]byte, 64<<10)
	for {
		n, err := c.Read(buf)
		if got.Write(buf[:n]); got.Len() >= at {
			f()
		}
		switch {
		case errors.Is(err, io.EOF):
			return got.Bytes(), nil
		case err != nil:
			return got.Bytes(), fmt.Errorf("read: %w", err)
		}
	}
}
