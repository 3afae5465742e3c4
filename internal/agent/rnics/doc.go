// SPDX-License-Identifier: Apache-2.0

// Package rnics has the RDMA devices that SMC-R stacks run on: those of the node, which all pods
// use, and pods' own devices.
//
//	pool := rnics.NewPool(rnics.Config{Log: log, Open: open, OpenOwn: openOwn})
//	err := pool.Open(ctx, node.Devices)
//	stop := pool.Monitor(ctx)
//	node := pool.Node()                  // a Set: what a pod's stack runs on
//	own := pool.NewSet(namespace)        // for a pod that has devices of its own
//	own.Update(ctx, stack, pool.Arrange(wanted))
//	devices, count := own.Usable()
//	err = own.Release()
//
// A device of the kernel may disappear at any time. The pool closes the device at once, since its
// driver may wait for that, and opens it again when it is back. The owner of a stack calls
// [Set.Usable] now and then: if count differs from the last one, some device was opened, and the
// owner gives the stack what is new.
//
// # Who owns what
//
// Any goroutine may use a [Pool] and its devices. The [Set] of a pod is changed (Update, Release)
// by one owner at a time, and read by all. Pods that want the same device of the host share it; the
// last one to release it closes it.
//
// # Limitations
//
// The node's devices are those of the start. If two pods have the same device inside both their
// namespaces, each opens it.
package rnics
