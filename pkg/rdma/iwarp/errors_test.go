// SPDX-License-Identifier: Apache-2.0

package iwarp

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// errorRig is a queue pair in OPEN, the responder mostly, whose peer is the test. Region 2 has no rights for
// peers, region 3 is read-only for them.
type errorRig struct {
	*side
	now    time.Time
	secret *region
	shown  *region
}

func newErrorRig(tb testing.TB, noCRC bool) *errorRig {
	return newErrorRigOf(tb, Startup{Role: Responder, NoCRC: noCRC}, testRegion)
}

// newErrorRigOf is newErrorRig with a role and a region of a size.
func newErrorRigOf(tb testing.TB, s Startup, size int) *errorRig {
	r := &errorRig{side: newSideOf(tb, "b", size, nil), now: time.Unix(1000, 0)}
	r.secret = r.mem.add(4096, rdma.LocalWrite)
	r.shown = r.mem.add(4096, rdma.RemoteRead)
	r.recv(rdma.RecvWR{ID: 100, SGE: r.mr.sge(0, 32)}, rdma.RecvWR{ID: 101, SGE: r.mr.sge(0, 32)})
	s.IRD, s.ORD = 2, 2
	if err := r.q.Start(r.now, s); err != nil {
		tb.Fatal(err)
	}
	r.transmit(r.now, 1<<20)
	peer := Frame{Reply: s.Role == Initiator, CRC: !s.NoCRC, Rev: Rev2, IsEnhanced: true, Enhanced: Enhanced{IRD: 2, ORD: 2}}
	if err := r.feed(r.now, peer.Append(nil)); err != nil {
		tb.Fatal(err)
	}
	if s.Role == Responder {
		if err := r.q.Reply(r.now, Reply{}); err != nil {
			tb.Fatal(err)
		}
		r.transmit(r.now, 1<<20)
	}
	r.sent = r.sent[:0]
	return r
}

// terminateOf finds the Terminate at the end of what was sent.
func terminateOf(tb testing.TB, b []byte, crc bool) *Terminate {
	tb.Helper()
	return terminateIn(tb, Framing{CRC: crc}, b)
}

func terminateIn(tb testing.TB, f Framing, b []byte) *Terminate {
	tb.Helper()
	for len(b) > 0 {
		u, n, err := f.Next(b)
		if err != nil {
			tb.Fatalf("what we sent: %v", err)
		}
		b = b[n:]
		var h Header
		if err := h.Parse(u); err != nil {
			tb.Fatal(err)
		}
		if h.Op != OpTerminate {
			continue
		}
		if len(b) > 0 || h.MSN != 1 || !h.Last {
			tb.Fatalf("Terminate %+v with %d bytes behind it", h, len(b))
		}
		t, err := ParseTerminate(u[h.Len():])
		if err != nil {
			tb.Fatal(err)
		}
		return &t
	}
	return nil
}

func untagged(op Opcode, msn, mo uint32, last bool, payload int) []byte {
	h := Header{Op: op, QN: op.queue(), MSN: msn, MO: mo, Last: last}
	return append(h.Append(nil), make([]byte, payload)...)
}

// tagged is the last segment of a tagged message.
func tagged(op Opcode, stag rdma.RKey, to uint64, payload int) []byte {
	h := Header{Tagged: true, Op: op, STag: stag, TO: to, Last: true}
	return append(h.Append(nil), bytes.Repeat([]byte{0xab}, payload)...)
}

func readOf(msn uint32, stag rdma.RKey, to uint64, n uint32) []byte {
	r := ReadRequest{SinkSTag: 5, SinkTO: 0, Size: n, SourceSTag: stag, SourceTO: to}
	return r.Append(untagged(OpReadRequest, msn, 0, true, 0))
}

