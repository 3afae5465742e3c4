// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/cni"
	"github.com/smcr-io/kube-smcr/internal/config"
	"github.com/smcr-io/kube-smcr/internal/linux"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/verbs"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
)

// Status is the agent's status.
func (v View) Status() agentapi.Status {
	a := v.a
	n := a.node.Load()
	g, t := a.gauges(), a.metrics.sum()
	lack := a.unableNode()
	s := agentapi.Status{
		APIVersion: agentapi.Version, Node: n.Name, Version: a.cfg.Version, Instance: a.cfg.Instance, Started: a.started,
		Synced: a.manager.synced.Load(), Takeover: n.Takeover,
		Accelerating: lack.code == "" && g.ready > 0 || g.kernel > 0, Draining: a.draining.Load(), Unable: lack.why, UnableCode: lack.code,
		Devices: a.deviceInfo(), HardwareVerbs: verbs.Built,
		Pods: agentapi.PodCount{Attached: g.ready + g.idle + g.failed, Ready: g.ready, Failed: g.failed, Paused: g.paused},
		Conns: agentapi.ConnSums{
			Live: g.sessionsSMCR + g.sessionsTCP + g.undecided, LiveSMCR: g.sessionsSMCR,
			TotalSMCR: t.connsSMCR, TotalTCP: t.connsTCP, Reset: t.resets, BytesSMCR: t.bytesSMCR, BytesTCP: t.bytesTCP,
		},
		Wire: g.wire, LinkGroups: g.linkGroups(), NodeBudget: a.ledger.info(), FewFiles: a.fewFiles, Policies: []string{}, Reasons: t.reasons,
	}
	// The ledger's limits: without enough files they are less than configured.
	room := n.RoomOf(config.Budget{MemoryBytes: s.NodeBudget.MemoryBytes, Conns: s.NodeBudget.Conns, SocketBytes: s.NodeBudget.SocketBytes})
	s.NodeBudget.RoomConns, s.NodeBudget.RoomPeers = room.Conns, room.Peers
	s.Metrics = n.MetricsAddress.IsValid()
	if p := a.noMetrics.Load(); p != nil && *p != "" {
		s.NoMetrics = *p
		s.Problems = append(s.Problems, *p)
	}
	if a.cfg.Cluster != nil {
		c := a.cfg.Cluster()
		s.Cluster = &c
		s.Problems = append(s.Problems, clusterProblems(c)...)
	}
	s.Policies = append(s.Policies, n.PolicyNames()...)
	for _, d := range s.Devices {
		if d.Port != rdma.PortActive.String() && d.Missing == "" {
			s.Problems = append(s.Problems, fmt.Sprintf("device %s: its port is %s: check the interface and its address %s", d.Name, d.Port, d.Address))
		}
	}
	for _, d := range a.rnics.All() {
		if d.Own != nil && d.Err != nil {
			s.Problems = append(s.Problems, d.Err.Error())
		}
	}
	if lack.why != "" {
		s.Problems = append(s.Problems, lack.why)
	} else {
		for _, d := range s.Devices {
			if d.Missing != "" {
				s.Problems = append(s.Problems, d.Missing)
			}
		}
	}
	if a.holds.err != nil {
		s.Problems = append(s.Problems, fmt.Sprintf("%s is true, but SYNs cannot be held, so connect() of pods' programs succeeds before their destination answers: %v", setting("holdSYNs", n), a.holds.err))
	}
	if text := wireProblem(s.Wire); text != "" {
		s.Problems = append(s.Problems, text)
	}
	if text := a.refusals.recent(time.Now()); text != "" {
		s.Problems = append(s.Problems, text)
	}
	if len(n.Policies) == 0 && !n.InCluster() {
		s.Problems = append(s.Problems, "the configuration has no policies, so nothing is selected for SMC-R")
	}
	if g.meshed > 0 {
		s.Problems = append(s.Problems, fmt.Sprintf("in %d pods another program redirects connections or has rules for the owner, the mark or the tracking of packets, so nothing is on SMC-R there: see attachments", g.meshed))
	}
	if g.unheld > 0 {
		s.Problems = append(s.Problems, fmt.Sprintf("in %d pods SYNs are not held although %s is true: see attachments", g.unheld, setting("holdSYNs", n)))
	}
	if g.failed > 0 {
		s.Problems = append(s.Problems, fmt.Sprintf("%d pods could not be set up: see attachments", g.failed))
	}
	for _, f := range a.sessions.list(nil) { // counters have only those that ended
		if i := f.info(); i.Mode == smcr.ModeSMCR.String() {
			s.Conns.BytesSMCR += i.BytesSent + i.BytesRecv
		}
	}
	return s
}

