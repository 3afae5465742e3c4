// SPDX-License-Identifier: Apache-2.0

package siw

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/iwarp"
	"github.com/smcr-io/kube-smcr/pkg/rdma/rdmatest"
	"github.com/smcr-io/kube-smcr/pkg/rdma/softiwarp"
	"github.com/smcr-io/kube-smcr/test/vm/lab"
)

// testEnds has connections end otherwise than in order.
func (b *bed) testEnds(t *testing.T) {
	t.Run("a wrong CRC to siw", b.testWrongCRCSent)
	t.Run("a wrong CRC from siw", b.testWrongCRCReceived)
	t.Run("an access that siw refuses", b.testBadAccess)
	t.Run("a reset", b.testReset)
	t.Run("our process is killed", b.testWeAreKilled)
	t.Run("the server is killed", b.testServerKilled)
	t.Run("the client is killed", b.testClientKilled)
}

// terminated waits for the end of a queue pair by a Terminate.
func (p *peer) terminated(t *testing.T, want iwarp.Code, sent bool) {
	t.Helper()
	e := rdmatest.AwaitEvent(t, p.Ctx, rdma.EventQPFatal)
	var term *iwarp.TerminateError
	if !errors.As(e.Err, &term) || term.Terminate.Code != want || term.Sent != sent {
		t.Errorf("the queue pair ends with %v, want a Terminate for %v, sent by us: %t", e.Err, want, sent)
	}
	p.flushed(t)
}

// flushed looks at what is left of a queue pair that failed.
func (p *peer) flushed(t *testing.T) {
	t.Helper()
	if s := p.QP.State(); s != rdma.QPError {
		t.Errorf("the queue pair is in %v", s)
	}
	for _, w := range rdmatest.Await(t, p.RecvCQ, p.slots) {
		if w.Status != rdma.StatusFlushed {
			t.Errorf("a receive ends with %v", w.Status)
		}
	}
}

// stillServes sees that a server of rping takes the next connection.
func (b *bed) stillServes(t *testing.T, at netip.AddrPort) {
	t.Helper()
	p := b.newPeer(t, 2, pingInfoBytes)
	b.dial(t, p, at, softiwarp.ConnectOptions{})
	p.ping(t, pingBytes, 0)
	b.disconnect(t, p)
}

// testWrongCRCSent puts an FPDU with a wrong CRC into the connection of a queue pair.
func (b *bed) testWrongCRCSent(t *testing.T) {
	_, at := b.serve(t, "rping", "-s", "-P")
	p := b.newPeer(t, 2, pingInfoBytes)
	c, err := b.host.Dial(limited(t), at)
	if err != nil {
		t.Fatal(err)
	}
	same, err := c.File() // the device closes c
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = same.Close() }()
	if _, err := b.dev.Connect(limited(t), p.QP, c, softiwarp.ConnectOptions{}); err != nil {
		t.Fatal(err)
	}
	p.ping(t, pingBytes, 0)
	bad := fpdu(tagged(opWrite, 0, 0), true)
	bad[len(bad)-1] ^= 1
	b.badCRCs++
	if _, err := unix.Write(int(same.Fd()), bad); err != nil {
		t.Fatal(err)
	}
	p.terminated(t, iwarp.CodeCRC, false)
	b.stillServes(t, at)
}

// A relay carries one connection of a program to a listener of ours.
type relay struct {
	l         *net.TCPListener
	siw, ours *net.TCPConn
	isReset   atomic.Bool
}

// newRelay makes a relay at a port of its own. edit is shown each FPDU of siw's before it
// goes on.
func (b *bed) newRelay(t *testing.T, to *softiwarp.Listener, edit func(fpdu []byte)) *relay {
	t.Helper()
	l, err := b.host.Listen(limited(t), netip.AddrPortFrom(b.host.Addr(), 0))
	if err != nil {
		t.Fatal(err)
	}
	r := &relay{l: l}
	ended := make(chan struct{})
	t.Cleanup(func() {
		_ = l.Close()
		<-ended
	})
	go func() {
		defer close(ended)
		if err := r.run(b.host, to, edit); err != nil {
			t.Log("the relay ends:", err)
		}
	}()
	return r
}

func (r *relay) port() string { return fmt.Sprint(r.l.Addr().(*net.TCPAddr).Port) }

