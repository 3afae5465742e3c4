// SPDX-License-Identifier: Apache-2.0

package sdp

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"slices"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/cm"
	"github.com/smcr-io/kube-smcr/pkg/rdma/softiwarp"
	"github.com/smcr-io/kube-smcr/pkg/sdp/bsdh"
	"github.com/smcr-io/kube-smcr/pkg/sdp/socket"
)

// Config describes a [Stack]. Zero values mean the defaults.
type Config struct {
	// Device carries the connections: one of softiwarp; an iWARP adapter, which is a [cm.Device]; or one with RoCE v2, which the
	// draft does not know (see the package comment).
	Device rdma.Device
	// Layout says how the fields of some headers lie, of which the draft can be read in two ways. It is not negotiated: both peers must
	// have the same.
	Layout bsdh.Layout

	RecvBuffers    int // receive buffers of a connection; 0: socket.DefaultRecvBuffers
	RecvBufferSize int // size of each, in bytes; 0: socket.DefaultRecvBytes
	// MaxRecvBufferSize is the largest size, in bytes, that the peer may ask for (§10.6); 0: the size does not change.
	MaxRecvBufferSize int
	SendSlots         int // messages under way at a time, of up to RecvBufferSize bytes each; 0: DefaultSendSlots
	MaxAdverts        int // Buffers that the peer may have advertised at a time; 0: socket.DefaultMaxAdverts
	// ZcopySize is the size, in bytes, above which WriteBuffer and ReadBuffer use RDMA; 0:
	// socket.DefaultZcopyBytes; socket.NoZcopy: never.
	ZcopySize uint32

	// HelloInRequest has a softiwarp device set connections up as adapters do that open their TCP connections themselves: Hello goes
	// in the MPA Request. The peer must have HelloInRequest too, or be such an adapter. Stack.Client and Stack.Server fail then, with
	// rdma.ErrNotSupported.
	HelloInRequest bool

	// NoCRC leaves out the CRCs of iWARP if the peer wants to, too.
	NoCRC bool
	// MaxULPDU is the most bytes of iWARP that one FPDU carries; 0: what fits a segment of TCP. Two peers in software are faster
	// with iwarp.MaxOwnULPDU.
	MaxULPDU int
	// SetupTimeout bounds the set-up of a connection; 0: DefaultSetupTimeout.
	SetupTimeout time.Duration
	// SuspendTimeout bounds a suspension, of this side or the peer, until the peers are connected again; 0: socket.DefaultSuspendTimeout.
	SuspendTimeout time.Duration

	Hooks Hooks
}

// Hooks tell of what no caller of the stack sees. They are called in goroutines of the stack and must not block.
type Hooks struct {
	// Refused tells of a connection that a [Listener] did not set up.
	Refused func(peer net.Addr, err error)
	// Ended tells of the end of an established connection; err is nil if both streams ended in order.
	Ended func(c *Conn, err error)
}

// Validate reports all that is wrong with c.
func (c *Config) Validate() error {
	var errs []error
	if c.Device == nil {
		errs = append(errs, errors.New("no device"))
	} else if err := checkDevice(c.Device); err != nil {
		errs = append(errs, fmt.Errorf("device %q: %w", c.Device.Name(), err))
	}
	// As what the machine takes they have no more than 32 bits.
	if most := uint64(bsdh.MaxBytes); uint64(c.RecvBufferSize) > most || uint64(c.MaxRecvBufferSize) > most {
		errs = append(errs, fmt.Errorf("receive buffers of %d bytes, and of %d if the peer asks, want at most %d", c.RecvBufferSize, c.MaxRecvBufferSize, most))
	}
	if c.SendSlots < 0 || c.SendSlots > maxSendSlots {
		errs = append(errs, fmt.Errorf("%d send slots, want at most %d", c.SendSlots, maxSendSlots))
	}
	if c.SetupTimeout < 0 || c.SuspendTimeout < 0 {
		errs = append(errs, fmt.Errorf("set-up timeout of %v, suspend timeout of %v", c.SetupTimeout, c.SuspendTimeout))
	}
	m := c.machine(socket.Connecting)
	m.Memory = nowhere{}
	if err := m.Validate(); err != nil {
		errs = append(errs, err)
	}
	if len(errs) == 0 {
		errs = append(errs, c.checkRegions())
	}
	return errors.Join(errs...)
}

