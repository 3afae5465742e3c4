// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/internal/synqueue"
)

const testQueue = 7609

var testHoldMarks = HoldMarks{Divert: 0x5bd0, Reset: 0x5bd1, HostUnreachable: 0x5bd2, NetUnreachable: 0x5bd3, Prohibited: 0x5bd4}

// held is a pod whose SYNs are held, a peer with a server, and the agent's listener.
type held struct {
	pod, peer *NetNS
	dst       netip.AddrPort // the server's
	queue     *Queue
	rules     *Redirect
	holder    *Holder
	stop      func()
}

// askAfter answers every question after some time.
func askAfter(d time.Duration, decision synqueue.Decision) func(*Holder, synqueue.Conn, bool) {
	return func(h *Holder, c synqueue.Conn, _ bool) {
		if d == 0 {
			_, _ = h.Answer(c, decision, synqueue.Finding{})
			return
		}
		time.AfterFunc(d, func() { _, _ = h.Answer(c, decision, synqueue.Finding{}) })
	}
}

var probedForm = sync.OnceValues(ProbeQueue)

// never leaves the question open.
func never(*Holder, synqueue.Conn, bool) {}

func testHoldConfig(t testing.TB, f ipFamily) RedirectConfig {
	t.Helper()
	form, err := probedForm()
	if err != nil {
		t.Fatal(err)
	}
	cfg := testConfig(f)
	cfg.Hold = &HoldConfig{Queue: testQueue, Form: form, Marks: testHoldMarks}
	return cfg
}

// newHeld makes the pod without anybody on the queue; serve puts a holder there.
func newHeld(t testing.TB, f ipFamily) *held {
	t.Helper()
	pod, peer := newPair(t)
	server := listen(t, peer, nil, f.peer, 0)
	answer(t, server, "server")
	answer(t, listen(t, pod, marked, f.loopback, testOutPort), "agent")
	// The first packets to a new neighbour may be lost, which costs a second.
	_ = served(t, pod, nil, addrOf(server))
	return &held{pod: pod, peer: peer, dst: addrOf(server)}
}

func (h *held) install(t testing.TB, cfg RedirectConfig) {
	t.Helper()
	var err error
	if h.rules, err = InstallRedirect(h.pod, cfg); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { mustDo(t, h.rules.Close()) })
}

func (h *held) serve(t testing.TB, cfg HolderConfig, qc QueueConfig) {
	t.Helper()
	qc.Number = testQueue
	var err error
	if h.queue, err = OpenQueue(h.pod, qc); err != nil {
		t.Fatal(err)
	}
	cfg.Marks = testHoldMarks
	h.holder = newHolder(h.pod, h.queue, cfg)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- h.holder.Run(ctx) }()
	stopped := false
	h.stop = func() {
		if stopped {
			return
		}
		stopped = true
		cancel()
		mustDo(t, errors.Join(<-done, h.queue.Close()))
	}
	t.Cleanup(h.stop)
}

// connected is what connect() of an application came to.
type connected struct {
	errno unix.Errno
	who   string // the listener that answered
	took  time.Duration
}

// connect connects like an application, blocking. mapped: on an IPv6 socket to an IPv4
// address. limit, if not 0, is the application's own timeout: errno is EINPROGRESS.
func connect(t testing.TB, ns *NetNS, dst netip.AddrPort, mapped bool, limit time.Duration) connected {
	t.Helper()
	var sa unix.Sockaddr = &unix.SockaddrInet6{Port: int(dst.Port()), Addr: dst.Addr().As16()}
	fam := unix.AF_INET6
	if dst.Addr().Is4() && !mapped {
		fam, sa = unix.AF_INET, &unix.SockaddrInet4{Port: int(dst.Port()), Addr: dst.Addr().As4()}
	}
	var fd int
	mustDo(t, ns.Do(func() (err error) {
		fd, err = unix.Socket(fam, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		return err
	}))
	defer unix.Close(fd)
	give := limit
	if give == 0 {
		give = waitLimit
	}
	tv := unix.NsecToTimeval(give.Nanoseconds())
	mustDo(t, unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &tv))
	mustDo(t, unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv))
	// A signal of Go's runtime would interrupt the calls.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var old unix.Sigset_t
	all := unix.Sigset_t{}
	for i := range all.Val {
		all.Val[i] = ^all.Val[i]
	}
	mustDo(t, unix.PthreadSigmask(unix.SIG_SETMASK, &all, &old))
	defer func() { mustDo(t, unix.PthreadSigmask(unix.SIG_SETMASK, &old, nil)) }()
	begin := time.Now()
	err := unix.Connect(fd, sa)
	c := connected{took: time.Since(begin)}
	if err != nil {
		if !errors.As(err, &c.errno) {
			t.Fatal(err)
		}
		return c
	}
	buf := make([]byte, 16)
	n, err := unix.Read(fd, buf)
	mustDo(t, err)
	c.who = string(buf[:n])
	return c
}

