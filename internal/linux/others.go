// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"math/bits"
	"os"
	"strings"
	"time"
	"unsafe"

	"github.com/google/nftables"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// Others is what other programs' rules do with the packets of a namespace, as far as it
// matters to the redirection. A text names the table and chain, for messages; "" means
// that there is no such rule.
type Others struct {
	// Redirector changes the destination of connections from here or from the network,
	// as a service mesh does. If there are more rules than are read, and none that was
	// read redirects, it is assumed that another one does.
	Redirector string
	// Rules may need connection tracking: any rule may, also one that cannot be read.
	Rules string
	// Unknown says which rules cannot be read, and why.
	Unknown string
	// Untracked says that an agent's table excludes packets from connection tracking.
	Untracked bool
	// Cost is the processor time of the search.
	Cost time.Duration
}

// FindOthers looks at the rules of nftables, of either iptables and of ip6tables
// in ns.
func FindOthers(ns *NetNS) (Others, error) {
	var o Others
	err := ns.Do(func() error {
		began := threadTime()
		left := newAllowance()
		o.finish("nftables", o.findNft(left))
		for _, l := range legacies {
			o.finish(l.program, o.findLegacy(l, left))
		}
		o.Cost = threadTime() - began
		return nil
	})
	if err != nil {
		return Others{}, fmt.Errorf("look for redirectors in %s: %w", ns, err)
	}
	return o, nil
}

// finish notes the outcome of the search through one kind of rules. An error does not end
// the search: a program in the namespace can make rules that cannot be read, and the set
// "caught" notices a redirector in any case when it redirects a connection of the agent.
func (o *Others) finish(program string, err error) {
	switch {
	case errors.Is(err, ErrTooMuch):
		o.note(fmt.Sprintf("rules of %s that were not looked through: there are more than %d, they have more than %d MiB or took longer than %v",
			program, maxDumpEntries, maxDumpBytes>>20, maxDumpTime), true)
	case err != nil:
		why := fmt.Sprintf("rules of %s cannot be read: %v", program, err)
		if o.Unknown != "" {
			why = o.Unknown + "; " + why
		}
		o.Unknown = why
		o.note("rules that cannot be read", false)
	}
}

// note notes a rule of another program, if it is the first of its kind.
func (o *Others) note(where string, redirects bool) {
	if o.Rules == "" {
		o.Rules = where
	}
	if redirects && o.Redirector == "" {
		o.Redirector = where
	}
}

// seeing are the families of tables that see the packets of programs.
var seeing = [...]nftables.TableFamily{nftables.TableFamilyIPv4, nftables.TableFamilyIPv6, nftables.TableFamilyINet}

func (o *Others) findNft(left *allowance) error {
	foreign := map[nftables.TableFamily]bool{}
	for _, family := range seeing {
		err := eachNft(unix.NFT_MSG_GETTABLE, family, left, func(ad *netlink.AttributeDecoder) {
			name := ""
			for ad.Next() {
				if ad.Type() == unix.NFTA_TABLE_NAME {
					name = ad.String()
				}
			}
			foreign[family] = foreign[family] || family != nftables.TableFamilyINet || name != tableName
		}, nil)
		if err != nil {
			return err
		}
	}
	hooked := map[nftables.Table]bool{} // tables with chains where destinations can be changed
	for _, family := range seeing {
		if !foreign[family] && family != nftables.TableFamilyINet {
			continue
		}
		if err := o.findChains(family, left, hooked); err != nil {
			return err
		}
	}
	for _, family := range seeing {
		if !foreign[family] {
			continue
		}
		if err := o.findRules(family, left, hooked); err != nil {
			return err
		}
	}
	return nil
}

// findChains adds the tables with chains where destinations can be changed.
func (o *Others) findChains(family nftables.TableFamily, left *allowance, hooked map[nftables.Table]bool) error {
	return eachNft(unix.NFT_MSG_GETCHAIN, family, left, func(ad *netlink.AttributeDecoder) {
		t, name, here, rules := nftables.Table{Family: family}, "", false, uint32(0)
		for ad.Next() {
			switch ad.Type() {
			case unix.NFTA_CHAIN_TABLE:
				t.Name = ad.String()
			case unix.NFTA_CHAIN_NAME:
				name = ad.String()
			case unix.NFTA_CHAIN_USE:
				if b := ad.Bytes(); len(b) == 4 {
					rules = binary.BigEndian.Uint32(b)
				}
			case unix.NFTA_CHAIN_HOOK:
				ad.Nested(func(h *netlink.AttributeDecoder) error {
					h.ByteOrder = binary.BigEndian
					for h.Next() {
						if h.Type() == unix.NFTA_HOOK_HOOKNUM {
							n := nftables.ChainHook(h.Uint32())
							here = n == *nftables.ChainHookPrerouting || n == *nftables.ChainHookOutput
						}
					}
					return nil
				})
			}
		}
		switch {
		case family == nftables.TableFamilyINet && t.Name == tableName:
			o.Untracked = o.Untracked || name == chainPlainOut && rules > 0
		case here:
			hooked[t] = true
		}
	}, nil)
}