// checkRegions refuses sizes that are right one by one, but for which the device has no region. All receive buffers of one size are one
// region; that of a larger size is made only after we have agreed to the peer's wish, and could not be refused any more.
func (c *Config) checkRegions() error {
	d := c.withDefaults()
	recvs := uint64(d.RecvBuffers) * uint64(max(d.RecvBufferSize, d.MaxRecvBufferSize))
	sends := uint64(d.SendSlots)*uint64(d.RecvBufferSize) + beginBytes
	if most := d.Device.Attr().MaxMRBytes; most > 0 && max(recvs, sends) > most { // 0: it does not say
		return fmt.Errorf("receive buffers of %d bytes and messages of %d in all, and regions of device %q have at most %d",
			recvs, sends, d.Device.Name(), most)
	}
	return nil
}

// checkDevice refuses a device that none of the transports runs on.
func checkDevice(d rdma.Device) error {
	a := d.Attr()
	_, iwarp := d.(*softiwarp.Device)
	if _, adapter := d.(cm.Device); adapter {
		iwarp = true
	}
	switch {
	case !a.RDMARead:
		return errors.New("it has no RDMA READ")
	case iwarp:
		return nil
	case a.Stream:
		return errors.New("it connects queue pairs by itself, in a way that is not known here")
	case !slices.Contains(a.GIDTypes, rdma.GIDTypeRoCEv2):
		return errors.New("it has neither iWARP nor RoCE v2")
	}
	return nil
}

func (c *Config) withDefaults() Config {
	d := *c
	d.RecvBuffers = cmp.Or(d.RecvBuffers, socket.DefaultRecvBuffers)
	d.RecvBufferSize = cmp.Or(d.RecvBufferSize, socket.DefaultRecvBytes)
	d.SendSlots = cmp.Or(d.SendSlots, DefaultSendSlots)
	d.SetupTimeout = cmp.Or(d.SetupTimeout, DefaultSetupTimeout)
	return d
}

// machine is the configuration of a connection's machine.
func (c *Config) machine(r socket.Role) socket.Config {
	m := socket.Config{
		Role: r, Layout: c.Layout, RecvBuffers: c.RecvBuffers, RecvBytes: uint32(c.RecvBufferSize), SendBytes: uint32(c.RecvBufferSize),
		MinRecvBytes: uint32(c.RecvBufferSize), MaxRecvBytes: uint32(c.MaxRecvBufferSize), Keep: true,
		SendDepth: c.SendSlots, MaxAdverts: c.MaxAdverts, ZcopyBytes: c.ZcopySize, SetupTimeout: c.SetupTimeout, SuspendTimeout: c.SuspendTimeout,
	}
	if c.Device != nil {
		a := c.Device.Attr()
		m.IRD, m.ORD = min(socket.DefaultReads, a.MaxReadsServed), min(socket.DefaultReads, a.MaxReadsAsked)
	}
	return m
}

// nowhere is the memory of a configuration that is only looked at.
type nowhere struct{}

func (nowhere) AdvertiseStream(uint64, uint32) (rdma.RKey, uint64, error) {
	return 0, 0, rdma.ErrNoResources
}

func (nowhere) AdvertiseRead(uint64, uint32) (rdma.RKey, uint64, error) {
	return 0, 0, rdma.ErrNoResources
}
func (nowhere) OpenSink(uint64) error { return rdma.ErrNoResources }
func (nowhere) Revoke(rdma.RKey)      {}
