// SPDX-License-Identifier: Apache-2.0

package smcr

// BreakTCP resets the TCP connection under an SMC-R connection, as the
// kernel does when the process dies.
func BreakTCP(c *Conn) {
	_ = c.tcp.SetLinger(0)
	_ = c.tcp.Close()
}

// KnownRMBs returns how many RMBs the peers of a stack know, and how many there
// are.
func KnownRMBs(s *Stack) (known, all int) {
	s.lock()
	defer s.unlock()
	for _, g := range s.groups {
		for id := range g.rmbs {
			all++
			if g.lg.IsConfirmed(id) {
				known++
			}
		}
	}
	return known, all
}
