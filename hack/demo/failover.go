// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/linux"
	"github.com/smcr-io/kube-smcr/test/netns/lab"
)

const (
	// failoverTimeout ends a demo in which something hangs.
	failoverTimeout = 15 * time.Minute
	// probes are that many, so that each of two links has some.
	probes = 2
	// portEcho is the port of the probes' server.
	portEcho = 7777
	// shownFor is how long at least is looked at the probes after a fault that
	// is seen at once, and silentFor after one that must be found out. Other
	// work on the machine stalls the probes too, so it is no longer than needed.
	shownFor  = 200 * time.Millisecond
	silentFor = time.Second
	// stallLimit is where nobody waits for a stalled connection any longer.
	stallLimit = 8 * time.Second
	// redundantLimit is how long a second link may take: after a silence, which
	// ends without notice, a server tries every 10 s at first.
	redundantLimit = 15 * time.Second
)

// Targets of SMC-R's failover for the applications.
var (
	targetSeen   = target{20 * time.Millisecond, 50 * time.Millisecond}
	targetSilent = target{300 * time.Millisecond, 300 * time.Millisecond}
)

// failovers is the result of the faults, also as JSON.
type failovers struct {
	Faults []*faultRow   `json:"faults"`
	Loads  []*loadResult `json:"applications"`
	// Links are the changes of the links of both nodes, since the start.
	Links []moment `json:"links"`
}

// fault is a way to lose a link.
type fault struct {
	name      string
	cut, mend func(ctx context.Context, rnic int) error
	look      time.Duration // at least
	target    target
}

// faults are all that are shown. The RNIC is a number: there are switches
// between the nodes, so that only one of them sees what happens to its port.
func (d *demo) faults() []fault {
	client, server := d.lab.Nodes[0], d.lab.Nodes[1]
	port := func(n *lab.Node, up bool) func(context.Context, int) error {
		return func(_ context.Context, rnic int) error { return n.SetPort(rnic, up) }
	}
	deaf := func(on bool, nodes ...*lab.Node) func(context.Context, int) error {
		return func(ctx context.Context, rnic int) error {
			var err error
			for _, n := range nodes {
				err = errors.Join(err, n.Deafen(ctx, rnic, on))
			}
			return err
		}
	}
	unplug := func(n *lab.Node) func(context.Context, int) error {
		return func(_ context.Context, rnic int) error { return n.Unplug(rnic) }
	}
	plug := func(n *lab.Node) func(context.Context, int) error {
		return func(_ context.Context, rnic int) error { return n.Plug(rnic) }
	}
	nothing := func(context.Context, int) error { return nil }
	return []fault{
		{"nothing, for comparison", nothing, nothing, shownFor, target{}},
		{"port down, client's node", port(client, false), port(client, true), shownFor, targetSeen},
		{"port down, server's node", port(server, false), port(server, true), shownFor, targetSeen},
		{"device removed, client's node", unplug(client), plug(client), shownFor, targetSeen},
		{"device removed, server's node", unplug(server), plug(server), shownFor, targetSeen},
		{"silence towards the server", deaf(true, server), deaf(false, server), silentFor, targetSilent},
		{"silence towards the client", deaf(true, client), deaf(false, client), silentFor, targetSilent},
		{"silence both ways", deaf(true, client, server), deaf(false, client, server), silentFor, targetSilent},
	}
}

func (d *demo) failoverSteps() []step {
	return []step{
		{"two nodes with two RNICs each, a switch between the RNICs of each network", d.build},
		{"servers, without any privilege", d.startFailoverServers},
		{"the agents", d.startAgents},
		{"links are cut under redis-benchmark, a download and probes", d.failLinks},
	}
}

// failing is a run of the faults. It is owned by one goroutine.
type failing struct {
	*demo
	echo   *echo
	probes []*probe
	lines  *timeline
	// alone is set when there never were two links: then every fault happens
	// once, and waits for no second link.
	alone bool
}

