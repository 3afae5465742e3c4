// SPDX-License-Identifier: Apache-2.0

// Package rdmacm connects queue pairs of the kernel's iWARP devices, in guests with Linux' siw: it
// speaks to /dev/infiniband/rdma_cm as librdmacm does. The kernel opens the TCP connection itself, and
// brings the queue pair from INIT to RTS.
//
//	c, err := rdmacm.New()
//	offer, err := c.Connect(qp.Num(), from, to, nil) // or c.Listen, and c.Accept once or often
//	err = c.AwaitEnd(time.Minute)
//	err = c.Close() // which ends what is connected
//
// # Who owns what
//
// A CM is owned by one goroutine. It has one connection at a time: Await forgets the one before.
//
// # Limitations
//
// IPv4, and as many READs as queue pairs of siw take by default.
package rdmacm
