// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/internal/synqueue"
)

// TestAttack_heldSYNs: while a pod sends SYNs to nowhere, more than can be held, its connections to
// elsewhere do not wait, and those to a server that is known to speak SMC-R are on SMC-R. One in ten
// may meet a queue of the kernel that is full: it is plain TCP, or, where SMC-R is required, its SYN is
// dropped, TCP repeats it after a second, and it is on SMC-R then.
func TestAttack_heldSYNs(t *testing.T) {
	for name, policies := range map[string]string{"preferred": preferAll, "required": "policies:\n- {name: must, mode: Required}\n"} {
		t.Run(name, func(t *testing.T) { floodOfSYNs(t, policies, name == "required") })
	}
}

func floodOfSYNs(t *testing.T, policies string, required bool) {
	const (
		conns     = 200
		unlucky   = conns / 10
		repeating = time.Second // of TCP, for the first time
	)
	l := newHoldLab(t, policies)
	l.route(t)
	l.a.start(t)
	l.b.start(t)
	serve(t, l.b.pod.listen(t, podB+":80"), says("server"))
	eventually(t, func() string {
		_ = l.a.pod.try(t, attempt{dst: podB + ":80"})
		if l.a.status(t).Conns.TotalSMCR == 0 {
			return "nothing is on SMC-R"
		}
		return ""
	})
	before := l.a.status(t)
	stop := l.a.pod.flood(t, filtered)
	eventually(t, func() string {
		if n := l.a.status(t).Conns.Live; n < synqueue.DefaultMaxHeld {
			return fmt.Sprintf("%d questions about other destinations are under way", n)
		}
		return ""
	})
	slowest, repeated := time.Duration(0), 0
	for range conns {
		r := l.a.pod.try(t, attempt{dst: podB + ":80"})
		if r.errno != 0 || r.who != "server" {
			t.Fatal(r)
		}
		if required && r.took > repeating {
			repeated++
			r.took -= repeating
		}
		slowest = max(slowest, r.took)
	}
	flood := stop()
	s := l.a.status(t)
	carried := int(s.Conns.TotalSMCR - before.Conns.TotalSMCR)
	t.Logf("%d SYNs to nowhere; %d of %d connections on SMC-R, %d after their SYN was repeated, slowest connect() but for that %v; reasons %v, connections %+v",
		flood, carried, conns, repeated, slowest, s.Reasons, s.Conns)
	if tooSlow(slowest) {
		t.Errorf("connect() took %v", slowest)
	}
	// How many meet a full queue says how fast the agent empties it beside a flood without a pause:
	// with the race detector that is not its own speed, as with tooSlow.
	want := conns - unlucky
	if underRaceDetector {
		want = 1
	}
	if carried < want {
		t.Errorf("%d of %d connections were on SMC-R, want %d", carried, conns, want)
	}
	if repeated > unlucky && !underRaceDetector {
		t.Errorf("%d of %d SYNs were dropped, want %d at most", repeated, conns, unlucky)
	}
}

// flood sends SYNs to all ports of an address, until stop is called, which returns how many.
func (s *space) flood(t testing.TB, addr string) (stop func() int) {
	t.Helper()
	ended := make(chan struct{})
	var wg sync.WaitGroup
	flood := 0
	wg.Go(func() {
		var fds []int
		for ; ; flood++ {
			fd, err := -1, error(nil)
			err = s.ns.Do(func() (err error) {
				fd, err = unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
				return err
			})
			if err == nil {
				err = unix.Connect(fd, &unix.SockaddrInet4{Addr: netip.MustParseAddr(addr).As4(), Port: 1 + flood%60000})
			}
			if !errors.Is(err, unix.EINPROGRESS) && !errors.Is(err, unix.EADDRNOTAVAIL) {
				t.Error(err)
			}
			over := false
			select {
			case <-ended:
				over = true
			default:
			}
			if fds = append(fds, fd); over || len(fds) == 2000 {
				for _, fd := range fds {
					unix.Close(fd)
				}
				fds = fds[:0]
			}
			if over {
				return
			}
		}
	})
	return func() int {
		close(ended)
		wg.Wait()
		return flood
	}
}
