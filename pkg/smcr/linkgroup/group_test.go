// SPDX-License-Identifier: Apache-2.0

package linkgroup_test

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/internal/testenv"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr/cdc"
	"github.com/smcr-io/kube-smcr/pkg/smcr/linkgroup"
	"github.com/smcr-io/kube-smcr/pkg/smcr/llc"
)

// ready returns a rig whose group is Active, with connection "a".
func ready(t testing.TB, role linkgroup.Role) *rig {
	r := newRig(t, role, false, true)
	r.form(llc.DialectLinux)
	return r
}

// However much there is to say, no more SENDs are under way than the peer has
// receive buffers, and LLC messages keep their part of them.
func TestGroup_SendBudget(t *testing.T) {
	r := ready(t, linkgroup.Client)
	r.elements = 64
	r.held = true
	for i := range 60 {
		name := fmt.Sprint("c", i)
		if err := r.open(name); err != nil {
			t.Fatal(err)
		}
		if err := r.activate(name, peerRKey, uint8(i+2)); err != nil {
			t.Fatal(err)
		}
		r.conns[name].Produce(10)
	}
	r.poll()
	if got, want := len(r.waiting), linkgroup.SendBudget-4; got != want {
		t.Fatalf("%d data messages under way, want %d", got, want)
	}
	for range 20 {
		r.recv(llc.TestLink{})
		r.poll()
	}
	if got := len(r.waiting); got != linkgroup.SendBudget {
		t.Fatalf("%d messages under way with LLC, want %d", got, linkgroup.SendBudget)
	}
	// As room appears, everything goes out in turn, each connection once.
	for len(r.waiting) > 0 {
		r.complete(1)
		r.poll()
	}
	if r.most != linkgroup.SendBudget {
		t.Errorf("%d messages under way at once", r.most)
	}
	tests, data := 0, map[cdc.AlertToken]int{}
	for _, b := range r.sent {
		if m, err := cdc.Parse(b[:]); err == nil {
			data[cdc.AlertToken(m.Prod.Count)]++
		} else if _, err := llc.ParseTestLink(b[:]); err == nil {
			tests++
		}
	}
	if tests != 20 || data[10] != 60 {
		t.Errorf("%d TEST LINK answers, %d messages, want 20 and 60", tests, data[10])
	}
}

// A peer that asks and asks without taking the answers cannot fill our memory.
func TestGroup_unreadAnswersAreBounded(t *testing.T) {
	r := ready(t, linkgroup.Server)
	r.held = true
	n := 0
	for r.g.State() == linkgroup.Active && n < 10000 {
		r.recv(llc.TestLink{})
		r.poll()
		n++
	}
	if r.g.State() != linkgroup.Dead || n > 1000 {
		t.Errorf("group is %v after %d requests", r.g.State(), n)
	}
}

func TestGroup_MaxConns(t *testing.T) {
	r := ready(t, linkgroup.Server)
	r.elements = 255
	tokens := map[cdc.AlertToken]bool{r.conns["a"].Token(): true}
	for i := 1; i < linkgroup.MaxConns; i++ {
		name := fmt.Sprint("c", i)
		if !r.g.Usable() {
			t.Fatalf("not usable with %d connections", i)
		}
		if err := r.open(name); err != nil {
			t.Fatal(err)
		}
		tok := r.conns[name].Token()
		if tok == 0 || tokens[tok] {
			t.Fatalf("token %v is taken", tok)
		}
		tokens[tok] = true
	}
	if err := r.open("x"); !errors.Is(err, linkgroup.ErrFull) || r.g.Usable() {
		t.Errorf("one too many: %v, usable %t", err, r.g.Usable())
	}
	r.conns["c1"].Abandon(r.now, true)
	r.poll()
	if err := r.open("x"); !errors.Is(err, linkgroup.ErrFull) {
		t.Errorf("before the RMBE is released: %v", err)
	}
	r.conns["c1"].Release(r.now)
	if err := r.open("x"); err != nil || tokens[r.conns["x"].Token()] {
		t.Errorf("after a release: %v, token %v", err, r.conns["x"].Token())
	}
}

