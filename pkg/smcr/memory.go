// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	"errors"
	"fmt"
	"math/bits"
	"net/netip"
	"slices"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr/linkgroup"
)

// maxArena is how many send buffers share one registered region at most: few
// regions, each an mmap and an entry in the device's table. The first region of a link
// group has one, each further one as many of its size as there are by then.
const maxArena = 8

// MemoryAccount is charged for the memory that a stack registers. Its methods are
// called while the stack's state is held: they must neither block nor call methods of
// the stack or its connections.
type MemoryAccount interface {
	// Take charges so many bytes, all or none, that a link group with a client needs: client is
	// its address, or the zero Addr where the peer is the server. An error says why there is not so
	// much, [ErrClientShare] that there is for others.
	Take(client netip.Addr, bytes int) error
	// Give takes a charge back.
	Give(client netip.Addr, bytes int)
	// Spare is how many bytes may be used for what only makes connections faster: what is left of the
	// part [GrowthShare] of the account.
	Spare() int
}

// ErrClientShare is what accounts refuse with if a client has all that it may have. Only what the client has itself
// can make place for more.
var ErrClientShare = errors.New("smcr: the client has its share")

// account is what a stack has registered and may register. It is guarded by the
// stack's turn.
type account struct {
	budget int
	bytes  int           // registered now, in whole pages
	page   int           // size of a page
	outer  MemoryAccount // nil: none
}

// errMemory means that the budget is used up, or for the reason outer the account that the
// stack was given.
type errMemory struct {
	want, have, budget int
	outer              error
}

func (e *errMemory) Error() string {
	if e.outer != nil {
		return fmt.Sprintf("registered memory: there are no %d more bytes in the account that the stack shares (in use here: %d): %v", e.want, e.have, e.outer)
	}
	return fmt.Sprintf("registered memory: %d more bytes would exceed the budget of %d (in use: %d)", e.want, e.budget, e.have)
}

func (e *errMemory) Unwrap() error { return e.outer }

// whole is what a region of n bytes takes: whole pages, which are of 64 KiB in some kernels for arm64.
func (a *account) whole(n int) int { return (n + a.page - 1) / a.page * a.page }

// take asks the account outer also where the stack's own budget is full: only that account knows whether the client
// has its share.
func (a *account) take(client netip.Addr, n int) error {
	if a.outer != nil {
		if err := a.outer.Take(client, n); err != nil {
			return &errMemory{want: n, have: a.bytes, outer: err}
		}
	}
	a.bytes += n
	if have := a.bytes - n; a.bytes > a.budget {
		a.give(client, n)
		return &errMemory{want: n, have: have, budget: a.budget}
	}
	return nil
}

// spare is how many bytes may be used for what only makes connections faster.
func (a *account) spare() int {
	n := a.budget/GrowthShare - a.bytes
	if a.outer != nil {
		n = min(n, a.outer.Spare())
	}
	return n
}

func (a *account) give(client netip.Addr, n int) {
	a.bytes -= n
	if a.outer != nil {
		a.outer.Give(client, n)
	}
}

// domain is the protection domain of a link group on a device. The domain goes with its last
// user.
type domain struct {
	pd    rdma.PD
	rnic  *rnic
	of    *memory
	users int // regions and queue pairs
}

func (d *domain) unref() {
	if d.users--; d.users > 0 {
		return
	}
	_ = d.pd.Close() // nothing is in the domain any more
	if d.rnic.domains--; d.rnic.domains == 0 {
		d.of.s.closeRetired()
	}
	if at := &d.of.domains[d.rnic.index]; *at == d {
		*at = nil
	}
}

// region is memory registered with the devices of a link group's domains.
type region struct {
	of     *memory
	mem    []byte
	access rdma.Access
	block  int                              // bytes of the blocks for which peers' writes are counted; 0: they are not
	forgot bool                             // what they wrote through a device that is gone is not known
	at     [linkgroup.MaxRNICs]registration // by number of the device
}

// registration is a region's registration with one device; zero: there is none.
type registration struct {
	mr     rdma.MR
	domain *domain
}

func (r *registration) close() error {
	if r.domain == nil {
		return nil
	}
	err := r.mr.Close()
	r.domain.unref()
	*r = registration{}
	return err
}

