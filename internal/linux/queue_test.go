// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"bytes"
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/nftables"
	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/internal/synqueue"
)

func TestProbeQueue(t *testing.T) {
	newNS(t) // what it needs
	form, err := ProbeQueue()
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("this kernel: %v", form)
}

func TestOpenQueue_taken(t *testing.T) {
	ns := newNS(t)
	q, err := OpenQueue(ns, QueueConfig{Number: testQueue})
	mustDo(t, err)
	if _, err := OpenQueue(ns, QueueConfig{Number: testQueue}); !errors.Is(err, ErrQueueTaken) {
		t.Errorf("got %v, want ErrQueueTaken", err)
	}
	other, err := OpenQueue(ns, QueueConfig{Number: testQueue + 1})
	mustDo(t, err)
	elsewhere, err := OpenQueue(newNS(t), QueueConfig{Number: testQueue})
	mustDo(t, err)
	mustDo(t, errors.Join(q.Close(), other.Close(), elsewhere.Close()))
	q, err = OpenQueue(ns, QueueConfig{Number: testQueue})
	mustDo(t, err)
	mustDo(t, q.Close())
}

func TestQueue_receiveEnds(t *testing.T) {
	q, err := OpenQueue(newNS(t), QueueConfig{})
	mustDo(t, err)
	if _, err := q.Receive(t.Context(), time.Now().Add(10*time.Millisecond)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("got %v, want a timeout", err)
	}
	time.AfterFunc(10*time.Millisecond, func() { _ = q.Close() })
	if _, err := q.Receive(t.Context(), time.Time{}); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("got %v, want that it is closed", err)
	}
}

// TestQueue_hookTakenOut: the kernel drops all that is held in a namespace when anybody takes
// a base chain out of it, of whatever table. The repeated SYN takes its place.
func TestQueue_hookTakenOut(t *testing.T) {
	h := newHeld(t, families[0])
	h.serve(t, HolderConfig{Ask: askAfter(400*time.Millisecond, synqueue.Pass), Table: synqueue.Config{Deadline: waitLimit}}, QueueConfig{})
	h.install(t, testHoldConfig(t, families[0]))
	results := h.connects(t, 1, 0)
	takeOutHook(t, h.pod)
	if waiting, _ := queueLine(t, h.pod); waiting != 0 {
		t.Errorf("%d packets wait, want that the kernel dropped them", waiting)
	}
	c := results()[0]
	if c.took < 900*time.Millisecond || c.took > time.Second+slack || c.errno != 0 { // TCP repeats after a second
		t.Errorf("connect() ended with %v after %v", c.errno, c.took)
	}
	if got := settled(h.holder); got.Gone != 1 || got.Held != 1 || got.Repeated != 1 {
		t.Errorf("counters %+v, want one SYN that was gone, and decided when it was repeated", got)
	}
}

// takeOutHook makes a table with a base chain that has nothing to do with anything, and
// deletes it.
func takeOutHook(t *testing.T, ns *NetNS) {
	t.Helper()
	conn, err := openNFT(ns)
	mustDo(t, err)
	table := conn.AddTable(&nftables.Table{Family: nftables.TableFamilyINet, Name: "somebody"})
	conn.AddChain(&nftables.Chain{
		Name: "else", Table: table, Type: nftables.ChainTypeFilter, Hooknum: nftables.ChainHookForward, Priority: nftables.ChainPriorityFilter,
	})
	mustDo(t, conn.Flush())
	conn.DelTable(table)
	mustDo(t, errors.Join(conn.Flush(), conn.CloseLasting()))
}

