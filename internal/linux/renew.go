// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// renewPort is where renewing packets go, on loopback: the discard port. No packet gets there.
const renewPort = 9

// renew puts the element into "alive" for another FailOpenTTL when a renewing packet leaves: one of UDP to loopback with
// the agent's mark. It goes no further. Only the agent sends UDP with that mark; a program of the pod that may set marks
// can keep its own pod's diversion alive, and no other.
//
// The chain comes before connection tracking, and before what excludes packets from it.
func (r *ruleset) renew(cfg RedirectConfig, s *sets) {
	c := r.chain(nftables.Chain{
		Name: chainRenew, Type: nftables.ChainTypeFilter,
		Hooknum: nftables.ChainHookOutput, Priority: nftables.ChainPriorityRef(*nftables.ChainPriorityRaw - 1),
	})
	r.rule(c, metaIs(expr.MetaKeyMARK, nativeU32(cfg.Mark)), metaIs(expr.MetaKeyL4PROTO, []byte{unix.IPPROTO_UDP}),
		metaIs(expr.MetaKeyOIFNAME, ifname("lo")), loadPort(regA),
		[]expr.Any{
			&expr.Cmp{Op: expr.CmpOpEq, Register: regA, Data: be16(renewPort)},
			&expr.Immediate{Register: regA, Data: []byte{unix.IPPROTO_TCP}},
			&expr.Dynset{SrcRegKey: regA, SetName: s.alive.Name, SetID: s.alive.ID, Operation: unix.NFT_DYNSET_OP_UPDATE, Timeout: cfg.ttl()},
		}, counted(expr.VerdictDrop))
}

// Renew keeps the diversion alive for another FailOpenTTL. The error is
// [ErrNoTable] if somebody deleted the table.
//
// It sends a packet, and looks whether that has renewed the element. nf_tables makes transactions wait for one another,
// those of one namespace for a long one there, and while one waits, those of all namespaces. A packet waits for none:
//
//	0 s   a program of another pod loads a set of 160,000 ranges, which takes the kernel 30 s
//	1 s   it changes its table once more, and waits; so does from now on each transaction on this machine
//	2 s   Renew: the packet passes the rule, the element lasts until 5 s
//
// Where the packet does not get to the rule, a transaction renews the element.
func (r *Redirect) Renew() error {
	if err := r.renewPromptly(); err == nil || errors.Is(err, ErrClosed) {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return fmt.Errorf("renew redirection in %s: %w", r.ns, ErrClosed)
	}
	return r.renewLocked(r.cfg.ttl())
}

// renewPromptly renews without a transaction.
func (r *Redirect) renewPromptly() error {
	r.prompt.Lock()
	defer r.prompt.Unlock()
	if r.prompt.ended {
		return fmt.Errorf("renew redirection in %s: %w", r.ns, ErrClosed)
	}
	if r.prompt.pulse == nil {
		p, err := openPulse(r.ns, r.mark)
		if err != nil {
			return fmt.Errorf("renew redirection in %s: %w", r.ns, err)
		}
		r.prompt.pulse = p
	}
	left, err := r.prompt.pulse.beat()
	if err != nil {
		r.prompt.pulse.close() // an answer may still be in it
		r.prompt.pulse = nil
		return fmt.Errorf("renew redirection in %s: %w", r.ns, err)
	}
	if ttl := r.prompt.ttl; left <= ttl-ttl/6 { // as after one that was not
		return fmt.Errorf("renew redirection in %s: the packet was stopped before the rule", r.ns)
	}
	return nil
}

// renewMeanwhile renews by packets for as long as a transaction takes, which may have to wait for others. One packet may come
// just behind it: then the diversion lasts for a TTL from there.
func (r *Redirect) renewMeanwhile(ttl time.Duration, transaction func() error) error {
	done := make(chan struct{})
	var packets sync.WaitGroup
	packets.Go(func() {
		t := time.NewTicker(ttl / 3)
		defer t.Stop()
		for {
			select {
			case <-done:
				return
			case <-t.C:
				_ = r.renewPromptly() // if that does not work, the transaction does, or says why not
			}
		}
	})
	defer packets.Wait()
	defer close(done)
	return transaction()
}

