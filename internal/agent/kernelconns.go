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
	"github.com/smcr-io/kube-smcr/internal/kernelpath"
	"github.com/smcr-io/kube-smcr/internal/linux"
	"github.com/smcr-io/kube-smcr/internal/smcnl"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
)

// kernelWitness is what the kernel tells of its SMC-R, for pods.
type kernelWitness interface {
	// conns are the connections of a pod's sockets of SMC.
	conns(n podNet) ([]kernelpath.Conn, error)
	// groups are the link groups of the machine.
	groups() ([]smcnl.Group, error)
	// counters are what the kernel counted in a pod's namespace. The error is errNoCounters of a pod in the node's network.
	counters(n podNet) (smcnl.Counters, error)
	// cookie is that of a pod's namespace, 0 of a pod in the node's network.
	cookie(n podNet) (uint64, error)
}

func (linuxSMC) conns(n podNet) ([]kernelpath.Conn, error) { return kernelpath.Conns(placeOf(n)) }
func (linuxSMC) groups() ([]smcnl.Group, error)            { return smcnl.Groups() }
func (linuxSMC) counters(n podNet) (c smcnl.Counters, err error) {
	at := placeOf(n)
	if at.Cgroup != nil {
		return c, errNoCounters
	}
	err = at.NetNS.Do(func() error {
		c, err = smcnl.ReadCounters()
		return err
	})
	return c, err
}

func (linuxSMC) cookie(n podNet) (uint64, error) {
	at := placeOf(n)
	if at.Cgroup != nil {
		return 0, nil
	}
	return at.NetNS.Cookie()
}

// errNoCounters means that the kernel has no counters for a pod alone.
var errNoCounters = errors.New("the kernel counts the connections of the node's network together")

// kernelConns are the connections of pods on their kernel's SMC-R, and of those whose sockets are SMC's and that fell
// back: most of them at most, and how many more there are. The error says why some may be missing.
func (a *agent) kernelConns(most int, of func(*pod) bool) (out []agentapi.Conn, more int, err error) {
	var groups []smcnl.Group
	asked := false
	pods := a.manager.snapshot()
	n := a.node.Load()
	for _, key := range slices.Sorted(maps.Keys(pods)) {
		p := pods[key]
		if p.kernel == nil || !of(p) {
			continue
		}
		conns, cerr := a.cfg.smc.conns(p.kernel.net)
		if errors.Is(cerr, linux.ErrClosed) {
			continue // the pod is just going
		}
		if cerr != nil {
			err = errors.Join(err, fmt.Errorf("connections of %v: %w", podOf(p.atts[0]), cerr))
		}
		if len(conns) > 0 && !asked {
			var gerr error
			asked = true
			groups, gerr = a.cfg.smc.groups()
			err = errors.Join(err, gerr)
		}
		shown := min(len(conns), most-len(out))
		for i := range conns[:shown] {
			out = append(out, a.kernelConn(n, p, &conns[i], groups))
		}
		more += len(conns) - shown
	}
	return out, more, err
}

// kernelConn is a connection of a pod's kernel.
func (a *agent) kernelConn(n *config.Node, p *pod, c *kernelpath.Conn, groups []smcnl.Group) agentapi.Conn {
	pod := podOf(attachmentWith(p.atts, c.Local.Addr()))
	out := agentapi.Conn{
		ID: c.Cookie, Pod: pod.String(), Datapath: config.DatapathKernel.String(), Direction: agentapi.Outbound,
		Source: c.Local, Dest: c.Peer, State: c.State, Token: c.Token,
		SendBuffer: int(c.SendBufBytes), RMBE: int(c.RMBEBytes), PeerRMBE: int(c.PeerRMBEBytes),
	}
	peer := c.Peer
	if c.Inbound {
		out.Direction, out.Source, out.Dest = agentapi.Inbound, c.Peer, c.Local
		peer = netip.AddrPortFrom(c.Peer.Addr(), c.Local.Port())
	}
	var d config.Decision
	known := !peer.Addr().IsUnspecified()
	if known {
		d = n.Decide(pod, peer)
		out.Policy = d.Policy
	}
	switch {
	case c.Mode == smcnl.ModeTCP:
		why := whyOfKernel(&c.Socket)
		why.detail += wrongInterface(p.atts, c.Local.Addr(), c.Reason)
		if known {
			why.code = a.codeOfPod(p, why.code, d, peer.Addr())
		}
		out.Mode, out.Reason, out.Detail = smcr.ModeTCP.String(), why.code, why.detail
	case c.State == smcnl.StateInit:
		out.Mode = agentapi.ModeConnecting
	default:
		out.Mode, out.Link = smcr.ModeSMCR.String(), c.LinkID
		if g := groupOf(&c.Socket, groups); g != nil {
			out.LinkGroup, out.Version = g.ID, g.Version
		}
	}
	return out
}

