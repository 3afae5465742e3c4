// SPDX-License-Identifier: Apache-2.0

//go:build linux && cgo

package verbs

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// Device is an RDMA device of the kernel, with one of its ports.
type Device struct {
	name   string
	port   uint8
	attr   rdma.DeviceAttr
	limits deviceLimits
	gid    rdma.GIDEntry // that was chosen; Index as of Open. Owned by watch while it runs
	link   int           // index of the GID's network interface; 0: not known
	why    string
	inline int
	class  uint8       // traffic class of paths without one
	soft   bool        // it is the kernel's soft RoCE
	siw    bool        // it is the kernel's software iWARP
	is     rdma.Device // what its contexts say they are of; itself, if nil
	lookUp func(indexes []int) (map[int]Interface, error)

	handle ibvContext // for queries and the port's events; owned by watch while it runs, nil after lost
	node   os.FileInfo
	stat   func() (os.FileInfo, error) // of what is at node's path by now
	async  *waiter
	wg     sync.WaitGroup

	now atomic.Pointer[portNow]
	qps atomic.Int64 // see QueuePairs

	vectors atomic.Uint32 // contexts that have one: see nextVector

	// fault makes a call of libibverbs fail in tests: see before.
	fault atomic.Pointer[func(call string) error]

	mu       sync.Mutex // guards what follows
	contexts map[*deviceContext]struct{}
	closed   bool
	gone     bool
}

// portNow is the port's state with its GID table, the chosen GID first. A port
// without that GID is down: no packet gets out of it.
type portNow struct {
	attr  rdma.PortAttr
	said  rdma.PortState // by the device, with or without the GID
	gids  []rdma.GIDEntry
	links map[string]int // indexes of the network interfaces of gids, by name
}

var _ rdma.Device = (*Device)(nil)

// Open opens a device and chooses its GID.
func Open(cfg Config) (*Device, error) {
	wrap := func(err error) error { return fmt.Errorf("open RDMA device %q: %w", cfg.Name, err) }
	if err := cfg.Validate(); err != nil {
		return nil, wrap(fmt.Errorf("%w: %w", rdma.ErrInvalid, err))
	}
	d := &Device{name: cfg.Name, class: cfg.TrafficClass, lookUp: cfg.Interfaces, contexts: make(map[*deviceContext]struct{})}
	if d.lookUp == nil {
		d.lookUp = InterfacesByIndex
	}
	var err error
	if d.handle, err = openNamed(cfg.Name); err != nil {
		return nil, wrap(openError(err))
	}
	if err := d.setUp(cfg); err != nil {
		if d.async != nil {
			_ = d.async.close()
		}
		_ = ibvClose(d.handle)
		return nil, wrap(err)
	}
	d.wg.Go(d.watch)
	return d, nil
}

// openNamed opens the device that has the name now. libibverbs goes on with the name
// that a device had when the process saw it first, also when it has another one.
func openNamed(name string) (ibvContext, error) {
	switch node, err := hostSysfs().node(name); {
	case err != nil:
		return nil, verbError(err)
	case node == "":
		return nil, syscall.ENODEV
	default:
		return ibvOpen(node)
	}
}

// openError says what to do when a device cannot be opened.
func openError(err error) error {
	switch {
	case errors.Is(err, os.ErrPermission):
		return fmt.Errorf("/dev/infiniband/uverbs* of the device must be readable and writable: %w", err)
	case errors.Is(err, os.ErrNotExist), isGone(err):
		names := "there is none"
		if all, e := Devices(); e == nil && len(all) > 0 {
			names = "there are"
			for _, i := range all {
				names += " " + i.Name
			}
		}
		return fmt.Errorf("no such device, or module ib_uverbs or its provider library is missing (%s): %w", names, err)
	}
	return err
}

// self is what the device's user knows it as.
func (d *Device) self() rdma.Device {
	if d.is != nil {
		return d.is
	}
	return d
}

