// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/invoke"
	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"

	"github.com/smcr-io/kube-smcr/internal/linux"
	"github.com/smcr-io/kube-smcr/internal/undo"
)

// PodConfig says which pod to make.
type PodConfig struct {
	// Name is the pod's name, unique in the lab.
	Name string
	// WithoutSMCR leaves smcr-cni out of the chain, so that no agent knows of
	// the pod.
	WithoutSMCR bool
}

// PodNamespace is the Kubernetes namespace of all pods of a lab.
const PodNamespace = "demo"

// Pod is a network namespace that is attached to a node's network. Its
// processes have no privileges.
type Pod struct {
	Name string
	Node *Node
	NS   *linux.NetNS
	// Addr4 and Addr6 are the addresses that the CNI plugins gave.
	Addr4, Addr6 netip.Addr
	// Dir belongs to the user of the pod's processes.
	Dir string
}

// conflist is the configuration as an administrator writes it.
func (n *Node) conflist(withSMCR bool) ([]byte, error) {
	first := 16 * (n.index + 1)
	span := func(p netip.Prefix) map[string]any {
		b := p.Addr().AsSlice()
		at := func(i int) string {
			b[len(b)-1] = byte(i)
			a, _ := netip.AddrFromSlice(b) // b has the length of an address
			return a.String()
		}
		return map[string]any{"subnet": p.String(), "rangeStart": at(first), "rangeEnd": at(first + 15), "gateway": gateway(p).String()}
	}
	ipam := map[string]any{"type": "host-local", "dataDir": filepath.Join(n.Dir, "ipam")}
	pods := n.podPrefixes()
	ipam["ranges"] = [][]any{{span(pods[0])}, {span(pods[1])}}
	if n.lab.cfg.Routed {
		ipam["routes"] = []map[string]any{{"dst": "0.0.0.0/0"}, {"dst": "::/0"}}
	}
	plugins := []map[string]any{{
		"type": "bridge", "bridge": bridge, "mtu": n.lab.cfg.MTU,
		"ipam": ipam,
	}}
	if withSMCR {
		plugins = append(plugins, map[string]any{
			"type": "smcr-cni", "dataDir": n.DataDir(), "agentSocket": n.Socket(),
		})
	}
	return json.MarshalIndent(map[string]any{"cniVersion": "1.0.0", "name": "pods", "plugins": plugins}, "", "  ")
}

// DataDir is where the node's plugin and agent meet.
func (n *Node) DataDir() string { return filepath.Join(n.Dir, "data") }

// Socket is the path of the node's agent's API socket.
func (n *Node) Socket() string { return filepath.Join(n.Dir, "agent.sock") }

// AddPod makes a pod and attaches it. Close of the lab detaches it.
func (n *Node) AddPod(ctx context.Context, cfg PodConfig) (*Pod, error) {
	p := &Pod{Name: cfg.Name, Node: n, Dir: filepath.Join(n.Dir, cfg.Name)}
	var chain attachment
	var u undo.Stack
	steps := []undo.Step{
		{Name: "make directory", Do: func() error {
			return errors.Join(os.Mkdir(p.Dir, 0o755), os.Chown(p.Dir, nobody, nobody))
		}},
		{Name: "make namespace", Do: func() (err error) {
			p.NS, err = n.lab.makeNS(cfg.Name)
			return err
		}, Undo: func() error { return n.lab.removeNS(cfg.Name, p.NS) }},
		{Name: "attach by CNI", Do: func() (err error) {
			chain, err = n.newAttachment(p, !cfg.WithoutSMCR)
			if err != nil {
				return err
			}
			return chain.add(ctx)
		}, Undo: func() error { return chain.del() }},
	}
	if err := u.Run(steps...); err != nil {
		return nil, fmt.Errorf("pod %s: %w", cfg.Name, err)
	}
	u.Keep()
	n.lab.onClose("pod "+cfg.Name, func() error {
		return errors.Join(chain.del(), n.lab.removeNS(cfg.Name, p.NS))
	})
	return p, nil
}

// attachment is a pod's way through the chain of plugins.
type attachment struct {
	pod  *Pod
	cni  *libcni.CNIConfig
	list *libcni.NetworkConfigList
	rt   *libcni.RuntimeConf
	said *bytes.Buffer // what the plugins wrote about it
}

func (n *Node) newAttachment(p *Pod, withSMCR bool) (attachment, error) {
	conf, err := n.conflist(withSMCR)
	if err != nil {
		return attachment{}, err
	}
	list, err := libcni.ConfListFromBytes(conf)
	if err != nil {
		return attachment{}, fmt.Errorf("network configuration: %w", err)
	}
	said := &bytes.Buffer{}
	exec := &invoke.DefaultExec{RawExec: &invoke.RawExec{Stderr: said}}
	return attachment{
		pod: p, list: list, said: said,
		cni: libcni.NewCNIConfigWithCacheDir(n.lab.pluginDirs, filepath.Join(n.Dir, "cni-cache"), exec),
		rt: &libcni.RuntimeConf{
			ContainerID: n.lab.nsName(p.Name), NetNS: p.NS.Path(), IfName: podIf,
			// As the container runtimes of Kubernetes pass them.
			Args: [][2]string{
				{"IgnoreUnknown", "1"},
				{"K8S_POD_NAMESPACE", PodNamespace},
				{"K8S_POD_NAME", p.Name},
				{"K8S_POD_INFRA_CONTAINER_ID", n.lab.nsName(p.Name)},
				{"K8S_POD_UID", "uid-" + n.lab.nsName(p.Name)},
			},
		},
	}, nil
}

