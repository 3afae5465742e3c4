// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"sync"
	"time"

	"github.com/google/nftables"
	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/internal/undo"
)

// Redirect is what the agent has put into one pod's namespace. Its methods may
// be called from several goroutines.
type Redirect struct {
	ns   *NetNS
	mark uint32 // that of the configuration, which never changes

	mu     sync.Mutex // guards what is below, and makes each transaction whole
	conn   *nftConn
	cfg    RedirectConfig
	bypass map[netip.AddrPort]time.Time // the negative cache, with the end of each entry; for Update
	found  map[sysctl]uint32            // the values before we set them, see foundSet
	silent bool                         // the kernel cannot refuse connections to the listeners
	// noRoutes: the kernel cannot tell whether a packet is for the namespace itself
	noRoutes bool
	closed   bool

	// prompt is what needs no transaction, and so waits for none. Its mutex is locked last.
	prompt struct {
		sync.Mutex
		ttl    time.Duration // cfg.ttl()
		caught time.Time     // until when "caught" has an element
		ended  bool          // nothing is renewed any more: the diversion ends, or is a successor's
		pulse  *pulse        // nil: not open
	}
}

// InstallRedirect puts the redirection into ns, in place of that of an earlier agent. After
// an error it leaves nothing behind. The agent's listeners must be ready. Diversion begins
// at once and ends after FailOpenTTL unless Renew is called.
//
// The error unwraps to a *ConfigError if cfg cannot be used and to a
// *FeatureError if the kernel lacks something.
func InstallRedirect(ns *NetNS, cfg RedirectConfig) (*Redirect, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	r := &Redirect{ns: ns, mark: cfg.Mark, cfg: cfg, bypass: map[netip.AddrPort]time.Time{}}
	var u undo.Stack
	if err := u.Run(r.installSteps()...); err != nil {
		return nil, fmt.Errorf("install redirection in %s: %w", ns, err)
	}
	u.Keep()
	r.prompt.ttl = cfg.ttl()
	r.prompt.pulse, _ = openPulse(ns, cfg.Mark) // Renew tries again
	r.conn.answer = min(nftAnswerTime, cfg.ttl()/6)
	return r, nil
}

// installSteps are the steps of InstallRedirect, the diversion last: nothing
// is diverted before the way back is ready.
func (r *Redirect) installSteps() []undo.Step {
	steps := append([]undo.Step{
		{
			Name: "open netlink",
			Do: func() (err error) {
				r.conn, err = openNFT(r.ns)
				return err
			},
			Undo: func() error { return r.conn.CloseLasting() },
		},
		{Name: "read what an earlier agent found", Do: r.learnFound}, // before our rules are there
	}, routingSteps(r.ns, r.cfg.AppMark)...)
	var inherited bool // the table is of an earlier agent, which may still have connections
	steps = append(steps,
		undo.Step{
			Name: "keep what is found",
			Do: func() (err error) {
				if inherited, err = hasTable(r.conn); err != nil {
					return explain(err)
				}
				return explain(r.keepFound())
			},
			Undo: unless(&inherited, func() error { return dropTable(r.conn) }),
		},
		r.takeStep(fwmarkAccept, true))
	if r.cfg.Untracked {
		steps = append(steps, r.takeStep(looseTracking, false))
	}
	return append(steps,
		undo.Step{Name: "replace nftables table " + tableName, Do: func() error {
			return explain(r.withoutLacking(func() error { return r.replaceLocked(r.cfg) }, r.dispensable()))
		}},
		// An earlier version's table takes a reset with a mark for a SYN.
		r.takeStep(fwmarkReflect4, false),
		r.takeStep(fwmarkReflect6, false),
		// These exist once the table has made the kernel load connection tracking.
		r.takeStep(closeTimeout, false),
		r.takeStep(closeWaitTimeout, false))
}

// lack is what the kernel may lack: the probe says so, and the flag makes a table without it.
type lack struct {
	probe func() error
	flag  *bool
}

// dispensable is what the table can do without.
func (r *Redirect) dispensable() []lack {
	return []lack{{ProbeReject, &r.silent}, {ProbeWireRoutes, &r.noRoutes}}
}

// withoutLacking tries to make the table. If that fails and the kernel lacks something that the table can do
// without, it tries again with a table that does.
func (r *Redirect) withoutLacking(try func() error, lacks []lack) error {
	err := try()
	if err == nil || errors.As(err, new(*ConfigError)) {
		return err
	}
	var lacking []*bool
	for _, l := range lacks {
		switch perr := l.probe(); {
		case isPassing(perr):
			return err // it says nothing of the kernel
		case perr != nil:
			lacking = append(lacking, l.flag)
		}
	}
	if len(lacking) == 0 {
		return err
	}
	for _, flag := range lacking {
		*flag = true
	}
	return try()
}