// pulse renews the element in "alive" by a packet, over sockets that stay open: without entering the namespace.
type pulse struct {
	packets, netlink int
	ask              []byte // the request for the element
}

func openPulse(ns *NetNS, mark uint32) (*pulse, error) {
	attrs, err := netlink.MarshalAttributes([]netlink.Attribute{
		{Type: unix.NFTA_SET_ELEM_LIST_TABLE, Data: append([]byte(tableName), 0)},
		{Type: unix.NFTA_SET_ELEM_LIST_SET, Data: append([]byte(setAlive), 0)},
		{Type: netlink.Nested | unix.NFTA_SET_ELEM_LIST_ELEMENTS, Data: aliveKey()},
	})
	if err != nil {
		return nil, err
	}
	body := append([]byte{byte(kubeTable().Family), 0, 0, 0}, attrs...)
	p := &pulse{packets: -1, netlink: -1, ask: appendRequest(nil, unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_GETSETELEM, 0, body)}
	if err := ns.Do(func() error { return p.open(mark) }); err != nil {
		p.close()
		return nil, err
	}
	return p, nil
}

// aliveKey is the element of "alive" as a request names it: an attribute in others.
func aliveKey() []byte {
	attr := func(typ uint16, data []byte) []byte {
		b := binary.NativeEndian.AppendUint16(nil, uint16(4+len(data)))
		b = append(binary.NativeEndian.AppendUint16(b, typ), data...)
		return append(b, make([]byte, -len(b)&3)...)
	}
	value := attr(unix.NFTA_DATA_VALUE, []byte{unix.IPPROTO_TCP})
	return attr(netlink.Nested|unix.NFTA_LIST_ELEM, attr(netlink.Nested|unix.NFTA_SET_ELEM_KEY, value))
}

// open makes the sockets, in the thread's namespace.
func (p *pulse) open(mark uint32) (err error) {
	if p.packets, err = unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0); err != nil {
		return os.NewSyscallError("socket", err)
	}
	if err := setMark(p.packets, mark); err != nil {
		return err
	}
	if p.netlink, err = unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_NETFILTER); err != nil {
		return os.NewSyscallError("socket", err)
	}
	// So nobody else in the namespace can send to it.
	return os.NewSyscallError("connect", unix.Connect(p.netlink, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}))
}

// beat sends a renewing packet, and returns how long the element lasts then. The error is unix.ENOENT if there is
// no element, or no set or table.
func (p *pulse) beat() (left time.Duration, err error) {
	err = unix.Sendto(p.packets, nil, 0, &unix.SockaddrInet4{Port: renewPort, Addr: loopback(true).As4()})
	if err != nil && !errors.Is(err, unix.EPERM) { // what the sender is told of a packet that a rule drops
		return 0, os.NewSyscallError("sendto", err)
	}
	if _, err := unix.Write(p.netlink, p.ask); err != nil {
		return 0, os.NewSyscallError("send", err)
	}
	var buf [512]byte
	n, err := unix.Read(p.netlink, buf[:]) // the kernel has answered when it has been asked
	if err != nil {
		return 0, os.NewSyscallError("receive", err)
	}
	_, err = eachEntry(buf[:n], newAllowance(), func(b []byte) (bool, error) {
		return eachElementOf(b, func(e element) bool {
			left = e.expires
			return true
		})
	})
	return left, err
}

func (p *pulse) close() {
	for _, fd := range []int{p.packets, p.netlink} {
		if fd >= 0 {
			_ = unix.Close(fd)
		}
	}
}

// renewLocked renews the element in a transaction.
func (r *Redirect) renewLocked(ttl time.Duration) error {
	// Older kernels do not extend the timeout of an element that is added again, and
	// deleting an element that has just expired fails. Emptying the set never fails. The
	// element is added in the same transaction: no packet sees the set empty.
	s := aliveSet(kubeTable())
	r.conn.FlushSet(s)
	if err := r.conn.SetAddElements(s, aliveElement(ttl)); err != nil {
		return fmt.Errorf("renew redirection in %s: %w", r.ns, err)
	}
	if err := r.conn.Flush(); err != nil {
		return fmt.Errorf("renew redirection in %s: %w", r.ns, noTable(err))
	}
	return nil
}