// failLinks lets all faults happen.
func (d *demo) failLinks(ctx context.Context) (err error) {
	f := &failing{demo: d}
	if f.echo, err = startEcho(ctx, d.server, portEcho); err != nil {
		return err
	}
	defer func() {
		for _, p := range f.probes {
			p.close()
		}
		err = errors.Join(err, f.echo.close())
	}()
	f.lines = d.watchLinks(ctx)
	defer func() {
		f.lines.close()
		d.failovers.Links = f.lines.between(0, time.Since(d.began))
	}()
	if err := f.connect(ctx); err != nil {
		return err
	}
	if err := f.twoLinks(ctx); err != nil {
		return err
	}
	// The load's own context: when this one ends it ends at once.
	loadCtx, stopLoad := context.WithCancel(ctx)
	l := d.startLoad(loadCtx)
	err = f.all(ctx)
	if err != nil {
		stopLoad()
	}
	l.finish()
	stopLoad()
	d.failovers.Loads = []*loadResult{&l.download, &l.redis}
	fmt.Fprintln(d.out)
	if terr := writeFaults(d.out, d.failovers.Faults); err == nil {
		err = terr
	}
	fmt.Fprintln(d.out)
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	for _, r := range d.failovers.Faults {
		d.check(r.Fault, r.reached(), "%s", r.stallText())
	}
	for _, r := range d.failovers.Loads {
		d.check(r.Application+" all the time", r.Runs > 0 && r.Failed == 0 && r.Lost == 0, "%s", r)
	}
	return err
}

// twoLinks waits for the second link and shows the links.
func (f *failing) twoLinks(ctx context.Context) error {
	took, err := f.redundant(ctx)
	if err != nil {
		return err
	}
	text, err := f.smcrctl(ctx, "links")
	if err != nil {
		return err
	}
	fmt.Fprintf(f.out, "\nsmcrctl links, on %s:\n%s\n", f.client.Node.Name, text)
	f.alone = took < 0
	detail := fmt.Sprintf("on both nodes, after %s", ms(took))
	if f.alone {
		detail = fmt.Sprintf("not within %v: every fault happens once only", redundantLimit)
	}
	f.check("the link group has two links", !f.alone, "%s", detail)
	return nil
}

// all lets each fault happen as often as wanted.
func (f *failing) all(ctx context.Context) error {
	repeat := f.opts.repeat
	if f.opts.quick {
		repeat = min(repeat, 2)
	}
	if f.alone {
		repeat = 1
	}
	for _, x := range f.faults() {
		row := &faultRow{Fault: x.name, target: x.target, Stalls: []millis{}, Mended: []millis{}, Redundant: []millis{}}
		f.failovers.Faults = append(f.failovers.Faults, row)
		f.progress("  %s", x.name)
		for i := range repeat {
			if err := f.happen(ctx, x, row, i == 0); err != nil {
				return fmt.Errorf("%s: %w", x.name, err)
			}
		}
	}
	return nil
}

// happen lets a fault happen once to the link that carries the first probe,
// and mends it.
func (f *failing) happen(ctx context.Context, x fault, row *faultRow, show bool) error {
	if err := f.connect(ctx); err != nil {
		return err
	}
	rnic, err := f.rnicOf(ctx, f.probes[0])
	if err != nil {
		return err
	}
	from := f.probes[0].now()
	if err := x.cut(ctx, rnic); err != nil {
		return err
	}
	stall, died, err := f.watch(ctx, from, x.look)
	mended := f.probes[0].now()
	if merr := x.mend(ctx, rnic); merr != nil || err != nil {
		return errors.Join(err, merr)
	}
	row.Runs++
	row.Stalls = append(row.Stalls, millis(stall))
	said := ""
	if died == nil {
		if said, died, err = f.recover(ctx, x, row, mended); err != nil {
			return err
		}
	}
	if died != nil {
		row.Died++
		said += fmt.Sprintf("; a connection died: %v", died)
	}
	f.progress("    stall %s%s", ms(stall), said)
	if show {
		for _, m := range f.lines.between(from, f.probes[0].now()) {
			f.progress("      %+5d ms %s: %s", (m.At - from).Milliseconds(), m.Node, m.text)
		}
	}
	return nil
}

// recover waits for the second link after a fault was mended, and watches the
// probes.
func (f *failing) recover(ctx context.Context, x fault, row *faultRow, mended time.Duration) (said string, died, err error) {
	if !f.alone {
		took, err := f.redundant(ctx)
		if err != nil {
			return "", nil, err
		}
		if took < 0 {
			row.Alone++
			said = fmt.Sprintf("; no two links within %v", redundantLimit)
		} else {
			row.Redundant = append(row.Redundant, millis(took))
			said = fmt.Sprintf("; two links %s after it was mended", ms(took))
		}
	}
	stall, died, err := f.watch(ctx, mended, x.look)
	row.Mended = append(row.Mended, millis(stall))
	return said, died, err
}

