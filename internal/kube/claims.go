// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"errors"
	"fmt"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/smcr-io/kube-smcr/internal/config"
	"github.com/smcr-io/kube-smcr/internal/devices/claims"
	"github.com/smcr-io/kube-smcr/internal/devices/deviceplugin"
	"github.com/smcr-io/kube-smcr/internal/devices/dra"
)

// newDriver makes the DRA driver, by which pods get devices through ResourceClaims.
func (c *cluster) newDriver(base *config.Node) error {
	rc := rest.CopyConfig(c.cfg.REST)
	rc.UserAgent = "kube-smcr-agent"
	rc.ContentType = runtime.ContentTypeProtobuf
	rc.AcceptContentTypes = runtime.ContentTypeProtobuf + "," + runtime.ContentTypeJSON
	client, err := kubernetes.NewForConfig(rc)
	if err != nil {
		return fmt.Errorf("let pods claim devices: %w", err)
	}
	metrics := dra.NewMetrics()
	c.dra = dra.New(dra.Config{
		Client: client, Node: c.cfg.Node, Instance: c.cfg.Pod, DataDir: base.DataDir, KubeletDir: base.DRA.KubeletDir,
		Inventory: c.inventory, Ending: c.source.Ending, Metrics: metrics, Log: c.cfg.Log,
	})
	c.cfg.Agent.Collectors = append(c.cfg.Agent.Collectors, metrics)
	return nil
}

// driveClaims runs the DRA driver until ctx ends, or the product is uninstalled.
func (c *cluster) driveClaims(ctx context.Context) {
	until, stop := c.untilUninstall(ctx)
	defer stop()
	c.dra.Run(until)
}

// followClaims makes the configuration anew when a pod gets or loses a claimed device,
// until ctx ends: a claim opts its pod in.
func (c *cluster) followClaims(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-c.claimed.Changed():
			c.source.Reconsider()
		}
	}
}

// forgetDevices removes the records of what pods claimed, and of what kubelet gave
// them.
func (c *cluster) forgetDevices() error {
	node, _ := c.source.Load() // Load never fails
	return errors.Join(claims.NewStore(node.DataDir).RemoveAll(), deviceplugin.ForgetAssignments(node.DataDir))
}
