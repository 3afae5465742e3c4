// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"
	"github.com/containernetworking/cni/pkg/version"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"
)

const (
	// kubelet is where it says which devices pods have.
	kubelet = "unix:///var/lib/kubelet/pod-resources/kubelet.sock"

	// dir is where this plugin remembers what it did.
	dir = "/run/secondnet"

	// askTimeout bounds the question to kubelet.
	askTimeout = 10 * time.Second
)

// conf is the plugin's configuration.
type conf struct {
	types.NetConf
	Networks []network `json:"networks"`
}

// A network is a further one.
type network struct {
	// Resource is whose devices its plugins get.
	Resource string `json:"resource"`
	// List is its configuration list.
	List json.RawMessage `json:"list"`
}

func main() {
	nothing := func(*skel.CmdArgs) error { return nil }
	skel.PluginMainFuncs(skel.CNIFuncs{Add: add, Del: del, Check: nothing, GC: nothing, Status: nothing}, version.All, "further networks of pods with devices")
}

func plugins() *libcni.CNIConfig {
	return libcni.NewCNIConfigWithCacheDir(filepath.SplitList(os.Getenv("CNI_PATH")), dir, nil)
}

// add makes the pod's further interfaces, all or none. The result is that of the first network.
func add(args *skel.CmdArgs) error {
	var c conf
	if err := json.Unmarshal(args.StdinData, &c); err != nil {
		return fmt.Errorf("read the configuration: %w", err)
	}
	if err := version.ParsePrevResult(&c.NetConf); err != nil {
		return err
	}
	if _, err := os.Stat(filepath.Join(dir, "hold")); err == nil {
		return errors.New("no pod is made while there is " + filepath.Join(dir, "hold"))
	}
	ctx := context.Background()
	pod := pairs(args.Args)
	devices, err := ask(ctx, pod)
	if err != nil {
		return err
	}
	made := 0
	for _, n := range c.Networks {
		if len(devices[n.Resource]) == 0 {
			continue
		}
		device := devices[n.Resource][0]
		devices[n.Resource] = devices[n.Resource][1:]
		made++
		if err := attach(ctx, args, pod, n, fmt.Sprintf("net%d", made), device); err != nil {
			return errors.Join(fmt.Errorf("device %s of %s: %w", device, n.Resource, err), del(args))
		}
	}
	return types.PrintResult(c.PrevResult, c.CNIVersion)
}

func attach(ctx context.Context, args *skel.CmdArgs, pod [][2]string, n network, ifName, device string) error {
	list, err := libcni.NetworkConfFromBytes(n.List)
	if err != nil {
		return err
	}
	runtime := &libcni.RuntimeConf{
		ContainerID: args.ContainerID, NetNS: args.Netns, IfName: ifName, Args: pod, CapabilityArgs: map[string]any{"deviceID": device},
	}
	if _, err = plugins().AddNetworkList(ctx, list, runtime); err != nil { // what is not made is not remembered
		return errors.Join(err, plugins().DelNetworkList(ctx, list, runtime))
	}
	return nil
}

// del takes back what add did for the container, as far as it is remembered.
func del(args *skel.CmdArgs) error {
	cni := plugins()
	all, err := cni.GetCachedAttachments(args.ContainerID)
	if err != nil {
		return err
	}
	slices.SortFunc(all, func(a, b *libcni.NetworkAttachment) int { return strings.Compare(b.IfName, a.IfName) })
	var errs []error
	for _, a := range all {
		list, err := libcni.NetworkConfFromBytes(a.Config)
		if err == nil {
			err = cni.DelNetworkList(context.Background(), list, &libcni.RuntimeConf{
				ContainerID: args.ContainerID, NetNS: args.Netns, IfName: a.IfName, Args: a.CniArgs, CapabilityArgs: a.CapabilityArgs,
			})
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// pairs are CNI_ARGS, which say the pod's name.
func pairs(text string) (out [][2]string) {
	for pair := range strings.SplitSeq(text, ";") {
		if k, v, ok := strings.Cut(pair, "="); ok {
			out = append(out, [2]string{k, v})
		}
	}
	return out
}

// ask asks kubelet for the pod's devices, by resource.
func ask(ctx context.Context, pod [][2]string) (map[string][]string, error) {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	conn, err := grpc.NewClient(kubelet, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, err
	}
	defer func() { _ = conn.Close() }()
	all, err := podresources.NewPodResourcesListerClient(conn).List(ctx, &podresources.ListPodResourcesRequest{})
	if err != nil {
		return nil, fmt.Errorf("ask kubelet for the pods' devices: %w", err)
	}
	is := func(key, value string) bool { return slices.Contains(pod, [2]string{key, value}) }
	devices := map[string][]string{}
	for _, p := range all.GetPodResources() {
		if !is("K8S_POD_NAMESPACE", p.GetNamespace()) || !is("K8S_POD_NAME", p.GetName()) {
			continue
		}
		for _, c := range p.GetContainers() {
			for _, d := range c.GetDevices() {
				devices[d.GetResourceName()] = append(devices[d.GetResourceName()], d.GetDeviceIds()...)
			}
		}
	}
	return devices, nil
}
