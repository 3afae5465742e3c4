// SPDX-License-Identifier: Apache-2.0

package socket

import (
	"fmt"
	"slices"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/sdp/bsdh"
)

// oracle is the simulator's second opinion: what one peer must believe of both streams, by the messages that it sent and received, and
// nothing else. It has the draft's rules in the draft's way, with queues of all that was offered, and says which message
// they do not allow; the socket's own state is compared with its after each input.
//
// Two things are counted twice. Potential and sinks are as the socket has them, with each SinkAvail judged when it comes;
// lazy is how the draft tells stale ones from live ones, which judges them when they are used (§9.5.1).
type oracle struct {
	// Our stream.
	sendMode  bsdh.Mode
	potential uint32
	sinks     []rdma.RKey // of the peer, live
	lazy      lazyCount
	srcs      []offer
	forced    uint32 // bytes that go as Data, since their adverts were refused
	window    bool   // ModeChange to Combined is not acknowledged
	windowSeq uint32
	windowAt  uint32 // potential then
	srcCancel bool
	srcSeq    uint32 // of SrcAvailCancel
	ackDue    bool   // SinkCancelAck
	finSent   bool

	// The peer's.
	recvMode    bsdh.Mode
	nonDiscards uint32
	adverts     []rdma.RKey // SinkAvails of ours
	peerSrcs    []offer
	owed        uint32
	stop        bool // SrcAvailCancel came, and there was something to cancel
	stopSeq     uint32
	reading     int // RDMA READs of ours under way
	sinkCancel  bool
	sinkSeq     uint32 // of SinkAvailCancel

	first   uint32 // number of our first message
	ackSeen bool
	acks    uint32
	err     error
}

// offer is a SrcAvail.
type offer struct {
	key  rdma.RKey
	left uint32 // bytes that nobody has read
	seq  uint32
}

func newOracle() oracle { return oracle{sendMode: bsdh.Combined, recvMode: bsdh.Combined, acks: none} }

// lazyCount is how the draft itself tells stale SinkAvails from live ones (§9.5.1): adverts are kept as they come,
// and tested before they are used.
type lazyCount struct {
	potential uint32
	adverts   []uint32 // NonDiscards of each
}

func (l *lazyCount) normalize() {
	for len(l.adverts) > 0 && l.adverts[0] != l.potential {
		l.adverts = l.adverts[1:]
		l.potential--
	}
}

// drop forgets the live adverts; those that are stale are counted.
func (l *lazyCount) drop() {
	l.normalize()
	l.adverts = nil
}

func (o *oracle) must(ok bool, format string, args ...any) {
	if !ok && o.err == nil {
		o.err = fmt.Errorf("oracle: "+format, args...)
	}
}

func (o *oracle) acked(seq uint32) bool { return int32(o.acks-seq) >= 0 }

