// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/smcr-io/kube-smcr/internal/cni"
	"github.com/smcr-io/kube-smcr/internal/config"
	"github.com/smcr-io/kube-smcr/internal/kernelpath"
	"github.com/smcr-io/kube-smcr/internal/linux"
	"github.com/smcr-io/kube-smcr/internal/records"
)

// A pod in the node's network has no namespace and no attachment record. The agent makes it an attachment, with the path of its cgroup
// where that of a namespace would be, and the cgroup's ID for the inode. So it is one more pod for the manager, of which only
// its kernel carries connections.
//
//	config.HostPod{shop, db, UID u} -> cni.Attachment{NetNS: "cgroup:/kubepods/burstable/podu", NetNSID: 4711}

const (
	cgroupPrefix = "cgroup:"
	// lostPrefix is for a pod whose cgroup is not found: a path that cannot be opened, with the UID behind it.
	lostPrefix = "cgroup of pod "
)

// isHostPod tells whether attachments are those of a pod in the node's network.
func isHostPod(atts []cni.Attachment) bool {
	return len(atts) > 0 && (strings.HasPrefix(atts[0].NetNS, cgroupPrefix) || strings.HasPrefix(atts[0].NetNS, lostPrefix))
}

// isLost tells whether they are those of a pod whose cgroup is not found.
func isLost(atts []cni.Attachment) bool {
	return len(atts) > 0 && strings.HasPrefix(atts[0].NetNS, lostPrefix)
}

// hostWanted tells whether the configuration has a pod in the node's network, with this cgroup.
func hostWanted(n *config.Node, att cni.Attachment) bool {
	return slices.ContainsFunc(n.HostPods, func(p config.HostPod) bool {
		if (records.Pod{Namespace: p.Namespace, Name: p.Name, UID: p.UID}) != att.Pod {
			return false
		}
		if p.Cgroup != "" {
			return att.NetNS == cgroupPrefix+p.Cgroup
		}
		return strings.Contains(strings.ReplaceAll(att.NetNS, "_", "-"), p.CgroupUID) // as systemd has it
	})
}

// podCgroups is *linux.Cgroups.
type podCgroups interface {
	// find returns the paths of pods' cgroups by their UIDs; those that are not there are left out.
	find(uids []string) (map[string]string, error)
	// paths returns the paths of cgroups by their IDs; those that are gone are left out.
	paths(ids []uint64) (map[uint64]string, error)
	// id returns the ID of the cgroup at a path. The error is linux.ErrGone if there is none.
	id(path string) (uint64, error)
	close() error
}

// hostPods finds the pods in the node's network. The manager's goroutine uses it only, but for settled.
type hostPods struct {
	m *manager

	cgroups podCgroups // nil until there is such a pod
	known   map[string]*hostPod
	looked  bool // for what an earlier agent left
	blind   bool // there is no datapath that could be asked, nor one out of sight
	// leftovers are what an earlier agent left, by the path, until it is known whose they are.
	leftovers map[string]cni.Attachment
	settled   atomic.Bool // nothing of an earlier agent is left of which that is not known
	problem   string      // that was logged
}

// hostPod is one that the configuration has.
type hostPod struct {
	path  string // "": not found
	since time.Time
}

// attachments are those of the pods in the node's network: of those that the configuration has, of those that it had, until
// they are off their kernel's SMC-R, and of those that an earlier agent left there.
func (h *hostPods) attachments(n *config.Node, have map[string]*pod, now time.Time) []cni.Attachment {
	out, err := h.find(n, have, now)
	h.settled.Store(h.looked && len(h.leftovers) == 0 || h.blind)
	text := ""
	if err != nil {
		text = err.Error()
	}
	if text != "" && text != h.problem {
		h.m.a.cfg.Log.Warn("pods in the node's network not looked for; it is tried again", "err", err)
	}
	h.problem = text
	return out
}

