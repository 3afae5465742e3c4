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
	"unsafe"

	"github.com/google/nftables"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// Others is what others than the agent do with the packets of a namespace, as far
// as it matters to the redirection. The texts name where, for messages; "" is
// nowhere.
type Others struct {
	// Redirector changes where connections go: those that programs make here, or
	// those that come from the network. A service mesh does.
	Redirector string
	// Rules may need connection tracking: any rules do.
	Rules string
	// Untracked: an agent's table is there that keeps packets from connection
	// tracking.
	Untracked bool
}

// FindOthers looks at the rules of nftables, of either iptables and of ip6tables
// in ns.
func FindOthers(ns *NetNS) (Others, error) {
	var o Others
	err := ns.Do(func() error {
		if err := o.findNft(); err != nil {
			return fmt.Errorf("list nftables: %w", err)
		}
		for _, l := range legacies {
			if err := o.findLegacy(l); err != nil {
				return fmt.Errorf("list tables of %s: %w", l.program, err)
			}
		}
		return nil
	})
	if err != nil {
		return Others{}, fmt.Errorf("look for redirectors in %s: %w", ns, err)
	}
	return o, nil
}

// note keeps the first of each kind.
func (o *Others) note(where string, redirects bool) {
	if o.Rules == "" {
		o.Rules = where
	}
	if redirects && o.Redirector == "" {
		o.Redirector = where
	}
}

// sees reports whether a table of this family sees the packets of programs.
func sees(f nftables.TableFamily) bool {
	return f == nftables.TableFamilyIPv4 || f == nftables.TableFamilyIPv6 || f == nftables.TableFamilyINet
}

func (o *Others) findNft() error {
	conn, err := nftables.New()
	if err != nil {
		return err
	}
	tables, err := conn.ListTables()
	if err != nil {
		return err
	}
	foreign := false
	for _, t := range tables {
		own := t.Family == nftables.TableFamilyINet && t.Name == tableName
		foreign = foreign || sees(t.Family) && !own
	}
	chains, err := conn.ListChainsOfTableFamily(nftables.TableFamilyINet)
	if err != nil {
		return err
	}
	for _, c := range chains {
		o.Untracked = o.Untracked || c.Table.Name == tableName && c.Name == chainPlainOut
	}
	if !foreign {
		return nil
	}
	if chains, err = conn.ListChains(); err != nil {
		return err
	}
	hooked := map[nftables.Table]bool{} // to where destinations are changed
	for _, c := range chains {
		if c.Hooknum != nil && (*c.Hooknum == *nftables.ChainHookPrerouting || *c.Hooknum == *nftables.ChainHookOutput) {
			hooked[nftables.Table{Family: c.Table.Family, Name: c.Table.Name}] = true
		}
	}
	return eachRule(func(r foreignRule) {
		if sees(r.table.Family) && r.table.Name != tableName {
			o.note(fmt.Sprintf("nftables table %s %s, chain %s", familyWord(r.table.Family), r.table.Name, r.chain), r.redirects && hooked[r.table])
		}
	})
}

func familyWord(f nftables.TableFamily) string {
	switch f {
	case nftables.TableFamilyIPv4:
		return "ip"
	case nftables.TableFamilyIPv6:
		return "ip6"
	case nftables.TableFamilyINet:
		return "inet"
	default:
		return fmt.Sprint(byte(f)) // none that sees packets of programs
	}
}

// foreignRule is what is read of a rule.
type foreignRule struct {
	table     nftables.Table
	chain     string
	redirects bool
}

// eachRule goes through all rules of the thread's namespace. The library knows too
// few expressions for rules of others.
func eachRule(f func(foreignRule)) error {
	c, err := netlink.Dial(unix.NETLINK_NETFILTER, nil)
	if err != nil {
		return err
	}
	defer func() { _ = c.Close() }() // it was only read from
	const get = unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_GETRULE
	msgs, err := c.Execute(netlink.Message{
		Header: netlink.Header{Type: get, Flags: netlink.Request | netlink.Dump},
		Data:   make([]byte, nfgenSize),
	})
	if err != nil {
		return err
	}
	for _, m := range msgs {
		r, err := parseRule(m.Data)
		if err != nil {
			return err
		}
		f(r)
	}
	return nil
}

// nfgenSize is struct nfgenmsg, whose first byte is the family.
const nfgenSize = 4

func parseRule(b []byte) (r foreignRule, err error) {
	if len(b) < nfgenSize {
		return r, fmt.Errorf("rule of %d bytes", len(b))
	}
	r.table.Family = nftables.TableFamily(b[0])
	ad, err := netlink.NewAttributeDecoder(b[nfgenSize:])
	if err != nil {
		return r, err
	}
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
	return r, ad.Err()
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

// targetRedirects knows the targets of iptables.
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
	program, names string // the file with the names of the tables that are there
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

// findLegacy asks only for tables that are there: to ask for another one makes it.
func (o *Others) findLegacy(l legacy) error {
	names, err := os.ReadFile(l.names)
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
		entries, rules, err := l.table(fd, name)
		if err != nil {
			return fmt.Errorf("table %s: %w", name, err)
		}
		if rules {
			o.note(fmt.Sprintf("%s table %s", l.program, name), l.redirects(entries))
		}
	}
	return nil
}

// table reads the entries of a table, and whether there are more than its
// built-in chains have without any rule.
func (l legacy) table(fd int, name string) (entries []byte, rules bool, err error) {
	for range dumpTries {
		info := make([]byte, infoSize)
		copy(info[:tableNameSize-1], name)
		if err := getsockopt(fd, l.level, soGetInfo, info); err != nil {
			return nil, false, os.NewSyscallError("getsockopt IPT_SO_GET_INFO", err)
		}
		hooks := bits.OnesCount32(binary.NativeEndian.Uint32(info[infoHooks:]))
		size := binary.NativeEndian.Uint32(info[infoBytes:])
		if size > maxLegacyBytes {
			return nil, false, fmt.Errorf("has %d bytes, at most %d are looked through", size, maxLegacyBytes)
		}
		b := make([]byte, entriesHeader+size)
		copy(b[:tableNameSize-1], name)
		binary.NativeEndian.PutUint32(b[tableNameSize:], size)
		err := getsockopt(fd, l.level, soGetEntries, b)
		if errors.Is(err, unix.EAGAIN) {
			continue // it changed meanwhile
		}
		if err != nil {
			return nil, false, os.NewSyscallError("getsockopt IPT_SO_GET_ENTRIES", err)
		}
		return b[entriesHeader:], int(binary.NativeEndian.Uint32(info[infoEntries:])) > hooks+1, nil
	}
	return nil, false, unix.EAGAIN
}

// redirects goes through the entries of a table.
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

// getsockopt has the kernel read b and fill it: x/sys has no wrapper for options
// that are told something.
func getsockopt(fd, level, option int, b []byte) error {
	n := uint32(len(b))
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), uintptr(level), uintptr(option),
		uintptr(unsafe.Pointer(&b[0])), uintptr(unsafe.Pointer(&n)), 0)
	if errno != 0 {
		return errno
	}
	return nil
}
