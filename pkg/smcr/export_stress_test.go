// SPDX-License-Identifier: Apache-2.0

package smcr

// Announced returns the consumer position that the data path thinks the peer
// knows, and the one that it does.
func Announced(c *Conn) (dataPath, machine uint64) {
	c.stack.lock()
	defer c.stack.unlock()
	return c.streams.announced.Load(), c.lc.Data().Announced()
}
