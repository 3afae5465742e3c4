// SPDX-License-Identifier: Apache-2.0

package cdc

import (
	"errors"
	"testing"
)

func TestReceiveRing(t *testing.T) {
	r := receiveRing{ring: Ring{Size: 100}}
	pos, err := r.position(Cursor{Count: 70})
	if err != nil || pos != 70 || !r.hasRoom(pos) {
		t.Fatalf("producer cursor 70: position %d, %v", pos, err)
	}
	r.peerProduced = pos
	r.consume(50)
	if r.unread() != 20 || r.isAt(Cursor{Count: 69}) || !r.isAt(Cursor{Count: 70}) {
		t.Errorf("70 produced, 50 consumed: %+v", r)
	}
	// The peer does not know that 50 bytes were consumed.
	if !r.hasRoom(100) || r.hasRoom(101) {
		t.Error("want room up to 100")
	}
	r.announce()
	if !r.hasRoom(150) || r.hasRoom(151) {
		t.Error("want room up to 150 once the peer knows")
	}
}

func TestReceiveRing_updateDue(t *testing.T) {
	for name, tt := range map[string]struct {
		r    receiveRing
		want bool
	}{
		"less than half of the window is left, a tenth to gain": {receiveRing{peerProduced: 51, consumed: 10}, true},
		"half of the window is left":                            {receiveRing{peerProduced: 50, consumed: 10}, false},
		"less than a tenth to gain":                             {receiveRing{peerProduced: 90, consumed: 9}, false},
		"the peer is blocked":                                   {receiveRing{peerProduced: 50, consumed: 1, peerBlocked: true}, true},
		"the peer asked":                                        {receiveRing{peerProduced: 50, consumed: 1, updateAsked: true}, true},
	} {
		t.Run(name, func(t *testing.T) {
			r := tt.r
			r.ring = Ring{Size: 100}
			if got := r.updateDue(); got != tt.want {
				t.Errorf("updateDue = %t", got)
			}
			if r.announce(); r.updateAsked {
				t.Error("the peer was told, but its request is left")
			}
		})
	}
}

// A cursor from before may come again after the peer changed its link, but none from
// further back than the RMBE is large.
func TestReceiveRing_repeated(t *testing.T) {
	r := receiveRing{ring: Ring{Size: 100}, peerProduced: 250, consumed: 250, announced: 250}
	for _, c := range []Cursor{{Wrap: 2, Count: 49}, {Wrap: 1, Count: 50}} {
		if _, err := r.position(c); !errors.Is(err, ErrStale) {
			t.Errorf("position of %v: %v, want ErrStale", c, err)
		}
		if pos, err := r.repeated(c); err != nil || pos != 250 {
			t.Errorf("repetition of %v: %d, %v, want 250", c, pos, err)
		}
	}
	if pos, err := r.repeated(Cursor{Wrap: 1, Count: 49}); !errors.Is(err, ErrStale) {
		t.Errorf("repetition of more than the RMBE: %d, %v, want ErrStale", pos, err)
	}
}
