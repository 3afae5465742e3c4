// SPDX-License-Identifier: Apache-2.0

package cni

import (
	"context"
	"fmt"
	"slices"

	"github.com/smcr-io/kube-smcr/internal/devices/vf"
	"github.com/smcr-io/kube-smcr/internal/records"
)

// former is another attachment of this network that has the device now; nil if there is none. Attach may
// take the device from it.
func (w *wiring) former(d vf.Device) *vf.Owner {
	if o := d.Owner; o != nil && o.Network == w.c.Name && !o.Is(w.args.ContainerID, w.args.IfName) {
		return o
	}
	return nil
}

// attachAfter is attach for a device that a former attachment may have, for which no DEL came. If Attach
// takes the device from it, the former attachment ends, as by a DEL. If it is that of an earlier
// sandbox of the same pod, it ends before Attach, so that the agent has closed the device before the
// device leaves that sandbox.
func (w *wiring) attachAfter(ctx context.Context, one ifRequest, former *vf.Owner) (vf.Wiring, error) {
	replaced := former != nil && former.ReplacedBy(vf.Owner{ContainerID: w.args.ContainerID, Pod: w.a.Pod})
	if replaced {
		w.endFormer(ctx, *former, one.device)
	}
	wired, err := w.attach(ctx, one)
	if former == nil || replaced {
		return wired, err
	}
	if d, derr := w.host().Device(one.device); derr == nil && (d.Owner == nil || !d.Owner.Is(former.ContainerID, former.IfName)) {
		w.endFormer(ctx, *former, one.device)
	}
	return wired, err
}

// endFormer ends an attachment whose record has the device. What fails is left to GC and to DEL.
func (w *wiring) endFormer(ctx context.Context, o vf.Owner, device string) {
	args := *w.args
	args.ContainerID, args.IfName, args.Netns = o.ContainerID, o.IfName, ""
	ctx, cancel := context.WithTimeout(ctx, formerWait)
	defer cancel()
	unlock, err := w.p.lock(ctx, w.c, &args)
	if err != nil { // perhaps the DEL of the former attachment has come
		w.p.tell("ADD leaves alone what container %s had, which had device %s: %v", o.ContainerID, device, err)
		return
	}
	defer unlock()
	a, err := w.c.store().Get(o.ContainerID, o.IfName)
	if err != nil || a.Network != w.c.Name || !slices.ContainsFunc(a.wired(), func(d AttachedDevice) bool { return d.ID == device }) {
		return
	}
	args.Args = podArgs(o.ContainerID, a.Pod)
	if _, err := w.p.endRecord(w.c, &args); err != nil {
		w.p.tell("ADD has not taken back all that container %s had, which had device %s: %v", o.ContainerID, device, err)
	}
}

// podArgs are the CNI_ARGS of a pod's sandbox, as Kubernetes' runtimes write them. IPAM plugins may need
// them to find the addresses.
func podArgs(containerID string, p records.Pod) string {
	if p.Name == "" {
		return ""
	}
	return fmt.Sprintf("IgnoreUnknown=1;K8S_POD_NAMESPACE=%s;K8S_POD_NAME=%s;K8S_POD_INFRA_CONTAINER_ID=%s;K8S_POD_UID=%s", p.Namespace, p.Name, containerID, p.UID)
}
