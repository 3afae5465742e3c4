// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/internal/synqueue"
)

// roleEnv makes a process of the test binary something else than a test; nsEnv is the
// namespace of its queue.
const (
	roleEnv = "KUBE_SMCR_TEST_ROLE"
	nsEnv   = "KUBE_SMCR_TEST_NETNS"

	roleKeeper  = "keeper"  // KeepQueues
	roleOwner   = "owner"   // has the queue and answers nothing
	roleKept    = "kept"    // the same, with a keeper
	roleServing = "serving" // the same, and lets SYNs go after some milliseconds
)

func playRole(role string) {
	err := func() error {
		switch role {
		case roleKeeper:
			return KeepQueues(os.NewFile(3, "keeper"), func(err error) { fmt.Fprintln(os.Stderr, role, err) })
		case roleSearcher:
			return searchAsNobody()
		case roleHeadless, rolePrivate:
			return hide(role)
		}
		return ownQueue(role)
	}()
	if err != nil {
		fmt.Fprintln(os.Stderr, role, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// ownQueue binds the queue, says so, and holds SYNs until its standard input ends.
func ownQueue(role string) error {
	ns, err := OpenNetNS(os.Getenv(nsEnv))
	if err != nil {
		return err
	}
	q, err := OpenQueue(ns, QueueConfig{Number: testQueue})
	if err != nil {
		return err
	}
	if role != roleOwner {
		k, child, err := NewKeeper()
		if err != nil {
			return err
		}
		c := roleCommand(roleKeeper)
		c.ExtraFiles = []*os.File{child}
		if err := c.Start(); err != nil {
			return err
		}
		_ = child.Close()
		if _, err := k.Keep(ns, q); err != nil {
			return err
		}
	}
	ask := never
	if role == roleServing {
		ask = askAfter(5*time.Millisecond, synqueue.Pass)
	}
	h := newHolder(nil, q, HolderConfig{Marks: testHoldMarks, Ask: ask, Table: synqueue.Config{Deadline: time.Hour}})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- h.Run(ctx) }()
	fmt.Println("ready")
	_, _ = io.Copy(io.Discard, os.Stdin)
	cancel()
	return <-done
}

func roleCommand(role string) *exec.Cmd {
	c := exec.Command("/proc/self/exe")
	c.Env = append(os.Environ(), roleEnv+"="+role)
	c.Stderr = os.Stderr
	return c
}

// startOwner starts a process that has the queue of ns.
func startOwner(t *testing.T, role string, ns *NetNS) *exec.Cmd {
	t.Helper()
	c := roleCommand(role)
	c.Env = append(c.Env, nsEnv+"="+ns.Path())
	in, err := c.StdinPipe()
	mustDo(t, err)
	out, err := c.StdoutPipe()
	mustDo(t, err)
	mustDo(t, c.Start())
	t.Cleanup(func() {
		_ = in.Close()
		_ = c.Process.Kill()
		_ = c.Wait()
	})
	if line, err := bufio.NewReader(out).ReadString('\n'); line != "ready\n" {
		t.Fatalf("the owner of the queue said %q, %v", line, err)
	}
	if role != roleOwner {
		waitFor(t, "the keeper", func() bool { return hasKeeper(c.Process.Pid) })
	}
	return c
}

// hasKeeper tells whether a process has a child that has descriptors of a queue.
func hasKeeper(pid int) bool {
	children, _ := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", pid, pid))
	all := strings.Fields(string(children))
	if tasks, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid)); err == nil {
		for _, task := range tasks {
			b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/task/%s/children", pid, task.Name()))
			all = append(all, strings.Fields(string(b))...)
		}
	}
	for _, child := range all {
		fds, _ := os.ReadDir("/proc/" + child + "/fd")
		for _, fd := range fds {
			if to, _ := os.Readlink("/proc/" + child + "/fd/" + fd.Name()); strings.HasSuffix(to, "/nfnetlink_queue") {
				return true
			}
		}
	}
	return false
}

