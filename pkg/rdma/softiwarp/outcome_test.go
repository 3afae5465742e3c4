// SPDX-License-Identifier: Apache-2.0

package softiwarp_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/internal/testenv"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/iwarp"
	"github.com/smcr-io/kube-smcr/pkg/rdma/rdmatest"
	"github.com/smcr-io/kube-smcr/pkg/rdma/softiwarp"
)

// TestAccept_context: one that has ended leaves all as it is; one that ends while the initiator's first
// message is awaited ends the connection.
func TestAccept_context(t *testing.T) {
	_, y, _, b := ends(t)
	ca, cb := tcpPair(t)
	if _, err := ca.Write(peerToPeerRequest()); err != nil {
		t.Fatal(err)
	}
	r, err := newSSP(t, b, cb, softiwarp.SSPOptions{QP: y.QP}).Request(within(t))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := r.Accept(ctx, nil, softiwarp.ConnectOptions{}); !errors.Is(err, context.Canceled) || y.QP.State() != rdma.QPInit {
		t.Fatalf("%v, queue pair in %v", err, y.QP.State())
	}
	ctx, cancel = context.WithCancel(context.Background())
	accepted := make(chan error, 1)
	go func() { accepted <- r.Accept(ctx, nil, softiwarp.ConnectOptions{}) }()
	if f := readFrame(t, ca); f.Reject {
		t.Errorf("Reply %+v", f)
	}
	cancel()
	if err := <-accepted; !errors.Is(err, context.Canceled) || y.QP.State() != rdma.QPError {
		t.Errorf("%v, queue pair in %v", err, y.QP.State())
	}
	_ = ca.SetReadDeadline(time.Now().Add(patience))
	if _, err := io.ReadAll(ca); err != nil {
		t.Errorf("the peer: %v", err)
	}
}

// TestConnect_noTime: a context that has ended gives the peer no time, and nothing is tried.
func TestConnect_noTime(t *testing.T) {
	x, _, a, _ := ends(t)
	ca, cb := tcpPair(t)
	ctx, cancel := context.WithTimeout(context.Background(), 0)
	defer cancel()
	_, err := a.Connect(ctx, x.QP, ca, softiwarp.ConnectOptions{})
	var e *softiwarp.ConnectError
	if !errors.Is(err, context.DeadlineExceeded) || errors.As(err, &e) || x.QP.State() != rdma.QPInit {
		t.Errorf("%v, queue pair in %v", err, x.QP.State())
	}
	says(t, ca, cb, "nothing was sent")
}

// TestConnect_cancelMeetsReply: whichever comes first, the queue pair and the connection have one fate on each side,
// and both queue pairs can be used again.
func TestConnect_cancelMeetsReply(t *testing.T) {
	x, y, a, b := ends(t)
	seed := testenv.Seed(t)
	rnd := rand.New(rand.NewPCG(seed, 1))
	var connected, cancelled int
	for i := range 1000 {
		ca, cb := tcpPair(t)
		s := newSSP(t, b, cb, softiwarp.SSPOptions{QP: y.QP})
		accepted := make(chan error, 1)
		go func() {
			r, err := s.Request(within(t))
			if err == nil {
				err = r.Accept(within(t), nil, softiwarp.ConnectOptions{})
			}
			accepted <- err
		}()
		ctx, cancel := context.WithTimeout(context.Background(), time.Duration(1+rnd.IntN(600))*time.Microsecond)
		_, err := a.Connect(ctx, x.QP, ca, softiwarp.ConnectOptions{})
		cancel()
		var e *softiwarp.ConnectError
		switch {
		case err == nil:
			connected++
			if err := <-accepted; err != nil {
				t.Fatalf("seed %d, round %d: connected, and accept: %v", seed, i, err)
			}
			for _, q := range []*rdmatest.End{x, y} {
				if err := q.QP.Modify(rdma.QPAttr{State: rdma.QPReset}); err != nil {
					t.Fatal(err)
				}
				q.Init(t)
			}
		case errors.As(err, &e):
			cancelled++
			if e.Reason != softiwarp.TimedOut || e.Socket == nil || !e.Tainted || x.QP.State() != rdma.QPInit {
				t.Fatalf("seed %d, round %d: %+v, queue pair in %v", seed, i, e, x.QP.State())
			}
			_ = e.Socket.Close()
			if err := <-accepted; err == nil {
				t.Fatalf("seed %d, round %d: cancelled, and accepted", seed, i)
			}
			if c, err := s.Close(); err != nil {
				t.Fatal(err)
			} else if c != nil {
				_ = c.Close()
			}
			if err := y.QP.Modify(rdma.QPAttr{State: rdma.QPReset}); err != nil {
				t.Fatal(err)
			}
			y.Init(t)
		default: // its time was over before it began
			_ = ca.Close()
			if err := <-accepted; !errors.Is(err, softiwarp.ErrSocketDown) {
				t.Fatalf("seed %d, round %d: not tried, and accept: %v", seed, i, err)
			}
			if c, err := s.Close(); err != nil {
				t.Fatal(err)
			} else if c != nil {
				_ = c.Close()
			}
		}
	}
	t.Logf("%d connected, %d cancelled", connected, cancelled)
	if connected == 0 || cancelled == 0 {
		t.Error("there was no race")
	}
}

