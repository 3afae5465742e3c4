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
)

// adoptedNetwork is the network of records that the plugin did not write. No CNI
// network can have the name, so that the plugin's GC leaves them alone.
const adoptedNetwork = "(adopted)"

// adopter writes attachment records for pods that are older than the plugin on
// their node: opted-in pods without a record. It removes them when the pod is gone.
// All else about these pods is as with the plugin's records.
//
// The namespace of a pod is the one that the container runtime says, if it does,
// and has the pod's addresses. Addresses alone prove less: a pod with NET_ADMIN can
// give itself those of another one, and networks can overlap. So where the
// runtime is silent, no other namespace may have one of them, nor that namespace
// those of another pod; else the pod is not adopted.
type adopter struct {
	store cni.Store
	log   *slog.Logger
	// namespaces is the directory of the runtime's network namespaces.
	namespaces string
	// look returns the addresses of a namespace and its inode number.
	look func(path string) (map[string][]netip.Prefix, uint64, error)
	// sandboxes reads what the runtime says.
	sandboxes func() (sandboxes, error)

	missing map[string]bool // pods without a record the last time, by UID
}

func newAdopter(store cni.Store, log *slog.Logger) *adopter {
	return &adopter{
		store: store, log: log, namespaces: namespaceDir, look: lookInto, missing: map[string]bool{},
		sandboxes: func() (sandboxes, error) { return readSandboxes(sandboxDir) },
	}
}

// adopt looks for pods to adopt until ctx ends.
func (c *cluster) adopt(ctx context.Context) {
	node, _ := c.source.Load() // it has no errors
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
			continue // a pod that is not known may exist
		}
		if err := a.pass(c.source.Verdicts(), c.source.podIPs()); err != nil {
			c.source.complain.say("pods that are older than the CNI plugin not attached", err, time.Now())
		}
	}
}

