// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"runtime"
	"time"

	"github.com/google/nftables"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// ErrTooMuch means that a list of a namespace is longer than the limit for reading it. A
// program that may set up a pod's network can make a list as long as it likes.
var ErrTooMuch = errors.New("has more than is looked through")

// allowance is how much may still be read of lists whose length other programs decide:
// entries, bytes, and processor time of the calling thread, which the kernel uses to find
// the entries.
type allowance struct {
	entries, bytes int
	until          time.Duration          // of the thread's processor time; 0: no limit
	seen           int                    // entries
	changed        bool                   // a list changed while it was read: entries may be missing
	keep           func(body []byte) bool // nil: all entries count
}

// newAllowance is the allowance for one look through a namespace, by the calling thread.
func newAllowance() *allowance {
	return &allowance{entries: maxDumpEntries, bytes: maxDumpBytes, until: threadTime() + maxDumpTime}
}

// take uses a part of the allowance. The error is [ErrTooMuch] if less is left.
func (a *allowance) take(entries, bytes int) error {
	a.entries, a.bytes, a.seen = a.entries-entries, a.bytes-bytes, a.seen+entries
	if a.entries < 0 || a.bytes < 0 || a.isLate() {
		return ErrTooMuch
	}
	return nil
}

// pass is for an entry that nobody keeps.
func (a *allowance) pass() error {
	if a.seen++; a.isLate() {
		return ErrTooMuch
	}
	return nil
}

func (a *allowance) isLate() bool {
	return a.until != 0 && a.seen > timedFrom && threadTime() > a.until
}

// threadTime is the processor time of the calling thread, 0 if the kernel does not
// tell.
func threadTime() time.Duration {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &t); err != nil {
		return 0
	}
	return time.Duration(t.Nano())
}

// dump asks the kernel for a list of the thread's namespace, in a family of netlink, and
// calls f with the body of each entry until f returns false or the allowance is used up.
// The kernel makes the list while it is read: a part that is not read costs nothing, and
// only one part at a time is in memory.
func dump(family int, request uint16, body []byte, left *allowance, f func(body []byte) (more bool, err error)) error {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, family)
	if err != nil {
		return os.NewSyscallError("socket", err)
	}
	defer unix.Close(fd)
	return dumpFrom(fd, request, body, left, f)
}

// DumpFew asks the kernel for a list of the thread's namespace, in a family of netlink, and returns the body of each entry that
// keep wants; nil: all. The error is [ErrTooMuch] if there are more than are looked through; those that were are returned all the
// same. An entry that is not kept counts for the time that it takes only.
func DumpFew(family int, request uint16, body []byte, keep func(body []byte) bool) ([][]byte, error) {
	runtime.LockOSThread() // whose time is counted
	defer runtime.UnlockOSThread()
	left := newAllowance()
	left.keep = keep
	return dumpFew(family, request, body, left)
}

func dumpFew(family int, request uint16, body []byte, left *allowance) (all [][]byte, err error) {
	err = dump(family, request, body, left, func(b []byte) (bool, error) {
		all = append(all, bytes.Clone(b))
		return true, nil
	})
	if err != nil && !errors.Is(err, ErrTooMuch) {
		return nil, err
	}
	return all, err
}

// dumpFrom is dump with a socket of the caller's, on which nothing else was asked.
func dumpFrom(fd int, request uint16, body []byte, left *allowance, f func(body []byte) (more bool, err error)) error {
	if err := unix.Sendto(fd, appendDumpRequest(nil, request, body), 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return os.NewSyscallError("send", err)
	}
	buf := make([]byte, dumpBufferBytes)
	for {
		n, _, err := unix.Recvfrom(fd, buf, unix.MSG_TRUNC)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return os.NewSyscallError("receive", err)
		}
		if n > len(buf) {
			return fmt.Errorf("%d bytes in one part: %w", n, ErrTooMuch)
		}
		if more, err := eachEntry(buf[:n], left, f); err != nil || !more {
			return err
		}
	}
}

func appendDumpRequest(b []byte, request uint16, body []byte) []byte {
	return appendRequest(b, request, unix.NLM_F_DUMP, body)
}

