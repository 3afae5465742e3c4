// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/google/nftables"
	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/internal/undo"
)

// sysctl is a variable of a pod's namespace that the redirection sets. Its value from
// before is in the set "found" of the table, from before the change until after it was
// restored: so the value survives the agent, and ends with the namespace. The numbers are
// in that set, so they must not change.
type sysctl uint32

const (
	// fwmarkAccept makes accepted connections inherit the mark of their SYN, so
	// that the application's answers carry the mark of the agent's connection. It
	// covers IPv6 too.
	fwmarkAccept sysctl = 1
	// closeTimeout is for how many seconds connection tracking remembers a connection
	// that was reset, and where it was diverted to. It is set to 0, as otherwise:
	//
	//	0 s  application:40000 -> 10.0.0.2:80, diverted to the agent, which resets it
	//	1 s  agent:40000 -> 10.0.0.2:80, a new connection: the port is free again
	//	     tracking takes it for the old one and diverts it, to the agent itself
	//
	// The kernel hides the variable in a network namespace of another user namespace.
	closeTimeout sysctl = 2
	// looseTracking makes connection tracking also track connections whose SYN it has
	// not seen. It is switched off, so that connections whose SYN was excluded stay
	// untracked.
	looseTracking sysctl = 3
	// fwmarkReflect4 and fwmarkReflect6 make resets that the kernel sends without a connection's socket carry the mark of
	// what they answer. Otherwise they go to the client, which has no such connection, and never to the agent:
	//
	//	agent 10.0.0.1:61001 -> 10.0.0.2:80  SYN, but nobody listens any more; or bytes, long after the application has closed
	//	10.0.0.2:80 -> 10.0.0.1:61001        reset without mark: by eth0
	//
	// What comes from outside of the pod has no mark.
	fwmarkReflect4 sysctl = 4
	fwmarkReflect6 sysctl = 5
	// closeWaitTimeout is for how many seconds connection tracking remembers a connection that one end has half-closed, without
	// a packet of it. It is set to more than the two minutes between TCP's probes of a closed window, as otherwise, after a minute:
	//
	//	application:40000 -> 10.0.0.2:80, diverted  half-closed; it reads nothing for a while, so that its window is closed
	//	127.0.0.1:15001 -> application:40000        the agent's next probe: no longer 10.0.0.2:80, so that it is reset
	//
	// It is hidden where closeTimeout is.
	closeWaitTimeout sysctl = 6
)

var sysctls = [...]sysctl{fwmarkAccept, closeTimeout, looseTracking, fwmarkReflect4, fwmarkReflect6, closeWaitTimeout}

// path is the name below /proc/sys.
func (s sysctl) path() string {
	switch s {
	case fwmarkAccept:
		return "net/ipv4/tcp_fwmark_accept"
	case closeTimeout:
		return "net/netfilter/nf_conntrack_tcp_timeout_close"
	case looseTracking:
		return "net/netfilter/nf_conntrack_tcp_loose"
	case closeWaitTimeout:
		return "net/netfilter/nf_conntrack_tcp_timeout_close_wait"
	case fwmarkReflect4:
		return "net/ipv4/fwmark_reflect"
	case fwmarkReflect6:
		return "net/ipv6/fwmark_reflect"
	}
	return ""
}

// String is the name as administrators write it.
func (s sysctl) String() string { return strings.ReplaceAll(s.path(), "/", ".") }

// values are the value that the redirection sets, and the kernel's default. The default
// is used only after an agent of a version that kept no record of the value before.
func (s sysctl) values() (ours, usual uint32) {
	switch s {
	case fwmarkAccept, fwmarkReflect4, fwmarkReflect6:
		return 1, 0
	case closeTimeout:
		return 0, 10
	case looseTracking:
		return 0, 1
	case closeWaitTimeout:
		return 300, 60
	}
	return 0, 0
}

// read returns the value in the thread's namespace. The error is fs.ErrNotExist if the
// kernel does not have the variable, or hides it.
func (s sysctl) read() (uint32, error) {
	b, err := os.ReadFile("/proc/sys/" + s.path())
	if err != nil {
		return 0, err
	}
	v, err := strconv.ParseUint(strings.TrimSpace(string(b)), 10, 32)
	if err != nil {
		return 0, fmt.Errorf("read sysctl %v: %w", s, err)
	}
	return uint32(v), nil
}

func (s sysctl) write(v uint32) error {
	if err := setSysctl(s.path(), strconv.FormatUint(uint64(v), 10)); err != nil {
		return fmt.Errorf("set sysctl %v: %w", s, err)
	}
	return nil
}

// restore sets the variable in ns back to the value found, unless another program changed
// it since.
func (s sysctl) restore(ns *NetNS, found uint32) error {
	return ns.Do(func() error {
		now, err := s.read()
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if ours, _ := s.values(); err != nil || now != ours || now == found {
			return err
		}
		return s.write(found)
	})
}

// foundSize is the size of the set "found": it has room for variables of other versions.
const foundSize = 2 * len(sysctls)

// foundSet is the set of pairs of a sysctl and the value that was found.
func foundSet(t *nftables.Table) *nftables.Set {
	return &nftables.Set{
		Table: t, Name: setFound, Concatenation: true, Size: uint32(foundSize),
		KeyType: nftables.MustConcatSetType(nftables.TypeMark, nftables.TypeMark),
	}
}