// TestQP_terminates has every mistake of a peer, and the code that it is told.
func TestQP_terminates(t *testing.T) {
	const none = Code(0xffff)
	raw := func(f ...func(b []byte)) func(r *errorRig) [][]byte {
		return func(*errorRig) [][]byte {
			b := untagged(OpSend, 1, 0, true, 4)
			for _, f := range f {
				f(b)
			}
			return [][]byte{b}
		}
	}
	one := func(f func(r *errorRig) []byte) func(r *errorRig) [][]byte {
		return func(r *errorRig) [][]byte { return [][]byte{f(r)} }
	}
	tests := []struct {
		name    string
		ulpdus  func(r *errorRig) [][]byte
		code    Code
		header  bool // the Terminate has the segment's
		request bool
		access  bool // errors.Is rdma.ErrPeerAccess
	}{
		{"RFC 5044: ULPDU shorter than a header", one(func(*errorRig) []byte { return make([]byte, 13) }), CodeMarker, false, false, false},
		{"RFC 5044: ULPDU shorter than its header", one(func(*errorRig) []byte { return untagged(OpSend, 1, 0, true, 0)[:17] }), CodeMarker, false, false, false},
		{"RFC 5040: READ request too short", one(func(*errorRig) []byte { return untagged(OpReadRequest, 1, 0, true, 27) }), CodeMarker, false, false, false},
		{"RFC 5041: version, tagged", one(func(*errorRig) []byte { b := tagged(OpWrite, 1, 0, 4); b[0] ^= 3; return b }), CodeTaggedVersion, false, false, false},
		{"RFC 5041: version, untagged", raw(func(b []byte) { b[0] &^= 3 }), CodeUntaggedVersion, false, false, false},
		{"RFC 5040: version", raw(func(b []byte) { b[1] ^= 0x80 }), CodeRDMAPVersion, false, false, false},
		{"RFC 5040: operation of RFC 7306", raw(func(b []byte) { b[1] = 0x4a }), CodeOpcode, true, false, false},
		{"RFC 5040: tagged SEND", raw(func(b []byte) { b[0] |= 0x80 }), CodeOpcode, true, false, false},
		{"RFC 5040: READ response to nothing", one(func(*errorRig) []byte { return tagged(OpReadResponse, 1, 0, 4) }), CodeOpcode, true, false, false},
		{"RFC 5041: queue", raw(func(b []byte) { b[9] = 1 }), CodeQN, true, false, false},
		{"RFC 5041: MSN of a SEND", raw(func(b []byte) { b[13] = 2 }), CodeMSN, true, false, false},
		{"RFC 5041: MSN of a READ", one(func(r *errorRig) []byte { return readOf(2, r.mr.rkey, r.mr.addr, 4) }), CodeMSN, true, true, false},
		{"RFC 5041: offset of a SEND", raw(func(b []byte) { b[17] = 4 }), CodeMO, true, false, false},
		{"RFC 5041: offset of the second segment", func(*errorRig) [][]byte {
			return [][]byte{untagged(OpSend, 1, 0, false, 4), untagged(OpSend, 1, 8, true, 4)}
		}, CodeMO, true, false, false},
		{"RFC 5040: form of the second segment", func(*errorRig) [][]byte {
			return [][]byte{untagged(OpSend, 1, 0, false, 4), untagged(OpSendSE, 1, 4, true, 4)}
		}, CodeOpcode, true, false, false},
		{"RFC 5041: offset of a READ", one(func(r *errorRig) []byte { b := readOf(1, r.mr.rkey, r.mr.addr, 4); b[17] = 1; return b }), CodeMO, true, true, false},
		{"RFC 5041: READ request too long", one(func(*errorRig) []byte { return untagged(OpReadRequest, 1, 0, true, 29) }), CodeTooLong, true, true, false},
		{"RFC 5041: READ request in two segments", one(func(r *errorRig) []byte { b := readOf(1, r.mr.rkey, r.mr.addr, 4); b[0] &^= 0x40; return b }), CodeTooLong, true, true, false},
		{"RFC 5041: no receive buffer", func(*errorRig) [][]byte {
			return [][]byte{untagged(OpSend, 1, 0, true, 4), untagged(OpSend, 2, 0, true, 4), untagged(OpSend, 3, 0, true, 0)}
		}, CodeNoBuffer, true, false, false},
		{"RFC 5040: more READs than agreed", func(r *errorRig) [][]byte {
			return [][]byte{readOf(1, r.mr.rkey, r.mr.addr, 4), readOf(2, r.mr.rkey, r.mr.addr, 4), readOf(3, r.mr.rkey, r.mr.addr, 4)}
		}, CodeNoBuffer, true, true, false},
		{"RFC 5041: message too long", one(func(*errorRig) []byte { return untagged(OpSend, 1, 0, true, 33) }), CodeTooLong, true, false, false},
		{"RFC 5041: second segment too long", func(*errorRig) [][]byte {
			return [][]byte{untagged(OpSend, 1, 0, false, 30), untagged(OpSend, 1, 30, true, 3)}
		}, CodeTooLong, true, false, false},
		{"RFC 5041: WRITE to no region", one(func(r *errorRig) []byte { return tagged(OpWrite, 0xbad, r.mr.addr, 4) }), CodeTaggedSTag, true, false, true},
		{"RFC 5041: WRITE out of bounds", one(func(r *errorRig) []byte { return tagged(OpWrite, r.mr.rkey, r.mr.addr+testRegion-3, 4) }), CodeTaggedBounds, true, false, true},
		{"RFC 5041: WRITE that wraps", one(func(r *errorRig) []byte { return tagged(OpWrite, r.mr.rkey, 1<<64-3, 4) }), CodeTaggedWrap, true, false, true},
		{"RFC 5040: WRITE without the right", one(func(r *errorRig) []byte { return tagged(OpWrite, r.secret.rkey, r.secret.addr, 4) }), CodeAccess, true, false, true},
		{"RFC 5040: WRITE to what may be read", one(func(r *errorRig) []byte { return tagged(OpWrite, r.shown.rkey, r.shown.addr, 4) }), CodeAccess, true, false, true},
		{"RFC 5040: READ of no region", one(func(r *errorRig) []byte { return readOf(1, 0xbad, 0, 4) }), CodeReadSTag, true, true, true},
		{"RFC 5040: READ out of bounds", one(func(r *errorRig) []byte { return readOf(1, r.shown.rkey, r.shown.addr, 4097) }), CodeReadBounds, true, true, true},
		{"RFC 5040: READ without the right", one(func(r *errorRig) []byte { return readOf(1, r.secret.rkey, r.secret.addr, 4) }), CodeAccess, true, true, true},
		{"RFC 5040: READ that wraps", one(func(r *errorRig) []byte { return readOf(1, r.shown.rkey, 1<<64-2, 4) }), CodeReadWrap, true, true, true},
		{"RFC 5040: invalidates no region", one(func(r *errorRig) []byte {
			b := untagged(OpSendInv, 1, 0, true, 4)
			binary.BigEndian.PutUint32(b[2:], 0xbad)
			return b
		}), CodeInvalidate, true, false, false},
		{"RFC 5040: empty WRITE is not checked", one(func(*errorRig) []byte { return tagged(OpWrite, 0xbad, 1<<64-1, 0) }), none, false, false, false},
		{"RFC 5040: empty READ is not checked", one(func(*errorRig) []byte { return readOf(1, 0xbad, 1<<64-1, 0) }), none, false, false, false},
	}
	for _, tt := range tests {
		for _, crc := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s/CRC %t", tt.name, crc), func(t *testing.T) {
				r := newErrorRig(t, !crc)
				before := bytes.Clone(r.mr.buf)
				f := Framing{CRC: crc}
				var in, last []byte
				for _, u := range tt.ulpdus(r) {
					in, last = f.Append(in, u), u
				}
				err := r.feed(r.now, in)
				r.transmit(r.now, 1<<20)
				term := terminateOf(t, r.sent, crc)
				if tt.code == none {
					if err != nil || term != nil || r.q.State() != rdma.QPRTS {
						t.Fatalf("%v, %+v", err, term)
					}
					return
				}
				if term == nil || term.Code != tt.code {
					t.Fatalf("told %+v, want %v; error %v", term, tt.code, err)
				}
				var te *TerminateError
				if !errors.As(err, &te) || errors.Is(err, rdma.ErrPeerAccess) != tt.access {
					t.Errorf("error %v, access %t", err, tt.access)
				}
				wantEnd(t, r.side, tt.code, true)
				if (term.Header != nil) != tt.header || tt.header && (!bytes.HasPrefix(last, term.Header) || int(term.Length) != len(last)) {
					t.Errorf("header %x, length %d, of segment %x", term.Header, term.Length, last)
				}
				if (term.Request != nil) != tt.request {
					t.Errorf("READ request %x", term.Request)
				}
				if tt.code != CodeTooLong && tt.code != CodeNoBuffer && !bytes.Equal(before[64:], r.mr.buf[64:]) {
					t.Error("bytes were placed")
				}
				if !r.q.TxEnded() {
					t.Error("the stream does not end behind the Terminate")
				}
				r.mem.intact(t)
			})
		}
	}
}

