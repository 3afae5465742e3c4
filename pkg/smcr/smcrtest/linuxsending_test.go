// SPDX-License-Identifier: Apache-2.0

package smcrtest

import (
	"bytes"
	"testing"

	"github.com/smcr-io/kube-smcr/pkg/smcr/cdc"
	"github.com/smcr-io/kube-smcr/pkg/smcr/linkgroup"
)

// Of 80 bytes sent 20 are delivered and 50 read when the link is lost: 30 are sent again.
func TestLinuxSending_goBack(t *testing.T) {
	s := linuxSending{buf: make([]byte, 64)}
	s.activate(linkgroup.RMBE{Size: 100}, nil)
	s.write(40, 1)
	s.advance(20)
	s.delivered(linuxSent{sent: s.sent, prod: s.prod})
	s.advance(20)
	if s.room() != 44 || s.unsent() != 0 || s.space != 60 {
		t.Fatalf("room for %d, %d to send, space %d", s.room(), s.unsent(), s.space)
	}
	s.write(40, 1) // wraps in the send buffer
	from := s.sent.count
	if got := s.copyFrom(from, 40); !bytes.Equal(got[:24], s.buf[40:]) || !bytes.Equal(got[24:], s.buf[:16]) {
		t.Errorf("bytes across the end of the send buffer: %v", got)
	}
	s.advance(40)
	if err := s.takeSpace(cdc.Cursor{Count: 81}); err == nil {
		t.Error("the peer read what was not sent")
	}
	if err := s.takeSpace(cdc.Cursor{Count: 50}); err != nil || s.space != 70 {
		t.Fatalf("50 read: space %d, %v", s.space, err)
	}
	s.goBack()
	if s.prod.count != 50 || s.unsent() != 30 || s.space != 100 || s.furthest.count != 80 {
		t.Errorf("went back to %d, %d to send, space %d", s.prod.count, s.unsent(), s.space)
	}
}
