// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"cmp"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/smcr-io/kube-smcr/internal/cni"
	"github.com/smcr-io/kube-smcr/internal/config"
	"github.com/smcr-io/kube-smcr/internal/kernelpath"
	"github.com/smcr-io/kube-smcr/internal/linux"
	"github.com/smcr-io/kube-smcr/pkg/smcr/synopt"
)

// kernelSMC is what the machine gives for datapath Kernel. Tests have one that needs no privileges.
type kernelSMC interface {
	// open puts the program to work, or finds it at work.
	open(eids []string) (chooser, error)
	// pinned tells whether an agent with this data directory put the program to work.
	pinned() bool
	// mayHave tells whether an agent may have left something of it in a pod, without the program.
	mayHave(n podNet) (bool, error)
	// remove takes away what open left.
	remove() error
	// addresses are those of the node.
	addresses() ([]netip.Addr, error)
	kernelWitness
}

// chooser is *kernelpath.Chooser, for pods.
type chooser interface {
	// fit tells whether the kernel finds an RDMA device for a pod.
	fit(n podNet, cfg kernelpath.PodConfig) error
	attach(n podNet, cfg kernelpath.PodConfig) error
	detach(n podNet, cfg kernelpath.PodConfig) (left bool, err error)
	purge(n podNet, cfg kernelpath.PodConfig) error
	// others are the namespaces and cgroups that are chosen, or whose option is filtered, but for those of these pods.
	others(known []podNet) ([]kernelpath.Choice, error)
	// filtered tells whether the filter of a pod's option is there: others, and the pod itself, may flush all rules.
	filtered(n podNet) (bool, error)
	// forget takes away what chooses one of these, and of a cgroup the filter of its option.
	forget(kernelpath.Choice) error
	// lead brings the program before others that came to its hook, and tells whether there were any.
	lead() (was bool, err error)
	// keep makes again what pods with a veth need on the node, and others took away.
	keep() error
	// watch calls f, until close, for connections of pods that the kernel made TCP.
	watch(f func(kernelpath.Fallback)) error
	revoker
	close() error
}

type linuxSMC struct {
	record string
	veths  *kernelpath.Veths
	dir    string // of the pins
	probe  func() error
}

func newLinuxSMC(dataDir string) linuxSMC {
	return linuxSMC{kernelRecord(dataDir), kernelpath.NewVeths(vethRecord(dataDir)), kernelpath.Dir, kernelpath.NewProber(kernelpath.Dir).Probe}
}

func (s linuxSMC) open(eids []string) (chooser, error) {
	if !s.pinned() || !kernelpath.Pinned(s.dir) { // else it worked, and works on while a device is away; after a boot only the record is left
		if err := s.probe(); err != nil {
			return nil, err
		}
	}
	if err := kernelpath.AddUEIDs(eids, s.record); err != nil {
		return nil, err
	}
	own, err := synopt.OwnCgroupID() // the agent's own sockets in pods stay TCP
	if err != nil {
		return nil, err
	}
	c, err := kernelpath.Open(kernelpath.Config{Dir: s.dir, Exclude: []uint64{own}, Veths: s.veths})
	if err != nil {
		return nil, err
	}
	return &linuxChooser{c: c, veths: s.veths}, nil
}

// pinned asks for the record, which open makes before the pins: those may be of an agent with another data
// directory.
func (s linuxSMC) pinned() bool {
	_, err := os.Stat(s.record)
	return err == nil
}

func (s linuxSMC) remove() error {
	if !s.pinned() {
		return nil
	}
	err := errors.Join(kernelpath.Unpin(s.dir), inNodesNet(sweepCgroups), s.veths.Remove())
	if err != nil {
		return err // the record stays, by which the rest is found
	}
	return kernelpath.RemoveUEIDs(s.record)
}

// inNodesNet calls f with the node's network.
func inNodesNet(f func(*linux.NetNS) error) error {
	ns, err := linux.CurrentNetNS()
	if err != nil {
		return err
	}
	return errors.Join(f(ns), ns.Close())
}

