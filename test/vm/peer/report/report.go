// SPDX-License-Identifier: Apache-2.0

package report

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"github.com/smcr-io/kube-smcr/internal/smcnl"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
)

// Line is one line of the program's output.
type Line struct {
	// MS is the time since the program began, in milliseconds.
	MS float64 `json:"ms"`
	// Listening is the address of a server that accepts connections now.
	Listening string `json:"listening,omitempty"`
	// Open says that so many connections are open and that scripts begin.
	Open int `json:"open,omitempty"`
	// Held says that so many connections run the script hold and only wait.
	Held int `json:"held,omitempty"`
	// Conn is a connection that has ended.
	Conn *Conn `json:"conn,omitempty"`
	// Group is a link group of the engine that changed.
	Group *Group `json:"group,omitempty"`
	// Malformed is something that the engine could not make sense of.
	Malformed string `json:"malformed,omitempty"`
	// End is the last line.
	End *End `json:"end,omitempty"`
}

// How a connection's incoming stream ended.
const (
	EndEOF     = "eof"     // the peer ended it
	EndReset   = "reset"   // the peer reset the connection
	EndTimeout = "timeout" // nothing came in time
	EndOpen    = "open"    // it had not ended when the script did
)

// StateAborted is the state of a kernel's socket whose peer has reset the
// connection.
const StateAborted = "PROCESSABORT"

// Conn is what happened on a connection.
type Conn struct {
	Script string `json:"script"` // with its parameters
	Role   string `json:"role"`   // client or server
	Local  string `json:"local"`
	Peer   string `json:"peer"`

	Sent     uint64 `json:"sent"`     // bytes
	Received uint64 `json:"received"` // bytes, each of them compared with what it should be
	// SumSent and SumReceived are CRC-32C of the streams; what the peer says
	// about its end was compared too.
	SumSent     uint32 `json:"sumSent"`
	SumReceived uint32 `json:"sumReceived"`
	Urgent      int    `json:"urgent,omitempty"` // urgent bytes received
	End         string `json:"end,omitempty"`
	// EndState is the state of a kernel's socket at the end of its stream. Its
	// readers see eof also where the peer has reset the connection; then the
	// state is StateAborted.
	EndState string `json:"endState,omitempty"`
	Err      string `json:"err,omitempty"`

	ConnectMS float64 `json:"connectMS,omitempty"` // until the connection could be used
	TookMS    float64 `json:"tookMS"`              // by the script
	// StallMS is the longest time that one write or one answer took.
	StallMS float64 `json:"stallMS"`
	// Round trips of scripts that have them.
	Rounds    int     `json:"rounds,omitempty"`
	RTTMedian float64 `json:"rttMedianMS,omitempty"`

	Engine *Engine       `json:"engine,omitempty"` // our stack's view
	Kernel *smcnl.Socket `json:"kernel,omitempty"` // the kernel's, when all were open
}

// Engine is what our stack says of a connection.
type Engine struct {
	Mode         string     `json:"mode"` // SMC-R or TCP
	Reason       clc.Reason `json:"reason,omitempty"`
	ReasonName   string     `json:"reasonName,omitempty"`
	PeerDeclined bool       `json:"peerDeclined,omitempty"`
	Version      uint8      `json:"version,omitempty"`
	FirstContact bool       `json:"firstContact,omitempty"`
	GroupID      uint32     `json:"groupID,omitempty"`
	LinkID       uint8      `json:"linkID,omitempty"`
	State        string     `json:"state,omitempty"`
	SetupMS      float64    `json:"setupMS"`
	RMBE         int        `json:"rmbe,omitempty"`
	PeerRMBE     int        `json:"peerRMBE,omitempty"`
	RDMAWrites   uint64     `json:"rdmaWrites,omitempty"`
}

// EngineOf describes a connection of our stack.
func EngineOf(i smcr.Info) *Engine {
	e := &Engine{
		Mode: i.Mode.String(), Reason: i.Reason, PeerDeclined: i.PeerDeclined, Version: i.Version, FirstContact: i.FirstContact,
		GroupID: i.GroupID, LinkID: i.LinkID, State: i.State, SetupMS: i.Setup.Seconds() * 1e3,
		RMBE: i.RMBE, PeerRMBE: i.PeerRMBE, RDMAWrites: i.RDMAWrites,
	}
	if i.Reason != 0 {
		e.ReasonName = i.Reason.String()
	}
	return e
}

// SMCR reports whether SMC-R carried the connection.
func (e *Engine) SMCR() bool { return e != nil && e.Mode == smcr.ModeSMCR.String() }

// Group is a link group of the engine.
type Group struct {
	ID         uint32 `json:"id"`
	Role       string `json:"role"`
	State      string `json:"state"`
	Redundancy string `json:"redundancy"`
	Version    uint8  `json:"version"`
	Release    uint8  `json:"release"`
	EID        string `json:"eid,omitempty"`
	PeerHost   string `json:"peerHost,omitempty"`
	Conns      int    `json:"conns"`
	RMBBytes   int    `json:"rmbBytes"`
	Links      []Link `json:"links,omitempty"`
	Err        string `json:"err,omitempty"` // why it ended
}

