// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/smcr-io/kube-smcr/internal/cli/kubectl"
	"github.com/smcr-io/kube-smcr/internal/cli/kubectl/kubectltest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// server is a cluster of one node with an agent and two pods, one of which has no address yet, and of two pods of another node
// without an agent.
func server() *kubectltest.Server {
	agent := `{"metadata":{"namespace":"kube-smcr","name":"agent-a","labels":{"app.kubernetes.io/part-of":"kube-smcr","app.kubernetes.io/component":"agent"}},
		"spec":{"nodeName":"node-a","hostNetwork":true},"status":{"phase":"Running"}}`
	web := `{"metadata":{"namespace":"shop","name":"web-0","annotations":{"smcr.io/enabled":"true"}},"spec":{"nodeName":"node-a"},
		"status":{"phase":"Running","podIP":"10.1.0.5"}}`
	far := `{"metadata":{"namespace":"shop","name":"far","annotations":{"smcr.io/enabled":"true"}},"spec":{"nodeName":"node-b"},
		"status":{"phase":"Running","podIP":"10.2.0.5"}}`
	answers := map[string]string{
		"status": `{"node":"node-a","version":"v1","accelerating":true}`,
		"links": `{"linkGroups":[{"id":1,"pod":"shop/web-0","state":"ACTIVE"},{"id":2,"pod":"shop/other","state":"ACTIVE"},
			{"id":3,"pod":"shop/*","state":"ACTIVE"},{"id":4,"pod":"bank/*","state":"ACTIVE"},{"id":5,"pod":"","datapath":"Kernel","state":"ACTIVE"}]}`,
		"conns": `{"conns":[{"id":1,"pod":"shop/web-0","mode":"SMC-R"},{"id":2,"pod":"shop/other","mode":"TCP"},{"id":3,"pod":"shop/old","mode":"TCP"}]}`,
		"attachments": `{"attachments":[{"pod":"shop/web-0","state":"ready","netns":"/run/netns/a"},{"pod":"shop/other","state":"failed"}],
			"bypasses":[{"pod":"shop/web-0","destination":"192.0.2.7:80"},{"pod":"shop/other","destination":"192.0.2.8:80"}]}`,
		"preflight": `{"worst":"FAIL","checks":[{"name":"kernel","result":"FAIL","detail":"old","reason":"KernelTooOld","means":"no SMC-R","advice":"update"}]}`,
	}
	return &kubectltest.Server{
		Objects: map[string]string{
			"/api/v1/namespaces/kube-smcr/pods/agent-a": agent, "/api/v1/namespaces/shop/pods/web-0": web,
			"/api/v1/namespaces/shop/pods/old":        strings.Replace(web, "web-0", "old", 1),
			"/api/v1/namespaces/shop/pods/pulls":      strings.NewReplacer("web-0", "pulls", "Running", "Pending", "10.1.0.5", "").Replace(web),
			"/api/v1/namespaces/shop/pods/far":        far,
			"/api/v1/namespaces/shop/pods/far-kernel": strings.NewReplacer(`"far"`, `"far-kernel"`, `"true"`, `"true","smcr.io/status":"Enabled: KERNEL, no agent"`).Replace(far),
		},
		Exec: func(_ string, command []string) (string, string, int) {
			switch {
			case command[0] != "/usr/bin/smcrctl":
				return "", "no such program", 127
			case command[1] == "conns" && slices.Contains(command, "--pod"):
				if slices.Contains(command, "shop/old") {
					return "", "smcrctl: unknown flag: --pod\n", 2
				}
				return `{"conns":[{"id":9,"pod":"shop/web-0","mode":"SMC-R"}]}`, "", 0 // beyond what is shown of all
			case command[1] == "preflight":
				return answers["preflight"], "", 4
			case command[1] == "explain" && strings.Contains(command[3], ":80"):
				return `{"verdict":"no policy selects it","code":"NO_POLICY"}`, "", 4
			case command[1] == "explain" && strings.Contains(command[3], ":99"):
				return "", "smcrctl: odd thing\n", 1
			case command[1] == "explain":
				return `{"verdict":"carried by SMC-R"}`, "", 0
			}
			return answers[command[1]], "", 0
		},
	}
}

