// SPDX-License-Identifier: Apache-2.0

// Package deadline has points in time that can be moved while somebody waits for them: those of
// the reads and writes of a net.Conn.
//
// A [Deadline] belongs to its connection. Set may be called at any time, by anybody; who waits asks Wait for a
// channel each time, since a deadline that has passed and is moved gets another one:
//
//	select {
//	case <-arrived:
//	case <-d.Wait():
//		return os.ErrDeadlineExceeded
//	}
//
// # Limitations
//
// A waiter that holds the channel of a deadline that was moved hears of the old one only if that had passed; else
// of the new one.
package deadline