func (c connected) check(t testing.TB, who string, errno unix.Errno, least, most time.Duration) {
	t.Helper()
	if c.who != who || c.errno != errno || c.took < least || c.took > most {
		t.Errorf("reached %q, errno %v, after %v; want %q, errno %v, after %v to %v", c.who, c.errno, c.took, who, errno, least, most)
	}
}

// way is how an application connects.
type way struct {
	name   string
	family ipFamily
	mapped bool
}

var ways = []way{{"IPv4", families[0], false}, {"IPv6", families[1], false}, {"IPv4 on an IPv6 socket", families[0], true}}

// slack is for a busy machine.
const slack = 600 * time.Millisecond

// TestHold_outcomes: connect() is held for 200 ms, and then ends as was decided.
func TestHold_outcomes(t *testing.T) {
	const wait = 200 * time.Millisecond
	for _, w := range ways {
		h := newHeld(t, w.family)
		h.install(t, testHoldConfig(t, w.family))
		prohibited := unix.EHOSTUNREACH
		if !w.family.pod.Is4() {
			prohibited = unix.EACCES
		}
		for _, c := range []struct {
			decision synqueue.Decision
			who      string
			errno    unix.Errno
		}{
			{synqueue.Divert, "agent", 0},
			{synqueue.Pass, "server", 0},
			{synqueue.Reset, "", unix.ECONNREFUSED},
			{synqueue.HostUnreachable, "", unix.EHOSTUNREACH},
			{synqueue.NetUnreachable, "", unix.ENETUNREACH},
			{synqueue.Prohibited, "", prohibited},
		} {
			t.Run(w.name+"/"+c.decision.String(), func(t *testing.T) {
				h.serve(t, HolderConfig{Ask: askAfter(wait, c.decision)}, QueueConfig{})
				connect(t, h.pod, h.dst, w.mapped, 0).check(t, c.who, c.errno, wait, wait+slack)
				if got := settled(h.holder); got.Held != 1 || got.Gone+got.Broken+got.NotSYN+got.Repeated != 0 {
					t.Errorf("counters %+v, want one SYN that was held", got)
				}
			})
		}
	}
}

// TestHold_forms: a kernel that has both ways to say it does the same in both.
func TestHold_forms(t *testing.T) {
	newNS(t) // what it needs
	there := 0
	for _, form := range []QueueForm{QueueNative, QueueCompat} {
		if err := probeQueueForm(form); err != nil {
			t.Logf("%v: %v", form, err)
			continue
		}
		there++
		for _, f := range families {
			h := newHeld(t, f)
			cfg := testHoldConfig(t, f)
			cfg.Hold.Form = form
			h.install(t, cfg)
			connect(t, h.pod, h.dst, false, 0).check(t, "server", 0, 0, slack)
			h.serve(t, HolderConfig{Ask: askAfter(100*time.Millisecond, synqueue.Divert)}, QueueConfig{})
			connect(t, h.pod, h.dst, false, 0).check(t, "agent", 0, 100*time.Millisecond, 100*time.Millisecond+slack)
		}
	}
	if there == 0 {
		t.Error("this kernel has neither")
	}
}

// TestHold_nobody: without anybody on the queue connections go on at once.
func TestHold_nobody(t *testing.T) {
	for _, w := range ways {
		t.Run(w.name, func(t *testing.T) {
			h := newHeld(t, w.family)
			h.install(t, testHoldConfig(t, w.family))
			connect(t, h.pod, h.dst, w.mapped, 0).check(t, "server", 0, 0, slack)
			h.serve(t, HolderConfig{Ask: askAfter(0, synqueue.Divert)}, QueueConfig{})
			connect(t, h.pod, h.dst, w.mapped, 0).check(t, "agent", 0, 0, slack)
			h.stop()
			connect(t, h.pod, h.dst, w.mapped, 0).check(t, "server", 0, 0, slack)
		})
	}
}

