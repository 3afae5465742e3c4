// SPDX-License-Identifier: Apache-2.0

//go:build linux && cgo

package verbs_test

// The tests called TestRXE do to the device what only a soft RoCE device of a
// guest is for.

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/rdmatest"
	"github.com/smcr-io/kube-smcr/pkg/rdma/verbs"
)

func run(t *testing.T, command ...string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	if out, err := exec.CommandContext(ctx, command[0], command[1:]...).CombinedOutput(); err != nil {
		t.Fatalf("%v: %v\n%s", command, err, out)
	}
}

// TestRXE_removed removes the device under load. Its driver waits until nobody
// has it open.
func TestRXE_removed(t *testing.T) {
	d := open(t)
	dev, netdev := d.Name(), d.GIDs()[0].NetDev
	var loads []*load
	for range 4 {
		loads = append(loads, startLoad(t, d))
	}
	e := rdmatest.NewEnd(t, d, rdmatest.Options{})
	copy(e.MR.Bytes(), "still here")
	began := time.Now()
	run(t, "rdma", "link", "delete", dev)
	t.Logf("gone after %v", time.Since(began))
	defer func() {
		run(t, "rdma", "link", "add", dev, "type", "rxe", "netdev", netdev)
		again(t, dev)
	}()
	for _, l := range loads {
		if n, err := l.end(); n == 0 || err == nil {
			t.Errorf("a load ended after %d writes: %v", n, err)
		}
		if ev := rdmatest.AwaitEvent(t, l.x.Ctx, rdma.EventDeviceFatal); !errors.Is(ev.Err, rdma.ErrClosed) {
			t.Errorf("event %+v", ev)
		}
	}
	if string(e.MR.Bytes()[:10]) != "still here" {
		t.Error("the memory is not what it was")
	}
	if s := d.Port().State; s != rdma.PortDown {
		t.Errorf("port is %v", s)
	}
	for what, err := range map[string]error{
		"open":      second(d.Open()),
		"PD":        second(e.Ctx.AllocPD()),
		"CQ":        second(e.Ctx.CreateCQ(1)),
		"MR":        second(e.PD.AllocMR(1, rdma.LocalWrite)),
		"post":      second(e.QP.PostRecv([]rdma.RecvWR{{}})),
		"modify":    e.QP.Modify(e.Attrs(e)[0]),
		"poll":      second(e.RecvCQ.Poll(make([]rdma.WC, 1))),
		"arm":       e.RecvCQ.Arm(false),
		"open anew": second(verbs.Open(verbs.Config{Name: dev})),
	} {
		if !errors.Is(err, rdma.ErrClosed) && !errors.Is(err, unix.ENODEV) {
			t.Errorf("%s: %v, want ErrClosed", what, err)
		}
	}
}

func second[T any](_ T, err error) error { return err }

// again opens the device when it is back, and uses it.
func again(t *testing.T, dev string) {
	t.Helper()
	var d *verbs.Device
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(10 * time.Millisecond) { // polls the new device
		var err error
		if d, err = verbs.Open(verbs.Config{Name: dev}); err == nil && d.Port().State == rdma.PortActive {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("the device is not back: %v", err)
		}
		if err == nil {
			_ = d.Close()
		}
	}
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	x, y := rdmatest.Pair(t, d, d, rdmatest.Options{})
	x.Send(t, x.Write(1, y, 0, 10))
	rdmatest.AwaitOne(t, x.SendCQ, 1, rdma.StatusSuccess)
}

// TestRXE_port takes away what the port needs, and gives it back.
func TestRXE_port(t *testing.T) {
	d := open(t)
	c, err := d.Open()
	if err != nil {
		t.Fatal(err)
	}
	g := d.GIDs()[0]
	addr := fmt.Sprintf("%v/%d", g.GID.Addr(), g.PrefixBits)
	for _, step := range []struct {
		name     string
		down, up []string
	}{
		{"interface", []string{"link", "set", g.NetDev, "down"}, []string{"link", "set", g.NetDev, "up"}},
		{"address", []string{"addr", "del", addr, "dev", g.NetDev}, []string{"addr", "add", addr, "dev", g.NetDev}},
	} {
		run(t, append([]string{"ip"}, step.down...)...)
		rdmatest.AwaitEvent(t, c, rdma.EventPortDown)
		if s := d.Port().State; s != rdma.PortDown {
			t.Errorf("%s: port is %v", step.name, s)
		}
		run(t, append([]string{"ip"}, step.up...)...)
		rdmatest.AwaitEvent(t, c, rdma.EventPortActive)
		if now := d.GIDs()[0]; now != g {
			t.Errorf("%s: GID is %+v, was %+v", step.name, now, g)
		}
	}
	x, y := rdmatest.Pair(t, d, d, rdmatest.Options{})
	x.Send(t, x.Write(1, y, 0, 10))
	rdmatest.AwaitOne(t, x.SendCQ, 1, rdma.StatusSuccess)

	for len(c.Events()) > 0 {
		<-c.Events()
	}
	run(t, "ip", "addr", "add", "192.0.2.7/24", "dev", g.NetDev)
	rdmatest.AwaitEvent(t, c, rdma.EventGIDChange)
	if n := d.GIDs(); n[0] != g || n[len(n)-1].GID.Addr().String() != "192.0.2.7" {
		t.Errorf("GIDs are %+v", n)
	}
	run(t, "ip", "addr", "del", "192.0.2.7/24", "dev", g.NetDev)
	if err := c.Close(); err != nil {
		t.Error(err)
	}
}

