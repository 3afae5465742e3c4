// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"fmt"
	"net/netip"
	"os/exec"
	"path/filepath"

	"github.com/smcr-io/kube-smcr/test/cluster/lab/machine"
)

// Address is the address of the node: of eth0 and of its Node object.
func (n *Node) Address() netip.Addr { return address4(0, nodeHost(n.number)).Addr() }

// Rail is the address of eth1, which is in a second network between the nodes.
func (n *Node) Rail() netip.Addr { return address4(1, nodeHost(n.number)).Addr() }

// PodCIDR is where its pods have their IPv4 addresses.
func (n *Node) PodCIDR() netip.Prefix { return pods4(n.number) }

// Root is the node's disk, as the host sees it. Unlike Path it is there also
// when the node is off, and lacks what is mounted: /run, /tmp, /usr, /var/log.
func (n *Node) Root() string { return n.cluster.info.Nodes[n.number-1].Root }

// PowerOff ends all processes of the node at once.
func (n *Node) PowerOff(ctx context.Context) error {
	return n.cluster.ask(ctx, request{Op: opPowerOff, Node: n.Name})
}

// PowerOn boots the node again and waits until it is ready. What was on its
// disk is there, images too; /run, /tmp and the network are new.
func (n *Node) PowerOn(ctx context.Context) error {
	return n.cluster.ask(ctx, request{Op: opPowerOn, Node: n.Name})
}

// RestartKubelet restarts the kubelet, and not the pods.
func (n *Node) RestartKubelet(ctx context.Context) error { return n.service(ctx, kubelet, actRestart) }

// StopKubelet stops the kubelet until StartKubelet.
func (n *Node) StopKubelet(ctx context.Context) error { return n.service(ctx, kubelet, actStop) }

// StartKubelet starts the kubelet again.
func (n *Node) StartKubelet(ctx context.Context) error { return n.service(ctx, kubelet, actStart) }

// RestartContainerd restarts containerd, and not the pods, and waits until it answers:
// a kubelet that starts before that ends.
func (n *Node) RestartContainerd(ctx context.Context) error {
	return n.service(ctx, containerd, actRestart)
}

func (n *Node) service(ctx context.Context, name string, a action) error {
	return n.cluster.ask(ctx, request{Op: opService, Node: n.Name, Service: name, Action: a})
}

// SetPort pulls the cable of eth0 or eth1, or puts it back.
func (n *Node) SetPort(ctx context.Context, nic string, up bool) error {
	return n.cluster.ask(ctx, request{Op: opPort, Node: n.Name, NIC: nic, Up: up})
}

// PID is the process id of the node's process 1 on the host. It is another one
// after a reboot.
func (n *Node) PID(ctx context.Context) (int, error) {
	i, err := ask(ctx, n.cluster.dir, request{Op: opReady})
	if err != nil {
		return 0, err
	}
	pid := i.Nodes[n.number-1].PID
	if pid == 0 {
		return 0, fmt.Errorf("node %s is off", n.Name)
	}
	return pid, nil
}

// NetNS is the path of the node's network namespace, until it is powered off.
func (n *Node) NetNS(ctx context.Context) (string, error) {
	pid, err := n.PID(ctx)
	return fmt.Sprintf("/proc/%d/ns/net", pid), err
}

// Path is where the host sees the node's file name, mounts included, until the
// node is powered off.
func (n *Node) Path(ctx context.Context, name string) (string, error) {
	pid, err := n.PID(ctx)
	return filepath.Join(fmt.Sprintf("/proc/%d/root", pid), name), err
}

// Command is a command that runs on the node, as root and with the host's
// programs and those of clustertools: ip, nft, ctr.
func (n *Node) Command(ctx context.Context, args ...string) (*exec.Cmd, error) {
	pid, err := n.PID(ctx)
	if err != nil {
		return nil, err
	}
	return machine.Command(ctx, pid, args...), nil
}

// Run runs a command on the node and returns what it printed.
func (n *Node) Run(ctx context.Context, args ...string) (string, error) {
	cmd, err := n.Command(ctx, args...)
	if err != nil {
		return "", err
	}
	return n.cluster.run(cmd)
}