// Link is a link of a group.
type Link struct {
	ID       uint8  `json:"id"`
	State    string `json:"state"`
	Device   string `json:"device"`
	LocalGID string `json:"localGID"`
	PeerGID  string `json:"peerGID"`
	MTU      int    `json:"mtu"`
	Conns    int    `json:"conns"`
}

// GroupOf describes a link group of our stack.
func GroupOf(i smcr.GroupInfo) *Group {
	g := &Group{
		ID: i.ID, Role: i.Role.String(), State: i.State, Redundancy: i.Redundancy, Version: i.Version, Release: i.Release,
		EID: i.EID, PeerHost: i.PeerHost, Conns: i.Conns, RMBBytes: i.RMBBytes,
	}
	if i.Err != nil {
		g.Err = i.Err.Error()
	}
	for _, l := range i.Links {
		g.Links = append(g.Links, Link{
			ID: l.ID, State: l.State, Device: l.Device, LocalGID: l.LocalGID.String(), PeerGID: l.PeerGID.String(), MTU: l.MTU.Bytes(), Conns: l.Conns,
		})
	}
	return g
}

// End is what is left when the scripts are over and their connections closed.
type End struct {
	Conns int `json:"conns"` // that had a script
	Bad   int `json:"bad"`   // of them with an error
	// Of the engine: the connections that did not end, the link groups, and
	// the counters before the stack was closed and after.
	Left   int         `json:"left,omitempty"`
	Groups []Group     `json:"groups,omitempty"`
	Stats  *smcr.Stats `json:"stats,omitempty"`
	Closed *smcr.Stats `json:"closed,omitempty"`
	Err    string      `json:"err,omitempty"`
}

// Report is a whole output.
type Report struct {
	Conns     []Conn
	Groups    []Group // in the order of their changes
	Malformed []string
	End       *End // nil if the program was ended before
}

// Add takes a line into the report.
func (r *Report) Add(l Line) {
	switch {
	case l.Conn != nil:
		r.Conns = append(r.Conns, *l.Conn)
	case l.Group != nil:
		r.Groups = append(r.Groups, *l.Group)
	case l.Malformed != "":
		r.Malformed = append(r.Malformed, l.Malformed)
	case l.End != nil:
		r.End = l.End
	}
}

// Read reads a whole output.
func Read(in io.Reader) (*Report, error) {
	r := &Report{}
	for d := json.NewDecoder(in); ; {
		var l Line
		switch err := d.Decode(&l); {
		case errors.Is(err, io.EOF):
			return r, nil
		case err != nil:
			return r, fmt.Errorf("read the output of the peer: %w", err)
		}
		r.Add(l)
	}
}

// Check returns what is wrong in any case: connections with errors, and things
// that were not given back.
func (r *Report) Check() error {
	var errs []error
	for _, c := range r.Conns {
		if c.Err != "" {
			errs = append(errs, fmt.Errorf("%s %s, %s to %s: %s", c.Role, c.Script, c.Local, c.Peer, c.Err))
		}
	}
	if e := r.End; e == nil {
		errs = append(errs, errors.New("the peer's program printed no end"))
	} else {
		if e.Err != "" {
			errs = append(errs, errors.New(e.Err))
		}
		errs = append(errs, e.leaks()...)
	}
	const shown = 5 // of 300 connections that fail for one reason
	if len(errs) > shown {
		errs = append(errs[:shown], fmt.Errorf("and %d more", len(errs)-shown))
	}
	return errors.Join(errs...)
}

func (e *End) leaks() []error {
	var errs []error
	if e.Left != 0 {
		errs = append(errs, fmt.Errorf("%d connections are left", e.Left))
	}
	for _, g := range e.Groups {
		n := g.Conns
		for _, l := range g.Links {
			n = max(n, l.Conns)
		}
		if n != 0 {
			errs = append(errs, fmt.Errorf("link group %d counts %d connections and has none", g.ID, n))
		}
	}
	if c := e.Closed; c != nil && (c.MemoryBytes != 0 || c.Conns != 0 || c.Groups != 0) {
		errs = append(errs, fmt.Errorf("the closed stack has %d bytes registered, %d connections, %d link groups", c.MemoryBytes, c.Conns, c.Groups))
	}
	return errs
}

// Kernel is what `kernelsmc` prints: the state of the kernel's SMC.
type Kernel struct {
	System   smcnl.System   `json:"system"`
	Counters smcnl.Counters `json:"counters"`
	Groups   []smcnl.Group  `json:"groups"`
	Sockets  []smcnl.Socket `json:"sockets"`
	UEIDs    []string       `json:"ueids"`
	PNets    []smcnl.PNet   `json:"pnets"`
}
