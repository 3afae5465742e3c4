// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"os/signal"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/internal/linux"
)

// sigurgEnv makes the test binary wait for SIGURG of the socket that is its
// descriptor 3. A process of its own, since Go's scheduler uses that signal.
const sigurgEnv = "KUBE_SMCR_TEST_SIGURG"

func awaitSIGURG() int {
	got := make(chan os.Signal, 1)
	signal.Notify(got, syscall.SIGURG)
	if _, err := unix.FcntlInt(3, unix.F_SETOWN, os.Getpid()); err != nil {
		fmt.Println(err)
		return 1
	}
	fmt.Println("ready")
	select {
	case <-got:
		fmt.Println("SIGURG")
	case <-time.After(waitLimit):
		fmt.Println("no signal")
	}
	return 0
}

// player runs the steps of one script on both ends of a connection.
type player struct {
	t    *testing.T
	ends map[string]*net.TCPConn
	sigs map[string]*bufio.Reader
}

// control runs f on the descriptor of an end.
func (p *player) control(who string, f func(fd int) error) error {
	raw, err := p.ends[who].SyscallConn()
	must(p.t, err)
	var ferr error
	must(p.t, raw.Control(func(fd uintptr) { ferr = f(int(fd)) }))
	return ferr
}

// until waits until f, which looks at the descriptor, says yes.
func (p *player) until(who, what string, f func(fd int) (bool, error)) {
	p.t.Helper()
	eventually(p.t, func() string {
		ok := false
		must(p.t, p.control(who, func(fd int) (err error) {
			ok, err = f(fd)
			return err
		}))
		if !ok {
			return "waiting for " + what
		}
		return ""
	})
}

// owner starts a process that gets the socket's signals.
func (p *player) owner(who string) {
	f := value(p.ends[who].File())(p.t)
	defer f.Close()
	cmd := exec.Command(value(os.Executable())(p.t))
	cmd.Env = append(os.Environ(), sigurgEnv+"=1", "GODEBUG=asyncpreemptoff=1")
	cmd.ExtraFiles = []*os.File{f}
	out := value(cmd.StdoutPipe())(p.t)
	must(p.t, cmd.Start())
	p.t.Cleanup(func() {
		_ = cmd.Process.Kill() // the process may have ended
		_ = cmd.Wait()
	})
	p.sigs[who] = bufio.NewReader(out)
	if line, err := p.sigs[who].ReadString('\n'); line != "ready\n" {
		p.t.Fatalf("%q, %v", line, err)
	}
}

func poll(events int16) func(fd int) (bool, error) {
	return func(fd int) (bool, error) {
		fds := []unix.PollFd{{Fd: int32(fd), Events: events}}
		_, err := unix.Poll(fds, 0)
		return fds[0].Revents&events != 0, err
	}
}

// exception looks at the exception set of select. Linux takes a set as long as the
// number of descriptors asks for, so it is made of as many as hold fd.
func exception(fd int) (bool, error) {
	set := make([]unix.FdSet, fd/unix.FD_SETSIZE+1)
	set[fd/unix.FD_SETSIZE].Set(fd % unix.FD_SETSIZE)
	n, err := unix.Select(fd+1, nil, nil, &set[0], &unix.Timeval{})
	return n == 1, err
}

