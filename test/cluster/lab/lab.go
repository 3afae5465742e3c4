// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"syscall"

	"github.com/smcr-io/kube-smcr/internal/testenv/clustertools"
	"github.com/smcr-io/kube-smcr/test/cluster/lab/image"
)

const (
	programPackage = "github.com/smcr-io/kube-smcr/tools/cluster"
	pausePackage   = "github.com/smcr-io/kube-smcr/tools/cluster/pause"

	// configFile is the cluster's Config, in its directory. A directory without
	// it holds nothing that must be removed.
	configFile = "config.json"

	// SuperviseCommand is the command of tools/cluster that calls [Supervise].
	SuperviseCommand = "supervise"
)

// A Config says how a cluster is to be. The zero value is a cluster of two
// nodes.
type Config struct {
	// Name tells clusters apart: lower case letters, digits and dashes, at most
	// 24. The default is unique to this process.
	Name string
	// Nodes is how many nodes there are, besides the control plane; 0 is 2.
	Nodes int
	// External is how many nodes there are behind these, whose machines somebody else starts: the
	// cluster has their objects, and what such a node wants is in [Node.External].
	External int `json:",omitempty"`
	// Images are archives that package image wrote, or any that containerd
	// imports: every node has them from the start.
	Images []string
	// LogDir is where the logs go, and stay. By default they are in the
	// cluster's directory and go with it.
	LogDir string
	// Detach lets the cluster live when this process ends.
	Detach bool
	// ProxyMode is the mode of kube-proxy: iptables, the default, or nftables.
	ProxyMode string
	// CNIVersion is the version of the nodes' configuration list; 1.0.0 by default.
	CNIVersion string
	// IPv4Only leaves IPv6 out also where the machine has it.
	IPv4Only bool
	// Tools is the directory of clustertools; by default what it says.
	Tools string
	// Progress is told what happens; nil for nobody.
	Progress io.Writer `json:"-"`
}

func (c *Config) setDefaults(ctx context.Context) error {
	if c.Name == "" {
		c.Name = fmt.Sprintf("test-%d", os.Getpid())
	}
	if c.Nodes == 0 {
		c.Nodes = 2
	}
	if c.ProxyMode == "" {
		c.ProxyMode = "iptables"
	}
	if c.CNIVersion == "" {
		c.CNIVersion = "1.0.0"
	}
	if c.Progress == nil {
		c.Progress = io.Discard
	}
	if err := c.validate(); err != nil {
		return err
	}
	if c.Tools == "" {
		dir, err := clustertools.Dir(ctx, c.Progress)
		if err != nil {
			return err
		}
		c.Tools = dir
	}
	return nil
}

