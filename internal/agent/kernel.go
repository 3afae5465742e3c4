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

	"github.com/smcr-io/kube-smcr/internal/cni"
	"github.com/smcr-io/kube-smcr/internal/linux"
	"github.com/smcr-io/kube-smcr/pkg/rdma/verbs"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
)

// kernel opens pods' namespaces. Tests have one that needs no privileges.
type kernel interface {
	// open opens a pod's namespace, or the cgroup of one in the node's network.
	open(path string) (podNet, error)
	cgroups() (podCgroups, error)
}

// podNet is what the agent does in one pod's namespace.
type podNet interface {
	id() uint64
	gone() bool
	// sweep removes what the agent's own redirection left, and sweepOption the filter of the kernel's.
	// endDiversion ends the agent's own redirection of new connections, and leaves what those that are open need.
	sweep() error
	sweepOption() error
	endDiversion() error
	close() error
	// route asks how packets from src to dst leave the namespace.
	route(src, dst netip.Addr) (clc.Route, error)
	// others looks for other programs' rules in the namespace.
	others() (linux.Others, error)
	// netInterfaces finds network interfaces by their indexes, and bounds what it reads.
	netInterfaces(indexes []int) (map[int]verbs.Interface, error)
	sockets
}

// sockets makes connections in a pod's namespace, and looks up what was diverted.
type sockets interface {
	// listen opens the pod's listeners on loopback, on one port: one for IPv4 and, where the
	// namespace has it, one for IPv6. The port is the wanted one, or any if that is 0 or taken. If
	// an earlier agent listens on the wanted port, new connections come to the new listeners.
	listen(ctx context.Context, control linux.Control, wanted uint16) ([]*net.TCPListener, uint16, error)
	// listenIPv6 opens the listener for IPv6 that listen, which got the port wanted and returned port, did not
	// open. The error is errNoIPv6 if the namespace has no IPv6 still.
	listenIPv6(ctx context.Context, control linux.Control, wanted, port uint16) (*net.TCPListener, error)
	// hold binds a queue for held SYNs.
	hold(cfg linux.HolderConfig) (holder, error)
	install(cfg linux.RedirectConfig) (redirect, error)
	// originalDst and transparentDst return the destination that a diverted connection had; the
	// first for the outbound listeners, the second for the inbound ones, which are on the given
	// port. The error is linux.ErrNotRedirected if the connection was made to the listener itself.
	originalDst(c *net.TCPConn) (netip.AddrPort, error)
	transparentDst(c *net.TCPConn, port uint16) (netip.AddrPort, error)
	dialOut(ctx context.Context, control linux.Control, local netip.Addr, dst netip.AddrPort) (*net.TCPConn, error)
	dialApp(ctx context.Context, client netip.Addr, dst netip.AddrPort) (*net.TCPConn, error)
}

// redirect is *linux.Redirect.
type redirect interface {
	Update(cfg linux.RedirectConfig) error
	Renew() error
	Bypass(dst netip.AddrPort, ttl time.Duration) error
	Forget() error
	Caught() (bool, error)
	Remove() error
	Release(ttl time.Duration) error
	Close() error
}

type linuxKernel struct{}

func (linuxKernel) open(path string) (podNet, error) {
	if isHostPod([]cni.Attachment{{NetNS: path}}) {
		return openHost(path)
	}
	ns, err := linux.OpenNetNS(path)
	if err != nil {
		return nil, err
	}
	return linuxNet{ns}, nil
}

type linuxNet struct{ ns *linux.NetNS }

func (n linuxNet) id() uint64                    { return n.ns.ID() }
func (n linuxNet) gone() bool                    { return n.ns.Gone() }
func (n linuxNet) sweep() error                  { return linux.Sweep(n.ns) }
func (n linuxNet) endDiversion() error           { return linux.EndDiversion(n.ns) }
func (n linuxNet) sweepOption() error            { return linux.SweepOptionFilter(placeOf(n)) }
func (n linuxNet) others() (linux.Others, error) { return linux.FindOthers(n.ns) }

func (n linuxNet) route(src, dst netip.Addr) (r clc.Route, err error) {
	err = n.ns.Do(func() error {
		r, err = route(src, dst)
		return err
	})
	return r, err
}