// queueLine is how many packets wait in the queue of ns, and the number of the last one.
func queueLine(t testing.TB, ns *NetNS) (waiting int, last uint32) {
	t.Helper()
	mustDo(t, ns.Do(func() error {
		b, err := os.ReadFile(queueList)
		if err == nil {
			waiting, last, err = parseQueueList(bytes.NewReader(b), testQueue)
		}
		return err
	}))
	return waiting, last
}

// connects connects n times at once, and waits until all of these are held.
func (h *held) connects(t *testing.T, n int, limit time.Duration) (results func() []connected) {
	t.Helper()
	all := make([]connected, n)
	var wg sync.WaitGroup
	_, before := queueLine(t, h.pod)
	for i := range all {
		wg.Go(func() { all[i] = connect(t, h.pod, h.dst, false, limit) })
	}
	waitFor(t, "held SYNs", func() bool {
		_, last := queueLine(t, h.pod)
		return last >= before+uint32(n)
	})
	return func() []connected {
		wg.Wait()
		return all
	}
}

// TestKernel_heldSYN: what the design stands on. TCP does not repeat a SYN while it is in
// a queue, so that no rule that changes with time helps one whose owner was stopped.
func TestKernel_heldSYN(t *testing.T) {
	h := newHeld(t, families[0])
	owner := startOwner(t, roleOwner, h.pod)
	h.install(t, testHoldConfig(t, families[0]))
	mustDo(t, owner.Process.Signal(unix.SIGSTOP))
	const limit = 2500 * time.Millisecond // two repetitions would come within it
	for _, c := range h.connects(t, 2, limit)() {
		c.check(t, "", unix.EINPROGRESS, limit, limit+slack)
	}
	if _, last := queueLine(t, h.pod); last != 2 {
		t.Errorf("%d packets came, want one for each connection", last)
	}
}

// TestQueue_killedOwner: the kernel drops what waits when the owner of the queue is killed,
// TCP repeats it, and nobody is on the queue then. No connection fails.
func TestQueue_killedOwner(t *testing.T) {
	for _, f := range families {
		t.Run(f.name, func(t *testing.T) {
			h := newHeld(t, f)
			owner := startOwner(t, roleOwner, h.pod)
			h.install(t, testHoldConfig(t, f))
			results := h.connects(t, 5, 0)
			mustDo(t, owner.Process.Kill())
			_ = owner.Wait()
			connect(t, h.pod, h.dst, false, 0).check(t, "server", 0, 0, slack)
			for _, c := range results() {
				c.check(t, "server", 0, 0, time.Second+slack)
			}
		})
	}
}

// TestKeeper_killedAgent: with a keeper what waits does not even wait for TCP.
func TestKeeper_killedAgent(t *testing.T) {
	for _, f := range families {
		t.Run(f.name, func(t *testing.T) {
			h := newHeld(t, f)
			agent := startOwner(t, roleKept, h.pod)
			h.install(t, testHoldConfig(t, f))
			results := h.connects(t, 5, 0)
			mustDo(t, agent.Process.Kill())
			_ = agent.Wait()
			connect(t, h.pod, h.dst, false, 0).check(t, "server", 0, 0, slack)
			for _, c := range results() {
				c.check(t, "server", 0, 0, slack)
			}
			waitFor(t, "the end of the queue", func() bool {
				q, err := OpenQueue(h.pod, QueueConfig{Number: testQueue})
				if err == nil {
					mustDo(t, q.Close())
				}
				return err == nil
			})
		})
	}
}

// TestKeeper_stoppedAgent: no connection waits for more than a second while the agent is
// stopped, and it goes on as if nothing were when it runs again.
func TestKeeper_stoppedAgent(t *testing.T) {
	for _, f := range families {
		t.Run(f.name, func(t *testing.T) {
			h := newHeld(t, f)
			agent := startOwner(t, roleKept, h.pod)
			h.install(t, testHoldConfig(t, f))
			for _, stopped := range []bool{true, true, false} { // at last it only answers nothing
				signal := unix.SIGSTOP
				if !stopped {
					signal = unix.SIGCONT
				}
				mustDo(t, agent.Process.Signal(signal))
				for _, c := range h.connects(t, 5, 0)() {
					c.check(t, "server", 0, 0, time.Second+slack/2)
				}
			}
		})
	}
}

