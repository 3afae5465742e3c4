// SPDX-License-Identifier: Apache-2.0

package bsdh

import (
	"errors"
	"fmt"
)

// ErrSetup says that a peer's Hello or HelloAck offers what no connection can be made of.
var ErrSetup = errors.New("bsdh: unacceptable set-up")

// MinBufs is the least number of receive buffers that a peer may begin with (§10).
const MinBufs = 3

// CheckSetup reports why a Hello or HelloAck must be refused (§8.1.1, steps 3 and 7). The minor version
// is not a reason; what runs is the lesser of both. The sizes are checked too, which the draft does not ask
// for: no message fits into less than [MinBuffer] bytes, and with less than [MinBufs] receive buffers no
// payload may be sent, ever.
func (m *Message) CheckSetup() error {
	s := &m.Setup
	switch {
	case s.Major != VersionMajor:
		return fmt.Errorf("%w: %v of version %d.%d, want %d", ErrSetup, m.MID, s.Major, s.Minor, VersionMajor)
	case s.MaxAdverts == 0:
		return fmt.Errorf("%w: %v allows no adverts", ErrSetup, m.MID)
	case s.IRD == 0 || s.ORD == 0:
		return fmt.Errorf("%w: %v with IRD %d and ORD %d", ErrSetup, m.MID, s.IRD, s.ORD)
	case s.RecvBytes < MinBuffer || s.RecvBytes > MaxBytes:
		return fmt.Errorf("%w: %v with receive buffers of %d bytes, want %d to %d", ErrSetup, m.MID, s.RecvBytes, MinBuffer, uint32(MaxBytes))
	case m.Bufs < MinBufs:
		return fmt.Errorf("%w: %v with %d receive buffers, want %d at least", ErrSetup, m.MID, m.Bufs, MinBufs)
	}
	return nil
}