// sweepCgroups removes the filters of all cgroups.
func sweepCgroups(ns *linux.NetNS) error {
	all, err := linux.OptionFilters(ns)
	if err != nil {
		return err
	}
	return linux.SweepOptionFilters(ns, all...)
}

// serviceInterfaces are those that have the addresses of the cluster's Services and nobody's: of kube-proxy in
// mode ipvs, and of kube-router. Who connects to one of thousands of them is connected to a pod, mostly elsewhere.
func serviceInterfaces() []string { return []string{"kube-ipvs0", "kube-dummy-if"} }

func (linuxSMC) addresses() ([]netip.Addr, error) {
	all, err := net.InterfaceAddrs()
	out := withoutPrefix(all)
	for _, name := range serviceInterfaces() {
		i, err := net.InterfaceByName(name)
		if err != nil {
			continue // it is not there
		}
		services, err := i.Addrs()
		if err != nil {
			continue // nor is it any more
		}
		of := map[netip.Addr]bool{}
		for _, a := range withoutPrefix(services) {
			of[a] = true
		}
		out = slices.DeleteFunc(out, func(a netip.Addr) bool { return of[a] })
	}
	return out, err
}

func withoutPrefix(all []net.Addr) (out []netip.Addr) {
	for _, a := range all {
		if p, err := netip.ParsePrefix(a.String()); err == nil {
			out = append(out, p.Addr().WithZone(""))
		}
	}
	return out
}

type linuxChooser struct {
	c       *kernelpath.Chooser
	veths   *kernelpath.Veths
	watched *kernelpath.FallbackWatch // nil: nobody wants to know
}

// fit is true of a pod that an earlier agent attached, also while a device is away.
func (l *linuxChooser) fit(n podNet, cfg kernelpath.PodConfig) error {
	at := placeOf(n)
	if chosen, err := l.c.Chosen(at); chosen || err != nil {
		return err
	}
	return l.c.Fit(at, cfg)
}

func (l *linuxChooser) attach(n podNet, cfg kernelpath.PodConfig) error {
	return l.c.Attach(placeOf(n), cfg)
}

func (l *linuxChooser) detach(n podNet, cfg kernelpath.PodConfig) (left bool, err error) {
	return l.c.Detach(placeOf(n), cfg)
}

func (l *linuxChooser) purge(n podNet, cfg kernelpath.PodConfig) error {
	return l.c.Purge(placeOf(n), cfg)
}

func (*linuxChooser) revoke(n podNet, f linux.OptionFilterConfig, allowed []uint64) (kernelpath.Revocation, error) {
	return kernelpath.Revoke(placeOf(n), f, allowed)
}

func (l *linuxChooser) others(known []podNet) (out []kernelpath.Choice, err error) {
	err = inNodesNet(func(ns *linux.NetNS) error {
		out, err = othersOf(l.c, ns, known)
		return err
	})
	return out, err
}

// choices are the rules of *kernelpath.Chooser.
type choices interface {
	Others(known []linux.Place) ([]kernelpath.Choice, error)
	Forget(x kernelpath.Choice) error
}

// othersOf are those with a rule, and the cgroups that have a filter only: an earlier agent took the rule away, and waited for the end
// of sockets, or had not made it yet.
func othersOf(c choices, ns *linux.NetNS, known []podNet) ([]kernelpath.Choice, error) {
	places := make([]linux.Place, 0, len(known))
	ours := map[uint64]bool{}
	for _, n := range known {
		at := placeOf(n)
		places = append(places, at)
		if at.Cgroup != nil {
			ours[at.Cgroup.ID()] = true
		}
	}
	out, err := c.Others(places)
	if err != nil {
		return nil, err
	}
	filtered, err := linux.OptionFilters(ns)
	if err != nil {
		return nil, err
	}
	for _, id := range filtered {
		if x := (kernelpath.Choice{Cgroup: id}); !ours[id] && !slices.Contains(out, x) {
			out = append(out, x)
		}
	}
	return out, nil
}

func (*linuxChooser) filtered(n podNet) (bool, error) { return linux.OptionFiltered(placeOf(n)) }

func (l *linuxChooser) forget(x kernelpath.Choice) error {
	return inNodesNet(func(ns *linux.NetNS) error { return forgetOf(l.c, ns, x) })
}

