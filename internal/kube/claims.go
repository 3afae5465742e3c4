// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"errors"
	"fmt"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/smcr-io/kube-smcr/internal/claims"
	"github.com/smcr-io/kube-smcr/internal/config"
	"github.com/smcr-io/kube-smcr/internal/deviceplugin"
	"github.com/smcr-io/kube-smcr/internal/dra"
)

// newDriver makes the driver by which pods claim devices.
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
		Inventory: c.inventory, Metrics: metrics, Log: c.cfg.Log,
	})
	c.cfg.Agent.Collectors = append(c.cfg.Agent.Collectors, metrics)
	return nil
}

// driveClaims serves kubelet until ctx ends, or the product is uninstalled.
func (c *cluster) driveClaims(ctx context.Context) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	done := make(chan struct{})
	go func() {
		defer close(done)
		select {
		case <-ctx.Done():
		case <-c.source.Uninstall():
			cancel()
		}
	}()
	c.dra.Run(ctx)
	cancel()
	<-done
}

// followClaims opts pods in by their claims, and out, until ctx ends.
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
	node, _ := c.source.Load() // it has no errors
	return errors.Join(claims.NewStore(node.DataDir).RemoveAll(), deviceplugin.ForgetAssignments(node.DataDir))
}
