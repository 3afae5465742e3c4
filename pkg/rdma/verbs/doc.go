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
// pairs, with connections of TCP that the device makes itself; everything else is the same. /dev/infiniband/rdma_cm is written to as librdmacm
// does; that library itself opens every device of the machine once more, and lets a connection be accepted only with a queue
// pair of its own making.
//
//	d, err := verbs.OpenIWARP(verbs.IWARPConfig{Name: "siw0", Addr: addr})
//	...
//	c, err := d.Dial(ctx, qp, to, cm.Options{PrivateData: hello})
//
// # Who owns what
//
// An iWARP device has one open file of rdma_cm for all its connections and listeners, and a goroutine for what that tells; each is an
// ID of the kernel's, which goes with its queue pair, or its listener. Commands that may wait for a peer are given in a goroutine
// of their own: a context ends the wait for it, and the kernel ends the attempt when it can.
//
// A device has a handle of its own for queries and a goroutine that follows the
// port. A context is a context of libibverbs, with a goroutine for its events; a
// completion queue has a completion channel and a goroutine that calls OnNotify's
// function. They all wait in Go's network poller, none of them in C. What that
// function asks for with Arm is done, in one call of C with all else, when it has
// returned.
//
// Posting and polling take the queue's lock, fill or read memory that belongs to
// the queue and is not Go's, and call C once for a batch. C never keeps a pointer
// to Go memory, and never calls Go. Registered memory is a memfd of its own for
// each region; it is mapped until the last region with it is closed. Work requests and
// peers name it by a random address of the region's own (ibv_reg_mr_iova).
//
// # What libibverbs does not do
//
// State is that of the last Modify until a completion, an event or State finds the
// queue pair in ERR. The first completion with an error also makes the event
// (EventQPFatal, EventPathDown), so a user that neither polls nor asks may not
// learn of it.
//
// A queue pair that is closed leaves completions in the completion queue with some
// drivers and takes them out with others. Here those that arrived before stay, as
// with the software device, and none comes later, also if the device gives the
// number to another queue pair.
//
// A driver that cannot take a device away from its users waits until they close it,
// and tells nobody. So the node of the device is looked at four times a second; when
// it is gone, or the driver says so, all contexts end by themselves and only their
// memory stays.
//
// # Limitations
//
// RoCE and iWARP only: InfiniBand addresses by LID. One port
// is one device. The MAC address of the peer is the kernel's business: it resolves
// the GID in the transition to RTR, and waits for the answer up to a second; see
// [rdma.PathResolver]. Of the devices in docs/rdma-devices.md rxe and siw are those that
// tests run on.
//
// rdma_cm says that a connection has ended and not how: EventDisconnected may stand for a reset, too. An attempt to connect that was given up
// stays the kernel's until TCP, or the peer, ends it; closing its queue pair waits for that.
//
// Linux' siw knows memory by its address in the process, which peers learn; it asks for no right where it is read, wakes nobody for solicited
// receives alone (so that Arm asks for all), tells nobody why a peer refused a request (DeviceAttr.RefusalsTold), and never connects a queue pair a second time.
// What comes right behind its Reply it sees when more comes: who connects to it and waits for an answer to its first message sends
// something again (pkg/sdp does). It sends no message of its own first, which the peer may wait for, unless it was built for that.
//
// A completion queue has all its room from the start, where the software device's
// grows as it fills. Whether Resize can change it (ibv_resize_cq) depends on the driver: with
// one that cannot, pkg/smcr makes queues with room for a link of each connection. An overrun ends
// every queue pair of the queue.
package verbs
