// SPDX-License-Identifier: Apache-2.0

package softiwarp_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/rdmatest"
	"github.com/smcr-io/kube-smcr/pkg/rdma/softiwarp"
)

// secondProcess is the environment variable that makes the test binary the second process of
// TestSSP_otherProcess: it gets a connection by a Unix socket, which is its descriptor 3, and
// makes it one of RDMA, as the initiator or the responder.
const secondProcess = "SOFTIWARP_TEST_SECOND_PROCESS"

const (
	asInitiator = "initiator"
	asResponder = "responder"
)

// TestSSP_otherProcess: a connection that one process has opened and talked on goes to another one, which
// makes it one of RDMA: the system passes descriptors, and no queue pairs.
func TestSSP_otherProcess(t *testing.T) {
	for _, role := range []string{asInitiator, asResponder} {
		t.Run(role, func(t *testing.T) {
			x, y, a, b := ends(t)
			ca, cb := tcpPair(t)
			says(t, ca, cb, "UPGRADE\n")

			passed, kept := ca, cb // to the other process, and here
			if role == asResponder {
				passed, kept = cb, ca
			}
			var out bytes.Buffer
			child, send := startSecondProcess(t, role, &out)
			if err := send(passed); err != nil {
				t.Fatal(err)
			}
			_ = passed.Close() // the other process has it

			e := x
			if role == asInitiator {
				e = y
			}
			e.Recv(t, 1, 0, 64)
			var err error
			if role == asResponder {
				hears(t, kept, "go on\n")
				var pd []byte
				if pd, err = a.Connect(within(t), x.QP, kept, softiwarp.ConnectOptions{}); string(pd) != "from afar" {
					t.Errorf("private data %q", pd)
				}
			} else {
				var r *softiwarp.Request
				if r, err = newSSP(t, b, kept, softiwarp.SSPOptions{QP: y.QP}).Request(within(t)); err == nil {
					if string(r.PrivateData()) != "from afar" {
						t.Errorf("private data %q", r.PrivateData())
					}
					err = r.Accept(within(t), nil, softiwarp.ConnectOptions{})
				}
			}
			if err != nil {
				t.Fatalf("%v; the other process says: %s", err, &out)
			}
			copy(e.MR.Bytes()[100:], "ping")
			e.Send(t, rdma.SendWR{ID: 2, Op: rdma.OpSend, Flags: rdma.SendSignaled, SGL: []rdma.SGE{e.SGE(100, 4)}})
			rdmatest.AwaitOne(t, e.SendCQ, 2, rdma.StatusSuccess)
			rdmatest.AwaitOne(t, e.RecvCQ, 1, rdma.StatusSuccess)
			if got := string(e.MR.Bytes()[:4]); got != "pong" {
				t.Errorf("%q", got)
			}
			if err := e.QP.Close(); err != nil {
				t.Fatal(err)
			}
			if err := child.Wait(); err != nil {
				t.Errorf("the other process: %v: %s", err, &out)
			}
		})
	}
}

// startSecondProcess returns the process, and a function that passes a connection to it.
func startSecondProcess(t testing.TB, role string, out *bytes.Buffer) (*exec.Cmd, func(*net.TCPConn) error) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	ours, theirs := os.NewFile(uintptr(fds[0]), "ours"), os.NewFile(uintptr(fds[1]), "theirs")
	t.Cleanup(func() { _ = ours.Close() })
	cmd := exec.CommandContext(within(t), os.Args[0])
	cmd.Env = append(os.Environ(), secondProcess+"="+role)
	cmd.ExtraFiles = []*os.File{theirs}
	cmd.Stdout, cmd.Stderr = out, out
	err = cmd.Start()
	_ = theirs.Close()
	if err != nil {
		t.Fatal(err)
	}
	return cmd, func(c *net.TCPConn) error {
		raw, err := c.SyscallConn()
		if err != nil {
			return err
		}
		var sent error
		err = raw.Control(func(fd uintptr) {
			sent = unix.Sendmsg(int(ours.Fd()), []byte{1}, unix.UnixRights(int(fd)), nil, 0)
		})
		return errors.Join(err, sent)
	}
}

// receiveConn receives a connection.
func receiveConn() (*net.TCPConn, error) {
	b, oob := make([]byte, 1), make([]byte, unix.CmsgSpace(4))
	_, n, _, _, err := unix.Recvmsg(3, b, oob, unix.MSG_CMSG_CLOEXEC)
	if err != nil {
		return nil, err
	}
	msgs, err := unix.ParseSocketControlMessage(oob[:n])
	if err != nil || len(msgs) != 1 {
		return nil, fmt.Errorf("%d control messages: %w", len(msgs), err)
	}
	fds, err := unix.ParseUnixRights(&msgs[0])
	if err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(fds[0]), "connection")
	defer func() { _ = f.Close() }()
	c, err := net.FileConn(f)
	if err != nil {
		return nil, err
	}
	t, ok := c.(*net.TCPConn)
	if !ok {
		return nil, fmt.Errorf("connection is %T", c)
	}
	return t, nil
}

// runSecondProcess answers "ping" on a connection that it was given with "pong".
func runSecondProcess(role string) (err error) {
	time.AfterFunc(2*patience, func() { os.Exit(1) }) // whoever waits for it may be gone
	c, err := receiveConn()
	if err != nil {
		return err
	}
	addr := loopA
	if role == asResponder {
		addr = loopB
	}
	d, err := softiwarp.Open(softiwarp.Config{Name: "second", Addr: addr})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.Close()) }()
	e, err := newEndpoint(d)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, e.Close()) }()
	sge := rdma.SGE{Addr: e.mr.Addr(), Length: 64, LKey: e.mr.LKey()}
	if _, err := e.qp.PostRecv([]rdma.RecvWR{{SGE: sge}}); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	pd := softiwarp.ConnectOptions{PrivateData: []byte("from afar")}
	if role == asInitiator {
		_, err = d.Connect(ctx, e.qp, c, pd)
	} else {
		err = accept(ctx, d, &e, c, pd)
	}
	if err != nil {
		return err
	}
	wc, err := e.next()
	if got := e.mr.Bytes()[:wc.Bytes]; err != nil || string(got) != "ping" {
		return fmt.Errorf("%v: %q, %w", wc.Status, got, err)
	}
	sge.Length = uint32(copy(e.mr.Bytes(), "pong"))
	if _, err := e.qp.PostSend([]rdma.SendWR{{Op: rdma.OpSend, SGL: []rdma.SGE{sge}, Flags: rdma.SendSignaled}}); err != nil {
		return err
	}
	if _, err := e.next(); err != nil {
		return err
	}
	return d.Disconnect(e.qp)
}

// accept upgrades a connection in place.
func accept(ctx context.Context, d *softiwarp.Device, e *endpoint, c *net.TCPConn, o softiwarp.ConnectOptions) error {
	s, err := d.NewSSP(c, softiwarp.SSPOptions{QP: e.qp, Last: []byte("go on\n")})
	if err != nil {
		return err
	}
	r, err := s.Request(ctx)
	if err != nil {
		return err
	}
	return r.Accept(ctx, e.qp, o)
}
