// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/smcr-io/kube-smcr/test/cluster/lab/machine"
)

const controlPlane = "control-plane"

// poll looks at a condition until it holds, ctx ends or timeout passes. The
// condition returns nil when it holds, and an error that wraps errFatal when
// it never will.
func poll(ctx context.Context, what string, timeout time.Duration, condition func() error) error {
	deadline := time.Now().Add(timeout)
	for {
		err := condition()
		if err == nil {
			return nil
		}
		if errors.Is(err, errFatal) || time.Now().After(deadline) {
			return fmt.Errorf("wait for %s: %w", what, err)
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait for %s: %w (so far: %w)", what, context.Cause(ctx), err)
		case <-time.After(pollInterval):
		}
	}
}

var errFatal = errors.New("it will not come")

// alive returns an error that wraps errFatal when a service has ended.
func alive(m *machine.Machine, service string) error {
	err := m.ServiceEnded(service)
	if err == nil {
		return nil
	}
	return fmt.Errorf("%w: %w\n%s", errFatal, err, tail(filepath.Join(m.Spec.Logs, service+".log")))
}

// tail returns the end of a log.
func tail(name string) string {
	text, err := os.ReadFile(name)
	if err != nil {
		return err.Error()
	}
	if len(text) > maxLogTail {
		text = text[len(text)-maxLogTail:]
	}
	return string(text)
}

// startControlPlane starts the programs of the control plane and makes the
// Node objects; then it closes registered.
func (s *supervisor) startControlPlane(ctx context.Context, registered chan<- struct{}) error {
	all := controlPlaneServices(s.set)
	for _, service := range all[:2] {
		if err := s.control.StartService(service); err != nil {
			return err
		}
	}
	err := poll(ctx, "the API server", startTimeout, func() error {
		for _, service := range all[:2] {
			if err := alive(s.control, service.Name); err != nil {
				return err
			}
		}
		return s.admin.get(ctx, "/readyz", nil)
	})
	if err != nil {
		return err
	}
	s.say("the API server answers")
	for _, n := range s.nodes {
		if err := s.registerNode(ctx, n); err != nil {
			return err
		}
	}
	close(registered)
	for _, service := range all[2:] {
		if err := s.control.StartService(service); err != nil {
			return err
		}
	}
	// Pods are refused before these exist.
	return poll(ctx, "the default service account", startTimeout, func() error {
		for _, name := range []string{"serviceaccounts/default", "configmaps/kube-root-ca.crt"} {
			if err := s.admin.get(ctx, "/api/v1/namespaces/default/"+name, nil); err != nil {
				return errors.Join(err, alive(s.control, controllerManager))
			}
		}
		return nil
	})
}

// registerNode makes a node's object before its kubelet does, which waits for
// that, so that its pods' addresses are those of its number.
func (s *supervisor) registerNode(ctx context.Context, n *node) error {
	cidrs := []string{pods4(n.number).String()}
	if s.set.ipv6 {
		cidrs = append(cidrs, pods6(n.number).String())
	}
	err := s.admin.post(ctx, "/api/v1/nodes", map[string]any{
		"apiVersion": "v1",
		"kind":       "Node",
		"metadata":   map[string]any{"name": n.name, "labels": map[string]string{"kubernetes.io/hostname": n.name}},
		"spec":       map[string]any{"podCIDR": cidrs[0], "podCIDRs": cidrs},
	})
	if err != nil {
		return fmt.Errorf("make the object of node %s: %w", n.name, err)
	}
	return nil
}