// replaceLocked puts the table for cfg in force in one transaction. looseTracking is switched on
// again only after the last rule that excludes connections from tracking is gone.
//
// A table that holds SYNs is changed in place: if a base chain were taken away, for an instant
// only, the kernel would drop all SYNs that are held in the namespace. A table of an earlier
// version may have other chains, and is replaced then.
func (r *Redirect) replaceLocked(cfg RedirectConfig) error {
	now := time.Now()
	left := make(map[netip.AddrPort]time.Duration, len(r.bypass))
	for dst, end := range r.bypass {
		if d := end.Sub(now); d >= time.Millisecond {
			left[dst] = d
		} else {
			delete(r.bypass, dst)
		}
	}
	_, looseOff := r.found[looseTracking]
	r.prompt.Lock()
	caught := r.prompt.caught
	r.prompt.Unlock()
	c := content{
		bypass: left, caught: caught.Sub(now).Truncate(time.Millisecond), found: r.found, looseOff: looseOff,
		silent: r.silent, noRoutes: r.noRoutes, inPlace: cfg.Hold != nil,
	}
	rs := newRuleset(r.conn)
	rs.build(cfg, c)
	err := rs.commit()
	if err != nil && c.inPlace && rs.err == nil && !errors.Is(err, os.ErrDeadlineExceeded) {
		c.inPlace = false
		rs = newRuleset(r.conn)
		rs.build(cfg, c)
		err = rs.commit()
	}
	if err != nil || cfg.Untracked {
		return err
	}
	return r.give(looseTracking)
}

// Update puts cfg in force, in one transaction: there is no moment without
// rules, and established connections are not touched. The negative cache is
// kept. Update also repairs a table that another program changed or deleted. The marks
// cannot change, because open connections have them.
func (r *Redirect) Update(cfg RedirectConfig) error {
	if err := cfg.Validate(); err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return fmt.Errorf("update redirection in %s: %w", r.ns, ErrClosed)
	}
	if cfg.Mark != r.cfg.Mark || cfg.AppMark != r.cfg.AppMark || cfg.PlainMark != r.cfg.PlainMark {
		return &ConfigError{Field: "Mark", Reason: "cannot change while the redirection stands: remove it first"}
	}
	err := error(nil)
	if cfg.Untracked {
		_, err = r.take(looseTracking)
	}
	if err == nil {
		err = r.replaceLocked(cfg)
	}
	if err != nil {
		return fmt.Errorf("update redirection in %s: %w", r.ns, err)
	}
	r.cfg = cfg
	r.prompt.Lock()
	r.prompt.ttl = cfg.ttl()
	r.prompt.Unlock()
	_ = updateLocalRoutes(r.ns) // what was there works without them
	return nil
}

// Bypass puts dst into the negative cache: for ttl, connections to dst are not diverted.
// Calling Bypass again starts a new ttl. If there is no room, the entry that would end
// first is dropped.
func (r *Redirect) Bypass(dst netip.AddrPort, ttl time.Duration) error {
	dst = netip.AddrPortFrom(dst.Addr().Unmap().WithZone(""), dst.Port())
	if !dst.IsValid() || ttl < time.Millisecond || ttl > maxBypassTTL {
		return &ConfigError{Field: "Bypass", Reason: fmt.Sprintf("%v for %v: need an address and between 1ms and %v", dst, ttl, maxBypassTTL)}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return fmt.Errorf("bypass %v in %s: %w", dst, r.ns, ErrClosed)
	}
	var errs []error
	if _, ok := r.bypass[dst]; !ok && len(r.bypass) >= maxBypass {
		errs = append(errs, r.evictLocked())
	}
	// Add, delete, add: this works whether the element exists, has expired or is new, on
	// kernels that extend an element that is added again and on those that do not.
	set, elem := bypassElement(dst, ttl)
	errs = append(errs, r.conn.SetAddElements(set, elem), r.conn.SetDeleteElements(set, elem), r.conn.SetAddElements(set, elem))
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("bypass %v in %s: %w", dst, r.ns, err)
	}
	if err := r.conn.Flush(); err != nil {
		if errors.Is(err, unix.ENFILE) {
			err = errors.Join(ErrBypassFull, err)
		}
		return fmt.Errorf("bypass %v in %s: %w", dst, r.ns, noTable(err))
	}
	r.bypass[dst] = time.Now().Add(ttl)
	return nil
}

// evictLocked makes room in the negative cache. The kernel may have dropped the entry
// already, so it is added before it is deleted.
func (r *Redirect) evictLocked() error {
	var first netip.AddrPort
	for dst, end := range r.bypass {
		if !first.IsValid() || end.Before(r.bypass[first]) {
			first = dst
		}
	}
	delete(r.bypass, first)
	set, elem := bypassElement(first, time.Second)
	return errors.Join(r.conn.SetAddElements(set, elem), r.conn.SetDeleteElements(set, elem))
}

func bypassElement(dst netip.AddrPort, ttl time.Duration) (*nftables.Set, []nftables.SetElement) {
	return bypassSet(kubeTable(), dst.Addr().Is4()), []nftables.SetElement{{Key: destinationKey(dst.Addr(), dst.Port()), Timeout: ttl}}
}

