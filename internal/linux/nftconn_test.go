// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/mdlayher/netlink"
	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// within fails unless f, which uses sock, ends.
func within(t *testing.T, sock *netlink.Conn, f func() error) (err error) {
	t.Helper()
	done := make(chan error, 1)
	go func() { done <- f() }()
	select {
	case err = <-done:
	case <-time.After(waitLimit):
		mustDo(t, sock.Close())
		t.Fatal("no end; at the socket's: ", <-done)
	}
	return err
}

// onlyErrors takes away the answers that messages were right, as if the kernel gave none.
func onlyErrors(t *testing.T, sock *netlink.Conn) {
	t.Helper()
	const typeOffset, codeOffset = 4, nlHeaderSize
	filter, err := bpf.Assemble([]bpf.Instruction{
		bpf.LoadAbsolute{Off: typeOffset, Size: 2},
		bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: filterType(unix.NLMSG_ERROR), SkipTrue: 2},
		bpf.LoadAbsolute{Off: codeOffset, Size: 4},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: 0, SkipTrue: 1},
		bpf.RetConstant{Val: 1<<32 - 1},
		bpf.RetConstant{Val: 0},
	})
	mustDo(t, err)
	mustDo(t, sock.SetBPF(filter))
}

// A transaction with fewer answers than messages, as of a kernel that is short of memory, ends, and those after it are as ever.
func TestNFTConn_fewAnswers(t *testing.T) {
	pod, _ := newPair(t)
	r := install(t, pod, testConfig(families[0]))
	r.conn.answer = 50 * time.Millisecond
	onlyErrors(t, r.conn.sock)
	if err := within(t, r.conn.sock, r.Forget); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("without an answer: %v", err)
	}
	// The first message is refused, which is what the error says, and once.
	err := within(t, r.conn.sock, func() error {
		r.conn.FlushSet(&nftables.Set{Table: kubeTable(), Name: "none"})
		for range 3 {
			r.conn.AddTable(kubeTable())
		}
		return r.conn.Flush()
	})
	if !errors.Is(err, unix.ENOENT) || strings.Contains(err.Error(), "timeout") {
		t.Errorf("with one answer for four messages: %v", err)
	}
	mustDo(t, prepareNFT(r.conn.sock))
	r.conn.answer = nftAnswerTime
	for range 2 {
		mustDo(t, r.Forget())
	}
}

// An answer that nobody read, as of a transaction that the kernel could not put in force, is not that of the next request.
func TestNFTConn_staleAnswer(t *testing.T) {
	pod, _ := newPair(t)
	r := install(t, pod, testConfig(families[0]))
	stale := func(c *nftConn) {
		t.Helper()
		_, err := c.sock.Send(netlink.Message{
			Header: netlink.Header{Type: unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_GETTABLE, Flags: netlink.Request | netlink.Acknowledge},
			Data:   []byte{byte(nftables.TableFamilyINet), 0, 0, 0}, // without a name: EINVAL
		})
		mustDo(t, err)
	}
	stale(r.conn)
	mustDo(t, r.Forget())
	f, err := InstallWireFilter(pod, WireConfig{})
	mustDo(t, err)
	stale(f.conn)
	_, err = f.Drops()
	mustDo(t, err)
	mustDo(t, f.Close())
}

// After its end a connection asks nothing of the namespace that the thread is in by chance.
func TestNFTConn_closed(t *testing.T) {
	pod, _ := newPair(t)
	c, err := openNFT(pod)
	mustDo(t, err)
	mustDo(t, c.CloseLasting())
	c.AddTable(kubeTable())
	if err := c.Flush(); err == nil {
		t.Error("a transaction went somewhere")
	}
}

// A program in the namespace cannot send to a connection of the agent.
func TestNFTConn_foreign(t *testing.T) {
	pod, _ := newPair(t)
	c, err := openNFT(pod)
	mustDo(t, err)
	raw, err := c.sock.SyscallConn()
	mustDo(t, err)
	var to unix.Sockaddr
	mustDo(t, raw.Control(func(fd uintptr) { to, err = unix.Getsockname(int(fd)) }))
	mustDo(t, err)
	err = pod.Do(func() error {
		fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_NETFILTER)
		if err != nil {
			return err
		}
		return errors.Join(unix.Sendto(fd, make([]byte, nlHeaderSize), 0, to), unix.Close(fd))
	})
	if !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("a message of somebody else: %v, want ECONNREFUSED", err)
	}
	mustDo(t, c.CloseLasting())
}