// findRules reads the rules of other programs until one redirects.
func (o *Others) findRules(family nftables.TableFamily, left *allowance, hooked map[nftables.Table]bool) error {
	return eachNft(unix.NFT_MSG_GETRULE, family, left, func(ad *netlink.AttributeDecoder) {
		r := foreignRule{table: nftables.Table{Family: family}}
		r.parse(ad)
		own := family == nftables.TableFamilyINet && r.table.Name == tableName
		if redirects := r.redirects && hooked[r.table]; ad.Err() == nil && !own && (redirects || o.Rules == "") {
			o.note(fmt.Sprintf("nftables table %s %s, chain %s", familyWord(family), r.table.Name, r.chain), redirects)
		}
	}, func() bool { return o.Redirector == "" })
}

func familyWord(f nftables.TableFamily) string {
	switch f {
	case nftables.TableFamilyIPv4:
		return "ip"
	case nftables.TableFamilyIPv6:
		return "ip6"
	default:
		return "inet"
	}
}

// eachNft goes through the nf_tables objects of a kind and family in the thread's
// namespace, as long as more returns true; nil means always. It does not use the library,
// which reads a list as a whole, and does not know all expressions of other programs'
// rules.
func eachNft(request uint16, family nftables.TableFamily, left *allowance, f func(*netlink.AttributeDecoder), more func() bool) error {
	err := dump(unix.NETLINK_NETFILTER, unix.NFNL_SUBSYS_NFTABLES<<8|request, []byte{byte(family), 0, 0, 0}, left, func(b []byte) (bool, error) {
		if len(b) < nfgenSize {
			return false, fmt.Errorf("entry of %d bytes", len(b))
		}
		ad, err := netlink.NewAttributeDecoder(b[nfgenSize:])
		if err == nil {
			f(ad)
			err = ad.Err()
		}
		return err == nil && (more == nil || more()), err
	})
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	return err
}

// foreignRule is what is read of a rule.
type foreignRule struct {
	table     nftables.Table
	chain     string
	redirects bool
}

// nfgenSize is struct nfgenmsg, whose first byte is the family.
const nfgenSize = 4

func (r *foreignRule) parse(ad *netlink.AttributeDecoder) {
	for ad.Next() {
		switch ad.Type() {
		case unix.NFTA_RULE_TABLE:
			r.table.Name = ad.String()
		case unix.NFTA_RULE_CHAIN:
			r.chain = ad.String()
		case unix.NFTA_RULE_EXPRESSIONS:
			ad.Nested(func(list *netlink.AttributeDecoder) error {
				for list.Next() {
					list.Nested(func(e *netlink.AttributeDecoder) error {
						r.redirects = redirects(e) || r.redirects
						return nil
					})
				}
				return nil
			})
		}
	}
}

// redirects reports whether an expression changes where a packet goes: redir,
// tproxy, nat of the destination, or a target of iptables that does.
func redirects(e *netlink.AttributeDecoder) bool {
	e.ByteOrder = binary.BigEndian
	name, hit := "", false
	for e.Next() {
		switch e.Type() {
		case unix.NFTA_EXPR_NAME:
			name = e.String()
			hit = name == "redir" || name == "tproxy"
		case unix.NFTA_EXPR_DATA:
			if name != "nat" && name != "target" {
				continue
			}
			e.Nested(func(d *netlink.AttributeDecoder) error {
				d.ByteOrder = binary.BigEndian
				for d.Next() {
					switch {
					case name == "nat" && d.Type() == unix.NFTA_NAT_TYPE:
						hit = d.Uint32() == unix.NFT_NAT_DNAT
					case name == "target" && d.Type() == unix.NFTA_TARGET_NAME:
						hit = targetRedirects(d.String())
					}
				}
				return nil
			})
		}
	}
	return hit
}

// targetRedirects tells whether a target of iptables changes the destination.
func targetRedirects(name string) bool {
	switch name {
	case "REDIRECT", "DNAT", "TPROXY", "NETMAP":
		return true
	}
	return false
}

// legacy is one of the two iptables with tables of their own in the kernel, which
// nftables does not show. The offsets are those of struct ipt_entry and
// ip6t_entry.
type legacy struct {
	program, names string // names is the file with the names of the existing tables
	domain, level  int
	target, next   int
}