// TestHold_update: no change of the table takes anything of what is held, and each change is in
// force.
func TestHold_update(t *testing.T) {
	f := families[0]
	for _, c := range []struct {
		name   string
		change func(cfg *RedirectConfig)
		next   string // who gets the next connection
	}{
		{"the same", func(*RedirectConfig) {}, "agent"},
		{"nothing selected", func(cfg *RedirectConfig) { cfg.Outbound = nil }, "server"},
		{"excluded", func(cfg *RedirectConfig) {
			cfg.Outbound = append(cfg.Outbound, OutboundRule{Prefix: netip.PrefixFrom(f.peer, 32), Exclude: true})
		}, "server"},
		{"some ports", func(cfg *RedirectConfig) { cfg.InboundAll, cfg.Inbound = false, []PortRange{{80, 80}, {8080, 8090}} }, "agent"},
		{"greedy client", func(cfg *RedirectConfig) {
			cfg.InboundExcept, cfg.InboundAlways = []netip.Addr{f.peer}, []PortRange{{80, 80}}
		}, "agent"},
		{"required", func(cfg *RedirectConfig) { cfg.WhenCaught, cfg.Required = CaughtDrop, cfg.Outbound }, "agent"},
		{"untracked", func(cfg *RedirectConfig) { cfg.Untracked = true }, "agent"},
		{"untracked, nothing selected", func(cfg *RedirectConfig) { cfg.Untracked, cfg.Outbound = true, nil }, "server"},
	} {
		t.Run(c.name, func(t *testing.T) {
			h := newHeld(t, f)
			h.serve(t, HolderConfig{Ask: askAfter(300*time.Millisecond, synqueue.Divert)}, QueueConfig{})
			cfg := testHoldConfig(t, f)
			h.install(t, cfg)
			results := h.connects(t, 1, 0)
			c.change(&cfg)
			mustDo(t, h.rules.Update(cfg))
			results()[0].check(t, "agent", 0, 300*time.Millisecond, 300*time.Millisecond+slack)
			want(t, served(t, h.pod, nil, h.dst), c.next)
			waiting := 0
			if c.next == "agent" {
				waiting = 1
			}
			results = h.connects(t, waiting, 0)
			mustDo(t, h.rules.Update(testHoldConfig(t, f)))
			for _, r := range results() {
				r.check(t, "agent", 0, 300*time.Millisecond, 300*time.Millisecond+slack)
			}
			want(t, served(t, h.pod, nil, h.dst), "agent")
			others, err := FindOthers(h.pod)
			if mustDo(t, err); others.Untracked {
				t.Error("packets are said to be kept from connection tracking")
			}
		})
	}
}

// TestQueue_updates: what a program holds stays when the tables change that are ours in its namespace: on the node these are
// packets of firewalls.
func TestQueue_updates(t *testing.T) {
	h := newHeld(t, families[0])
	wire := func(last byte) WireConfig {
		cfg := WireConfig{Own: []netip.Addr{families[0].pod}, Interfaces: []string{"eth0"}}
		for i := range byte(20) {
			a := netip.AddrFrom4([4]byte{10, 99, last, i + 1})
			cfg.Nodes, cfg.Peers = append(cfg.Nodes, a), append(cfg.Peers, netip.PrefixFrom(a, 25+int(i)%8))
		}
		return cfg
	}
	filter, err := InstallWireFilter(h.pod, wire(1))
	mustDo(t, err)
	option := func(last byte) OptionFilterConfig {
		to := netip.AddrFrom4([4]byte{10, 99, last, 0})
		return OptionFilterConfig{Peers: []OutboundRule{{Prefix: netip.PrefixFrom(to, 24), Ports: []PortRange{{80, 90}}}}, Never: []netip.Addr{to.Next()}}
	}
	mustDo(t, FilterOption(In(h.pod), option(1)))
	looked := make(chan struct{})
	answer := func(h *Holder, c synqueue.Conn, _ bool) {
		go func() {
			<-looked
			_, _ = h.Answer(c, synqueue.Divert, synqueue.Finding{})
		}()
	}
	h.serve(t, HolderConfig{Ask: answer, Table: synqueue.Config{Deadline: waitLimit}}, QueueConfig{})
	h.install(t, testHoldConfig(t, families[0]))
	results := h.connects(t, 1, 0)
	for _, last := range []byte{1, 2, 3, 3} {
		mustDo(t, errors.Join(filter.Update(wire(last)), FilterOption(In(h.pod), option(last))))
	}
	if waiting, _ := queueLine(t, h.pod); waiting != 1 {
		t.Errorf("%d packets wait, want the one that was held", waiting)
	}
	close(looked)
	results()[0].check(t, "agent", 0, 0, waitLimit)
	for _, table := range []string{wireTableName, optionTableName} {
		text := nft(t, h.pod, "list table inet "+table)
		if !strings.Contains(text, "10.99.3.") || strings.Contains(text, "10.99.1.") || strings.Contains(text, "10.99.2.") {
			t.Errorf("after the updates there is\n%s", text)
		}
	}
	mustDo(t, errors.Join(filter.Remove(), SweepOptionFilter(In(h.pod))))
}

