// SPDX-License-Identifier: Apache-2.0

// Package iwarpload makes the loads of package load by RDMA on connections of iWARP: the same code for
// every device, so that only the device makes the difference. Streams are WRITEs or READs from region to
// region, or SENDs, each of which is answered; round trips are SENDs. Who connects the queue pairs is the user's
// business.
//
//	e, err := iwarpload.NewEnd(dev, rdma.StableRead) // both; then e.QP is connected, with the server's e.Region() as private data
//	err = e.Answer()                                 // the server
//	result, err := e.Load(l, rdma.OpWrite, region)   // the client
//
// # Who owns what
//
// An End belongs to one goroutine, and has the context that all of it belongs to: Close ends it.
//
// # Limitations
//
// One connection, and messages of up to 1 MiB; those of round trips have up to 64 bytes.
package iwarpload