// TestHold_leavesAlone: what is not selected, not the application's or not for elsewhere is
// not held, and nothing is once the agent gives no sign of life.
func TestHold_leavesAlone(t *testing.T) {
	for _, f := range families {
		t.Run(f.name, func(t *testing.T) {
			h := newHeld(t, f)
			h.serve(t, HolderConfig{Ask: askAfter(0, synqueue.Reset)}, QueueConfig{})
			cfg := testHoldConfig(t, f)
			cfg.FailOpenTTL = minFailOpenTTL
			h.install(t, cfg)
			mustDo(t, h.rules.Renew())
			connect(t, h.pod, h.dst, false, 0).check(t, "", unix.ECONNREFUSED, 0, slack)
			want(t, served(t, h.pod, marked, h.dst), "server")
			own := listen(t, h.pod, nil, f.pod, 0)
			answer(t, own, "own")
			want(t, served(t, h.pod, nil, addrOf(own)), "own")
			waitFor(t, "the end of the hold", func() bool {
				return connect(t, h.pod, h.dst, false, 0).who == "server"
			})
			cfg.Outbound = nil
			mustDo(t, h.rules.Update(cfg))
			mustDo(t, h.rules.Renew())
			want(t, served(t, h.pod, nil, h.dst), "server")
			cfg.Outbound = testConfig(f).Outbound
			mustDo(t, h.rules.Update(cfg))
			mustDo(t, h.rules.Renew())
			connect(t, h.pod, h.dst, false, 0).check(t, "", unix.ECONNREFUSED, 0, slack)
		})
	}
}

// TestHold_required: what must be on SMC-R does not go past the queue without a verdict, as long as the
// agent is taken for alive.
func TestHold_required(t *testing.T) {
	for _, f := range families {
		for name, caught := range map[string]WhenCaught{"some": CaughtDrop, "all": CaughtDivert} {
			t.Run(f.name+"/"+name, func(t *testing.T) {
				h := newHeld(t, f)
				cfg := testHoldConfig(t, f)
				cfg.WhenCaught = caught
				if caught == CaughtDrop {
					cfg.Required = []OutboundRule{{Prefix: f.all(), Ports: []PortRange{{h.dst.Port(), h.dst.Port()}}}}
				}
				h.install(t, cfg)
				const limit = 200 * time.Millisecond
				connect(t, h.pod, h.dst, false, limit).check(t, "", unix.EINPROGRESS, limit, limit+slack)
				want(t, served(t, h.pod, marked, h.dst), "server") // the agent's own
				if caught == CaughtDrop {
					connect(t, h.pod, netip.AddrPortFrom(f.peer, 9), false, 0).check(t, "", unix.ECONNREFUSED, 0, slack)
				}
				h.serve(t, HolderConfig{Ask: askAfter(0, synqueue.Divert)}, QueueConfig{})
				connect(t, h.pod, h.dst, false, 0).check(t, "agent", 0, 0, slack)
				h.stop()
				cfg.FailOpenTTL = minFailOpenTTL
				mustDo(t, h.rules.Update(cfg))
				connect(t, h.pod, h.dst, false, 0).check(t, "server", 0, 0, time.Second+slack) // TCP repeats the SYN
			})
		}
	}
}

// TestHold_ownTimeout: an application that gives up gets its own timeout.
func TestHold_ownTimeout(t *testing.T) {
	for _, w := range ways {
		t.Run(w.name, func(t *testing.T) {
			h := newHeld(t, w.family)
			h.serve(t, HolderConfig{Ask: never, Table: synqueue.Config{Deadline: waitLimit}}, QueueConfig{})
			h.install(t, testHoldConfig(t, w.family))
			const limit = 300 * time.Millisecond
			result := make(chan connected, 1)
			go func() { result <- connect(t, h.pod, h.dst, w.mapped, limit) }()
			waitFor(t, "the held SYN", func() bool { return h.holder.Counters().Held == 1 })
			(<-result).check(t, "", unix.EINPROGRESS, limit, limit+slack)
			if got := settled(h.holder); got.Verdicts[synqueue.Pass] != 0 {
				t.Errorf("counters %+v, want one SYN that waits", got)
			}
		})
	}
}

// TestHold_deadline: without an answer the connection is the application's own.
func TestHold_deadline(t *testing.T) {
	h := newHeld(t, families[0])
	h.serve(t, HolderConfig{Ask: never}, QueueConfig{})
	h.install(t, testHoldConfig(t, families[0]))
	connect(t, h.pod, h.dst, false, 0).check(t, "server", 0, synqueue.DefaultDeadline, time.Second)
}