// watch looks at the probes from a moment on, at least for a while and until
// all get replies again, and returns the longest gap and why a probe ended.
func (f *failing) watch(ctx context.Context, from, least time.Duration) (stall time.Duration, died, err error) {
	for _, p := range f.probes {
		to, err := p.await(ctx, from+least, from+stallLimit)
		if ctx.Err() != nil {
			return 0, nil, context.Cause(ctx)
		}
		stall = max(stall, p.gap(from, to))
		if died == nil {
			died = err
		}
	}
	return stall, died, nil
}

// connect makes the probes that are not there, on SMC-R.
func (f *failing) connect(ctx context.Context) error {
	ctx, cancel := context.WithTimeoutCause(ctx, readyTimeout, fmt.Errorf("no probes on SMC-R after %v", readyTimeout))
	defer cancel()
	f.probes = slices.DeleteFunc(f.probes, func(p *probe) bool {
		if p.failed() == nil {
			return false
		}
		p.close()
		return true
	})
	var last error
	for len(f.probes) < probes {
		c, err := linux.DialInNS(ctx, f.client.NS, nil, netip.Addr{}, netip.AddrPortFrom(f.server.Addr4, portEcho))
		if err == nil {
			p := startProbe(c, f.began)
			if err = f.carried(ctx, p); err == nil {
				f.probes = append(f.probes, p)
				continue
			}
			p.close()
		}
		last = err
		select {
		case <-time.After(tryEvery):
		case <-ctx.Done():
			return errors.Join(context.Cause(ctx), last)
		}
	}
	return nil
}

// carried waits for a probe's first reply and sees that it is on SMC-R.
func (f *failing) carried(ctx context.Context, p *probe) error {
	if _, err := p.await(ctx, 0, p.now()+settleTimeout); err != nil {
		return err
	}
	if p.last() < 0 {
		return fmt.Errorf("no reply within %v", settleTimeout)
	}
	c, err := f.conn(ctx, p)
	if err == nil && c.Mode != modeSMCR {
		err = fmt.Errorf("a probe is on %s: %s", c.Mode, c.Reason)
	}
	return err
}

// conn is what the client's agent says about a probe.
func (f *failing) conn(ctx context.Context, p *probe) (agentapi.Conn, error) {
	cs, err := f.agents[0].API.Conns(ctx)
	if err != nil {
		return agentapi.Conn{}, err
	}
	for _, c := range cs.Conns {
		if c.Source == p.local {
			return c, nil
		}
	}
	return agentapi.Conn{}, fmt.Errorf("the agent does not carry the probe from %v", p.local)
}

// rnicOf returns the number of the client's RNIC that carries a probe.
func (f *failing) rnicOf(ctx context.Context, p *probe) (int, error) {
	c, err := f.conn(ctx, p)
	if err != nil {
		return 0, err
	}
	l, err := f.agents[0].API.Links(ctx)
	if err != nil {
		return 0, err
	}
	addr, ok := deviceOf(l.LinkGroups, c.LinkGroup, c.Link)
	if !ok {
		return 0, fmt.Errorf("link %d of group %d is not there: %s", c.Link, c.LinkGroup, describeLinks(l.LinkGroups))
	}
	for i, r := range f.client.Node.RNICs {
		if r.Address.String() == addr {
			return i, nil
		}
	}
	return 0, fmt.Errorf("no RNIC has address %s", addr)
}

// redundant waits until the probes' group has two links on both nodes, and
// returns how long that took, -1 if it did not happen.
func (f *failing) redundant(ctx context.Context) (time.Duration, error) {
	began := time.Now()
	t := time.NewTicker(lookEvery)
	defer t.Stop()
	for time.Since(began) < redundantLimit {
		both := true
		for i, a := range f.agents {
			l, err := a.API.Links(ctx)
			if err != nil {
				return 0, err
			}
			if i == 0 {
				c, err := f.conn(ctx, f.probes[0])
				if err != nil {
					return 0, err
				}
				both = both && activeLinks(l.LinkGroups, c.LinkGroup) >= 2
				continue
			}
			// The other agent has numbers of its own; only the probes' group
			// is there.
			both = both && slices.ContainsFunc(l.LinkGroups, func(g agentapi.LinkGroup) bool {
				return g.State == stateActive && activeLinks(l.LinkGroups, g.ID) >= 2
			})
		}
		if both {
			return time.Since(began), nil
		}
		select {
		case <-t.C:
		case <-ctx.Done():
			return 0, context.Cause(ctx)
		}
	}
	return -1, nil
}
