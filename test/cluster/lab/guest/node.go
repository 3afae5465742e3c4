// SPDX-License-Identifier: Apache-2.0

package guest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/smcr-io/kube-smcr/test/cluster/lab"
	"github.com/smcr-io/kube-smcr/test/cluster/lab/machine"
	vm "github.com/smcr-io/kube-smcr/test/vm/lab"
)

// A Node is a node in a guest.
type Node struct {
	*lab.Node
	// Guest is its machine. One that is reset is a node again only by [Node.Reset].
	Guest *vm.Guest

	has has
}

// Rail is the address of eth1 in the guests' segment.
func (n *Node) Rail() netip.Addr { return n.Guest.Addr(1) }

// Run runs a command on the node and returns what it printed.
func (n *Node) Run(ctx context.Context, command ...string) (string, error) {
	return n.Guest.Run(ctx, append([]string{"env", "PATH=" + machine.Path}, command...)...)
}

// nodesDir is the directory of Share with the files of nodes.
const nodesDir = "nodes"

// networkScript is the name of the file with the commands that configure eth0.
const networkScript = "network.sh"

// give puts the files of the node where the guest finds them.
func (n *Node) give(share string) error {
	e, _ := n.External()
	dir := filepath.Join(share, nodesDir, n.Name)
	if err := os.CopyFS(filepath.Join(dir, "etc"), os.DirFS(filepath.Join(e.Files, "etc"))); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, networkScript), []byte(network(e)), 0o600)
}

// network returns the commands that configure eth0. Nobody else has its addresses, so that an IPv6
// address need not be asked for.
func network(e lab.External) string {
	var b strings.Builder
	for _, a := range e.Addresses {
		flags := ""
		if a.Addr().Is6() {
			flags = " nodad"
		}
		fmt.Fprintf(&b, "ip address replace %s dev eth0%s\n", a, flags)
	}
	for _, r := range e.Routes {
		fmt.Fprintf(&b, "ip route replace %s via %s dev eth0\n", r.To, r.Via)
	}
	return b.String()
}

// bootScript makes a node of a guest, after each boot: $1 is the name of the node. What a node
// keeps is on its disk: at first programs and images only.
const bootScript = `
mkdir -p /data
mount -t ext4 -o noatime /dev/vdb /data
if [ ! -d /data/etc ]; then
	mkdir -p /data/var/log /data/var/lib/kubelet
	cp -r "/host/` + nodesDir + `/$1/etc" /data/etc
	tr -d - </proc/sys/kernel/random/uuid >/data/etc/machine-id
fi
for d in etc/kubernetes etc/containerd etc/cni opt/tools opt/cni var/lib var/log; do
	mkdir -p "/data/$d" "/$d"
	mount --bind "/data/$d" "/$d"
done
cp /data/etc/machine-id /etc/machine-id
hostname "$1"
echo "127.0.1.1 $1" >>/etc/hosts
. "/host/` + nodesDir + `/$1/` + networkScript + `"
modprobe -a nf_tables bridge br_netfilter
damon=/sys/module/damon_stat/parameters/enabled
[ ! -w $damon ] || echo N >$damon # it takes a twelfth of an emulated processor
echo 1 >/proc/sys/net/ipv4/ip_forward
echo 1 >/proc/sys/net/ipv6/conf/all/forwarding
`

// A has is what a guest has besides what all have.
type has struct {
	VFs       int
	KernelSMC bool
}

// hasFile is the file of Share that says what the guests of a cluster have, for whoever opens it.
const hasFile = nodesDir + "/has.json"

func (h has) save(share string) error {
	text, err := json.Marshal(h)
	if err != nil {
		return err
	}
	name := filepath.Join(share, hasFile)
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		return err
	}
	return os.WriteFile(name, text, 0o600)
}

func loadHas(share string) (h has, err error) {
	text, err := os.ReadFile(filepath.Join(share, hasFile))
	if err == nil {
		err = json.Unmarshal(text, &h)
	}
	return h, err
}

// kernelSMC is the program that gives a kernel's SMC-R its settings.
const kernelSMC = "kernelsmc"

// start makes a node of the guest, which has booted, and waits until it is ready.
func (n *Node) start(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, bootTimeout)
	defer cancel()
	began := time.Now()
	if _, err := n.Guest.Run(ctx, "bash", "-euc", bootScript, "bash", n.Name); err != nil {
		return err
	}
	e, _ := n.External()
	if err := n.serve(ctx, e.Services[0]); err != nil {
		return err
	}
	if n.has.VFs > 0 && n.has.KernelSMC {
		if err := n.Guest.LoadRXE(ctx); err != nil {
			return err
		}
	}
	if err := n.Guest.AddRXE(ctx, 0, 1); err != nil {
		return err
	}
	if n.has.VFs > 0 {
		if err := n.makeVFs(ctx); err != nil {
			return err
		}
	}
	if n.has.KernelSMC {
		if _, err := n.Guest.Shell(ctx, "modprobe -a smc smc_diag && "+kernelSMC+" ueid add "+EID); err != nil {
			return err
		}
	}
	if _, err := n.Guest.Shell(ctx, "until nc -zU "+lab.ContainerdSocket+"; do sleep 0.2; done"); err != nil {
		return fmt.Errorf("wait for containerd: %w", err)
	}
	for _, s := range e.Services[1:] {
		if err := n.serve(ctx, s); err != nil {
			return err
		}
	}
	return n.AwaitReady(ctx, began)
}

