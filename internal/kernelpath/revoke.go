// SPDX-License-Identifier: Apache-2.0

package kernelpath

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/internal/linux"
	"github.com/smcr-io/kube-smcr/internal/smcnl"
)

// An Ended is a connection on SMC-R that Revoke ended.
type Ended struct {
	Role smcnl.Side // of the pod
	linux.TCPConn
}

// A Revocation is what Revoke did and found.
type Revocation struct {
	Ended []Ended
	// Left is the number of connections that the filter refuses and that live on. The error says why.
	Left int
	// Unsettled says that a rendezvous is under way, or that a connection which the filter refuses waits to be
	// accepted: no program has its socket yet. Call Revoke again.
	Unsettled bool
	// Allowed are the cookies of connections that the filter lets be on SMC-R.
	Allowed []uint64
}

// Revoke ends the connections on SMC-R of a pod that its filter refuses, as those that were made under
// another one: of the socket of its program, which need not know, both directions. For both sides that is an end
// of stream, as if the other one had closed, and no reset: SMC's have none that others can send. What
// fell back to TCP stays.
//
// allowed is what another call with the same filter returned, and saves looking at these again. Revoke takes
// 2 s at most, whatever programs do.
func Revoke(ns *linux.NetNS, filter linux.OptionFilterConfig, allowed []uint64) (Revocation, error) {
	r, err := revoke(ns, filter, allowed)
	if err != nil {
		return r, fmt.Errorf("end connections on SMC-R that no policy allows any more: %w", err)
	}
	return r, nil
}

func revoke(ns *linux.NetNS, filter linux.OptionFilterConfig, allowed []uint64) (Revocation, error) {
	socks, err := sockets(ns)
	if err != nil {
		return Revocation{}, err
	}
	var conns tcpConns
	known := func(s *smcnl.Socket) bool { return slices.Contains(allowed, s.Cookie) }
	if slices.ContainsFunc(socks, func(s smcnl.Socket) bool { return isLive(&s) && !known(&s) }) {
		if conns, err = findTCPConns(ns); err != nil {
			return Revocation{}, err
		}
	}
	p := planRevocation(socks, conns, filter, known)
	r := Revocation{Unsettled: p.unsettled, Allowed: p.allowed}
	if len(p.refused) == 0 {
		return r, nil
	}
	files, err := linux.FindSocketFiles(ns, inodesOf(p.refused), time.Now().Add(searchTime))
	if err != nil {
		if r.Left, err = missed(ns, p.refused, files, err); r.Left == 0 {
			err = nil
		}
	}
	for _, o := range endAll(p.refused, files, filter) {
		switch o.fate {
		case isAllowed:
			r.Allowed = append(r.Allowed, o.cookie)
		case isEnded:
			r.Ended = append(r.Ended, o.conn)
		case isGone:
		case isLeft:
			r.Left++
			if err == nil {
				err = o.err // those of the others say the same, mostly
			}
		}
	}
	return r, err
}

// missed counts the sockets that were not found, for the reason err, and are still there.
func missed(ns *linux.NetNS, refused []smcnl.Socket, files map[uint64]linux.SocketFile, err error) (int, error) {
	socks, lerr := sockets(ns)
	if lerr != nil {
		return len(refused) - len(files), errors.Join(err, lerr)
	}
	n := 0
	for i := range refused {
		same := func(s smcnl.Socket) bool { return s.Cookie == refused[i].Cookie && isLive(&s) }
		if _, found := files[refused[i].Inode]; !found && slices.ContainsFunc(socks, same) {
			n++
		}
	}
	return n, err
}

// A plan says what is to be done about the sockets of a namespace.
type plan struct {
	// refused are those that the filter refuses, or may: who opens them sees their addresses.
	refused   []smcnl.Socket
	allowed   []uint64
	unsettled bool
}

// planRevocation decides. known are the connections that are known to be allowed.
func planRevocation(socks []smcnl.Socket, conns tcpConns, filter linux.OptionFilterConfig, known func(*smcnl.Socket) bool) (p plan) {
	for i := range socks {
		s := &socks[i]
		refuses := func(c linux.TCPConn) bool { return refused(filter, s.Role, c) }
		under := conns.under(s)
		switch {
		case mayBecomeLive(s):
			p.unsettled = true
		case !isLive(s), s.Role == "": // of none of both sides: its link group is gone, and so will it be
		case known(s), len(under) > 0 && !slices.ContainsFunc(under, refuses):
			p.allowed = append(p.allowed, s.Cookie)
		case s.Inode == 0:
			p.unsettled = true
		default:
			p.refused = append(p.refused, *s)
		}
	}
	return p
}

// refused tells whether a filter refuses a connection of which a pod is this side.
func refused(filter linux.OptionFilterConfig, role smcnl.Side, c linux.TCPConn) bool {
	port := c.Peer.Port()
	if role == smcnl.Server {
		port = c.Local.Port()
	}
	return !filter.Allows(c.Peer.Addr(), port)
}

func inodesOf(socks []smcnl.Socket) (out []uint64) {
	for i := range socks {
		out = append(out, socks[i].Inode)
	}
	return out
}

// A fate is what becomes of a socket.
type fate uint8

const (
	isLeft    fate = iota // the error says why
	isAllowed             // the filter does not refuse it
	isEnded
	isGone // by itself, meanwhile
)

// An outcome is what became of one socket.
type outcome struct {
	cookie uint64
	conn   Ended
	fate   fate
	err    error
}

// endAll ends what was found of the sockets, many at once, since one may take until all are to have ended.
func endAll(socks []smcnl.Socket, files map[uint64]linux.SocketFile, filter linux.OptionFilterConfig) []outcome {
	until := time.Now().Add(endPatience)
	var all []outcome
	var mu sync.Mutex
	var wg sync.WaitGroup
	room := make(chan struct{}, maxEnding)
	for i := range socks {
		f, ok := files[socks[i].Inode]
		if !ok {
			continue
		}
		room <- struct{}{}
		wg.Go(func() {
			defer func() { <-room }()
			o := end(&socks[i], f, filter, until)
			mu.Lock()
			defer mu.Unlock()
			all = append(all, o)
		})
	}
	wg.Wait()
	return all
}

// end ends the connection of a socket, by a file of a program, if the filter refuses it.
func end(s *smcnl.Socket, f linux.SocketFile, filter linux.OptionFilterConfig, until time.Time) outcome {
	o := outcome{cookie: s.Cookie, conn: Ended{Role: s.Role}}
	fd, err := f.Open(s.Inode)
	if errors.Is(err, linux.ErrNotHeld) {
		o.fate = isGone
		return o
	}
	if err != nil {
		o.err = err
		return o
	}
	defer unix.Close(fd)
	o.conn.TCPConn, err = linux.EndsOf(fd)
	switch {
	case errors.Is(err, unix.ENOTCONN):
		o.fate = isGone
	case err != nil:
		o.err = err
	case !refused(filter, s.Role, o.conn.TCPConn):
		o.fate = isAllowed
	default:
		if o.err = linux.ShutDown(fd, until); o.err == nil {
			o.fate = isEnded
		}
	}
	return o
}
