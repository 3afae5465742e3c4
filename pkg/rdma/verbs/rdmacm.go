// SPDX-License-Identifier: Apache-2.0

//go:build linux && cgo

package verbs

import (
	"context"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"reflect"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/cm"
)

// managerPath is where commands for the kernel's connection manager go. librdmacm writes the same ones. It is not used because it
// has a context of its own of every device, and accepts connections only with queue pairs that it made there; what it adds for
// those is nothing that a queue pair of ours needs: of iWARP the kernel does all.
const managerPath = "/dev/infiniband/rdma_cm"

// Commands, as include/uapi/rdma/rdma_user_cm.h has them.
const (
	cmCreate       = 0
	cmDestroy      = 1
	cmBind         = 2
	cmResolveAddr  = 3
	cmResolveRoute = 4
	cmConnect      = 6
	cmListen       = 7
	cmAccept       = 8
	cmReject       = 9
	cmDisconnect   = 10
	cmGetEvent     = 12
	cmQuery        = 19
)

// eventKind is what an event of the manager says.
type eventKind uint32

// Events.
const (
	eventAddrResolved    eventKind = 0
	eventAddrError       eventKind = 1
	eventRouteResolved   eventKind = 2
	eventRouteError      eventKind = 3
	eventConnectRequest  eventKind = 4
	eventConnectResponse eventKind = 5
	eventConnectError    eventKind = 6
	eventUnreachable     eventKind = 7
	eventRejected        eventKind = 8
	eventEstablished     eventKind = 9
	eventDisconnected    eventKind = 10
	eventDeviceRemoval   eventKind = 11
)

func (k eventKind) String() string {
	names := [...]string{
		"address resolved", "address not resolved", "route resolved", "no route", "connect request", "connect response", "connect error", "unreachable",
		"rejected", "established", "disconnected", "device removed",
	}
	if int(k) < len(names) {
		return names[k]
	}
	return fmt.Sprintf("event %d", uint32(k))
}

// Sizes and places in what the kernel and we give each other.
const (
	spaceTCP = 0x0106 // the ports are those of TCP
	typeRC   = 2      // reliable connections

	sockaddrBytes = 28  // of IPv6, in whose room those of IPv4 are
	eventBytes    = 400 // room for an event
	queryBytes    = 280

	paramBytes, paramData, paramDataLen, paramReads, paramValid = 272, 8, 264, 266, 271
	rejectBytes, rejectDataLen, rejectData                      = 264, 4, 8
	eventUID, eventID, eventType, eventStatus, eventParam       = 0, 8, 12, 16, 20
	queryGUID, querySource, queryDest, queryStorage             = 0, 16, 144, 128
	answerAt, destroyedAt                                       = 0, 1024 // in the page of answers
)

// manager is the kernel's connection manager, as a device uses it: one open file with an ID for each connection and listener, and
// a goroutine for their events.
type manager struct {
	guid uint64 // of the device's node, as the kernel has it in memory
	w    *waiter
	page []byte // where the kernel writes answers: no memory of Go's, which the kernel must not be told of
	wg   sync.WaitGroup

	// mu guards what follows, and the page. An event is taken from the kernel and given to its ID with mu held, and an ID is
	// forgotten with mu held before it is destroyed: so no event reaches another ID that has its number.
	mu      sync.Mutex
	ids     map[uint32]*cmID
	parents map[uint64]*cmID // listeners, by the name that we gave them
	names   uint64
	closed  bool
}

// cmID is a connection or a listener.
type cmID struct {
	m    *manager
	id   uint32
	name uint64

	events chan cmEvent  // what whoever connects waits for
	ended  chan struct{} // closed when the connection is over, or the listener
	end    sync.Once

	qp       atomic.Pointer[qp] // that is connected
	requests chan *request      // of a listener
	destroy  sync.Once

	// use is held for as long as the kernel has a command of the ID.
	use    sync.Mutex
	barred bool
}

// cmEvent is an event of the manager.
type cmEvent struct {
	kind   eventKind
	status int32
	data   []byte
}