var legacies = [...]legacy{
	{"iptables", "/proc/thread-self/net/ip_tables_names", unix.AF_INET, unix.SOL_IP, 88, 90},
	{"ip6tables", "/proc/thread-self/net/ip6_tables_names", unix.AF_INET6, unix.SOL_IPV6, 140, 142},
}

const (
	// Options of a socket, the same for both families: IPT_SO_GET_INFO and
	// IPT_SO_GET_ENTRIES.
	soGetInfo, soGetEntries = 64, 65
	// struct ipt_getinfo: the name, at 32 the hooks, at 76 the number of entries
	// and their size.
	infoSize, infoHooks, infoEntries, infoBytes = 84, 32, 76, 80
	// struct ipt_get_entries: the name, the size, and the entries.
	tableNameSize, entriesHeader = 32, 40
	// struct xt_entry_target: its size, and its name.
	targetName, targetNameSize = 2, 29
)

// findLegacy reads only the tables that exist, because asking for another one makes it.
// The kernel shows their names only to the user who owns the namespace. In a pod with a
// user namespace of its own that is not the agent's user.
func (o *Others) findLegacy(l legacy, left *allowance) error {
	names, err := os.ReadFile(l.names) // of the five tables that the kernel knows
	if errors.Is(err, fs.ErrNotExist) || err == nil && len(names) == 0 {
		return nil
	}
	if err != nil {
		return err
	}
	fd, err := unix.Socket(l.domain, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if errors.Is(err, unix.EAFNOSUPPORT) {
		return nil
	}
	if err != nil {
		return os.NewSyscallError("socket", err)
	}
	defer unix.Close(fd)
	for _, name := range strings.Fields(string(names)) {
		entries, rules, err := l.table(fd, name, left)
		if err != nil {
			return fmt.Errorf("table %s: %w", name, err)
		}
		if rules {
			o.note(fmt.Sprintf("%s table %s", l.program, name), l.redirects(entries))
		}
		if o.Redirector != "" {
			return nil
		}
	}
	return nil
}

// table reads the entries of a table. rules says that there are more entries than a table
// without rules has for its built-in chains.
func (l legacy) table(fd int, name string, left *allowance) (entries []byte, rules bool, err error) {
	for range dumpTries {
		info := make([]byte, infoSize)
		copy(info[:tableNameSize-1], name)
		if err := getsockopt(fd, l.level, soGetInfo, info); err != nil {
			return nil, false, os.NewSyscallError("getsockopt IPT_SO_GET_INFO", err)
		}
		hooks := bits.OnesCount32(binary.NativeEndian.Uint32(info[infoHooks:]))
		n, size := int(binary.NativeEndian.Uint32(info[infoEntries:])), int(binary.NativeEndian.Uint32(info[infoBytes:]))
		if err := left.take(n, size); err != nil {
			return nil, false, err
		}
		if size > maxLegacyBytes {
			return nil, false, fmt.Errorf("%d bytes of rules: %w", size, ErrTooMuch)
		}
		b := make([]byte, entriesHeader+size)
		copy(b[:tableNameSize-1], name)
		binary.NativeEndian.PutUint32(b[tableNameSize:], uint32(size))
		err := getsockopt(fd, l.level, soGetEntries, b)
		if errors.Is(err, unix.EAGAIN) {
			continue // the table changed between the two calls
		}
		if err != nil {
			return nil, false, os.NewSyscallError("getsockopt IPT_SO_GET_ENTRIES", err)
		}
		return b[entriesHeader:], n > hooks+1, nil
	}
	return nil, false, unix.EAGAIN
}

// redirects tells whether an entry of a table changes the destination.
func (l legacy) redirects(b []byte) bool {
	for len(b) > l.next+2 {
		target, next := int(binary.NativeEndian.Uint16(b[l.target:])), int(binary.NativeEndian.Uint16(b[l.next:]))
		if next <= l.next || next > len(b) || target+targetName+targetNameSize > next {
			return false
		}
		name, _, _ := bytes.Cut(b[target+targetName:target+targetName+targetNameSize], []byte{0})
		if targetRedirects(string(name)) {
			return true
		}
		b = b[next:]
	}
	return false
}

// getsockopt calls getsockopt(2) with a buffer that the kernel reads and fills: x/sys has
// no wrapper for options with an input.
func getsockopt(fd, level, option int, b []byte) error {
	n := uint32(len(b))
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), uintptr(level), uintptr(option),
		uintptr(unsafe.Pointer(&b[0])), uintptr(unsafe.Pointer(&n)), 0)
	if errno != 0 {
		return errno
	}
	return nil
}