// TestConnect_reads: what a program says of READs is never changed; what it leaves open is fitted to the peer.
func TestConnect_reads(t *testing.T) {
	for _, c := range []struct {
		name            string
		connect, accept softiwarp.ConnectOptions
		want            softiwarp.ConnectReason // 0: connected
	}{
		{"both open", softiwarp.ConnectOptions{}, softiwarp.ConnectOptions{}, 0},
		{"as many as the peer serves", softiwarp.ConnectOptions{ReadsAsked: 4, Exact: true}, softiwarp.ConnectOptions{ReadsServed: 4, Exact: true}, 0},
		{"more than the peer serves", softiwarp.ConnectOptions{ReadsAsked: 5, Exact: true}, softiwarp.ConnectOptions{ReadsServed: 4, Exact: true}, softiwarp.Refused},
		{"open, to one that serves none", softiwarp.ConnectOptions{}, softiwarp.ConnectOptions{Exact: true}, 0},
		{"none, to one that has it open", softiwarp.ConnectOptions{Exact: true}, softiwarp.ConnectOptions{}, 0},
		{"the responder wants too much", softiwarp.ConnectOptions{ReadsServed: 1, Exact: true}, softiwarp.ConnectOptions{ReadsAsked: 2, Exact: true}, softiwarp.Rejected},
	} {
		t.Run(c.name, func(t *testing.T) {
			x, y, a, b := ends(t)
			ca, cb := tcpPair(t)
			s := newSSP(t, b, cb, softiwarp.SSPOptions{QP: y.QP})
			connected := make(chan error, 1)
			go func() {
				_, err := a.Connect(within(t), x.QP, ca, c.connect)
				var e *softiwarp.ConnectError
				if errors.As(err, &e) {
					_ = e.Socket.Close()
				}
				connected <- err
			}()
			r, err := s.Request(within(t))
			if err != nil {
				t.Fatal(err)
			}
			err = r.Accept(within(t), nil, c.accept)
			if errConnect := <-connected; c.want != 0 {
				if connectError(t, errConnect, c.want); err == nil {
					t.Error("accepted")
				}
				if c.want == softiwarp.Refused && !errors.Is(errConnect, iwarp.ErrReads) {
					t.Errorf("%v", errConnect)
				}
				return
			} else if err != nil || errConnect != nil {
				t.Fatalf("accept: %v, connect: %v", err, errConnect)
			}
			talk(t, x, y)
		})
	}
}

// TestConnect_unreachable: a connection whose peer is not to be reached any more fails as such.
func TestConnect_unreachable(t *testing.T) {
	testenv.Need(t, testenv.NetAdmin)
	x, _, a, _ := ends(t)
	result := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // its thread ends with it
		result <- func() error {
			if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
				return err
			}
			if err := setLoopback(true); err != nil {
				return err
			}
			ca, _ := tcpPair(t)
			f, err := ca.File()
			if err != nil {
				return err
			}
			defer func() { _ = f.Close() }()
			raw, err := ca.SyscallConn()
			if err != nil {
				return err
			}
			if errControl := raw.Control(func(fd uintptr) {
				err = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, 50)
			}); err != nil || errControl != nil {
				return errors.Join(err, errControl)
			}
			if err := setLoopback(false); err != nil {
				return err
			}
			_, err = a.Connect(within(t), x.QP, ca, softiwarp.ConnectOptions{})
			var e *softiwarp.ConnectError
			if !errors.As(err, &e) || e.Reason != softiwarp.Unreachable || e.Timeout() {
				return fmt.Errorf("%w, want %v", err, softiwarp.Unreachable)
			}
			return e.Socket.Close()
		}()
	}()
	if err := <-result; err != nil {
		t.Error(err)
	}
	if s := x.QP.State(); s != rdma.QPInit {
		t.Errorf("queue pair in %v", s)
	}
}