// TestKeeper_underLoad: while one connection after the other is made, the agent is killed or
// stopped. None fails, and none waits for more than a second.
func TestKeeper_underLoad(t *testing.T) {
	for name, signal := range map[string]unix.Signal{"killed": unix.SIGKILL, "stopped": unix.SIGSTOP} {
		t.Run(name, func(t *testing.T) {
			h := newHeld(t, families[0])
			agent := startOwner(t, roleServing, h.pod)
			cfg := testHoldConfig(t, families[0])
			cfg.FailOpenTTL = time.Second // the last sign of life is now
			h.install(t, cfg)
			var wg sync.WaitGroup
			var all [4][]connected
			end := time.Now().Add(2500 * time.Millisecond)
			for i := range all {
				wg.Go(func() {
					for time.Now().Before(end) {
						all[i] = append(all[i], connect(t, h.pod, h.dst, false, 0))
					}
				})
			}
			waitFor(t, "held SYNs", func() bool {
				_, last := queueLine(t, h.pod)
				return last > 50
			})
			mustDo(t, agent.Process.Signal(signal))
			wg.Wait()
			count, slowest := 0, time.Duration(0)
			for i := range all {
				for _, c := range all[i] {
					c.check(t, "server", 0, 0, time.Second+slack/2)
					slowest = max(slowest, c.took)
					count++
				}
			}
			t.Logf("%d connections, slowest %v", count, slowest)
		})
	}
}

func TestParseQueueList(t *testing.T) {
	const list = "    5  12972     1 2    64     0     0        7  1\n 7609 -12345    12 2  2048     0     0 4294967295  1\n"
	for _, c := range []struct {
		queue   uint16
		waiting int
		last    uint32
		ok      bool
	}{{5, 1, 7, true}, {7609, 12, 1<<32 - 1, true}, {6, 0, 0, false}} {
		waiting, last, err := parseQueueList(strings.NewReader(list), c.queue)
		if waiting != c.waiting || last != c.last || (err == nil) != c.ok {
			t.Errorf("queue %d: %d wait up to %d, %v; want %d up to %d", c.queue, waiting, last, err, c.waiting, c.last)
		}
	}
}

// startKeeper starts a keeper of no queue.
func startKeeper(t *testing.T) *Keeper {
	t.Helper()
	k, child, err := NewKeeper()
	mustDo(t, err)
	c := roleCommand(roleKeeper)
	c.ExtraFiles = []*os.File{child}
	err = c.Start()
	mustDo(t, errors.Join(err, child.Close()))
	t.Cleanup(func() { mustDo(t, errors.Join(k.Close(), c.Wait())) })
	return k
}

// TestKeeper_readsNothing: a keeper that reads nothing keeps the agent for a bounded time only.
func TestKeeper_readsNothing(t *testing.T) {
	ns := newNS(t)
	q := queueOf(t, ns, testQueue)
	for name, say := range map[string]func(k *Keeper) error{
		"release": func(k *Keeper) error { return k.Release(1) },
		"keep": func(k *Keeper) error {
			_, err := k.Keep(ns, q)
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel() // the test mostly waits
			k, child, err := NewKeeper()
			mustDo(t, err)
			defer child.Close()
			said := make(chan error, 1)
			go func() {
				var err error
				for err == nil {
					err = say(k)
				}
				said <- err
			}()
			select {
			case err := <-said:
				if !errors.Is(err, os.ErrDeadlineExceeded) {
					t.Errorf("%v, want that the time is over", err)
				}
			case <-time.After(keeperReadPatience + waitLimit):
				t.Error("still waits for the keeper to read")
			}
			mustDo(t, k.Close())
		})
	}
}

// queueOf binds a queue, and a rule would find room in it.
func queueOf(t *testing.T, ns *NetNS, number uint16) *Queue {
	t.Helper()
	q, err := OpenQueue(ns, QueueConfig{Number: number})
	mustDo(t, err)
	t.Cleanup(func() { mustDo(t, q.Close()) })
	return q
}

