// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// isFirst wants the first address of loopback.
func isFirst(body []byte) bool { return bytes.Contains(body, []byte{127, 0, 0, 1}) }

// TestDump: a list is read until the allowance is used up, or nothing more is
// wanted. A list that is wanted as a whole is not there in part.
func TestDump(t *testing.T) {
	ns := newNS(t)
	var b strings.Builder
	for i := range 300 {
		fmt.Fprintf(&b, "address add 10.1.%d.%d/32 dev lo\n", i/250, 1+i%250)
	}
	inNS(t, ns, b.String(), "ip", "-batch", "-")
	for _, c := range []struct {
		name string
		left allowance
		stop int
		want int
		err  error
	}{
		{"all", allowance{entries: 1000, bytes: 1 << 20}, 0, 301, nil},
		{"entries", allowance{entries: 100, bytes: 1 << 20}, 0, 100, ErrTooMuch},
		{"bytes", allowance{entries: 1000, bytes: 4 << 10}, 0, -1, ErrTooMuch},
		{"time", allowance{entries: 1000, bytes: 1 << 20, until: 1}, 0, timedFrom, ErrTooMuch},
		{"time, but few", allowance{entries: 1000, bytes: 1 << 20, until: 1}, timedFrom, timedFrom, nil},
		{"enough", allowance{entries: 1000, bytes: 1 << 20}, 7, 7, nil},
		{"many that nobody wants", allowance{entries: 1, bytes: 4 << 10, keep: isFirst}, 0, 1, nil},
		{"time, for what nobody wants", allowance{entries: 1, bytes: 4 << 10, keep: isFirst, until: 1}, 0, 1, ErrTooMuch},
	} {
		t.Run(c.name, func(t *testing.T) {
			n := 0
			body := make([]byte, unix.SizeofIfAddrmsg)
			body[0] = unix.AF_INET
			whole := c.left
			err := ns.Do(func() error {
				return dump(unix.NETLINK_ROUTE, unix.RTM_GETADDR, body, &c.left, func([]byte) (bool, error) {
					n++
					return n != c.stop, nil
				})
			})
			if !errors.Is(err, c.err) || c.want >= 0 && n != c.want || c.want < 0 && (n == 0 || n > 100) {
				t.Errorf("%d entries, %v; want %d, %v", n, err, c.want, c.err)
			}
			if c.stop != 0 {
				return
			}
			var all [][]byte
			err = ns.Do(func() (err error) {
				all, err = dumpFew(unix.NETLINK_ROUTE, unix.RTM_GETADDR, body, &whole)
				return err
			})
			seen := map[string]bool{}
			for _, b := range all {
				seen[string(b)] = true
			}
			if !errors.Is(err, c.err) || c.err == nil && len(seen) != c.want || c.err != nil && (len(seen) != len(all) || len(seen) > whole.seen) {
				t.Errorf("%d bodies, %d of them different, %v; want %d or a part of them, %v", len(all), len(seen), err, c.want, c.err)
			}
		})
	}
}

// TestEachEntry_malformed: sizes that cannot be are errors.
func TestEachEntry_malformed(t *testing.T) {
	entry := func(size uint32, kind uint16, body ...byte) []byte {
		b := binary.NativeEndian.AppendUint16(binary.NativeEndian.AppendUint32(nil, size), kind)
		return append(append(b, make([]byte, 10)...), body...)
	}
	for name, b := range map[string][]byte{
		"short":       entry(nlHeaderSize-1, unix.RTM_NEWADDR),
		"long":        entry(nlHeaderSize+1, unix.RTM_NEWADDR),
		"kernel's no": entry(nlHeaderSize+4, unix.NLMSG_ERROR, binary.NativeEndian.AppendUint32(nil, ^uint32(0))...),
	} {
		if more, err := eachEntry(b, &allowance{entries: 9, bytes: 999}, func([]byte) (bool, error) { return true, nil }); more || err == nil {
			t.Errorf("%s: more %t, error %v", name, more, err)
		}
	}
	if more, err := eachEntry(entry(nlHeaderSize, unix.NLMSG_DONE), &allowance{}, nil); more || err != nil {
		t.Errorf("end: more %t, error %v", more, err)
	}
}