// askedStatus is Status for who asks once in a while: the kernels of pods are asked, too.
func (v View) askedStatus() agentapi.Status {
	s := v.Status()
	sums, err := v.a.kernelSums()
	s.Conns.Kernel = sums
	if err != nil {
		s.Problems = append(s.Problems, err.Error())
	}
	return s
}

// clusterProblems says what the agent lacks of its cluster.
func clusterProblems(c agentapi.Cluster) (out []string) {
	if !c.Joined {
		out = append(out, c.Lacks)
	}
	if c.Away != "" {
		out = append(out, fmt.Sprintf("the API server is not reached since %s; the agent goes on with what it knew then, and reports later: %s",
			c.AwaySince.Format(time.RFC3339), c.Away))
	}
	return out
}

// Links are the link groups of all pods, and those of the node's kernel while pods use them.
func (v View) Links() agentapi.Links {
	a := v.a
	out := agentapi.Links{APIVersion: agentapi.Version, LinkGroups: []agentapi.LinkGroup{}}
	a.eachStack(func(u stackUse) {
		for _, g := range u.stack.LinkGroups() {
			out.LinkGroups = append(out.LinkGroups, a.linkGroup(&u, g))
		}
	})
	slices.SortFunc(out.LinkGroups, func(x, y agentapi.LinkGroup) int {
		return cmp.Or(cmp.Compare(x.Pod, y.Pod), cmp.Compare(x.ID, y.ID))
	})
	groups, err := a.kernelGroups()
	out.LinkGroups = append(out.LinkGroups, groups...)
	if err != nil {
		out.Problem = err.Error()
	}
	return out
}

// LostLinks are the link groups of all pods that were lost in the last seconds. No link of theirs is left.
func (v View) LostLinks() []agentapi.LinkGroup {
	var out []agentapi.LinkGroup
	v.a.eachStack(func(u stackUse) {
		for _, g := range u.stack.LostGroups() {
			out = append(out, v.a.linkGroup(&u, g))
		}
	})
	return out
}

func (a *agent) linkGroup(u *stackUse, g smcr.GroupInfo) agentapi.LinkGroup {
	out := agentapi.LinkGroup{
		ID: g.ID, Pod: u.pod, Role: g.Role.String(), PeerID: fmt.Sprint(g.PeerID), State: g.State, Dialect: g.Dialect, Redundancy: g.Redundancy,
		Version: g.Version, EID: g.EID, Release: g.Release, PeerClaimedName: g.PeerHost, NoV2: agentapi.CodeOf(g.NoV2), Conns: g.Conns, RMBBytes: g.RMBBytes, Opened: g.Opened, Links: []agentapi.Link{},
	}
	if g.Err != nil {
		out.Error = g.Err.Error()
	}
	for _, l := range g.Links {
		out.Links = append(out.Links, agentapi.Link{
			ID: l.ID, State: l.State, Device: l.Device, PCI: u.set.PCI(l.Device), LocalGID: fmt.Sprint(l.LocalGID), PeerGID: fmt.Sprint(l.PeerGID),
			LocalQPN: uint32(l.LocalQPN), PeerQPN: uint32(l.PeerQPN), MTU: l.MTU.Bytes(), UserID: l.UserID,
			Conns: l.Conns, BytesSent: l.BytesSent, BytesRecv: l.BytesRecv,
		})
	}
	return out
}

