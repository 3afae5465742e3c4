// SPDX-License-Identifier: Apache-2.0

package smcrtest

import (
	"errors"
	"fmt"
	"runtime/debug"
	"strings"
	"time"
)

// Op is one thing that applications, networks and devices do in a schedule. It
// prints as the command of a scenario.
type Op struct {
	Kind OpKind
	Name string // of the connection
	Side int    // of the connection; -1 is both sides of a link
	Peer int    // that connects, or whose device or process it is
	To   int    // peer that is connected to
	RNIC int
	Link int // index
	N    int // bytes
	Dir  Direction
	D    time.Duration
}

// OpKind is what an Op does.
type OpKind uint8

// Kinds of an Op.
const (
	OpConnect OpKind = iota
	OpWrite
	OpRead
	OpShutdown
	OpClose
	OpAbort
	OpRun
	OpPortDown
	OpPortUp
	OpRemove
	OpInsert
	OpBlackhole
	OpHeal
	OpKillLink
	OpRestart
	OpJumpClock
	OpBurst
	OpSlow
	OpEnd
)

// opNames are the commands of scenarios.
var opNames = [...]string{
	"connect", "write", "read", "shutdown", "close", "abort", "run", "port-down", "port-up", "remove", "insert", "blackhole",
	"heal", "kill-link", "restart", "jump-clock", "burst", "slow", "end",
}

// OpKindOf finds the kind of a scenario's command.
func OpKindOf(command string) (OpKind, bool) {
	for i, n := range opNames {
		if n == command {
			return OpKind(i), true
		}
	}
	return 0, false
}

func (o Op) String() string {
	s := opNames[o.Kind]
	switch o.Kind {
	case OpConnect:
		return fmt.Sprintf("%s %s from=%d to=%d at-once", s, o.Name, o.Peer, o.To)
	case OpBurst:
		return fmt.Sprintf("%s %s from=%d to=%d n=%d", s, o.Name, o.Peer, o.To, o.N)
	case OpWrite, OpRead:
		return fmt.Sprintf("%s %s side=%d n=%d", s, o.Name, o.Side, o.N)
	case OpShutdown, OpClose, OpAbort:
		return fmt.Sprintf("%s %s side=%d", s, o.Name, o.Side)
	case OpRun:
		return fmt.Sprintf("%s %v", s, o.D)
	case OpPortDown, OpPortUp, OpRemove, OpInsert, OpHeal:
		return fmt.Sprintf("%s peer=%d rnic=%d", s, o.Peer, o.RNIC)
	case OpBlackhole:
		return fmt.Sprintf("%s peer=%d rnic=%d dir=%v", s, o.Peer, o.RNIC, o.Dir)
	case OpKillLink:
		s += fmt.Sprintf(" of=%d link=%d", o.Peer, o.Link)
		if o.Side >= 0 {
			s += fmt.Sprintf(" side=%d", o.Side)
		}
		return s
	case OpRestart, OpEnd:
		return fmt.Sprintf("%s peer=%d", s, o.Peer)
	case OpJumpClock:
		return fmt.Sprintf("%s peer=%d by=%v", s, o.Peer, o.D)
	case OpSlow:
		return fmt.Sprintf("%s peer=%d rnic=%d for=%v", s, o.Peer, o.RNIC, o.D)
	}
	return s
}

// Do does it, and returns how many bytes moved.
func (w *World) Do(o Op) int {
	switch o.Kind {
	case OpConnect:
		w.Connect(o.Peer, o.To, o.Name)
	case OpBurst:
		for i := range o.N {
			w.Connect(o.Peer, o.To, fmt.Sprintf("%s%d", o.Name, i))
		}
	case OpWrite:
		return w.Write(o.Name, o.Side, o.N)
	case OpRead:
		return w.Read(o.Name, o.Side, o.N)
	case OpShutdown:
		w.Shutdown(o.Name, o.Side)
	case OpClose:
		w.Close(o.Name, o.Side)
	case OpAbort:
		w.Abort(o.Name, o.Side)
	case OpRun:
		w.Run(o.D)
	case OpPortDown, OpPortUp:
		w.Port(o.Peer, o.RNIC, o.Kind == OpPortUp)
	case OpRemove:
		w.Remove(o.Peer, o.RNIC)
	case OpInsert:
		w.Insert(o.Peer, o.RNIC)
	case OpBlackhole:
		w.Blackhole(o.Peer, o.RNIC, o.Dir)
	case OpHeal:
		w.Heal(o.Peer, o.RNIC)
	case OpKillLink:
		w.KillLink(o.Peer, o.Side, o.Link)
	case OpRestart:
		w.Restart(o.Peer)
	case OpEnd:
		w.End(o.Peer)
	case OpJumpClock:
		w.JumpClock(o.Peer, o.D)
	case OpSlow:
		w.Slow(o.Peer, o.RNIC, o.D)
	}
	return 0
}