func (r *relay) run(h *lab.Host, to *softiwarp.Listener, edit func([]byte)) (err error) {
	if r.siw, err = r.l.AcceptTCP(); err != nil {
		return err
	}
	defer func() { _ = r.siw.Close() }()
	ctx, cancel := context.WithTimeout(context.Background(), caseTimeout)
	defer cancel()
	if r.ours, err = h.Dial(ctx, to.Addr().(*net.TCPAddr).AddrPort()); err != nil {
		return err
	}
	defer func() { _ = r.ours.Close() }()
	back := make(chan struct{})
	go func() {
		defer close(back)
		_, _ = io.Copy(r.siw, r.ours) // the other direction says why
		r.end(r.siw)
	}()
	defer func() { <-back }()
	defer func() { r.end(r.ours) }()
	from := bufio.NewReader(r.siw)
	for size := startSize; ; size = fpduSize {
		frame, err := readFrame(from, size)
		if err != nil {
			return err
		}
		if !bytes.HasPrefix(frame, []byte(requestKey)) {
			edit(frame)
		}
		if _, err := r.ours.Write(frame); err != nil {
			return err
		}
	}
}

// end ends a half in order.
func (r *relay) end(c *net.TCPConn) {
	if !r.isReset.Load() {
		_ = c.CloseWrite() // an error is that of who reads
	}
}

// reset resets the connection for both.
func (r *relay) reset(t *testing.T) {
	t.Helper()
	r.isReset.Store(true)
	for _, c := range []*net.TCPConn{r.siw, r.ours} {
		if err := errors.Join(c.SetLinger(0), c.Close()); err != nil {
			t.Error(err)
		}
	}
}

// testWrongCRCReceived spoils what siw answers to a READ.
func (b *bed) testWrongCRCReceived(t *testing.T) {
	l := b.listen(t)
	n := 0
	r := b.newRelay(t, l, func(fpdu []byte) {
		if n++; n == 2 {
			fpdu[len(fpdu)/2] ^= 1
		}
	})
	client := b.start(t, "rping", "-c", "-a", b.host.Addr().String(), "-p", r.port(), "-C", "2")
	p := b.newPeer(t, 2, pingInfoBytes)
	accept(t, l, p, softiwarp.ConnectOptions{})
	at := p.buffer(t, pingBytes)
	p.Send(t, rdma.SendWR{ID: 9, Op: rdma.OpRead, Flags: rdma.SendSignaled, SGL: []rdma.SGE{p.SGE(bulk, pingBytes)}, RemoteAddr: at.addr, RKey: at.key})
	rdmatest.AwaitOne(t, p.SendCQ, 9, rdma.StatusFlushed)
	p.terminated(t, iwarp.CodeCRC, true)
	if text := p.MR.Bytes()[bulk : bulk+pingBytes]; !bytes.Equal(text, make([]byte, pingBytes)) {
		t.Errorf("what was spoilt is in the memory: %q", text)
	}
	wantDisconnect(t, client)
}

// wantDisconnect waits for the end of a client of rping whose connection has ended.
func wantDisconnect(t *testing.T, client *program) {
	t.Helper()
	if said, err := client.said(); !strings.Contains(said, "DISCONNECT") {
		t.Errorf("rping ended with %v and said\n%swant that it was disconnected", err, said)
	}
}

// testBadAccess writes to where the server has nothing.
func (b *bed) testBadAccess(t *testing.T) {
	_, at := b.serve(t, "rping", "-s", "-P")
	for _, c := range []struct {
		name string
		op   rdma.Opcode
		want iwarp.Code
		ends rdma.Status
	}{
		{"WRITE", rdma.OpWrite, iwarp.CodeTaggedSTag, rdma.StatusSuccess},
		{"READ", rdma.OpRead, iwarp.CodeReadSTag, rdma.StatusRemoteAccess},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := b.newPeer(t, 2, pingInfoBytes)
			b.dial(t, p, at, softiwarp.ConnectOptions{})
			p.ping(t, pingBytes, 0)
			p.Send(t, rdma.SendWR{ID: 9, Op: c.op, Flags: rdma.SendSignaled, SGL: []rdma.SGE{p.SGE(bulk, 8)}, RemoteAddr: 1 << 40, RKey: 0xdead0000})
			rdmatest.AwaitOne(t, p.SendCQ, 9, c.ends)
			p.terminated(t, c.want, false)
		})
	}
	b.stillServes(t, at)
}

// lost waits for the end of a queue pair whose connection was reset.
func (p *peer) lost(t *testing.T) {
	t.Helper()
	rdmatest.AwaitEvent(t, p.Ctx, rdma.EventPathDown)
	p.flushed(t)
}