func (h *hostPods) find(n *config.Node, have map[string]*pod, now time.Time) ([]cni.Attachment, error) {
	lookErr := h.left()
	byPath := map[string]cni.Attachment{}
	for name, p := range have { // still there, and perhaps not wanted
		if isHostPod(p.atts) && h.mayBeChosen(p) {
			byPath[name] = p.atts[0]
		}
	}
	err := h.configured(n, byPath, now)
	for name, att := range h.leftovers {
		_, taken := byPath[name]
		switch {
		case taken || have[name] != nil:
			delete(h.leftovers, name) // as one of these it is looked after
		case h.isGone(att):
			delete(h.leftovers, name) // and so its rule is forgotten one day
		case err == nil: // else the configuration may want it, and it stays as it is
			byPath[name] = att
		}
	}
	out := make([]cni.Attachment, 0, len(byPath))
	for _, name := range slices.Sorted(maps.Keys(byPath)) {
		out = append(out, byPath[name])
	}
	return out, errors.Join(lookErr, err)
}

// mayBeChosen tells whether new sockets of a pod may be SMC, or whether it may have some: those that leave the configuration first leave
// their kernel's SMC-R.
func (h *hostPods) mayBeChosen(p *pod) bool {
	return !p.noKernel && !h.isGone(p.atts[0]) // also if only an earlier agent may have chosen it
}

// isGone tells whether a pod's cgroup is gone. Where that cannot be seen it is not.
func (h *hostPods) isGone(att cni.Attachment) bool {
	name, ok := strings.CutPrefix(att.NetNS, cgroupPrefix)
	if !ok || att.NetNSID == 0 { // it was not there
		return true
	}
	if h.open() != nil { // who needs it says why
		return false
	}
	id, err := h.cgroups.id(name)
	return errors.Is(err, linux.ErrGone) || err == nil && id != att.NetNSID
}

// configured adds the pods that the configuration has. After an error some may be missing, and those that are there stay.
func (h *hostPods) configured(n *config.Node, byPath map[string]cni.Attachment, now time.Time) error {
	var err error
	if len(n.HostPods) > 0 {
		if err = h.open(); err == nil {
			err = h.locate(n.HostPods, now)
		}
	}
	for _, pod := range n.HostPods {
		att := cni.Attachment{Pod: records.Pod{Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID}, NetNS: lostPrefix + pod.CgroupUID}
		known := h.known[keyOf(pod)]
		if known != nil && known.path != "" {
			att.NetNS = cgroupPrefix + known.path
			id, ierr := h.cgroups.id(known.path)
			switch _, there := byPath[att.NetNS]; {
			case ierr == nil:
				att.NetNSID, known.since = id, now
			case errors.Is(ierr, linux.ErrGone):
				known.path = ""
			default:
				err = errors.Join(err, ierr)
				if there {
					continue
				}
			}
		}
		if known != nil && known.path == "" && now.Sub(known.since) < cgroupPatience {
			continue // kubelet is about to make it, or it is just going
		}
		byPath[att.NetNS] = att
	}
	return err
}

// keyOf tells a pod from others, and from an earlier one of its name.
func keyOf(p config.HostPod) string {
	return strings.Join([]string{p.Namespace, p.Name, p.CgroupUID, p.Cgroup}, "/")
}

func (h *hostPods) open() (err error) {
	if h.cgroups == nil {
		h.cgroups, err = h.m.a.cfg.kernel.cgroups()
	}
	return err
}

// close is called by the manager when it ends.
func (h *hostPods) close() error {
	h.looked, h.leftovers = false, nil
	h.settled.Store(false)
	if h.cgroups == nil {
		return nil
	}
	err := h.cgroups.close()
	h.cgroups, h.known = nil, nil
	return err
}

// locate finds the cgroups of pods of which they are not known yet.
func (h *hostPods) locate(all []config.HostPod, now time.Time) error {
	was := h.known
	h.known = make(map[string]*hostPod, len(all))
	var uids []string
	for _, pod := range all {
		key := keyOf(pod)
		k := was[key]
		if k == nil {
			k = &hostPod{path: pod.Cgroup, since: now}
		}
		h.known[key] = k
		if k.path == "" && pod.Cgroup != "" {
			k.path = pod.Cgroup // it may be back
		}
		if k.path == "" {
			uids = append(uids, pod.CgroupUID)
		}
	}
	if len(uids) == 0 {
		return nil
	}
	paths, err := h.cgroups.find(uids)
	for _, pod := range all {
		if k := h.known[keyOf(pod)]; k.path == "" {
			k.path = paths[pod.CgroupUID]
		}
	}
	return err
}