// step returns what a step said.
func (p *player) step(who, what, arg string) string {
	c := p.ends[who]
	switch what {
	case "send":
		_, err := c.Write([]byte(arg))
		return outcome("", err)
	case "fill": // the number of bytes
		_, err := c.Write(make([]byte, value(strconv.Atoi(arg))(p.t)))
		return outcome("", err)
	case "oob":
		return outcome("", p.control(who, func(fd int) error {
			n, err := unix.SendmsgN(fd, []byte(arg), nil, nil, unix.MSG_OOB)
			if err == nil && n < len(arg) {
				err = io.ErrShortWrite
			}
			return err
		}))
	case "read":
		b := make([]byte, 64)
		n, err := c.Read(b)
		return outcome(string(b[:n]), err)
	case "drain": // so many bytes, and not beyond the mark
		n, err := io.ReadFull(c, make([]byte, value(strconv.Atoi(arg))(p.t)))
		return outcome(strconv.Itoa(n), err)
	case "recvoob":
		b := make([]byte, 4)
		n := 0
		err := p.control(who, func(fd int) (err error) {
			n, _, err = unix.Recvfrom(fd, b, unix.MSG_OOB)
			return err
		})
		return outcome(string(b[:max(n, 0)]), err)
	case "atmark":
		at := 0
		must(p.t, p.control(who, func(fd int) (err error) {
			at, err = unix.IoctlGetInt(fd, unix.SIOCATMARK)
			return err
		}))
		return strconv.Itoa(at)
	case "inline":
		return outcome("", p.control(who, func(fd int) error { return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_OOBINLINE, 1) }))
	case "bigbuffer":
		return outcome("", p.control(who, func(fd int) error { return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, 4<<20) }))
	case "closewrite":
		return outcome("", c.CloseWrite())
	case "reset":
		reset(c)
		return ""
	case "got": // waits until so many bytes have arrived since the start
		want := uint64(value(strconv.Atoi(arg))(p.t))
		p.until(who, arg+" bytes", func(fd int) (bool, error) {
			info, err := unix.GetsockoptTCPInfo(fd, unix.SOL_TCP, unix.TCP_INFO)
			if err != nil {
				return false, err
			}
			// The end of the stream counts as a byte.
			return info.Bytes_received == want || info.Bytes_received == want+1, nil
		})
		return ""
	case "pri":
		p.until(who, "POLLPRI", poll(unix.POLLPRI))
		return ""
	case "except":
		p.until(who, "the exception set", exception)
		return ""
	case "haspri":
		has := false
		must(p.t, p.control(who, func(fd int) (err error) {
			has, err = poll(unix.POLLPRI)(fd)
			return err
		}))
		return strconv.FormatBool(has)
	case "fin":
		p.until(who, "the end of the stream", poll(unix.POLLRDHUP))
		return ""
	case "error":
		p.until(who, "POLLERR", poll(unix.POLLERR))
		return ""
	case "owner":
		p.owner(who)
		return ""
	case "signal":
		line, err := p.sigs[who].ReadString('\n')
		return outcome(strings.TrimSpace(line), err)
	}
	panic("no step " + what)
}

func outcome(got string, err error) string {
	if errno := syscall.Errno(0); errors.As(err, &errno) {
		return got + " " + unix.ErrnoName(errno)
	}
	if err != nil {
		return got + " " + err.Error()
	}
	return got
}

// play runs a script of steps like "a.send:xyz b.read" on both ends of a
// connection and returns what each said.
func play(t *testing.T, a, b *net.TCPConn, script string) []string {
	t.Helper()
	defer func() { _, _ = a.Close(), b.Close() }()
	must(t, b.SetDeadline(time.Now().Add(waitLimit)))
	p := player{t: t, ends: map[string]*net.TCPConn{"a": a, "b": b}, sigs: map[string]*bufio.Reader{}}
	var got []string
	for word := range strings.FieldsSeq(script) {
		step, arg, _ := strings.Cut(word, ":")
		who, what, _ := strings.Cut(step, ".")
		got = append(got, strings.TrimSpace(word+" "+p.step(who, what, arg)))
	}
	return got
}

// farBehind is a script that takes 15 s over TCP: with more than 64 KiB before the
// urgent byte, and a closed window, Linux tells of it only then. Where it is beyond
// what a carried connection buffers, that takes longer than the test waits.
const farBehind = "reader stands still, far behind"