// startNode starts a node and waits until Kubernetes says that it is ready.
// registered is closed when its object is there; it is nil after a first boot.
func (s *supervisor) startNode(ctx context.Context, n *node, registered <-chan struct{}) error {
	began := time.Now()
	if err := s.bootNode(ctx, n, registered); err != nil {
		return fmt.Errorf("start node %s: %w", n.name, err)
	}
	err := poll(ctx, "node "+n.name, startTimeout, func() error {
		n.mu.Lock()
		m := n.machine
		n.mu.Unlock()
		if m == nil {
			return fmt.Errorf("%w: the node was powered off", errFatal)
		}
		for _, service := range []string{containerd, kubelet, kubeProxy} {
			if err := alive(m, service); err != nil {
				return err
			}
		}
		return s.nodeReady(ctx, n.name, began)
	})
	if err != nil {
		return err
	}
	s.say("node %s is ready", n.name)
	return nil
}

func (s *supervisor) bootNode(ctx context.Context, n *node, registered <-chan struct{}) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.machine != nil {
		return errors.New("it is on already")
	}
	m, err := s.start(n.name)
	if err != nil {
		return err
	}
	n.machine = m
	if err := wireNode(s.control, m, n.number, s.cfg.all(), s.set.ipv6); err != nil {
		return err
	}
	services := nodeServices(n.name, n.number, s.set.ipv6)
	if err := m.StartService(services[0]); err != nil {
		return err
	}
	if err := awaitContainerd(ctx, m); err != nil {
		return err
	}
	s.say("containerd on %s answers", n.name)
	if registered != nil {
		for _, image := range s.cfg.Images { // afterwards they are on its disk
			if err := s.loadInto(m, image); err != nil {
				return err
			}
		}
		s.say("the images are on %s", n.name)
		select {
		case <-registered:
		case <-ctx.Done():
			return fmt.Errorf("wait for its object: %w", context.Cause(ctx))
		}
	}
	for _, service := range services[1:] {
		if err := m.StartService(service); err != nil {
			return err
		}
	}
	return nil
}

// awaitContainerd waits until containerd answers. A kubelet that is started before that
// ends, and here is nothing that starts it again.
func awaitContainerd(ctx context.Context, m *machine.Machine) error {
	return poll(ctx, "containerd", startTimeout, func() error {
		if err := alive(m, containerd); err != nil {
			return err
		}
		conn, err := net.Dial("unix", m.Path(containerdSocket))
		if err != nil {
			return err
		}
		return conn.Close()
	})
}

func (s *supervisor) load(n *node, image string) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.machine == nil {
		return fmt.Errorf("load %s: node %s is off", image, n.name)
	}
	return s.loadInto(n.machine, image)
}

func (s *supervisor) loadInto(m *machine.Machine, image string) error {
	f, err := os.Open(image)
	if err != nil {
		return fmt.Errorf("load an image: %w", err)
	}
	defer func() { _ = f.Close() }()
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	cmd := m.Command(ctx, toolsDir+"/ctr", "--namespace=k8s.io", "images", "import", "--snapshotter="+s.set.snapshotter, "-")
	cmd.Stdin = f
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("load image %s into %s: %w\n%s", image, m.Spec.Name, err, out)
	}
	return nil
}

// nodeReady returns nil if the node has said that it is ready since a time.
func (s *supervisor) nodeReady(ctx context.Context, name string, since time.Time) error {
	var object struct {
		Status struct {
			Conditions []struct {
				Type, Status, Message string
				LastHeartbeatTime     time.Time
			}
		}
	}
	if err := s.admin.get(ctx, "/api/v1/nodes/"+name, &object); err != nil {
		return err
	}
	for _, c := range object.Status.Conditions {
		if c.Type != "Ready" {
			continue
		}
		switch {
		case c.Status != "True":
			return fmt.Errorf("it is not ready: %s", strings.TrimSpace(c.Message))
		case c.LastHeartbeatTime.Before(since.Truncate(time.Second)):
			return fmt.Errorf("it has not spoken since %s", c.LastHeartbeatTime)
		}
		return nil
	}
	return errors.New("its kubelet has said nothing yet")
}

// dial connects to the API server, for the supervisor itself.
func (s *supervisor) dial(context.Context, string, string) (net.Conn, error) {
	return dialIn(s.control, netip.MustParseAddrPort("127.0.0.1:"+apiServerPort))
}