// Schedule is a world and what happens in it.
type Schedule struct {
	Config Config
	Ops    []Op
}

// Run plays the schedule in a new world, and ends everything. What it returns
// depends on nothing else.
func (s Schedule) Run(trace func(format string, args ...any)) error {
	w := New(s.Config)
	if trace != nil {
		w.Trace(trace)
	}
	for _, o := range s.Ops {
		w.trace("%v -- %v", w.Elapsed(), o)
		w.Do(o)
		if len(w.errs) > 0 {
			return w.Check()
		}
	}
	return w.Finish()
}

// errPanic is a bug that the machines found themselves.
var errPanic = errors.New("panic")

// Try is Run with a panic as an error.
func (s Schedule) Try() (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("%w: %v\n%s", errPanic, p, debug.Stack())
		}
	}()
	return s.Run(nil)
}

// Shorten removes events from a schedule that fails by what try says, as long as it still
// does and more says that there is time.
func (s Schedule) Shorten(try func(Schedule) error, more func() bool) Schedule {
	for n := max(len(s.Ops)/2, 1); ; n /= 2 {
		for i := 0; i+n <= len(s.Ops); {
			if !more() {
				return s
			}
			t := Schedule{s.Config, append(append([]Op(nil), s.Ops[:i]...), s.Ops[i+n:]...)}
			if try(t) != nil {
				s = t
			} else {
				i += n
			}
		}
		if n <= 1 {
			return s
		}
	}
}

// String prints the schedule as a scenario.
func (s Schedule) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "world %v trace\n----\n", s.Config)
	for _, o := range s.Ops {
		fmt.Fprintf(&b, "\n%v\n----\n", o)
	}
	b.WriteString("\nfinish\n----\nok\n")
	return b.String()
}

// String prints a Config as the arguments of a scenario's world.
func (c Config) String() string {
	var s []string
	add := func(format string, args ...any) { s = append(s, fmt.Sprintf(format, args...)) }
	list := func(name string, of func(int) (int, bool)) {
		var v []string
		for i := range max(c.Peers, 2) {
			if n, ok := of(i); ok {
				v = append(v, fmt.Sprint(n))
			}
		}
		switch len(v) {
		case 0:
		case 1:
			add("%s=%s", name, v[0])
		default:
			add("%s=(%s)", name, strings.Join(v, ","))
		}
	}
	add("seed=%d", c.Seed)
	if c.Peers > 2 {
		add("peers=%d", c.Peers)
	}
	list("rnics", func(i int) (int, bool) { return max(c.RNICs[i], 1), true })
	some := func(name string, v [MaxPeers]int) {
		if v != [MaxPeers]int{} {
			list(name, func(i int) (int, bool) { return v[i], true })
		}
	}
	some("max-links", c.MaxLinks)
	some("versions", c.Versions)
	some("eids", c.EIDs)
	some("release", c.Release)
	some("max-conns", c.MaxConns)
	list("linux", func(i int) (int, bool) { return i, c.Linux[i] })
	sizes := func(name string, v []uint32) {
		if len(v) > 0 {
			add("%s=(%s)", name, strings.Trim(strings.ReplaceAll(fmt.Sprint(v), " ", ","), "[]"))
		}
	}
	sizes("rmbe", c.RMBESizes)
	sizes("send", c.SendBuffers)
	if c.RFC {
		add("rfc")
	}
	if c.Routed {
		add("routed")
	}
	if c.Subnets {
		add("subnets")
	}
	if c.Releases {
		add("releases")
	}
	if c.Interrupts {
		add("interrupts")
	}
	if c.Handover > 0 {
		add("handover=%d", c.Handover)
	}
	if c.Declines > 0 {
		add("declines=%d", c.Declines)
	}
	if c.Delays {
		add("delays")
	}
	if c.Loss > 0 {
		add("loss=%d", c.Loss)
	}
	if c.Retry > 0 {
		add("retry=%v", c.Retry)
	}
	return strings.Join(s, " ")
}