// setLoopback switches the loopback interface of the thread's network namespace.
func setLoopback(up bool) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(fd) }()
	ifr, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	if err := unix.IoctlIfreq(fd, unix.SIOCGIFFLAGS, ifr); err != nil {
		return err
	}
	flags := ifr.Uint16() &^ unix.IFF_UP
	if up {
		flags |= unix.IFF_UP
	}
	ifr.SetUint16(flags)
	return unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, ifr)
}

// TestSSP_manyAtOnce: several goroutines may make, ask and close Socket Service Points; of those that close one a
// single one has the connection.
func TestSSP_manyAtOnce(t *testing.T) {
	_, _, _, b := ends(t)
	var wg sync.WaitGroup
	for range 32 {
		ca, cb := tcpPair(t)
		wg.Go(func() {
			s, err := b.NewSSP(cb, softiwarp.SSPOptions{Last: []byte("last")})
			if err != nil {
				t.Error(err)
				return
			}
			var back atomic.Int32
			var closers sync.WaitGroup
			for range 4 {
				closers.Go(func() {
					_, _, _ = s.State(), s.QP(), s.RemoteAddr()
					switch c, err := s.Close(); {
					case c != nil && err == nil:
						back.Add(1)
						if _, err := c.Write([]byte("back")); err != nil {
							t.Error(err)
						}
						_ = c.Close()
					case !errors.Is(err, rdma.ErrClosed):
						t.Errorf("close: %v, %v", c, err)
					}
				})
			}
			if _, err := s.Request(within(t)); !errors.Is(err, rdma.ErrClosed) {
				t.Errorf("request: %v", err)
			}
			closers.Wait()
			if all, err := io.ReadAll(ca); back.Load() != 1 || string(all) != "lastback" || err != nil {
				t.Errorf("%d have it; the peer has %q, %v", back.Load(), all, err)
			}
		})
	}
	wg.Wait()
}

// TestSSP_closedDevice: a device that is closed takes no connection over, and leaves it as it was.
func TestSSP_closedDevice(t *testing.T) {
	_, y, _, b := ends(t)
	ca, cb := tcpPair(t)
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	for _, qp := range []rdma.QP{nil, y.QP} {
		if s, err := b.NewSSP(cb, softiwarp.SSPOptions{QP: qp}); !errors.Is(err, rdma.ErrClosed) {
			t.Errorf("%v, %v", s, err)
		}
	}
	says(t, ca, cb, "still here")
	says(t, cb, ca, "here, too")
}

// TestSSP_endsAtOnce: a connection that ends right behind its first message was established; one whose first message
// is a Terminate was not, although the queue pair has received messages on a connection before.
func TestSSP_endsAtOnce(t *testing.T) {
	x, y, a, b := ends(t)
	ca, cb := tcpPair(t)
	upgrade(t, x, y, a, b, ca, cb)
	framing := iwarp.Framing{CRC: true}
	write := iwarp.Header{Tagged: true, Last: true, Op: iwarp.OpWrite}
	first := framing.Append(nil, write.Append(nil))
	terminate := iwarp.Header{Last: true, Op: iwarp.OpTerminate, QN: 2, MSN: 1}
	why := iwarp.Terminate{Code: iwarp.CodeIRD}
	last := framing.Append(nil, terminate.Append(nil), why.Append(nil))
	for _, established := range []bool{true, false} {
		if err := y.QP.Modify(rdma.QPAttr{State: rdma.QPReset}); err != nil {
			t.Fatal(err)
		}
		y.Init(t)
		ca, cb := tcpPair(t)
		if _, err := ca.Write(peerToPeerRequest()); err != nil {
			t.Fatal(err)
		}
		r, err := newSSP(t, b, cb, softiwarp.SSPOptions{QP: y.QP}).Request(within(t))
		if err != nil {
			t.Fatal(err)
		}
		accepted := make(chan error, 1)
		go func() { accepted <- r.Accept(within(t), nil, softiwarp.ConnectOptions{}) }()
		readFrame(t, ca)
		all := last
		if established {
			all = append(bytes.Clone(first), last...)
		}
		if _, err := ca.Write(all); err != nil {
			t.Fatal(err)
		}
		var terminated *iwarp.TerminateError
		if err := <-accepted; (err == nil) != established || err != nil && !errors.As(err, &terminated) {
			t.Errorf("established: %v; accept: %v", established, err)
		}
		if s := y.QP.State(); s != rdma.QPError {
			t.Errorf("established: %v; queue pair in %v", established, s)
		}
	}
}

