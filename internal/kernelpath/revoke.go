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
	// Unsettled says that a rendezvous is under way, that a connection which the filter refuses waits to be
	// accepted, so that no program has its socket yet, or that a program closed one just then. Call Revoke again.
	Unsettled bool
	// Allowed are the cookies of connections that the filter lets be on SMC-R.
	Allowed []uint64 // of the node's network also those that are not the pod's
}

// Revoke ends the connections on SMC-R of a pod that its filter refuses, as those that were made under
// another one: of the socket of its program, which need not know, both directions. For both sides that is an end
// of stream, as if the other one had closed, and no reset: SMC's have none that others can send. What
// fell back to TCP stays.
//
// allowed is what another call with the same filter returned, and saves looking at these again. Revoke takes
// 2 s at most, whatever programs do.
func Revoke(at linux.Place, filter linux.OptionFilterConfig, allowed []uint64) (Revocation, error) {
	socks, why := sockets(at.NetNS, concernsRevocation)
	r, err := revoke(at, socks, why, filter, allowed)
	if err != nil {
		return r, fmt.Errorf("end connections on SMC-R that no policy allows any more: %w", err)
	}
	return r, nil
}

// revoke is Revoke by the list of the sockets of the place's namespace, and why these are not all.
func revoke(at linux.Place, socks []smcnl.Socket, why error, filter linux.OptionFilterConfig, allowed []uint64) (_ Revocation, err error) {
	if why != nil && !errors.Is(why, linux.ErrTooMuch) {
		return Revocation{}, why
	}
	defer func() { err = errors.Join(err, why) }() // those of the list are ended all the same
	ns := at.NetNS
	var tcp tcpSockets
	known := make(map[uint64]bool, len(allowed))
	for _, cookie := range allowed {
		known[cookie] = true
	}
	if slices.ContainsFunc(socks, func(s smcnl.Socket) bool { return isLive(&s) && !known[s.Cookie] }) {
		if tcp, err = findTCP(at); err != nil {
			return Revocation{}, err
		}
	}
	refused := tcp.judge(filter)
	p := planRevocation(socks, tcp, refused, known)
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
	for _, o := range endAll(p.refused, files, refused) {
		switch o.fate {
		case isAllowed:
			r.Allowed = append(r.Allowed, o.cookie)
		case isEnded:
			r.Ended = append(r.Ended, o.conn)
		case isGone:
			r.Unsettled = true // unless it only moved: look again
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
func missed(ns *linux.NetNS, all []suspect, files map[uint64]linux.SocketFile, err error) (int, error) {
	socks, lerr := sockets(ns, concernsRevocation)
	if lerr != nil {
		return len(all) - len(files), errors.Join(err, lerr)
	}
	live := map[uint64]bool{}
	for i := range socks {
		live[socks[i].Cookie] = isLive(&socks[i])
	}
	n := 0
	for _, s := range all {
		if _, found := files[s.inode]; !found && live[s.cookie] {
			n++
		}
	}
	return n, err
}

// A plan says what is to be done about the sockets of a namespace.
type plan struct {
	refused   []suspect
	allowed   []uint64
	unsettled bool
}

// A suspect is a connection that the filter refuses, or may: who opens its socket sees its addresses.
type suspect struct {
	cookie, inode uint64
	role          smcnl.Side
	// certain is the connection, if there is only one with its ports.
	certain linux.TCPConn
}

// A judge tells whether a connection of which the pod is this side is to end.
type judge func(role smcnl.Side, c linux.TCPConn) bool

// planRevocation decides. known are the connections that are known to be allowed, by their cookies.
func planRevocation(socks []smcnl.Socket, tcp tcpSockets, refused judge, known map[uint64]bool) (p plan) {
	for i := range socks {
		s := &socks[i]
		refuses := func(c linux.TCPConn) bool { return refused(s.Role, c) }
		under := tcp.under(s)
		switch {
		case mayBecomeLive(s) && tcp.isForeign(s):
		case mayBecomeLive(s):
			p.unsettled = true
		case !isLive(s), s.Role == "": // of none of both sides: its link group is gone, and so will it be
		case known[s.Cookie], len(under) > 0 && !slices.ContainsFunc(under, refuses):
			p.allowed = append(p.allowed, s.Cookie)
		case s.Inode == 0:
			p.unsettled = true
		default:
			x := suspect{cookie: s.Cookie, inode: s.Inode, role: s.Role}
			if len(under) == 1 {
				x.certain = under[0]
			}
			p.refused = append(p.refused, x)
		}
	}
	return p
}

// judge refuses the connections of the pod that a filter refuses.
func (t *tcpSockets) judge(filter linux.OptionFilterConfig) judge {
	return func(role smcnl.Side, c linux.TCPConn) bool {
		port := c.Peer.Port()
		if role == smcnl.Server {
			port = c.Local.Port()
		}
		return t.isOurs(c) && !filter.Allows(c.Peer.Addr(), port)
	}
}

func inodesOf(all []suspect) (out []uint64) {
	for _, s := range all {
		out = append(out, s.inode)
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
func endAll(suspects []suspect, files map[uint64]linux.SocketFile, refused judge) []outcome {
	until := time.Now().Add(endPatience)
	var all []outcome
	var mu sync.Mutex
	var wg sync.WaitGroup
	room := make(chan struct{}, maxEnding)
	for _, s := range suspects {
		f, ok := files[s.inode]
		if !ok {
			continue
		}
		room <- struct{}{}
		wg.Go(func() {
			defer func() { <-room }()
			o := end(s, f, refused, until)
			mu.Lock()
			defer mu.Unlock()
			all = append(all, o)
		})
	}
	wg.Wait()
	return all
}

// end ends the connection of a socket, by a file of a program, if it is refused.
func end(s suspect, f linux.SocketFile, refused judge, until time.Time) (o outcome) {
	o.cookie, o.conn.Role = s.cookie, s.role
	fd, err := f.Open(s.inode)
	if err != nil {
		o.become(err)
		return o
	}
	defer func() { _ = linux.CloseSocket(fd, until) }()
	o.conn.TCPConn, err = linux.EndsOf(fd)
	if errors.Is(err, unix.ENOTCONN) && s.certain.Peer.IsValid() { // the program has ended its direction
		o.conn.TCPConn, err = s.certain, nil
	}
	switch {
	case errors.Is(err, unix.ENOTCONN):
		o.fate, o.err = isLeft, errors.New("a connection of which the program has ended its direction has the ports of another one, so it is not known whom it is with")
		return o
	case err != nil:
	case !refused(s.role, o.conn.TCPConn):
		o.fate = isAllowed
		return o
	default:
		err = linux.ShutDown(fd, until)
	}
	o.become(err)
	return o
}

// become notes the fate of a socket that is to end.
func (o *outcome) become(err error) {
	switch {
	case err == nil:
		o.fate = isEnded
	case errors.Is(err, linux.ErrNotHeld), errors.Is(err, unix.ENOTCONN):
		o.fate = isGone
	default:
		o.fate, o.err = isLeft, err
	}
}