// The server has released connections that the client still ends, and gives
// their places to others.
func TestGroup_clientTakesMore(t *testing.T) {
	r := ready(t, linkgroup.Client)
	r.elements = 255
	tokens := map[cdc.AlertToken]bool{}
	for i := range 2 * linkgroup.MaxConns {
		name := fmt.Sprint("c", i)
		if err := r.open(name); err != nil {
			t.Fatalf("connection %d: %v", i+2, err)
		}
		tokens[r.conns[name].Token()] = true
	}
	if len(tokens) != 2*linkgroup.MaxConns || r.g.Usable() {
		t.Errorf("%d tokens, usable %t", len(tokens), r.g.Usable())
	}
	var err error
	for i := 0; err == nil && i < 1<<12; i++ {
		err = r.open(fmt.Sprint("d", i))
	}
	if !errors.Is(err, linkgroup.ErrFull) {
		t.Errorf("without end: %v", err)
	}
}

func TestGroup_MaxRMBs(t *testing.T) {
	r := ready(t, linkgroup.Client)
	for i := range linkgroup.MaxRMBs + 1 {
		_, err := r.g.AddRMB(1<<15, 1, []linkgroup.RToken{{RKey: rdma.RKey(i)}})
		if got, want := errors.Is(err, linkgroup.ErrFull), i >= linkgroup.MaxRMBs-1; got != want {
			t.Fatalf("RMB %d: %v", i, err)
		}
	}
	for i := range linkgroup.MaxRTokens {
		r.recv(llc.ConfirmRKey{This: llc.RToken{RKey: rdma.RKey(0x5000 + i)}})
		r.poll()
	}
	m, err := llc.ParseConfirmRKey(r.sent[len(r.sent)-1][:])
	if err != nil || !m.Response || !m.Negative {
		t.Errorf("one RMB too many of the peer: %v, %v", m, err)
	}
}

// No RMBE has two connections, whatever order connections come and go in, and
// none is given out between its end and its release.
func TestModel_RMBEsAreNeverShared(t *testing.T) {
	seed := testenv.Seed(t)
	rng := rand.New(rand.NewPCG(seed, 0))
	r := ready(t, linkgroup.Server)
	r.elements = 3
	used := map[[2]uint32]string{}
	place := func(name string) [2]uint32 {
		l := r.conns[name].Local()
		return [2]uint32{uint32(l.RMB), uint32(l.Index)}
	}
	used[place("a")] = "a"
	open := []string{"a"}
	for i := range 3000 {
		switch k := rng.IntN(len(open) + 1); {
		case k == len(open) || len(open) == 1:
			name := fmt.Sprint("c", i)
			err := r.open(name)
			if errors.Is(err, linkgroup.ErrFull) {
				continue
			}
			if err != nil {
				t.Fatal(err)
			}
			p := place(name)
			if other, ok := used[p]; ok {
				t.Fatalf("seed %d: %s gets %v, which %s has", seed, name, p, other)
			}
			used[p] = name
			open = append(open, name)
		default:
			name := open[k]
			open = append(open[:k], open[k+1:]...)
			declined := rng.IntN(2) == 0
			r.conns[name].Abandon(r.now, declined)
			r.poll()
			if declined && rng.IntN(4) > 0 {
				delete(used, place(name))
				r.conns[name].Release(r.now)
				r.poll()
			}
		}
	}
}

// A panic says what was wrong when the shell breaks the contract.
func TestGroup_panicsOnOurMistakes(t *testing.T) {
	for name, f := range map[string]func(r *rig){
		"released before it was done": func(r *rig) { r.conns["a"].Release(r.now) },
		"peer connected twice":        func(r *rig) { r.g.ConnectPeer(r.now, peerEnd) },
		"first link twice":            func(r *rig) { r.g.AddFirstLink(ourEnd) },
		"RMB without elements":        func(r *rig) { _, _ = r.g.AddRMB(rmbeSize, 0, nil) },
		"RMB of 256 elements":         func(r *rig) { _, _ = r.g.AddRMB(rmbeSize, 256, nil) },
	} {
		t.Run(name, func(t *testing.T) {
			r := ready(t, linkgroup.Client)
			defer func() {
				if recover() == nil {
					t.Error("no panic")
				}
			}()
			f(r)
		})
	}
}