// codeOfPod is the code of a connection that fell back: that of the pod's filter, if perhaps that erased the
// option, for which the kernel has no other word than that the peer has no SMC.
func (a *agent) codeOfPod(p *pod, code agentapi.Code, d config.Decision, peer netip.Addr) agentapi.Code {
	switch {
	case code != agentapi.CodeOf(clc.ReasonPeerNoSMC):
	case !d.Accelerate:
		return codeOfDecision(d)
	case a.isSameNode(p.atts, peer):
		return agentapi.CodeSameNode
	}
	return code
}

// fellBack records a connection that the kernel made TCP, if it is one of a pod's.
func (a *agent) fellBack(f kernelpath.Fallback) {
	src, ok := a.fallbackOf(f)
	if !ok {
		return
	}
	id := podOf(src.att)
	out := agentapi.Decision{
		Pod: id.String(), Direction: agentapi.Outbound, Source: f.Local.Addr(), Dest: f.Peer, Mode: smcr.ModeTCP.String(), Last: time.Now(),
	}
	peer := f.Peer
	if f.Inbound {
		out.Direction, out.Source, out.Dest = agentapi.Inbound, f.Peer.Addr(), f.Local
		peer = netip.AddrPortFrom(f.Peer.Addr(), f.Local.Port())
	}
	d := a.node.Load().Decide(id, peer)
	why := whyOfKernel(&smcnl.Socket{Reason: f.Reason, PeerReason: f.PeerReason, IPv6: f.IPv6})
	why.detail += wrongInterface(src.pod.atts, f.Local.Addr(), f.Reason)
	out.Reason, out.PeerDeclined, out.Detail, out.Policy = a.codeOfPod(src.pod, why.code, d, peer.Addr()), why.peerDeclined, why.detail, d.Policy
	if !a.decisions.record(out) {
		return
	}
	if ok, dropped := a.logLimit.allow(out.Last); ok {
		src.pod.kernel.log.Info("connection decided by the pod's kernel", "direction", out.Direction, "source", out.Source, "destination", out.Dest,
			"mode", out.Mode, "reason", out.Reason, "detail", out.Detail, "policy", out.Policy, "leftOut", dropped)
	}
}

// fallbackOf finds the pod that such a connection is of. Others may have its address, in other networks.
func (a *agent) fallbackOf(f kernelpath.Fallback) (attached, bool) {
	if f.Cgroup != 0 {
		return a.hostPodOf(f.Cgroup)
	}
	for _, p := range a.manager.snapshot() {
		if p.kernel == nil || p.kernel.cookie != f.NetNS {
			continue
		}
		for _, att := range p.atts {
			if hasAddress(att, f.Local.Addr()) {
				return attached{att, p}, true
			}
		}
	}
	return attached{}, false
}