// setUp learns what the device is and can do.
func (d *Device) setUp(cfg Config) error {
	if ibvIsRNIC(d.handle) {
		return fmt.Errorf("it speaks iWARP, which SMC-R cannot use; OpenIWARP is for it: %w", rdma.ErrNotSupported)
	}
	var err error
	if d.limits, err = ibvQueryDevice(d.handle); err != nil {
		return fmt.Errorf("query device: %w", verbError(err))
	}
	if err := d.limits.enough(); err != nil {
		return err
	}
	if d.port, err = d.choosePort(cfg.Port); err != nil {
		return err
	}
	n, err := d.query()
	if err != nil {
		return err
	}
	if d.gid, d.why, err = ChooseGID(n.gids, cfg.want()); err != nil {
		return fmt.Errorf("port %d: %w", d.port, err)
	}
	d.link = n.links[d.gid.NetDev]
	d.store(n)
	d.qps.Store(int64(d.limits.qps))
	d.inline = d.probeInline()
	d.attr = rdma.DeviceAttr{
		Provider:     "verbs",
		MaxQP:        d.limits.qps,
		MaxCQE:       d.limits.cqe,
		MaxMRBytes:   d.limits.mrBytes,
		MaxSGE:       min(d.limits.sge, maxSGE),
		MaxSendWR:    d.limits.wrs,
		MaxRecvWR:    d.limits.wrs,
		MaxInline:    d.inline,
		WriteWithImm: true,
		Solicited:    true,
		RDMARead:     d.limits.readsStarted > 0,

		MaxReadsServed: d.limits.readsServed, MaxReadsAsked: d.limits.readsStarted,
		PeerCompletes: true,
	}
	d.soft = d.driver() == "rxe" // see doc.go
	d.attr.LocalErrors, d.attr.ResponderEvents, d.attr.SolicitedErrors = !d.soft, !d.soft, !d.soft
	for _, g := range n.gids {
		if g.Type != rdma.GIDTypeUnknown && !slices.Contains(d.attr.GIDTypes, g.Type) {
			d.attr.GIDTypes = append(d.attr.GIDTypes, g.Type)
		}
	}
	return d.setUpWatch()
}

// setUpWatch makes what watch needs.
func (d *Device) setUpWatch() (err error) {
	path := nodePath(d.handle)
	d.stat = func() (os.FileInfo, error) { return os.Stat(path) }
	if d.node, err = d.stat(); err != nil {
		return fmt.Errorf("look at the device's node: %w", err)
	}
	d.async, err = newWaiter(ibvAsyncFD(d.handle), d.name)
	return err
}

// enough refuses a device that would refuse every queue pair: [pd.CreateQP] asks for receives of recvSGE pieces.
func (l deviceLimits) enough() error {
	if l.sge < recvSGE {
		return fmt.Errorf("its work requests have at most %d SGE, receives need %d: %w", l.sge, recvSGE, rdma.ErrNotSupported)
	}
	return nil
}

func nodePath(c ibvContext) string { return "/sys/" + classVerbs + "/" + ibvNode(c) }

func (d *Device) driver() string { return hostSysfs().driver(d.name) }

// choosePort checks the port that is configured, or finds one.
func (d *Device) choosePort(want uint8) (uint8, error) {
	if int(want) > d.limits.ports {
		return 0, fmt.Errorf("port %d: the device has %d: %w", want, d.limits.ports, rdma.ErrInvalid)
	}
	var found uint8
	for n := uint8(1); int(n) <= min(d.limits.ports, maxPorts); n++ {
		if want != 0 && n != want {
			continue
		}
		p, err := ibvQueryPort(d.handle, n)
		switch {
		case err != nil:
			return 0, fmt.Errorf("query port %d: %w", n, verbError(err))
		case !p.ethernet && want != 0:
			return 0, fmt.Errorf("port %d is not Ethernet: SMC-R needs RoCE: %w", n, rdma.ErrNotSupported)
		case !p.ethernet:
		case p.attr.State == rdma.PortActive:
			return n, nil
		case found == 0:
			found = n
		}
	}
	if found == 0 {
		return 0, fmt.Errorf("no port is Ethernet: SMC-R needs RoCE: %w", rdma.ErrNotSupported)
	}
	return found, nil
}

// probeInline finds out how many bytes a queue pair takes inline: no query
// tells.
func (d *Device) probeInline() int {
	pd, err := ibvAllocPD(d.handle)
	if err != nil {
		return 0
	}
	defer func() { _ = ibvDeallocPD(pd) }()
	cq, err := ibvCreateCQ(d.handle, 2, 0, 0)
	if err != nil {
		return 0
	}
	defer func() { _ = cq.free() }()
	for n := wantInline; n > 0; n -= 16 {
		cfg := rdma.QPConfig{MaxSendWR: 1, MaxRecvWR: 1, MaxSGE: min(d.limits.sge, maxSGE)}
		if qp, err := ibvCreateQP(pd, cq, cq, cfg, n); err == nil {
			_ = qp.destroy()
			return n
		}
	}
	return 0
}