// RFC 7609 §2.2.4, A.3.1: each link of a group has a user ID of its own, the peer
// is told, and it does not change.
func TestSection2_2_4_LinkUserIDs(t *testing.T) {
	d, _ := newDuo(t, wires[2], [2]uint8{8, 8}, 8)
	for n, s := range d.sides {
		seen := map[uint32]bool{}
		for _, l := range s.g.Links() {
			if seen[l.UserID] {
				t.Errorf("side %d: two links have user ID %08x", n, l.UserID)
			}
			seen[l.UserID] = true
		}
		for _, l := range d.sides[1-n].g.Links() {
			if !seen[l.PeerUserID] {
				t.Errorf("side %d knows user ID %08x of link %d, the peer has %v", 1-n, l.PeerUserID, l.ID, seen)
			}
		}
	}
}

// A link is known by MAC, GID and QP number: with any other of them an Accept means
// another group.
func TestSection3_5_2_2_FindLink(t *testing.T) {
	r := ready(t, linkgroup.Client)
	otherGID, otherMAC := peerEnd.GID, peerEnd.MAC
	otherGID[15]++
	otherMAC[5]++
	for _, tt := range []struct {
		name string
		qpn  rdma.QPN
		gid  rdma.GID
		mac  rdma.MAC
		want bool
	}{
		{"ours", peerEnd.QPN, peerEnd.GID, peerEnd.MAC, true},
		{"another QP number", peerEnd.QPN + 1, peerEnd.GID, peerEnd.MAC, false},
		{"another GID", peerEnd.QPN, otherGID, peerEnd.MAC, false},
		{"another MAC", peerEnd.QPN, peerEnd.GID, otherMAC, false},
	} {
		if i, ok := r.g.FindLink(tt.qpn, tt.gid, tt.mac); ok != tt.want || i != 0 || r.g.MatchesPeer(tt.qpn, tt.gid, tt.mac) != tt.want {
			t.Errorf("%s: link %d, %t", tt.name, i, ok)
		}
	}
	r.g.Terminate(r.now, llc.DeleteOperator)
	if r.g.MatchesPeer(peerEnd.QPN, peerEnd.GID, peerEnd.MAC) {
		t.Error("a group that ends is found")
	}
}

func TestGroup_info(t *testing.T) {
	r := ready(t, linkgroup.Client)
	l := r.g.Links()
	if len(l) != 1 || l[0].ID != 1 || l[0].State != "ACTIVE" || l[0].Local != ourEnd || l[0].Peer.QPN != peerEnd.QPN || l[0].PeerUserID != 0 {
		t.Errorf("%+v", l)
	}
	if !r.g.MatchesPeer(peerEnd.QPN, peerEnd.GID, peerEnd.MAC) || r.g.MatchesPeer(peerEnd.QPN+1, peerEnd.GID, peerEnd.MAC) {
		t.Error("MatchesPeer")
	}
	if r.g.Role().String() != "client" || linkgroup.Server.String() != "server" {
		t.Error("roles")
	}
	r.conns["a"].Produce(10)
	r.poll()
	if w, s, v := r.conns["a"].Counters(); w != 1 || s != 1 || v != 0 || r.conns["a"].Link() != 1 || r.conns["a"].PeerRMBESize() != rmbeSize {
		t.Errorf("counters %d %d %d", w, s, v)
	}
}

// llcScript is one captured conversation: who sent what, in order.
type llcScript struct {
	fromServer bool
	raw        []byte
}

// captures reads the messages of one captured link, which both sides sent in
// this order.
func captures(t testing.TB, name string) []llcScript {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("testdata", "captures", name+".txt"))
	if err != nil {
		t.Fatal(err)
	}
	var script []llcScript
	for s := bufio.NewScanner(bytes.NewReader(text)); s.Scan(); {
		who, raw, ok := strings.Cut(s.Text(), " ")
		if !ok || strings.HasPrefix(who, "#") {
			continue
		}
		b, err := hex.DecodeString(raw)
		if err != nil {
			t.Fatal(err)
		}
		script = append(script, llcScript{who == "server", b})
	}
	if len(script) == 0 {
		t.Fatalf("%s: no messages", name)
	}
	return script
}

