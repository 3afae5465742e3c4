// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/smcr-io/kube-smcr/internal/cni"
	"github.com/smcr-io/kube-smcr/internal/config"
	"github.com/smcr-io/kube-smcr/internal/linux"
	"github.com/smcr-io/kube-smcr/internal/records"
)

// adoptedNetwork is the network of records that the plugin did not write. No CNI
// network can have the name, so that the plugin's GC leaves them alone.
const adoptedNetwork = "(adopted)"

// adopter writes attachment records for opted-in pods that have none, because they are
// older than the plugin on their node. The adopter removes such a record when the pod or the
// namespace is gone. To the agent these records are like the plugin's.
//
// If the container runtime names the network namespace of a pod, the adopter takes that
// namespace, provided that it has the pod's addresses. Addresses alone prove less: a pod with
// NET_ADMIN can give itself the address of another pod, and networks can overlap. So where the
// runtime names no namespace, a pod is adopted only if exactly one namespace has its addresses,
// and that namespace has no address of another pod. For example, pod a is 10.0.0.1 and pod b is
// 10.0.0.2: while b also gives itself 10.0.0.1, two namespaces have a's address, and a is not
// adopted.
type adopter struct {
	store cni.Store
	log   *slog.Logger
	// namespaces is the directory of the runtime's network namespaces.
	namespaces string
	// look returns the addresses of a namespace, by interface, and its inode number.
	look func(path string) (map[string][]netip.Prefix, uint64, error)
	// inode returns the inode number of a namespace.
	inode func(path string) (uint64, error)
	// sandboxes reads which namespaces the runtime names.
	sandboxes func() (sandboxes, error)

	missing map[records.Pod]bool // pods without a record the last time
}

func newAdopter(store cni.Store, log *slog.Logger) *adopter {
	return &adopter{
		store: store, log: log, namespaces: namespaceDir, look: lookInto, inode: inodeOf, missing: map[records.Pod]bool{},
		sandboxes: func() (sandboxes, error) { return readSandboxes(sandboxDir) },
	}
}

// adopt looks for pods to adopt until ctx ends.
func (c *cluster) adopt(ctx context.Context) {
	node, _ := c.source.Load() // Load never fails
	a := newAdopter(cni.NewStore(node.DataDir), c.cfg.Log)
	tick := time.NewTicker(adoptEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-c.source.Uninstall():
			return
		case <-tick.C:
		}
		if !c.source.Live() {
			continue // the list of pods may be old: a record of a pod that is not in it must stay
		}
		if err := a.pass(c.source.Verdicts(), c.source.podIPs()); err != nil {
			c.source.complain.say("pods that are older than the CNI plugin not attached", err, time.Now())
		}
	}
}

// pass adopts pods that were without a record at the last pass too, and removes
// the records of adopted pods that are gone.
func (a *adopter) pass(pods []config.Verdict, ips map[string][]netip.Addr) error {
	list, _, err := a.store.List()
	if err != nil {
		return err
	}
	recorded, inodes, err := a.tidy(pods, list)
	errs := []error{err}
	missing := map[records.Pod]bool{}
	var wanted []config.Verdict
	for _, v := range pods {
		if pod := onNode(v); v.OptedIn && !recorded[pod] && len(ips[v.UID]) > 0 {
			missing[pod] = true
			if a.missing[pod] { // at the last pass, too: by now the plugin would have written a record
				wanted = append(wanted, v)
			}
		}
	}
	a.missing = missing
	if len(wanted) > 0 {
		// pods has no pods that have ended: a new pod may have the address of such a pod.
		owners := map[netip.Addr][]config.Verdict{}
		for _, v := range pods {
			for _, ip := range ips[v.UID] {
				owners[ip] = append(owners[ip], v)
			}
		}
		errs = append(errs, a.search(wanted, ips, owners, inodes))
	}
	return errors.Join(errs...)
}

// tidy removes the records of adopted pods that are out of date. It returns which pods have
// records, and the inodes of the network namespaces in these records.
func (a *adopter) tidy(pods []config.Verdict, list []cni.Attachment) (recorded map[records.Pod]bool, inodes map[uint64]bool, _ error) {
	alive, attached := map[records.Pod]bool{}, map[records.Pod]bool{}
	for _, v := range pods {
		alive[onNode(v)] = true
	}
	recorded, inodes = map[records.Pod]bool{}, map[uint64]bool{}
	for _, r := range list {
		if r.Network != adoptedNetwork {
			attached[r.Pod], recorded[r.Pod], inodes[r.NetNSID] = true, true, true
		}
	}
	var errs []error
	for _, r := range list {
		switch {
		case r.Network != adoptedNetwork:
		// The pod is gone, or got a new sandbox, with the plugin or without.
		case !alive[r.Pod] || attached[r.Pod] || a.isGone(r):
			errs = append(errs, a.store.Delete(r.ContainerID, r.IfName))
		default:
			recorded[r.Pod], inodes[r.NetNSID] = true, true
		}
	}
	return recorded, inodes, errors.Join(errs...)
}

// isGone says whether the namespace of a record is not at its path any more.
func (a *adopter) isGone(r cni.Attachment) bool {
	inode, err := a.inode(r.NetNS)
	return errors.Is(err, linux.ErrGone) || err == nil && inode != r.NetNSID
}

// onNode is the pod as the CNI plugin knows it.
func onNode(v config.Verdict) records.Pod {
	return records.Pod{Namespace: v.Namespace, Name: v.Name, UID: v.NodeUID}
}

