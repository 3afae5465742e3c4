// SPDX-License-Identifier: Apache-2.0

package smcr_test

import (
	"bytes"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
)

// Two goroutines read from one socket by turns: every byte arrives once and in
// order, and RelayFrom learns what the other one met.
func TestConn_answersReadInItsPlace(t *testing.T) {
	for _, end := range []struct {
		name string
		do   func(app *net.TCPConn)
		want error
	}{
		{"in order", func(app *net.TCPConn) { _ = app.Close() }, nil},
		{"reset", abort, syscall.ECONNRESET},
	} {
		t.Run(end.name, func(t *testing.T) {
			a, b, near, app := relayEnds(t, newPair(t))
			ended := make(chan error, 1)
			go func() { _, err := b.RelayFrom(near); ended <- err }()

			var looking sync.WaitGroup
			stop, found := make(chan struct{}), 0
			looking.Go(func() {
				for {
					select {
					case <-stop:
						return
					default:
						if smcr.LookForAnswer(b) {
							found++
						}
					}
				}
			})
			rng := rand.New(rand.NewPCG(1, 2))
			sent := make([]byte, 1<<20)
			_, _ = randomReader(3).Read(sent)
			go func() {
				for rest := sent; len(rest) > 0; {
					n := min(len(rest), 1+rng.IntN(8<<10))
					if _, err := app.Write(rest[:n]); err != nil {
						t.Error(err)
						return
					}
					rest = rest[n:]
				}
			}()
			got := make([]byte, len(sent))
			if _, err := io.ReadFull(a, got); err != nil || !bytes.Equal(got, sent) {
				t.Fatalf("other bytes arrived, %v", err)
			}
			end.do(app)
			select {
			case err := <-ended:
				if !errors.Is(err, end.want) {
					t.Errorf("RelayFrom = %v, want %v", err, end.want)
				}
			case <-time.After(10 * time.Second):
				t.Error("RelayFrom did not end")
			}
			close(stop)
			looking.Wait()
			// Whoever waits for the other direction's end still can.
			if _, err := near.Read(make([]byte, 1)); errors.Is(err, os.ErrDeadlineExceeded) {
				t.Error("the socket was left with a deadline")
			}
			t.Logf("%d pieces were found by looking", found)
		})
	}
}

// In a dialogue the device's goroutine looks for the program's answers.
// Whether it finds them is up to the scheduler.
func TestConn_dialoguePolls(t *testing.T) {
	a, b, near, app := relayEnds(t, newSoftPair(t, rdma.MTU1024))
	var relays sync.WaitGroup
	relays.Go(func() { _, _ = b.RelayFrom(near) })
	relays.Go(func() { _, _ = b.RelayTo(near) })
	relays.Go(func() { _, _ = io.Copy(app, app) }) // the program
	buf := make([]byte, 64)
	waitFor(t, "a look for an answer", func() bool {
		for range 100 {
			if _, err := a.Write(buf); err != nil {
				t.Fatal(err)
			}
			if _, err := io.ReadFull(a, buf); err != nil {
				t.Fatal(err)
			}
		}
		s := smcr.StackOf(b).Stats()
		return s.AnswerPolls > 0 && s.AnswersPolled <= s.AnswerPolls
	})
	_ = a.Close()
	_ = app.Close()
	relays.Wait()
}