// makeVFs makes the virtual functions of the guest's NICs, as whoever sets a node up for pods that ask for VFs: each is
// up, and has soft RoCE.
func (n *Node) makeVFs(ctx context.Context) error {
	for i := range pfs {
		vfs, err := n.Guest.MakeVFs(ctx, n.Guest.PF(i), n.has.VFs)
		if err != nil {
			return err
		}
		for _, vf := range vfs {
			if _, err := n.Guest.Shell(ctx, fmt.Sprintf("ip link set %[1]s up; rdma link add rxe_%[1]s type rxe netdev %[1]s", vf.NetDev)); err != nil {
				return fmt.Errorf("make soft RoCE of %s: %w", vf.NetDev, err)
			}
		}
	}
	return nil
}

// StopKubelet stops the kubelet until StartKubelet. The pods go on.
func (n *Node) StopKubelet(ctx context.Context) error {
	const script = "kill $(pidof kubelet); while pidof kubelet >/dev/null; do sleep 0.1; done"
	if _, err := n.Guest.Shell(ctx, script); err != nil {
		return fmt.Errorf("stop the kubelet of %s: %w", n.Name, err)
	}
	return nil
}

// StartKubelet starts the kubelet again, and waits until the node is ready.
func (n *Node) StartKubelet(ctx context.Context) error {
	e, _ := n.External()
	i := slices.IndexFunc(e.Services, func(s machine.Service) bool { return s.Name == kubelet })
	began := time.Now()
	if err := n.serve(ctx, e.Services[i]); err != nil {
		return fmt.Errorf("start the kubelet of %s: %w", n.Name, err)
	}
	return n.AwaitReady(ctx, began)
}

// kubelet is the name of its service.
const kubelet = "kubelet"

// lastWords write what is in memory to the disk, which has no journal, and keep anybody from writing more.
const lastWords = "sync; echo s >/proc/sysrq-trigger; echo u >/proc/sysrq-trigger"

// Reset is what a reset button does, but that what was written is on the disk. It returns when the guest is a
// node again, and ready. What was on the node's disk is there, images too; all else is new.
func (n *Node) Reset(ctx context.Context) error {
	if _, err := n.Guest.Shell(ctx, lastWords); err != nil {
		return fmt.Errorf("reset node %s: %w", n.Name, err)
	}
	if err := n.Guest.Reset(ctx); err != nil {
		return fmt.Errorf("reset node %s: %w", n.Name, err)
	}
	if err := n.start(ctx); err != nil {
		return fmt.Errorf("start node %s again: %w", n.Name, err)
	}
	return nil
}

// serve starts a service, with as many open files as systems allow it. It ends with the guest. Pods
// come first: beside a kubelet in the root cgroup, each of whose threads weighs twice what all pods
// do together, agents are so late that connections give SMC-R up.
func (n *Node) serve(ctx context.Context, s machine.Service) error {
	const script = `services=/sys/fs/cgroup/services
mkdir -p $services
echo +cpu >/sys/fs/cgroup/cgroup.subtree_control
echo 15 >$services/cpu.weight
echo $$ >$services/cgroup.procs
ulimit -n 1048576; log=$1; shift; exec setsid -f "$@" </dev/null >>"/var/log/$log.log" 2>&1`
	args := append([]string{"env", "PATH=" + machine.Path, "HOME=/root", machine.SeldomGC}, s.Env...)
	args = append(args, "sh", "-c", script, "sh", s.Name)
	_, err := n.Guest.Run(ctx, append(args, s.Args...)...)
	return err
}

// hasImage says whether the node has the image of that name and digest.
func (n *Node) hasImage(ctx context.Context, ref, digest string) (bool, error) {
	out, err := n.Run(ctx, "ctr", "--namespace=k8s.io", "images", "list", "name=="+ref)
	return strings.Contains(out, " "+digest+" "), err
}

// load imports an image from the directory that guests share.
func (n *Node) load(ctx context.Context, name string) error {
	ctx, cancel := context.WithTimeout(ctx, loadTimeout)
	defer cancel()
	_, err := n.Run(ctx, "ctr", "--namespace=k8s.io", "images", "import", "--snapshotter=overlayfs", "/host/"+name)
	return err
}

// saveLogs copies the logs of the services to a directory.
func (n *Node) saveLogs(ctx context.Context, dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	e, _ := n.External()
	var errs []error
	for _, s := range e.Services {
		text, err := n.Guest.Run(ctx, "cat", "/var/log/"+s.Name+".log")
		errs = append(errs, err, os.WriteFile(filepath.Join(dir, s.Name+".log"), []byte(text), 0o644))
	}
	return errors.Join(errs...)
}
