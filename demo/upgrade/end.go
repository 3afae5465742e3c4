// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

const (
	mebibyte = 1 << 20
	depth    = 8  // messages under way, and slots of a region
	small    = 64 // bytes of a message that is no data
	queue    = 4 * depth

	// completionPatience is how long the peer may take for anything.
	completionPatience = 30 * time.Second
)

// end is one queue pair with its regions, each with rights of its own.
type end struct {
	ctx  rdma.Context
	cq   rdma.CQ
	qp   rdma.QP
	own  rdma.MR // what is sent from and received into: slots of a MiB, and of small messages behind them
	open rdma.MR // what the peer may write
	give rdma.MR // what the peer may read
	said int     // small messages
	wcs  []rdma.WC
}

const (
	notes    = depth * mebibyte      // small messages that arrive
	words    = notes + 2*depth*small // those that are sent
	ownBytes = words + queue*small
	qpAccess = rdma.RemoteWrite | rdma.RemoteRead
)

func newEnd(d rdma.Device) (e *end, err error) {
	e = &end{}
	defer func() {
		if err != nil {
			err = errors.Join(err, e.close())
		}
	}()
	if e.ctx, err = d.Open(); err != nil {
		return nil, err
	}
	pd, err := e.ctx.AllocPD()
	if err != nil {
		return nil, err
	}
	for _, r := range []struct {
		mr     *rdma.MR
		bytes  int
		access rdma.Access
	}{
		{&e.own, ownBytes, rdma.LocalWrite},
		{&e.open, depth * mebibyte, rdma.LocalWrite | rdma.RemoteWrite},
		{&e.give, depth * mebibyte, rdma.RemoteRead},
	} {
		if *r.mr, err = pd.AllocMR(r.bytes, r.access); err != nil {
			return nil, err
		}
	}
	if e.cq, err = e.ctx.CreateCQ(4 * queue); err != nil {
		return nil, err
	}
	if e.qp, err = pd.CreateQP(rdma.QPConfig{SendCQ: e.cq, RecvCQ: e.cq, MaxSendWR: queue, MaxRecvWR: queue}); err != nil {
		return nil, err
	}
	return e, e.qp.Modify(rdma.QPAttr{State: rdma.QPInit, Access: qpAccess})
}

func (e *end) close() error {
	if e.ctx == nil {
		return nil
	}
	return e.ctx.Close()
}

// slot is a MiB of the own region.
func (e *end) slot(i int) rdma.SGE {
	return rdma.SGE{Addr: e.own.Addr() + uint64(i)*mebibyte, Length: mebibyte, LKey: e.own.LKey()}
}

// note is where small messages arrive: there are two for each slot.
func (e *end) note(i int) rdma.SGE {
	return rdma.SGE{Addr: e.own.Addr() + notes + uint64(i)*small, Length: small, LKey: e.own.LKey()}
}

// bytesOf returns the bytes of a piece of the own region.
func (e *end) bytesOf(s rdma.SGE) []byte {
	off := s.Addr - e.own.Addr()
	return e.own.Bytes()[off : off+uint64(s.Length)]
}

// recv posts a receive.
func (e *end) recv(id uint64, s rdma.SGE) error {
	_, err := e.qp.PostRecv([]rdma.RecvWR{{ID: id, SGE: s}})
	return err
}

// post posts a request.
func (e *end) post(wr rdma.SendWR) error {
	wr.Flags |= rdma.SendSignaled
	_, err := e.qp.PostSend([]rdma.SendWR{wr})
	return err
}

// say sends a small message. There are never more than queue of them under way.
func (e *end) say(b []byte) error {
	off := words + e.said%queue*small
	e.said++
	n := copy(e.own.Bytes()[off:off+small], b)
	return e.post(rdma.SendWR{Op: rdma.OpSend, SGL: []rdma.SGE{{Addr: e.own.Addr() + uint64(off), Length: uint32(n), LKey: e.own.LKey()}}})
}

// next waits for the next completion.
func (e *end) next() (rdma.WC, error) {
	for armed := false; len(e.wcs) == 0; armed = !armed {
		var wcs [16]rdma.WC
		n, err := e.cq.Poll(wcs[:])
		switch {
		case err != nil:
			return rdma.WC{}, err
		case n > 0:
			e.wcs = append(e.wcs, wcs[:n]...)
		case !armed:
			if err := e.cq.Arm(false); err != nil {
				return rdma.WC{}, err
			}
		default:
			select {
			case <-e.cq.Notify():
			case <-time.After(completionPatience):
				return rdma.WC{}, fmt.Errorf("no completion within %v", completionPatience)
			}
		}
	}
	wc := e.wcs[0]
	e.wcs = e.wcs[1:]
	if wc.Status != rdma.StatusSuccess {
		return wc, fmt.Errorf("%v: %v", wc.Op, wc.Status)
	}
	return wc, nil
}

// dropRights has nobody begin anew where root has started the program. Each thread changes its user for
// itself, and rdma_cm takes commands only of who has opened it: so all are to be children of one.
func dropRights() error {
	if os.Getuid() != 0 {
		return nil
	}
	err := errors.Join(syscall.Setgroups(nil), syscall.Setgid(nobody), syscall.Setuid(nobody))
	if err == nil {
		err = syscall.Exec("/proc/self/exe", os.Args, os.Environ())
	}
	return fmt.Errorf("drop the rights of root: %w", err)
}

// rights returns the user and the capabilities of this process.
func rights() (uid int, capabilities string, err error) {
	b, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return 0, "", fmt.Errorf("read own rights: %w", err)
	}
	for l := range strings.Lines(string(b)) {
		if v, ok := strings.CutPrefix(l, "CapEff:"); ok {
			return os.Getuid(), strings.TrimSpace(v), nil
		}
	}
	return 0, "", errors.New("read own rights: /proc/self/status has no CapEff")
}

// tellRights says that this process has none.
func tellRights(t *teller) error {
	uid, capabilities, err := rights()
	if err != nil {
		return err
	}
	return t.check("runs as an ordinary user without capabilities", uid != 0 && strings.Trim(capabilities, "0") == "",
		"user %d, capabilities %s, process %d", uid, capabilities, os.Getpid())
}