// Caught reports whether another program redirected a connection from or to the agent
// within the last caughtTTL. While it did, nothing is diverted.
func (r *Redirect) Caught() (bool, error) {
	r.prompt.Lock()
	defer r.prompt.Unlock()
	if r.prompt.ended {
		return false, fmt.Errorf("look for redirected connections in %s: %w", r.ns, ErrClosed)
	}
	caught := false
	err := r.ns.Do(func() error {
		return eachElement(caughtSet(kubeTable()), func(e element) bool {
			caught, r.prompt.caught = true, time.Now().Add(min(e.expires, caughtTTL))
			return false
		})
	})
	if err != nil {
		return false, fmt.Errorf("look for redirected connections in %s: %w", r.ns, noTable(err))
	}
	return caught, nil
}

// Forget empties the negative cache: every selected destination is diverted
// again.
func (r *Redirect) Forget() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return fmt.Errorf("forget bypasses in %s: %w", r.ns, ErrClosed)
	}
	r.conn.FlushSet(bypassSet(kubeTable(), true))
	r.conn.FlushSet(bypassSet(kubeTable(), false))
	if err := r.conn.Flush(); err != nil {
		return fmt.Errorf("forget bypasses in %s: %w", r.ns, noTable(err))
	}
	clear(r.bypass)
	return nil
}

// Remove ends the diversion of new connections and closes r. It empties the set
// "alive" and leaves the rest, so that connections that were diverted and are still open
// go on. Emptying the chains would break them, because the kernel stops connection
// tracking in a namespace when the last rule that needs it is deleted. [Sweep] deletes
// everything.
func (r *Redirect) Remove() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return nil
	}
	r.end()
	err := endDiversion(r.conn)
	if err != nil {
		err = fmt.Errorf("remove redirection from %s: %w", r.ns, err)
	}
	return errors.Join(err, r.closeLocked())
}

// endDiversion empties the set "alive". It is no error if there is none.
func endDiversion(conn *nftConn) error {
	conn.FlushSet(aliveSet(kubeTable()))
	if err := conn.Flush(); !errors.Is(err, unix.ENOENT) {
		return err
	}
	return nil
}

// Release closes r and leaves everything in the namespace as it is, for a successor. The
// diversion to this agent's listeners stays alive for the time lasting, in which the
// successor installs its own redirection in place of this one.
func (r *Redirect) Release(lasting time.Duration) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return nil
	}
	// The next agent may be of an earlier version (see installSteps). It takes them again if it is not.
	return errors.Join(r.give(fwmarkReflect4), r.give(fwmarkReflect6), r.renewMeanwhile(r.cfg.ttl(), func() error {
		return r.renewLocked(max(lasting, r.cfg.ttl()))
	}), r.closeLocked())
}

// Close closes r and leaves everything in the namespace as it is. It is for a namespace
// that is gone.
func (r *Redirect) Close() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return nil
	}
	return r.closeLocked()
}

// end sees to it that nothing is renewed any more but by the caller.
func (r *Redirect) end() {
	r.prompt.Lock()
	defer r.prompt.Unlock()
	r.prompt.ended = true
	if r.prompt.pulse != nil {
		r.prompt.pulse.close()
		r.prompt.pulse = nil
	}
}

func (r *Redirect) closeLocked() error {
	r.end()
	r.closed = true
	return r.conn.CloseLasting()
}

// dropTable deletes the table. It is no error if there is none.
func dropTable(conn *nftConn) error {
	rs := newRuleset(conn)
	rs.dropTable()
	return rs.commit()
}

// EndDiversion ends the diversion of new connections by an agent, dead or alive, in ns. As
// [Redirect.Remove] does, it leaves the rest, for connections that were diverted and are
// still open.
func EndDiversion(ns *NetNS) error {
	conn, err := openNFT(ns)
	if err != nil {
		return fmt.Errorf("end diversion: %w", err)
	}
	if err := errors.Join(endDiversion(conn), conn.CloseLasting()); err != nil {
		return fmt.Errorf("end diversion in %s: %w", ns, err)
	}
	return nil
}

// Sweep removes everything that an agent, dead or alive, put into ns, and restores the
// sysctls. The kernel resets connections that were diverted and are still open. A
// namespace in which no agent put anything is left as it is.
func Sweep(ns *NetNS) error {
	conn, err := openNFT(ns)
	if err != nil {
		return fmt.Errorf("sweep: %w", err)
	}
	err = errors.Join(sweep(ns, conn), conn.CloseLasting())
	if err != nil {
		return fmt.Errorf("sweep %s: %w", ns, err)
	}
	return nil
}

func sweep(ns *NetNS, conn *nftConn) error {
	was, err := isThere(ns, conn)
	if err != nil || !was {
		return errors.Join(err, sweepRouting(ns)) // an interrupted Sweep may have left a route
	}
	found, err := readFound(ns)
	if err != nil {
		return err
	}
	// First end the diversion. The record is deleted last, with the table.
	if err := endDiversion(conn); err != nil {
		return err
	}
	if err := errors.Join(sweepRouting(ns), restoreAll(ns, found)); err != nil {
		return err
	}
	return dropTable(conn)
}
