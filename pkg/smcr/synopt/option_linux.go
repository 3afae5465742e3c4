// SPDX-License-Identifier: Apache-2.0

package synopt

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"syscall"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/cilium/ebpf/rlimit"
	"golang.org/x/sys/unix"
)

// A handshake is what the program keeps for a connecting socket: struct
// handshake of bpf/synopt.bpf.c.
type handshake struct {
	Answer answer
	Shared uint32
}

// An answer is what came of an offer. The values are those of enum answer in
// bpf/synopt.bpf.c.
type answer uint32

const (
	answerUnknown answer = 0 // the program never saw the socket connect
	answerWaiting answer = 1 // SYN sent, SYN-ACK not yet evaluated
	answerPlain   answer = 2 // the SYN-ACK came without the option
	answerOffered answer = 3 // the SYN-ACK carried the option
)

// String returns the name of the answer.
func (a answer) String() string {
	switch a {
	case answerUnknown:
		return "unknown"
	case answerWaiting:
		return "waiting"
	case answerPlain:
		return "plain"
	case answerOffered:
		return "offered"
	default:
		return fmt.Sprintf("answer(%d)", uint32(a))
	}
}

// An Option is the program at work. Its methods may be called by any goroutine.
type Option struct {
	mark uint32

	// mu keeps Close from closing a file that a look-up uses.
	mu         sync.RWMutex
	closed     bool
	handshakes *ebpf.Map
	link       link.Link
}

// Open loads the program and attaches it to the cgroup. An [UnsupportedError]
// says why that is not possible here.
func Open(cfg Config) (*Option, error) {
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("open SMC-R TCP option: %w", err)
	}
	o, err := open(cfg)
	if err != nil {
		return nil, fmt.Errorf("open SMC-R TCP option: %w", err)
	}
	return o, nil
}

// Probe does all that [Open] does for the process's own cgroup, and undoes it.
// No socket is touched meanwhile.
func Probe() error {
	o, err := open(Config{}) // the program selects no socket by mark 0
	if err != nil {
		return fmt.Errorf("probe SMC-R TCP option: %w", err)
	}
	return o.Close()
}

func open(cfg Config) (*Option, error) {
	dir, err := openCgroup(cfg.CgroupPath)
	if err != nil {
		return nil, err
	}
	defer dir.close()

	// Kernels before 5.11 charge programs to RLIMIT_MEMLOCK; later ones are
	// left alone by this. Whether it matters is seen when the program is loaded.
	memlockErr := rlimit.RemoveMemlock()
	spec, err := loadProgram()
	if err != nil {
		return nil, err
	}
	if err := spec.Variables[programVarWantedMark].Set(cfg.Mark); err != nil {
		return nil, fmt.Errorf("set mark: %w", err)
	}
	var objects programObjects
	if err := spec.LoadAndAssign(&objects, nil); err != nil {
		if memlockErr != nil {
			err = fmt.Errorf("%w (and before: %w)", err, memlockErr)
		}
		return nil, loadError(err)
	}
	// The link keeps the program.
	defer func() { _ = objects.SmcrOption.Close() }()

	l, err := link.AttachCgroup(link.CgroupOptions{
		Path:    dir.path,
		Attach:  ebpf.AttachCGroupSockOps,
		Program: objects.SmcrOption,
	})
	if err != nil {
		_ = objects.Handshakes.Close()
		return nil, attachError(dir.path, err)
	}
	return &Option{mark: cfg.Mark, handshakes: objects.Handshakes, link: l}, nil
}

// loadError says what a refusal of the map or the program means.
func loadError(err error) error {
	e := &UnsupportedError{What: "load the eBPF program", Err: err}
	var verifier *ebpf.VerifierError
	switch {
	case errors.Is(err, unix.ENOSYS):
		e.Need = "a kernel with CONFIG_BPF_SYSCALL"
	case errors.Is(err, unix.EPERM):
		e.Need = "root, or CAP_BPF and CAP_NET_ADMIN (before Linux 5.11 CAP_SYS_ADMIN and CAP_SYS_RESOURCE), and a seccomp profile that allows bpf"
	case errors.As(err, &verifier):
		e.Need = "Linux 5.10 or later; on such a kernel please report this with the verifier's log"
	default:
		e.Need = "Linux 5.10 or later with CONFIG_CGROUP_BPF and CONFIG_NET"
	}
	return e
}

// attachError says what a refusal of the cgroup means.
func attachError(dir string, err error) error {
	e := &UnsupportedError{What: "attach the eBPF program to cgroup " + dir, Err: err}
	switch {
	case errors.Is(err, unix.EPERM):
		e.Need = "CAP_NET_ADMIN, and no exclusive sock_ops program on that cgroup or above it (bpftool cgroup tree)"
	case errors.Is(err, unix.E2BIG):
		e.Need = "fewer sock_ops programs on that cgroup (bpftool cgroup tree)"
	default:
		e.Need = "Linux 5.10 or later with CONFIG_CGROUP_BPF"
	}
	return e
}