// sge addresses the region from an offset on, as a device does.
func (r *region) sge(n *rnic, off int) rdma.SGE {
	mr := r.at[n.index].mr
	return rdma.SGE{Addr: mr.Addr() + uint64(off), LKey: mr.LKey()}
}

// tokens name the region to the peer, by number of the device that it writes
// through.
func (r *region) tokens() []linkgroup.RToken {
	ts := make([]linkgroup.RToken, len(r.of.s.devices.list))
	for i := range ts {
		if mr := r.at[i].mr; mr != nil {
			ts[i] = linkgroup.RToken{RKey: mr.RKey(), VAddr: mr.Addr()}
		}
	}
	return ts
}

// close gives the region back.
func (r *region) close() error {
	var err error
	for i := range r.at {
		err = errors.Join(err, r.at[i].close())
	}
	if r.mem != nil {
		r.of.s.account.give(r.of.client, r.of.s.account.whole(len(r.mem)))
		r.mem = nil
	}
	return err
}

// sendBuffer is one connection's send ring.
type sendBuffer struct {
	*arena
	off int // in the arena's region
	mem []byte
}

// arena is a region cut into send buffers.
type arena struct {
	region *region
	of     *sendBuffers
	bufs   []sendBuffer // maxArena at most
	free   uint8        // bit set of bufs
	place  int          // in memory.arenas
	roomy  int          // place in sendBuffers.roomy, -1: it is full
}

func (a *arena) isFree() bool { return int(a.free) == 1<<len(a.bufs)-1 }

// memory hands out the registered memory of one link group, which no other group's
// queue pairs reach. It is guarded by the stack's turn.
type memory struct {
	s       *Stack
	client  netip.Addr                  // see contact.client
	domains [linkgroup.MaxRNICs]*domain // by number of the device; nil until it is used
	arenas  []*arena
	sizes   []*sendBuffers // the first size is that of the first connection
}

// sendBuffers are a link group's send buffers of one size.
type sendBuffers struct {
	size  int      // of a buffer
	roomy []*arena // those with free buffers
	nbufs int      // buffers
	nfree int      // buffers that nobody has
}

// newDomain makes a domain on a device without users.
func (m *memory) newDomain(r *rnic) (*domain, error) {
	pd, err := r.ctx.AllocPD()
	if err != nil {
		return nil, fmt.Errorf("protection domain on %s: %w", r.dev.Name(), err)
	}
	r.domains++
	return &domain{pd: pd, rnic: r, of: m}, nil
}

// use returns the domain on a device for one more user, who drops it.
func (m *memory) use(r *rnic) (*domain, error) {
	d := m.domains[r.index]
	if d == nil || d.rnic != r {
		var err error
		if d, err = m.newDomain(r); err != nil {
			return nil, err
		}
		m.domains[r.index] = d
	}
	d.users++
	return d, nil
}

// register maps a region and registers it with every device that lives: any
// of them may carry the links of tomorrow.
func (m *memory) register(size int, access rdma.Access) (*region, error) {
	return m.registerOn(size, access, m.s.devices.list...)
}

func (m *memory) registerOn(size int, access rdma.Access, on ...*rnic) (_ *region, err error) {
	charge := m.s.account.whole(size)
	if err := m.s.account.take(m.client, charge); err != nil {
		return nil, err
	}
	r := &region{of: m, access: access}
	var first rdma.MR
	for _, n := range on {
		if n.dead {
			continue
		}
		mr, err := m.registerWith(n, size, access, first)
		if err != nil {
			m.s.account.give(m.client, charge)
			return nil, errors.Join(fmt.Errorf("register %d bytes with %s: %w", size, n.dev.Name(), err), r.close())
		}
		r.at[n.index] = mr
		if first == nil {
			first = mr.mr
		}
	}
	if first == nil {
		m.s.account.give(m.client, charge)
		return nil, fmt.Errorf("register %d bytes: no device is left: %w", size, rdma.ErrNoResources)
	}
	r.mem = first.Bytes()[:size:size]
	return r, nil
}

// registerWith registers new memory with a device or, if of is given, the memory registered as that.
func (m *memory) registerWith(n *rnic, size int, access rdma.Access, of rdma.MR) (registration, error) {
	d, err := m.use(n)
	if err != nil {
		return registration{}, err
	}
	var mr rdma.MR
	if of == nil {
		mr, err = d.pd.AllocMR(size, access)
	} else {
		mr, err = d.pd.RegMR(of, 0, 0, access)
	}
	if err != nil {
		d.unref()
		return registration{}, err
	}
	return registration{mr, d}, nil
}