// forgetOf leaves the filters of others: those of pods that are leaving have no rule any more, and those of pods that are just being
// attached none yet.
func forgetOf(c choices, ns *linux.NetNS, x kernelpath.Choice) error {
	if err := c.Forget(x); err != nil || x.Cgroup == 0 {
		return err
	}
	return linux.SweepOptionFilters(ns, x.Cgroup)
}

func (l *linuxChooser) lead() (bool, error) { return l.c.Lead() }

func (l *linuxChooser) keep() error { return l.veths.Keep() }

func (l *linuxChooser) watch(f func(kernelpath.Fallback)) (err error) {
	l.watched, err = l.c.WatchFallbacks(f)
	return err
}

func (l *linuxChooser) close() error {
	var err error
	if l.watched != nil {
		err = l.watched.Close()
	}
	return errors.Join(err, l.c.Close())
}

// kernelPath is the kernel's SMC-R as the datapath of pods.
type kernelPath struct {
	a        *agent
	expected atomic.Pointer[expected] // of the last round

	mu        sync.Mutex // guards what is below
	chooser   chooser    // nil until a pod wants it
	pods      int        // that use it
	looked    bool       // for what an earlier agent left
	lookAt    time.Time  // when that is done again, because it could not be taken away
	began     bool       // inherited is known
	inherited bool       // an earlier agent left pods attached, perhaps, of which not all have been looked at
	local     []netip.Addr
	localTime time.Time           // when local was read
	led, kept time.Time           // when the chooser was last asked to lead, and to keep
	noLead    bool                // it could not, which was logged
	noKeep    bool                // nor keep what pods with a veth need
	forgot    time.Time           // when strangers was made
	strangers []kernelpath.Choice // of no pod
}

// acquire returns the chooser for one more pod, until release. The first one opens it.
func (k *kernelPath) acquire() (chooser, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.chooser != nil {
		k.pods++
		return k.chooser, nil
	}
	k.beginLocked()
	var eids []string
	for _, id := range k.a.node.Load().EIDs {
		eids = append(eids, id.String())
	}
	c, err := k.a.cfg.smc.open(eids)
	if err != nil {
		return nil, err
	}
	k.chooser, k.pods = c, 1
	if err := c.watch(k.a.fellBack); err != nil {
		k.a.cfg.Log.Warn("connections of pods on the kernel's SMC-R that fall back to TCP are explained only while they are open", "err", err)
	}
	return c, nil
}

// beginLocked looks whether an earlier agent left something, before this one makes anything.
func (k *kernelPath) beginLocked() {
	if !k.began {
		k.began, k.inherited = true, k.a.cfg.smc.pinned()
	}
}

// get returns the chooser of a pod that acquired it.
func (k *kernelPath) get() chooser {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.chooser
}

func (k *kernelPath) release() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.pods--
}

// tidy takes everything from the node when no pod uses it. It is called at the end of a round, when all
// pods have been looked at, but perhaps for those that an earlier agent left in the node's network, and those for which that failed:
// until these are, it takes nothing.
func (k *kernelPath) tidy() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.beginLocked()
	settled := k.a.manager.hosts.settled.Load()
	if k.inherited && settled {
		settled = !k.a.manager.mayBeChosen()
		k.inherited = !settled
	}
	unused := settled && k.chooser != nil && k.pods == 0
	if settled && !k.looked && !time.Now().Before(k.lookAt) {
		k.looked = true
		unused = unused || k.chooser == nil && k.a.cfg.smc.pinned()
	}
	if !unused {
		now := time.Now()
		k.leadLocked(now)
		k.keepLocked(now)
		if err := k.forgetLocked(now); err != nil {
			k.a.cfg.Log.Warn("rules of pods that are gone, for which the kernel has bounded room, not forgotten; it is tried again", "err", err)
		}
		return
	}
	if err := k.removeLocked(); err != nil {
		k.looked, k.lookAt = false, time.Now().Add(retryMost)
		k.a.cfg.Log.Warn("the kernel's SMC-R is not used by any pod; its program and enterprise IDs not taken away, which is tried again", "err", err)
	}
}