// TestRXE_portUntold has the port go down and come up without an event, as with
// drivers that send none when a cable is pulled.
func TestRXE_portUntold(t *testing.T) {
	d := open(t)
	c, err := d.Open()
	if err != nil {
		t.Fatal(err)
	}
	netdev := d.GIDs()[0].NetDev
	want := func(kind rdma.EventKind, s rdma.PortState) {
		t.Helper()
		rdmatest.AwaitEvent(t, c, kind)
		if now := d.Port().State; now != s {
			t.Errorf("port is %v, want %v", now, s)
		}
	}
	d.Mistake(rdma.PortDown)
	want(rdma.EventPortActive, rdma.PortActive)

	run(t, "ip", "link", "set", netdev, "down")
	want(rdma.EventPortDown, rdma.PortDown)
	d.Mistake(rdma.PortActive)
	want(rdma.EventPortDown, rdma.PortDown)
	run(t, "ip", "link", "set", netdev, "up")
	want(rdma.EventPortActive, rdma.PortActive)
	if err := c.Close(); err != nil {
		t.Error(err)
	}
}

// TestRXE_queuePairs has the device say that it has more queue pairs than it said
// when it was opened, as with drivers that say how many are left. It does not say less.
func TestRXE_queuePairs(t *testing.T) {
	more, d := open(t), open(t)
	want := d.Attr().MaxQP
	if n := d.QueuePairs(); n != want {
		t.Errorf("%d queue pairs, want %d", n, want)
	}
	more.Understate(want + 1)
	d.Understate(10)
	for end := time.Now().Add(30 * time.Second); d.QueuePairs() != want; <-time.After(10 * time.Millisecond) { // polls the number
		if time.Now().After(end) {
			t.Fatalf("%d queue pairs, want %d", d.QueuePairs(), want)
		}
	}
	if n := more.QueuePairs(); n != want+1 {
		t.Errorf("%d queue pairs, were %d", n, want+1)
	}
}

// TestRXE_renamed gives the device another name while it is open, as udev does with
// some that were there before it. It is used as before, and can be opened by the new name.
func TestRXE_renamed(t *testing.T) {
	d := open(t)
	before, now := d.Name(), "renamed0"
	run(t, "rdma", "dev", "set", before, "name", now)
	defer run(t, "rdma", "dev", "set", now, "name", before)
	other, err := verbs.Open(verbs.Config{Name: now})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := other.Close(); err != nil {
			t.Error(err)
		}
	})
	x, y := rdmatest.Pair(t, d, other, rdmatest.Options{})
	x.Send(t, x.Write(1, y, 0, 10))
	rdmatest.AwaitOne(t, x.SendCQ, 1, rdma.StatusSuccess)
	if _, err := verbs.Open(verbs.Config{Name: before}); !errors.Is(err, unix.ENODEV) || !strings.Contains(err.Error(), now) {
		t.Errorf("open by the old name: %v, want ENODEV, and the new name", err)
	}
}

// TestRXE_mtu changes the MTU of the network interface, of which no event tells.
func TestRXE_mtu(t *testing.T) {
	d := open(t)
	g, before := d.GIDs()[0], d.Port()
	i, err := net.InterfaceByName(g.NetDev)
	if err != nil {
		t.Fatal(err)
	}
	other, want := 1500, rdma.MTU1024
	if before.ActiveMTU == want {
		other, want = 4500, rdma.MTU4096
	}
	set := func(mtu int) { run(t, "ip", "link", "set", g.NetDev, "mtu", strconv.Itoa(mtu)) }
	defer set(i.MTU)
	for _, step := range []struct {
		mtu  int
		want rdma.MTU
	}{{other, want}, {i.MTU, before.ActiveMTU}} {
		set(step.mtu)
		for end := time.Now().Add(10 * time.Second); d.Port().ActiveMTU != step.want; <-time.After(10 * time.Millisecond) { // polls the port
			if time.Now().After(end) {
				t.Fatalf("port %+v with an interface of MTU %d, want %v", d.Port(), step.mtu, step.want)
			}
		}
		if p := d.Port(); p.State != before.State || d.GIDs()[0] != g {
			t.Errorf("port %+v, GID %+v", p, d.GIDs()[0])
		}
	}
}