// whyOfKernel is why a socket fell back: the reasons are the diagnosis codes of CLC, of this side or of the peer's
// Decline.
func whyOfKernel(s *smcnl.Socket) fallback {
	why := fallback{code: agentapi.CodeOf(s.Reason), detail: fmt.Sprintf("the kernel says 0x%08x %v", uint32(s.Reason), s.Reason)}
	if s.Reason == clc.ReasonPeerDecl && s.PeerReason != clc.ReasonNone {
		why.code, why.peerDeclined = agentapi.CodeOf(s.PeerReason), true
		why.detail += fmt.Sprintf(", the peer 0x%08x %v", uint32(s.PeerReason), s.PeerReason)
	}
	if s.IPv6 && s.Reason == clc.ReasonNoDev { // the kernel has no other word for that
		why.detail += "; the program's socket is one of IPv6, which the kernel's SMC-R does not carry, nor to IPv4 addresses before Linux 6.14"
	}
	return why
}

// wrongInterface is what there is to say of a connection that the kernel found no RDMA device for, of a pod with several interfaces:
// mostly all but one are of no such device, as that of the pod's first network.
func wrongInterface(atts []cni.Attachment, local netip.Addr, why clc.Reason) string {
	if why != clc.ReasonNoDev {
		return ""
	}
	var by string
	var others []string
	for _, att := range atts {
		for name, ips := range interfacesOf(att) {
			if slices.ContainsFunc(ips, func(p netip.Prefix) bool { return p.Addr() == local }) {
				by = name
			} else if !slices.Contains(others, name) {
				others = append(others, name)
			}
		}
	}
	if by == "" || len(others) == 0 {
		return ""
	}
	slices.Sort(others)
	return fmt.Sprintf("; it is by %s, and the kernel uses no RDMA device but that of the interface which a connection is by: the pod has %s, too",
		by, strings.Join(others, ", "))
}

// interfacesOf are the interfaces of an attachment, with their addresses: its own, and those of claimed devices beside it.
func interfacesOf(att cni.Attachment) map[string][]netip.Prefix {
	out := map[string][]netip.Prefix{att.IfName: att.IPs}
	for _, d := range att.Devices {
		if d.IfName != "" {
			out[d.IfName] = append(slices.Clone(out[d.IfName]), d.IPs...)
		}
	}
	return out
}

// groupOf is the link group of a connection. The kernel does not tell it; where several have a link
// between the same two GIDs, it is not known.
func groupOf(s *smcnl.Socket, groups []smcnl.Group) (found *smcnl.Group) {
	for i := range groups {
		g := &groups[i]
		if g.Role != s.Role || !slices.ContainsFunc(g.Links, func(l smcnl.Link) bool {
			return l.ID == s.LinkID && l.Device == s.Device && l.GID == s.GID && l.PeerGID == s.PeerGID
		}) {
			continue
		}
		if found != nil {
			return nil
		}
		found = g
	}
	return found
}

// kernelGroups are the link groups of the node's kernel while pods use them.
func (a *agent) kernelGroups() (out []agentapi.LinkGroup, err error) {
	if !a.kernelPath.used() {
		return nil, nil
	}
	groups, err := a.cfg.smc.groups()
	if err != nil {
		return nil, err
	}
	pci := a.kernelPCI()
	for i := range groups {
		out = append(out, kernelGroup(&groups[i], pci))
	}
	slices.SortFunc(out, func(x, y agentapi.LinkGroup) int { return cmp.Compare(x.ID, y.ID) })
	return out, nil
}

// kernelPCI are the PCI addresses of the RDMA devices that pods on their kernel's SMC-R have for themselves, by name.
func (a *agent) kernelPCI() map[string]string {
	out := map[string]string{}
	for _, p := range a.manager.snapshot() {
		if p.kernel == nil {
			continue
		}
		for _, d := range a.recordedDevices(p.atts) {
			for _, name := range d.RDMA {
				out[name] = d.PCI
			}
		}
	}
	return out
}