// foundElements are the elements of a record, those of this version's sysctls first. The others are of another version, which needs
// them to restore its sysctls; what there is no room for, a program in the pod has put there.
func foundElements(found map[sysctl]uint32) []nftables.SetElement {
	others := slices.DeleteFunc(slices.Sorted(maps.Keys(found)), func(s sysctl) bool { return slices.Contains(sysctls[:], s) })
	var elems []nftables.SetElement
	for _, s := range slices.Concat(sysctls[:], others) {
		if v, ok := found[s]; ok && len(elems) < foundSize {
			elems = append(elems, nftables.SetElement{Key: append(nativeU32(uint32(s)), nativeU32(v)...)})
		}
	}
	return elems
}

// readFound returns the record in ns, nil if there is none.
func readFound(ns *NetNS) (found map[sysctl]uint32, err error) {
	err = ns.Do(func() error {
		return eachElement(foundSet(kubeTable()), func(e element) bool {
			if found == nil {
				found = map[sysctl]uint32{}
			}
			if len(e.key) == 8 {
				found[sysctl(binary.NativeEndian.Uint32(e.key))] = binary.NativeEndian.Uint32(e.key[4:])
			}
			return len(found) < foundSize
		})
	})
	if errors.Is(err, unix.ENOENT) {
		return nil, nil
	}
	if err == nil && found == nil {
		found = map[sysctl]uint32{} // an empty record
	}
	return found, err
}

// keepFound writes the record, and the table around it if there is none.
func (r *Redirect) keepFound() error {
	t, s := kubeTable(), foundSet(kubeTable())
	s.ID = 1
	r.conn.AddTable(t)
	if err := r.conn.AddSet(s, nil); err != nil {
		return err
	}
	r.conn.FlushSet(s)
	if err := r.conn.SetAddElements(s, foundElements(r.found)); err != nil {
		return err
	}
	return r.conn.Flush()
}

// learnFound reads the record of an earlier agent. If there is a table or rule of an earlier
// agent, but no record, the values from before are assumed to be the defaults.
func (r *Redirect) learnFound() error {
	found, err := readFound(r.ns)
	if r.found = found; err != nil || found != nil {
		return err
	}
	r.found = map[sysctl]uint32{}
	was, err := isThere(r.ns, r.conn)
	if err != nil || !was {
		return err
	}
	for _, s := range []sysctl{fwmarkAccept, closeTimeout} {
		err := r.ns.Do(func() error {
			now, err := s.read()
			if ours, usual := s.values(); err == nil && now == ours {
				r.found[s] = usual
			}
			return err
		})
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}

// take sets a variable, after it has stored the value from before. It reports whether the
// kernel has the variable.
func (r *Redirect) take(s sysctl) (there bool, err error) {
	ours, _ := s.values()
	var now uint32
	err = r.ns.Do(func() (err error) {
		now, err = s.read()
		return err
	})
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if _, known := r.found[s]; err == nil && !known {
		r.found[s] = now
		if err = r.keepFound(); err != nil {
			delete(r.found, s)
		}
	}
	if err != nil {
		return false, err
	}
	if now == ours {
		return true, nil
	}
	return true, r.ns.Do(func() error { return s.write(ours) })
}

// give restores a variable and removes the value from before from the record.
func (r *Redirect) give(s sysctl) error {
	found, ok := r.found[s]
	if !ok {
		return nil
	}
	if err := s.restore(r.ns, found); err != nil {
		return err
	}
	delete(r.found, s)
	return r.keepFound()
}

// takeStep is take as a step of a set-up. must says that the kernel has to have the
// variable. A variable that an earlier agent took is not restored when a later step fails.
func (r *Redirect) takeStep(s sysctl, must bool) undo.Step {
	var known bool
	return undo.Step{
		Name: "set sysctl " + s.String(),
		Do: func() error {
			_, known = r.found[s]
			there, err := r.take(s)
			if err == nil && !there && must {
				err = fs.ErrNotExist
			}
			return err
		},
		Undo: func() error {
			if found, ok := r.found[s]; ok && !known {
				return s.restore(r.ns, found)
			}
			return nil
		},
	}
}

// restoreAll restores the variables of the record. If found is nil, there is no record, and
// all variables get their defaults.
func restoreAll(ns *NetNS, found map[sysctl]uint32) error {
	if found == nil {
		found = map[sysctl]uint32{}
		for _, s := range []sysctl{fwmarkAccept, closeTimeout} {
			_, found[s] = s.values()
		}
	}
	var errs []error
	for _, s := range sysctls {
		if v, ok := found[s]; ok {
			errs = append(errs, s.restore(ns, v))
		}
	}
	return errors.Join(errs...)
}

// isThere tells whether an agent's table or rule is in ns.
func isThere(ns *NetNS, conn *nftConn) (bool, error) {
	if there, err := hasTable(conn); err != nil || there {
		return there, err
	}
	return hasRules(ns)
}

// hasTable tells whether the table is there. It does not list all tables: a program in the
// pod may have made very many.
func hasTable(conn *nftConn) (bool, error) {
	_, err := conn.ListTableOfFamily(tableName, nftables.TableFamilyINet)
	if errors.Is(err, unix.ENOENT) {
		return false, nil
	}
	return err == nil, err
}
