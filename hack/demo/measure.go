// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"time"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
)

const (
	// clcBytes is what the TCP connection under an SMC-R connection may
	// carry: handshake, CLC messages (332 bytes), acknowledgments and the end,
	// with their headers some 1.3 KB.
	clcBytes = 2048
	// strayBytes is for neighbour discovery and the like on the pod's link.
	strayBytes = 16 << 10
)

// counters are what was counted up to a moment.
type counters struct {
	opens    uint64 // connections begun in the client's pod
	podBytes uint64 // through the client's interface, both directions
	underlay uint64 // through the client's node's underlay, both directions
	agents   [2]agentapi.ConnSums
}

// count reads the counters while no connection is open.
func (d *demo) count(ctx context.Context) (c counters, err error) {
	if err := d.settle(ctx); err != nil {
		return c, err
	}
	if c.opens, err = d.client.ActiveOpens(); err != nil {
		return c, err
	}
	rx, tx, err := d.client.Bytes()
	if err != nil {
		return c, err
	}
	c.podBytes = rx + tx
	if rx, tx, err = d.client.Node.UnderlayBytes(); err != nil {
		return c, err
	}
	c.underlay = rx + tx
	for i, a := range d.agents {
		if a == nil {
			continue
		}
		s, err := a.API.Status(ctx)
		if err != nil {
			return c, err
		}
		c.agents[i] = s.Conns
	}
	return c, nil
}

// usage is the difference of two counts.
type usage struct {
	conns, onSMCR, atServer uint64
	byRDMA, byTCP, underlay uint64
}

func used(before, after counters) usage {
	smcr := after.agents[0].TotalSMCR - before.agents[0].TotalSMCR
	tcp := after.agents[0].TotalTCP - before.agents[0].TotalTCP
	return usage{
		// The agent makes a connection of its own for each that it carries.
		conns:    after.opens - before.opens - smcr - tcp,
		onSMCR:   smcr,
		atServer: after.agents[1].TotalSMCR - before.agents[1].TotalSMCR,
		byRDMA:   after.agents[0].BytesSMCR - before.agents[0].BytesSMCR,
		byTCP:    after.podBytes - before.podBytes,
		underlay: after.underlay - before.underlay,
	}
}

// measure runs an application and counts.
func (d *demo) measure(ctx context.Context, a app) (outcome, usage, error) {
	before, err := d.count(ctx)
	if err != nil {
		return outcome{}, usage{}, err
	}
	o, err := d.once(ctx, a)
	if err != nil {
		return outcome{}, usage{}, err
	}
	after, err := d.count(ctx)
	if err != nil {
		return outcome{}, usage{}, fmt.Errorf("after %s: %w", a.name, err)
	}
	return o, used(before, after), nil
}

// measurePlain runs the applications while no agent runs.
func (d *demo) measurePlain(ctx context.Context) error {
	for _, a := range d.apps() {
		o, u, err := d.measure(ctx, a)
		if err != nil {
			return err
		}
		d.report.Applications = append(d.report.Applications, row{Application: a.name, Plain: o.rate})
		d.progress("  %s: %d connections, %s", a.name, u.conns, o.rate)
		if o.wrong != "" {
			d.check(a.name+" over TCP", false, "%s", o.wrong)
		}
		if u.underlay > strayBytes {
			d.check(a.name+" over TCP", false, "%s on the underlay, want none", byteCount(u.underlay))
		}
	}
	return nil
}

// measureSMCR runs them again with the agents.
func (d *demo) measureSMCR(ctx context.Context) error {
	var shown chan view
	list := d.apps()
	for i, a := range list {
		if i == len(list)-1 {
			shown = make(chan view, 1)
			go func() { shown <- d.look(ctx) }()
		}
		o, u, err := d.measure(ctx, a)
		if err != nil {
			if shown != nil {
				<-shown
			}
			return err
		}
		r := &d.report.Applications[i]
		r.Conns, r.OnSMCR, r.ByRDMA, r.ByTCP, r.Rate = u.conns, u.onSMCR, u.byRDMA, u.byTCP, o.rate
		r.Ratio = o.rate.Value / r.Plain.Value
		d.judge(a.name, o, u)
	}
	fmt.Fprintln(d.out)
	if err := writeTable(d.out, d.report.Applications); err != nil {
		return err
	}
	v := <-shown
	if v.err != nil {
		return v.err
	}
	d.report.Links, d.report.Conns = v.links, v.conns
	d.checkVersion(v.links.LinkGroups)
	fmt.Fprintf(d.out, "\nsmcrctl links, on %s, while iperf3 ran:\n%s", d.client.Node.Name, v.linksText)
	fmt.Fprintf(d.out, "\nsmcrctl conns:\n%s\n", v.connsText)
	live := 0
	for _, c := range v.conns.Conns {
		if c.Mode == modeSMCR {
			live++
		}
	}
	d.check("smcrctl shows the connections", live > 0 && len(v.links.LinkGroups) > 0,
		"%d connections on SMC-R in %d link groups", live, len(v.links.LinkGroups))
	return nil
}

const modeSMCR = "SMC-R"

// judge checks that a run with SMC-R was what it should be, in ways that do
// not depend on each other.
func (d *demo) judge(name string, o outcome, u usage) {
	d.check(name+": every connection is on SMC-R", u.conns > 0 && u.onSMCR == u.conns && u.atServer == u.conns,
		"%d connections, %d by the client's agent, %d by the server's", u.conns, u.onSMCR, u.atServer)
	most := u.conns*clcBytes + strayBytes
	d.check(name+": the bytes went by RDMA", u.byRDMA >= o.bytes && u.underlay >= u.byRDMA && u.byTCP <= most,
		"%s of payload, %s by RDMA, %s on the underlay, %s by TCP (at most %s)",
		byteCount(o.bytes), byteCount(u.byRDMA), byteCount(u.underlay), byteCount(u.byTCP), byteCount(most))
	if o.wrong != "" {
		d.check(name+": content", false, "%s", o.wrong)
	}
}

// checkVersion: the pods are in two IP subnets, so version 1 would not do.
func (d *demo) checkVersion(groups []agentapi.LinkGroup) {
	old := 0
	for _, g := range groups {
		if g.Version < 2 {
			old++
		}
	}
	d.check("SMC-R is of version 2", old == 0 && len(groups) > 0,
		"%d link groups, %d of them of version 1; the pods are in different IP subnets", len(groups), old)
}

// view is what smcrctl shows at one moment.
type view struct {
	links                agentapi.Links
	conns                agentapi.Conns
	linksText, connsText string
	err                  error
}

// look waits until connections are carried, and a little, and asks.
func (d *demo) look(ctx context.Context) (v view) {
	ctx, cancel := context.WithTimeout(ctx, readyTimeout)
	defer cancel()
	v.err = d.agents[0].WaitStatus(ctx, "connections on SMC-R", func(s agentapi.Status) bool { return s.Conns.LiveSMCR > 1 })
	if v.err != nil {
		return v
	}
	select {
	case <-time.After(shownAfter):
	case <-ctx.Done():
	}
	if v.links, v.err = d.agents[0].API.Links(ctx); v.err != nil {
		return v
	}
	if v.conns, v.err = d.agents[0].API.Conns(ctx); v.err != nil {
		return v
	}
	if v.linksText, v.err = d.smcrctl(ctx, "links"); v.err != nil {
		return v
	}
	v.connsText, v.err = d.smcrctl(ctx, "conns")
	return v
}