func TestQP_terminatesForCRC(t *testing.T) {
	r := newErrorRig(t, false)
	b := new(Framing{CRC: true}).Append(nil, tagged(OpWrite, r.mr.rkey, r.mr.addr, 100))
	b[50] ^= 1
	if err := r.feed(r.now, b); err == nil {
		t.Fatal("no error")
	}
	wantEnd(t, r.side, CodeCRC, true)
	r.transmit(r.now, 1<<20)
	if term := terminateOf(t, r.sent, true); term == nil || term.Code != CodeCRC || term.Header != nil {
		t.Errorf("told %+v", term)
	}
	if r.mr.buf[0] != 0 {
		t.Error("bytes were placed")
	}
}

// TestQP_ends has the ends of a stream that no Terminate tells.
func TestQP_ends(t *testing.T) {
	fpdu := new(Framing{CRC: true}).Append(nil, untagged(OpSend, 1, 0, true, 4))
	for _, tc := range []struct {
		name string
		in   []byte
		err  error
		kind rdma.EventKind
		wcs  []string
	}{
		{"in order", fpdu, nil, rdma.EventDisconnected, []string{"100 RECV success 4", "1 RDMA_READ work request flushed", "2 SEND work request flushed", "101 RECV work request flushed"}},
		{"within an FPDU", fpdu[:9], nil, rdma.EventQPFatal, []string{"1 RDMA_READ work request flushed", "2 SEND work request flushed", "100 RECV work request flushed", "101 RECV work request flushed"}},
		{"lost", fpdu, io.ErrUnexpectedEOF, rdma.EventPathDown, []string{"100 RECV success 4", "1 RDMA_READ transport retry counter exceeded", "2 SEND work request flushed", "101 RECV work request flushed"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			r := newErrorRig(t, false)
			r.send(r.now, rdma.SendWR{ID: 1, Op: rdma.OpRead, SGL: []rdma.SGE{r.mr.sge(0, 8)}}, rdma.SendWR{ID: 2})
			if err := r.feed(r.now, tc.in); err != nil {
				t.Fatal(err)
			}
			r.transmit(r.now, 30) // in the middle of the READ request, if the gate is open
			r.q.HandleEnd(r.now, tc.err)
			wantWCs(t, r.side, tc.wcs...)
			if ev, ok := r.q.PollEvent(); !ok || ev.Kind != tc.kind || tc.err != nil && !errors.Is(ev.Err, tc.err) {
				t.Errorf("event %v %v", ok, ev)
			}
			r.transmit(r.now, 1<<20)
			if tc.err == nil {
				if term := terminateOf(t, r.sent, true); (term != nil) != (tc.kind == rdma.EventQPFatal) {
					t.Errorf("told %+v", term)
				}
			}
			if !r.q.Closed() {
				t.Errorf("%v", r.q.Phase())
			}
		})
	}
}