// appendRequest appends a request of netlink without a number: one that is asked alone on its socket.
func appendRequest(b []byte, request, flags uint16, body []byte) []byte {
	b = binary.NativeEndian.AppendUint32(b, uint32(nlHeaderSize+len(body)))
	b = binary.NativeEndian.AppendUint16(b, request)
	b = binary.NativeEndian.AppendUint16(b, unix.NLM_F_REQUEST|flags)
	b = append(b, make([]byte, 8)...) // sequence and port
	return append(b, body...)
}

// eachEntry goes through one part of a list, and reports whether to read on.
func eachEntry(b []byte, left *allowance, f func([]byte) (bool, error)) (more bool, err error) {
	for len(b) >= nlHeaderSize {
		size := int(binary.NativeEndian.Uint32(b))
		if size < nlHeaderSize || size > len(b) {
			return false, fmt.Errorf("entry of %d bytes in a part of %d", size, len(b))
		}
		body := b[nlHeaderSize:size]
		left.changed = left.changed || binary.NativeEndian.Uint16(b[6:])&unix.NLM_F_DUMP_INTR != 0
		switch binary.NativeEndian.Uint16(b[4:]) {
		case unix.NLMSG_DONE, unix.NLMSG_ERROR:
			if len(body) < 4 {
				return false, nil
			}
			if code := int32(binary.NativeEndian.Uint32(body)); code != 0 {
				return false, unix.Errno(-code)
			}
			return false, nil
		}
		if left.keep != nil && !left.keep(body) {
			if err := left.pass(); err != nil {
				return false, err
			}
		} else {
			if err := left.take(1, size); err != nil {
				return false, err
			}
			if more, err := f(body); err != nil || !more {
				return false, err
			}
		}
		b = b[min((size+unix.NLMSG_ALIGNTO-1)&^(unix.NLMSG_ALIGNTO-1), len(b)):]
	}
	return true, nil
}

// element is one of a set of nf_tables.
type element struct {
	key     []byte
	expires time.Duration
}

// eachElement goes through the elements of a set in the thread's namespace until f returns
// false. The table may not be the one that we made: a program that may set up the pod's
// network can replace it, and put very many elements into it. The error is unix.ENOENT if
// there is no such set.
func eachElement(s *nftables.Set, f func(element) bool) error {
	attrs, err := netlink.MarshalAttributes([]netlink.Attribute{
		{Type: unix.NFTA_SET_ELEM_LIST_TABLE, Data: append([]byte(s.Table.Name), 0)},
		{Type: unix.NFTA_SET_ELEM_LIST_SET, Data: append([]byte(s.Name), 0)},
	})
	if err != nil {
		return err
	}
	body := append([]byte{byte(s.Table.Family), 0, 0, 0}, attrs...)
	const request = unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_GETSETELEM
	return dump(unix.NETLINK_NETFILTER, request, body, newAllowance(), func(b []byte) (bool, error) { return eachElementOf(b, f) })
}

// eachElementOf goes through the elements in one answer of the kernel's until f returns false, and reports whether to read on.
func eachElementOf(b []byte, f func(element) bool) (more bool, err error) {
	if len(b) < nfgenSize {
		return false, fmt.Errorf("elements of %d bytes", len(b))
	}
	ad, err := netlink.NewAttributeDecoder(b[nfgenSize:])
	if err != nil {
		return false, err
	}
	more = true
	for ad.Next() {
		if ad.Type() != unix.NFTA_SET_ELEM_LIST_ELEMENTS {
			continue
		}
		ad.Nested(func(list *netlink.AttributeDecoder) error {
			for more && list.Next() {
				var e element
				list.Nested(e.parse)
				more = f(e)
			}
			return nil
		})
	}
	return more, ad.Err()
}

func (e *element) parse(ad *netlink.AttributeDecoder) error {
	ad.ByteOrder = binary.BigEndian
	for ad.Next() {
		switch ad.Type() {
		case unix.NFTA_SET_ELEM_KEY:
			ad.Nested(func(d *netlink.AttributeDecoder) error {
				for d.Next() {
					if d.Type() == unix.NFTA_DATA_VALUE {
						e.key = d.Bytes()
					}
				}
				return nil
			})
		case unix.NFTA_SET_ELEM_EXPIRATION:
			e.expires = time.Duration(min(ad.Uint64(), uint64(time.Hour/time.Millisecond))) * time.Millisecond
		}
	}
	return nil
}
