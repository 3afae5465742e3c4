// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"cmp"
	"fmt"
	"maps"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/cni"
	"github.com/smcr-io/kube-smcr/internal/config"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
)

func (a *agent) apiStatus(*http.Request) (agentapi.Status, error) {
	n := a.node.Load()
	g, t := a.gauges(), a.metrics.sum()
	s := agentapi.Status{
		APIVersion: agentapi.Version, Node: n.Name, Version: a.cfg.Version, Started: a.started,
		Accelerating: a.option != nil && g.ready > 0, Draining: a.draining.Load(),
		Devices: a.deviceInfo(),
		Pods:    agentapi.PodCount{Attached: g.ready + g.idle + g.failed, Ready: g.ready, Failed: g.failed},
		Conns: agentapi.ConnSums{
			Live: g.flowsSMCR + g.flowsTCP, LiveSMCR: g.flowsSMCR,
			TotalSMCR: t.connsSMCR, TotalTCP: t.connsTCP, Reset: t.resets, BytesSMCR: t.bytesSMCR, BytesTCP: t.bytesTCP,
		},
		LinkGroups: g.groups, NodeBudget: a.pool.info(), Policies: []string{}, Reasons: t.reasons,
	}
	for _, p := range n.Policies {
		s.Policies = append(s.Policies, p.Name)
	}
	for _, d := range s.Devices {
		if d.Port != rdma.PortActive.String() {
			s.Problems = append(s.Problems, fmt.Sprintf("device %s: its port is %s: check the interface and its address %s", d.Name, d.Port, d.Address))
		}
	}
	if a.problem != "" {
		s.Problems = append(s.Problems, a.problem)
	}
	if len(n.Policies) == 0 {
		s.Problems = append(s.Problems, "the configuration has no policies, so nothing is selected for SMC-R")
	}
	if g.failed > 0 {
		s.Problems = append(s.Problems, fmt.Sprintf("%d pods could not be set up: see attachments", g.failed))
	}
	for _, f := range a.flows.list(nil) { // counters have the ended ones
		if i := f.info(); i.Mode == smcr.ModeSMCR.String() {
			s.Conns.BytesSMCR += i.BytesSent + i.BytesRecv
		}
	}
	return s, nil
}

// deviceInfo describes the devices as they are now.
func (a *agent) deviceInfo() []agentapi.Device {
	out := make([]agentapi.Device, len(a.devices))
	for i, d := range a.devices {
		port := d.Port()
		out[i] = agentapi.Device{Name: d.Name(), Provider: d.Attr().Provider, MTU: port.ActiveMTU.Bytes(), Port: port.State.String()}
		if d.cfg.Soft() {
			out[i].Address = d.cfg.SoftAddress.String()
		}
		for _, g := range d.GIDs() {
			out[i].Interface = cmp.Or(out[i].Interface, g.NetDev)
		}
	}
	return out
}

func (a *agent) apiLinks(*http.Request) (agentapi.Links, error) {
	out := agentapi.Links{APIVersion: agentapi.Version, LinkGroups: []agentapi.LinkGroup{}}
	for _, p := range a.manager.snapshot() {
		if p.run == nil {
			continue
		}
		for _, g := range p.run.stack.LinkGroups() {
			out.LinkGroups = append(out.LinkGroups, linkGroup(podOf(p.atts[0]).String(), g))
		}
	}
	slices.SortFunc(out.LinkGroups, func(x, y agentapi.LinkGroup) int {
		return cmp.Or(cmp.Compare(x.Pod, y.Pod), cmp.Compare(x.ID, y.ID))
	})
	return out, nil
}

func linkGroup(pod string, g smcr.GroupInfo) agentapi.LinkGroup {
	out := agentapi.LinkGroup{
		ID: g.ID, Pod: pod, Role: g.Role.String(), PeerID: fmt.Sprint(g.PeerID), State: g.State, Dialect: g.Dialect, Redundancy: g.Redundancy,
		Version: g.Version, EID: g.EID, Release: g.Release, PeerHost: g.PeerHost, NoV2: agentapi.CodeOf(g.NoV2), Conns: g.Conns, RMBBytes: g.RMBBytes, Opened: g.Opened, Links: []agentapi.Link{},
	}
	if g.Err != nil {
		out.Error = g.Err.Error()
	}
	for _, l := range g.Links {
		out.Links = append(out.Links, agentapi.Link{
			ID: l.ID, State: l.State, Device: l.Device, LocalGID: fmt.Sprint(l.LocalGID), PeerGID: fmt.Sprint(l.PeerGID),
			LocalQPN: uint32(l.LocalQPN), PeerQPN: uint32(l.PeerQPN), MTU: l.MTU.Bytes(), UserID: l.UserID,
			Conns: l.Conns, BytesSent: l.BytesSent, BytesRecv: l.BytesRecv,
		})
	}
	return out
}

func (a *agent) apiConns(*http.Request) (agentapi.Conns, error) {
	out := agentapi.Conns{APIVersion: agentapi.Version, Conns: []agentapi.Conn{}}
	fs := a.flows.list(nil)
	for _, f := range fs[:min(len(fs), maxShownConns)] {
		out.Conns = append(out.Conns, f.info())
	}
	return out, nil
}

