// SPDX-License-Identifier: Apache-2.0

package clustertools

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"syscall"
)

const (
	// kubernetes is the version that kubectl and kubelet report. It is that of
	// tools/cluster/tools/go.mod; a test compares them.
	kubernetes = "1.36.3"

	toolsModule   = "tools/cluster/tools"
	runtimeModule = "tools/cluster/tools/runtime"

	// runc is the one tool that is not built here: it starts in C, so that its
	// build needs a C compiler and libseccomp. Any version since 1.1 will do.
	runc = "runc"
)

// A step is one call of go build.
type step struct {
	what     string
	module   string   // directory of the module that pins the versions
	to       string   // file, or directory if it ends in a slash
	packages []string // what to build
	vars     []string // link-time variables, as for -X
}

func steps() []step {
	const (
		version    = "k8s.io/component-base/version."
		chartutil  = "helm.sh/helm/v3/pkg/chartutil."
		containerd = "github.com/containerd/containerd/v2/cmd/"
		plugins    = "github.com/containernetworking/plugins/plugins/"
	)
	return []step{
		{
			what: "containerd", module: runtimeModule, to: "./",
			packages: []string{containerd + "containerd", containerd + "ctr", containerd + "containerd-shim-runc-v2"},
		},
		{
			what: "CNI plugins", module: runtimeModule, to: "cni/",
			packages: []string{plugins + "main/bridge", plugins + "main/loopback", plugins + "ipam/host-local", plugins + "meta/portmap"},
		},
		{
			what: "Kubernetes " + kubernetes + " and etcd", module: toolsModule, to: "kube",
			packages: []string{"."},
			vars:     []string{version + "gitVersion=v" + kubernetes, version + "gitMajor=1", version + "gitMinor=36"},
		},
		{
			what: "helm", module: toolsModule, to: "helm",
			packages: []string{"helm.sh/helm/v3/cmd/helm"},
			// What `helm template` and `helm lint` take the cluster to be.
			vars: []string{chartutil + "k8sVersionMajor=1", chartutil + "k8sVersionMinor=36"},
		},
		{
			what: "kwok", module: toolsModule, to: "kwok",
			packages: []string{"sigs.k8s.io/kwok/cmd/kwok"},
		},
	}
}

// kubeNames are the programs that the kube binary is.
func kubeNames() []string {
	return []string{
		"etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler",
		"kubelet", "kube-proxy", "kubectl",
	}
}

// programs are the files of a complete directory, but for runc.
func programs() []string {
	return append(
		kubeNames(), "kube", "helm", "kwok", "containerd", "ctr", "containerd-shim-runc-v2",
		"cni/bridge", "cni/loopback", "cni/host-local", "cni/portmap",
	)
}

// args are the arguments of go for a step that builds into dir.
func (s step) args(dir string) []string {
	link := "-s -w"
	for _, v := range s.vars {
		link += " -X " + v
	}
	to := filepath.Join(dir, s.to)
	if s.to[len(s.to)-1] == '/' {
		to += "/"
	}
	args := []string{"build", "-trimpath", "-buildvcs=false", "-mod=readonly", "-ldflags", link, "-o", to}
	return append(args, s.packages...)
}

func (s step) run(ctx context.Context, root, dir string) error {
	if s.to[len(s.to)-1] == '/' {
		if err := os.MkdirAll(filepath.Join(dir, s.to), 0o755); err != nil {
			return fmt.Errorf("build %s: %w", s.what, err)
		}
	}
	cmd := exec.CommandContext(ctx, "go", s.args(dir)...)
	cmd.Dir = filepath.Join(root, s.module)
	// The flags of whoever called us, -race or -tags say, are not meant for these.
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS=", "GOWORK=off", "GOOS=", "GOARCH=")
	// A killed test must not leave a compiler behind that keeps two cores busy.
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGTERM}
	var output bytes.Buffer
	cmd.Stdout, cmd.Stderr = &output, &output
	// Pdeathsig looks at the thread, not at the process.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("build %s in %s: %w\n%s", s.what, cmd.Dir, err, output.Bytes())
	}
	return nil
}

// hash names what the steps build: the same sources, pinned modules, compiler
// and flags give the same name.
func hash(root string) (string, error) {
	h := sha256.New()
	write := func(name string, b []byte) { h.Write(fmt.Appendf(nil, "%s %d\n%s\n", name, len(b), b)) }
	for _, name := range []string{"go.mod", "go.sum", "main.go", "runtime/go.mod", "runtime/go.sum"} {
		b, err := os.ReadFile(filepath.Join(root, toolsModule, filepath.FromSlash(name)))
		if err != nil {
			return "", fmt.Errorf("hash the sources of the cluster's tools: %w", err)
		}
		write(name, b)
	}
	write("go", []byte(runtime.Version()+" "+runtime.GOARCH))
	for _, s := range steps() {
		write(s.what, fmt.Appendf(nil, "%q", s.args("")))
	}
	return hex.EncodeToString(h.Sum(nil))[:16], nil
}
