// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"errors"
	"fmt"
	"sync"

	"github.com/google/nftables"
)

// WireFilter is the table that keeps foreign RoCEv2 packets from the RDMA devices
// of a network namespace, the host's. Its methods may be called from several
// goroutines.
type WireFilter struct {
	ns *NetNS

	mu     sync.Mutex // guards what is below, and makes each transaction whole
	conn   *nftables.Conn
	lacks  error     // why routes are not looked up
	drops  WireDrops // of tables that are no more
	closed bool
}

// InstallWireFilter puts the table into ns in one transaction, in place of one
// that an earlier agent left there, or changes nothing.
//
// The error unwraps to a *ConfigError if cfg cannot be used and to a
// *FeatureError if the kernel lacks something.
func InstallWireFilter(ns *NetNS, cfg WireConfig) (*WireFilter, error) {
	conn, err := openNFT(ns)
	if err != nil {
		return nil, fmt.Errorf("filter RoCE packets: %w", err)
	}
	f := &WireFilter{ns: ns, conn: conn}
	if err := f.replaceLocked(cfg); err != nil {
		if perr := ProbeWireRoutes(); perr != nil {
			f.lacks = perr
			err = f.replaceLocked(cfg)
		}
		if err != nil {
			return nil, errors.Join(fmt.Errorf("filter RoCE packets in %s: %w", ns, explainWire(err)), conn.CloseLasting())
		}
	}
	return f, nil
}

// explainWire adds the feature that is to blame, if a probe finds one.
func explainWire(err error) error {
	if errors.As(err, new(*ConfigError)) {
		return err
	}
	return errors.Join(ProbeWire(), err)
}

// replaceLocked replaces the table in one transaction: there is no moment
// without rules, and after an error the old ones stand. The counters go on.
func (f *WireFilter) replaceLocked(cfg WireConfig) error {
	if err := cfg.Validate(); err != nil {
		return err
	}
	rs := &ruleset{conn: f.conn, table: wireTable()}
	rs.dropTable()
	rs.conn.AddTable(rs.table)
	rs.addWire(renderWire(cfg, f.lacks == nil), f.drops)
	return rs.commit()
}

func wireTable() *nftables.Table {
	return &nftables.Table{Family: nftables.TableFamilyINet, Name: wireTableName}
}

// addWire puts rendered rules into the transaction.
func (r *ruleset) addWire(w wireRules, drops WireDrops) {
	for why, n := range drops {
		r.conn.AddObj(&nftables.CounterObj{Table: r.table, Name: WireReason(why).String(), Packets: n})
	}
	for i := range w.sets {
		s := &w.sets[i]
		s.set.Table = r.table
		r.put(&s.set, s.elems)
	}
	for i := range w.chains {
		c := r.chain(w.chains[i].chain)
		for _, exprs := range w.chains[i].rules {
			r.rule(c, exprs)
		}
	}
}

// Update puts cfg in force in one transaction. It also repairs a table that
// somebody damaged or deleted.
func (f *WireFilter) Update(cfg WireConfig) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		return fmt.Errorf("filter RoCE packets in %s: %w", f.ns, ErrClosed)
	}
	if _, err := f.dropsLocked(); err != nil && !errors.Is(err, ErrNoTable) {
		return fmt.Errorf("filter RoCE packets in %s: %w", f.ns, err)
	}
	if err := f.replaceLocked(cfg); err != nil {
		return fmt.Errorf("filter RoCE packets in %s: %w", f.ns, err)
	}
	return nil
}

// Lacks is a *FeatureError if the kernel cannot look up routes, so that packets of
// Nodes are taken by Interfaces only; else nil.
func (f *WireFilter) Lacks() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.lacks
}

// Drops counts what was dropped since f was installed. The error is [ErrNoTable]
// if somebody deleted the table.
func (f *WireFilter) Drops() (WireDrops, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		return f.drops, fmt.Errorf("count dropped RoCE packets in %s: %w", f.ns, ErrClosed)
	}
	return f.dropsLocked()
}

func (f *WireFilter) dropsLocked() (WireDrops, error) {
	objs, err := f.conn.GetObjects(wireTable())
	if err != nil {
		return f.drops, fmt.Errorf("count dropped RoCE packets in %s: %w", f.ns, noTable(err))
	}
	found := 0
	for _, o := range objs {
		c, ok := o.(*nftables.CounterObj)
		for why := range numWireReasons {
			if ok && c.Table.Name == wireTableName && c.Name == why.String() {
				f.drops[why] = max(f.drops[why], c.Packets)
				found++
			}
		}
	}
	if found < int(numWireReasons) { // the kernel lists nothing of a table that is not there
		return f.drops, fmt.Errorf("count dropped RoCE packets in %s: %w", f.ns, ErrNoTable)
	}
	return f.drops, nil
}

// Remove removes the table and closes f. It is for who manages the machine: the
// table may be a successor's otherwise.
func (f *WireFilter) Remove() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		return nil
	}
	rs := &ruleset{conn: f.conn, table: wireTable()}
	rs.dropTable()
	err := rs.commit()
	if err != nil {
		err = fmt.Errorf("remove the filter of RoCE packets from %s: %w", f.ns, err)
	}
	return errors.Join(err, f.closeLocked())
}

// Close gives up f and leaves the table as it is.
func (f *WireFilter) Close() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		return nil
	}
	return f.closeLocked()
}

func (f *WireFilter) closeLocked() error {
	f.closed = true
	return f.conn.CloseLasting()
}

// SweepWireFilter removes a table that an agent, dead or alive, left in ns.
func SweepWireFilter(ns *NetNS) error {
	conn, err := openNFT(ns)
	if err != nil {
		return fmt.Errorf("remove the filter of RoCE packets: %w", err)
	}
	rs := &ruleset{conn: conn, table: wireTable()}
	rs.dropTable()
	if err := errors.Join(rs.commit(), conn.CloseLasting()); err != nil {
		return fmt.Errorf("remove the filter of RoCE packets from %s: %w", ns, err)
	}
	return nil
}

// ProbeWire tells whether nf_tables has what a WireFilter needs.
func ProbeWire() error {
	err := probeTable(func(r *ruleset) {
		r.addWire(renderWire(WireConfig{}, false), WireDrops{})
	})
	return feature("nftables: filter of RoCE packets",
		"use a kernel with CONFIG_NF_TABLES_INET, CONFIG_NFT_CT and named counters (Linux 4.10 or later)", err)
}

// ProbeWireRoutes tells whether nf_tables can look up the way back to a packet's
// source.
func ProbeWireRoutes() error {
	err := probeTable(func(r *ruleset) {
		c := r.chain(nftables.Chain{
			Name: "probe", Type: nftables.ChainTypeFilter, Hooknum: nftables.ChainHookInput, Priority: nftables.ChainPriorityFilter,
		})
		r.rule(c, routeBack())
	})
	return feature("nftables: look-up of routes", "load the module nft_fib_inet (CONFIG_NFT_FIB_INET)", err)
}
