// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestRun(t *testing.T) {
	bad := filepath.Join(t.TempDir(), "bad.yaml")
	if err := os.WriteFile(bad, []byte("node: {nam: x}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	tests := []struct {
		name           string
		args           []string
		code           int
		stdout, stderr string
	}{
		{"help", []string{"--help"}, 0, "", "Examples:"},
		{"version", []string{"--version"}, 0, "node-agent ", ""},
		{"no config", nil, exitUsage, "", "want --config FILE"},
		{"unknown flag", []string{"--confg", "x"}, exitUsage, "", "flag provided but not defined"},
		{"argument", []string{"--config", bad, "more"}, exitUsage, "", "nothing else"},
		{"missing file", []string{"--config", "/nowhere"}, exitUsage, "", "read configuration: open /nowhere"},
		{"bad file", []string{"--config", bad, "--check"}, exitUsage, "", bad + ":1:8: node.nam: unknown field (did you mean name?)"},
		{"kubeconfig alone", []string{"--config", bad, "--kubeconfig", "x"}, exitUsage, "", "--kubeconfig needs --kubernetes"},
		{"no node name", []string{"--config", bad, "--kubernetes"}, exitUsage, "", "NODE_NAME is not in the environment"},
		{"any node alone", []string{"--config", bad, "--kubernetes", "--any-node"}, exitUsage, "", "--any-node needs --kubernetes and --check"},
		{"sample", []string{"--config", "../../config/samples/node-agent.yaml", "--check"}, 0, "good: node node-a, 2 policies", ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var stdout, stderr bytes.Buffer
			if code := run(tt.args, &stdout, &stderr); code != tt.code {
				t.Errorf("exit code %d, want %d", code, tt.code)
			}
			if !strings.Contains(stdout.String(), tt.stdout) || !strings.Contains(stderr.String(), tt.stderr) {
				t.Errorf("stdout %q, want %q in it\nstderr %q, want %q in it", stdout.String(), tt.stdout, stderr.String(), tt.stderr)
			}
		})
	}
}

func TestRun_kubernetes(t *testing.T) {
	file := filepath.Join(t.TempDir(), "node-agent.yaml")
	if err := os.WriteFile(file, []byte("node:\n  devices: [{soft: {address: node}}]\n  takeover: true\n  cni: {install: true}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	tests := []struct {
		name           string
		env            map[string]string
		code           int
		stdout, stderr string
	}{
		{"good", map[string]string{"NODE_NAME": "n1", "NODE_IP": "192.0.2.1"}, 0, "good: node n1, policies of the cluster", ""},
		{"no address", map[string]string{"NODE_NAME": "n1"}, exitUsage, "", "the node's address is not known"},
		{"junk address", map[string]string{"NODE_NAME": "n1", "NODE_IP": "node"}, exitUsage, "", "NODE_IP: ParseAddr"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			for k, v := range tt.env {
				t.Setenv(k, v)
			}
			var stdout, stderr bytes.Buffer
			if code := run([]string{"--config", file, "--kubernetes", "--check"}, &stdout, &stderr); code != tt.code {
				t.Errorf("exit code %d, want %d", code, tt.code)
			}
			if !strings.Contains(stdout.String(), tt.stdout) || !strings.Contains(stderr.String(), tt.stderr) {
				t.Errorf("stdout %q, want %q in it\nstderr %q, want %q in it", stdout.String(), tt.stdout, stderr.String(), tt.stderr)
			}
		})
	}
}

// A file for all nodes is checked without one of them.
func TestRun_anyNode(t *testing.T) {
	for _, tt := range []struct {
		name, devices  string
		code           int
		stdout, stderr string
	}{
		{"node's address", "[{soft: {address: node}}]", 0, "good: any node, policies of the cluster", ""},
		{"interface", "[{soft: {interface: roce9}}]", 0, "good: any node", ""},
		{"hardware", "[{rdma: mlx5_0}, {rdma: {name: mlx5_1, address: roce9}}, {rdma: {name: mlx5_2, address: node}}]", 0, "good: any node", ""},
		{"no name of an interface", "[{soft: {interface: 'a b'}}]", exitUsage, "", "no name of a network interface"},
		{"junk address", "[{soft: {address: auto}}]", exitUsage, "", "node.devices[0].soft.address: \"auto\""},
		{"junk address of hardware", "[{rdma: {name: mlx5_0, address: 'a b'}}]", exitUsage, "", "node.devices[0].rdma.address"},
		{"device that is there twice", "[{rdma: mlx5_0}, {rdma: {name: mlx5_0}}]", exitUsage, "", "mlx5_0 is given twice"},
		{"interface that is there twice", "[{soft: {interface: roce9}}, {soft: {interface: roce9, mtu: 1024}}]", exitUsage, "", "roce9 is given twice"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "node-agent.yaml")
			if err := os.WriteFile(file, []byte("node:\n  devices: "+tt.devices+"\n"), 0o600); err != nil {
				t.Fatal(err)
			}
			var stdout, stderr bytes.Buffer
			if code := run([]string{"--config", file, "--kubernetes", "--check", "--any-node"}, &stdout, &stderr); code != tt.code {
				t.Errorf("exit code %d, want %d", code, tt.code)
			}
			if !strings.Contains(stdout.String(), tt.stdout) || !strings.Contains(stderr.String(), tt.stderr) {
				t.Errorf("stdout %q, want %q in it\nstderr %q, want %q in it", stdout.String(), tt.stdout, stderr.String(), tt.stderr)
			}
		})
	}
}
