// SPDX-License-Identifier: Apache-2.0

package ssp

import (
	"bytes"
	"errors"
	"fmt"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/iwarp"
)

// MaxRequest is the length of the longest Request: no byte of the stream behind that many is of
// interest.
const MaxRequest = iwarp.StartLen + iwarp.MaxPrivateData

// ErrDown says that the connection ended, or began with what is no Request, before there was one.
var ErrDown = errors.New("connection of the Socket Service Point is down")

// State is how far a [Point] has come.
type State uint8

// States of a Socket Service Point (§3.1.1.1) and of its request.
const (
	Waiting  State = iota // for the Request: the only state in which it is operational
	Asked                 // the request is to be answered
	Accepted              // by a queue pair
	Rejected
	Down  // there will be no request
	Freed // before there was a request, or with its device
)

func (s State) String() string {
	names := [...]string{"WAITING", "ASKED", "ACCEPTED", "REJECTED", "DOWN", "FREED"}
	if int(s) < len(names) {
		return names[s]
	}
	return fmt.Sprintf("State(%d)", uint8(s))
}

// Owner is who may read, write and close the connection.
type Owner uint8

// Owners of a connection.
const (
	Program Owner = iota
	ServicePoint
	Request
	QueuePair
)

func (o Owner) String() string {
	names := [...]string{"program", "service point", "request", "queue pair"}
	if int(o) < len(names) {
		return names[o]
	}
	return fmt.Sprintf("Owner(%d)", uint8(o))
}

// Point is a Socket Service Point and the one request that it can have. It is not safe for
// concurrent use: what comes first to its owner has come first.
//
//	          whole Request         Accept
//	WAITING ----------------> ASKED ------> ACCEPTED    the queue pair has the connection
//	 |  |                        | Reject
//	 |  | the stream ends,       +--------> REJECTED    the program has it
//	 |  | or is no Request
//	 |  +-------------> DOWN
//	 | Free              | Free
//	 +-----> FREED <-----+                              the program has it
//
// Shut, of a device that is closed, leads from WAITING, ASKED and DOWN to FREED, too.
type Point struct {
	state State
	freed bool // Free was called, which is another matter where there is a request
	early []byte
	raw   []byte
	frame iwarp.Frame
	err   error
}

// New makes a point that waits. early is what was already read from the stream; the point keeps
// a copy.
func New(early []byte) Point { return Point{early: bytes.Clone(early)} }

// State returns the state.
func (p *Point) State() State { return p.state }

// Owner returns whose the connection is.
func (p *Point) Owner() Owner {
	switch p.state {
	case Waiting, Down:
		return ServicePoint
	case Asked:
		return Request
	case Accepted:
		return QueuePair
	default:
		return Program
	}
}

// Err returns why there is no request: an [ErrDown], or [rdma.ErrClosed]. It is nil while there
// may be one.
func (p *Point) Err() error { return p.err }

// Frame returns the Request of a point that was asked. Its private data is the point's.
func (p *Point) Frame() *iwarp.Frame { return &p.frame }

// HandleHead is to be called when there may be something new at the head of the stream: head is
// what the stream begins with, up to [MaxRequest] bytes of it, and is still in it; end, if not
// nil, says that nothing will come behind it. The caller takes the first take bytes out of the
// stream, if any, and sends answer, if any.
func (p *Point) HandleHead(head []byte, end error) (take int, answer []byte) {
	if p.state != Waiting {
		return 0, nil
	}
	b := append(bytes.Clone(p.early), head...)
	n, err := requestLen(b)
	switch {
	case err != nil:
	case n > 0 && len(b) >= n:
		return p.handleRequest(b[:n])
	case end != nil:
		err = fmt.Errorf("%d bytes into the Request: %w", len(b), end)
	default:
		return 0, nil
	}
	p.becomeDown(err)
	return 0, nil
}

