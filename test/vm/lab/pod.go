// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// A Pod is a network namespace of a guest that is a pod for the agent there.
type Pod struct {
	Guest *Guest
	// Namespace and Name are the pod's. The name is that of the network namespace, too.
	Namespace, Name string
	// Addr is the pod's address in its network.
	Addr netip.Prefix
	// AgentDir is the agent's directory in the guest, with its socket agent.sock.
	AgentDir string
}

// AddMacvlan makes the network namespace, with a macvlan child of the guest's first NIC. That can have no ipvlan
// children then.
func (p *Pod) AddMacvlan(ctx context.Context) error { return p.addChild(ctx, "macvlan mode bridge") }

// AddIPVLAN makes it with an ipvlan child, which has the NIC's MAC address.
func (p *Pod) AddIPVLAN(ctx context.Context) error { return p.addChild(ctx, "ipvlan mode l2") }

func (p *Pod) addChild(ctx context.Context, kind string) error {
	_, err := p.Guest.Shell(ctx, fmt.Sprintf(`
		ip netns add %[1]s
		ip link add net-%[1]s link %[2]s netns %[1]s type %[4]s
		ip -n %[1]s link set lo up
		ip -n %[1]s link set net-%[1]s name eth0 mtu 9000 up
		ip -n %[1]s address add %[3]s dev eth0`, p.Name, p.Guest.NetDev(0), p.Addr, kind))
	return err
}

// AddFunction makes the network namespace, with a function of an RNIC: the interface of that name, which becomes eth0, and a soft RoCE
// device with the interface's name. It takes [Guest.LoadRXE].
func (p *Pod) AddFunction(ctx context.Context, netDev string) error {
	_, err := p.Guest.Shell(ctx, fmt.Sprintf(`
		ip netns add %[1]s
		ip link set %[2]s netns %[1]s
		ip -n %[1]s link set lo up
		ip -n %[1]s link set %[2]s name eth0 up
		ip -n %[1]s address add %[3]s dev eth0
		ip netns exec %[1]s rdma link add %[2]s type rxe netdev eth0`, p.Name, netDev, p.Addr))
	if err != nil {
		return err
	}
	return poll(ctx, "soft RoCE of "+p.Name, bootTimeout, func() error {
		out, err := p.Guest.Run(ctx, "ip", "netns", "exec", p.Name, "rdma", "link")
		if active := fmt.Sprintf("link %s/1 state ACTIVE", netDev); err == nil && !strings.Contains(out, active) {
			err = fmt.Errorf("there is no %q: %s", active, out)
		}
		return err
	})
}

// CNI calls our plugin, smcr-cni, for the pod with a command as ADD, as a container runtime does after another plugin that
// made its interface eth0.
func (p *Pod) CNI(ctx context.Context, command string) error {
	_, err := p.Guest.Shell(ctx, fmt.Sprintf(`
		export CNI_COMMAND=%[1]s CNI_CONTAINERID=%[2]s CNI_NETNS=/run/netns/%[2]s CNI_IFNAME=eth0 CNI_PATH=/host/bin
		export CNI_ARGS='IgnoreUnknown=1;K8S_POD_NAMESPACE=%[3]s;K8S_POD_NAME=%[2]s;K8S_POD_INFRA_CONTAINER_ID=%[2]s;K8S_POD_UID=%[2]s'
		smcr-cni <<-EOF
		{"cniVersion":"1.0.0","name":"pods","type":"smcr-cni","dataDir":"%[4]s","agentSocket":"%[4]s/agent.sock","prevResult":
		{"cniVersion":"1.0.0","interfaces":[{"name":"eth0","sandbox":"/run/netns/%[2]s"}],"ips":[{"interface":0,"address":"%[5]s"}]}}
		EOF`, command, p.Name, p.Namespace, p.AgentDir, p.Addr))
	return err
}

// In is the command line that runs a program in the pod's network, as a container without any right does.
func (p *Pod) In(command ...string) []string {
	return slices.Concat([]string{"nsenter", "--net=/run/netns/" + p.Name}, WithoutRights(), command)
}

// WithoutRights is the beginning of a command line that takes a program all rights.
func WithoutRights() []string {
	return []string{"setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--no-new-privs", "--inh-caps=-all", "--bounding-set=-all"}
}
