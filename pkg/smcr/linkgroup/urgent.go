// SPDX-License-Identifier: Apache-2.0

package linkgroup

// Urgent tells that the byte before position pos of our stream is urgent
// (§4.7.5). It is to be called before Produce hands that byte over, and returns
// false if it is too late. The peer's urgent bytes come as cdc.PeerUrgent
// among the events of EventConn; Data says where they are.
func (c *Conn) Urgent(pos uint64) bool { return c.data.Urgent(pos) }

// RequestUpdate asks the peer how far it has read (§4.5.1), to find out whether
// it stalls.
func (c *Conn) RequestUpdate() {
	c.data.RequestUpdate()
	c.enqueue()
}

// Coalesce makes less than n bytes wait until there are more or Flush is called
// (§4.5.2); 0 lets nothing wait. Coalesced of Data says whether anything does.
func (c *Conn) Coalesce(n uint32) {
	c.data.Coalesce(n)
	c.enqueue()
}

// Flush sends what was produced until now without further waiting.
func (c *Conn) Flush() {
	c.data.Flush()
	c.enqueue()
}
