// SPDX-License-Identifier: Apache-2.0

package softvi

import "time"

const (
	// maxPending bounds the connections of a device whose calls are not answered: each costs a
	// descriptor, a goroutine and 1 KiB. Those beyond it are closed, and a caller with
	// patience calls again.
	maxPending = 1024

	// maxPendingOfSource bounds those of one address, of IPv6 one network of 64 bits: whoever
	// connects and says nothing keeps nobody else out.
	maxPendingOfSource = 32

	// maxBacklog bounds the calls of a [Listener] that nobody has taken yet.
	maxBacklog = 128

	// maxListeners bounds the listeners of a device.
	maxListeners = 1024

	// sendTimeout bounds how long TCP may take to accept a message of connection
	// establishment: it is the first one, and a socket's buffer has room for it.
	sendTimeout = 5 * time.Second

	// refusalLinger is how long a connection that was refused waits for the peer's end: closed at
	// once, with unread bytes, it would be reset, and the refusal lost.
	refusalLinger = time.Second

	// maxRefusalRead bounds the bytes that are read and dropped meanwhile.
	maxRefusalRead = 64 << 10

	// acceptPause is how long the device waits when it cannot accept: it has no descriptors,
	// perhaps.
	acceptPause = 10 * time.Millisecond
)
