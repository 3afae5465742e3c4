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
// their node: opted-in pods without a record, whose network namespace is found
// by their address. It removes them when the pod is gone. All else about these
// pods is as with the plugin's records.
type adopter struct {
	store cni.Store
	log   *slog.Logger
	// namespaces is the directory of the runtime's network namespaces.
	namespaces string
	// look returns the addresses of a namespace and its inode number.
	look func(path string) (map[string][]netip.Prefix, uint64, error)

	missing map[string]bool // pods without a record the last time, by UID
}

func newAdopter(store cni.Store, log *slog.Logger) *adopter {
	return &adopter{store: store, log: log, namespaces: namespaceDir, look: lookInto, missing: map[string]bool{}}
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
		errs = append(errs, a.search(wanted, ips, inodes))
	}
	return errors.Join(errs...)
}

// search goes through the namespaces that have no record.
func (a *adopter) search(pods []config.Verdict, ips map[string][]netip.Addr, known map[uint64]bool) error {
	entries, err := os.ReadDir(a.namespaces)
	if err != nil {
		return fmt.Errorf("list network namespaces: %w: mount %s into the agent's pod", err, a.namespaces)
	}
	var errs []error
	for _, e := range entries[:min(len(entries), maxNamespaces)] {
		path := filepath.Join(a.namespaces, e.Name())
		ifs, inode, err := a.look(path)
		if err != nil {
			if !errors.Is(err, linux.ErrGone) {
				errs = append(errs, err)
			}
			continue
		}
		if known[inode] {
			continue
		}
		for _, pod := range pods {
			for name, prefixes := range ifs {
				has := func(p netip.Prefix) bool { return slices.Contains(ips[pod.UID], p.Addr()) }
				if slices.ContainsFunc(prefixes, has) {
					errs = append(errs, a.write(pod, path, inode, name, prefixes))
				}
			}
		}
	}
	return errors.Join(errs...)
}

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
