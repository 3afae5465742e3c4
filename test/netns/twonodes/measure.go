// SPDX-License-Identifier: Apache-2.0

package twonodes

import (
	"context"
	"fmt"
	"time"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
)

// counters are what was counted up to a moment.
type counters struct {
	opens    uint64 // connections begun in the client's pod
	podBytes uint64 // through the client's interface, both directions
	underlay uint64 // through the client's node's underlay, both directions
	agents   [2]agentapi.ConnSums
}

// count reads the counters while no connection is open.
func (ap *Applications) count(ctx context.Context) (c counters, err error) {
	if err := ap.quiesce(ctx); err != nil {
		return c, err
	}
	if c.opens, err = ap.client.ActiveOpens(); err != nil {
		return c, err
	}
	rx, tx, err := ap.client.Bytes()
	if err != nil {
		return c, err
	}
	c.podBytes = rx + tx
	if rx, tx, err = ap.client.Node.UnderlayBytes(); err != nil {
		return c, err
	}
	c.underlay = rx + tx
	for i, a := range ap.agents {
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
func (ap *Applications) measure(ctx context.Context, a app) (outcome, usage, error) {
	before, err := ap.count(ctx)
	if err != nil {
		return outcome{}, usage{}, err
	}
	o, err := ap.once(ctx, a)
	if err != nil {
		return outcome{}, usage{}, err
	}
	after, err := ap.count(ctx)
	if err != nil {
		return outcome{}, usage{}, fmt.Errorf("after %s: %w", a.name, err)
	}
	return o, used(before, after), nil
}

// measurePlain runs the applications while no agent runs.
func (ap *Applications) measurePlain(ctx context.Context) error {
	for _, a := range ap.apps() {
		o, u, err := ap.measure(ctx, a)
		if err != nil {
			return err
		}
		ap.findings.Applications = append(ap.findings.Applications, Row{Application: a.name, Plain: o.rate})
		ap.progress("  %s: %d connections, %s", a.name, u.conns, o.rate)
		if o.wrong != "" {
			ap.check(a.name+" over TCP", false, "%s", o.wrong)
		}
		if u.underlay > strayBytes {
			ap.check(a.name+" over TCP", false, "%s on the underlay, want none", byteCount(u.underlay))
		}
	}
	return nil
}

// measureSMCR runs them again with the agents.
func (ap *Applications) measureSMCR(ctx context.Context) error {
	var shown chan view
	list := ap.apps()
	for i, a := range list {
		if i == len(list)-1 {
			shown = make(chan view, 1)
			go func() { shown <- ap.look(ctx) }()
		}
		o, u, err := ap.measure(ctx, a)
		if err != nil {
			if shown != nil {
				<-shown
			}
			return err
		}
		r := &ap.findings.Applications[i]
		r.Conns, r.OnSMCR, r.ByRDMA, r.ByTCP, r.Rate = u.conns, u.onSMCR, u.byRDMA, u.byTCP, o.rate
		r.Ratio = o.rate.Value / r.Plain.Value
		ap.judge(a.name, o, u)
	}
	ap.show("\n%s", table(ap.findings.Applications))
	v := <-shown
	if v.err != nil {
		return v.err
	}
	ap.findings.Links, ap.findings.Conns = v.links, v.conns
	ap.checkVersion(v.links.LinkGroups)
	ap.show("\nsmcrctl links, on %s, while iperf3 ran:\n%s", ap.client.Node.Name, v.linksText)
	ap.show("\nsmcrctl conns:\n%s\n", v.connsText)
	live := 0
	for _, c := range v.conns.Conns {
		if c.Mode == modeSMCR {
			live++
		}
	}
	ap.check("smcrctl shows the connections", live > 0 && len(v.links.LinkGroups) > 0,
		"%d connections on SMC-R in %d link groups", live, len(v.links.LinkGroups))
	return nil
}

const modeSMCR = "SMC-R"

// judge checks that a run with SMC-R was what it should be, in ways that do
// not depend on each other.
func (ap *Applications) judge(name string, o outcome, u usage) {
	ap.check(name+": every connection is on SMC-R", u.conns > 0 && u.onSMCR == u.conns && u.atServer == u.conns,
		"%d connections, %d by the client's agent, %d by the server's", u.conns, u.onSMCR, u.atServer)
	most := u.conns*clcBytes + strayBytes
	ap.check(name+": the bytes went by RDMA", u.byRDMA >= o.bytes && u.underlay >= u.byRDMA && u.byTCP <= most,
		"%s of payload, %s by RDMA, %s on the underlay, %s by TCP (at most %s)",
		byteCount(o.bytes), byteCount(u.byRDMA), byteCount(u.underlay), byteCount(u.byTCP), byteCount(most))
	if o.wrong != "" {
		ap.check(name+": content", false, "%s", o.wrong)
	}
}

// checkVersion: the pods are in two IP subnets, so version 1 would not do.
func (ap *Applications) checkVersion(groups []agentapi.LinkGroup) {
	old := 0
	for _, g := range groups {
		if g.Version < 2 {
			old++
		}
	}
	ap.check("SMC-R is of version 2", old == 0 && len(groups) > 0,
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
func (ap *Applications) look(ctx context.Context) (v view) {
	ctx, cancel := context.WithTimeout(ctx, readyTimeout)
	defer cancel()
	v.err = ap.agents[0].WaitStatus(ctx, "connections on SMC-R", func(s agentapi.Status) bool { return s.Conns.LiveSMCR > 1 })
	if v.err != nil {
		return v
	}
	select {
	case <-time.After(shownAfter):
	case <-ctx.Done():
	}
	if v.links, v.err = ap.agents[0].API.Links(ctx); v.err != nil {
		return v
	}
	if v.conns, v.err = ap.agents[0].API.Conns(ctx); v.err != nil {
		return v
	}
	if v.linksText, v.err = ap.smcrctl(ctx, "links"); v.err != nil {
		return v
	}
	v.connsText, v.err = ap.smcrctl(ctx, "conns")
	return v
}