var namePattern = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]*[a-z0-9])?$`)

func (c *Config) validate() error {
	switch {
	case len(c.Name) > maxNameLen || !namePattern.MatchString(c.Name):
		return fmt.Errorf("cluster name %q: want up to %d lower case letters, digits and dashes", c.Name, maxNameLen)
	case c.Nodes < 1 || c.External < 0 || c.all() > maxNodes:
		return fmt.Errorf("%d nodes and %d external ones: want 1 to %d in all, the first of them no external one", c.Nodes, c.External, maxNodes)
	case !slices.Contains([]string{"iptables", "nftables"}, c.ProxyMode):
		return fmt.Errorf("mode %q of kube-proxy: want iptables or nftables", c.ProxyMode)
	}
	return nil
}

// all is how many nodes there are.
func (c *Config) all() int { return c.Nodes + c.External }

// A Cluster is a running cluster. It may be used by several goroutines.
type Cluster struct {
	Name  string
	Nodes []*Node

	dir   string
	info  info
	lease *os.File // the cluster ends when this is closed
}

// A Node is a node of a cluster.
type Node struct {
	// Name is n1, n2 and so on.
	Name string

	cluster  *Cluster
	number   int
	external bool
}

// Up starts a cluster and returns when its nodes, but for external ones, are ready and pods can
// be made. It also removes what clusters left that were killed.
func Up(ctx context.Context, cfg Config) (*Cluster, error) {
	if uid := os.Geteuid(); uid != 0 {
		return nil, fmt.Errorf("start a cluster: user id is %d; run this as root", uid)
	}
	if err := cfg.setDefaults(ctx); err != nil {
		return nil, fmt.Errorf("start a cluster: %w", err)
	}
	if err := Sweep(); err != nil { // of others: it does not hinder this one
		_, _ = fmt.Fprintf(cfg.Progress, "remove what former clusters left: %v\n", err)
	}
	dir, lock, err := claim(cfg.Name)
	if err != nil {
		return nil, fmt.Errorf("start cluster %s: %w", cfg.Name, err)
	}
	defer func() { _ = lock.Close() }()
	c := &Cluster{Name: cfg.Name, dir: dir}
	if err := c.start(ctx, cfg, lock); err != nil {
		c.Close()
		return nil, fmt.Errorf("start cluster %s: %w", cfg.Name, errors.Join(err, remove(dir)))
	}
	if err := c.load(ctx); err != nil {
		return nil, fmt.Errorf("start cluster %s: %w", cfg.Name, errors.Join(err, c.Down(context.WithoutCancel(ctx))))
	}
	return c, nil
}

// start prepares the cluster's directory and starts its supervisor.
func (c *Cluster) start(ctx context.Context, cfg Config, lock *os.File) error {
	if cfg.LogDir == "" {
		cfg.LogDir = filepath.Join(c.dir, "logs")
	}
	var err error
	if cfg.LogDir, err = filepath.Abs(cfg.LogDir); err != nil {
		return err
	}
	if err := os.MkdirAll(cfg.LogDir, 0o755); err != nil {
		return err
	}
	program := filepath.Join(c.dir, "cluster")
	if err := goBuild(ctx, program, programPackage); err != nil {
		return err
	}
	pause, err := c.pauseImage(ctx)
	if err != nil {
		return err
	}
	cfg.Images = append([]string{pause}, cfg.Images...)
	for i, name := range cfg.Images {
		if cfg.Images[i], err = filepath.Abs(name); err != nil {
			return err
		}
	}
	text, err := json.Marshal(cfg)
	if err != nil {
		return err
	}
	if err := writeFile(c.dir, configFile, text); err != nil {
		return err
	}
	return c.supervise(cfg, program, lock)
}

// supervise starts the supervisor, which holds the lock from now on.
func (c *Cluster) supervise(cfg Config, program string, lock *os.File) error {
	log, err := os.Create(filepath.Join(cfg.LogDir, "supervisor.log"))
	if err != nil {
		return err
	}
	defer func() { _ = log.Close() }()
	cmd := exec.Command(program, SuperviseCommand, c.dir)
	cmd.ExtraFiles = []*os.File{lock}
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true} // Ctrl-C is for us, who tell it
	var theirs *os.File
	if !cfg.Detach {
		if theirs, c.lease, err = os.Pipe(); err != nil {
			return err
		}
		defer func() { _ = theirs.Close() }()
		cmd.Stdin = theirs
		cmd.Args = append(cmd.Args, "--leased")
	}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start its supervisor: %w", err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	return poll(context.Background(), "its supervisor", startTimeout, func() error {
		select {
		case err := <-ended:
			return fmt.Errorf("%w: %w\n%s", errFatal, err, tail(log.Name()))
		default:
		}
		_, err := os.Stat(socketOf(c.dir))
		return err
	})
}

func goBuild(ctx context.Context, out, pkg string) error {
	cmd := exec.CommandContext(ctx, "go", "build", "-o", out, pkg)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0") // it runs where the C library may be another one
	if text, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("build %s: %w\n%s", pkg, err, text)
	}
	return nil
}

func (c *Cluster) pauseImage(ctx context.Context) (string, error) {
	program := filepath.Join(c.dir, "pause")
	if err := goBuild(ctx, program, pausePackage); err != nil {
		return "", err
	}
	name := filepath.Join(c.dir, "pause.tar")
	return name, image.Write(name, image.Image{
		Ref:        PauseImage,
		Entrypoint: []string{"/pause"},
		User:       "65534:65534",
		Files:      []image.File{{Name: "pause", Source: program}},
	})
}

// load waits until the cluster is up and fills in what is known of it.
func (c *Cluster) load(ctx context.Context) error {
	var err error
	if c.info, err = ask(ctx, c.dir, request{Op: opReady}); err != nil {
		return err
	}
	for i, n := range c.info.Nodes {
		c.Nodes = append(c.Nodes, &Node{Name: n.Name, cluster: c, number: i + 1, external: n.External})
	}
	return nil
}

// Open finds a cluster that is up.
func Open(ctx context.Context, name string) (*Cluster, error) {
	dir, err := directory(name)
	if err != nil {
		return nil, err
	}
	if _, err := os.Stat(socketOf(dir)); err != nil {
		return nil, fmt.Errorf("no cluster %q is up; start it with: make cluster-up", name)
	}
	c := &Cluster{Name: name, dir: dir}
	if err := c.load(ctx); err != nil {
		return nil, err
	}
	return c, nil
}

// Down ends the cluster and returns when nothing of it is left but LogDir.
func (c *Cluster) Down(ctx context.Context) error {
	defer c.Close()
	return Down(ctx, c.Name)
}

// Close forgets a cluster that is detached, and ends one that is not, without
// waiting for that.
func (c *Cluster) Close() {
	if c.lease != nil {
		_ = c.lease.Close()
	}
}

// Kubeconfig is the file with the administrator's rights, for programs of this
// machine.
func (c *Cluster) Kubeconfig() string { return filepath.Join(c.dir, "kubeconfig") }

// Tool is the path of a program of clustertools.
func (c *Cluster) Tool(name string) string { return filepath.Join(c.info.Tools, name) }

// Logs is the directory with the logs: a directory for each machine, with the
// logs of its services and of its pods.
func (c *Cluster) Logs() string { return c.info.Logs }

// IPv6 says whether nodes and pods have IPv6 addresses too.
func (c *Cluster) IPv6() bool { return c.info.IPv6 }

// Kubectl runs kubectl and returns what it printed.
func (c *Cluster) Kubectl(ctx context.Context, args ...string) (string, error) {
	return c.run(c.Command(ctx, "kubectl", args...))
}

// Apply gives objects, as YAML, to kubectl apply.
func (c *Cluster) Apply(ctx context.Context, objects string) error {
	cmd := c.Command(ctx, "kubectl", "apply", "--filename=-")
	cmd.Stdin = bytes.NewReader([]byte(objects))
	_, err := c.run(cmd)
	return err
}

// Delete deletes objects given as YAML, and what they own before them, and waits for that.
func (c *Cluster) Delete(ctx context.Context, objects string) error {
	cmd := c.Command(ctx, "kubectl", "delete", "--filename=-", "--cascade=foreground", "--timeout=2m")
	cmd.Stdin = bytes.NewReader([]byte(objects))
	_, err := c.run(cmd)
	return err
}

// Helm runs helm and returns what it printed.
func (c *Cluster) Helm(ctx context.Context, args ...string) (string, error) {
	return c.run(c.Command(ctx, "helm", args...))
}

// Command is a command of a program of clustertools with the administrator's
// rights: kubectl, helm.
func (c *Cluster) Command(ctx context.Context, tool string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, c.Tool(tool), args...)
	cmd.Env = append(
		os.Environ(), "KUBECONFIG="+c.Kubeconfig(), "HELM_CACHE_HOME="+filepath.Join(c.dir, "helm"),
		"HELM_CONFIG_HOME="+filepath.Join(c.dir, "helm"), "HELM_DATA_HOME="+filepath.Join(c.dir, "helm"),
	)
	return cmd
}

func (c *Cluster) run(cmd *exec.Cmd) (string, error) {
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return string(out), fmt.Errorf("%s: %w\n%s", filepath.Base(cmd.Path)+" "+fmt.Sprint(cmd.Args[1:]), err, stderr.Bytes())
	}
	return string(out), nil
}

// LoadImage loads an image into all nodes but external ones.
func (c *Cluster) LoadImage(ctx context.Context, archive string) error {
	full, err := filepath.Abs(archive)
	if err != nil {
		return err
	}
	return c.ask(ctx, request{Op: opLoad, Path: full})
}

// StopAPIServer ends the API server: connections are refused. It is killed:
// asked to end, it would wait for its watchers first.
func (c *Cluster) StopAPIServer(ctx context.Context) error { return c.apiServer(ctx, actKill) }

// StartAPIServer starts it again, and waits until it answers.
func (c *Cluster) StartAPIServer(ctx context.Context) error { return c.apiServer(ctx, actStart) }

// PauseAPIServer lets the API server hang: connections are made, and nobody
// answers.
func (c *Cluster) PauseAPIServer(ctx context.Context) error { return c.apiServer(ctx, actPause) }

// ResumeAPIServer lets it go on.
func (c *Cluster) ResumeAPIServer(ctx context.Context) error { return c.apiServer(ctx, actResume) }

func (c *Cluster) apiServer(ctx context.Context, a action) error {
	err := c.ask(ctx, request{Op: opService, Service: apiServer, Action: a})
	if err != nil || a == actKill || a == actPause {
		return err
	}
	return poll(ctx, "the API server", startTimeout, func() error {
		_, err := c.Kubectl(ctx, "get", "--raw=/readyz")
		return err
	})
}

func (c *Cluster) ask(ctx context.Context, r request) error {
	_, err := ask(ctx, c.dir, r)
	return err
}