// Conns are the live sessions, and the connections of pods' kernels, of the pod NAMESPACE/NAME or, if that is "", of all: the first
// maxShownConns of them.
func (v View) Conns(of string) agentapi.Conns {
	a, whose := v.a, "node"
	out := agentapi.Conns{APIVersion: agentapi.Version, Conns: []agentapi.Conn{}}
	fs := a.sessions.list(nil)
	if of != "" {
		whose = "pod"
		fs = slices.DeleteFunc(fs, func(s *session) bool { return s.pod.String() != of })
	}
	shown := min(len(fs), maxShownConns)
	for _, s := range fs[:shown] {
		out.Conns = append(out.Conns, s.info())
	}
	conns, more, err := a.kernelConns(maxShownConns-shown, func(p *pod) bool {
		return of == "" || slices.ContainsFunc(p.atts, func(att cni.Attachment) bool { return podOf(att).String() == of })
	})
	out.Conns = append(out.Conns, conns...)
	if more += len(fs) - shown; more > 0 {
		err = errors.Join(err, fmt.Errorf("these are the first %d connections of the %s; %d further ones are not shown", maxShownConns, whose, more))
	}
	if err != nil {
		out.Problem = err.Error()
	}
	return out
}

// Attachments are the attached pods and their state.
func (v View) Attachments() agentapi.Attachments {
	a := v.a
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
				Addresses: append([]netip.Prefix{}, att.Addresses()...), State: p.state.String(), Policies: []string{},
			}
			for _, pol := range n.PoliciesFor(podOf(att)) {
				x.Policies = append(x.Policies, pol.Name)
			}
			if p.kernel != nil && (p.state != podFailed || !p.kernel.leaving && !p.kernel.withheld) { // or it could not come back, and is plain TCP
				x.Datapath = config.DatapathKernel.String()
			}
			x.NotKernel = notKernelBecause(n, p, podOf(att))
			a.sayLack(&x, n, p, podOf(att))
			switch {
			case p.set.Own():
				for _, d := range p.set.States() {
					x.Devices = append(x.Devices, d.Own.ID)
				}
			case x.Datapath != "": // its kernel has what the pod's interfaces are of, and no other device that kubelet gave it
				for _, d := range a.recordedDevices(p.atts) {
					x.Devices = append(x.Devices, d.ID)
				}
			}
			if p.proxy != nil {
				x.Budget, x.Paused = p.proxy.account.info(p.proxy.memory), p.proxy.paused()
				x.GreedySources = p.proxy.greedySources()
			}
			out.Attachments = append(out.Attachments, x)
		}
	}
	return out
}

// sayLack fills in what an attachment lacks, for people and as a code. Policies of x are filled in.
func (a *agent) sayLack(x *agentapi.Attachment, n *config.Node, p *pod, id config.Pod) {
	lack := a.lackOf(n, p, id)
	switch {
	case p.state == podIdle && p.kernel != nil:
		x.Detail = cmp.Or(p.kernel.revoked.problem, leavingBecause(p.err))
	case p.err != nil:
		x.Detail = p.err.Error()
		if p.kernel != nil && p.kernel.withheld && p.kernel.revoked.problem != "" {
			x.Detail += "; " + p.kernel.revoked.problem
		}
	case p.state == podKernel:
		x.Detail = p.kernel.revoked.problem
	case p.state == podIdle && isHostPod(p.atts):
		x.Detail = x.NotKernel
	case p.state == podIdle:
		x.Detail = idleBecause(lack.why, n, id)
	case p.state == podReady:
		x.Detail = cmp.Or(lack.why, p.proxy.whyUnheld(), p.proxy.unreadableRules())
	}
	switch {
	case p.state == podReady: // the pod's connections are plain TCP, or refused
		x.Reason = lack.code
	case p.state != podIdle || len(x.Policies) == 0:
	case p.kernel != nil:
		x.Reason = agentapi.CodeOldSockets
	case !isHostPod(p.atts):
		x.Reason = lack.code
	}
}

// lackOf is why no connection of a pod can be on SMC-R with its devices, its surroundings, and what policies allow it.
func (a *agent) lackOf(n *config.Node, p *pod, id config.Pod) unable {
	if lack := a.unableFor(p); lack.code != "" {
		return lack
	}
	if m := mismatchOf(n.SettingsFor(id), p.set.Hardware()); m != config.MismatchNone {
		return unable{m.String(), agentapi.Code(m.Code())}
	}
	return unable{}
}