// left finds the cgroups that an earlier agent chose, or of which it filters the option, under no pod's name: what the configuration has
// of them replaces that. Those that are gone are forgotten.
func (h *hostPods) left() error {
	if h.looked {
		return nil
	}
	if !h.m.a.cfg.smc.pinned() {
		h.looked = true
		return nil
	}
	c, err := h.m.a.kernelPath.acquire()
	h.blind = err != nil && !noPins(err)
	if err != nil {
		return err
	}
	defer h.m.a.kernelPath.release()
	others, err := c.others(nil)
	if err != nil {
		return err
	}
	others = slices.DeleteFunc(others, func(x kernelpath.Choice) bool { return x.Cgroup == 0 })
	ids := make([]uint64, 0, len(others))
	for _, x := range others {
		ids = append(ids, x.Cgroup)
	}
	if len(ids) == 0 {
		h.looked = true
		return nil
	}
	if err := h.open(); err != nil {
		return err
	}
	paths, err := h.cgroups.paths(ids)
	if err != nil {
		return err
	}
	h.leftovers = map[string]cni.Attachment{}
	for _, x := range others {
		if name, ok := paths[x.Cgroup]; ok {
			h.leftovers[cgroupPrefix+name] = cni.Attachment{NetNS: cgroupPrefix + name, NetNSID: x.Cgroup, Pod: records.Pod{Name: name}}
			continue
		}
		err = errors.Join(err, c.forget(x))
	}
	h.looked = err == nil
	return err
}

// cgroupNet is a pod in the node's network.
type cgroupNet struct {
	linuxNet // the node's
	all      *linux.Cgroups
	group    *linux.Cgroup
}

func (n cgroupNet) id() uint64         { return n.group.ID() }
func (n cgroupNet) gone() bool         { return n.group.Gone() }
func (cgroupNet) sweep() error         { return nil } // the agent diverts nothing there, and its other tables are the node's
func (cgroupNet) endDiversion() error  { return nil }
func (n cgroupNet) sweepOption() error { return linux.SweepOptionFilter(placeOf(n)) }
func (n cgroupNet) close() error       { return errors.Join(n.linuxNet.close(), n.all.Close()) }

// placeOf is where the sockets of a pod are.
func placeOf(n podNet) linux.Place {
	if h, ok := n.(cgroupNet); ok {
		return linux.Place{NetNS: h.ns, Cgroup: h.group}
	}
	return linux.In(n.(linuxNet).ns)
}

// openHost opens the place of a pod in the node's network.
func openHost(path string) (_ podNet, err error) {
	if uid, ok := strings.CutPrefix(path, lostPrefix); ok {
		return nil, fmt.Errorf("no cgroup v2 of kubelet's is there for pod UID %s, or it is out of the agent's sight: the agent must see the node's processes "+
			"(in a pod hostPID: true and CAP_SYS_PTRACE, the chart's kernelPath.revoke), and kubelet use cgroup v2", uid)
	}
	all, err := linux.OpenCgroups()
	if err != nil {
		return nil, err
	}
	group, err := all.Open(strings.TrimPrefix(path, cgroupPrefix))
	if err != nil {
		return nil, errors.Join(err, all.Close())
	}
	ns, err := linux.CurrentNetNS()
	if err != nil {
		return nil, errors.Join(err, all.Close())
	}
	return cgroupNet{linuxNet{ns}, all, group}, nil
}

// linuxCgroups is the hierarchy of the node.
type linuxCgroups struct{ *linux.Cgroups }

func (linuxKernel) cgroups() (podCgroups, error) {
	all, err := linux.OpenCgroups()
	if err != nil {
		return nil, err
	}
	return linuxCgroups{all}, nil
}

func (c linuxCgroups) find(uids []string) (map[string]string, error) { return c.FindPods(uids) }
func (c linuxCgroups) paths(ids []uint64) (map[uint64]string, error) { return c.Paths(ids) }
func (c linuxCgroups) close() error                                  { return c.Close() }
func (c linuxCgroups) id(path string) (uint64, error) {
	g, err := c.Open(path)
	if err != nil {
		return 0, err
	}
	return g.ID(), nil
}
