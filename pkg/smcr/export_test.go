// SPDX-License-Identifier: Apache-2.0

package smcr

// BreakTCP resets the TCP connection under an SMC-R connection, as the
// kernel does when the process dies.
func BreakTCP(c *Conn) {
	_ = c.tcp.SetLinger(0)
	_ = c.tcp.Close()
}