// TestKeeper_liveAgent: what goes wrong with one queue, or with one message, takes no room from the queues of an
// agent that lives, and no packet waits for longer than with a keeper: a pod's program binds so many queues that the
// list is long, messages come without their descriptors (the keeper could not open more files) and
// with a socket that is none.
func TestKeeper_liveAgent(t *testing.T) {
	f := families[0]
	h := newHeld(t, f)
	k := startKeeper(t)
	for n := range uint16(120) { // lines of 65 bytes each, in the kernel's first bucket
		_ = queueOf(t, h.pod, n<<8|n&15)
	}
	h.serve(t, HolderConfig{Ask: never, Table: synqueue.Config{Deadline: time.Hour}}, QueueConfig{})
	_, err := k.Keep(h.pod, h.queue)
	mustDo(t, err)
	for _, m := range [][]byte{{keeperAdd, 0, 0, 0, 9, 0, 9}, {9}, {keeperRemove, 0, 0, 0, 99}} {
		_, err := k.conn.Write(m)
		mustDo(t, err)
	}
	null, err := os.Open(os.DevNull)
	mustDo(t, err)
	defer null.Close()
	fds := unix.UnixRights(int(null.Fd()), int(null.Fd()))
	for _, m := range [][]byte{{keeperAdd, 0, 0, 0, 10, 0, 9}, {keeperRemove, 0, 0, 0, 11}} {
		_, _, err := k.conn.WriteMsgUnix(m, fds, nil)
		mustDo(t, err)
	}
	h.install(t, testHoldConfig(t, f))
	for range 2 {
		const least = KeeperPatience / 2 // a drained queue would hold it for no time at all
		for _, c := range h.connects(t, 3, 0)() {
			c.check(t, "server", 0, least, KeeperPatience+2*slack)
		}
	}
}

// bindMany binds as many queues as that with one socket, all before testQueue in the kernel's list.
func bindMany(t *testing.T, ns *NetNS, many int) {
	t.Helper()
	q := queueOf(t, ns, 0)
	bucket := func(number uint16) uint16 { return (number>>8 ^ number) & 15 }
	var b []byte
	for number := uint16(1); many > 0; number++ {
		if bucket(number) >= bucket(testQueue) {
			continue
		}
		start := len(b)
		b = appendQueueHeader(b, queueConfig, number, 0)
		b = end(appendAttr(b, attrConfigCommand, []byte{commandBind, 0, 0, unix.AF_UNSPEC}), start)
		if many--; len(b) > 4<<10 || many == 0 {
			mustDo(t, q.send(b))
			b = b[:0]
		}
	}
}

// TestAttack_manyQueues: a pod's program binds so many queues that it is work to find the agent's in the list. The keeper
// reads little of the list, and looks the less often the more it reads; other pods' queues are looked at as ever.
func TestAttack_manyQueues(t *testing.T) {
	for _, c := range []struct{ bound, most int }{{0, 10}, {100, 10}, {700, 3}, {5000, 2}} {
		t.Run(fmt.Sprint(c.bound), func(t *testing.T) {
			queues := map[uint32]*kept{}
			for i, bound := range []int{c.bound, 0} {
				ns := newNS(t)
				_ = queueOf(t, ns, testQueue)
				bindMany(t, ns, bound)
				mustDo(t, ns.Do(func() error {
					list, err := os.Open(queueList)
					if err == nil {
						t.Cleanup(func() { mustDo(t, list.Close()) })
					}
					queues[uint32(i)] = &kept{queue: testQueue, socket: -1, list: list}
					return err
				}))
			}
			pod, quiet := queues[0], queues[1]
			looks, now := 0, time.Now()
			for range 10 { // a second
				if !now.Before(pod.next) {
					looks++
				}
				releaseAll(queues, now)
				if len(quiet.marks) != 1 || !quiet.marks[0].at.Equal(now) {
					t.Fatal("the queue of another pod was not looked at")
				}
				now = now.Add(keeperInterval)
			}
			if looks > c.most || looks == 0 {
				t.Errorf("%d looks in a second, want at most %d", looks, c.most)
			}
			if found := len(pod.marks) > 0; found != (c.bound < 1000) {
				t.Errorf("the queue was found: %t", found)
			}
		})
	}
}
