// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
	"github.com/smcr-io/kube-smcr/internal/devices/dra"
	"github.com/smcr-io/kube-smcr/test/cluster/lab"
)

// republished is how soon ResourceSlices that kubelet removed must be there again: the
// driver takes a second, the controller of its library half a minute.
const republished = 15 * time.Second

// portTold is how soon a port that goes down must be in the ResourceSlice.
const portTold = 2 * time.Second

// secondRail is a template of claims for a device of rail 1.
const secondRail = `{apiVersion: resource.k8s.io/v1, kind: ResourceClaimTemplate, metadata: {name: second-rail, namespace: %s},
	spec: {spec: {devices: {requests: [{name: nic, exactly: {deviceClassName: roce.smcr.io, selectors: [
		{cel: {expression: 'device.attributes["roce.smcr.io"].rail == 1'}}]}}]}}}}`

// claiming makes a pod with a claim by a template. The scheduler places it: who
// names a node gets no devices.
func (c *cluster) claiming(ns, template string, s podSpec) {
	c.Helper()
	o := s.object(ns)
	o.Spec.NodeName, o.Spec.NodeSelector = "", map[string]string{corev1.LabelHostname: s.node.Name}
	o.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "rdma", ResourceClaimTemplateName: &template}}
	o.Spec.Containers[0].Resources.Claims = []corev1.ResourceClaim{{Name: "rdma"}}
	c.must(c.p.Client.Create(c.Context(), o))
}

// slices are the ResourceSlices of our driver for a node.
func (c *cluster) slices(n *lab.Node) ([]resourceapi.ResourceSlice, error) {
	var list resourceapi.ResourceSliceList
	err := c.p.Client.List(c.Context(), &list)
	return slices.DeleteFunc(list.Items, func(s resourceapi.ResourceSlice) bool {
		return s.Spec.Driver != dra.DriverName || s.Spec.NodeName == nil || *s.Spec.NodeName != n.Name
	}), err
}

// restartKubelet restarts the kubelet of a node, which removes the ResourceSlices of
// its node, and waits until they are there again.
func (c *cluster) restartKubelet(n *lab.Node) {
	c.Helper()
	before, err := c.slices(n)
	c.must(err)
	c.must(n.RestartKubelet(c.Context()))
	var gone time.Time
	c.eventually("other ResourceSlices of "+n.Name, soon, func() error {
		now, err := c.slices(n)
		switch {
		case err != nil:
			return err
		case len(now) == 0 && gone.IsZero():
			gone = time.Now()
		}
		old := func(s resourceapi.ResourceSlice) bool {
			return slices.ContainsFunc(before, func(b resourceapi.ResourceSlice) bool { return b.UID == s.UID })
		}
		if len(now) == 0 || slices.ContainsFunc(now, old) {
			return fmt.Errorf("there are %d", len(now))
		}
		return nil
	})
	if gone.IsZero() {
		return // for less than the time between two looks
	}
	took := time.Since(gone)
	c.Logf("ResourceSlices of %s again after %v", n.Name, took.Round(10*time.Millisecond))
	if took > republished {
		c.Errorf("nobody could claim a device of %s for %v", n.Name, took)
	}
}

// linkState waits until the ResourceSlice of a node has a state for its device of
// rail 1.
func (c *cluster) linkState(n *lab.Node, want string, timeout time.Duration) {
	c.Helper()
	began := time.Now()
	c.eventually(fmt.Sprintf("linkState %s of rail 1 of %s", want, n.Name), timeout, func() error {
		list, err := c.slices(n)
		if err != nil {
			return err
		}
		seen := []string{}
		for _, s := range list {
			for _, d := range s.Spec.Devices {
				state := d.Attributes["linkState"].StringValue
				if rail := d.Attributes["rail"].IntValue; rail != nil && *rail == 1 && state != nil && *state == want {
					return nil
				}
				seen = append(seen, d.Name)
			}
		}
		return fmt.Errorf("there are %q", seen)
	})
	c.Logf("linkState %s of %s after %v", want, n.Name, time.Since(began).Round(10*time.Millisecond))
}

// prepared are the records of claims on a node.
func (c *cluster) prepared(n *lab.Node) []string {
	c.Helper()
	dir, err := n.Path(c.Context(), "/run/kube-smcr/claims")
	c.must(err)
	names, err := filepath.Glob(filepath.Join(dir, "*.json"))
	c.must(err)
	return names
}

// claims: pods claim devices by their attributes, which opts them in; their links
// run on these. The driver may be away between prepare and unprepare.
func claims(c *cluster) {
	sample, err := os.ReadFile("../../config/samples/claim.yaml")
	c.must(err)
	file := filepath.Join(c.TempDir(), "claim.yaml")
	c.must(os.WriteFile(file, sample, 0o600))
	c.kubectl("apply", "--dry-run=server", "-f", file)

	ns := c.namespace(nil)
	c.apply(fmt.Sprintf(secondRail, ns))
	for _, n := range c.n {
		c.linkState(n, "up", soon)
	}
	c.claiming(ns, "second-rail", podSpec{name: "server", node: c.n[0]})
	server := c.running(ns, "server", c.n[0])
	c.claiming(ns, "second-rail", podSpec{name: "client", node: c.n[1], args: []string{"hold", server.address()}})
	peer := c.running(ns, "client", c.n[1])
	for _, p := range []pod{server, peer} {
		c.status(p, v1alpha1.PodStatusEnabled, soon)
	}
	c.onSMCR(peer, server.address())
	link := c.active(peer)
	for _, l := range link.Status.Links {
		if l.Device != "soft1" {
			c.Errorf("a link of a pod that claimed soft1 is on %s", l.Device)
		}
	}
	if n := len(c.prepared(c.n[1])); n != 1 {
		c.Errorf("%d claims are prepared, want one", n)
	}

	// A port goes down: the slice says so, and nobody else gets the device.
	mend := c.portDown(c.n[1], "eth1")
	c.linkState(c.n[1], "down", portTold)
	c.claiming(ns, "second-rail", podSpec{name: "later", node: c.n[1]})
	c.event(ns, "later", "FailedScheduling", "cannot allocate all claims")
	mend()
	c.linkState(c.n[1], "up", portTold)
	c.running(ns, "later", c.n[1])

	// Pods end while the agent is away; the next one unprepares their claims.
	c.killAgents(c.n[1])
	c.kubectl("delete", "pod", "-n", ns, "client", "later", "--wait=false")
	c.must(c.p.WaitNode(c.Context(), c.n[1].Name))
	c.eventually("the end of the pods and their claims", soon, func() error {
		for _, name := range []string{"client", "later"} {
			if err := c.p.Client.Get(c.Context(), client.ObjectKey{Namespace: ns, Name: name}, &corev1.Pod{}); !apierrors.IsNotFound(err) {
				return errors.Join(fmt.Errorf("pod %s is there", name), err)
			}
		}
		var list resourceapi.ResourceClaimList
		if err := c.p.Client.List(c.Context(), &list, client.InNamespace(ns)); err != nil {
			return err
		}
		if left := c.prepared(c.n[1]); len(left) > 0 || len(list.Items) != 1 {
			return fmt.Errorf("%d claims, records %s", len(list.Items), strings.Join(left, " "))
		}
		return nil
	})
}
