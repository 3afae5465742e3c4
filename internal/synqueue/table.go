// SPDX-License-Identifier: Apache-2.0

package synqueue

import (
	"net/netip"
	"time"
)

// A Decision is what becomes of a held SYN.
type Decision uint8

// Decisions.
const (
	// Pass: the SYN goes on, the connection is the application's own.
	Pass Decision = iota
	// Divert: the SYN goes to the agent's listener.
	Divert
	// Reset answers as a port does on which nobody listens.
	Reset
	// HostUnreachable answers with an ICMP error: the host cannot be reached.
	HostUnreachable
	// NetUnreachable answers with an ICMP error: there is no route.
	NetUnreachable
	// Prohibited answers with an ICMP error: an administrator forbids it.
	Prohibited
	// Drop answers nothing: a later copy of the SYN is held, or TCP is to repeat it.
	Drop
	numDecisions
)

// String names the decision.
func (d Decision) String() string {
	names := [numDecisions]string{"pass", "divert", "reset", "host unreachable", "net unreachable", "prohibited", "drop"}
	if d >= numDecisions {
		return "unknown"
	}
	return names[d]
}

// A Config bounds a Table. Zero values take the defaults.
type Config struct {
	Deadline          time.Duration // how long a SYN is held at most
	MaxHeld           int           // SYNs held at once
	ExtraSpeaking     int           // further ones, to destinations that speak SMC-R; as many further questions
	MaxQuestions      int           // questions that have no answer yet
	MaxPerDestination int           // of these, to one destination
	MaxRemembered     int           // decisions for SYNs that may be repeated
	MaxPeers          int           // destinations of which something was found out
	Remember          time.Duration // how long these are kept
}

func (c Config) withDefaults() Config {
	set := func(v *int, to int) {
		if *v <= 0 {
			*v = to
		}
	}
	set(&c.MaxHeld, DefaultMaxHeld)
	set(&c.ExtraSpeaking, DefaultExtraSpeaking)
	set(&c.MaxQuestions, DefaultMaxQuestions)
	set(&c.MaxPerDestination, DefaultMaxPerDestination)
	set(&c.MaxRemembered, DefaultMaxRemembered)
	set(&c.MaxPeers, DefaultMaxPeers)
	if c.Deadline <= 0 {
		c.Deadline = DefaultDeadline
	}
	if c.Remember <= 0 {
		c.Remember = DefaultRemember
	}
	return c
}

// Counters count what a Table was given and what became of it.
type Counters struct {
	Held     uint64               // SYNs that waited
	Repeated uint64               // SYNs that were seen before
	Full     uint64               // SYNs for which there was no room
	Late     uint64               // SYNs that waited until their deadline
	Verdicts [numDecisions]uint64 // verdicts, by decision
}

// Add adds what another Table counted.
func (c *Counters) Add(o Counters) {
	c.Held += o.Held
	c.Repeated += o.Repeated
	c.Full += o.Full
	c.Late += o.Late
	for d, n := range o.Verdicts {
		c.Verdicts[d] += n
	}
}

// A Table knows the held SYNs of one pod.
type Table struct {
	cfg       Config
	held      []held // oldest first
	questions int    // that have no answer yet
	known     []known
	oldest    int // of known, when it is full
	peers     []peer
	first     int // of peers, the one that is forgotten next when it is full
	actions   []Action
	polled    int // of actions
	counters  Counters
}

// held is a SYN in the kernel's queue.
type held struct {
	conn  Conn
	seq   uint32
	id    uint32
	late  Decision
	asked bool // somebody is finding out about this connection
	since time.Time
}

// known is a decision that was made.
type known struct {
	conn     Conn
	seq      uint32
	decision Decision
	until    time.Time
}

// peer is what was found out about a destination.
type peer struct {
	dst        netip.AddrPort
	speaks     bool
	refreshing bool // somebody is asking again, and nobody waits for the answer
	until      time.Time
}

// A Finding is what the question about a connection said about its destination.
type Finding struct {
	Speaks bool          // the destination speaks SMC-R: each connection is asked for
	For    time.Duration // how long the finding counts; 0: nothing was found out
}

// An Action is what the owner of a Table does next.
type Action struct {
	Kind     ActionKind
	ID       uint32   // of the packet that gets a verdict
	Decision Decision // which
	Conn     Conn
}

// ActionKind is the kind of an [Action].
type ActionKind uint8

// Kinds of actions.
const (
	// GiveVerdict lets the kernel go on with the packet ID.
	GiveVerdict ActionKind = iota
	// Ask finds out where the connection Conn can go, and calls [Table.Answer], once.
	Ask
	// Refresh finds out about the destination Conn.Dst again, and calls [Table.Answer],
	// once. The SYN of Conn is not held.
	Refresh
)

