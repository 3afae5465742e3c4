// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"bytes"
	"encoding/binary"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// optionWire is a wire between two namespaces, made of two veths and a
// forwarder in user space. On demand it puts the SMC-R option into every SYN:
// a peer with SMC-R as the network shows it, without eBPF.
type optionWire struct {
	option  atomic.Bool
	hidden  atomic.Bool   // the option stands behind another one of its kind
	answer  atomic.Bool   // it is put into SYN-ACKs, and not into SYNs
	split   atomic.Bool   // what has it goes in two fragments, the first of which ends before it
	packets atomic.Uint32 // that were split
	forged  atomic.Bool   // SYN-ACKs are lost: nobody is where the SYNs say that they come from
}

func (w *optionWire) addOption(on bool) { w.option.Store(on) }

// newWiredPair is newPair with an optionWire between the two.
func newWiredPair(t testing.TB) (pod, peer *NetNS, w *optionWire) {
	t.Helper()
	pod, peer = newNS(t), newNS(t)
	w = &optionWire{}
	fds := make([]int, 2)
	for i, ns := range []*NetNS{pod, peer} {
		mid := newNS(t)
		joinNS(t, ns, mid)
		mustDo(t, inNetlink(mid, func(h *netlink.Handle) error {
			l, err := h.LinkByName("eth0")
			if err != nil {
				return err
			}
			if err := h.LinkSetUp(l); err != nil {
				return err
			}
			fds[i], err = packetSocket(l.Attrs().Index)
			return err
		})())
	}
	setAddresses(t, pod, peer)
	// The neighbours are behind other interfaces than those they see.
	stop := make(chan struct{})
	done := make(chan struct{}, 2)
	go w.forward(fds[0], fds[1], stop, done)
	go w.forward(fds[1], fds[0], stop, done)
	t.Cleanup(func() {
		close(stop)
		<-done
		<-done
		for _, fd := range fds {
			_ = unix.Close(fd)
		}
	})
	return pod, peer, w
}

// packetSocket receives what an interface receives, and sends through it.
func packetSocket(index int) (int, error) {
	const allProtocols = unix.ETH_P_ALL<<8 | unix.ETH_P_ALL>>8 // in network order
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	if err := unix.SetsockoptInt(fd, unix.SOL_PACKET, unix.PACKET_IGNORE_OUTGOING, 1); err != nil {
		return -1, err
	}
	tv := unix.NsecToTimeval(int64(20 * time.Millisecond)) // to look at stop
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv); err != nil {
		return -1, err
	}
	return fd, unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: allProtocols & 0xffff, Ifindex: index})
}

func (w *optionWire) forward(from, to int, stop <-chan struct{}, done chan<- struct{}) {
	defer func() { done <- struct{}{} }()
	buf := make([]byte, 1<<16)
	for {
		select {
		case <-stop:
			return
		default:
		}
		n, _, err := unix.Recvfrom(from, buf, 0)
		if err != nil {
			continue // the timeout, or an interface that is going down
		}
		for _, frame := range w.rewrite(buf[:n:n]) {
			_, _ = unix.Write(to, frame)
		}
	}
}