// leadLocked keeps the program before others, as the last one that came is asked first whether sockets are SMC.
func (k *kernelPath) leadLocked(now time.Time) {
	if k.chooser == nil || now.Sub(k.led) < leadEvery {
		return
	}
	k.led = now
	was, err := k.chooser.lead()
	known := k.noLead
	k.noLead = err != nil
	switch {
	case err != nil && known:
	case err != nil:
		k.a.cfg.Log.Warn("another program may decide before ours whether pods' sockets are the kernel's SMC-R", "err", err)
	case was:
		k.a.cfg.Log.Warn("another program came to update_socket_protocol (bpftool link); ours was put before it: sockets of pods that were opened meanwhile may be plain TCP")
	}
}

// keepLocked keeps on the node what pods with a veth need there: an interface may have been away.
func (k *kernelPath) keepLocked(now time.Time) {
	if k.chooser == nil || now.Sub(k.kept) < leadEvery {
		return
	}
	k.kept = now
	err := k.chooser.keep()
	known := k.noKeep
	k.noKeep = err != nil
	if err != nil && !known {
		k.a.cfg.Log.Warn("pods with a veth may be on plain TCP: what their kernel's SMC-R needs on the node is not complete; it is tried again", "err", err)
	}
}

// forgetLocked forgets the rules of pods that ended while no agent was there: of namespaces and cgroups that no pod had
// now and at the look before. A pod that is attached just now may be in the kernel, and not in the manager's map yet.
func (k *kernelPath) forgetLocked(now time.Time) error {
	if k.chooser == nil || now.Sub(k.forgot) < forgetEvery {
		return nil
	}
	k.forgot = now
	known, done, err := k.a.manager.chosen()
	defer done()
	if err != nil {
		return err
	}
	others, err := k.chooser.others(known)
	if err != nil {
		return err
	}
	if !k.a.manager.hosts.settled.Load() {
		others = slices.DeleteFunc(others, func(x kernelpath.Choice) bool { return x.Cgroup != 0 })
	}
	was := k.strangers
	k.strangers = others
	for _, x := range others {
		if slices.Contains(was, x) {
			err = errors.Join(err, k.chooser.forget(x))
		}
	}
	return err
}

// chosen are the namespaces of the pods that are chosen, or may be: an earlier agent may have attached
// one that this one could not look at yet. done closes what had to be opened.
func (m *manager) chosen() (nets []podNet, done func(), err error) {
	var opened []podNet
	done = func() {
		for _, n := range opened {
			_ = n.close() // nothing was done there
		}
	}
	for _, p := range m.snapshot() {
		switch {
		case p.kernel != nil:
			nets = append(nets, p.kernel.net)
		case !p.noKernel && !isLost(p.atts):
			k, err := m.openKernelPod(p)
			if errors.Is(err, linux.ErrGone) {
				continue
			}
			if err != nil {
				return nil, done, err
			}
			opened, nets = append(opened, k.net), append(nets, k.net)
		}
	}
	return nets, done, nil
}

// mayBeChosen reports whether an earlier agent may have attached a pod that this one could not look at yet. A pod that
// is to be on its kernel's SMC-R only where that is available is this agent's then. A pod that can not be attached keeps
// what an earlier agent left for as long as that lasts.
func (m *manager) mayBeChosen() bool {
	for _, p := range m.snapshot() {
		if p.kernel == nil && !p.noKernel && p.unavailable == nil && !isLost(p.atts) {
			return true
		}
	}
	return false
}

// close leaves everything at work. What is open then is of now: a successor may take it away, and make it anew.
func (k *kernelPath) close() error {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.looked, k.began = false, false
	return k.closeLocked()
}

func (k *kernelPath) closeLocked() error {
	if k.chooser == nil {
		return nil
	}
	err := k.chooser.close()
	k.chooser = nil
	return err
}

// remove takes everything from the node, after the pods.
func (k *kernelPath) remove() error {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.removeLocked()
}

func (k *kernelPath) removeLocked() error { return errors.Join(k.closeLocked(), k.a.cfg.smc.remove()) }

