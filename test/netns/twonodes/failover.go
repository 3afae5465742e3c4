// SPDX-License-Identifier: Apache-2.0

package twonodes

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

// Targets of SMC-R's failover for the applications.
var (
	targetSeen   = target{20 * time.Millisecond, 50 * time.Millisecond}
	targetSilent = target{300 * time.Millisecond, 300 * time.Millisecond}
)

// FailoverFindings are what [Failover] found out, also as JSON.
type FailoverFindings struct {
	Faults []*FaultRow   `json:"faults"`
	Loads  []*LoadResult `json:"applications"`
	// Links are the changes of the links of both nodes, since the start.
	Links []Moment `json:"links"`
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
func (f *Failover) faults() []fault {
	client, server := f.lab.Nodes[0], f.lab.Nodes[1]
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

// Failover is the other story: connections survive the loss of a link. Links are
// cut one after the other under running applications, in every way that a lab
// knows, and how long the applications stall is measured. It is owned by one
// goroutine.
type Failover struct {
	*Nodes
	file     body
	findings FailoverFindings
	echo     *echo
	probes   []*probe
	lines    *timeline
	// alone is set when there never were two links: then every fault happens
	// once, and waits for no second link.
	alone bool
}

// NewFailover begins the story. Close it, whether it was run or not.
func NewFailover(cfg Config, audience Audience) *Failover {
	return &Failover{Nodes: &Nodes{
		cfg: cfg, audience: audience, began: time.Now(), switched: true,
		// A connection that fell back must not make the next ones TCP.
		settings: "  negativeCacheTTL: 0s\n",
	}}
}

// Run tells the story. An error ends it; a statement that does not hold does not.
func (f *Failover) Run(ctx context.Context) error {
	return f.play(ctx, failoverTimeout, []step{
		{"two nodes with two RNICs each, a switch between the RNICs of each network", f.build},
		{"servers, without any privilege", f.startServers},
		{"the agents", f.startAgents},
		{"links are cut under redis-benchmark, a download and probes", f.failLinks},
	})
}

// Findings returns what was found out so far.
func (f *Failover) Findings() FailoverFindings { return f.findings }

// failLinks lets all faults happen.
func (f *Failover) failLinks(ctx context.Context) (err error) {
	if f.echo, err = startEcho(ctx, f.server, portEcho); err != nil {
		return err
	}
	defer func() {
		for _, p := range f.probes {
			p.close()
		}
		err = errors.Join(err, f.echo.close())
	}()
	f.lines = f.watchLinks(ctx)
	defer func() {
		f.lines.close()
		f.findings.Links = f.lines.between(0, time.Since(f.began))
	}()
	if err := f.connect(ctx); err != nil {
		return err
	}
	if err := f.twoLinks(ctx); err != nil {
		return err
	}
	// The load's own context: when this one ends it ends at once.
	loadCtx, stopLoad := context.WithCancel(ctx)
	l := f.startLoad(loadCtx)
	err = f.all(ctx)
	if err != nil {
		stopLoad()
	}
	l.finish()
	stopLoad()
	f.findings.Loads = []*LoadResult{&l.download, &l.redis}
	f.show("\n%s\n", faultTable(f.findings.Faults))
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	for _, r := range f.findings.Faults {
		f.check(r.Fault, r.reached(), "%s", r.stallText())
	}
	for _, r := range f.findings.Loads {
		f.check(r.Application+" all the time", r.Runs > 0 && r.Failed == 0 && r.Lost == 0, "%s", r)
	}
	return err
}

// twoLinks waits for the second link and shows the links.
func (f *Failover) twoLinks(ctx context.Context) error {
	took, err := f.redundant(ctx)
	if err != nil {
		return err
	}
	text, err := f.smcrctl(ctx, "links")
	if err != nil {
		return err
	}
	f.show("\nsmcrctl links, on %s:\n%s\n", f.client.Node.Name, text)
	f.alone = took < 0
	detail := fmt.Sprintf("on both nodes, after %s", ms(took))
	if f.alone {
		detail = fmt.Sprintf("not within %v: every fault happens once only", redundantLimit)
	}
	f.check("the link group has two links", !f.alone, "%s", detail)
	return nil
}

// all lets each fault happen as often as wanted.
func (f *Failover) all(ctx context.Context) error {
	repeat := max(1, f.cfg.Repeat)
	if f.cfg.Quick {
		repeat = min(repeat, 2)
	}
	if f.alone {
		repeat = 1
	}
	for _, x := range f.faults() {
		row := &FaultRow{Fault: x.name, target: x.target.times(f.cfg.Slack), Stalls: []Millis{}, Mended: []Millis{}, Redundant: []Millis{}}
		f.findings.Faults = append(f.findings.Faults, row)
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
func (f *Failover) happen(ctx context.Context, x fault, row *FaultRow, show bool) error {
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
	row.Stalls = append(row.Stalls, Millis(stall))
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
func (f *Failover) recover(ctx context.Context, x fault, row *FaultRow, mended time.Duration) (said string, died, err error) {
	if !f.alone {
		took, err := f.redundant(ctx)
		if err != nil {
			return "", nil, err
		}
		if took < 0 {
			row.Alone++
			said = fmt.Sprintf("; no two links within %v", redundantLimit)
		} else {
			row.Redundant = append(row.Redundant, Millis(took))
			said = fmt.Sprintf("; two links %s after it was mended", ms(took))
		}
	}
	stall, died, err := f.watch(ctx, mended, x.look)
	row.Mended = append(row.Mended, Millis(stall))
	return said, died, err
}

// watch looks at the probes from a moment on, at least for a while and until
// all get replies again, and returns the longest gap and why a probe ended.
func (f *Failover) watch(ctx context.Context, from, least time.Duration) (stall time.Duration, died, err error) {
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
func (f *Failover) connect(ctx context.Context) error {
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
func (f *Failover) carried(ctx context.Context, p *probe) error {
	if _, err := p.await(ctx, 0, p.now()+endTimeout); err != nil {
		return err
	}
	if p.last() < 0 {
		return fmt.Errorf("no reply within %v", endTimeout)
	}
	c, err := f.conn(ctx, p)
	if err == nil && c.Mode != modeSMCR {
		err = fmt.Errorf("a probe is on %s: %s", c.Mode, c.Reason)
	}
	return err
}

// conn is what the client's agent says about a probe.
func (f *Failover) conn(ctx context.Context, p *probe) (agentapi.Conn, error) {
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
func (f *Failover) rnicOf(ctx context.Context, p *probe) (int, error) {
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
func (f *Failover) redundant(ctx context.Context) (time.Duration, error) {
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