// err says what an event that is no success means.
func (e *cmEvent) err() error {
	var why error = syscall.Errno(max(-e.status, e.status)) // some have it positive
	if e.status == 0 {
		why = errors.New("no reason")
	}
	if e.kind == eventRejected {
		return &cm.RejectError{PrivateData: e.data, Err: why}
	}
	return fmt.Errorf("%v: %w", e.kind, why)
}

// newManager opens the file.
func newManager(d *Device) (*manager, error) {
	guid, err := parseGUID(hostSysfs().text("class/infiniband", d.name, "node_guid"))
	if err != nil {
		return nil, err
	}
	fd, err := unix.Open(managerPath, unix.O_RDWR|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("%s (module rdma_ucm) must be readable and writable: %w", managerPath, err)
	}
	defer func() { _ = unix.Close(fd) }() // the waiter has its own
	m := &manager{guid: guid, ids: make(map[uint32]*cmID), parents: make(map[uint64]*cmID)}
	if m.page, err = unix.Mmap(-1, 0, os.Getpagesize(), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS); err != nil {
		return nil, fmt.Errorf("map memory for answers: %w", err)
	}
	if m.w, err = newWaiter(fd, managerPath); err != nil {
		return nil, errors.Join(err, unix.Munmap(m.page))
	}
	m.wg.Go(m.watch)
	return m, nil
}

// parseGUID reads a node's GUID as sysfs writes it: 0255:00ff:fe00:0001.
func parseGUID(s string) (uint64, error) {
	b, err := hex.DecodeString(strings.ReplaceAll(s, ":", ""))
	if err != nil || len(b) != 8 {
		return 0, fmt.Errorf("node GUID %q: %w", s, rdma.ErrInvalid)
	}
	return binary.NativeEndian.Uint64(b), nil
}

// close ends all that is left, and waits for the goroutines.
func (m *manager) close() error {
	m.mu.Lock()
	m.closed = true
	left := make([]*cmID, 0, len(m.ids))
	for _, i := range m.ids {
		left = append(left, i)
	}
	m.mu.Unlock()
	for _, i := range left {
		i.close()
	}
	err := m.w.close()
	m.wg.Wait()
	m.mu.Lock() // whoever has had an answer reads it with mu held
	defer m.mu.Unlock()
	return errors.Join(err, unix.Munmap(m.page))
}

// command has the kernel do something. It may block for as long as TCP takes to connect.
func (m *manager) command(cmd uint32, in []byte, out int) error {
	b := binary.NativeEndian.AppendUint32(nil, cmd)
	b = binary.NativeEndian.AppendUint16(b, uint16(len(in)))
	b = binary.NativeEndian.AppendUint16(b, uint16(out))
	b = append(b, in...)
	var failed error
	err := m.w.raw.Control(func(fd uintptr) {
		for {
			if _, failed = unix.Write(int(fd), b); !errors.Is(failed, unix.EINTR) {
				return
			}
		}
	})
	if err != nil {
		return rdma.ErrClosed
	}
	return failed
}

// answer is the address of a place in the page.
func (m *manager) answer(at int) []byte {
	return binary.NativeEndian.AppendUint64(nil, uint64(reflect.ValueOf(m.page).Pointer())+uint64(at))
}

func words(v ...uint32) (b []byte) {
	for _, w := range v {
		b = binary.NativeEndian.AppendUint32(b, w)
	}
	return b
}

// name returns a name that no ID has.
func (m *manager) name() uint64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.names++
	return m.names
}

// create makes an ID.
func (m *manager) create() (*cmID, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return nil, rdma.ErrClosed
	}
	m.names++
	b := binary.NativeEndian.AppendUint64(nil, m.names)
	b = binary.NativeEndian.AppendUint16(append(b, m.answer(answerAt)...), spaceTCP)
	if err := m.command(cmCreate, append(b, typeRC, 0, 0, 0, 0, 0), 4); err != nil {
		return nil, fmt.Errorf("make an ID of rdma_cm: %w", err)
	}
	return m.add(binary.NativeEndian.Uint32(m.page[answerAt:]), m.names), nil
}

// add takes an ID in; the caller has mu.
func (m *manager) add(id uint32, name uint64) *cmID {
	i := &cmID{m: m, id: id, name: name, events: make(chan cmEvent, eventsWaiting), ended: make(chan struct{})}
	m.ids[id] = i
	return i
}

