// SPDX-License-Identifier: Apache-2.0

// Package verbs is the provider of RDMA devices that the kernel has: RNICs, and
// the kernel's soft RoCE (rxe), through libibverbs.
//
//	d, err := verbs.Open(verbs.Config{Name: "mlx5_0"})
//	...
//	c, err := d.Open() // an rdma.Context
//
// [Devices] lists what there is and [ChooseGID] says which GID would be used; they
// need neither cgo nor rights. docs/rdma-devices.md says what devices need.
//
// It is the only package with C. In a build without cgo [Built] is false and Open
// returns [ErrNotBuilt]; the rest is the same. A build with cgo needs libibverbs
// at run time, and the user-space driver of the device.
//
// # iWARP
//
// [OpenIWARP] opens a device that speaks iWARP, an RNIC or Linux' siw. It is a [cm.Device]: the kernel's rdma_cm connects its queue
// pairs, over TCP connections that the device makes itself. Everything else is as with other devices. This package writes to
// /dev/infiniband/rdma_cm as librdmacm does. It does not use that library, which opens every device of the machine once more, and
// accepts a connection only with a queue pair that the library itself has made.
//
//	d, err := verbs.OpenIWARP(verbs.IWARPConfig{Name: "siw0", Addr: addr})
//	...
//	c, err := d.Dial(ctx, qp, to, cm.Options{PrivateData: hello})
//
// # Who owns what
//
// A device has a handle of its own for queries and a goroutine that follows the
// port. A context is a context of libibverbs, with a goroutine for its events. A
// completion queue has a completion channel and a goroutine that calls OnNotify's
// function. All these goroutines wait in Go's network poller, none of them in C. If
// OnNotify's function calls Arm, the queue is armed when the function has returned, in
// the same call of C as everything else.
//
// An iWARP device has, besides, one open file of rdma_cm for all its connections and listeners, and a goroutine for the events of that
// file. The kernel has an ID for each connection and each listener; the ID is destroyed with the queue pair or the listener. Commands
// that may wait for a peer run in goroutines of their own. The context of the caller ends only the caller's wait; the kernel
// ends the attempt when it can.
//
// Posting and polling take the queue's lock, fill or read memory that belongs to
// the queue and is not Go's, and call C once for a batch. C never keeps a pointer
// to Go memory, and never calls Go. Registered memory is a memfd of its own for
// each region; it is mapped until the last region with it is closed. Work requests and
// peers name it by a random address of the region's own (ibv_reg_mr_iova).
//
// # What libibverbs does not do
//
// libibverbs does not always tell that a queue pair has gone to ERR. This package notices
// it by a completion, by an event, or when State is called. The first completion with an
// error also makes the event (EventQPFatal, EventPathDown), so a user that neither polls
// nor calls State may not learn that the queue pair has failed.
//
// A queue pair that is closed leaves completions in the completion queue with some
// drivers and takes them out with others. Here those that arrived before stay, as
// with the software device, and none comes later, also if the device gives the
// number to another queue pair.
//
// A driver that cannot take a device away from its users waits until they close it,
// and tells nobody. So this package looks four times a second whether the node of the
// device is still there. When the node is gone, or the driver says that the device is, all
// contexts end by themselves, and only their memory stays.
//
// # Limitations
//
// RoCE and iWARP only: InfiniBand addresses by LID. One port
// is one device. The MAC address of the peer is the kernel's business: it resolves
// the GID in the transition to RTR, and waits up to a second for the answer; see
// [rdma.PathResolver]. Of the devices in docs/rdma-devices.md, tests run on rxe and siw.
//
// rdma_cm says that a connection has ended, but not how: EventDisconnected may stand for a reset, too. An attempt to connect that
// was given up stays in the kernel until TCP, or the peer, ends it, and closing its queue pair waits for that.
//
// A completion queue has all its room from the start, while that of the software device
// grows as it fills. Whether Resize can change it (ibv_resize_cq) depends on the driver; if
// the driver cannot, pkg/smcr makes queues with room for a link of each connection. An overrun ends
// every queue pair of the queue.
//
// Linux' siw is not as other devices:
//
//   - It addresses memory by its address in the process, which peers so learn.
//   - A peer that reads memory needs no right to read.
//   - It cannot wake for solicited receives alone, so that Arm asks for all.
//   - It does not tell that a peer refused a request (DeviceAttr.RefusalsTold).
//   - It never connects a queue pair a second time.
//   - As the responder it may overlook what arrives right behind its Reply until more arrives. An initiator that waits for
//     an answer to its first message has to send something again, as pkg/sdp does.
//   - As the initiator it sends no message by itself, for which the peer may wait, unless it was built to do so.
package verbs
