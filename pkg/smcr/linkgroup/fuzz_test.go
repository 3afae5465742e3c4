// SPDX-License-Identifier: Apache-2.0

package linkgroup_test

import (
	"errors"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/internal/testenv"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr/linkgroup"
	"github.com/smcr-io/kube-smcr/pkg/smcr/llc"
)

// chaos plays any messages on any link, in any order, together with the
// failures, timers and commands of our side.
type chaos struct {
	*rig
	in    []byte
	names []string
}

func (c *chaos) byte() byte {
	if len(c.in) == 0 {
		return 0
	}
	b := c.in[0]
	c.in = c.in[1:]
	return b
}

// step does the next thing that the input says.
func (c *chaos) step() {
	op, arg := c.byte(), c.byte()
	link := linkgroup.LinkIndex(arg % linkgroup.MaxLinks)
	switch op % 16 {
	case 0, 1, 2, 3, 4, 5:
		c.recvOn(link, c.likely(op, arg))
	case 6: // anything
		n := min(len(c.in), llc.Size+int(c.g.Version()-1)*int(arg))
		b := append([]byte(nil), c.in[:n]...)
		c.in = c.in[n:]
		c.recvOn(link, append(b, make([]byte, max(0, llc.Size-n))...))
	case 7:
		c.advance(time.Duration(arg) * 100 * time.Millisecond)
	case 8:
		c.g.HandleLinkFailure(c.now, link, errors.New("fuzz"))
	case 9:
		c.down ^= 1 << (arg % c.rnics)
		c.g.HandlePort(c.now, arg%c.rnics, c.down&(1<<(arg%c.rnics)) == 0)
	case 10:
		c.g.DeleteLink(c.now, link, llc.DeleteOperator)
	case 11:
		name := string(rune('b' + len(c.names)))
		if len(c.names) < 20 && c.open(name) == nil {
			c.names = append(c.names, name)
			_ = c.activate(name, rdma.RKey(peerRKey+int(arg%4)<<16), 1+arg%8)
		}
	case 12:
		if len(c.names) > 0 {
			name := c.names[int(arg)%len(c.names)]
			if d := c.conns[name].Data(); d.Produced()-d.Completed() < 1<<14 {
				c.conns[name].Produce(d.Produced() + uint64(arg))
			}
		}
	case 13:
		if len(c.names) > 0 {
			conn := c.conns[c.names[int(arg)%len(c.names)]]
			if arg&0x80 != 0 {
				conn.Close(c.now)
			} else {
				c.g.ConfirmRMB(conn.Local().RMB)
			}
		}
	case 14:
		c.held = !c.held
		c.complete(int(arg))
	case 15:
		switch {
		case arg == 0xff:
			c.g.Terminate(c.now, llc.DeleteOperator)
		case arg < 0x40:
			c.g.AllowLinks()
		}
	}
}

// likely makes a message that fits somewhere.
func (c *chaos) likely(op, arg byte) []byte {
	id := llc.LinkID(c.byte()%5 + 1)
	h := llc.Header{Version: c.g.Version(), Response: arg&0x80 != 0}
	if id == 5 {
		h.Version = 3 - h.Version // the other one
	}
	p := peerEndOn(arg >> 3 & 3)
	key := rdma.RKey(peerRKey + int(arg>>3&3)<<16)
	switch op % 16 {
	case 0:
		flags := llc.NoRMBEEyecatcher
		if c.g.Dialect() == llc.DialectRFC {
			flags = 0
		}
		return llc.ConfirmLink{Header: h, Link: id, QPN: p.QPN, GID: p.GID, MAC: p.MAC, MaxLinks: 8, Flags: flags}.Append(nil)
	case 1:
		return llc.AddLink{
			Header: h, Dialect: c.g.Dialect(), Link: id, QPN: p.QPN, GID: p.GID, MAC: p.MAC, MTU: rdma.MTU1024, Reject: arg&0x40 != 0,
			Ext: llc.AddLinkExt{Pairs: []llc.RTokenPair{{Reference: key, New: llc.RToken{RKey: key + 1<<16, VAddr: 1 << 40}}}},
		}.Append(nil)
	case 2:
		m := llc.AddLinkContinuation{Header: h, Link: id, Remaining: arg & 3}
		m.Pairs[0] = llc.RTokenPair{Reference: key, New: llc.RToken{RKey: key + 1<<16, VAddr: 1 << 40}}
		return m.Append(nil)
	case 3:
		b := c.byte()
		return llc.DeleteLink{Header: h, Link: id, All: b > 0xf8, Orderly: b&1 != 0, Reason: llc.DeleteReason(uint32(b&7) << 16)}.Append(nil)
	case 4:
		m := llc.ConfirmRKey{Header: h, Negative: arg&0x40 != 0, Retry: true, This: llc.RToken{RKey: key, VAddr: 1 << 40}, Others: arg & 3}
		m.Other[0] = llc.LinkRToken{Link: id, RToken: llc.RToken{RKey: key + 1<<16, VAddr: 1 << 40}}
		return m.Append(nil)
	}
	if h.Version == llc.Version2 {
		switch arg & 7 {
		case 0:
			return llc.RequestAddLink{Header: h, GIDs: []rdma.GID{p.GID}}.Append(nil)
		case 1:
			return llc.DeleteRKeyV2{Header: h, RKeys: []rdma.RKey{key, key + 1<<16}}.Append(nil)
		case 2:
			return llc.RequestAddLink{Header: h}.Append(nil)
		}
	}
	m := llc.ConfirmRKeyContinuation{Header: h, Remaining: arg & 3}
	m.Other[0] = llc.LinkRToken{Link: id, RToken: llc.RToken{RKey: key + 1<<16, VAddr: 1 << 40}}
	return m.Append(nil)
}