// sends takes a message that the peer of this oracle posts, with n bytes of payload.
func (o *oracle) sends(m *bsdh.Message, n uint32) {
	o.must(!o.stop || o.reading == 0 || int32(m.Ack-o.stopSeq) < 0, "%v acknowledges a SrcAvailCancel, %d RDMA READs are under way", m.MID, o.reading)
	if n > 0 {
		o.must(m.MID == bsdh.SrcAvail || len(o.srcs) == 0 || n <= o.forced, "%v with %d bytes goes, %d adverts are outstanding", m.MID, n, len(o.srcs))
		o.forced -= min(o.forced, n)
		if o.lazy.potential++; len(o.sinks) > 0 {
			o.sinks = o.sinks[1:]
		} else {
			o.potential++
		}
	}
	switch m.MID {
	case bsdh.SrcAvail:
		ok := map[bsdh.Mode]bool{bsdh.Combined: n > 0 && len(o.srcs) == 0, bsdh.Pipelined: n == 0 && len(o.sinks) == 0}[o.sendMode]
		o.must(ok && !o.srcCancel && o.forced == 0, "SrcAvail with %d bytes goes in %v mode, %d adverts are outstanding, %d buffers of the peer", n, o.sendMode, len(o.srcs), len(o.sinks))
		o.srcs = append(o.srcs, offer{m.Advert.Key, m.Advert.Len - n, m.Seq})
	case bsdh.RdmaWrCompl:
		if o.lazy.normalize(); len(o.sinks) == 0 || len(o.lazy.adverts) == 0 {
			o.must(false, "RdmaWrCompl goes, and the peer has no buffer")
			return
		}
		o.sinks, o.lazy.adverts = o.sinks[1:], o.lazy.adverts[1:]
	case bsdh.SrcAvailCancel:
		o.must(len(o.srcs) > 0 && !o.srcCancel, "SrcAvailCancel goes with %d adverts", len(o.srcs))
		o.srcCancel, o.srcSeq = true, m.Seq
	case bsdh.SinkCancelAck:
		o.must(o.ackDue && len(o.sinks) == 0, "SinkCancelAck goes, and nothing was canceled, or there are %d buffers", len(o.sinks))
		o.ackDue = false
	case bsdh.ModeChange:
		o.changes(m)
	case bsdh.DisConn:
		o.must(len(o.srcs) == 0 && o.forced == 0, "DisConn goes with %d adverts", len(o.srcs))
		o.lazy.drop()
		o.sinks, o.finSent = nil, true
	case bsdh.SinkAvail:
		o.must(o.recvMode == bsdh.Pipelined && len(o.peerSrcs) == 0 && o.owed == 0 && !o.sinkCancel && m.Advert.NonDiscards == o.nonDiscards,
			"SinkAvail with count %d goes in %v mode, counted are %d, %d adverts of the peer, %d bytes owed", m.Advert.NonDiscards, o.recvMode, o.nonDiscards, len(o.peerSrcs), o.owed)
		o.adverts = append(o.adverts, m.Advert.Key)
	case bsdh.SinkAvailCancel:
		o.must(len(o.adverts) > 0 && !o.sinkCancel, "SinkAvailCancel goes with %d adverts", len(o.adverts))
		o.sinkCancel, o.sinkSeq = true, m.Seq
	case bsdh.RdmaRdCompl:
		o.must(len(o.peerSrcs) > 0 && o.owed == 0, "RdmaRdCompl goes with %d adverts of the peer, %d bytes owed", len(o.peerSrcs), o.owed)
		o.peerSrcs = o.read(o.peerSrcs, m.Bytes)
	case bsdh.SendSm:
		switch {
		case len(o.peerSrcs) == 0:
			o.must(false, "SendSm goes without an advert of the peer")
		case o.stop:
			o.peerSrcs, o.stop = nil, false
		default:
			o.owed += o.peerSrcs[0].left
			o.peerSrcs = o.peerSrcs[1:]
		}
	default:
	}
	if len(o.peerSrcs) == 0 {
		o.stop = false
	}
}

// changes takes a ModeChange that is posted.
func (o *oracle) changes(m *bsdh.Message) {
	c := m.Change
	switch {
	case c.Send:
		o.must(o.recvMode == bsdh.Buffered && c.Mode == bsdh.Combined, "ModeChange of the peer's stream from %v to %v goes", o.recvMode, c.Mode)
		o.recvMode = c.Mode
		return
	case o.sendMode == bsdh.Pipelined && c.Mode == bsdh.Combined:
		o.lazy.drop()
		o.sinks = nil
		o.window, o.windowSeq, o.windowAt = true, m.Seq, o.potential
	case o.sendMode != bsdh.Combined || c.Mode == bsdh.Combined || o.window || c.Mode == bsdh.Buffered && len(o.srcs) > 0:
		o.must(false, "ModeChange from %v to %v goes, the last one is acknowledged: %t", o.sendMode, c.Mode, !o.window)
	}
	o.sendMode = c.Mode
}

// read takes n bytes off the oldest offer.
func (o *oracle) read(list []offer, n uint32) []offer {
	if len(list) == 0 || n > list[0].left {
		o.must(false, "RdmaRdCompl of %d bytes, offered are %+v", n, list)
		return list
	}
	list = slices.Clone(list)
	if list[0].left -= n; list[0].left == 0 {
		return list[1:]
	}
	return list
}

