// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/klog/v2"

	"github.com/smcr-io/kube-smcr/internal/agent"
	"github.com/smcr-io/kube-smcr/internal/config"
	"github.com/smcr-io/kube-smcr/internal/kube"
	"github.com/smcr-io/kube-smcr/internal/linux"
)

// pluginName is the CNI plugin's program, which is in the directory of the agent's program.
const pluginName = "smcr-cni"

// runner runs an agent, with or without a cluster.
type runner func(context.Context, agent.Config) error

// thisMachine are the values of this machine that a configuration may refer to.
func thisMachine(inCluster bool, getenv func(string) string) (config.Machine, error) {
	m := config.Machine{Cluster: inCluster}
	var err error
	if m.Interfaces, err = linux.LastingAddresses(); err != nil || !inCluster {
		return m, err
	}
	if m.Name = getenv("NODE_NAME"); m.Name == "" {
		return m, errors.New("NODE_NAME is not in the environment: set it to spec.nodeName of the agent's pod")
	}
	if ip := getenv("NODE_IP"); ip != "" {
		if m.Address, err = netip.ParseAddr(ip); err != nil {
			return m, fmt.Errorf("NODE_IP: %w: set it to status.hostIP of the agent's pod", err)
		}
	}
	return m, nil
}

// runnerFor returns the runner: agent.Run, or kube.RunAgent in a cluster.
func runnerFor(inCluster bool, kubeconfig string, m config.Machine, load func() (*config.Node, error)) runner {
	if !inCluster {
		return agent.Run
	}
	return func(ctx context.Context, cfg agent.Config) error {
		rc, err := restConfig(kubeconfig)
		if err != nil {
			return err
		}
		klog.SetSlogLogger(cfg.Log) // client-go logs through klog
		self, err := os.Executable()
		if err != nil {
			return fmt.Errorf("find the CNI plugin: %w", err)
		}
		return kube.RunAgent(ctx, kube.ClusterConfig{
			REST: rc, Node: m.Name, Pod: os.Getenv("POD_NAMESPACE") + "/" + os.Getenv("POD_NAME"), DaemonSet: os.Getenv("DAEMONSET"), Version: cfg.Version,
			Base: load, Reread: cfg.Reload, Plugin: filepath.Join(filepath.Dir(self), pluginName), Agent: cfg, Log: cfg.Log,
		})
	}
}

// restConfig is how to reach the API server.
func restConfig(kubeconfig string) (*rest.Config, error) {
	if kubeconfig == "" {
		c, err := rest.InClusterConfig()
		if err != nil {
			return nil, fmt.Errorf("reach the API server: %w: run in a pod with a service account, or give --kubeconfig", err)
		}
		return c, nil
	}
	c, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return nil, fmt.Errorf("reach the API server as --kubeconfig says: %w", err)
	}
	return c, nil
}