// requestLen returns the length of the Request that begins with b, 0 if that cannot be told yet.
func requestLen(b []byte) (int, error) {
	if len(b) < iwarp.StartLen {
		if n := min(len(b), len(iwarp.RequestKey)); string(b[:n]) != iwarp.RequestKey[:n] {
			return 0, fmt.Errorf("%w: it begins with %q", iwarp.ErrKey, b)
		}
		return 0, nil
	}
	return iwarp.FrameLen(b, false)
}

// handleRequest has a whole Request.
func (p *Point) handleRequest(b []byte) (take int, answer []byte) {
	take = len(b) - len(p.early)
	if take < 0 {
		p.becomeDown(fmt.Errorf("%d bytes behind the Request, before it was answered: %w", -take, rdma.ErrInvalid))
		return 0, nil
	}
	f, err := iwarp.ParseFrame(b)
	if err != nil {
		p.becomeDown(err)
		return 0, nil
	}
	if f.Rev != iwarp.Rev1 && f.Rev != iwarp.Rev2 {
		p.becomeDown(fmt.Errorf("request of revision %d: %w", f.Rev, iwarp.ErrRevision))
		f.Rev, f.IsEnhanced = iwarp.Rev2, true
		return take, refusal(&f, nil)
	}
	p.state, p.raw, p.frame = Asked, b, f
	return take, nil
}

func (p *Point) becomeDown(err error) {
	p.state, p.err = Down, fmt.Errorf("%w: %w", ErrDown, err)
}

// refusal is the Reply to a Request that says no.
func refusal(f *iwarp.Frame, pd []byte) []byte {
	r := iwarp.Frame{Reply: true, Reject: true, CRC: f.CRC, Rev: f.Rev, IsEnhanced: f.IsEnhanced, PrivateData: pd}
	return r.Append(nil)
}

// CheckReply returns an error if private data does not fit into a Reply to the Request.
func (p *Point) CheckReply(pd []byte) error {
	f := iwarp.Frame{IsEnhanced: p.frame.IsEnhanced, PrivateData: pd}
	if f.Len() > MaxRequest {
		return fmt.Errorf("%d bytes of private data: %w", len(pd), rdma.ErrInvalid)
	}
	return nil
}

// errAnswered returns an error unless the request is to be answered.
func (p *Point) errAnswered() error {
	switch {
	case p.state == Asked:
		return nil
	case p.err != nil:
		return p.err
	}
	return fmt.Errorf("request is %v: %w", p.state, rdma.ErrState)
}

// Accept gives the connection to a queue pair, and returns the bytes of the Request, with which
// its stream begins.
func (p *Point) Accept() ([]byte, error) {
	if err := p.errAnswered(); err != nil {
		return nil, err
	}
	p.state = Accepted
	return p.raw, nil
}

// TakeBack is for an Accept that came to nothing, before anything was sent.
func (p *Point) TakeBack() {
	if p.state == Accepted {
		p.state = Asked
	}
}

// Reject gives the connection back to the program, and returns what the caller sends first.
func (p *Point) Reject(pd []byte) ([]byte, error) {
	if err := p.errAnswered(); err != nil {
		return nil, err
	}
	if err := p.CheckReply(pd); err != nil {
		return nil, err
	}
	p.state = Rejected
	return refusal(&p.frame, pd), nil
}

// Free ends the point. It reports whether the connection goes back to the program: if not, a
// request has it, which goes on. A second Free is an error.
func (p *Point) Free() (back bool, err error) {
	if p.freed {
		return false, rdma.ErrClosed
	}
	p.freed = true
	if p.Owner() != ServicePoint {
		return false, nil
	}
	p.becomeFreed()
	return true, nil
}

// Shut ends the point and a request that waits for its answer. It reports whether the caller has
// to close the connection: if not, it belongs to somebody else.
func (p *Point) Shut() bool {
	p.freed = true
	if o := p.Owner(); o != ServicePoint && o != Request {
		return false
	}
	p.becomeFreed()
	return true
}

func (p *Point) becomeFreed() {
	p.state = Freed
	if p.err == nil {
		p.err = rdma.ErrClosed
	}
}