func (a *agent) apiAttachments(*http.Request) (agentapi.Attachments, error) {
	out := agentapi.Attachments{
		APIVersion: agentapi.Version, Attachments: []agentapi.Attachment{},
		Bypasses: a.bypasses.list(time.Now()), Malformed: a.manager.junk(),
	}
	pods := a.manager.snapshot()
	n := a.node.Load()
	for _, key := range slices.Sorted(maps.Keys(pods)) {
		p := pods[key]
		for _, att := range p.atts {
			x := agentapi.Attachment{
				ContainerID: att.ContainerID, Interface: att.IfName, Pod: podOf(att).String(), NetNS: att.NetNS,
				Addresses: att.IPs, State: p.state, Policies: []string{},
			}
			for _, pol := range n.PoliciesFor(podOf(att)) {
				x.Policies = append(x.Policies, pol.Name)
			}
			if p.err != nil {
				x.Detail = p.err.Error()
			} else if p.state == agentapi.StateIdle {
				x.Detail = cmp.Or(a.problem, "no policy selects the pod")
			}
			if p.run != nil {
				x.Budget = p.run.pool.info()
			}
			out.Attachments = append(out.Attachments, x)
		}
	}
	return out, nil
}

// attached is an attachment with what became of its pod.
type attached struct {
	att cni.Attachment
	pod *pod
}

// lookup finds the attachment that has an address.
func (a *agent) lookup(addr netip.Addr) (attached, bool) {
	return a.find(func(att cni.Attachment) bool {
		return slices.ContainsFunc(att.IPs, func(p netip.Prefix) bool { return p.Addr() == addr })
	})
}

func (a *agent) find(match func(cni.Attachment) bool) (attached, bool) {
	pods := a.manager.snapshot()
	for _, key := range slices.Sorted(maps.Keys(pods)) {
		for _, att := range pods[key].atts {
			if match(att) {
				return attached{att, pods[key]}, true
			}
		}
	}
	return attached{}, false
}

func (a *agent) apiExplain(req *http.Request) (agentapi.Explanation, error) {
	q := req.URL.Query()
	dst, err := netip.ParseAddrPort(q.Get("dst"))
	if err != nil {
		return agentapi.Explanation{}, badRequest{fmt.Errorf("destination %q: want ADDRESS:PORT, IPv6 as [ADDRESS]:PORT", q.Get("dst"))}
	}
	dst = netip.AddrPortFrom(dst.Addr().Unmap(), dst.Port())
	var (
		src     attached
		isOurs  bool
		sources []netip.Addr
	)
	if addr, err := netip.ParseAddr(q.Get("src")); err == nil {
		sources = []netip.Addr{addr.Unmap()}
		src, isOurs = a.lookup(addr.Unmap())
	} else if strings.Contains(q.Get("src"), "/") {
		src, isOurs = a.find(func(att cni.Attachment) bool { return podOf(att).String() == q.Get("src") })
		for _, ip := range src.att.IPs {
			sources = append(sources, ip.Addr())
		}
	} else {
		return agentapi.Explanation{}, badRequest{fmt.Errorf("source %q: want an address, or NAMESPACE/NAME of a pod on this node", q.Get("src"))}
	}
	e := agentapi.Explanation{APIVersion: agentapi.Version, Recent: a.decisions.find(sources, dst), Live: []agentapi.Conn{}}
	for _, f := range a.flows.list(nil) {
		if f.dst == dst && slices.Contains(sources, f.src.Addr()) {
			e.Live = append(e.Live, f.info())
		}
	}
	a.judge(&e, src, isOurs, sources, dst)
	e.Advice = e.Code.Advice()
	return e, nil
}

// judge fills in the verdict: the first of the following that holds.
func (a *agent) judge(e *agentapi.Explanation, src attached, isOurs bool, sources []netip.Addr, dst netip.AddrPort) {
	say := func(code agentapi.Code, format string, args ...any) {
		e.Code, e.Verdict = code, fmt.Sprintf(format, args...)
	}
	pod, peer, dir := src, dst, config.Outbound
	if !isOurs {
		// Seen from the server's side?
		var ok bool
		if pod, ok = a.lookup(dst.Addr()); !ok || len(sources) == 0 {
			say(agentapi.CodeNotAttached, "neither the source nor the destination is a pod attached on this node")
			return
		}
		peer, dir = netip.AddrPortFrom(sources[0], dst.Port()), config.Inbound
	}
	id := podOf(pod.att)
	d := a.node.Load().Decide(id, peer, dir)
	e.Pod, e.Policy, e.Required = id.String(), d.Policy, d.Required
	e.Bypassed = a.bypasses.get(id.String(), dst, time.Now())
	switch {
	case !d.Accelerate:
		say(agentapi.CodeNoPolicy, "plain TCP: %s", d.Reason)
	case a.option == nil && !d.Required:
		say(agentapi.CodeNoOption, "plain TCP: %s", a.problem)
	case pod.pod.state == agentapi.StateFailed:
		say(agentapi.CodePodFailed, "plain TCP: the pod could not be set up: %v", pod.pod.err)
	case slices.ContainsFunc(e.Live, func(c agentapi.Conn) bool { return c.Mode == smcr.ModeSMCR.String() }):
		say(agentapi.CodeOK, "on SMC-R: %d connections now", len(e.Live))
	case e.Bypassed != nil:
		left := time.Until(e.Bypassed.Until).Round(time.Second)
		say(e.Bypassed.Reason, "plain TCP, not diverted for another %v: %s", left, e.Bypassed.Reason.Text())
	case len(e.Recent) > 0:
		last := e.Recent[0]
		how := map[string]string{smcr.ModeSMCR.String(): "on SMC-R", agentapi.ModeReset: "reset"}[last.Mode]
		who := ""
		if last.PeerDeclined {
			who = "the peer declined: "
		}
		if last.Reason == agentapi.CodeOK {
			say(last.Reason, "on SMC-R, the last time %v ago", time.Since(last.Last).Round(time.Second))
		} else {
			say(last.Reason, "%s: %s%s", cmp.Or(how, "plain TCP"), who, last.Reason.Text())
		}
	default:
		say(agentapi.CodeUnseen, "selected by policy %s, but no connection was seen yet", d.Policy)
	}
}
