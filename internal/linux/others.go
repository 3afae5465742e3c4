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
	"github.com/google/nftables/expr"
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
	// Confused says what rules do that treats the agent's packets otherwise than those of the program for
	// which it sends them, or that changes the marks by which the redirection steers packets, or keeps packets from
	// it that are not tracked, and where.
	Confused string
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
			program, maxDumpEntries, maxDumpBytes>>20, maxDumpTime), redirects)
	case err != nil:
		why := fmt.Sprintf("rules of %s cannot be read: %v", program, err)
		if o.Unknown != "" {
			why = o.Unknown + "; " + why
		}
		o.Unknown = why
		o.note("rules that cannot be read", 0)
	}
}

// effect is what a rule does, as far as it matters to the redirection.
type effect uint8

// Effects.
const (
	redirects effect = 1 << iota // changes where a packet goes
	owns                         // matches the user, group or cgroup of a packet's program
	remarks                      // changes the mark of a packet
	untracks                     // excludes a packet from connection tracking
)

// note notes a rule of another program, if it is the first of its kind.
func (o *Others) note(where string, does effect) {
	if o.Rules == "" {
		o.Rules = where
	}
	if does&redirects != 0 && o.Redirector == "" {
		o.Redirector = where
	}
	if o.Confused != "" {
		return
	}
	switch {
	case does&owns != 0:
		o.Confused = "match the owner of packets: " + where
	case does&remarks != 0:
		o.Confused = "change the marks of packets: " + where
	case does&untracks != 0:
		o.Confused = "exclude packets from connection tracking: " + where
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
	hooked := map[nftables.Table]effect{} // what rules of a table can do in its chains
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

// effectsAt are those that matter in chains at a hook. The owner of a packet that came is that of the socket that will have it.
func effectsAt(hook nftables.ChainHook) effect {
	switch hook {
	case *nftables.ChainHookOutput:
		return redirects | owns | remarks | untracks
	case *nftables.ChainHookPrerouting: // what comes from the network is diverted without tracking
		return redirects | owns | remarks
	case *nftables.ChainHookPostrouting: // packets over loopback keep their mark
		return owns | remarks
	case *nftables.ChainHookInput:
		return owns
	}
	return 0
}

// findChains adds what the rules of tables can do in their chains.
func (o *Others) findChains(family nftables.TableFamily, left *allowance, hooked map[nftables.Table]effect) error {
	return eachNft(unix.NFT_MSG_GETCHAIN, family, left, func(ad *netlink.AttributeDecoder) {
		t, name, can, rules := nftables.Table{Family: family}, "", effect(0), uint32(0)
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
							can = effectsAt(nftables.ChainHook(h.Uint32()))
						}
					}
					return nil
				})
			}
		}
		switch {
		case family == nftables.TableFamilyINet && t.Name == tableName:
			o.Untracked = o.Untracked || name == chainPlainOut && rules > 0
		default:
			hooked[t] |= can
		}
	}, nil)
}

// findRules reads the rules of other programs until one redirects.
func (o *Others) findRules(family nftables.TableFamily, left *allowance, hooked map[nftables.Table]effect) error {
	return eachNft(unix.NFT_MSG_GETRULE, family, left, func(ad *netlink.AttributeDecoder) {
		r := foreignRule{table: nftables.Table{Family: family}}
		r.parse(ad)
		own := family == nftables.TableFamilyINet && r.table.Name == tableName
		if does := r.does & hooked[r.table]; ad.Err() == nil && !own && (does != 0 || o.Rules == "") {
			o.note(fmt.Sprintf("nftables table %s %s, chain %s", familyWord(family), r.table.Name, r.chain), does)
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
	table nftables.Table
	chain string
	does  effect
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
						r.does |= effectOf(e)
						return nil
					})
				}
				return nil
			})
		}
	}
}

// effectOf is what an expression does.
func effectOf(e *netlink.AttributeDecoder) (does effect) {
	e.ByteOrder = binary.BigEndian
	name := ""
	for e.Next() {
		switch e.Type() {
		case unix.NFTA_EXPR_NAME:
			switch name = e.String(); name {
			case "redir", "tproxy":
				does = redirects
			case "notrack":
				does = untracks
			}
		case unix.NFTA_EXPR_DATA:
			e.Nested(func(d *netlink.AttributeDecoder) error {
				d.ByteOrder = binary.BigEndian
				does |= effectOfData(name, d)
				return nil
			})
		}
	}
	return does
}