// startConnects starts n connections that do not block, the i-th one to to(i).
func startConnects(t *testing.T, ns *NetNS, n int, to func(i int) netip.AddrPort) {
	t.Helper()
	fds := make([]int, 0, n)
	t.Cleanup(func() {
		for _, fd := range fds {
			unix.Close(fd)
		}
	})
	mustDo(t, ns.Do(func() error {
		for i := range n {
			dst := to(i)
			family := unix.AF_INET6
			if dst.Addr().Is4() {
				family = unix.AF_INET
			}
			fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
			if err != nil {
				return err
			}
			fds = append(fds, fd)
			if err := unix.Connect(fd, sockaddr(dst)); !errors.Is(err, unix.EINPROGRESS) {
				return err
			}
		}
		return nil
	}))
}

// TestAttack_fullQueue: SYNs to nowhere hold their bounded part, and what finds no room does
// not wait: in the table, in the kernel's queue, and in the socket of an owner that
// does not read.
func TestAttack_fullQueue(t *testing.T) {
	const nowhere = 400
	blackhole := func(i int) netip.AddrPort { return netip.AddrPortFrom(families[0].peer.Next().Next(), uint16(10000+i)) }
	t.Run("table", func(t *testing.T) {
		h := newHeld(t, families[0])
		ask := func(hold *Holder, c synqueue.Conn, _ bool) {
			if c.Dst == h.dst {
				_, _ = hold.Answer(c, synqueue.Divert, synqueue.Finding{})
			}
		}
		h.serve(t, HolderConfig{Ask: ask, Table: synqueue.Config{MaxHeld: 32, Deadline: waitLimit}}, QueueConfig{})
		h.install(t, testHoldConfig(t, families[0]))
		startConnects(t, h.pod, nowhere, blackhole)
		connect(t, h.pod, h.dst, false, 0).check(t, "server", 0, 0, slack)
		if got := settled(h.holder); got.Held != 32 || got.Full < nowhere-32 {
			t.Errorf("counters %+v, want 32 held and the others passed", got)
		}
	})
	t.Run("kernel's queue", func(t *testing.T) {
		h := newHeld(t, families[0])
		h.serve(t, HolderConfig{Ask: never, Table: synqueue.Config{Deadline: waitLimit}}, QueueConfig{MaxLen: 16})
		h.install(t, testHoldConfig(t, families[0]))
		startConnects(t, h.pod, nowhere, blackhole)
		connect(t, h.pod, h.dst, false, 0).check(t, "server", 0, 0, slack)
		if waiting, _ := queueLine(t, h.pod); waiting != 16 {
			t.Errorf("%d packets wait, want 16", waiting)
		}
	})
	t.Run("socket", func(t *testing.T) {
		h := newHeld(t, families[0])
		q, err := OpenQueue(h.pod, QueueConfig{Number: testQueue, MaxLen: 1 << 16})
		mustDo(t, err)
		defer func() { _ = q.Close() }()
		mustDo(t, q.conn.SetReadBuffer(16<<10))
		h.install(t, testHoldConfig(t, families[0]))
		startConnects(t, h.pod, nowhere, blackhole)
		connect(t, h.pod, h.dst, false, 0).check(t, "server", 0, 0, slack)
		overrun, packets := false, 0
		v := q.NewVerdicts()
		for packets == 0 || v.Empty() {
			b, err := q.Receive(t.Context(), time.Now().Add(waitLimit))
			mustDo(t, err)
			overrun = overrun || b.Overrun
			packets += len(b.Packets)
			for _, p := range b.Packets {
				v.Accept(p.ID)
			}
		}
		waiting, _ := queueLine(t, h.pod)
		t.Logf("%d of %d packets waited in a buffer of 16 KiB", waiting, nowhere)
		if !overrun || waiting > nowhere/2 {
			t.Errorf("overrun %v, %d wait", overrun, waiting)
		}
		mustDo(t, q.Send(v))
	})
}