// idleBecause says why nothing is diverted in an idle pod.
func idleBecause(lack string, n *config.Node, pod config.Pod) string {
	switch {
	case lack != "":
		return lack
	case len(n.PoliciesFor(pod)) == 0 && n.InCluster():
		return config.ReasonOptedOut.String()
	}
	return "no policy selects the pod"
}

// notKernelBecause says why the agent carries a pod whose first policy wants its kernel's SMC-R, "" if it
// does not.
func notKernelBecause(n *config.Node, p *pod, id config.Pod) string {
	if p.unavailable != nil {
		return p.unavailable.Error()
	}
	_, overruled := n.DatapathFor(id)
	return overruled
}

// leavingBecause says why something of the kernel's SMC-R is left in a pod that is not to be on it.
func leavingBecause(err error) string {
	if err != nil {
		return "not detached from its kernel's SMC-R, and tried again: " + err.Error()
	}
	return "plain TCP; programs have sockets of the kernel's SMC-R from before, which no connection uses: restart them"
}

// sourcesOf are the addresses from which a pod connects.
func (a *agent) sourcesOf(p *pod) []netip.Addr {
	if !isHostPod(p.atts) {
		return p.addresses()
	}
	all, err := a.cfg.smc.addresses()
	if err != nil {
		a.cfg.Log.Warn("addresses of the node not read", "err", err)
	}
	return all
}

// hostPodOf finds the pod in the node's network that a cgroup was chosen for.
func (a *agent) hostPodOf(cgroup uint64) (attached, bool) {
	for _, p := range a.manager.snapshot() {
		if p.kernel != nil && isHostPod(p.atts) && p.kernel.net.id() == cgroup {
			return attached{p.atts[0], p}, true
		}
	}
	return attached{}, false
}

// hostPodAt finds the pod in the node's network that an explanation about an address of the node is about: the one whose connections
// these are or, if nobody has any, the only one that there is.
func (a *agent) hostPodAt(e *agentapi.Explanation, addr netip.Addr) (found attached, ok bool) {
	if all, err := a.cfg.smc.addresses(); err != nil || !slices.Contains(all, addr) {
		return attached{}, false
	}
	named := map[string]bool{}
	for _, c := range e.Live {
		named[c.Pod] = true
	}
	for _, d := range e.Recent {
		named[d.Pod] = true
	}
	n := 0
	for _, p := range a.manager.snapshot() {
		if !isHostPod(p.atts) {
			continue
		}
		n++
		if x := (attached{p.atts[0], p}); named[podOf(x.att).String()] {
			return x, true
		} else if found.pod == nil {
			found = x
		}
	}
	return found, n == 1
}

// attached is an attachment and its pod.
type attached struct {
	att cni.Attachment
	pod *pod
}

// addresses are those of all interfaces of the pod.
func (p *pod) addresses() (out []netip.Addr) {
	for _, att := range p.atts {
		for _, ip := range att.Addresses() {
			out = append(out, ip.Addr())
		}
	}
	return out
}

// lookup finds the attachment that has an address.
func (a *agent) lookup(addr netip.Addr) (attached, bool) {
	return a.find(func(att cni.Attachment) bool { return hasAddress(att, addr) })
}

// find finds the first attachment that matches, one of a pod that is gone only if there is no other.
func (a *agent) find(match func(cni.Attachment) bool) (found attached, ok bool) {
	pods := a.manager.snapshot()
	for _, key := range slices.Sorted(maps.Keys(pods)) {
		for _, att := range pods[key].atts {
			if !match(att) {
				continue
			}
			if !pods[key].isGone() {
				return attached{att, pods[key]}, true
			}
			found, ok = attached{att, pods[key]}, true
		}
	}
	return found, ok
}

