// SPDX-License-Identifier: Apache-2.0

package cdc_test

import (
	"bytes"
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/smcr-io/kube-smcr/pkg/smcr/cdc"
)

// player puts us in the place of one host of a capture: the other host's messages are handed in, and we must send
// the messages of this host.
type player struct {
	*side
	last   uint16 // of our messages in the capture
	unseen uint16 // messages that were dropped before they were captured
	out    []cdc.Message
}

// deliver completes what was sent up to message seq.
func (p *player) deliver(seq uint16) {
	for len(p.out) > 0 && (p.out[0].Flags.FailoverValidation() || !cdc.SeqNewer(p.out[0].Seq, seq)) {
		p.out = p.out[1:]
		p.c.HandleSent()
	}
}

// say makes the application do what a message of this host tells of, and compares the message with ours. Where
// Linux sent its validation message, it had changed its link.
func (p *player) say(m cdc.Message) {
	p.t.Helper()
	if m.Flags.FailoverValidation() {
		// Linux names the message before the last that was acknowledged, we
		// name the last one.
		m.Seq++
		p.deliver(m.Seq)
		p.c.Failover()
		p.out = nil
	} else {
		if m.Seq == p.last || cdc.SeqNewer(p.last, m.Seq) {
			return // a retransmission
		}
		p.unseen += m.Seq - p.last - 1
		p.last = m.Seq
		m.Seq -= p.unseen
		p.deliver(m.Seq - 2) // the newest is always under way
		if pos, err := p.peer.Advance(p.produced, m.Prod); err == nil {
			p.write(pos - p.produced)
		}
		if pos, err := p.local.Advance(p.cons, m.Cons); err == nil {
			p.cons = pos
			p.c.Consume(pos)
		}
		if m.Flags.Closed() {
			p.deliver(m.Seq)
			p.c.Close()
		}
	}
	if !p.c.Pending() {
		p.t.Fatalf("nothing to send, want %v", m)
	}
	tr, _ := p.c.Next()
	p.out = append(p.out, tr.Message)
	m.Token = testPeerToken
	if diff := cmp.Diff(m, tr.Message); diff != "" {
		p.t.Errorf("sent (-captured +ours):\n%s", diff)
	}
}

// Two Linux hosts lost a link in the middle of a dialogue; we play either.
func TestSection4_6_Captures(t *testing.T) {
	for _, name := range []string{
		"21-failover-client-netdev-down", "24-failover-link-cut-recover",
		"25-failover-silent-drop-udp4791", "27-failover-client-netdev-down-hub",
	} {
		for _, host := range []string{"1", "2"} {
			t.Run(name+"/host "+host, func(t *testing.T) {
				p := &player{side: newSide(t, cdc.Ring{Size: 1 << 16})}
				validated, moved := 0, 0
				for i, line := range captures(t)["testdata/captures/"+name+".txt"] {
					m, err := cdc.Parse(line.raw)
					if err != nil {
						t.Fatal(err)
					}
					// The second addresses of the hosts are .11 and .12.
					from, _, _ := bytes.Cut([]byte(line.direction), []byte(">"))
					if string(from[len(from)-1:]) == host {
						p.say(m)
						if m.Flags.FailoverValidation() {
							moved++
						}
						continue
					}
					if _, err := p.c.HandleMessage(m); err != nil && !errors.Is(err, cdc.ErrStaleMessage) {
						t.Fatalf("message %d, %v: %v", i, m, err)
					}
					if m.Flags.FailoverValidation() {
						validated++
					}
				}
				if p.unseen > 1 {
					t.Errorf("%d messages are not in the capture", p.unseen)
				}
				if validated == 0 || moved == 0 || p.c.WasAborted() {
					t.Errorf("the peer moved %d times, we %d times, aborted: %t", validated, moved, p.c.WasAborted())
				}
			})
		}
	}
}
