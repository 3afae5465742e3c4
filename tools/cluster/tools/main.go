// SPDX-License-Identifier: Apache-2.0

// The kube command is the programs of a Kubernetes cluster in one: etcd, the
// control plane, kubelet, kube-proxy and kubectl share most of their packages,
// so that one binary is built three times as fast as seven, and is a third of
// their size.
//
// It is each of them by the name it is called by, a symlink, or by its first
// argument:
//
//	ln -s kube kubectl && ./kubectl get nodes
//	./kube kubelet --version
//
// The versions are pinned in go.mod. This module is built by
// `go run ./tools/cluster tools`, together with helm and kwok, which are its
// tools. It is no part of what users install.
package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"github.com/spf13/cobra"
	"go.etcd.io/etcd/server/v3/etcdmain"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/logs/json/register"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	"k8s.io/kubectl/pkg/cmd"
	"k8s.io/kubectl/pkg/cmd/util"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllers "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	proxy "k8s.io/kubernetes/cmd/kube-proxy/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

func main() {
	os.Args[0] = filepath.Base(os.Args[0])
	if os.Args[0] == "kube" && len(os.Args) > 1 {
		os.Args = slices.Delete(os.Args, 0, 1)
	}
	var command *cobra.Command
	switch os.Args[0] {
	case "etcd":
		etcdmain.Main(os.Args)
		return
	case "kubectl":
		util.CheckErr(cli.RunNoErrOutput(cmd.NewDefaultKubectlCommand()))
		return
	case "kube-apiserver":
		command = apiserver.NewAPIServerCommand()
	case "kube-controller-manager":
		command = controllers.NewControllerManagerCommand()
	case "kube-scheduler":
		command = scheduler.NewSchedulerCommand()
	case "kubelet":
		command = kubelet.NewKubeletCommand(context.Background())
	case "kube-proxy":
		command = proxy.NewProxyCommand()
	default:
		fmt.Fprintln(os.Stderr, "usage: kube etcd|kube-apiserver|kube-controller-manager|kube-scheduler|kubelet|kube-proxy|kubectl ARGS...")
		os.Exit(2)
	}
	os.Exit(cli.Run(command))
}
