// SPDX-License-Identifier: Apache-2.0

// Package conntest asks whether a net.Conn behaves as TCP: it plays scripts on both ends of a connection and
// says what each step returned, which is to be what the same script says of TCP.
//
//	for _, script := range conntest.Scripts() {
//		conntest.Check(t, script, 50*time.Millisecond, openTCP, openOther)
//	}
//
// It is for tests only, of pkg/smcr and pkg/sdp. A script belongs to nobody; the connections are the caller's.
//
// # Limitations
//
// A step that waits is given 300 ms. What comes of a connection that was reset, once a step has said so, is not
// compared: TCP says EOF, EPIPE or ENOTCONN then, depending on who asks.
package conntest