// query asks the device about its port.
func (d *Device) query() (*portNow, error) {
	p, err := ibvQueryPort(d.handle, d.port)
	if err != nil {
		return nil, fmt.Errorf("query port %d: %w", d.port, verbError(err))
	}
	if d.is != nil { // iWARP, whose connections are named by addresses
		return &portNow{attr: p.attr, said: p.attr.State, gids: []rdma.GIDEntry{d.gid}}, nil
	}
	gids, interfaces, err := ibvQueryGIDs(d.handle, d.port, p.gids*max(d.limits.ports, 1))
	if err != nil {
		return nil, fmt.Errorf("query GIDs of port %d: %w", d.port, verbError(err))
	}
	if err := describeRows(gids, interfaces, d.lookUp); err != nil {
		return nil, fmt.Errorf("port %d: %w", d.port, err)
	}
	links := make(map[string]int)
	for i, g := range gids {
		if g.NetDev != "" {
			links[g.NetDev] = interfaces[i]
		}
	}
	return &portNow{attr: p.attr, said: p.attr.State, gids: gids, links: links}, nil
}

// store makes n what Port and GIDs answer.
func (d *Device) store(n *portNow) {
	for name, index := range n.links {
		if index == d.link { // the interface may have another name than before
			d.gid.NetDev = name
		}
	}
	if index, ok := n.links[d.gid.NetDev]; ok { // or have been made again
		d.link = index
	}
	// The chosen GID first, then that of its address with another type.
	slices.SortStableFunc(n.gids, func(a, b rdma.GIDEntry) int { return cmp.Compare(d.rank(b), d.rank(a)) })
	if len(n.gids) == 0 || d.rank(n.gids[0]) < isChosen {
		n.attr.State = rdma.PortDown
	}
	d.now.Store(n)
}

const isChosen = 2

// rank is isChosen for the chosen GID, and 1 for another one of its address.
func (d *Device) rank(g rdma.GIDEntry) int {
	switch {
	case g.GID != d.gid.GID || g.NetDev != d.gid.NetDev:
		return 0
	case g.Type != d.gid.Type:
		return 1
	}
	return isChosen
}

// Name implements [rdma.Device].
func (d *Device) Name() string { return d.name }

// PortNum is the number of the port that is used.
func (d *Device) PortNum() uint8 { return d.port }

// GIDChoice says which GID is used and why.
func (d *Device) GIDChoice() string { return d.why }

// Attr implements [rdma.Device].
func (d *Device) Attr() rdma.DeviceAttr { return d.attr }

// QueuePairs is the most queue pairs that the device has said it has since Open, when
// that was Attr's MaxQP. Some drivers, irdma among them, say how many are left, so that
// those of other processes were missing.
func (d *Device) QueuePairs() int { return int(d.qps.Load()) }

// Port implements [rdma.Device].
func (d *Device) Port() rdma.PortAttr { return d.now.Load().attr }

// GIDs implements [rdma.Device]; the first one is the one that was chosen.
func (d *Device) GIDs() []rdma.GIDEntry { return slices.Clone(d.now.Load().gids) }

// Open implements [rdma.Device].
func (d *Device) Open() (rdma.Context, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed || d.gone {
		return nil, fmt.Errorf("open context of %q: %w", d.name, rdma.ErrClosed)
	}
	c, err := newContext(d)
	if err != nil {
		return nil, fmt.Errorf("open context of %q: %w", d.name, err)
	}
	d.contexts[c] = struct{}{}
	return c, nil
}

// Close ends the device with all its contexts and waits for its goroutines.
// Open contexts see EventDeviceFatal first; their memory stays mapped until
// they are closed.
func (d *Device) Close() error {
	d.mu.Lock()
	if d.closed {
		d.mu.Unlock()
		d.wg.Wait()
		return nil
	}
	d.closed = true
	d.mu.Unlock()
	d.end(rdma.ErrClosed)
	_ = d.async.close() // lost may have been faster
	d.wg.Wait()
	if d.handle == nil {
		return nil
	}
	if err := ibvClose(d.handle); err != nil {
		return fmt.Errorf("close RDMA device %q: %w", d.name, verbError(err))
	}
	return nil
}

// end ends all contexts.
func (d *Device) end(why error) {
	d.mu.Lock()
	open := make([]*deviceContext, 0, len(d.contexts))
	for c := range d.contexts {
		open = append(open, c)
	}
	d.mu.Unlock()
	for _, c := range open {
		c.events.Post(rdma.AsyncEvent{Kind: rdma.EventDeviceFatal, Err: why})
		_ = c.shut() // it is gone either way
	}
}