// TestQP_terminateArrives blames the READ that a Terminate names.
func TestQP_terminateArrives(t *testing.T) {
	request := untagged(OpReadRequest, 2, 0, true, 0)
	send := untagged(OpSend, 1, 0, true, 0)
	for _, tc := range []struct {
		name   string
		term   []byte
		status [3]string
	}{
		{"names the second READ", (&Terminate{Code: CodeReadBounds, Header: request}).Append(nil), [3]string{"flushed", "remote access error", "flushed"}},
		{"names nothing", (&Terminate{Code: CodeAccess}).Append(nil), [3]string{"remote access error", "flushed", "flushed"}},
		{"names a SEND", (&Terminate{Code: CodeNoBuffer, Header: send}).Append(nil), [3]string{"flushed", "flushed", "flushed"}},
		{"as siw says it", unhex(t, "02020000"), [3]string{"remote operation error", "flushed", "flushed"}},
		{"of another operation", (&Terminate{Code: CodeOpcode}).Append(nil), [3]string{"remote invalid request error", "flushed", "flushed"}},
		{"cut", []byte{1, 2}, [3]string{"remote operation error", "flushed", "flushed"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			r := newErrorRig(t, false)
			if err := r.feed(r.now, new(Framing{CRC: true}).Append(nil, tagged(OpWrite, 1, 0, 0))); err != nil {
				t.Fatal(err)
			}
			for i := range 2 {
				r.send(r.now, rdma.SendWR{ID: uint64(i + 1), Op: rdma.OpRead, SGL: []rdma.SGE{r.mr.sge(0, 8)}})
			}
			r.send(r.now, rdma.SendWR{ID: 3})
			r.transmit(r.now, 1<<20)
			err := r.feed(r.now, new(Framing{CRC: true}).Append(nil, untagged(OpTerminate, 1, 0, true, 0), tc.term))
			var te *TerminateError
			if !errors.As(err, &te) || te.Sent || errors.Is(err, rdma.ErrPeerAccess) {
				t.Fatalf("error %v", err)
			}
			var want []string
			for i, s := range tc.status {
				op := [3]string{"RDMA_READ", "RDMA_READ", "SEND"}[i]
				if s == "flushed" {
					s = "work request flushed"
				}
				want = append(want, fmt.Sprintf("%d %s %s", i+1, op, s))
			}
			wantWCs(t, r.side, append(want, "100 RECV work request flushed", "101 RECV work request flushed")...)
			if r.transmit(r.now, 1<<20) != 0 && terminateOf(t, r.sent, true) != nil || !r.q.TxEnded() {
				t.Error("a Terminate was answered")
			}
		})
	}
}