// kernelGroup is a link group of the kernel's, which all pods of the node have together. pci has the devices that are of one pod.
func kernelGroup(g *smcnl.Group, pci map[string]string) agentapi.LinkGroup {
	var says clc.FirstContactExtension
	says.SetHost(g.PeerHost)
	out := agentapi.LinkGroup{
		ID: g.ID, Datapath: config.DatapathKernel.String(), Role: string(g.Role), State: stateOfKernel(g), Dialect: "linux",
		Version: g.Version, EID: g.EID, Release: g.Release, PeerClaimedName: says.Host(),
		Redundancy: g.Redundancy, Conns: int(g.Conns), RMBBytes: int(g.RMBBytes), Links: []agentapi.Link{},
	}
	for _, l := range g.Links {
		out.Links = append(out.Links, agentapi.Link{
			ID: l.ID, State: l.State, Device: l.Device, PCI: pci[l.Device], LocalGID: l.GID.String(), PeerGID: l.PeerGID.String(), UserID: l.UserID, Conns: int(l.Conns),
		})
	}
	return out
}

// stateOfKernel is the state of a link group in our engine's words, of which the kernel has those of links only.
func stateOfKernel(g *smcnl.Group) string {
	has := func(state string) bool {
		return slices.ContainsFunc(g.Links, func(l smcnl.Link) bool { return l.State == state })
	}
	switch {
	case has("ACTIVE"):
		return "ACTIVE"
	case has("ACTIVATING"):
		return "FORMING"
	}
	return "CLOSED"
}

// used tells whether pods have this datapath.
func (k *kernelPath) used() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.pods > 0
}

// kernelLive are the live connections of pods' kernels from one of the sources to a destination. Pods in the node's network have
// the same addresses.
func (a *agent) kernelLive(sources []netip.Addr, dst netip.AddrPort) ([]agentapi.Conn, error) {
	all, more, err := a.kernelConns(maxShownConns, func(p *pod) bool {
		return isHostPod(p.atts) || slices.ContainsFunc(p.atts, func(att cni.Attachment) bool {
			return slices.ContainsFunc(att.Addresses(), func(ip netip.Prefix) bool {
				return ip.Addr() == dst.Addr() || slices.Contains(sources, ip.Addr())
			})
		})
	})
	if more > 0 {
		err = errors.Join(err, fmt.Errorf("of the connections of pods' kernels the first %d are looked at, and %d further ones are not", maxShownConns, more))
	}
	return slices.DeleteFunc(all, func(c agentapi.Conn) bool {
		return c.Dest != dst || !slices.Contains(sources, c.Source.Addr())
	}), err
}

// kernelVerdict says what becomes of connections that a policy selects, of a pod whose kernel carries them.
func kernelVerdict(e *agentapi.Explanation, sameNode bool) (agentapi.Code, string) {
	carried := 0
	var plain *agentapi.Conn
	for i := range e.Live {
		switch c := &e.Live[i]; c.Mode {
		case smcr.ModeSMCR.String():
			carried++
		case smcr.ModeTCP.String():
			plain = c
		}
	}
	switch {
	case carried > 0:
		return agentapi.CodeOK, "on SMC-R of the pod's kernel: " + connsNow(carried)
	case sameNode:
		return agentapi.CodeSameNode, "plain TCP: " + agentapi.CodeSameNode.Text()
	case plain != nil:
		return plain.Reason, fmt.Sprintf("plain TCP, as the pod's kernel found: %s (%s)", plain.Reason.Text(), plain.Detail)
	}
	none := fmt.Sprintf("selected by policy %s, and the pod's kernel carries it: no such connection is open", e.Policy)
	if len(e.Recent) == 0 || e.Recent[0].Mode != smcr.ModeTCP.String() {
		return agentapi.CodeUnseen, none
	}
	last := e.Recent[0]
	ago := time.Since(last.Last)
	if ago > fellBackLately { // nobody tells of those that the kernel carried since then
		return agentapi.CodeUnseen, fmt.Sprintf("%s; %v ago one was plain TCP: %s (%s)", none, ago.Round(time.Second), last.Reason.Text(), last.Detail)
	}
	return last.Reason, fmt.Sprintf("plain TCP, as the pod's kernel found %v ago: %s (%s)", ago.Round(time.Second), last.Reason.Text(), last.Detail)
}
