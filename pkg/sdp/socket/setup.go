// SPDX-License-Identifier: Apache-2.0

package socket

import (
	"fmt"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/sdp/bsdh"
)

// hello is our Hello or HelloAck (§6.2.1, §6.2.2).
func (s *Socket) hello(mid bsdh.MID) bsdh.Message {
	return bsdh.Message{
		MID: mid, Bufs: uint16(s.cfg.RecvBuffers),
		Setup: bsdh.Setup{
			MaxAdverts: uint16(s.cfg.MaxAdverts), Major: bsdh.VersionMajor, Minor: bsdh.VersionMinor,
			WantRecvBytes: s.cfg.SendBytes, RecvBytes: s.size.recvBytes, IRD: uint16(s.cfg.IRD), ORD: uint16(s.cfg.ORD),
		},
	}
}

// HandleHello takes the 32 bytes that an accepting peer read from the TCP stream. OutEstablished and the HelloAck
// follow, or the end: there is no other answer (§8.1.1).
func (s *Socket) HandleHello(now time.Time, b []byte) error {
	if s.state != StateHello || s.cfg.Role != Accepting {
		return fmt.Errorf("hello: %w", ErrState)
	}
	s.susp.away = false
	m, err := s.cfg.parseSetup(b, bsdh.Hello)
	if err != nil {
		s.abort(now, err)
		return err
	}
	s.establish(&m)
	ack := s.hello(bsdh.HelloAck)
	ack.Setup.WantRecvBytes = 0
	// The HelloAck takes a receive buffer of the peer, and has no number.
	s.credits = newCredits(s.cfg.RecvBuffers, s.cfg.RecvBuffers, int(m.Bufs)-1)
	s.sends.posted++
	s.out.put(Output{Kind: OutSend, Message: ack})
	s.flush(now)
	return nil
}

// handleHelloAck takes the first message that a connecting peer receives, in a receive buffer.
func (s *Socket) handleHelloAck(buffer int, b []byte) error {
	m, err := s.cfg.parseSetup(b, bsdh.HelloAck)
	if err != nil {
		return err
	}
	s.establish(&m)
	s.credits = newCredits(s.cfg.RecvBuffers, s.cfg.RecvBuffers-1, int(m.Bufs))
	s.out.put(Output{Kind: OutRecycle, Buffer: buffer})
	s.credits.tell()
	return nil
}

func (c *Config) parseSetup(b []byte, want bsdh.MID) (bsdh.Message, error) {
	m, err := bsdh.Parse(b, c.Layout)
	if err != nil {
		return m, violation(BadMessage, "%w", err)
	}
	if m.MID != want {
		return m, violation(UnexpectedMessage, "%v, want %v", m.MID, want)
	}
	if err := m.CheckSetup(); err != nil {
		return m, violation(BadSetup, "%w", err)
	}
	return m, nil
}

// establish begins data transfer on the peer's terms: both directions in Combined mode (§8.1.1). We ask for no more
// RDMA READs at a time than the peer serves, and serve no more than it asks for.
func (s *Socket) establish(m *bsdh.Message) {
	s.state, s.deadline = StateOpen, time.Time{}
	s.peer = peerTerms{
		recvBytes: m.Setup.RecvBytes, maxAdverts: int(m.Setup.MaxAdverts), reads: min(s.cfg.ORD, int(m.Setup.IRD)),
	}
	s.out.put(Output{Kind: OutEstablished, Message: *m, IRD: min(s.cfg.IRD, int(m.Setup.ORD)), ORD: s.peer.reads})
}