// TestSSP_noDescriptor: a connection that cannot be taken over for lack of descriptors stays as it was, and so does
// the queue pair.
func TestSSP_noDescriptor(t *testing.T) {
	x, y, a, b := ends(t)
	ca, cb := tcpPair(t)
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	none := limit
	none.Cur = 1 // those that are open stay
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &none); err != nil {
		t.Fatal(err)
	}
	_, errSSP := b.NewSSP(cb, softiwarp.SSPOptions{QP: y.QP})
	_, errConnect := a.Connect(within(t), x.QP, ca, softiwarp.ConnectOptions{})
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	var e *softiwarp.ConnectError
	if !errors.Is(errSSP, rdma.ErrNoResources) || !errors.Is(errConnect, rdma.ErrNoResources) || errors.As(errConnect, &e) {
		t.Errorf("new SSP: %v, connect: %v", errSSP, errConnect)
	}
	says(t, ca, cb, "still here")
	says(t, cb, ca, "here, too")
	upgrade(t, x, y, a, b, ca, cb)
}

func TestStrings(t *testing.T) {
	for got, want := range map[string]string{
		softiwarp.Operational.String(): "OPERATIONAL", softiwarp.NonOperational.String(): "NON-OPERATIONAL",
		softiwarp.Rejected.String(): "rejected", softiwarp.TimedOut.String(): "timed out", softiwarp.ConnectReason(9).String(): "ConnectReason(9)",
	} {
		if got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

// TestConnect_segments: messages are cut to TCP's segments, which are the connection's.
func TestConnect_segments(t *testing.T) {
	x, y, a, b := ends(t)
	ca, cb := tcpPair(t)
	raw, err := ca.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	mss := 0
	if errControl := raw.Control(func(fd uintptr) { mss, err = unix.GetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_MAXSEG) }); err != nil || errControl != nil {
		t.Fatal(err, errControl)
	}
	upgrade(t, x, y, a, b, ca, cb)
	before, _ := a.QPStats(x.QP.Num())
	const n = 1 << 20
	y.Recv(t, 3, 0, n)
	x.Send(t, rdma.SendWR{ID: 4, Op: rdma.OpSend, Flags: rdma.SendSignaled, SGL: []rdma.SGE{x.SGE(0, n)}})
	rdmatest.AwaitOne(t, x.SendCQ, 4, rdma.StatusSuccess)
	rdmatest.AwaitOne(t, y.RecvCQ, 3, rdma.StatusSuccess)
	after, ok := a.QPStats(x.QP.Num())
	each := n / float64(after.TxFPDUs-before.TxFPDUs)
	if !ok || each > float64(mss) || each < float64(mss)*0.9 {
		t.Errorf("%.0f bytes per FPDU, and %d per segment", each, mss)
	}
}

// TestSSP_isOfIWARP: a program that has some device learns by its type of addresses whether that speaks iWARP, and by
// its methods whether it takes over connections.
func TestSSP_isOfIWARP(t *testing.T) {
	var d rdma.Device = open(t, "a", loopA)
	if g := d.GIDs(); len(g) != 1 || g[0].Type != rdma.GIDTypeIWARP {
		t.Errorf("%+v", g)
	}
	if types := d.Attr().GIDTypes; len(types) != 1 || types[0] != rdma.GIDTypeIWARP {
		t.Errorf("%+v", types)
	}
	type takesOver interface {
		NewSSP(c *net.TCPConn, o softiwarp.SSPOptions) (*softiwarp.SSP, error)
		Connect(ctx context.Context, qp rdma.QP, c *net.TCPConn, o softiwarp.ConnectOptions) ([]byte, error)
	}
	if _, ok := d.(takesOver); !ok {
		t.Error("it does not")
	}
}