// lockedChild is set in the process that TestRXE_memlock starts: limits and
// capabilities cannot be given back.
const lockedChild = "KUBE_SMCR_TEST_LOCKED"

// TestRXE_memlock registers memory without the right to lock so much.
func TestRXE_memlock(t *testing.T) {
	d := open(t)
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), lockedChild+"="+d.Name())
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	for _, want := range []string{"register 4194304 bytes with " + d.Name(), "RLIMIT_MEMLOCK is 1048576", "IPC_LOCK", rdma.ErrNoResources.Error()} {
		if !strings.Contains(string(out), want) {
			t.Errorf("%q is not in %q", want, out)
		}
	}
}

// locked prints the error of a registration above the limit.
func locked() int {
	fail := func(err error) int {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	runtime.LockOSThread() // capabilities are a thread's
	h := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var caps [2]unix.CapUserData
	if err := unix.Capget(&h, &caps[0]); err != nil {
		return fail(err)
	}
	caps[0].Effective &^= 1 << unix.CAP_IPC_LOCK
	if err := unix.Capset(&h, &caps[0]); err != nil {
		return fail(err)
	}
	if err := unix.Setrlimit(unix.RLIMIT_MEMLOCK, &unix.Rlimit{Cur: 1 << 20, Max: 1 << 20}); err != nil {
		return fail(err)
	}
	d, err := verbs.Open(verbs.Config{Name: os.Getenv(lockedChild)})
	if err != nil {
		return fail(err)
	}
	c, err := d.Open()
	if err != nil {
		return fail(err)
	}
	pd, err := c.AllocPD()
	if err != nil {
		return fail(err)
	}
	if _, err = pd.AllocMR(512<<10, rdma.LocalWrite); err != nil {
		return fail(fmt.Errorf("below the limit: %w", err))
	}
	if _, err = pd.AllocMR(4<<20, rdma.LocalWrite); err == nil {
		return fail(errors.New("above the limit: registered"))
	}
	fmt.Println(err)
	return 0
}

// TestRXE_refuse has a queue pair in ERR answer a peer that repeats its requests
// without end, whatever they are.
func TestRXE_refuse(t *testing.T) {
	d := open(t)
	for _, c := range []struct {
		name   string
		ops    func(x, y *rdmatest.End) []rdma.SendWR
		status rdma.Status
	}{
		{"write", func(x, y *rdmatest.End) []rdma.SendWR { return []rdma.SendWR{x.Write(1, y, 0, 10)} }, rdma.StatusRemoteInvalid},
		{"long write", func(x, y *rdmatest.End) []rdma.SendWR { return []rdma.SendWR{x.Write(1, y, 0, 1<<20)} }, rdma.StatusRemoteInvalid},
		{"send", func(x, _ *rdmatest.End) []rdma.SendWR {
			return []rdma.SendWR{{ID: 1, Op: rdma.OpSend, Flags: rdma.SendSignaled, SGL: []rdma.SGE{x.SGE(0, 10)}}}
		}, rdma.StatusRemoteOp},
		{"writes and sends", func(x, y *rdmatest.End) (wrs []rdma.SendWR) {
			for id := uint64(1); id < 20; id += 2 {
				wrs = append(wrs, x.Write(id, y, 0, 10),
					rdma.SendWR{ID: id + 1, Op: rdma.OpSend, Flags: rdma.SendSignaled, SGL: []rdma.SGE{x.SGE(0, 10)}})
			}
			return wrs
		}, rdma.StatusRemoteInvalid},
	} {
		t.Run(c.name, func(t *testing.T) {
			x, y := rdmatest.Pair(t, d, d, rdmatest.Options{})
			r, ok := y.QP.(rdma.Refuser)
			if !ok {
				t.Fatal("queue pairs cannot be told to refuse")
			}
			if err := r.Refuse(); !errors.Is(err, rdma.ErrState) {
				t.Errorf("refuse in RTS: %v, want ErrState", err)
			}
			const done = 3
			for range done { // its PSN is not the first one
				x.Send(t, x.Write(0, y, 0, 10))
				rdmatest.AwaitOne(t, x.SendCQ, 0, rdma.StatusSuccess)
			}
			if err := y.QP.Modify(rdma.QPAttr{State: rdma.QPError}); err != nil {
				t.Fatal(err)
			}
			copy(x.MR.Bytes(), "late late late")
			ops := c.ops(x, y)
			for try := range 2 { // the second time is what a peer does that has not heard of the first
				if n, err := x.QP.PostSend(ops); n != len(ops) || err != nil {
					t.Fatalf("%d posted, %v", n, err)
				}
				for range 2 { // the second time changes nothing
					if err := r.Refuse(); err != nil {
						t.Fatal(err)
					}
				}
				wcs := rdmatest.Await(t, x.SendCQ, len(ops))
				if wcs[0].Status != c.status {
					t.Errorf("try %d: the first request: %v, want %v", try, wcs[0].Status, c.status)
				}
				for _, w := range wcs[1:] {
					if w.Status != rdma.StatusFlushed {
						t.Errorf("try %d: request %d: %v, want %v", try, w.ID, w.Status, rdma.StatusFlushed)
					}
				}
				attrs := x.Attrs(y)
				attrs[2].SQPSN = (attrs[2].SQPSN + done) & rdma.PSNMask
				for _, a := range append([]rdma.QPAttr{{State: rdma.QPReset}}, attrs[:]...) {
					if err := x.QP.Modify(a); err != nil {
						t.Fatal(err)
					}
				}
			}
			if got := y.MR.Bytes()[:10]; string(got) == "late late " {
				t.Error("a refused request wrote")
			}
			if s := y.QP.State(); s != rdma.QPError {
				t.Errorf("the queue pair is in %v", s)
			}
			if err := y.QP.Close(); err != nil {
				t.Error(err)
			}
			if err := r.Refuse(); !errors.Is(err, rdma.ErrClosed) {
				t.Errorf("refuse after close: %v, want ErrClosed", err)
			}
		})
	}
}

// TestRXE_closeBesideMessage has a message come while another one is dealt with, and
// a queue pair of the same queues closed then, which looks for its own completions
// among all. The user is told of the message nevertheless.
func TestRXE_closeBesideMessage(t *testing.T) {
	d := open(t)
	x, y := rdmatest.Pair(t, d, d, rdmatest.Options{})
	other, err := y.PD.CreateQP(rdma.QPConfig{SendCQ: y.SendCQ, RecvCQ: y.RecvCQ, MaxSendWR: 1, MaxRecvWR: 1, MaxSGE: 1})
	if err != nil {
		t.Fatal(err)
	}
	message := rdma.SendWR{Op: rdma.OpSend, Flags: rdma.SendSignaled, SGL: []rdma.SGE{x.SGE(0, 4)}}
	got := make(chan uint64, 2)
	calls := 0
	y.RecvCQ.OnNotify(func() {
		if err := y.RecvCQ.Arm(false); err != nil && !errors.Is(err, rdma.ErrClosed) {
			t.Error(err)
		}
		var wcs [4]rdma.WC
		n, _ := y.RecvCQ.Poll(wcs[:]) // ends with the test
		for _, w := range wcs[:n] {
			if w.Status == rdma.StatusSuccess {
				got <- w.ID
			}
		}
		if calls++; calls == 1 {
			x.Send(t, message)
			rdmatest.Await(t, x.SendCQ, 2) // it is in the queue
			if err := other.Close(); err != nil {
				t.Error(err)
			}
		}
	})
	if err := y.RecvCQ.Arm(false); err != nil {
		t.Fatal(err)
	}
	y.Recv(t, 1, 0, 64)
	y.Recv(t, 2, 64, 64)
	x.Send(t, message)
	for _, want := range []uint64{1, 2} {
		select {
		case id := <-got:
			if id != want {
				t.Errorf("message %d, want %d", id, want)
			}
		case <-time.After(10 * time.Second):
			t.Fatalf("message %d was not told", want)
		}
	}
}

// TestRXE_firstNotification has the first message come before the queue's goroutine has
// begun to wait: the processor is not given up before it is there.
func TestRXE_firstNotification(t *testing.T) {
	d := open(t)
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	for round := range 20 {
		x, y := rdmatest.NewEnd(t, d, rdmatest.Options{}), rdmatest.NewEnd(t, d, rdmatest.Options{})
		x.Connect(t, y)
		y.Connect(t, x)
		late, err := y.Ctx.CreateCQ(8)
		if err != nil {
			t.Fatal(err)
		}
		qp, err := y.PD.CreateQP(rdma.QPConfig{SendCQ: late, RecvCQ: late, MaxSendWR: 1, MaxRecvWR: 1, MaxSGE: 1})
		if err != nil {
			t.Fatal(err)
		}
		attrs := y.Attrs(x)
		if err := errors.Join(qp.Modify(attrs[0]), late.Arm(false), qp.Modify(rdma.QPAttr{State: rdma.QPError})); err != nil {
			t.Fatal(err)
		}
		if n, err := qp.PostRecv([]rdma.RecvWR{{ID: 1}}); n != 1 || err != nil {
			t.Fatal(n, err)
		}
		select {
		case <-late.Notify():
		case <-time.After(10 * time.Second):
			t.Fatalf("round %d: the queue's first completion was not told", round)
		}
		if err := errors.Join(qp.Close(), late.Close()); err != nil {
			t.Fatal(err)
		}
	}
}