func (b *bed) testReset(t *testing.T) {
	l := b.listen(t)
	r := b.newRelay(t, l, func([]byte) {})
	client := b.start(t, "rping", "-c", "-a", b.host.Addr().String(), "-p", r.port(), "-C", "2")
	p := b.newPeer(t, 2, pingInfoBytes)
	accept(t, l, p, softiwarp.ConnectOptions{})
	p.pong(t, pingBytes)
	p.buffer(t, pingBytes) // that is the last that it sends
	r.reset(t)
	p.lost(t)
	wantDisconnect(t, client)
}

// testServerKilled: the kernel ends the connections of a process that dies.
func (b *bed) testServerKilled(t *testing.T) {
	server, at := b.serve(t, "rping", "-s", "-P")
	p := b.newPeer(t, 2, pingInfoBytes)
	b.dial(t, p, at, softiwarp.ConnectOptions{})
	p.ping(t, pingBytes, 0)
	b.kill(t, server)
	p.disconnected(t)
	p.flushed(t)
}

func (b *bed) testClientKilled(t *testing.T) {
	l := b.listen(t)
	client := b.start(t, "rping", "-c", "-a", b.host.Addr().String(), "-p", portOf(l), "-C", "2")
	p := b.newPeer(t, 2, pingInfoBytes)
	accept(t, l, p, softiwarp.ConnectOptions{})
	p.pong(t, pingBytes)
	p.buffer(t, pingBytes) // that is the last that it sends
	b.kill(t, client)
	p.disconnected(t)
	p.flushed(t)
}

func (b *bed) kill(t *testing.T, p *program) {
	t.Helper()
	if err := p.Signal(unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if said, err := p.said(); err == nil {
		t.Errorf("it was not killed, and said\n%s", said)
	}
}

// victimEnv has the test's program be the peer that is killed, of the server at this address,
// and deviceEnv says the address of its device.
const victimEnv, deviceEnv = "SIW_VICTIM_OF", "SIW_VICTIM_ADDR"

func TestMain(m *testing.M) {
	if at := os.Getenv(victimEnv); at != "" {
		fmt.Println(victim(os.Getenv(deviceEnv), at))
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// victim connects to rping, says so when that answers, and waits for the end.
func victim(addr, at string) error {
	local, err := netip.ParseAddr(addr)
	if err != nil {
		return err
	}
	d, err := softiwarp.Open(softiwarp.Config{Name: "iw1", Addr: local})
	if err != nil {
		return err
	}
	c, err := d.Open()
	if err != nil {
		return err
	}
	pd, err1 := c.AllocPD()
	cq, err2 := c.CreateCQ(16)
	if err := errors.Join(err1, err2); err != nil {
		return err
	}
	mr, err1 := pd.AllocMR(4096, rdma.LocalWrite|rdma.RemoteRead)
	qp, err2 := pd.CreateQP(rdma.QPConfig{SendCQ: cq, RecvCQ: cq, MaxSendWR: 1, MaxRecvWR: 1})
	if err := errors.Join(err1, err2); err != nil {
		return err
	}
	sge := rdma.SGE{Addr: mr.Addr(), Length: pingInfoBytes, LKey: mr.LKey()}
	err = qp.Modify(rdma.QPAttr{State: rdma.QPInit, Access: rdma.RemoteRead})
	if err == nil {
		_, err = qp.PostRecv([]rdma.RecvWR{{SGE: sge}})
	}
	if err == nil {
		_, err = d.Dial(context.Background(), qp, at, softiwarp.ConnectOptions{})
	}
	copy(mr.Bytes(), pingInfo(mr.Addr(), uint32(mr.RKey()), pingBytes))
	if err == nil {
		_, err = qp.PostSend([]rdma.SendWR{{Op: rdma.OpSend, SGL: []rdma.SGE{sge}}})
	}
	if err == nil {
		err = cq.Arm(false)
	}
	if err != nil {
		return err
	}
	<-cq.Notify() // it has read our memory, and said so
	fmt.Println(victimReady)
	select {}
}

// victimReady is what the victim says.
const victimReady = "ready"

func (b *bed) testWeAreKilled(t *testing.T) {
	_, at := b.serve(t, "rping", "-s", "-P")
	cmd := exec.CommandContext(limited(t), os.Args[0])
	cmd.Env = append(os.Environ(), victimEnv+"="+at.String(), deviceEnv+"="+b.host.Addr().String())
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = b.inNS(t, cmd.Start) // what the thread starts is in its namespace
	}
	if err != nil {
		t.Fatal(err)
	}
	if line, err := bufio.NewReader(out).ReadString('\n'); line != victimReady+"\n" {
		t.Errorf("our process said %q, %v", line, err)
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait() // that it was killed
	b.stillServes(t, at)
}
