// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"

	"github.com/smcr-io/kube-smcr/test/vm/vf/report"
)

// pluginPath is where the guest has plugins, and cacheDir where libcni keeps the
// results.
var pluginPath = [...]string{"/run/bin"}

const cacheDir = "/run/libcni"

// A network is a configuration list, and the library that calls its plugins.
type network struct {
	cni  *libcni.CNIConfig
	list *libcni.NetworkConfigList
}

func (o options) network() (network, error) {
	text, err := os.ReadFile(o.conf)
	if err != nil {
		return network{}, err
	}
	list, err := libcni.ConfListFromBytes(text)
	if err != nil {
		return network{}, fmt.Errorf("read %s: %w", o.conf, err)
	}
	return network{libcni.NewCNIConfigWithCacheDir(pluginPath[:], cacheDir, nil), list}, nil
}

// A pod is what one call is for.
type pod struct {
	container, netns, ifName, name, device string
	mac                                    string // "": as the configuration says
}

func (p pod) runtime() *libcni.RuntimeConf {
	r := &libcni.RuntimeConf{
		ContainerID: p.container, NetNS: p.netns, IfName: p.ifName,
		Args: [][2]string{
			{"IgnoreUnknown", "1"},
			{"K8S_POD_NAMESPACE", "demo"},
			{"K8S_POD_NAME", p.name},
			{"K8S_POD_INFRA_CONTAINER_ID", p.container},
			{"K8S_POD_UID", p.name},
		},
	}
	r.CapabilityArgs = map[string]any{}
	if p.device != "" {
		r.CapabilityArgs["deviceID"] = p.device
	}
	if p.mac != "" {
		r.CapabilityArgs["mac"] = p.mac
	}
	return r
}

func (o options) podNamed(container string) pod {
	p := pod{container: container, netns: o.netns, ifName: o.ifName, name: o.pod, device: o.device}
	if p.netns == "" {
		p.netns = filepath.Join("/run/netns", container)
	}
	if p.name == "" {
		p.name = container
	}
	return p
}

// call is the command of that name.
func (o options) call(ctx context.Context, command string) (report.Call, error) {
	n, err := o.network()
	if err != nil {
		return report.Call{}, err
	}
	return n.call(ctx, command, o.podNamed(o.container))
}

// call makes one call. An error is one of the arguments.
func (n network) call(ctx context.Context, command string, p pod) (report.Call, error) {
	began := time.Now()
	var result types.Result
	var err error
	switch command {
	case "add":
		result, err = n.cni.AddNetworkList(ctx, n.list, p.runtime())
	case "check":
		err = n.cni.CheckNetworkList(ctx, n.list, p.runtime())
	case "del":
		err = n.cni.DelNetworkList(ctx, n.list, p.runtime())
	case "gc":
		err = n.cni.GCNetworkList(ctx, n.list, &libcni.GCArgs{ValidAttachments: []types.GCAttachment{}})
	case "status":
		err = n.cni.GetStatusNetworkList(ctx, n.list)
	default:
		return report.Call{}, fmt.Errorf("no call %q", command)
	}
	c := report.Call{Command: command, Seconds: time.Since(began).Seconds()}
	if err != nil {
		c.Error = &report.Error{Msg: err.Error()}
		if e, ok := errors.AsType[*types.Error](err); ok {
			*c.Error = report.Error{Code: e.Code, Msg: e.Msg, Details: e.Details}
		}
		return c, nil
	}
	if result != nil {
		c.Result, err = json.Marshal(result)
	}
	return c, err
}

// must is the error of a call, of the plugin too.
func must(c report.Call, err error) error {
	if err == nil && c.Error != nil {
		err = fmt.Errorf("%s: %w", c.Command, c.Error)
	}
	return err
}

// addNetNS makes the namespace of a pod.
func addNetNS(ctx context.Context, name string) error { return ip(ctx, "netns", "add", name) }

// delNetNS removes it; one that is not there is what was wanted.
func delNetNS(ctx context.Context, name string) error {
	if _, err := os.Stat(filepath.Join("/run/netns", name)); err != nil {
		return nil //nolint:nilerr // it is not there
	}
	return ip(ctx, "netns", "del", name)
}

func ip(ctx context.Context, args ...string) error {
	if text, err := exec.CommandContext(ctx, "ip", args...).CombinedOutput(); err != nil {
		return fmt.Errorf("ip %v: %w: %s", args, err, text)
	}
	return nil
}