// command has the kernel do something with the ID, unless it was barred.
func (i *cmID) command(cmd uint32, in []byte) error {
	i.use.Lock()
	defer i.use.Unlock()
	if i.barred {
		return rdma.ErrClosed
	}
	return i.m.command(cmd, in, 0)
}

// bar sees that there are no more commands of the ID, and waits for the end of the one that the kernel has. A command names the ID
// and the queue pair by numbers, which others have once these are gone:
//
//	Dial                         Close of the queue pair      another one is made
//	  its route is resolved
//	                               bar, destroy
//	                                                            with its number
//	  connect: ErrClosed
func (i *cmID) bar() {
	i.use.Lock()
	i.barred = true
	i.use.Unlock()
}

// close destroys the ID, which ends what it has, and waits until the kernel has no use of it: while it connects, that is
// when the peer has answered, or the kernel given up.
func (i *cmID) close() {
	i.destroy.Do(func() {
		i.bar()
		m := i.m
		m.mu.Lock()
		delete(m.ids, i.id)
		delete(m.parents, i.name)
		m.mu.Unlock()
		_ = m.command(cmDestroy, append(m.answer(destroyedAt), words(i.id, 0)...), 4) // it is there
		i.over()
	})
}

// over tells those who wait for the end.
func (i *cmID) over() { i.end.Do(func() { close(i.ended) }) }

// watch takes events until close.
func (m *manager) watch() {
	_ = m.w.wait(func(uintptr) bool {
		for {
			then, more := m.next()
			if then != nil {
				then()
			}
			if !more {
				return false // until there is one, or close
			}
		}
	})
}

// next takes an event and finds its ID. What is to be done without mu it returns.
func (m *manager) next() (then func(), more bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.command(cmGetEvent, m.answer(answerAt), eventBytes); err != nil {
		return nil, errors.Is(err, unix.EINTR)
	}
	word := func(at int) uint32 { return binary.NativeEndian.Uint32(m.page[answerAt+at:]) }
	e := cmEvent{kind: eventKind(word(eventType)), status: int32(word(eventStatus))}
	param := m.page[answerAt+eventParam:][:paramBytes]
	e.data = append(e.data, param[paramData:][:min(int(param[paramDataLen]), paramDataLen-paramData)]...)
	id := word(eventID)
	if e.kind == eventConnectRequest {
		i := m.add(id, 0)
		parent := m.parents[binary.NativeEndian.Uint64(m.page[answerAt+eventUID:])]
		local, remote, err := m.query(i)
		if parent == nil || err != nil {
			return i.close, true
		}
		return func() { parent.deliver(&request{id: i, data: e.data, local: local, remote: remote}) }, true
	}
	i := m.ids[id]
	if i == nil {
		return nil, true
	}
	return func() { i.handle(e) }, true
}

// deliver gives a listener a request. What it has no room for is rejected, which closing does.
func (i *cmID) deliver(r *request) {
	i.m.mu.Lock()
	_, listens := i.m.parents[i.name]
	if listens {
		select {
		case i.requests <- r:
		default:
			listens = false
		}
	}
	i.m.mu.Unlock()
	if !listens {
		r.id.close()
	}
}

// handle does what an event asks for.
func (i *cmID) handle(e cmEvent) {
	switch e.kind {
	case eventDisconnected:
		i.over()
		if q := i.qp.Load(); q != nil {
			q.disconnected()
		}
	case eventDeviceRemoval:
		i.over()
		i.m.wg.Go(i.close) // the kernel waits for that
	default:
		select {
		case i.events <- e:
		default: // nobody waits for that many
		}
	}
}

// await waits for the event that says that a step succeeded. One that came before the end of the connection counts.
func (i *cmID) await(ctx context.Context, want eventKind) (e cmEvent, err error) {
	select {
	case e = <-i.events:
	case <-i.ended:
		select {
		case e = <-i.events:
		default:
			return e, fmt.Errorf("await %v: %w", want, rdma.ErrClosed)
		}
	case <-ctx.Done():
		return e, context.Cause(ctx)
	}
	if e.kind != want || e.status != 0 {
		err = e.err()
	}
	return e, err
}