// TestRedirect_otherTable: a table of the agent's name that somebody else made, with
// more elements than the agent's has, is read in part.
func TestRedirect_otherTable(t *testing.T) {
	ns := newNS(t)
	r := install(t, ns, testConfig(families[0]))
	var b strings.Builder
	b.WriteString("table inet kube-smcr\ndelete table inet kube-smcr\ntable inet kube-smcr {\n set caught { type inet_proto; flags timeout; elements = { 1 timeout 20h, 2 timeout 20h } }\n set found { type mark . mark; elements = { ")
	for i := range 5000 {
		fmt.Fprintf(&b, "%d . 5,", i+100)
	}
	b.WriteString("1 . 1 } }\n}\n")
	inNS(t, ns, b.String(), "nft", "-f", "-")
	if caught, err := r.Caught(); !caught || err != nil {
		t.Errorf("caught %t, %v", caught, err)
	}
	found, err := readFound(ns)
	if len(found) != foundSize || err != nil {
		t.Errorf("%d found, %v; want %d", len(found), err, foundSize)
	}
	mustDo(t, r.Remove())
}

// TestInstallRedirect_manyRoutingRules: rules of others, however many, neither keep
// the agent's from being found nor from being deleted.
func TestInstallRedirect_manyRoutingRules(t *testing.T) {
	ns := newNS(t)
	var b strings.Builder
	for i := range 500 {
		fmt.Fprintf(&b, "rule add priority %d fwmark %d table 7\n", 7400+i, i+1)
	}
	inNS(t, ns, b.String(), "ip", "-batch", "-")
	mustDo(t, install(t, ns, testConfig(families[0])).Close())
	r := install(t, ns, testConfig(families[0])) // finds the first one's
	mustDo(t, ns.Do(func() error {
		marks, err := ownRules(netlink.FAMILY_V4)
		if diff := cmp.Diff([]uint32{testAppMark}, marks); diff != "" {
			t.Error(diff)
		}
		return err
	}))
	mustDo(t, errors.Join(r.Remove(), Sweep(ns)))
	if has, err := hasRules(ns); has || err != nil {
		t.Errorf("has rules %t, %v", has, err)
	}
	mustDo(t, inNetlink(ns, func(h *netlink.Handle) error {
		rules, err := h.RuleList(netlink.FAMILY_V4)
		if len(rules) != 503 { // with the kernel's own
			t.Errorf("%d rules are left, want 503", len(rules))
		}
		return err
	})())
}

// TestAddresses_tooMany: no addresses are better than some of them.
func TestAddresses_tooMany(t *testing.T) {
	ns := newNS(t)
	var b strings.Builder
	for i := range 40 {
		fmt.Fprintf(&b, "link add v%d type veth peer name w%d\naddress add 10.1.0.%d/24 dev v%d\n", i, i, i+1, i)
	}
	inNS(t, ns, b.String(), "ip", "-batch", "-")
	ifs, err := Addresses(ns)
	mustDo(t, err)
	if len(ifs) != 40 || len(ifs["v7"]) != 1 || ifs["v7"][0] != netip.MustParsePrefix("10.1.0.8/24") {
		t.Errorf("addresses %v", ifs)
	}
	mustDo(t, ns.Do(func() error {
		if err := fewEnough(unix.RTM_GETLINK, unix.AF_UNSPEC, unix.SizeofIfInfomsg, &allowance{entries: 80, bytes: 1 << 20}); !errors.Is(err, ErrTooMuch) {
			t.Errorf("81 interfaces: error %v, want ErrTooMuch", err)
		}
		if err := fewEnough(unix.RTM_GETLINK, unix.AF_UNSPEC, unix.SizeofIfInfomsg, newAllowance()); err != nil {
			t.Error(err)
		}
		if _, err := interfaceNames(&allowance{entries: 20, bytes: 1 << 20}); !errors.Is(err, ErrTooMuch) {
			t.Errorf("error %v, want ErrTooMuch", err)
		}
		return nil
	}))
}
