// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"encoding/binary"
	"errors"
	"fmt"
	"sync"

	"github.com/google/nftables"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// WireFilter is the table that keeps foreign RoCEv2 packets from the RDMA devices
// of a network namespace, the host's. Its methods may be called from several
// goroutines.
type WireFilter struct {
	ns *NetNS

	mu     sync.Mutex // guards what is below, and makes each transaction whole
	conn   *nftConn
	raw    *netlink.Conn // for requests that conn does not have: those with the handle of a table
	lacks  error         // why the rules do not look up routes; nil: they do
	drops  WireDrops     // the counters of tables that were replaced
	handle uint64        // our table's, which tells it from a successor's; 0: unknown
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
	err = ns.Do(func() (err error) {
		f.raw, err = netlink.Dial(unix.NETLINK_NETFILTER, nil)
		return err
	})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("filter RoCE packets in %s: %w", ns, err), conn.CloseLasting())
	}
	if err := f.replaceLocked(cfg, false); err != nil {
		if perr := ProbeWireRoutes(); perr != nil {
			f.lacks = perr
			err = f.replaceLocked(cfg, false)
		}
		if err != nil {
			return nil, errors.Join(fmt.Errorf("filter RoCE packets in %s: %w", ns, explainWire(err)), f.closeLocked())
		}
	}
	return f, nil
}

// explainWire adds to an error the feature that is missing, if a probe finds one.
func explainWire(err error) error {
	if errors.As(err, new(*ConfigError)) {
		return err
	}
	return errors.Join(ProbeWire(), err)
}

// replaceLocked replaces the table, or in place what is in it, in one transaction: there is no moment without rules,
// and after an error the old rules are unchanged. The counters keep their values. If a base chain is taken away, for an
// instant only, the kernel drops all packets that any program of the node holds in a queue (a firewall, an intrusion
// detection).
func (f *WireFilter) replaceLocked(cfg WireConfig, inPlace bool) error {
	if err := cfg.Validate(); err != nil {
		return err
	}
	rs := &ruleset{conn: f.conn, table: wireTable()}
	rs.beginTable(inPlace)
	rs.addWire(renderWire(cfg, f.lacks == nil), f.drops)
	if err := rs.commit(); err != nil {
		return err
	}
	f.handle, _ = tableHandle(f.raw, wireTableName) // without a handle the table is in force, too
	return nil
}

// tableHandle is the handle of a table of the family inet. Each new table has a new
// handle, also one of the same name.
func tableHandle(c *netlink.Conn, name string) (handle uint64, err error) {
	attrs, err := netlink.MarshalAttributes([]netlink.Attribute{{Type: unix.NFTA_TABLE_NAME, Data: append([]byte(name), 0)}})
	if err != nil {
		return 0, err
	}
	answers, err := c.Execute(netlink.Message{
		Header: netlink.Header{Type: unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_GETTABLE, Flags: netlink.Request},
		Data:   append([]byte{byte(nftables.TableFamilyINet), 0, 0, 0}, attrs...),
	})
	if err != nil {
		return 0, err
	}
	for _, m := range answers {
		if len(m.Data) < nfgenSize {
			continue
		}
		ad, err := netlink.NewAttributeDecoder(m.Data[nfgenSize:])
		if err != nil {
			return 0, err
		}
		ad.ByteOrder = binary.BigEndian
		for ad.Next() {
			if ad.Type() == nftaTableHandle {
				handle = ad.Uint64()
			}
		}
		if err := ad.Err(); err != nil {
			return 0, err
		}
	}
	return handle, nil
}

func wireTable() *nftables.Table {
	return &nftables.Table{Family: nftables.TableFamilyINet, Name: wireTableName}
}