// ControlDial makes a socket offer the option when it connects. It is for
// [net.Dialer.Control].
func (o *Option) ControlDial(network, address string, c syscall.RawConn) error {
	return control("offer SMC-R to", network, address, c, o.setMark)
}

// ControlListen makes a listener answer the option, and keep what its peers
// sent for [Option.SYNOffered]. It is for [net.ListenConfig.Control], and
// refuses Multipath TCP sockets: use SetMultipathTCP(false).
func (o *Option) ControlListen(network, address string, c syscall.RawConn) error {
	return control("offer SMC-R at", network, address, c, func(fd int) error {
		if err := o.setMark(fd); err != nil {
			return err
		}
		err := unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_SAVE_SYN, 1)
		if errors.Is(err, unix.ENOPROTOOPT) {
			return fmt.Errorf("set TCP_SAVE_SYN on a Multipath TCP socket: %w: call SetMultipathTCP(false) on the net.ListenConfig", err)
		}
		if err != nil {
			return fmt.Errorf("set TCP_SAVE_SYN: %w", err)
		}
		return nil
	})
}

// control calls f with the file descriptor of a TCP socket.
func control(what, network, address string, c syscall.RawConn, f func(fd int) error) error {
	if !strings.HasPrefix(network, "tcp") {
		return fmt.Errorf("%s %s: network %q is not TCP", what, address, network)
	}
	var err error
	if controlErr := c.Control(func(fd uintptr) { err = f(int(fd)) }); controlErr != nil {
		err = controlErr
	}
	if err != nil {
		return fmt.Errorf("%s %s: %w", what, address, err)
	}
	return nil
}

func (o *Option) setMark(fd int) error {
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_MARK, int(o.mark)); err != nil {
		return fmt.Errorf("set SO_MARK, which needs CAP_NET_ADMIN: %w", err)
	}
	return nil
}

// PeerOffered tells, on a connected socket of this side's making, whether the
// SYN-ACK carried the option. With [ErrNotTracked] it was not even asked for.
// On any error the connection is plain TCP for this side.
func (o *Option) PeerOffered(c syscall.Conn) (bool, error) {
	var a answer
	err := withFD(c, func(fd int) (err error) {
		a, err = o.answer(fd)
		return err
	})
	if err == nil {
		switch a {
		case answerOffered:
			return true, nil
		case answerPlain:
			return false, nil
		case answerUnknown:
			err = ErrNotTracked
		case answerWaiting:
			err = unix.ENOTCONN
		default:
			err = fmt.Errorf("the program says %v", a)
		}
	}
	return false, fmt.Errorf("look up the peer's SMC-R option: %w", err)
}

// answer returns what the program knows of the socket fd.
func (o *Option) answer(fd int) (answer, error) {
	o.mu.RLock()
	defer o.mu.RUnlock()
	if o.closed {
		return answerUnknown, os.ErrClosed
	}
	a, err := o.lookup(fd)
	if err != nil || a == answerPlain || a == answerOffered {
		return a, err
	}
	// A poll can tell that a socket is connected before the kernel is done
	// with the SYN-ACK. TCP_INFO takes the socket's lock, so it waits for that.
	if _, err := unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO); err != nil {
		return answerUnknown, fmt.Errorf("TCP_INFO: %w", err)
	}
	return o.lookup(fd)
}

func (o *Option) lookup(fd int) (answer, error) {
	var h handshake
	err := o.handshakes.Lookup(int32(fd), &h)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return answerUnknown, nil
	}
	return h.Answer, err
}

// SYNOffered tells, on an accepted socket of a listener prepared with
// ControlListen, whether the SYN carried the option. A connection made from a
// syncookie never has it. The kernel forgets the SYN when it was read: ask once
// for each connection.
func (o *Option) SYNOffered(c syscall.Conn) (bool, error) {
	o.mu.RLock()
	closed := o.closed
	o.mu.RUnlock()
	if closed {
		// Our SYN-ACK may have gone out without the option.
		return false, fmt.Errorf("read the saved SYN: %w", os.ErrClosed)
	}
	var syn []byte
	err := withFD(c, func(fd int) (err error) {
		syn, err = savedSYN(fd)
		return err
	})
	if err != nil {
		return false, fmt.Errorf("read the saved SYN: %w", err)
	}
	if len(syn) == 0 {
		return false, nil
	}
	return ParseSYN(syn)
}

func withFD(c syscall.Conn, f func(fd int) error) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	if controlErr := raw.Control(func(fd uintptr) { err = f(int(fd)) }); controlErr != nil {
		return controlErr
	}
	return err
}

// Close detaches the program. Connections that exist are not touched; new ones
// carry no option. Close is idempotent.
func (o *Option) Close() error {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.closed {
		return nil
	}
	o.closed = true
	if err := errors.Join(o.link.Close(), o.handshakes.Close()); err != nil {
		return fmt.Errorf("close SMC-R TCP option: %w", err)
	}
	return nil
}
