// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
	"github.com/smcr-io/kube-smcr/internal/devices/deviceplugin"
	"github.com/smcr-io/kube-smcr/test/cluster/lab"
)

// slots is how many pods may share a device.
const slots = 3

// allocatable waits until a node has so many slots for pods.
func (c *cluster) allocatable(n *lab.Node, want int64) {
	c.Helper()
	began := time.Now()
	c.eventually(fmt.Sprintf("%d of %s on %s", want, deviceplugin.ResourceShared, n.Name), soon, func() error {
		var o corev1.Node
		c.must(c.p.Client.Get(c.Context(), key("", n.Name), &o))
		if q := o.Status.Allocatable[deviceplugin.ResourceShared]; q.Value() != want {
			return fmt.Errorf("there are %v", q.String())
		}
		return nil
	})
	c.Logf("%d slots on %s after %v", want, n.Name, time.Since(began).Round(100*time.Millisecond))
}

// allocation: pods ask kubelet for devices, and their connections are carried on
// these; a device without a port is for nobody.
func allocation(c *cluster) {
	ns := c.namespace(optedIn())
	for _, n := range c.n {
		c.allocatable(n, 2*slots)
	}
	server := c.start(ns, podSpec{name: "server", node: c.n[0], devices: 1})[0]
	started := c.start(ns,
		podSpec{name: "one", node: c.n[1], devices: 1, args: []string{"hold", server.address()}},
		podSpec{name: "two", node: c.n[1], devices: 2})
	one := started[0]
	c.onSMCR(one, server.address())
	link := c.active(one)
	for _, l := range link.Status.Links {
		if l.Device != "soft0" {
			c.Errorf("a link of a pod that has soft0 is on %s", l.Device)
		}
	}
	if link.Status.Redundancy != v1alpha1.RedundancySingle {
		c.Errorf("link group of pods with one device each: %s", link.Status.Redundancy)
	}
	env, err := c.n[1].Run(c.Context(), "sh", "-c", `for p in $(pidof traffic); do tr '\0' '\n' <"/proc/$p/environ"; done`)
	c.must(err)
	for _, want := range []string{"SMCR_DEVICES_ROCE=soft0", "SMCR_DEVICES_ROCE=soft0,soft1"} {
		if !slices.Contains(strings.Split(env, "\n"), want) {
			c.Errorf("%s is in the environment of no container", want)
		}
	}

	c.grows(one, sum{}, 1)
	c.restartKubelet(c.n[1])
	mend := c.portDown(c.n[1], "eth1")
	c.allocatable(c.n[1], slots)
	c.must(c.p.Client.Create(c.Context(), podSpec{name: "three", node: c.n[1], devices: slots}.object(ns)))
	c.event(ns, "three", "FailedScheduling", "Insufficient "+deviceplugin.ResourceShared)
	mend()
	c.allocatable(c.n[1], 2*slots)
	c.running(ns, "three", c.n[1])
	if after := c.goesOn(one, 1); after.Failed > 0 || after.Ended {
		c.Errorf("the connection of a pod whose device was not concerned: %+v", after)
	}
}
