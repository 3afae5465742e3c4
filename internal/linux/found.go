// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/google/nftables"
)

// sysctl is a variable of a pod's namespace that the redirection sets. What it
// was before is kept in the set "found" of the table, from before the change
// until after it is taken back: it survives the agent, and ends with the
// namespace. The numbers stand in that set, so they do not change.
type sysctl uint32

const (
	// fwmarkAccept makes accepted connections inherit the mark of their SYN, so
	// that the application's answers carry the mark of the agent's connection. It
	// covers IPv6 too.
	fwmarkAccept sysctl = 1
	// closeTimeout is for how many seconds connection tracking remembers a
	// connection that was reset, and where it was diverted to. When a diverted one
	// is reset by the agent, its port is free at once; a connection of the agent's
	// to the same destination that gets the port would then be taken for the old one
	// and be diverted too, to the agent itself. So nothing is remembered. Kernels
	// hide the variable in the namespaces of users' own.
	closeTimeout sysctl = 2
	// looseTracking makes connection tracking take up connections in their middle.
	// Those whose SYN was kept from it are to stay unknown.
	looseTracking sysctl = 3
)

var sysctls = [...]sysctl{fwmarkAccept, closeTimeout, looseTracking}

// path is the name below /proc/sys.
func (s sysctl) path() string {
	switch s {
	case fwmarkAccept:
		return "net/ipv4/tcp_fwmark_accept"
	case closeTimeout:
		return "net/netfilter/nf_conntrack_tcp_timeout_close"
	case looseTracking:
		return "net/netfilter/nf_conntrack_tcp_loose"
	}
	return ""
}

// String is the name as administrators write it.
func (s sysctl) String() string { return strings.ReplaceAll(s.path(), "/", ".") }

// values are what the redirection sets, and the kernel's default. The default
// counts only where an agent that kept no record was.
func (s sysctl) values() (ours, usual uint32) {
	switch s {
	case fwmarkAccept:
		return 1, 0
	case closeTimeout:
		return 0, 10
	case looseTracking:
		return 0, 1
	}
	return 0, 0
}

// read returns the value in the thread's namespace. The error is fs.ErrNotExist
// if the kernel does not have or show it.
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

// restore sets it back in ns to what was found, unless somebody else changed it.
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

// foundSet is the set of pairs of a sysctl and the value that was found.
func foundSet(t *nftables.Table) *nftables.Set {
	return &nftables.Set{
		Table: t, Name: setFound, Concatenation: true, Size: 2 * uint32(len(sysctls)),
		KeyType: nftables.MustConcatSetType(nftables.TypeMark, nftables.TypeMark),
	}
}

func foundElements(found map[sysctl]uint32) []nftables.SetElement {
	var elems []nftables.SetElement
	for _, s := range sysctls {
		if v, ok := found[s]; ok {
			elems = append(elems, nftables.SetElement{Key: append(nativeU32(uint32(s)), nativeU32(v)...)})
		}
	}
	return elems
}

// readFound returns the record in the namespace of conn, nil if there is none.
func readFound(conn *nftables.Conn) (map[sysctl]uint32, error) {
	there, err := hasTable(conn)
	if err != nil || !there {
		return nil, err
	}
	sets, err := conn.GetSets(kubeTable())
	if err != nil || !slices.ContainsFunc(sets, func(s *nftables.Set) bool { return s.Name == setFound }) {
		return nil, err
	}
	elems, err := conn.GetSetElements(foundSet(kubeTable()))
	if err != nil {
		return nil, err
	}
	found := map[sysctl]uint32{}
	for _, e := range elems {
		if len(e.Key) == 8 {
			found[sysctl(binary.NativeEndian.Uint32(e.Key))] = binary.NativeEndian.Uint32(e.Key[4:])
		}
	}
	return found, nil
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

// learnFound reads what an earlier agent found. One that kept no record found the
// defaults, if anything of it is there.
func (r *Redirect) learnFound() error {
	found, err := readFound(r.conn)
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

// take sets a variable, after it has kept what it was. It reports whether the
// kernel has it.
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

// give sets a variable back and forgets what it was.
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

// takeStep is take as a step, of a variable that the kernel must have or may
// have. What an earlier agent took stays when a later step fails.
func (r *Redirect) takeStep(s sysctl, must bool) Step {
	var known bool
	return Step{
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

// restoreAll sets back what the record says, or the defaults after an agent that
// kept none: nil.
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
func isThere(ns *NetNS, conn *nftables.Conn) (bool, error) {
	if there, err := hasTable(conn); err != nil || there {
		return there, err
	}
	return hasRules(ns)
}

func hasTable(conn *nftables.Conn) (bool, error) {
	tables, err := conn.ListTablesOfFamily(nftables.TableFamilyINet)
	return slices.ContainsFunc(tables, func(t *nftables.Table) bool { return t.Name == tableName }), err
}