// A candidate is a namespace that has no record yet.
type candidate struct {
	name  string // in the directory of namespaces
	inode uint64
	ifs   map[string][]netip.Prefix // the addresses of its interfaces
}

// has reports whether the namespace has an address.
func (p *candidate) has(ip netip.Addr) bool {
	for _, prefixes := range p.ifs {
		if slices.ContainsFunc(prefixes, func(x netip.Prefix) bool { return x.Addr() == ip }) {
			return true
		}
	}
	return false
}

// search looks for the pods in the namespaces that have no record.
func (a *adopter) search(pods []config.Verdict, ips map[string][]netip.Addr, owners map[netip.Addr][]config.Verdict, known map[uint64]bool) error {
	candidates, err := a.candidates(known)
	errs := []error{err}
	runtime, err := a.sandboxes()
	errs = append(errs, err)
	for _, pod := range pods {
		p, err := locate(pod, ips[pod.UID], owners, candidates, runtime)
		if err != nil {
			errs = append(errs, fmt.Errorf("pod %s/%s: %w", pod.Namespace, pod.Name, err))
		}
		if p == nil {
			continue
		}
		for ifName, prefixes := range p.ifs {
			// The record has only the addresses that the API server has of the pod: the
			// pod may have given itself others.
			own := slices.DeleteFunc(slices.Clone(prefixes), func(x netip.Prefix) bool { return !slices.Contains(ips[pod.UID], x.Addr()) })
			if len(own) > 0 {
				errs = append(errs, a.write(pod, filepath.Join(a.namespaces, p.name), p.inode, ifName, own))
			}
		}
	}
	return errors.Join(errs...)
}

// candidates looks into the namespaces whose inodes are not known.
func (a *adopter) candidates(known map[uint64]bool) ([]candidate, error) {
	entries, err := os.ReadDir(a.namespaces)
	if err != nil {
		return nil, fmt.Errorf("list network namespaces: %w: mount %s into the agent's pod", err, a.namespaces)
	}
	var (
		out  []candidate
		errs []error
	)
	for _, e := range entries[:min(len(entries), maxNamespaces)] {
		ifs, inode, err := a.look(filepath.Join(a.namespaces, e.Name()))
		switch {
		case err == nil && !known[inode]:
			out = append(out, candidate{name: e.Name(), inode: inode, ifs: ifs})
		case err != nil && !errors.Is(err, linux.ErrGone):
			errs = append(errs, err)
		}
	}
	return out, errors.Join(errs...)
}

// locate finds the namespace of a pod. It returns nil if no candidate can be the pod's, and an
// error if it is not certain that one is.
func locate(pod config.Verdict, ips []netip.Addr, owners map[netip.Addr][]config.Verdict, candidates []candidate, runtime sandboxes) (*candidate, error) {
	if name, ok := runtime[onNode(pod)]; ok {
		i := slices.IndexFunc(candidates, func(p candidate) bool { return p.name == name })
		if i < 0 {
			return nil, nil
		}
		for _, ip := range ips {
			if !candidates[i].has(ip) {
				return nil, fmt.Errorf("%w: the runtime names %s, which does not have the pod's address %v", errUncertain, name, ip)
			}
		}
		return &candidates[i], nil
	}
	var found *candidate
	for i := range candidates {
		p := &candidates[i]
		if !slices.ContainsFunc(ips, p.has) || runtime.has(p.name) {
			continue
		}
		if found != nil {
			return nil, fmt.Errorf("%w: both %s and %s have addresses of the pod", errUncertain, found.name, p.name)
		}
		found = p
	}
	if found == nil {
		return nil, nil
	}
	for _, ip := range ips {
		if !found.has(ip) {
			return nil, fmt.Errorf("%w: %s has one of the pod's addresses, but not %v", errUncertain, found.name, ip)
		}
	}
	for ip, pods := range owners {
		for _, other := range pods {
			if other.UID != pod.UID && found.has(ip) {
				return nil, fmt.Errorf("%w: %s has the pod's addresses, and also %v of pod %s/%s", errUncertain, found.name, ip, other.Namespace, other.Name)
			}
		}
	}
	return found, nil
}

// errUncertain says that a pod is not adopted.
var errUncertain = errors.New("it is not certain which network namespace is the pod's: delete the pod, so that its successor is attached by the CNI plugin")

func (a *adopter) write(pod config.Verdict, path string, inode uint64, ifName string, ips []netip.Prefix) error {
	err := a.store.Write(cni.Attachment{
		ContainerID: "adopted-" + pod.UID, IfName: ifName, NetNS: path, NetNSID: inode, Network: adoptedNetwork,
		Pod: onNode(pod), IPs: ips, Created: time.Now(),
	})
	if err != nil {
		return err
	}
	a.log.Info("pod adopted that is older than the CNI plugin", "pod", pod.Namespace+"/"+pod.Name, "netns", path)
	return nil
}

// inodeOf returns the inode number of a namespace.
func inodeOf(path string) (uint64, error) {
	ns, err := linux.OpenNetNS(path)
	if err != nil {
		return 0, err
	}
	return ns.ID(), ns.Close()
}

// lookInto reads the addresses of a namespace.
func lookInto(path string) (_ map[string][]netip.Prefix, inode uint64, err error) {
	ns, err := linux.OpenNetNS(path)
	if err != nil {
		return nil, 0, err
	}
	defer func() { err = errors.Join(err, ns.Close()) }()
	ifs, err := linux.Addresses(ns)
	return ifs, ns.ID(), err
}