// TestQP_terminateBySiw is what Linux's siw says of a READ: nibbles and flags the other way
// round, no length, and the size of the READ in place of its number.
func TestQP_terminateBySiw(t *testing.T) {
	r := newErrorRig(t, false)
	if err := r.feed(r.now, new(Framing{CRC: true}).Append(nil, tagged(OpWrite, 1, 0, 0))); err != nil {
		t.Fatal(err)
	}
	for i := range 2 {
		r.send(r.now, rdma.SendWR{ID: uint64(i + 1), Op: rdma.OpRead, SGL: []rdma.SGE{r.mr.sge(0, 8)}})
	}
	r.transmit(r.now, 1<<20)
	header := Header{Last: true, Op: OpReadRequest, QN: queueReadRequest, MSN: 8}
	request := ReadRequest{SinkSTag: r.q.tx.reads.requests.at(1).sink, Size: 8, SourceSTag: 0xdead0000, SourceTO: 1 << 40}
	term := request.Append(header.Append([]byte{0x10, 0, 0x07, 0, 0, 0}))
	err := r.feed(r.now, new(Framing{CRC: true}).Append(nil, untagged(OpTerminate, 1, 0, true, 0), term))
	var te *TerminateError
	if !errors.As(err, &te) || te.Terminate.Code != CodeReadSTag {
		t.Errorf("error %v, want %v", err, CodeReadSTag)
	}
	wantWCs(
		t, r.side, "1 RDMA_READ work request flushed", "2 RDMA_READ remote access error",
		"100 RECV work request flushed", "101 RECV work request flushed",
	)
}

// TestQP_badResponses answers a READ otherwise than it asked.
func TestQP_badResponses(t *testing.T) {
	for _, tc := range []struct {
		name   string
		answer func(sink rdma.RKey) []byte
		code   Code
	}{
		{"another STag", func(s rdma.RKey) []byte { return tagged(OpReadResponse, s+1, 0, 100) }, CodeTaggedSTag},
		{"a region's STag", func(s rdma.RKey) []byte { return tagged(OpReadResponse, 0x107, 0, 100) }, CodeTaggedSTag},
		{"another offset", func(s rdma.RKey) []byte { return tagged(OpReadResponse, s, 1, 99) }, CodeTaggedBounds},
		{"too long", func(s rdma.RKey) []byte { return tagged(OpReadResponse, s, 0, 101) }, CodeTaggedBounds},
		{"ends early", func(s rdma.RKey) []byte { return tagged(OpReadResponse, s, 0, 99) }, CodeTaggedBounds},
		{"WRITE to its sink", func(s rdma.RKey) []byte { return tagged(OpWrite, s, 0, 10) }, CodeTaggedSTag},
	} {
		t.Run(tc.name, func(t *testing.T) {
			r := newErrorRig(t, false)
			crc := Framing{CRC: true}
			if err := r.feed(r.now, crc.Append(nil, tagged(OpWrite, 1, 0, 0))); err != nil {
				t.Fatal(err)
			}
			r.send(r.now, rdma.SendWR{ID: 1, Op: rdma.OpRead, SGL: []rdma.SGE{r.mr.sge(500, 100)}})
			r.transmit(r.now, 1<<20)
			req, err := ParseReadRequest(r.sent[lengthLen+untaggedLen:][:readRequestLen])
			if err != nil {
				t.Fatal(err)
			}
			r.sent = r.sent[:0]
			if again := r.q.tx.newSink(r.q.cfg.Rand); req.SinkSTag == 0 || again == req.SinkSTag || req.SinkSTag == r.mr.rkey {
				t.Errorf("READs are called %#x and %#x", uint32(req.SinkSTag), uint32(again))
			}
			_ = r.feed(r.now, crc.Append(nil, tc.answer(req.SinkSTag)))
			r.transmit(r.now, 1<<20)
			if term := terminateOf(t, r.sent, true); term == nil || term.Code != tc.code {
				t.Errorf("told %+v, want %v", term, tc.code)
			}
			if bytes.IndexByte(r.mr.buf, 0xab) >= 0 {
				t.Error("bytes were placed")
			}
		})
	}
}