func (n linuxNet) netInterfaces(indexes []int) (map[int]verbs.Interface, error) {
	found, err := linux.InterfacesByIndex(n.ns, indexes)
	all := make(map[int]verbs.Interface, len(found))
	for _, i := range found {
		v := verbs.Interface{Name: i.Name, Addrs: i.Addrs}
		copy(v.MAC[:], i.MAC)
		all[i.Index] = v
	}
	return all, err
}
func (n linuxNet) close() error { return n.ns.Close() }

func (n linuxNet) hold(cfg linux.HolderConfig) (holder, error) {
	h, err := linux.OpenHolder(n.ns, cfg)
	if err != nil {
		return nil, err
	}
	return h, nil
}

func (n linuxNet) install(cfg linux.RedirectConfig) (redirect, error) {
	r, err := linux.InstallRedirect(n.ns, cfg)
	if err != nil {
		return nil, err
	}
	return r, nil
}

func (n linuxNet) originalDst(c *net.TCPConn) (netip.AddrPort, error) { return linux.OriginalDst(c) }

func (n linuxNet) transparentDst(c *net.TCPConn, port uint16) (netip.AddrPort, error) {
	return linux.TransparentDst(c, port)
}

func (n linuxNet) dialOut(ctx context.Context, control linux.Control, local netip.Addr, dst netip.AddrPort) (*net.TCPConn, error) {
	return linux.DialInNS(ctx, n.ns, control, local, dst)
}

func (n linuxNet) dialApp(ctx context.Context, client netip.Addr, dst netip.AddrPort) (*net.TCPConn, error) {
	return linux.DialFrom(ctx, n.ns, client, markApp, dst)
}

// listen tries other ports until one is free for both families. A fixed port for all pods would one
// day be an application's.
func (n linuxNet) listen(ctx context.Context, control linux.Control, wanted uint16) ([]*net.TCPListener, uint16, error) {
	if wanted != 0 {
		ls, err := n.listenAt(ctx, linux.Controls(linux.ControlSucceed, control), wanted)
		for _, l := range ls {
			err = errors.Join(err, linux.Succeed(l))
		}
		if err == nil {
			return ls, wanted, nil
		}
		for _, l := range ls {
			err = errors.Join(err, l.Close())
		}
		if !errors.Is(err, syscall.EADDRINUSE) {
			return nil, 0, err
		}
	}
	var last error
	for range portTries {
		ls, err := n.listenAt(ctx, control, 0)
		if err == nil {
			return ls, ls[0].Addr().(*net.TCPAddr).AddrPort().Port(), nil
		}
		last = err
		if !errors.Is(err, syscall.EADDRINUSE) {
			break
		}
	}
	return nil, 0, fmt.Errorf("no port that is free for IPv4 and IPv6: %w", last)
}

// errNoIPv6 says that there is no IPv6 on a namespace's loopback interface.
var errNoIPv6 = errors.New("no IPv6 on loopback")

func (n linuxNet) listenIPv6(ctx context.Context, control linux.Control, wanted, port uint16) (*net.TCPListener, error) {
	succeeds := wanted == port
	if succeeds {
		control = linux.Controls(linux.ControlSucceed, control)
	}
	l, err := linux.ListenInNS(ctx, n.ns, control, netip.AddrPortFrom(netip.IPv6Loopback(), port))
	switch {
	case errors.Is(err, syscall.EADDRNOTAVAIL), errors.Is(err, syscall.EAFNOSUPPORT):
		return nil, errors.Join(errNoIPv6, err)
	case err == nil && succeeds:
		if err := linux.Succeed(l); err != nil {
			return nil, errors.Join(err, l.Close())
		}
	}
	return l, err
}

// listenAt listens on a port; 0 lets the kernel choose.
func (n linuxNet) listenAt(ctx context.Context, control linux.Control, port uint16) ([]*net.TCPListener, error) {
	four, err := linux.ListenInNS(ctx, n.ns, control, netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), port))
	if err != nil {
		return nil, fmt.Errorf("%w (is the loopback interface of the pod up?)", err)
	}
	port = four.Addr().(*net.TCPAddr).AddrPort().Port()
	six, err := n.listenIPv6(ctx, control, 0, port)
	switch {
	case err == nil:
		return []*net.TCPListener{four, six}, nil
	case errors.Is(err, errNoIPv6):
		return []*net.TCPListener{four}, nil
	}
	return nil, errors.Join(err, four.Close())
}
