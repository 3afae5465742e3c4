// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/internal/testenv/apiserver"
)

var server = apiserver.Shared{Bare: true}

func TestMain(m *testing.M) { os.Exit(server.Main(m)) }

func TestUsage(t *testing.T) {
	for _, tt := range []struct {
		name   string
		args   []string
		code   int
		stdout string
		stderr string
	}{
		{name: "help", args: []string{"--help"}, stderr: "controller uninstall --namespace=kube-smcr"},
		{name: "help of a command", args: []string{"crds", "-h"}, stderr: "how long to wait"},
		{name: "version", args: []string{"--version"}, stdout: "controller "},
		{name: "no such command", args: []string{"crd"}, code: exitUsage, stderr: `"crd" is no command: want crds, uninstall or none`},
		{name: "no such flag", args: []string{"--leader"}, code: exitUsage, stderr: "not defined: -leader"},
		{name: "a flag of another command", args: []string{"crds", "--leader-elect"}, code: exitUsage, stderr: "not defined: -leader-elect"},
		{name: "a bad selector", args: []string{"--agent-selector", "a=b=c"}, code: exitUsage, stderr: `agent selector "a=b=c"`},
		{name: "an empty selector", args: []string{"--agent-selector="}, code: exitUsage, stderr: "agent selector is empty"},
		{name: "no namespace", args: []string{"--namespace="}, code: exitUsage, stderr: "give the namespace that the agents run in"},
		{name: "a bad level", args: []string{"--log-level=loud"}, code: exitUsage, stderr: "loud"},
		{name: "no cluster", args: nil, code: exitError, stderr: "outside of a pod, give --kubeconfig FILE"},
		{name: "no such file", args: []string{"crds", "--kubeconfig=/nowhere"}, code: exitError, stderr: "read /nowhere"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Setenv("KUBERNETES_SERVICE_HOST", "")
			var stdout, stderr bytes.Buffer
			if code := run(t.Context(), tt.args, &stdout, &stderr); code != tt.code {
				t.Errorf("exit code %d, want %d", code, tt.code)
			}
			if !strings.Contains(stdout.String(), tt.stdout) || !strings.Contains(stderr.String(), tt.stderr) {
				t.Errorf("stdout lacks %q or stderr %q:\n%s\n%s", tt.stdout, tt.stderr, &stdout, &stderr)
			}
		})
	}
}

// What a person does with the program: install the definitions, twice, and run it.
func TestInstallAndRun(t *testing.T) {
	kubeconfig := apiserver.Kubeconfig(t, server.Config(t))
	var out bytes.Buffer
	for range 2 { // the second time is an upgrade
		if code := run(t.Context(), []string{"crds", "--kubeconfig", kubeconfig}, io.Discard, &out); code != 0 {
			t.Fatalf("controller crds: exit code %d\n%s", code, &out)
		}
	}
	if n := strings.Count(out.String(), "CRD applied"); n != 8 {
		t.Errorf("%d definitions applied, want 4 each time:\n%s", n, &out)
	}

	metrics, health := freeAddress(t), freeAddress(t)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan int, 1)
	var log bytes.Buffer // read after done
	go func() {
		done <- run(ctx, []string{"--kubeconfig", kubeconfig, "--metrics-address", metrics, "--metrics-auth=false", "--health-address", health, "--namespace", "default"}, io.Discard, &log)
	}()
	defer func() {
		cancel()
		if code := <-done; code != 0 {
			t.Errorf("exit code %d, want 0 after it was told to end", code)
		}
		if t.Failed() {
			t.Log(log.String())
		}
	}()
	get(t, "http://"+health+"/healthz", "")
	get(t, "http://"+health+"/readyz", "")
	get(t, "http://"+metrics+"/metrics", "kube_smcr_controller_leader 1")
	get(t, "http://"+metrics+"/metrics", `kube_smcr_controller_policies{ready="False"} 0`)
	get(t, "http://"+metrics+"/metrics", `kube_smcr_controller_pods{reason="",status="Enabled"} 0`)
	get(t, "http://"+metrics+"/metrics", "workqueue_depth")
	get(t, "http://"+metrics+"/metrics", "rest_client_requests_total")
}

// get asks until it gets an answer with the text.
func get(t *testing.T, url, want string) {
	t.Helper()
	var err error
	for deadline := time.Now().Add(30 * time.Second); time.Now().Before(deadline); {
		if err = try(url, want); err == nil {
			return
		}
		time.Sleep(50 * time.Millisecond) // polls the controller
	}
	t.Errorf("%s: %v", url, err)
}

func try(url, want string) error {
	resp, err := http.Get(url)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return err
	}
	if resp.StatusCode != http.StatusOK || !strings.Contains(string(body), want) {
		return fmt.Errorf("%s without %q:\n%s", resp.Status, want, body)
	}
	return nil
}

func freeAddress(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}