// TestQP_localErrors has work requests whose memory is not there.
func TestQP_localErrors(t *testing.T) {
	bad := rdma.SGE{Addr: 5, Length: 9, LKey: 99}
	for _, tc := range []struct {
		name string
		wr   rdma.SendWR
		want string
	}{
		{"SEND", rdma.SendWR{ID: 2, SGL: []rdma.SGE{bad}}, "2 SEND local protection error"},
		{"WRITE", rdma.SendWR{ID: 2, Op: rdma.OpWrite, SGL: []rdma.SGE{bad}}, "2 RDMA_WRITE local protection error"},
		{"READ", rdma.SendWR{ID: 2, Op: rdma.OpRead, SGL: []rdma.SGE{{Addr: 3 << 40, Length: 8, LKey: 3}}}, "2 RDMA_READ local protection error"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			r := newErrorRig(t, false)
			crc := Framing{CRC: true}
			if err := r.feed(r.now, crc.Append(nil, tagged(OpWrite, 1, 0, 0))); err != nil {
				t.Fatal(err)
			}
			r.send(r.now, rdma.SendWR{ID: 1, Flags: rdma.SendSignaled}, tc.wr, rdma.SendWR{ID: 3})
			for r.transmit(r.now, 1<<20) > 0 {
			}
			wantWCs(t, r.side, "1 SEND success 0", tc.want, "3 SEND work request flushed", "100 RECV work request flushed", "101 RECV work request flushed")
			if term := terminateOf(t, r.sent, true); term == nil || term.Code != CodeLocal {
				t.Errorf("told %+v", term)
			}
		})
	}
	t.Run("receive", func(t *testing.T) {
		r := newErrorRig(t, false)
		r.mr.gone = true
		_ = r.feed(r.now, new(Framing{CRC: true}).Append(nil, untagged(OpSend, 1, 0, true, 4)))
		wantWCs(t, r.side, "100 RECV local protection error", "101 RECV work request flushed")
		r.transmit(r.now, 1<<20)
		if term := terminateOf(t, r.sent, true); term == nil || term.Code != CodeLocal {
			t.Errorf("told %+v", term)
		}
	})
	t.Run("response", func(t *testing.T) {
		r := newErrorRig(t, true)
		_ = r.feed(r.now, new(Framing{}).Append(nil, tagged(OpWrite, 1, 0, 0)))
		sink := r.mem.add(64, allAccess)
		r.send(r.now, rdma.SendWR{ID: 7, Op: rdma.OpRead, Flags: rdma.SendSignaled, SGL: []rdma.SGE{sink.sge(0, 8)}})
		r.transmit(r.now, 1<<20)
		key := r.q.tx.reads.requests.at(0).sink
		sink.gone = true
		_ = r.feed(r.now, new(Framing{}).Append(nil, tagged(OpReadResponse, key, 0, 8)))
		wantWCs(t, r.side, "7 RDMA_READ local protection error", "100 RECV work request flushed", "101 RECV work request flushed")
		r.transmit(r.now, 1<<20)
		if term := terminateOf(t, r.sent, false); term == nil || term.Code != CodeLocal {
			t.Errorf("told %+v", term)
		}
	})
}

