// SPDX-License-Identifier: Apache-2.0

package sdp

import (
	"fmt"

	"github.com/smcr-io/kube-smcr/pkg/sdp/bsdh"
	"github.com/smcr-io/kube-smcr/pkg/sdp/socket"
)

// Info describes a connection.
type Info struct {
	Role      socket.Role // who opened the present TCP connection: a suspension may change it
	Transport string      // "iWARP" or "RoCE"
	Layout    bsdh.Layout
	State     socket.State
	Err       error // why it has ended, if not in order

	PeerRecvBufferSize int       // bytes
	PeerMaxAdverts     int       // that we may have outstanding
	IRD, ORD           int       // RDMA READs at a time: the peer's that we serve, and ours
	SendMode, RecvMode bsdh.Mode // of our stream, and of the peer's

	// Bytes of both streams, and how they were carried. BytesCopied counts each byte once for each copy that this
	// package made of it; bytes that an RDMA READ or WRITE moved were not copied.
	BytesSent, BytesReceived uint64
	BytesCopied              uint64
	BytesRead, BytesWritten  uint64 // by our RDMA READs and WRITEs

	MessagesSent, MessagesReceived uint64
	Adverts                        uint64 // Buffers that we have opened to the peer
	Moves                          uint64 // from one connection of TCP to another, by a suspension of either side
}

// established notes what the peer said of itself in its Hello or HelloAck.
func (i *Info) established(o *socket.Output) {
	i.PeerRecvBufferSize, i.PeerMaxAdverts = int(o.Message.Setup.RecvBytes), int(o.Message.Setup.MaxAdverts)
	i.IRD, i.ORD = o.IRD, o.ORD
}

// read notes the state of the machine.
func (i *Info) read(m *socket.Socket) {
	s := m.Snapshot()
	i.State, i.SendMode, i.RecvMode = s.State, s.SendMode, s.RecvMode
	if s.PeerRecvBytes > 0 {
		i.PeerRecvBufferSize = int(s.PeerRecvBytes)
	}
}

func (i Info) String() string {
	return fmt.Sprintf("SDP over %s, %v: %d bytes sent (%v), %d received (%v), %d copied, %d by RDMA READ, %d by RDMA WRITE",
		i.Transport, i.State, i.BytesSent, i.SendMode, i.BytesReceived, i.RecvMode, i.BytesCopied, i.BytesRead, i.BytesWritten)
}