// pass adopts pods that were without a record at the last pass too, and removes
// the records of adopted pods that are gone.
func (a *adopter) pass(pods []config.Verdict, ips map[string][]netip.Addr) error {
	records, _, err := a.store.List()
	if err != nil {
		return err
	}
	var errs []error
	alive, recorded, inodes := map[string]bool{}, map[string]bool{}, map[uint64]bool{}
	for _, v := range pods {
		alive[v.UID] = true
	}
	for _, r := range records {
		recorded[r.Pod.UID] = recorded[r.Pod.UID] || r.Network != adoptedNetwork
	}
	for _, r := range records {
		if r.Network != adoptedNetwork {
			inodes[r.NetNSID] = true
			continue
		}
		// The pod is gone, or got a new sandbox and with it the plugin.
		if !alive[r.Pod.UID] || recorded[r.Pod.UID] {
			errs = append(errs, a.store.Delete(r.ContainerID, r.IfName))
			continue
		}
		recorded[r.Pod.UID], inodes[r.NetNSID] = true, true
	}
	missing := map[string]bool{}
	var wanted []config.Verdict
	for _, v := range pods {
		if v.OptedIn && !recorded[v.UID] && len(ips[v.UID]) > 0 {
			missing[v.UID] = true
			if a.missing[v.UID] { // the plugin had its time
				wanted = append(wanted, v)
			}
		}
	}
	a.missing = missing
	if len(wanted) > 0 {
		// Pods that have ended may have had an address before.
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

// A place is a namespace that has no record.
type place struct {
	name  string // in the directory of namespaces
	inode uint64
	ifs   map[string][]netip.Prefix // the addresses of its interfaces
}

// has reports whether the namespace has an address.
func (p *place) has(ip netip.Addr) bool {
	for _, prefixes := range p.ifs {
		if slices.ContainsFunc(prefixes, func(x netip.Prefix) bool { return x.Addr() == ip }) {
			return true
		}
	}
	return false
}

// search looks for the pods in the namespaces that have no record.
func (a *adopter) search(pods []config.Verdict, ips map[string][]netip.Addr, owners map[netip.Addr][]config.Verdict, known map[uint64]bool) error {
	places, err := a.places(known)
	errs := []error{err}
	runtime, err := a.sandboxes()
	errs = append(errs, err)
	for _, pod := range pods {
		p, err := locate(pod, ips[pod.UID], owners, places, runtime)
		if err != nil {
			errs = append(errs, fmt.Errorf("pod %s/%s: %w", pod.Namespace, pod.Name, err))
		}
		if p == nil {
			continue
		}
		for ifName, prefixes := range p.ifs {
			// What else the pod gave itself is not what the cluster knows it by.
			own := slices.DeleteFunc(slices.Clone(prefixes), func(x netip.Prefix) bool { return !slices.Contains(ips[pod.UID], x.Addr()) })
			if len(own) > 0 {
				errs = append(errs, a.write(pod, filepath.Join(a.namespaces, p.name), p.inode, ifName, own))
			}
		}
	}
	return errors.Join(errs...)
}

// places looks into the namespaces that are not known.
func (a *adopter) places(known map[uint64]bool) ([]place, error) {
	entries, err := os.ReadDir(a.namespaces)
	if err != nil {
		return nil, fmt.Errorf("list network namespaces: %w: mount %s into the agent's pod", err, a.namespaces)
	}
	var (
		out  []place
		errs []error
	)
	for _, e := range entries[:min(len(entries), maxNamespaces)] {
		ifs, inode, err := a.look(filepath.Join(a.namespaces, e.Name()))
		switch {
		case err == nil && !known[inode]:
			out = append(out, place{name: e.Name(), inode: inode, ifs: ifs})
		case err != nil && !errors.Is(err, linux.ErrGone):
			errs = append(errs, err)
		}
	}
	return out, errors.Join(errs...)
}

// locate finds the namespace of a pod, nil if there is none that could be, with an
// error if none that could be is certain to be.
func locate(pod config.Verdict, ips []netip.Addr, owners map[netip.Addr][]config.Verdict, places []place, runtime sandboxes) (*place, error) {
	if name, ok := runtime[pod.UID]; ok {
		i := slices.IndexFunc(places, func(p place) bool { return p.name == name })
		if i < 0 {
			return nil, nil
		}
		for _, ip := range ips {
			if !places[i].has(ip) {
				return nil, fmt.Errorf("%w: the runtime says %s, which does not have its address %v", errUncertain, name, ip)
			}
		}
		return &places[i], nil
	}
	var found *place
	for i := range places {
		p := &places[i]
		if !slices.ContainsFunc(ips, p.has) || runtime.owner(p.name) != "" {
			continue
		}
		if found != nil {
			return nil, fmt.Errorf("%w: %s and %s have its addresses", errUncertain, found.name, p.name)
		}
		found = p
	}
	if found == nil {
		return nil, nil
	}
	for _, ip := range ips {
		if !found.has(ip) {
			return nil, fmt.Errorf("%w: %s has one of its addresses, but not %v", errUncertain, found.name, ip)
		}
	}
	for ip, pods := range owners {
		for _, other := range pods {
			if other.UID != pod.UID && found.has(ip) {
				return nil, fmt.Errorf("%w: %s has its addresses, and %v of pod %s/%s", errUncertain, found.name, ip, other.Namespace, other.Name)
			}
		}
	}
	return found, nil
}

// errUncertain says that a pod is not adopted.
var errUncertain = errors.New("it is not certain which network namespace is the pod's: make the pod anew")

func (a *adopter) write(pod config.Verdict, path string, inode uint64, ifName string, ips []netip.Prefix) error {
	err := a.store.Write(cni.Attachment{
		ContainerID: "adopted-" + pod.UID, IfName: ifName, NetNS: path, NetNSID: inode, Network: adoptedNetwork,
		Pod: cni.Pod{Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID}, IPs: ips, Created: time.Now(),
	})
	if err != nil {
		return err
	}
	a.log.Info("pod adopted that is older than the CNI plugin", "pod", pod.Namespace+"/"+pod.Name, "netns", path)
	return nil
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