// kernelPod is a pod whose datapath is the kernel's SMC-R. Like the pod it never changes.
type kernelPod struct {
	net podNet
	// cookie is that of the pod's namespace, 0 of a pod in the node's network.
	cookie uint64
	cfg    kernelpath.PodConfig
	log    *slog.Logger
	// leaving says that the pod's new sockets are TCP again, and that it had sockets of SMC at the last look.
	leaving bool
	// withheld says that the policies want more than the pod's kernel can be told, and new connections are TCP.
	withheld bool
	revoked  revoked
}

// kernelConfig is how the policies of n want a pod. It is complete also if they want more than its kernel can be told, which is an error
// of which isTooMuch is true.
func (m *manager) kernelConfig(n *config.Node, atts []cni.Attachment, now time.Time) (cfg kernelpath.PodConfig, err error) {
	if n.Versions == config.VersionsV1 {
		return cfg, errVersion1
	}
	sel, tooMany := n.Exactly(podsOf(atts)...)
	cfg.Filter.Peers = outboundRules(sel)
	s := n.SettingsFor(podOf(atts[0]))
	cfg.SendBufferBytes, cfg.RMBEBytes = s.SendBufferBytes, s.RMBEBytes
	cfg.Veth = n.KernelVeth
	for _, att := range atts {
		for _, p := range att.IPs {
			cfg.Addresses = append(cfg.Addresses, p.Addr())
		}
	}
	if cfg.Filter.Never, err = m.a.kernelPath.sameNode(atts, now); err != nil || tooMany != nil {
		return cfg, cmp.Or(err, tooMany)
	}
	return cfg, cfg.Filter.Validate()
}

// stepKernel brings a pod one step nearer to what is wanted of the kernel's SMC-R. If it returns true, the
// agent has nothing else to do in the pod now.
func (m *manager) stepKernel(p *pod, changed bool, now time.Time) bool {
	d, _ := m.a.node.Load().DatapathFor(podOf(p.atts[0]))
	if isHostPod(p.atts) && !hostWanted(m.a.node.Load(), p.atts[0]) { // whatever policies say of its name
		d = config.DatapathAgent
	}
	optional := d == config.DatapathKernelIfAvailable
	if !optional {
		p.unavailable = nil
	}
	switch {
	case d == config.DatapathKernel, optional && (m.isInherited(p) || m.kernelAvailable(p, now)):
		if p.proxy != nil {
			m.stopForRestart(p, m.a.changeCode(podOf(p.atts[0])))
		}
		m.releaseDevices(p)
		if p.state == podFailed && !changed && now.Before(p.retryAt) {
			return true
		}
		err := m.attachKernel(p, now)
		if err == nil {
			p.unavailable = nil
			return true
		}
		if !optional || m.staysOnKernel(p, err) {
			p.unavailable = nil
			m.notAttached(p, err, now)
			return true
		}
		m.becomeUnavailable(p, err, now) // the agent's, when what an earlier one left of it in the kernel is gone
	case p.kernel == nil && (p.noKernel || !m.a.cfg.smc.pinned()):
		p.noKernel = true // nor did an earlier agent choose it
		return false
	case p.kernel != nil && p.kernel.leaving && !changed && now.Before(p.retryAt):
		m.revokeAgain(p, linux.OptionFilterConfig{}, now)
		return true
	}
	if p.proxy != nil {
		m.stopForRestart(p, m.a.changeCode(podOf(p.atts[0]))) // a pod is never with both
	}
	if left, err := m.detachKernel(p, now); left || err != nil {
		p.becomeLeaving(err, now)
		return true
	}
	p.becomeNew(false)
	p.noKernel = true
	return false
}

// notAttached notes why a pod is not on its kernel's SMC-R as its policy wants it.
func (m *manager) notAttached(p *pod, err error, now time.Time) {
	if p.kernel == nil && noPins(err) { // an earlier agent's program may be at work
		err = cmp.Or(m.untouched(p, err), err)
	}
	m.a.metrics.podErrors.Inc()
	if p.state != podFailed {
		m.a.cfg.Log.Warn("pod not set up for its kernel's SMC-R; it is tried again", "pod", podOf(p.atts[0]).String(), "netns", p.atts[0].NetNS, "err", err)
	}
	p.becomeFailed(err, now)
}