// takeSend returns a send buffer of this size or, if there is no more memory, of another
// size that is free.
func (m *memory) takeSend(size int) (*sendBuffer, error) {
	of := m.ofSize(size)
	if len(of.roomy) == 0 {
		err := m.grow(of)
		if i := slices.IndexFunc(m.sizes, (*sendBuffers).isRoomy); isShort(err) && i >= 0 {
			of, err = m.sizes[i], nil
		}
		if err != nil {
			return nil, err
		}
	}
	return of.take(), nil
}

// ofSize returns the send buffers of a size: there are few sizes.
func (m *memory) ofSize(size int) *sendBuffers {
	for _, o := range m.sizes {
		if o.size == size {
			return o
		}
	}
	o := &sendBuffers{size: size}
	m.sizes = append(m.sizes, o)
	return o
}

func (o *sendBuffers) isRoomy() bool { return len(o.roomy) > 0 }

// take returns a buffer; there is a free one.
func (o *sendBuffers) take() *sendBuffer {
	a := o.roomy[len(o.roomy)-1]
	i := bits.TrailingZeros8(a.free)
	a.free &^= 1 << i
	o.nfree--
	if a.free == 0 {
		o.roomy = dropPlace(o.roomy, a.roomy, func(o *arena, to int) { o.roomy = to })
		a.roomy = -1
	}
	return &a.bufs[i]
}

// grow adds as many send buffers as there are or, if there is not so much memory, one.
func (m *memory) grow(of *sendBuffers) error {
	n := min(max(of.nbufs, 1), maxArena)
	err := m.addArena(of, n)
	if isShort(err) && n > 1 {
		err = m.addArena(of, 1)
	}
	return err
}

// isShort reports whether an error says that the memory budget is used up.
func isShort(err error) bool {
	var short *errMemory
	return errors.As(err, &short)
}

func (m *memory) addArena(of *sendBuffers, n int) error {
	r, err := m.register(of.size*n, rdma.LocalWrite)
	if err != nil {
		return err
	}
	a := &arena{region: r, of: of, bufs: make([]sendBuffer, n), free: 1<<n - 1, place: len(m.arenas), roomy: len(of.roomy)}
	for i := range a.bufs {
		off := i * of.size
		a.bufs[i] = sendBuffer{arena: a, off: off, mem: r.mem[off : off+of.size : off+of.size]}
	}
	m.arenas = append(m.arenas, a)
	of.roomy = append(of.roomy, a)
	of.nbufs += n
	of.nfree += n
	return nil
}

// giveSend takes a send buffer back and unmaps an arena that nobody uses if
// others have as many free buffers.
func (m *memory) giveSend(b *sendBuffer) error {
	a, of := b.arena, b.of
	a.free |= 1 << (b.off / of.size)
	of.nfree++
	if a.roomy < 0 {
		a.roomy = len(of.roomy)
		of.roomy = append(of.roomy, a)
	}
	if !a.isFree() || of.nfree < 2*len(a.bufs) {
		return nil
	}
	return m.removeArena(a)
}

func (m *memory) removeArena(a *arena) error {
	of := a.of
	of.nbufs -= len(a.bufs)
	of.nfree -= len(a.bufs)
	of.roomy = dropPlace(of.roomy, a.roomy, func(o *arena, to int) { o.roomy = to })
	m.arenas = dropPlace(m.arenas, a.place, func(o *arena, to int) { o.place = to })
	return a.region.close()
}

// trim unmaps all arenas that nobody uses.
func (m *memory) trim() {
	for i := len(m.arenas) - 1; i >= 0; i-- { // removal moves those behind
		if a := m.arenas[i]; a.isFree() {
			_ = m.removeArena(a) // nothing uses it any more
		}
	}
}

// dropPlace removes the arena at a place of a list, to which the last one
// moves.
func dropPlace(list []*arena, place int, move func(*arena, int)) []*arena {
	last := len(list) - 1
	list[place] = list[last]
	move(list[place], place)
	list[last] = nil
	return list[:last]
}