// TestAttack_notSYN: what is in the queue and no SYN passes at once.
func TestAttack_notSYN(t *testing.T) {
	h := newHeld(t, families[0])
	h.serve(t, HolderConfig{Ask: never}, QueueConfig{})
	cfg := testHoldConfig(t, families[0])
	conn, err := openNFT(h.pod)
	mustDo(t, err)
	rs := newRuleset(conn)
	rs.conn.AddTable(rs.table)
	rs.rule(rs.chain(nftables.Chain{
		Name: "all", Type: nftables.ChainTypeFilter, Hooknum: nftables.ChainHookOutput, Priority: nftables.ChainPriorityMangle,
	}), metaNot(0, []byte{0, 0, 0, 0}), queueTo(cfg.Hold.Form, testQueue)) // every packet, of whatever protocol
	mustDo(t, errors.Join(rs.commit(), conn.CloseLasting()))

	var server net.PacketConn
	mustDo(t, h.peer.Do(func() (err error) {
		server, err = net.ListenPacket("udp4", netip.AddrPortFrom(families[0].peer, 0).String())
		return err
	}))
	defer func() { _ = server.Close() }()
	var client net.PacketConn
	mustDo(t, h.pod.Do(func() (err error) {
		client, err = net.ListenPacket("udp4", ":0")
		return err
	}))
	defer func() { _ = client.Close() }()
	for _, size := range []int{0, 1, 1400, 20000} { // the last one in fragments
		_, err := client.WriteTo(make([]byte, size), server.LocalAddr())
		mustDo(t, err)
		mustDo(t, server.SetReadDeadline(time.Now().Add(waitLimit)))
		n, _, err := server.ReadFrom(make([]byte, 1<<16))
		if n != size || err != nil {
			t.Fatalf("got %d bytes, %v, want %d", n, err, size)
		}
	}
	if got := settled(h.holder); got.NotSYN < 4 || got.Held != 0 {
		t.Errorf("counters %+v, want packets that are no SYNs", got)
	}
}

// TestQueue_releaseAll: whatever numbers packets have.
func TestQueue_releaseAll(t *testing.T) {
	h := newHeld(t, families[0])
	q, err := OpenQueue(h.pod, QueueConfig{Number: testQueue})
	mustDo(t, err)
	defer func() { _ = q.Close() }()
	h.install(t, testHoldConfig(t, families[0]))
	results := h.connects(t, 5, 0)
	mustDo(t, q.ReleaseAll())
	for _, c := range results() {
		c.check(t, "server", 0, 0, slack)
	}
	after := func(id, last uint32) bool { return int32(id-last) > 0 } // as the kernel compares
	b := appendReleaseAll(nil, 1)
	first, second := binary.BigEndian.Uint32(b[28:]), binary.BigEndian.Uint32(b[60:])
	for _, id := range []uint32{0, 1, 1<<31 - 2, 1<<31 - 1, 1 << 31, 1<<31 + 1, 1<<32 - 2, 1<<32 - 1} {
		if after(id, first) && after(id, second) {
			t.Errorf("packet %d is released by neither %d nor %d", id, first, second)
		}
	}
}

// TestQueue_drain: what waits goes on, and what comes before the queue is closed.
func TestQueue_drain(t *testing.T) {
	h := newHeld(t, families[0])
	q, err := OpenQueue(h.pod, QueueConfig{Number: testQueue})
	mustDo(t, err)
	h.install(t, testHoldConfig(t, families[0]))
	results := h.connects(t, 5, 0)
	mustDo(t, q.Drain())
	connect(t, h.pod, h.dst, false, 0).check(t, "server", 0, 0, slack)
	mustDo(t, q.Close())
	for _, c := range results() {
		c.check(t, "server", 0, 0, slack)
	}
}

// queueMessage is what the kernel sends for a packet.
func queueMessage(id, mark uint32, payload []byte) []byte {
	b := appendQueueHeader(nil, queuePacket, testQueue, 0)
	b = appendAttr(b, attrPacketHeader, append(be32(id), 8, 0, 3))
	b = appendAttr(b, attrMark, be32(mark))
	b = appendAttr(b, attrPayload, payload)
	return end(b, 0)
}

