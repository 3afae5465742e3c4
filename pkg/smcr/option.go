// SPDX-License-Identifier: Apache-2.0

package smcr

import "syscall"

// BothSpeak is an Option for programs that know, by their configuration, that
// the peer of every connection of this stack speaks SMC-R. It puts nothing on
// the handshake and needs no privilege. Towards a peer that does not speak
// SMC-R the connection breaks: this is for two programs of one owner, not for
// the open.
type BothSpeak struct{}

// ControlDial does nothing.
func (BothSpeak) ControlDial(string, string, syscall.RawConn) error { return nil }

// ControlListen does nothing.
func (BothSpeak) ControlListen(string, string, syscall.RawConn) error { return nil }

// PeerOffered says yes.
func (BothSpeak) PeerOffered(syscall.Conn) (bool, error) { return true, nil }

// SYNOffered says yes.
func (BothSpeak) SYNOffered(syscall.Conn) (bool, error) { return true, nil }

var _ Option = BothSpeak{}