// NewTable makes an empty table. All that it will need is allocated here.
func NewTable(cfg Config) *Table {
	cfg = cfg.withDefaults()
	most := cfg.MaxHeld + cfg.ExtraSpeaking
	return &Table{
		cfg: cfg, held: make([]held, 0, most), known: make([]known, 0, cfg.MaxRemembered), peers: make([]peer, 0, cfg.MaxPeers),
		actions: make([]Action, 0, 2*most+2),
	}
}

// Held is how many SYNs wait.
func (t *Table) Held() int { return len(t.held) }

// Counters are the counts since the table was made.
func (t *Table) Counters() Counters { return t.counters }

// HandleSYN takes a SYN from the kernel's queue, in which it is the packet id. late is what becomes
// of it if there is no answer in time, or no room to wait: Pass where plain TCP will do, Drop
// where SMC-R is required, so that TCP repeats it.
func (t *Table) HandleSYN(now time.Time, id uint32, s SYN, late Decision) {
	if d, ok := t.decided(now, s); ok {
		t.counters.Repeated++
		t.verdict(id, s.Conn, d)
		return
	}
	toDestination, asking := 0, false
	for i := range t.held {
		h := &t.held[i]
		if h.conn.Dst != s.Dst {
			continue
		}
		toDestination, asking = toDestination+1, asking || h.asked && h.late == late
		if h.conn.Src != s.Src {
			continue
		}
		// One packet of a connection is held, the latest: an earlier one may no longer be in
		// the queue. The time runs from the first one.
		t.verdict(h.id, h.conn, Drop)
		h.id = id
		if h.seq == s.Seq {
			t.counters.Repeated++
			return
		}
		// Another connection from the same port: the first one was given up. It takes its
		// place, at the end, and the answer about the first one is for it.
		asked := h.asked
		t.remove(i)
		t.hold(now, id, s, late, asked)
		return
	}
	p := t.peer(now, s.Dst)
	speaks := p != nil && p.speaks
	ask, extra := !asking || speaks, 0
	if speaks {
		extra = t.cfg.ExtraSpeaking
	}
	switch {
	case p != nil && !speaks && late == Pass:
		// Its entry in the kernel's negative cache ended. It is still believed, so that nobody
		// waits, and asked for again, because somebody still connects to it.
		if !p.refreshing && t.questions < t.cfg.MaxQuestions {
			p.refreshing = true
			t.ask(Refresh, s.Conn)
		}
		t.decide(now, id, s.Conn, s.Seq, Pass)
		return
	case toDestination >= t.cfg.MaxPerDestination, len(t.held) >= t.cfg.MaxHeld+extra, ask && t.questions >= t.cfg.MaxQuestions+extra:
		t.counters.Full++
		t.decide(now, id, s.Conn, s.Seq, late)
		return
	}
	t.hold(now, id, s, late, ask)
	if ask {
		t.ask(Ask, s.Conn)
	}
}

// ask puts a question, which Answer answers.
func (t *Table) ask(kind ActionKind, c Conn) {
	t.questions++
	t.actions = append(t.actions, Action{Kind: kind, Conn: c})
}

func (t *Table) hold(now time.Time, id uint32, s SYN, late Decision, asked bool) {
	t.counters.Held++
	t.held = append(t.held, held{conn: s.Conn, seq: s.Seq, id: id, late: late, asked: asked, since: now})
}

// Answer decides about the connection c, for which an Action asked, and says what was found out
// about its destination. It reports whether the SYN of c was held until now: if not, the
// application's connection went another way.
//
// SYNs to the same destination that waited for this answer go the same way if that is Pass or Drop.
// They are asked for themselves if the destination speaks SMC-R, and if c was refused: they may come from another
// of the pod's addresses, or a Service may give them another endpoint. What finds no room for its question
// does not wait. Those of which only one may be plain TCP do not wait for the same answer: policies may
// require SMC-R of one of the pod's interfaces only.
func (t *Table) Answer(now time.Time, c Conn, d Decision, f Finding) (wasHeld bool) {
	t.questions = max(0, t.questions-1)
	t.learn(now, c.Dst, f)
	speaks, late, most := f.Speaks && f.For > 0, t.lateOf(c), t.cfg.MaxQuestions
	if speaks {
		most += t.cfg.ExtraSpeaking
	}
	left := t.held[:0]
	for i := range t.held {
		h := t.held[i]
		switch {
		case h.conn == c:
			wasHeld = true
			t.decide(now, h.id, h.conn, h.seq, d)
			continue
		case h.conn.Dst != c.Dst || h.asked || !speaks && h.late != late:
		case !speaks && (d == Pass || d == Drop):
			t.decide(now, h.id, h.conn, h.seq, d)
			continue
		case t.questions >= most:
			t.counters.Full++
			t.decide(now, h.id, h.conn, h.seq, h.late)
			continue
		default:
			h.asked = true
			t.ask(Ask, h.conn)
		}
		left = append(left, h)
	}
	t.held = left
	if !wasHeld && d != Pass && d != Divert {
		t.refuseDropped(c, d)
	}
	return wasHeld
}