// query returns the addresses of an ID, and refuses one of another device. The caller has mu.
func (m *manager) query(i *cmID) (local, remote netip.AddrPort, err error) {
	if err := m.command(cmQuery, append(m.answer(answerAt), words(i.id, 0)...), queryBytes); err != nil {
		return local, remote, fmt.Errorf("ask rdma_cm for addresses: %w", err)
	}
	b := m.page[answerAt:][:queryBytes]
	local, remote = parseSockaddr(b[querySource:][:queryStorage]), parseSockaddr(b[queryDest:][:queryStorage])
	if got := binary.NativeEndian.Uint64(b[queryGUID:]); got != m.guid {
		return local, remote, fmt.Errorf("address %v belongs to another device of the node: %w", local.Addr(), rdma.ErrInvalid)
	}
	return local, remote, nil
}

func (i *cmID) addrs() (local, remote netip.AddrPort, err error) {
	i.m.mu.Lock()
	defer i.m.mu.Unlock()
	if i.m.ids[i.id] != i {
		return local, remote, rdma.ErrClosed
	}
	return i.m.query(i)
}

// appendSockaddr appends an address in the room of one of IPv6.
func appendSockaddr(b []byte, a netip.AddrPort) ([]byte, error) {
	n := len(b)
	ip := a.Addr().Unmap()
	if ip.Is4() {
		b = binary.NativeEndian.AppendUint16(b, unix.AF_INET)
		b = binary.BigEndian.AppendUint16(b, a.Port())
		b = append(b, ip.AsSlice()...)
		return append(b, make([]byte, n+sockaddrBytes-len(b))...), nil
	}
	zone := 0
	if ip.Zone() != "" {
		dev, err := net.InterfaceByName(ip.Zone())
		if err != nil {
			return b, fmt.Errorf("zone of %v: %w", ip, err)
		}
		zone = dev.Index
	}
	b = binary.NativeEndian.AppendUint16(b, unix.AF_INET6)
	b = binary.BigEndian.AppendUint16(b, a.Port())
	b = append(b, 0, 0, 0, 0)
	b = append(b, ip.AsSlice()...)
	return binary.NativeEndian.AppendUint32(b, uint32(zone)), nil
}

// parseSockaddr reads what the kernel wrote.
func parseSockaddr(b []byte) netip.AddrPort {
	port := binary.BigEndian.Uint16(b[2:])
	switch binary.NativeEndian.Uint16(b) {
	case unix.AF_INET:
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte(b[4:8])), port)
	case unix.AF_INET6:
		ip := netip.AddrFrom16([16]byte(b[8:24]))
		if i := binary.NativeEndian.Uint32(b[24:]); i != 0 && ip.IsLinkLocalUnicast() {
			if dev, err := net.InterfaceByIndex(int(i)); err == nil {
				ip = ip.WithZone(dev.Name)
			}
		}
		return netip.AddrPortFrom(ip, port)
	}
	return netip.AddrPort{}
}

// connParam says which queue pair is to be connected, and how.
func connParam(q *qp, o *cm.Options) ([]byte, error) {
	if len(o.PrivateData) > cm.MaxPrivateData {
		return nil, fmt.Errorf("%d bytes of private data, want at most %d: %w", len(o.PrivateData), cm.MaxPrivateData, rdma.ErrInvalid)
	}
	limits := &q.pd.ctx.dev.attr
	for _, r := range [][2]int{{o.ReadsServed, limits.MaxReadsServed}, {o.ReadsAsked, limits.MaxReadsAsked}} {
		if r[0] < 0 || r[0] > r[1] {
			return nil, fmt.Errorf("%d READs served, %d asked, of %d and %d: %w", o.ReadsServed, o.ReadsAsked, limits.MaxReadsServed, limits.MaxReadsAsked, rdma.ErrInvalid)
		}
	}
	b := make([]byte, paramBytes)
	binary.NativeEndian.PutUint32(b, uint32(q.num))
	b[paramDataLen] = byte(copy(b[paramData:], o.PrivateData))
	b[paramReads] = byte(reads(uint8(o.ReadsServed), min(streamReads, limits.MaxReadsServed)))
	b[paramReads+1] = byte(reads(uint8(o.ReadsAsked), min(streamReads, limits.MaxReadsAsked)))
	b[paramValid] = 1
	return b, nil
}
