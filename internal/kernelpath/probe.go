// SPDX-License-Identifier: Apache-2.0

package kernelpath

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/internal/linux"
	"github.com/smcr-io/kube-smcr/internal/smcnl"
)

// Numbers of SMC that x/sys lacks: its family, and its protocol in TCP's families.
const (
	familySMC   = 43
	protocolSMC = 256
)

// Probe tries whether this machine can have the kernel's SMC-R as datapath, with the pins in dir: it
// looks for the BPF file system, opens a socket of SMC, makes one of TCP SMC by the program, in a
// network namespace of its own, and asks SMC for its version and its devices. A [MissingError] names
// the first thing that is missing. Nothing is left, but that the kernel may have loaded its module
// smc: not where the file system is missing, as in a container whose operator does not want this datapath.
func Probe(dir string) error { return NewProber(dir).Probe() }

// A Prober is [Probe] for who asks again and again. Several goroutines may call it.
type Prober struct {
	pins, protocol, program, smc func() error // the steps; tests have others

	mu sync.Mutex // held while it probes; guards what is below
	// worked says that the program made a socket SMC. A kernel that does that once always does, and to try it
	// changes the kernel's code, so that is not done again.
	worked bool
}

// NewProber makes one for pins in dir.
func NewProber(dir string) *Prober {
	return &Prober{pins: func() error { return tryPins(dir) }, protocol: tryProtocol, program: tryProgram, smc: trySMC}
}

// Probe tries what Probe of the package does, and once the program had its effect all but that.
func (p *Prober) Probe() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := p.pins(); err != nil {
		return err
	}
	if err := p.protocol(); err != nil {
		return err
	}
	if !p.worked {
		if err := p.program(); err != nil {
			return err
		}
		p.worked = true
	}
	return p.smc()
}

// tryPins looks for the BPF file system.
func tryPins(dir string) error {
	err := checkPins(dir)
	if errors.Is(err, unix.ENOENT) { // it would be made
		err = checkPins(filepath.Dir(dir))
	}
	return err
}

// tryProtocol opens a socket of SMC.
func tryProtocol() error {
	protocol, err := openSocket(unix.AF_INET, protocolSMC)
	switch {
	case err == nil && protocol == protocolSMC:
		return nil
	case errors.Is(err, unix.EPERM), errors.Is(err, unix.EACCES):
		return &MissingError{NoRights, fmt.Errorf("open a socket of SMC: %w", err)}
	case err == nil:
		return &MissingError{NoSMC, fmt.Errorf("a socket of SMC has protocol %d", protocol)}
	}
	missing := NoProtocol
	if _, ferr := openSocket(familySMC, 0); ferr != nil {
		missing = NoSMC
	}
	return &MissingError{missing, fmt.Errorf("open a socket of SMC: %w", err)}
}

// openSocket opens a socket, and returns its protocol.
func openSocket(family, protocol int) (int, error) {
	fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, protocol)
	if err != nil {
		return 0, err
	}
	defer unix.Close(fd)
	return unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_PROTOCOL)
}

// tryProgram makes a socket of a namespace that nobody else has SMC.
func tryProgram() (err error) {
	c, err := Open(Config{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.Close()) }()
	ns, err := linux.ScratchNetNS()
	if err != nil {
		return &MissingError{NoRights, err}
	}
	defer func() { err = errors.Join(err, ns.Close()) }()
	cookie, err := ns.Cookie()
	if err != nil {
		return err
	}
	if err := c.Choose(Choice{NetNS: cookie}); err != nil {
		return err
	}
	return ns.Do(func() error {
		switch protocol, err := openSocket(unix.AF_INET, unix.IPPROTO_TCP); {
		case err != nil:
			return &MissingError{NoEffect, fmt.Errorf("open a socket of TCP that is to be SMC: %w", err)}
		case protocol != protocolSMC:
			return &MissingError{NoEffect, fmt.Errorf("a socket of TCP that was to be SMC has protocol %d", protocol)}
		}
		return nil
	})
}

// trySMC asks SMC for its version and its devices.
func trySMC() error {
	system, err := smcnl.ReadSystem()
	switch {
	case errors.Is(err, smcnl.ErrNoSMC):
		return &MissingError{NoSMC, err}
	case err != nil:
		return err
	case !system.SMCRv2:
		return &MissingError{NoVersion2, fmt.Errorf("SMC of the kernel is version %d", system.Version)}
	}
	devices, err := smcnl.Devices()
	if err != nil {
		return err
	}
	isActive := func(d smcnl.Device) bool {
		return slices.ContainsFunc(d.Ports, func(p smcnl.Port) bool { return p.Active })
	}
	if !slices.ContainsFunc(devices, isActive) {
		return &MissingError{NoDevice, fmt.Errorf("SMC-R has %d devices, none with an active port", len(devices))}
	}
	return nil
}