// addWire puts rendered rules into the transaction.
func (r *ruleset) addWire(w wireRules, drops WireDrops) {
	for why, n := range drops {
		if r.inPlace { // they are there, and count on
			break
		}
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

// Update puts cfg in force in one transaction. It also repairs a table that another
// program changed or deleted.
func (f *WireFilter) Update(cfg WireConfig) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		return fmt.Errorf("filter RoCE packets in %s: %w", f.ns, ErrClosed)
	}
	_, err := f.dropsLocked()
	if err != nil && !errors.Is(err, ErrNoTable) {
		return fmt.Errorf("filter RoCE packets in %s: %w", f.ns, err)
	}
	if err == nil {
		err = f.replaceLocked(cfg, true)
	}
	if err != nil { // there is none, or another one
		err = f.replaceLocked(cfg, false)
	}
	if err != nil {
		return fmt.Errorf("filter RoCE packets in %s: %w", f.ns, err)
	}
	return nil
}

// Lacks is a *FeatureError if the kernel cannot look up routes, so that packets of Nodes
// are accepted by Interfaces only; else nil.
func (f *WireFilter) Lacks() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.lacks
}

// Drops returns the numbers of packets that were dropped since f was installed. The error
// is [ErrNoTable] if another program deleted the table.
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
	if found < int(numWireReasons) { // the kernel returns an empty list if there is no table
		return f.drops, fmt.Errorf("count dropped RoCE packets in %s: %w", f.ns, ErrNoTable)
	}
	return f.drops, nil
}

// Remove removes the table and closes f. Only the agent that manages the node may call it:
// otherwise the table may be a successor's.
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

// RemoveOwn removes the table if it is still the one that f made, and closes f. It is for
// an agent that managed the node before: a successor's table stays.
func (f *WireFilter) RemoveOwn() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		return nil
	}
	var err error
	if f.handle != 0 {
		err = deleteTable(f.raw, f.handle)
	}
	if errors.Is(err, unix.ENOENT) {
		err = nil // a successor has replaced the table
	}
	if err != nil {
		err = fmt.Errorf("remove the filter of RoCE packets from %s: %w", f.ns, err)
	}
	return errors.Join(err, f.closeLocked())
}

// deleteTable deletes a table of the family inet by its handle. The library deletes only by
// name, and a successor may make a table of the same name just before.
func deleteTable(c *netlink.Conn, handle uint64) error {
	attr, err := netlink.MarshalAttributes([]netlink.Attribute{{Type: nftaTableHandle, Data: binary.BigEndian.AppendUint64(nil, handle)}})
	if err != nil {
		return err
	}
	// struct nfgenmsg of a batch: the subsystem, in the network's byte order.
	batch := []byte{unix.AF_UNSPEC, 0, 0, unix.NFNL_SUBSYS_NFTABLES}
	_, err = c.SendMessages([]netlink.Message{
		{Header: netlink.Header{Type: unix.NFNL_MSG_BATCH_BEGIN, Flags: netlink.Request}, Data: batch},
		{
			Header: netlink.Header{Type: unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_DELTABLE, Flags: netlink.Request | netlink.Acknowledge},
			Data:   append([]byte{byte(nftables.TableFamilyINet), 0, 0, 0}, attr...),
		},
		{Header: netlink.Header{Type: unix.NFNL_MSG_BATCH_END, Flags: netlink.Request}, Data: batch},
	})
	if err == nil {
		_, err = c.Receive() // the kernel's answer to the deletion
	}
	return err
}

// nftaTableHandle is NFTA_TABLE_HANDLE of linux/netfilter/nf_tables.h.
const nftaTableHandle = 4

// Close closes f and leaves the table as it is.
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
	return errors.Join(f.conn.CloseLasting(), f.raw.Close())
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

// ProbeWireRoutes tells whether nf_tables can look up routes: the way back to a packet's
// source, and whether a packet is for the namespace itself.
func ProbeWireRoutes() error {
	err := probeTable(func(r *ruleset) {
		c := r.chain(nftables.Chain{
			Name: "probe", Type: nftables.ChainTypeFilter, Hooknum: nftables.ChainHookInput, Priority: nftables.ChainPriorityFilter,
		})
		r.rule(c, routeBack())
	})
	return feature("nftables: look-up of routes", "load the module nft_fib_inet (CONFIG_NFT_FIB_INET)", err)
}