// watch follows the port and the device until Close.
func (d *Device) watch() {
	asked := time.Now()
	counted := asked
	for {
		var ev asyncEvent
		var err error
		if d.async.until(time.Now().Add(goneInterval)) != nil {
			return // closed
		}
		waited := d.async.wait(func(uintptr) bool {
			ev, err = ibvAsync(d.handle)
			return !isAgain(err)
		})
		switch {
		case errors.Is(waited, os.ErrDeadlineExceeded):
			if !d.there() {
				d.lost(errors.New("it was removed"))
				return
			}
			if time.Since(asked) >= askInterval {
				d.ask()
				asked = time.Now()
			}
			if time.Since(counted) >= limitsInterval {
				d.countQPs()
				counted = time.Now()
			}
		case waited != nil:
			return // closed
		case err != nil:
			d.lost(fmt.Errorf("read its events: %w", err))
			return
		case ev.kind == asyncGone:
			d.lost(errors.New(ev.name))
			return
		case ev.kind == asyncPort && ev.port == d.port:
			d.refresh()
		}
	}
}

// there reports whether the device is the one that was opened. A look that fails for another reason, as for lack
// of memory, says nothing of the device.
func (d *Device) there() bool {
	now, err := d.stat()
	if err != nil {
		return !errors.Is(err, syscall.ENOENT) && !errors.Is(err, syscall.ENOTDIR) && !errors.Is(err, syscall.ENODEV)
	}
	return os.SameFile(now, d.node)
}

// lost ends everything of a device that is gone, so that its driver, which may
// wait for that, can go too.
func (d *Device) lost(why error) {
	d.mu.Lock()
	d.gone = true
	d.mu.Unlock()
	n := *d.now.Load()
	n.attr.State = rdma.PortDown
	d.now.Store(&n)
	d.end(fmt.Errorf("RDMA device %s: %w: %w", d.name, rdma.ErrClosed, why))
	_ = d.async.close()
	_ = ibvClose(d.handle) // what it returns of a device that is gone says nothing
	d.handle = nil
}

// refresh looks at the port again and tells the contexts if it changed.
func (d *Device) refresh() {
	n, err := d.query()
	if err != nil {
		return // the next event, or the device's end, tells more
	}
	before := d.now.Load()
	d.store(n)
	if !slices.Equal(n.gids, before.gids) {
		d.tell(rdma.EventGIDChange)
	}
	if n.attr.State != before.attr.State {
		kind := rdma.EventPortDown
		if n.attr.State == rdma.PortActive {
			kind = rdma.EventPortActive
		}
		d.tell(kind)
	}
}

// ask asks for the port's state and MTU, of which events may not tell: some drivers
// have one for a network interface that is set down but none for a cable that is
// pulled, or none at all, and the kernel derives the MTU from that of the interface
// and tells nobody. Queue pairs that are connected keep the MTU that they have;
// those made from now on ask Port.
func (d *Device) ask() {
	p, err := ibvQueryPort(d.handle, d.port)
	before := d.now.Load()
	switch {
	case err != nil: // the device's end tells more
	case p.attr.State != before.said:
		d.refresh()
	case p.attr.ActiveMTU != before.attr.ActiveMTU:
		n := *before
		n.attr.ActiveMTU = p.attr.ActiveMTU
		d.now.Store(&n)
	}
}

// countQPs asks how many queue pairs the device has.
func (d *Device) countQPs() {
	if l, err := ibvQueryDevice(d.handle); err == nil && int64(l.qps) > d.qps.Load() {
		d.qps.Store(int64(l.qps))
	}
}

// tell posts a port event to all contexts.
func (d *Device) tell(kind rdma.EventKind) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for c := range d.contexts {
		c.events.Post(rdma.AsyncEvent{Kind: kind})
	}
}

// nextVector is the interrupt of the completions of the next context, of n: each has its
// own processor, and the pods' completions are to keep all of them busy. The queues of
// one context have the same, as they work for one user.
func (d *Device) nextVector(n int) int {
	return int((d.vectors.Add(1) - 1) % uint32(max(n, 1)))
}

// before is called ahead of the calls of libibverbs that take resources, and of some that give them back.
func (d *Device) before(call string) error {
	if f := d.fault.Load(); f != nil {
		return (*f)(call)
	}
	return nil
}