// TestHold_nonBlocking: connect() says at once that it is under way, and the socket becomes
// writable when it is decided.
func TestHold_nonBlocking(t *testing.T) {
	for _, f := range families {
		h := newHeld(t, f)
		h.install(t, testHoldConfig(t, f))
		for d, want := range map[synqueue.Decision]unix.Errno{synqueue.Pass: 0, synqueue.Divert: 0, synqueue.Reset: unix.ECONNREFUSED, synqueue.HostUnreachable: unix.EHOSTUNREACH} {
			t.Run(f.name+"/"+d.String(), func(t *testing.T) {
				const wait = 200 * time.Millisecond
				h.serve(t, HolderConfig{Ask: askAfter(wait, d)}, QueueConfig{})
				s, err := h.pod.socket(f.pod)
				mustDo(t, err)
				begin := time.Now()
				c, err := s.connect(timeout(t, waitLimit), h.dst) // Go's own sockets do not block
				if c != nil {
					defer func() { _ = c.Close() }()
				}
				if took := time.Since(begin); took < wait || took > wait+slack {
					t.Errorf("after %v, want %v", took, wait)
				}
				if want == 0 && err != nil || want != 0 && !errors.Is(err, want) {
					t.Errorf("got %v, want %v", err, want)
				}
			})
		}
	}
}

// TestHold_repeatedSYN: a SYN that passed and is repeated by TCP, because the server did not
// answer, is not held again.
func TestHold_repeatedSYN(t *testing.T) {
	for _, d := range []synqueue.Decision{synqueue.Pass, synqueue.Divert} {
		t.Run(d.String(), func(t *testing.T) {
			h := newHeld(t, families[0])
			h.serve(t, HolderConfig{Ask: askAfter(0, d)}, QueueConfig{})
			h.install(t, testHoldConfig(t, families[0]))
			// A full backlog does not answer SYNs.
			where, at := h.peer, families[0].peer
			if d == synqueue.Divert {
				where, at = h.pod, families[0].loopback
			}
			port := fullListener(t, where, at)
			dst := netip.AddrPortFrom(families[0].peer, port)
			if d == synqueue.Divert {
				cfg := testHoldConfig(t, families[0])
				cfg.OutboundPort = port
				h.install(t, cfg)
			}
			const limit = 2500 * time.Millisecond // the repetition comes after 1 s
			connect(t, h.pod, dst, false, limit).check(t, "", unix.EINPROGRESS, limit, limit+slack)
			if got := settled(h.holder); got.Held != 1 || got.Repeated != 0 {
				t.Errorf("counters %+v, want one SYN that was held once", got)
			}
		})
	}
}

// TestHold_manyRefused: answers come each time. The kernel sends 50 ICMP errors of IPv4 at once
// and 1000 a second (icmp_msgs_burst, icmp_msgs_per_sec), to all namespaces; who gets none repeats his SYN
// after a second, and gets the same answer without that it is held again.
func TestHold_manyRefused(t *testing.T) {
	for _, f := range families {
		h := newHeld(t, f)
		h.install(t, testHoldConfig(t, f))
		for d, errno := range map[synqueue.Decision]unix.Errno{
			synqueue.Reset: unix.ECONNREFUSED, synqueue.HostUnreachable: unix.EHOSTUNREACH, synqueue.NetUnreachable: unix.ENETUNREACH,
		} {
			t.Run(f.name+"/"+d.String(), func(t *testing.T) {
				h.serve(t, HolderConfig{Ask: askAfter(0, d)}, QueueConfig{})
				late, most := 0, slack
				if f.pod.Is4() && d != synqueue.Reset {
					most = time.Second + slack
				}
				for range 120 {
					c := connect(t, h.pod, h.dst, false, 0)
					c.check(t, "", errno, 0, most)
					if c.took > slack {
						late++
					}
				}
				if got := settled(h.holder); late > 120/20 || got.Held != 120 || got.Repeated != uint64(late) {
					t.Errorf("%d of 120 came late; counters %+v", late, got)
				}
			})
		}
	}
}