// lateOf is what became of the SYN of c at its deadline, or would become of it.
func (t *Table) lateOf(c Conn) Decision {
	for i := range t.held {
		if h := &t.held[i]; h.conn == c {
			return h.late
		}
	}
	for i := range t.known {
		if k := &t.known[i]; k.conn == c && k.decision == Drop {
			return Drop
		}
	}
	return Pass
}

// refuseDropped remembers a refusal that came when the SYN was dropped already, for when TCP repeats
// it.
func (t *Table) refuseDropped(c Conn, d Decision) {
	for i := range t.known {
		if k := &t.known[i]; k.conn == c && k.decision == Drop {
			k.decision = d
		}
	}
}

// peer is what is known of a destination; nil if nothing is.
func (t *Table) peer(now time.Time, dst netip.AddrPort) *peer {
	for i := range t.peers {
		if p := &t.peers[i]; p.dst == dst && now.Before(p.until) {
			return p
		}
	}
	return nil
}

// learn remembers what was found out about a destination.
func (t *Table) learn(now time.Time, dst netip.AddrPort, f Finding) {
	is := peer{dst: dst, speaks: f.Speaks, until: now.Add(f.For)}
	for i := range t.peers {
		if p := &t.peers[i]; p.dst == dst {
			*p = is
			return
		}
	}
	switch {
	case f.For <= 0:
	case len(t.peers) < cap(t.peers):
		t.peers = append(t.peers, is)
	default:
		i := t.dispensable(now)
		t.peers[i] = is
		t.first = (i + 1) % len(t.peers)
	}
}

// dispensable is the destination that is forgotten next: the oldest one that is not known to speak
// SMC-R, so that programs that try many others do not make the table forget these.
func (t *Table) dispensable(now time.Time) int {
	for n := range t.peers {
		i := (t.first + n) % len(t.peers)
		if p := &t.peers[i]; !p.speaks || !now.Before(p.until) {
			return i
		}
	}
	return t.first
}

// Forget forgets what was found out about destinations.
func (t *Table) Forget() { t.peers, t.first = t.peers[:0], 0 }

// Deadline is when Poll next has something to do by itself. ok is false if nothing
// waits.
func (t *Table) Deadline() (at time.Time, ok bool) {
	if len(t.held) == 0 {
		return time.Time{}, false
	}
	return t.held[0].since.Add(t.cfg.Deadline), true
}

// Poll returns what is to be done next; ok is false if that is all.
func (t *Table) Poll(now time.Time) (a Action, ok bool) {
	for len(t.held) > 0 && now.Sub(t.held[0].since) >= t.cfg.Deadline {
		h := t.held[0]
		t.remove(0)
		t.counters.Late++
		t.decide(now, h.id, h.conn, h.seq, h.late)
	}
	if t.polled == len(t.actions) {
		t.actions, t.polled = t.actions[:0], 0
		return Action{}, false
	}
	t.polled++
	return t.actions[t.polled-1], true
}

// decided looks for a decision about the same SYN. A SYN that was dropped is to be asked for again.
func (t *Table) decided(now time.Time, s SYN) (Decision, bool) {
	for i := range t.known {
		k := &t.known[i]
		if k.decision != Drop && k.seq == s.Seq && k.conn == s.Conn && now.Before(k.until) {
			return k.decision, true
		}
	}
	return 0, false
}

// decide gives a verdict, and remembers it for the case that TCP repeats the SYN.
func (t *Table) decide(now time.Time, id uint32, c Conn, seq uint32, d Decision) {
	t.verdict(id, c, d)
	k := known{conn: c, seq: seq, decision: d, until: now.Add(t.cfg.Remember)}
	if len(t.known) < cap(t.known) {
		t.known = append(t.known, k)
		return
	}
	t.known[t.oldest] = k
	t.oldest = (t.oldest + 1) % len(t.known)
}

func (t *Table) verdict(id uint32, c Conn, d Decision) {
	t.counters.Verdicts[d]++
	t.actions = append(t.actions, Action{Kind: GiveVerdict, ID: id, Decision: d, Conn: c})
}

// remove takes a held SYN away and keeps the order.
func (t *Table) remove(i int) { t.held = append(t.held[:i], t.held[i+1:]...) }