func TestQueueBatch_parse(t *testing.T) {
	whole := queueMessage(7, 9, []byte("payload"))
	var qb QueueBatch
	qb.parse(whole)
	if len(qb.Packets) != 1 || qb.Packets[0].ID != 7 || qb.Packets[0].Mark != 9 || qb.Packets[0].Hook != 3 ||
		string(qb.Packets[0].Payload) != "payload" || qb.Packets[0].Cut {
		t.Errorf("got %+v", qb)
	}
	qb = QueueBatch{}
	qb.parse(whole[:len(whole)-4]) // our buffer was too short
	if len(qb.Packets) != 1 || !qb.Packets[0].Cut {
		t.Errorf("got %+v, want a packet that is cut", qb)
	}
	qb = QueueBatch{}
	qb.parse(whole[:nlHeaderSize+nfgenSize+6]) // no number
	if len(qb.Packets) != 0 || qb.Broken != 1 {
		t.Errorf("got %+v, want a broken message", qb)
	}
}

// FuzzParseQueueMessage: every message is packets, news or counted as broken.
func FuzzParseQueueMessage(f *testing.F) {
	f.Add(queueMessage(1, 2, []byte{0x45, 0, 0, 40}))
	f.Add(queueMessage(1, 2, nil)[:30])
	refused := appendQueueHeader(nil, unix.NLMSG_ERROR, 0, 5)
	f.Add(end(append(refused, make([]byte, 16)...), 0))
	f.Fuzz(func(t *testing.T, b []byte) {
		var qb QueueBatch
		qb.parse(b)
		if n := len(qb.Packets) + len(qb.Gone) + qb.Broken; n > 1 {
			t.Errorf("%d things in one message: %+v", n, qb)
		}
		for _, p := range qb.Packets {
			if !bytes.Contains(b, p.Payload) {
				t.Error("a payload that is not in the message")
			}
		}
	})
}

// TestQueue_allocatesNothing: between the message and the verdict.
func TestQueue_allocatesNothing(t *testing.T) {
	message := queueMessage(7, 0, make([]byte, 60))
	qb := QueueBatch{Packets: make([]QueuedPacket, 0, 1)}
	v := Verdicts{b: make([]byte, 0, 256)}
	n := testing.AllocsPerRun(100, func() {
		qb.Packets = qb.Packets[:0]
		qb.parse(message)
		v.AcceptMarked(qb.Packets[0].ID, 1)
		v.Reset()
	})
	if n != 0 {
		t.Errorf("%v allocations per packet", n)
	}
}

// TestHolder_allocatesNothing: from the message to the kernel's answer.
func TestHolder_allocatesNothing(t *testing.T) {
	h := newHeld(t, families[0])
	h.install(t, testHoldConfig(t, families[0]))
	q, err := OpenQueue(h.pod, QueueConfig{Number: testQueue})
	mustDo(t, err)
	defer func() { _ = q.Close() }()
	results := h.connects(t, 1, 0)
	b, err := q.Receive(t.Context(), time.Now().Add(waitLimit))
	mustDo(t, err)
	syn := bytes.Clone(b.Packets[0].Payload)
	mustDo(t, q.ReleaseAll())
	results()

	holder := newHolder(nil, q, HolderConfig{Marks: testHoldMarks, Ask: func(h *Holder, c synqueue.Conn, _ bool) { _, _ = h.Answer(c, synqueue.Divert, synqueue.Finding{}) }})
	id, ctx := uint32(1000), t.Context()
	n := testing.AllocsPerRun(200, func() {
		id++
		binary.BigEndian.PutUint32(syn[24:], id) // another connection
		message := [1]QueuedPacket{{ID: id, Payload: syn}}
		b.Packets = append(b.Packets[:0], message[:]...)
		if err := holder.handle(time.Now(), b); err != nil {
			t.Fatal(err)
		}
		if b, err = q.Receive(ctx, time.Now().Add(waitLimit)); err != nil { // that there is no such packet
			t.Fatal(err)
		}
	})
	if n != 0 {
		t.Errorf("%v allocations for each SYN", n)
	}
	if got := holder.Counters(); got.Held < 200 || got.Verdicts[synqueue.Divert] != got.Held {
		t.Errorf("counters %+v, want all diverted", got)
	}
}
