// SPDX-License-Identifier: Apache-2.0

// Package iwarp is the wire and the queue pairs of iWARP, RDMA over one TCP
// connection: MPA's start-up and framing (RFC 5044, RFC 6581), DDP's segments
// (RFC 5041) and RDMAP's SEND, WRITE, READ and Terminate (RFC 5040).
//
// It is PURE: the bytes of the stream come in where [QP.RxBuffers] says and
// are announced by [QP.HandleRx]; [QP.TxBuffers] says which bytes leave, and
// [QP.HandleTx] how many TCP took. Time comes in as an argument, and
// [QP.NextTimeout] says when [QP.HandleTimeout] is due. The same inputs give
// the same outputs.
//
// # The stream
//
//	[MPA Request or Reply, private data] [FPDU] [FPDU] ...
//	FPDU:  length of the ULPDU (2), ULPDU, pad (0 to 3), CRC32C (4)
//	ULPDU: one DDP segment: header (14 tagged, 18 untagged), payload
//
// A message is one or several segments; the last one has a flag. WRITE and
// READ responses are tagged: they say where their bytes go. SEND, READ
// requests and Terminate are untagged: they go to the next buffer of a queue.
//
// # Who owns what
//
// A [QP] belongs to whoever holds the device's queue pair and is not safe for
// concurrent use. What it sends is registered memory as it is, but that bytes
// of a READ response with a CRC are copied first: their owner may change them
// while they are sent, and the CRC would be wrong. Who promises not to
// ([rdma.StableRead]) spares that copy. What it receives is checked in a
// buffer, an FPDU at a time, and then copied to its place. Nothing is
// allocated after [QP.Start], but once a larger buffer for a stream that fills it, and one for FPDUs that are copied.
//
// # How to use it
//
//	q.Modify(now, rdma.QPAttr{State: rdma.QPInit, Access: access})
//	q.PostRecv(wrs)
//	q.Start(now, iwarp.Startup{Role: iwarp.Initiator})
//	for !q.Closed() {
//		n, err := readv(tcp, q.RxBuffers(bufs[:0]))  // when there is something
//		q.HandleRx(now, n)                           // or HandleEnd
//		n, err = writev(tcp, q.TxBuffers(now, bufs[:0]))
//		q.HandleTx(now, n)
//		if q.TxEnded() {
//			tcp.CloseWrite()
//		}
//		n = q.PollWC(wcs)
//	}
//
// # Limitations
//
// Markers are sent to a peer that asks for them, and never asked for. Immediate
// data and atomics (RFC 7306) are refused as unexpected operations. The
// zero-length SEND of RFC 6581 is neither offered nor chosen as the first
// message of a peer-to-peer connection. A SEND or WRITE completes when TCP has
// its bytes, which says nothing of the peer.
package iwarp