// receives takes a message of the other peer.
func (o *oracle) receives(m *bsdh.Message) {
	if o.ackSeen = o.ackSeen || m.Ack > 0; o.ackSeen {
		o.acks = m.Ack
	}
	if o.window && o.acked(o.windowSeq) {
		o.window = false
	}
	if n := uint32(len(m.Payload)); n > 0 {
		o.must(m.MID == bsdh.SrcAvail || len(o.peerSrcs) == 0 || n <= o.owed, "%v with %d bytes comes, %d adverts are outstanding", m.MID, n, len(o.peerSrcs))
		o.owed -= min(o.owed, n)
		if len(o.adverts) > 0 {
			o.must(m.MID != bsdh.SrcAvail, "SrcAvail with payload comes, %d buffers are advertised", len(o.adverts))
			o.takeBack(1)
		} else {
			o.nonDiscards++
		}
	}
	switch m.MID {
	case bsdh.SinkAvail:
		o.takeSink(m)
	case bsdh.SinkAvailCancel:
		if !o.window {
			o.lazy.drop()
			o.ackDue = o.ackDue || len(o.sinks) > 0
			o.sinks = nil
		}
	case bsdh.RdmaRdCompl:
		o.must(o.forced == 0, "RdmaRdCompl comes, and %d bytes are forced", o.forced)
		o.srcs = o.read(o.srcs, m.Bytes)
	case bsdh.SendSm:
		switch {
		case o.srcCancel && o.acked(o.srcSeq):
			o.srcs = nil
		case len(o.srcs) == 0:
			o.must(false, "SendSm comes without an advert")
		default:
			o.forced += o.srcs[0].left
			o.srcs = o.srcs[1:]
		}
	case bsdh.ModeChange:
		if m.Change.Send {
			o.sendMode = m.Change.Mode
			break
		}
		if o.recvMode == bsdh.Pipelined {
			o.takeBack(len(o.adverts))
		}
		o.recvMode = m.Change.Mode
	case bsdh.SrcAvail:
		if len(o.adverts) == 0 {
			o.peerSrcs = append(o.peerSrcs, offer{m.Advert.Key, m.Advert.Len - uint32(len(m.Payload)), m.Seq})
		}
	case bsdh.RdmaWrCompl:
		o.must(len(o.adverts) > 0, "RdmaWrCompl comes without an advert")
		o.takeBack(1)
	case bsdh.SrcAvailCancel:
		o.stop, o.stopSeq = len(o.peerSrcs) > 0, m.Seq
	case bsdh.SinkCancelAck:
		if o.sinkCancel && o.acked(o.sinkSeq) {
			o.takeBack(len(o.adverts))
		}
	case bsdh.DisConn:
		o.takeBack(len(o.adverts))
	default:
	}
	if len(o.srcs) == 0 {
		o.srcCancel = false
	}
}

// takeSink takes the peer's SinkAvail. One that crossed a ModeChange to Combined is dead, and is compared with the count of that
// time (§12.4); only a live one says that the peer has dropped what was offered before.
func (o *oracle) takeSink(m *bsdh.Message) {
	a := &m.Advert
	switch {
	case o.finSent:
	case o.window && a.NonDiscards != o.windowAt:
		o.windowAt--
		o.potential--
		o.lazy.potential--
	case o.window:
		o.srcs = slices.DeleteFunc(slices.Clone(o.srcs), func(s offer) bool { return int32(s.seq-o.windowSeq) < 0 })
	case o.sendMode != bsdh.Pipelined:
		o.must(false, "SinkAvail comes in %v mode", o.sendMode)
	default:
		if o.lazy.adverts = append(o.lazy.adverts, a.NonDiscards); a.NonDiscards != o.potential {
			o.potential--
			return
		}
		o.sinks = append(o.sinks, a.Key)
		o.srcs = nil
	}
}

// takeBack ends the oldest n adverts of ours.
func (o *oracle) takeBack(n int) {
	if o.adverts = o.adverts[min(n, len(o.adverts)):]; len(o.adverts) == 0 {
		o.sinkCancel = false
	}
}

// belief is what a socket and its oracle must agree about.
type belief struct {
	sendMode, recvMode     bsdh.Mode
	potential, nonDiscards uint32
	forced, owed           uint32
	window, ackDue         bool
	srcCancel, sinkCancel  bool
	sinks, srcs            int
	adverts, peerSrcs      int
}

// compare says where a socket believes something else.
func (o *oracle) compare(s *Socket) error {
	if o.err != nil {
		return o.err
	}
	if o.lazy.normalize(); o.lazy.potential != o.potential || len(o.lazy.adverts) != len(o.sinks) {
		return fmt.Errorf("%d live SinkAvails and count %d, the draft's way %d and %d", len(o.sinks), o.potential, len(o.lazy.adverts), o.lazy.potential)
	}
	src, snk := &s.src, &s.snk
	got := belief{
		src.mode, snk.mode, src.potential, snk.nonDiscards, uint32(max(src.forced, src.next) - src.next), snk.owed, src.window.open, src.ackDue,
		src.cancel.sent, snk.cancel.sent, src.sinks.n, src.srcs.n, snk.adv, snk.srcs.n,
	}
	want := belief{
		o.sendMode, o.recvMode, o.potential, o.nonDiscards, o.forced, o.owed, o.window, o.ackDue,
		o.srcCancel, o.sinkCancel, len(o.sinks), len(o.srcs), len(o.adverts), len(o.peerSrcs),
	}
	same := got == want
	for i := 0; same && i < len(o.sinks); i++ {
		same = src.sinks.at(i).key == o.sinks[i]
	}
	for i := 0; same && i < len(o.srcs); i++ {
		same = src.srcs.at(i).key == o.srcs[i].key
	}
	for i := 0; same && i < len(o.adverts); i++ {
		same = snk.reads.at(i).key == o.adverts[i]
	}
	for i := 0; same && i < len(o.peerSrcs); i++ {
		same = snk.srcs.at(i).key == o.peerSrcs[i].key
	}
	if !same {
		return fmt.Errorf("%v, which is %+v, and the oracle has %+v, %+v", s.Snapshot(), got, want, o)
	}
	return nil
}