// kernelAvailable tells whether a pod whose policy wants the kernel's SMC-R where it is available is to be on
// it. What was found first stands for as long as the agent carries the pod, since to leave the agent ends its
// connections; and for as long as the kernel does.
func (m *manager) kernelAvailable(p *pod, now time.Time) bool {
	switch {
	case p.kernel != nil:
		// One that leaves it, because it could not be attached, is looked at again until its sockets of SMC are gone. Then it is the agent's.
		return !p.kernel.leaving || p.unavailable == nil || !now.Before(p.lookAgain)
	case p.unavailable != nil && (p.proxy != nil || now.Before(p.lookAgain)):
		return false
	}
	if err := m.tryKernel(p, now); err != nil {
		m.becomeUnavailable(p, err, now)
		return false
	}
	p.unavailable = nil
	return true
}

// becomeUnavailable leaves a pod to the agent, because of err.
func (m *manager) becomeUnavailable(p *pod, err error, now time.Time) {
	if p.unavailable == nil {
		instead := "the agent"
		if isHostPod(p.atts) {
			instead = "nobody: plain TCP"
		}
		m.a.cfg.Log.Info("pod not on its kernel's SMC-R, which its policy prefers", "carries", instead, "pod", podOf(p.atts[0]).String(), "netns", p.atts[0].NetNS, "err", err)
	}
	p.unavailable, p.lookAgain = err, now.Add(retryMost)
}

// tryKernel looks whether attachKernel can do its work in a pod, and changes nothing there.
func (m *manager) tryKernel(p *pod, now time.Time) error {
	cfg, err := m.kernelConfig(m.a.node.Load(), p.atts, now)
	if err != nil {
		return err
	}
	c, err := m.a.kernelPath.acquire()
	if err != nil {
		return err
	}
	defer m.a.kernelPath.release()
	k, err := m.openKernelPod(p)
	if err != nil {
		return err
	}
	return errors.Join(c.fit(k.net, cfg), k.net.close())
}

// openKernelPod opens a pod's namespace.
func (m *manager) openKernelPod(p *pod) (kernelPod, error) {
	att := p.atts[0]
	n, err := m.openNet(att)
	if err != nil {
		return kernelPod{}, err
	}
	return kernelPod{net: n, log: m.a.cfg.Log.With("pod", podOf(att).String(), "netns", att.NetNS)}, nil
}

// openChoice opens a pod's namespace for what was acquired for it, and releases that if it fails.
func (m *manager) openChoice(p *pod) (kernelPod, error) {
	k, err := m.openKernelPod(p)
	if err == nil {
		if k.cookie, err = m.a.cfg.smc.cookie(k.net); err != nil {
			err = errors.Join(err, k.net.close())
		}
	}
	if err != nil {
		m.a.kernelPath.release()
	}
	return k, err
}

// attachKernel makes a pod's new sockets the kernel's SMC, or brings the filter in line with the policies and
// the pods of the node. If that fails in a pod that is attached, it stays as it is, unless its policies want too much.
func (m *manager) attachKernel(p *pod, now time.Time) error {
	n := m.a.node.Load()
	cfg, err := m.kernelConfig(n, p.atts, now)
	if isTooMuch(err) {
		return m.withhold(p, cfg, err, now)
	}
	if err != nil {
		return err
	}
	if p.kernel != nil {
		k, was := *p.kernel, p.kernel.leaving
		// The buffers stay those of the first time, and are taken back as such.
		cfg.SendBufferBytes, cfg.RMBEBytes = k.cfg.SendBufferBytes, k.cfg.RMBEBytes
		if !was && p.state == podKernel && reflect.DeepEqual(cfg, k.cfg) && reflect.DeepEqual(saidOf(n, p.atts), k.revoked.said) {
			there, err := m.a.kernelPath.get().filtered(k.net)
			if there {
				m.revokeAgain(p, cfg.Filter, now)
				return nil
			}
			k.log.Warn("the filter of the pod's SMC-R option is not in nftables any more (nft flush ruleset removes it); it is made anew, and connections that no policy allows end", "err", err)
		}
		if err := m.a.kernelPath.get().attach(k.net, cfg); err != nil {
			return err
		}
		k.cfg, k.leaving, k.withheld, k.revoked = cfg, false, false, k.revoked.after(saidOf(n, p.atts), k.cfg.Filter, cfg.Filter)
		p.becomeKernel(&k)
		m.revoke(p, cfg.Filter, now)
		return nil
	}
	c, err := m.a.kernelPath.acquire()
	if err != nil {
		return err
	}
	k, err := m.openChoice(p)
	if err != nil {
		return err
	}
	err = c.fit(k.net, cfg)
	if err == nil {
		err = m.clearForKernel(k.net)
	}
	if err == nil {
		err = c.attach(k.net, cfg)
	}
	if err != nil {
		m.a.kernelPath.release()
		return errors.Join(err, k.net.close())
	}
	k.cfg, k.revoked.said = cfg, saidOf(n, p.atts)
	p.becomeKernel(&k)
	m.revoke(p, cfg.Filter, now) // what an earlier agent's filter let be
	m.a.kernelStats.begin(p.kernel)
	k.log.Info("pod attached to its kernel's SMC-R; programs that listen already must open their sockets anew", "addresses", addresses(p.atts))
	return nil
}