// Explain says what happens to connections from a source to a destination, and why. The source is
// an address, or NAMESPACE/NAME of a pod on this node. The error says what is wrong with the
// question.
func (v View) Explain(source, destination string) (agentapi.Explanation, error) {
	a := v.a
	dst, err := netip.ParseAddrPort(destination)
	if err != nil {
		return agentapi.Explanation{}, fmt.Errorf("destination %q: want ADDRESS:PORT, IPv6 as [ADDRESS]:PORT", destination)
	}
	dst = netip.AddrPortFrom(dst.Addr().Unmap(), dst.Port())
	var (
		src     attached
		isOurs  bool
		sources []netip.Addr
	)
	if addr, err := netip.ParseAddr(source); err == nil {
		sources = []netip.Addr{addr.Unmap()}
		src, isOurs = a.lookup(addr.Unmap())
	} else if strings.Contains(source, "/") {
		src, isOurs = a.find(func(att cni.Attachment) bool { return podOf(att).String() == source })
		if isOurs {
			sources = a.sourcesOf(src.pod)
		}
	} else {
		return agentapi.Explanation{}, fmt.Errorf("source %q: want an address, or NAMESPACE/NAME of a pod on this node", source)
	}
	e := agentapi.Explanation{APIVersion: agentapi.Version, Recent: a.decisions.find(sources, dst), Live: []agentapi.Conn{}}
	for _, s := range a.sessions.list(nil) {
		if s.dst == dst && slices.Contains(sources, s.src.Addr()) {
			e.Live = append(e.Live, s.info())
		}
	}
	live, err := a.kernelLive(sources, dst)
	e.Live = append(e.Live, live...)
	if err != nil {
		e.Problem = err.Error()
	}
	if isOurs && isHostPod(src.pod.atts) { // others have its addresses, too
		e.Live = slices.DeleteFunc(e.Live, func(c agentapi.Conn) bool { return c.Pod != source })
		e.Recent = slices.DeleteFunc(e.Recent, func(d agentapi.Decision) bool { return d.Pod != source })
	}
	if !isOurs && slices.ContainsFunc(a.node.Load().HostPods, func(p config.HostPod) bool { return p.String() == source }) {
		e.Pod, e.Code, e.Verdict = source, agentapi.CodePodFailed, "plain TCP: the pod is in the node's network, and its cgroup is not there yet"
		return e, nil
	}
	p := a.verdict(&e, src, isOurs, sources, dst)
	e.Advice = e.Code.Advice()
	if n := a.wire.info().Dropped[linux.WireUnknownSource.String()]; n > 0 && isNotConfirmed(e.Code) {
		e.Advice = fmt.Sprintf("this agent dropped %d RoCE packets of addresses of no node and no peer: if the peer sends from such a one, add it to %s; else %s",
			n, setting("wire.peers", a.node.Load()), e.Advice)
	}
	if p == nil || p.proxy == nil {
		return e, nil
	}
	var last agentapi.Decision
	if len(e.Recent) > 0 {
		last = e.Recent[0]
	}
	if e.Budget = p.proxy.fullBudget(e.Code, last.Detail, a.node.Load(), podOf(p.atts[0])); e.Budget != nil {
		e.Advice = fmt.Sprintf("raise %s, or %s", e.Budget.Field, besidesRaising(e.Code))
	}
	return e, nil
}

// isNotConfirmed reports whether a code says that what is sent on a new link did not come through.
func isNotConfirmed(code agentapi.Code) bool {
	return code == agentapi.Code(clc.ReasonTimeoutCL.String()) || code == agentapi.Code(clc.ReasonTimeoutAL.String())
}

// onSMCR is how many of some connections are on SMC-R; others are plain TCP, or being set up.
func onSMCR(conns []agentapi.Conn) (n int) {
	for i := range conns {
		if conns[i].Mode == smcr.ModeSMCR.String() {
			n++
		}
	}
	return n
}

// connsNow counts connections that are there, for people.
func connsNow(n int) string {
	if n == 1 {
		return "1 connection now"
	}
	return fmt.Sprintf("%d connections now", n)
}