func TestCommands(t *testing.T) {
	for _, tt := range []struct {
		name      string
		args      string
		code      int
		out, err  string
		not       string // must not be printed
		isJSON    bool
		forbidden string
	}{
		{name: "status", args: "status", out: "carrying connections over SMC-R"},
		{name: "status as JSON", args: "status -o json", out: `"node": "node-a"`, isJSON: true},
		{name: "links", args: "links", out: "shop/other"},
		{name: "links of a pod", args: "links --pod web-0", out: "shop/web-0", not: "shop/other"},
		{name: "links that a pod shares with its namespace", args: "links --pod web-0", out: "shop/*", not: "bank/*"},
		{name: "links of a pod's node's kernel", args: "links --pod web-0 -o json", out: `"datapath": "Kernel"`, isJSON: true},
		{name: "conns of a pod", args: "conns --pod shop/web-0 -o json", out: `"id": 9`, not: "shop/other", isJSON: true},
		{name: "conns of a pod, of an old agent", args: "conns --pod old -o json", out: `"id": 3`, not: "shop/other", isJSON: true},
		{name: "conns of a node", args: "conns --node node-a", out: "shop/other"},
		{name: "attachments", args: "attachments", out: "shop/other"},
		{name: "attachments of a pod", args: "attachments --pod web-0", out: "shop/web-0", not: "shop/other"},
		{name: "preflight", args: "preflight", code: exitNot, out: "-> update"},
		{name: "preflight as JSON", args: "preflight -o json", code: exitNot, out: `"reason": "KernelTooOld"`, isJSON: true},
		{name: "on SMC-R", args: "explain web-0 203.0.113.9:443", out: "carried by SMC-R"},
		{name: "not on SMC-R", args: "explain web-0 203.0.113.9:80", code: exitNot, out: "NO_POLICY"},
		{name: "explain as JSON", args: "explain web-0 203.0.113.9:443 -o json", out: `"verdict": "carried by SMC-R"`, isJSON: true},
		{name: "an agent that fails", args: "explain web-0 203.0.113.9:99", code: exitError, out: "not known", err: "ends with code 1: odd thing"},
		{name: "no right to exec", args: "explain web-0 203.0.113.9:443", forbidden: "/exec", code: exitError, out: "not known", err: "agent-a/exec is forbidden"},
		{name: "not known, as JSON", args: "explain web-0 203.0.113.9:99 -o json", code: exitError, out: `"code": "UNKNOWN"`, err: "odd thing", isJSON: true},
		{name: "a pod without address", args: "explain pulls 203.0.113.9:443", code: exitError, out: "not known", err: "kubectl smcr: the pod is Pending"},
		{name: "no agent on the pod's node", args: "explain far 203.0.113.9:443", code: exitNot, out: "NO_AGENT"},
		{name: "no agent, of a pod whose kernel carries on", args: "explain far-kernel 203.0.113.9:443", code: exitNoAgent, out: "not known", err: "no kube-smcr agent runs there"},
		{name: "no agent", args: "status --node node-b", code: exitNoAgent, err: "node node-b: no kube-smcr agent runs there"},
		{name: "leave a node that is none", args: "leave node-z", code: exitUsage, err: "there is no node node-z"},
		{name: "leave no node", args: "leave", code: exitUsage, err: "accepts 1 arg(s)"},
		{name: "no such pod", args: "links --pod nobody", code: exitUsage, err: "there is no pod nobody in namespace shop"},
		{name: "node and pod", args: "links --pod web-0 --node node-a", code: exitUsage, err: "node pod"},
		{name: "unknown command", args: "jump", code: exitUsage, err: `unknown command "jump"`},
		{name: "unknown flag", args: "status --jump", code: exitUsage, err: "--jump"},
		{name: "unknown output", args: "status -o yaml", code: exitUsage, err: `output "yaml": want table or json`},
		{name: "too few arguments", args: "explain web-0", code: exitUsage, err: "accepts 2 arg(s)"},
		{name: "no right to list pods", args: "status", forbidden: "/api/v1/pods", code: exitError, err: "look for the agents' pods"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := server()
			if tt.forbidden != "" {
				s.Forbidden = []string{tt.forbidden}
			}
			config := s.Start(t)
			var out, errOut bytes.Buffer
			code := run(t.Context(), strings.Fields(tt.args), &out, &errOut, func(*options) (*kubectl.Cluster, error) {
				return kubectl.NewCluster(config, "shop")
			})
			if code != tt.code || !strings.Contains(out.String(), tt.out) || !strings.Contains(errOut.String(), tt.err) {
				t.Errorf("code %d, want %d\n%s\n%s", code, tt.code, out.String(), errOut.String())
			}
			if tt.not != "" && strings.Contains(out.String(), tt.not) {
				t.Errorf("printed %q:\n%s", tt.not, out.String())
			}
			if tt.isJSON && !json.Valid(out.Bytes()) {
				t.Errorf("not JSON: %s", out.String())
			}
		})
	}
}