// TestHold_simultaneousOpen: both sides connect to each other, and the SYN of one is held
// meanwhile. The connection stands by the other's SYN, whatever is decided then.
func TestHold_simultaneousOpen(t *testing.T) {
	for _, f := range families {
		h := newHeld(t, f)
		h.install(t, testHoldConfig(t, f))
		for i, d := range []synqueue.Decision{synqueue.Pass, synqueue.Divert} {
			t.Run(f.name+"/"+d.String(), func(t *testing.T) {
				h.serve(t, HolderConfig{Ask: askAfter(200*time.Millisecond, d)}, QueueConfig{})
				a, b := netip.AddrPortFrom(f.pod, 4711+uint16(i)), netip.AddrPortFrom(f.peer, 4721+uint16(i))
				podEnd := make(chan *net.TCPConn, 1)
				go func() {
					c, err := dialNS(t, h.pod, boundTo(a), b)
					if err != nil {
						t.Error(err)
					}
					podEnd <- c
				}()
				waitFor(t, "the held SYN", func() bool { return h.holder.Counters().Held == 1 })
				c := mustDial(t, h.peer, boundTo(b), a)
				p := <-podEnd
				if p == nil {
					return
				}
				exchange(t, c, p)
				waitFor(t, "the verdict", func() bool { return h.holder.Counters().Verdicts[d] == 1 })
				exchange(t, c, p)
			})
		}
	}
}

// fullListener listens with a backlog that is full: it does not answer.
func fullListener(t *testing.T, ns *NetNS, at netip.Addr) (port uint16) {
	t.Helper()
	var fd int
	mustDo(t, ns.Do(func() (err error) {
		fd, err = unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		return err
	}))
	t.Cleanup(func() { unix.Close(fd) })
	mustDo(t, unix.Bind(fd, &unix.SockaddrInet4{Addr: at.As4()}))
	mustDo(t, unix.Listen(fd, 0))
	local, err := sockName(fd)
	mustDo(t, err)
	mustDial(t, ns, nil, local) // the backlog of 0 has room for one
	return local.Port()
}

// BenchmarkHold_connect connects and resets, in turn in namespaces that differ in what a SYN
// passes. Only the ratios to the first one say anything.
func BenchmarkHold_connect(b *testing.B) {
	f := families[0]
	kinds := []struct {
		name string
		set  func(h *held)
	}{
		{"plain", func(*held) {}},
		{"nobody", func(h *held) { h.install(b, testHoldConfig(b, f)) }},
		{"pass", func(h *held) {
			h.serve(b, HolderConfig{Ask: askAfter(0, synqueue.Pass)}, QueueConfig{})
			h.install(b, testHoldConfig(b, f))
		}},
		{"divert", func(h *held) {
			h.serve(b, HolderConfig{Ask: askAfter(0, synqueue.Divert)}, QueueConfig{})
			h.install(b, testHoldConfig(b, f))
		}},
		{"redirect", func(h *held) { install(b, h.pod, testConfig(f)) }},
		{"reset", func(h *held) {
			h.serve(b, HolderConfig{Ask: askAfter(0, synqueue.Reset)}, QueueConfig{})
			h.install(b, testHoldConfig(b, f))
		}},
	}
	pods := make([]*held, len(kinds))
	for i, k := range kinds {
		pods[i] = newHeld(b, f)
		k.set(pods[i])
	}
	took := make([][]time.Duration, len(kinds))
	for b.Loop() {
		for i, h := range pods {
			for range 20 {
				took[i] = append(took[i], connectOnly(b, h.pod, h.dst))
			}
		}
	}
	var plain float64
	for i, k := range kinds {
		slices.Sort(took[i])
		median := float64(took[i][len(took[i])/2])
		if i == 0 {
			plain = median
			b.ReportMetric(median/1e3, "plain-us")
		}
		b.ReportMetric(median/plain, k.name+"/plain")
	}
}

// connectOnly is how long connect() takes.
func connectOnly(b *testing.B, ns *NetNS, dst netip.AddrPort) time.Duration {
	var fd int
	mustDo(b, ns.Do(func() (err error) {
		fd, err = unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		return err
	}))
	defer unix.Close(fd)
	mustDo(b, unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})) // no TIME_WAIT
	begin := time.Now()
	err := unix.Connect(fd, &unix.SockaddrInet4{Addr: dst.Addr().As4(), Port: int(dst.Port())})
	took := time.Since(begin)
	if err != nil && !errors.Is(err, unix.ECONNREFUSED) && !errors.Is(err, unix.EINTR) {
		b.Fatal(err)
	}
	return took
}