// add runs ADD in the node's namespace, where the plugins' processes start
// too.
func (a *attachment) add(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, cniTimeout)
	defer cancel()
	var r types.Result
	err := a.pod.Node.NS.Do(func() (err error) {
		r, err = a.cni.AddNetworkList(ctx, a.list, a.rt)
		return err
	})
	if err != nil {
		return errors.Join(fmt.Errorf("%w: %s", err, a.said), a.del())
	}
	res, err := types100.NewResultFromResult(r)
	if err != nil {
		return errors.Join(err, a.del())
	}
	for _, ip := range res.IPs {
		addr, _ := netip.AddrFromSlice(ip.Address.IP)
		if addr = addr.Unmap(); addr.Is4() {
			a.pod.Addr4 = addr
		} else {
			a.pod.Addr6 = addr
		}
	}
	if !a.pod.Addr4.IsValid() {
		return errors.Join(fmt.Errorf("the plugins gave no IPv4 address: %v", res.IPs), a.del())
	}
	return nil
}

func (a *attachment) del() error {
	ctx, cancel := context.WithTimeout(context.Background(), cniTimeout)
	defer cancel()
	if err := a.pod.Node.NS.Do(func() error { return a.cni.DelNetworkList(ctx, a.list, a.rt) }); err != nil {
		return fmt.Errorf("detach pod %s: %w: %s", a.pod.Name, err, a.said)
	}
	return nil
}

// Bytes returns what the pod received and sent on its network interface.
func (p *Pod) Bytes() (rx, tx uint64, err error) { return linkBytes(p.NS, podIf) }

// Interface is the name of the pod's network interface.
func (p *Pod) Interface() string { return podIf }

// ActiveOpens returns how often a socket in the pod began to connect.
func (p *Pod) ActiveOpens() (uint64, error) {
	text, err := p.procNet("snmp")
	if err != nil {
		return 0, err
	}
	return tcpCounter(text, "ActiveOpens")
}

// tcpCounter reads a counter of /proc/net/snmp, which has a line with names
// above each line with values.
func tcpCounter(snmp []byte, name string) (uint64, error) {
	var names []string
	for s := bufio.NewScanner(bytes.NewReader(snmp)); s.Scan(); {
		f := strings.Fields(s.Text())
		if len(f) == 0 || f[0] != "Tcp:" {
			continue
		}
		if names == nil {
			names = f
			continue
		}
		for i, n := range names {
			if n == name && i < len(f) {
				return strconv.ParseUint(f[i], 10, 64)
			}
		}
	}
	return 0, fmt.Errorf("/proc/net/snmp has no TCP counter %s", name)
}

// WaitListening waits until a process in the pod listens on a TCP port. It
// does not connect, which some servers would count.
func (p *Pod) WaitListening(ctx context.Context, port uint16) error {
	return poll(ctx, fmt.Sprintf("port %d of pod %s", port, p.Name), func() error {
		for _, table := range []string{"tcp", "tcp6"} {
			text, err := p.procNet(table)
			if err != nil && !errors.Is(err, os.ErrNotExist) {
				return err
			}
			if listens(text, port) {
				return nil
			}
		}
		return errors.New("nobody listens")
	})
}

// listens looks for a listening socket in the text of /proc/net/tcp.
func listens(table []byte, port uint16) bool {
	const listen = "0A"
	suffix := fmt.Sprintf(":%04X", port)
	for s := bufio.NewScanner(bytes.NewReader(table)); s.Scan(); {
		if f := strings.Fields(s.Text()); len(f) > 3 && f[3] == listen && strings.HasSuffix(f[1], suffix) {
			return true
		}
	}
	return false
}

func (p *Pod) procNet(file string) (text []byte, err error) {
	err = p.NS.Do(func() error {
		text, err = os.ReadFile("/proc/thread-self/net/" + file)
		return err
	})
	return text, err
}

// poll looks until it sees what it waits for, or ctx ends.
func poll(ctx context.Context, what string, look func() error) error {
	t := time.NewTicker(pollEvery)
	defer t.Stop()
	var seen error // the last one that is not only the end of the wait
	for {
		err := look()
		if err == nil {
			return nil
		}
		if seen == nil || ctx.Err() == nil {
			seen = err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait for %s: %w: %w", what, seen, context.Cause(ctx))
		case <-t.C:
		}
	}
}
