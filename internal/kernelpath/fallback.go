// SPDX-License-Identifier: Apache-2.0

package kernelpath

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/cilium/ebpf/ringbuf"
	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
)

// A Fallback is a connection of a chosen network namespace or cgroup that the kernel's SMC made TCP.
type Fallback struct {
	NetNS       uint64 // cookie
	Cgroup      uint64 // ID of the one that was chosen; 0: the namespace was
	Local, Peer netip.AddrPort
	Inbound     bool // the peer opened it
	IPv6        bool // the socket is one of IPv6, also if the addresses are not
	// Reason is the kernel's own diagnosis code, and PeerReason that of the peer's Decline if there was one.
	Reason, PeerReason clc.Reason
}

// A FallbackWatch is the program that tells of fallbacks, at work.
type FallbackWatch struct {
	link   link.Link
	reader *ringbuf.Reader
	ended  chan struct{} // closed by Close
}

// WatchFallbacks calls f for connections of chosen network namespaces and cgroups that fall back, until Close: in a goroutine of
// its own, one after the other, some tenths of a second later. Left out are those of sockets that had become TCP
// before they had a peer, by an option that SMC does not have, and what is more than 100 a second of one of these.
// The kernel's counters have all (smcnl.ReadCounters).
func (c *Chooser) WatchFallbacks(f func(Fallback)) (*FallbackWatch, error) {
	w, err := c.watchFallbacks()
	if err != nil {
		return nil, fmt.Errorf("watch what falls back to TCP: %w", err)
	}
	go w.run(f)
	return w, nil
}

func (c *Chooser) watchFallbacks() (_ *FallbackWatch, err error) {
	spec, err := loadFallback()
	if err != nil {
		return nil, err
	}
	var o struct {
		Program *ebpf.Program `ebpf:"fell_back"`
		Events  *ebpf.Map     `ebpf:"events"`
	}
	if err := spec.LoadAndAssign(&o, &ebpf.CollectionOptions{MapReplacements: map[string]*ebpf.Map{"namespaces": c.namespaces, "cgroups": c.cgroups}}); err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, o.Program.Close(), o.Events.Close()) }() // link and reader keep them
	w := &FallbackWatch{ended: make(chan struct{})}
	if w.reader, err = ringbuf.NewReader(o.Events); err != nil {
		return nil, err
	}
	if w.link, err = link.AttachTracing(link.TracingOptions{Program: o.Program}); err != nil {
		return nil, errors.Join(err, w.reader.Close())
	}
	return w, nil
}

// run reads events until Close. After those that there are it sleeps: one program that connects all the time would
// wake it for each connection.
func (w *FallbackWatch) run(f func(Fallback)) {
	var r ringbuf.Record
	for {
		if err := w.reader.ReadInto(&r); err != nil {
			return
		}
		if e, ok := decodeFallback(r.RawSample); ok {
			f(e)
		}
		if r.Remaining > 0 {
			continue
		}
		select {
		case <-w.ended:
			return
		case <-time.After(fallbackPause):
		}
	}
}

// Close ends the program. It does not wait for a call of f that is under way, and there is no further one.
func (w *FallbackWatch) Close() error {
	close(w.ended)
	return errors.Join(w.link.Close(), w.reader.Close())
}

// fallbackBytes is the size of struct event of bpf/fallback.bpf.c.
const fallbackBytes = 72

// decodeFallback reads such an event.
func decodeFallback(b []byte) (Fallback, bool) {
	if len(b) < fallbackBytes {
		return Fallback{}, false
	}
	n := binary.NativeEndian
	family := n.Uint16(b[20:])
	at := func(addr, port []byte) netip.AddrPort {
		a := netip.AddrFrom16([16]byte(addr)).Unmap()
		if family == unix.AF_INET {
			a = netip.AddrFrom4([4]byte(addr))
		}
		return netip.AddrPortFrom(a, n.Uint16(port))
	}
	return Fallback{
		NetNS: n.Uint64(b), Cgroup: n.Uint64(b[64:]), IPv6: family == unix.AF_INET6, Reason: clc.Reason(n.Uint32(b[8:])), PeerReason: clc.Reason(n.Uint32(b[12:])), Inbound: n.Uint32(b[16:]) != 0,
		Local: at(b[28:44], b[22:]), Peer: at(b[44:60], b[24:]),
	}, true
}