// effectOfData is what an expression of this name does by its attributes: nat of the destination, a match on the
// owner, a mark that is set, or a match or target of iptables that does one of these.
func effectOfData(name string, d *netlink.AttributeDecoder) (does effect) {
	key, sets := uint32(0), false
	target, info := "", []byte(nil)
	for d.Next() {
		switch t := d.Type(); {
		case name == "nat" && t == unix.NFTA_NAT_TYPE && d.Uint32() == unix.NFT_NAT_DNAT:
			does = redirects
		case name == "target" && t == unix.NFTA_TARGET_NAME:
			target = d.String()
		case name == "target" && t == unix.NFTA_TARGET_INFO:
			info = d.Bytes()
		case name == "match" && t == unix.NFTA_MATCH_NAME:
			does = effectOfMatch(d.String())
		case name == "socket" && t == nftaSocketKey && d.Uint32() == uint32(expr.SocketKeyCgroupv2):
			does = owns
		case name == "meta" && t == unix.NFTA_META_KEY:
			key = d.Uint32()
		case name == "meta" && t == unix.NFTA_META_SREG:
			sets = true
		}
	}
	switch name {
	case "meta":
		does = effectOfMeta(key, sets)
	case "target":
		does = effectOfTarget(target, info)
	}
	return does
}

// nftaSocketKey is NFTA_SOCKET_KEY, which x/sys lacks.
const nftaSocketKey = 1

func effectOfMeta(key uint32, sets bool) effect {
	switch {
	case sets && key == unix.NFT_META_MARK:
		return remarks
	case !sets && (key == unix.NFT_META_SKUID || key == unix.NFT_META_SKGID || key == unix.NFT_META_CGROUP):
		return owns
	}
	return 0
}

// effectOfTarget is what a target of iptables does. Each revision of struct xt_ct_target_info, the data of target CT, begins with its
// flags, of 16 bits.
func effectOfTarget(name string, info []byte) effect {
	const notrack = 1 << 0 // XT_CT_NOTRACK
	switch name {
	case "NOTRACK":
		return untracks
	case "CT":
		if len(info) >= 2 && binary.NativeEndian.Uint16(info)&notrack != 0 {
			return untracks
		}
	case "REDIRECT", "DNAT", "TPROXY", "NETMAP":
		return redirects
	case "MARK", "CONNMARK":
		return remarks
	}
	return 0
}

// effectOfMatch is what a match of iptables does.
func effectOfMatch(name string) effect {
	if name == "owner" || name == "cgroup" {
		return owns
	}
	return 0
}

// legacy is one of the two iptables with tables of their own in the kernel, which
// nftables does not show. The offsets are those of struct ipt_entry and
// ip6t_entry, behind which an entry's matches follow.
type legacy struct {
	program, names string // names is the file with the names of the existing tables
	domain, level  int
	target, next   int
	matches        int
}

var legacies = [...]legacy{
	{"iptables", "/proc/thread-self/net/ip_tables_names", unix.AF_INET, unix.SOL_IP, 88, 90, 112},
	{"ip6tables", "/proc/thread-self/net/ip6_tables_names", unix.AF_INET6, unix.SOL_IPV6, 140, 142, 168},
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
	// struct xt_entry_target and xt_entry_match: its size, its name, and its revision; the data are behind that.
	targetName, targetNameSize, targetData = 2, 29, 32
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
			o.note(fmt.Sprintf("%s table %s", l.program, name), l.effect(entries))
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

// effect is what the entries of a table do.
func (l legacy) effect(b []byte) (does effect) {
	const head = targetName + targetNameSize
	for len(b) > l.next+2 {
		target, next := int(binary.NativeEndian.Uint16(b[l.target:])), int(binary.NativeEndian.Uint16(b[l.next:]))
		if next <= l.next || next > len(b) || target+head > next {
			break
		}
		for m := l.matches; m+head <= target; {
			does |= effectOfMatch(extensionName(b[m:]))
			size := int(binary.NativeEndian.Uint16(b[m:]))
			if size < head {
				break
			}
			m += size
		}
		does |= effectOfTarget(extensionName(b[target:]), b[min(target+targetData, next):next])
		b = b[next:]
	}
	return does
}

// extensionName is the name in a match or target of iptables.
func extensionName(b []byte) string {
	name, _, _ := bytes.Cut(b[targetName:targetName+targetNameSize], []byte{0})
	return string(name)
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
