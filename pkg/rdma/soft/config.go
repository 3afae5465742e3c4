// SPDX-License-Identifier: Apache-2.0

package soft

import (
	"errors"
	"fmt"
	"math/bits"
	"net/netip"
	"path/filepath"
	"runtime"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/rocev2"
)

// Config describes a device to open.
type Config struct {
	// Name is the device's name.
	Name string
	// Addr is the local address, which is also the device's only GID. A link-local
	// one of IPv6 needs its zone: the interface, as in fe80::1%eth0.
	Addr netip.Addr
	// Port is the UDP port of this device and of its peers; 0: 4791.
	Port uint16
	// MTU is the active path MTU, unless the interface allows a smaller one only; 0: the
	// largest that fits the interface. With an address on loopback, packets leave by others: 0 is
	// the largest that fits each that is up, and what fits one of them is allowed.
	MTU rdma.MTU
	// Wire carries the datagrams; nil: a UDP socket in the network namespace
	// of the calling thread. The device closes it.
	Wire Wire
	// SocketBufferBytes is what the socket's buffers should hold in each
	// direction, and those of all receivers behind the first one together; 0: 16 MiB. Without CAP_NET_ADMIN
	// the system's limits apply.
	SocketBufferBytes int
	// Receivers is the number of receiving sockets, each with a goroutine: 1, 2 or 4. The
	// kernel spreads queue pairs over them. 0: as many as the program has processors (GOMAXPROCS),
	// or the number below that. With an address of IPv6, and while two devices share it, there is one.
	Receivers int
	// NoSegmentation sends and receives every packet by itself, as on a
	// kernel without UDP_SEGMENT and UDP_GRO.
	NoSegmentation bool
	// Share lets one other device that shares be open on the same address and
	// port, of this process or of another one of the same user: a program that
	// replaces another one opens its device before the other one closes its own.
	// A third one has to wait until one of the two is closed: see [ErrShared].
	// A device that does not share, and rxe, keep all others out.
	Share bool
	// Dir is the directory in which devices that share find each other: both need the
	// same one, which may serve devices of other addresses and network namespaces too. It
	// is made with mode 0700 if it is not there, and refused if it belongs to another user
	// or others can enter it. "" is /run/smcr-soft for root, and for others smcr-soft in
	// $XDG_RUNTIME_DIR or else in the user's cache directory.
	Dir string
	// WindowPackets is the number of packets in flight of a queue pair;
	// 0: rocev2.DefaultWindow.
	WindowPackets int
	// TooLarge, if given, is called when the kernel refuses to send a packet because it does not fit the
	// interface that it leaves by: once in a minute at most, by one goroutine, which Close waits for.
	TooLarge func(TooLarge)
}

// TooLarge is a packet that does not fit the interface. Its queue pair sends it again until its retries are used up.
type TooLarge struct {
	Peer        netip.Addr
	PacketBytes int // with the IP header: the MTU that the interface should have
}

// Validate reports all that is wrong with c.
func (c Config) Validate() error {
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if c.Name == "" {
		bad("name is empty")
	}
	if !c.Addr.IsValid() || c.Addr.IsUnspecified() || c.Addr.IsMulticast() {
		bad("address %v is not a unicast address", c.Addr)
	}
	if c.Addr.Is4In6() {
		bad("address %v: write it as IPv4", c.Addr)
	}
	if c.Wire == nil && c.scoped() && c.Addr.Zone() == "" {
		bad("address %v is link-local and may be on any interface: say on which one, as in %v%%eth0", c.Addr, c.Addr)
	}
	if c.MTU != 0 && !c.MTU.Valid() {
		bad("path MTU code %d is not one of 1 to 5", uint8(c.MTU))
	}
	if c.Share && c.Wire != nil {
		bad("only a UDP socket can be shared, and a wire is given")
	}
	if c.Dir != "" && !filepath.IsAbs(c.Dir) {
		bad("directory %q is not an absolute path", c.Dir)
	}
	if c.SocketBufferBytes < 0 {
		bad("socket buffer of %d bytes", c.SocketBufferBytes)
	}
	if c.Receivers < 0 || c.Receivers > maxReceivers || c.Receivers&(c.Receivers-1) != 0 {
		bad("%d receivers are not 1, 2 or 4", c.Receivers)
	}
	if c.WindowPackets < 0 || c.WindowPackets > rocev2.MaxWindow {
		bad("window of %d packets is not in 0 to %d", c.WindowPackets, rocev2.MaxWindow)
	}
	return errors.Join(errs...)
}

// scoped reports whether the address means nothing without its interface.
func (c Config) scoped() bool { return c.Addr.Is6() && c.Addr.IsLinkLocalUnicast() }

func (c Config) withDefaults() Config {
	if c.Port == 0 {
		c.Port = rocev2.Port
	}
	if c.SocketBufferBytes == 0 {
		c.SocketBufferBytes = defaultSocketBufferBytes
	}
	if c.Receivers == 0 {
		c.Receivers = 1 << (bits.Len(uint(min(runtime.GOMAXPROCS(0), maxReceivers))) - 1)
	}
	return c
}
