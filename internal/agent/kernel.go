// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"syscall"
	"time"

	"github.com/smcr-io/kube-smcr/internal/linux"
)

// kernel opens pods' namespaces. The product's is linuxKernel; tests have one
// that works without privileges.
type kernel interface {
	open(path string) (podNet, error)
}

// podNet is what the agent does in one pod's namespace.
type podNet interface {
	id() uint64
	gone() bool
	sweep() error
	close() error
	sockets
}

// sockets makes and knows connections in a pod's namespace.
type sockets interface {
	// listen opens the pod's listeners on loopback, of both address families
	// where the namespace has both, on one port.
	listen(ctx context.Context, control linux.Control) ([]*net.TCPListener, uint16, error)
	install(cfg linux.RedirectConfig) (redirect, error)
	originalDst(c *net.TCPConn) (netip.AddrPort, error)
	dialOut(ctx context.Context, control linux.Control, local netip.Addr, dst netip.AddrPort) (*net.TCPConn, error)
	dialApp(ctx context.Context, client netip.Addr, dst netip.AddrPort) (*net.TCPConn, error)
}

// redirect is *linux.Redirect.
type redirect interface {
	Update(cfg linux.RedirectConfig) error
	Renew() error
	Bypass(dst netip.AddrPort, ttl time.Duration) error
	Remove() error
	Close() error
}

type linuxKernel struct{}

func (linuxKernel) open(path string) (podNet, error) {
	ns, err := linux.OpenNetNS(path)
	if err != nil {
		return nil, err
	}
	return linuxNet{ns}, nil
}

type linuxNet struct{ ns *linux.NetNS }

func (n linuxNet) id() uint64   { return n.ns.ID() }
func (n linuxNet) gone() bool   { return n.ns.Gone() }
func (n linuxNet) sweep() error { return linux.Sweep(n.ns) }
func (n linuxNet) close() error { return n.ns.Close() }

func (n linuxNet) install(cfg linux.RedirectConfig) (redirect, error) {
	r, err := linux.InstallRedirect(n.ns, cfg)
	if err != nil {
		return nil, err
	}
	return r, nil
}

func (n linuxNet) originalDst(c *net.TCPConn) (netip.AddrPort, error) { return linux.OriginalDst(c) }

func (n linuxNet) dialOut(ctx context.Context, control linux.Control, local netip.Addr, dst netip.AddrPort) (*net.TCPConn, error) {
	return linux.DialInNS(ctx, n.ns, control, local, dst)
}

func (n linuxNet) dialApp(ctx context.Context, client netip.Addr, dst netip.AddrPort) (*net.TCPConn, error) {
	return linux.DialFrom(ctx, n.ns, client, markApp, dst)
}

// listen lets the kernel choose the port for IPv4 and takes the same one for
// IPv6: a fixed port would one day be an application's.
func (n linuxNet) listen(ctx context.Context, control linux.Control) ([]*net.TCPListener, uint16, error) {
	var last error
	for range portTries {
		four, err := linux.ListenInNS(ctx, n.ns, control, netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), 0))
		if err != nil {
			return nil, 0, fmt.Errorf("%w (is the loopback interface of the pod up?)", err)
		}
		port := four.Addr().(*net.TCPAddr).AddrPort().Port()
		six, err := linux.ListenInNS(ctx, n.ns, control, netip.AddrPortFrom(netip.IPv6Loopback(), port))
		switch {
		case err == nil:
			return []*net.TCPListener{four, six}, port, nil
		case errors.Is(err, syscall.EADDRNOTAVAIL), errors.Is(err, syscall.EAFNOSUPPORT):
			return []*net.TCPListener{four}, port, nil // the pod has no IPv6
		}
		last = errors.Join(err, four.Close())
		if !errors.Is(err, syscall.EADDRINUSE) {
			break
		}
	}
	return nil, 0, fmt.Errorf("no port that is free for IPv4 and IPv6: %w", last)
}