// FuzzGroupHandleRecv: no message of a peer breaks an invariant, and the group
// can always be ended.
func FuzzGroupHandleRecv(f *testing.F) {
	for _, dir := range []string{"../llc/testdata/captures", "../cdc/testdata/captures"} {
		files, err := filepath.Glob(dir + "/*.txt")
		if err != nil || len(files) == 0 {
			f.Fatalf("no captures in %s: %v", dir, err)
		}
		for _, name := range files {
			text, err := os.ReadFile(name)
			if err != nil {
				f.Fatal(err)
			}
			var all []byte
			for _, line := range strings.Split(string(text), "\n") {
				words := strings.Fields(line)
				if len(words) == 0 || strings.HasPrefix(line, "#") {
					continue
				}
				b, err := hex.DecodeString(words[len(words)-1])
				if err != nil {
					f.Fatal(err)
				}
				if len(all) < 20*llc.Size {
					all = append(all, b...)
				}
			}
			for mode := range uint8(8) {
				f.Add(mode, all)
				f.Add(mode|16, all)
			}
		}
	}
	f.Fuzz(func(t *testing.T, mode uint8, b []byte) {
		cfg := linkgroup.Config{Role: linkgroup.Role(mode & 1), AllowRFC: mode&2 != 0, Version: 1 + mode>>4&1, Release: mode >> 5 & 1}
		r := newRigOf(t, 1, cfg, true)
		switch {
		case mode&4 == 0:
			r.connect()
		case cfg.AllowRFC && cfg.Version == llc.Version1:
			r.form(llc.DialectRFC)
		default:
			r.form(llc.DialectLinux)
		}
		r.held = mode&8 != 0
		for len(b) > 0 {
			m := b[:messageLen(b)]
			b = b[len(m):]
			if len(m) == llc.Size && m[0] == cdc.Type && r.conns["a"] != nil && m[8]&1 == 0 {
				tok := uint32(r.conns["a"].Token()) // let it find its connection
				m = append([]byte(nil), m...)
				m[4], m[5], m[6], m[7] = byte(tok>>24), byte(tok>>16), byte(tok>>8), byte(tok)
			}
			r.recvRaw(m)
			r.poll()
			if r.g.State() == linkgroup.Active {
				d := r.conns["a"].Data()
				if d.Produced()-d.Completed() < 1000 {
					r.conns["a"].Produce(d.Produced() + 100)
				}
				r.conns["a"].Consume(d.PeerProduced())
				r.poll()
			}
			r.log = nil
		}
		r.complete(len(r.waiting))
		r.poll()
		r.g.Terminate(r.now, llc.DeleteOperator)
		r.poll()
		r.advance(time.Minute)
		if r.g.State() != linkgroup.Dead {
			t.Fatalf("group is %v", r.g.State())
		}
	})
}

// messageLen is how many bytes of b are the first message: 44, or what a message of
// version 2 says.
func messageLen(b []byte) int {
	if len(b) < llc.Size {
		return len(b)
	}
	if n := int(binary.LittleEndian.Uint16(b[1:])); b[0]>>4 == llc.Version2 && n > llc.Size {
		return min(n, len(b), llc.MaxSizeV2)
	}
	return llc.Size
}

// pingPong returns a function that carries 4000 bytes to a peer group and the
// answer back.
func pingPong(t testing.TB) func() {
	r := ready(t, linkgroup.Client)
	c := r.conns["a"]
	var pos uint64
	var outs []linkgroup.Output
	seq := uint16(0)
	in := make([]byte, 0, cdc.Size)
	ring := c.Ring()
	return func() {
		pos += 4000
		c.Produce(pos)
		for !r.g.Idle() {
			outs = r.g.Poll(r.now, outs[:0])
			for i := range outs {
				if outs[i].Kind == linkgroup.OutSend {
					r.g.HandleSent(r.now, 0, outs[i].ID)
				}
			}
		}
		seq++
		in = cdc.Message{Seq: seq, Token: c.Token(), Prod: ring.Cursor(pos), Cons: ring.Cursor(pos)}.Append(in[:0])
		if err := r.g.HandleRecv(r.now, 0, in); err != nil {
			t.Fatal(err)
		}
		c.Consume(pos)
	}
}

func TestGroup_dataPathAllocatesNothing(t *testing.T) {
	f := pingPong(t)
	for range 100 {
		f()
	}
	if n := testing.AllocsPerRun(1000, f); n != 0 {
		t.Errorf("%v allocations per message", n)
	}
}

func BenchmarkGroup(b *testing.B) {
	f := pingPong(b)
	b.ReportAllocs()
	for b.Loop() {
		f()
	}
}