// rewrite completes the checksum of a TCP segment, which the sender's kernel
// left to the hardware, and adds the option to a SYN. What is
// to be lost becomes nothing.
func (w *optionWire) rewrite(frame []byte) [][]byte {
	whole := [][]byte{frame}
	if len(frame) < ethernet+40 {
		return whole
	}
	ip := frame[ethernet:]
	var ipSize, addrs, addrSize int
	switch binary.BigEndian.Uint16(frame[12:]) {
	case unix.ETH_P_IP:
		ipSize, addrs, addrSize = int(ip[0]&15)*4, 12, 4
		if ip[9] != unix.IPPROTO_TCP {
			return whole
		}
	case unix.ETH_P_IPV6:
		ipSize, addrs, addrSize = 40, 8, 16
		if ip[6] != unix.IPPROTO_TCP {
			return whole
		}
	default:
		return whole
	}
	if w.forged.Load() && ip[ipSize:][13]&0x12 == 0x12 {
		return nil
	}
	flags := byte(tcpSYN)
	if w.answer.Load() {
		flags |= tcpACK
	}
	put := false
	if tcp := ip[ipSize:]; w.option.Load() && tcp[13]&(tcpSYN|tcpACK) == flags {
		put = true
		size := int(tcp[12]>>4) * 4
		option := []byte{smcOptionKind, 6, 0xE2, 0xD4, 0xC3, 0xD9, 1, 1}
		if w.hidden.Load() {
			option = append([]byte{smcOptionKind, 5, 1, 2, 3, 1, 1}, append(option, 1)...) // at an odd place
		}
		grown := append(append(append([]byte{}, frame[:ethernet+ipSize+size]...), option...), tcp[size:]...)
		frame, ip = grown, grown[ethernet:]
		ip[ipSize+12] += byte(len(option)/4) << 4
		if addrSize == 4 {
			binary.BigEndian.PutUint16(ip[2:], binary.BigEndian.Uint16(ip[2:])+uint16(len(option)))
			ip[10], ip[11] = 0, 0
			binary.BigEndian.PutUint16(ip[10:], checksum(0, ip[:ipSize]))
		} else {
			binary.BigEndian.PutUint16(ip[4:], binary.BigEndian.Uint16(ip[4:])+uint16(len(option)))
		}
	}
	length := int(binary.BigEndian.Uint16(ip[2:])) - ipSize
	if addrSize == 16 {
		length = int(binary.BigEndian.Uint16(ip[4:]))
	}
	tcp := ip[ipSize : ipSize+length]
	tcp[16], tcp[17] = 0, 0
	sum := uint32(unix.IPPROTO_TCP) + uint32(length) + sum16(ip[addrs:addrs+2*addrSize])
	binary.BigEndian.PutUint16(tcp[16:], checksum(sum, tcp))
	if put && w.split.Load() {
		id := byte(w.packets.Add(1)) // of IPv4 the sender has given one
		return [][]byte{fragment(frame, ipSize, id, 0, tcp[:24]), fragment(frame, ipSize, id, 24, tcp[24:])}
	}
	return [][]byte{frame}
}

const ethernet = 14 // the size of a header

// fragment is the fragment of a frame's IP packet that begins at a place of its payload. The second one is the last. What the
// packet is known by tells it from others, of which a fragment may still be waited for.
func fragment(frame []byte, ipSize int, id byte, at int, payload []byte) []byte {
	out := bytes.Clone(frame[:ethernet+ipSize])
	ip := out[ethernet:]
	if ipSize == 40 {
		ip[6] = unix.IPPROTO_FRAGMENT
		binary.BigEndian.PutUint16(ip[4:], uint16(8+len(payload)))
		flags := uint16(at)
		if at == 0 {
			flags |= 1
		}
		out = append(out, unix.IPPROTO_TCP, 0, byte(flags>>8), byte(flags), 0, 0, 0, id)
		return append(out, payload...)
	}
	binary.BigEndian.PutUint16(ip[2:], uint16(ipSize+len(payload)))
	flags := uint16(at / 8)
	if at == 0 {
		flags |= 0x2000
	}
	binary.BigEndian.PutUint16(ip[6:], flags)
	ip[10], ip[11] = 0, 0
	binary.BigEndian.PutUint16(ip[10:], checksum(0, ip))
	return append(out, payload...)
}

func sum16(b []byte) (sum uint32) {
	for ; len(b) > 1; b = b[2:] {
		sum += uint32(binary.BigEndian.Uint16(b))
	}
	if len(b) == 1 {
		sum += uint32(b[0]) << 8
	}
	return sum
}

func checksum(sum uint32, b []byte) uint16 {
	sum += sum16(b)
	for sum>>16 != 0 {
		sum = sum&0xffff + sum>>16
	}
	return ^uint16(sum)
}

func giveSysctl(t testing.TB, ns *NetNS, name, value string) {
	t.Helper()
	mustDo(t, ns.Do(func() error { return os.WriteFile(filepath.Join("/proc/sys", name), []byte(value), 0) }))
}