// play makes a group in one of its situations and lets chaos happen.
func play(t testing.TB, mode, version byte, in []byte) { playMoved(t, mode, version, in, 0) }

// playMoved is play with a group that moves: see rig.encodeEach.
func playMoved(t testing.TB, mode, version byte, in []byte, encodeEach int) {
	c := newChaos(t, mode, version, in)
	c.encodeEach = encodeEach
	for n := 0; len(c.in) > 0 && n < 500; n++ {
		c.step()
		if err := c.g.Check(); err != nil {
			t.Fatalf("before the shell acts: %v\n%v", err, c.log)
		}
		c.poll()
		if err := c.g.Check(); err != nil {
			t.Fatalf("%v\n%v", err, c.log)
		}
	}
	c.held = false
	c.complete(len(c.waiting))
	c.poll()
	c.g.Terminate(c.now, llc.DeleteOperator)
	c.poll()
	c.advance(time.Minute)
	if c.g.State() != linkgroup.Dead {
		t.Fatalf("group is %v after its end\n%v", c.g.State(), c.log)
	}
	if err := c.g.Check(); err != nil {
		t.Fatal(err)
	}
}

// newChaos makes a group in one of its situations.
func newChaos(t testing.TB, mode, version byte, in []byte) *chaos {
	cfg := linkgroup.Config{Role: linkgroup.Role(mode & 1), AllowRFC: mode&2 != 0, MaxLinks: 2 + mode>>5, Version: 1 + version&1, Release: version >> 1 & 1}
	if cfg.Version == llc.Version2 {
		mode &^= 2
	}
	c := &chaos{rig: newRigOf(t, 1+mode>>2&3, cfg, true), in: in}
	c.peerMax = 8
	dialect := llc.DialectLinux
	if mode&2 != 0 {
		dialect = llc.DialectRFC
	}
	switch {
	case mode&0x10 == 0:
		c.connect()
	case c.rnics > 1:
		c.two = true
		c.form(dialect)
		c.second(false)
	default:
		c.form(dialect)
	}
	c.names = []string{"a"}
	return c
}

// FuzzGroupLinks: no order of messages, failures, timers and commands breaks
// an invariant of a group with several links.
func FuzzGroupLinks(f *testing.F) {
	rng := rand.New(rand.NewPCG(1, 2))
	for mode := range 64 {
		b := make([]byte, 200)
		for i := range b {
			b[i] = byte(rng.Uint32())
		}
		f.Add(byte(mode&31), byte(mode>>5*3), b)
	}
	f.Fuzz(func(t *testing.T, mode, version byte, in []byte) { play(t, mode, version, in) })
}

func TestModel_anyOrderOfEvents(t *testing.T) {
	seed := testenv.Seed(t)
	rng := rand.New(rand.NewPCG(seed, 0))
	for range 1000 {
		b := make([]byte, 50+rng.IntN(400))
		for i := range b {
			b[i] = byte(rng.Uint32())
		}
		play(t, byte(rng.Uint32()), byte(rng.Uint32()), b)
	}
}