// verdict fills in the verdict: the first that applies of the cases below. It returns the pod that
// it is about, nil if that is none of this node.
func (a *agent) verdict(e *agentapi.Explanation, src attached, isOurs bool, sources []netip.Addr, dst netip.AddrPort) *pod {
	say := func(code agentapi.Code, format string, args ...any) {
		e.Code, e.Verdict = code, fmt.Sprintf(format, args...)
	}
	pod, peer, dir := src, dst, agentapi.Outbound
	if !isOurs {
		// This node may be the server's side.
		var ok bool
		if pod, ok = a.lookup(dst.Addr()); !ok {
			pod, ok = a.hostPodAt(e, dst.Addr())
		}
		if !ok || len(sources) == 0 {
			say(agentapi.CodeNotAttached, "neither the source nor the destination is a pod attached on this node")
			return nil
		}
		peer, dir = netip.AddrPortFrom(sources[0], dst.Port()), agentapi.Inbound
	}
	id := podOf(pod.att)
	n := a.node.Load()
	d, lack := n.Decide(id, peer), a.lackOf(n, pod.pod, id)
	e.Pod, e.Policy, e.Required, e.NotKernel, e.Unresolved, e.Bypassed = id.String(), d.Policy, d.Required, notKernelBecause(n, pod.pod, id),
		n.UnresolvedFor(id), a.bypasses.get(id.String(), dst, time.Now())
	datapath, _ := n.DatapathFor(id)
	switch {
	case !d.Accelerate:
		say(codeOfDecision(d), "plain TCP: %s", d.Reason)
	case pod.pod.kernel != nil && !pod.pod.kernel.leaving && (!pod.pod.kernel.withheld || onSMCR(e.Live) > 0):
		e.Code, e.Verdict = kernelVerdict(e, a.isSameNode(pod.pod.atts, peer.Addr()))
		if pod.pod.err != nil {
			e.Verdict += fmt.Sprintf("; what policies say now is not in force in the pod, and it is tried again: %v", pod.pod.err)
		}
	case datapath == config.DatapathKernel:
		say(agentapi.CodePodFailed, "plain TCP: the pod could not be set up: %v", pod.pod.err)
	case pod.pod.kernel != nil && pod.pod.state == podIdle:
		say(agentapi.CodeOldSockets, "%s", leavingBecause(pod.pod.err))
	case isHostPod(pod.pod.atts):
		say(agentapi.CodePodFailed, "plain TCP: of a pod in the node's network only its kernel carries connections: %s", e.NotKernel)
	case lack.code != "" && !d.Required:
		say(lack.code, "plain TCP: %s", lack.why)
	case pod.pod.state == podFailed:
		say(agentapi.CodePodFailed, "plain TCP: the pod could not be set up: %v", pod.pod.err)
	case onSMCR(e.Live) > 0:
		say(agentapi.CodeOK, "on SMC-R: %s", connsNow(onSMCR(e.Live)))
	case e.Bypassed != nil:
		left := time.Until(e.Bypassed.Until).Round(time.Second)
		say(e.Bypassed.Reason, "plain TCP, not diverted for another %v: %s", left, e.Bypassed.Reason.Text())
	case pod.pod.proxy != nil && pod.pod.proxy.paused() != agentapi.CodeOK && !d.Required:
		code := pod.pod.proxy.paused()
		say(code, "plain TCP, nothing of the pod is diverted for now: %s", code.Text())
	case dir == agentapi.Inbound && pod.pod.proxy != nil && slices.Contains(pod.pod.proxy.greedySources(), peer.Addr()) && !d.Required:
		say(agentapi.CodeBudgetSource, "plain TCP: %s", agentapi.CodeBudgetSource.Text())
	case dir == agentapi.Outbound && !d.Required && a.holds.on && a.attachedTo(pod.pod.atts, sources, dst.Addr()):
		say(agentapi.CodeSameNode, "plain TCP: %s", agentapi.CodeSameNode.Text())
	case pod.pod.proxy != nil && pod.pod.proxy.out.lacks(peer.Addr()):
		say(agentapi.CodeUndiverted, "%s: %s", map[bool]string{true: "not let through, connect() may wait for long", false: "plain TCP"}[d.Required && dir == agentapi.Outbound], noIPv6Detail)
	case len(e.Recent) > 0:
		last := e.Recent[0]
		how := map[string]string{smcr.ModeSMCR.String(): "on SMC-R", agentapi.ModeReset: "reset", agentapi.ModeEnded: "ended", agentapi.ModeConnecting: "never connected"}[last.Mode]
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
	return pod.pod
}