// TestAgent_urgent: a program sees urgent data as over direct TCP, and resets
// too, whatever carries its connection.
func TestAgent_urgent(t *testing.T) {
	t.Parallel() // the test mostly waits
	l := newLab(t)
	// A connection that ends before the agents have seen it made counts as a
	// reset, so each script moves a byte before that.
	scripts := []struct{ name, script string }{
		{"alone", "a.oob:x b.pri b.atmark b.recvoob b.atmark b.recvoob b.haspri a.send:y b.read"},
		{"skipped", "a.oob:x b.pri a.send:y b.got:2 b.read b.atmark b.recvoob b.haspri"},
		{"between data", "a.send:ab a.oob:cd a.send:ef b.got:6 b.read b.atmark b.recvoob b.read a.send:g b.read"},
		{"two, the first not read", "a.oob:x b.pri a.oob:y b.got:2 b.recvoob a.send:z b.read"},
		{"two, the first taken", "a.oob:ab b.pri b.recvoob a.oob:cd b.got:4 b.read b.atmark b.recvoob a.send:e b.read"},
		{"end behind it", "a.send:ab a.oob:c a.closewrite b.fin b.read b.atmark b.recvoob b.read b.send:x a.read"},
		{"in line", "b.inline a.send:ab a.oob:c a.send:de b.got:5 b.read b.atmark b.read b.atmark b.recvoob"},
		{"in line, two", "b.inline a.oob:x b.pri a.oob:y b.got:2 b.read b.atmark b.read"},
		{"other way", "b.send:ab b.oob:c a.got:3 a.read a.recvoob b.send:d a.read"},
		{"both ways", "a.oob:a b.oob:b a.pri b.pri a.recvoob b.recvoob"},
		{"signal", "b.owner a.send:abc a.oob:d b.signal b.got:4 b.read b.recvoob"},
		{"select", "a.send:ab b.got:2 b.haspri a.oob:x b.except b.read b.recvoob"},
		{"in mid-stream", "a.bigbuffer a.fill:300000 a.oob:x a.fill:200000 b.drain:300000 b.pri b.recvoob b.drain:200000"},
		{"reader stands still", "b.owner a.fill:50000 a.oob:x b.signal b.drain:50000 b.atmark b.pri b.recvoob a.send:y b.read"},
		{"reader stands still, more behind it", "b.owner a.fill:30000 a.oob:x a.fill:50000 b.signal b.drain:30000 b.pri b.recvoob b.drain:50000"},
		{farBehind, "a.bigbuffer b.owner a.fill:400000 a.oob:x a.fill:50000 b.signal b.drain:400000 b.pri b.recvoob b.drain:50000"},
		{"reset, neither reads nor writes", "a.send:x b.read a.reset b.error"},
		{"reset, reader stands still", "a.bigbuffer a.fill:1500000 a.reset b.error"},
		{"reset by a reader that stood still", "a.send:x b.read a.bigbuffer a.fill:1500000 b.reset a.error"},
		{"reset of an ended direction", "a.closewrite b.read a.reset b.error"},
		{"reset of the other direction", "a.closewrite b.read b.reset a.error"},
	}
	accepted := value(linux.ListenInNS(t.Context(), l.b.pod.ns, func(_, _ string, c syscall.RawConn) (err error) {
		cerr := c.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUF, 4096) })
		return errors.Join(err, cerr)
	}, netip.MustParseAddrPort(podB+":0")))(t)
	t.Cleanup(func() { _ = accepted.Close() })
	want := make([][]string, len(scripts))
	var pairing sync.Mutex // of the ends of one connection
	run := func(path string) (ran uint64) {
		t.Run(path, func(t *testing.T) {
			for i, s := range scripts {
				if s.name == farBehind && path != "direct" && path != "carried" {
					continue
				}
				ran++
				t.Run(s.name, func(t *testing.T) {
					t.Parallel()
					pairing.Lock()
					a, err := l.a.pod.dial(t, accepted.Addr().String())
					must(t, err)
					b := value(accepted.AcceptTCP())(t)
					pairing.Unlock()
					got := play(t, a, b, s.script)
					if path == "direct" {
						want[i] = got
					}
					if d := cmp.Diff(want[i], got); d != "" {
						t.Errorf("-TCP +%s:\n%s", path, d)
					}
				})
			}
		})
		return ran
	}
	run("direct")
	const fresh = "  negativeCacheTTL: 0s\n"
	for _, path := range []struct{ name, a, b string }{
		{"carried", fresh + preferAll, fresh + preferAll},
		{"carried, small buffers", fresh + "  rmbe: 16KiB\n  sendBuffer: 16KiB\n" + preferAll, fresh + "  rmbe: 16KiB\n  sendBuffer: 16KiB\n" + preferAll},
		{"declined", fresh + preferAll, fresh + "policies: []\n"},
		{"no budget", fresh + "  budgets: {pod: {connections: 1}}\n" + preferAll, fresh + preferAll},
	} {
		l.a.configure(t, l.option, path.a)
		l.b.configure(t, l.option, path.b)
		l.a.start(t)
		l.b.start(t)
		if path.name == "no budget" {
			c := value(l.a.pod.dial(t, accepted.Addr().String()))(t)
			defer c.Close()
			s := value(accepted.AcceptTCP())(t)
			defer s.Close()
		}
		ran := run(path.name)
		s := l.a.status(t).Conns
		if smcr := strings.HasPrefix(path.name, "carried"); smcr != (s.TotalSMCR == ran) || smcr == (s.TotalTCP >= ran) {
			t.Errorf("%s: %+v", path.name, s)
		}
		must(t, errors.Join(l.a.stop(), l.b.stop()))
	}
}