// TestQP_regionCloses closes a region under what is sent of it.
func TestQP_regionCloses(t *testing.T) {
	for _, tc := range []struct {
		name  string
		taken int
		mine  bool // the region that closes is the one that is sent
		want  []string
		tell  bool
	}{
		{"another one", 500, false, []string{"1 RDMA_WRITE success 1400"}, false},
		{"not begun", 0, true, []string{"1 RDMA_WRITE local protection error"}, true},
		{"in the middle of an FPDU", 500, true, []string{"1 RDMA_WRITE local protection error"}, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			p := newTwoSides(t)
			mr := p.a.mem.add(4096, allAccess)
			p.connect(Startup{}, Startup{})
			p.a.send(p.now, rdma.SendWR{ID: 1, Op: rdma.OpWrite, Flags: rdma.SendSignaled, RKey: p.b.mr.rkey, RemoteAddr: p.b.mr.addr, SGL: []rdma.SGE{mr.sge(0, 1400)}})
			p.a.transmit(p.now, tc.taken)
			if tc.mine {
				mr.gone = true
			} else {
				p.a.mr.gone = true
			}
			p.a.q.ForgetMemory(p.now)
			if tc.mine {
				clear(mr.all) // whatever it is now, it is not sent
			}
			p.runUntilQuiet()
			wantWCs(t, p.a, tc.want...)
			switch {
			case !tc.mine && p.b.q.State() != rdma.QPRTS:
				t.Errorf("peer in %v: %v", p.b.q.State(), p.b.q.Err())
			case tc.mine && tc.tell:
				wantEnd(t, p.b, CodeLocal, false)
			case tc.mine:
				wantEnd(t, p.b, CodeMarker, true)
			}
		})
	}
}

// TestQP_stableSourceCloses closes a region under a READ's response that is not copied. What TCP has not begun is not
// sent, and what it has begun ends the stream there.
func TestQP_stableSourceCloses(t *testing.T) {
	for _, taken := range []int{0, 500} {
		p := newTwoSides(t)
		source := p.b.mem.add(4096, allAccess|rdma.StableRead)
		p.connect(Startup{}, Startup{})
		p.a.send(p.now, rdma.SendWR{ID: 1, Op: rdma.OpRead, Flags: rdma.SendSignaled, RKey: source.rkey, RemoteAddr: source.addr, SGL: []rdma.SGE{p.a.mr.sge(0, 1400)}})
		p.pass(p.a, p.b)
		fill(source.buf, 7)
		p.b.transmit(p.now, taken)
		source.gone = true
		p.b.q.ForgetMemory(p.now)
		clear(source.all) // whatever it is now, it is not sent
		p.runUntilQuiet()
		wantEnd(t, p.b, CodeReadSTag, true)
		if bytes.ContainsFunc(p.a.mr.buf[:1400], func(r rune) bool { return r != 0 }) {
			t.Errorf("%d bytes taken: some were placed", taken)
		}
		if got := p.a.takeWCs(); !strings.HasPrefix(got, "1 RDMA_READ ") || strings.Contains(got, "success") {
			t.Errorf("%d bytes taken: completed %q", taken, got)
		}
	}
}

// TestQP_sinkCloses closes a region while an FPDU for it is there in part: nothing is placed before all of it is.
func TestQP_sinkCloses(t *testing.T) {
	for _, gone := range []bool{false, true} {
		r := newErrorRig(t, true)
		mr := r.mem.add(32<<10, allAccess)
		b := new(Framing{}).Append(nil, tagged(OpWrite, mr.rkey, mr.addr, 20_000))
		if err := r.feed(r.now, b[:64]); err != nil {
			t.Fatal(err)
		}
		if err := r.feed(r.now, b[64:9000]); err != nil {
			t.Fatal(err)
		}
		mr.gone = gone
		r.q.ForgetMemory(r.now)
		_ = r.feed(r.now, b[9000:])
		r.transmit(r.now, 1<<20)
		term := terminateOf(t, r.sent, false)
		if gone && (term == nil || term.Code != CodeTaggedSTag || mr.buf[15_000] != 0) || !gone && (term != nil || mr.buf[15_000] != 0xab) {
			t.Errorf("gone %t: told %+v, byte %#x", gone, term, mr.buf[15_000])
		}
		r.mem.intact(t)
	}
}