// inherit takes over a pod that an earlier agent may have attached. The chooser was acquired for it.
func (m *manager) inherit(p *pod) error {
	k, err := m.openChoice(p)
	if err != nil {
		return err
	}
	s := m.a.node.Load().SettingsFor(podOf(p.atts[0]))
	k.cfg.SendBufferBytes, k.cfg.RMBEBytes = s.SendBufferBytes, s.RMBEBytes
	p.kernel = &k
	return nil
}

// detachKernel takes attachKernel back, also that of an earlier agent. left says that the pod has sockets of
// SMC.
func (m *manager) detachKernel(p *pod, now time.Time) (left bool, err error) {
	if p.kernel == nil { // an earlier agent may have attached it, with the node's buffers
		if _, err := m.a.kernelPath.acquire(); err != nil {
			return false, m.untouched(p, err)
		}
		if err := m.inherit(p); err != nil {
			return false, err
		}
	}
	k := *p.kernel
	if left, err = m.a.kernelPath.get().detach(k.net, k.cfg); left || err != nil {
		if !k.leaving {
			k.leaving, k.revoked = true, revoked{}
		}
		p.kernel = &k
		if err == nil { // else the filter may be the old one, and the ended connections would come again on SMC-R
			m.revoke(p, linux.OptionFilterConfig{}, now)
		}
		return left, err
	}
	k.log.Info("pod detached from its kernel's SMC-R")
	m.a.kernelStats.end(&k)
	m.a.kernelPath.release()
	p.kernel = nil
	return false, k.net.close()
}

// dropKernel detaches a pod that is removed, or whose namespace is not at its path any more.
func (m *manager) dropKernel(p *pod) {
	if p.kernel == nil {
		return
	}
	m.a.kernelStats.end(p.kernel)
	err := m.a.kernelPath.get().purge(p.kernel.net, p.kernel.cfg)
	if err = errors.Join(err, p.kernel.net.close()); err != nil {
		p.kernel.log.Warn("pod not left clean by its kernel's SMC-R", "err", err)
	}
	m.a.kernelPath.release()
	p.kernel = nil
}

// parkKernel closes the handle of a pod's namespace and leaves everything at work there.
func (m *manager) parkKernel(p *pod) {
	if p.kernel == nil {
		return
	}
	m.a.kernelStats.end(p.kernel)
	if err := p.kernel.net.close(); err != nil {
		p.kernel.log.Warn("namespace of a pod not closed in order", "err", err)
	}
	m.a.kernelPath.release() // no round follows that would tidy
	p.becomeNew(false)
}

// kernelRecord is the file with the enterprise IDs that agents gave the kernel.
func kernelRecord(dataDir string) string { return filepath.Join(dataDir, "kernel-eids.json") }

// vethRecord is the file with what agents made for pods that have a veth.
func vethRecord(dataDir string) string { return filepath.Join(dataDir, "kernel-veths.json") }