// TestConnect finds the cluster and the namespace as kubectl does.
func TestConnect(t *testing.T) {
	config := server().Start(t)
	path := filepath.Join(t.TempDir(), "config")
	text := `{"apiVersion":"v1","kind":"Config","current-context":"c","contexts":[{"name":"c","context":{"cluster":"k","namespace":"shop"}}],
		"clusters":[{"name":"k","cluster":{"server":"` + config.Host + `"}}]}`
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name, args string
		code       int
		err        string
	}{
		{"namespace of the context", "links --pod web-0 --kubeconfig " + path, exitOK, ""},
		{"namespace by flag", "links --pod web-0 -n dull --kubeconfig " + path, exitUsage, "namespace dull"},
		{"no such context", "status --context x --kubeconfig " + path, exitError, "specified context: x"},
		{"no such file", "status --kubeconfig /none/at/all", exitError, "/none/at/all"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var out, errOut bytes.Buffer
			code := run(t.Context(), strings.Fields(tt.args), &out, &errOut, connect)
			if code != tt.code || !strings.Contains(errOut.String(), tt.err) {
				t.Errorf("code %d, want %d\n%s", code, tt.code, errOut.String())
			}
		})
	}
}

// TestUnprintable: what an agent's pod says does nothing to the terminal, and makes no line of its own.
func TestUnprintable(t *testing.T) {
	const bad = "\x1b[2J\nnode n2\n"
	s := server()
	s.Exec = func(_ string, command []string) (string, string, int) {
		if command[1] == "preflight" {
			return `{"worst":"FAIL","checks":[{"name":"kernel","result":"FAIL","means":"\u001b[2J\nnode n2","advice":"\u001b[2J\nnode n2"}]}`, "", 4
		}
		return "", bad, 1
	}
	for _, tt := range []struct{ args, want string }{
		{"status", "ends with code 1: ?[2J; node n2\n"},
		{"preflight", "-> ?[2J; node n2\n"},
	} {
		var out, errOut bytes.Buffer
		run(t.Context(), strings.Fields(tt.args), &out, &errOut, func(*options) (*kubectl.Cluster, error) { return kubectl.NewCluster(s.Start(t), "default") })
		text := out.String() + errOut.String()
		if !strings.Contains(text, tt.want) || strings.ContainsRune(text, '\x1b') || strings.Contains(text, "\nnode n2") {
			t.Errorf("%s prints %q, want %q", tt.args, text, tt.want)
		}
	}
}

// TestDocumentedCommands: what documents and messages tell people to run, this program has.
func TestDocumentedCommands(t *testing.T) {
	root, known := newRoot(&options{}), map[string]bool{}
	for _, c := range root.Commands() {
		known[c.Name()] = true
	}
	named := regexp.MustCompile(`kubectl smcr ([a-z]+)`)
	found := 0
	for _, dir := range []string{"../../README.md", "../../docs", "../../charts", "../../internal", "../../api", "../../cmd"} {
		err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() || strings.HasSuffix(path, "_test.go") {
				return err
			}
			text, err := os.ReadFile(path)
			for _, m := range named.FindAllStringSubmatch(string(text), -1) {
				if found++; !known[m[1]] && !slices.Contains([]string{"asks", "look", "print"}, m[1]) {
					t.Errorf("%s names %q, which is no command", path, m[0])
				}
			}
			return err
		})
		if err != nil {
			t.Error(err)
		}
	}
	if found < 20 {
		t.Errorf("only %d commands are named", found)
	}
}
