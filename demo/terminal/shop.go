// SPDX-License-Identifier: Apache-2.0

package terminal

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"github.com/smcr-io/kube-smcr/test/cluster/lab"
	"github.com/smcr-io/kube-smcr/test/cluster/product"
)

// Shop is the namespace of the applications.
const Shop = "shop"

// OptIn shows how Shop is made and opts in, and waits until pods can be made in it.
func (t *Terminal) OptIn(ctx context.Context) error {
	err := t.Apply(ctx, `apiVersion: v1
kind: Namespace
metadata:
  name: shop
  annotations:
    smcr.io/enabled: "true"
`)
	if err != nil {
		return err
	}
	return product.Eventually(ctx, "the namespace", t.Patience, func() error {
		_, err := t.P.Lab.Kubectl(ctx, "get", "serviceaccount", "-n", Shop, "default")
		return err
	})
}

// Enabled waits until the pods of Shop, so many, run and their agents say that they are enabled, and
// shows them.
func (t *Terminal) Enabled(ctx context.Context, pods int) error {
	if _, err := t.P.Lab.Kubectl(ctx, "wait", "pods", "-n", Shop, "--all", "--for=condition=Ready", "--timeout="+t.Patience.String()); err != nil {
		return err
	}
	t.Eventually(ctx, "the agents say that all pods are enabled", func() (string, error) {
		out, err := t.P.Lab.Kubectl(ctx, "get", "pods", "-n", Shop, "-o", `jsonpath={range .items[*]}{.metadata.annotations.smcr\.io/status}{"\n"}{end}`)
		if err == nil && strings.Count(out, "Enabled\n") != pods {
			err = errors.New(out)
		}
		return "", err
	})
	_, err := t.Kubectl(ctx, "get", "pods", "-n", Shop, "-o",
		`custom-columns=NAME:.metadata.name,NODE:.spec.nodeName,IP:.status.podIP,STATUS:.status.phase,SMC-R:.metadata.annotations.smcr\.io/status`)
	return err
}

// Pod is an ordinary pod of Shop, without any right. Without a command it runs the image's.
func Pod(name string, n *lab.Node, img string, command ...string) string {
	run := ""
	if len(command) > 0 {
		text, _ := json.Marshal(command) // of strings: never an error
		run = "\n    command: " + string(text)
	}
	return fmt.Sprintf(`apiVersion: v1
kind: Pod
metadata:
  name: %s
  namespace: %s
  labels: {app: %s}
spec:
  nodeName: %s
  dnsPolicy: Default
  terminationGracePeriodSeconds: 1
  automountServiceAccountToken: false
  containers:
  - name: app
    image: %s
    imagePullPolicy: Never%s
    securityContext:
      runAsNonRoot: true
      allowPrivilegeEscalation: false
      capabilities: {drop: [ALL]}
`, name, Shop, name, n.Name, img, run)
}

// Address returns the address of a pod of Shop.
func (t *Terminal) Address(ctx context.Context, pod string) (string, error) {
	return t.P.Lab.Kubectl(ctx, "get", "pod", "-n", Shop, pod, "-o", "jsonpath={.status.podIP}")
}

// Exec runs a command in a pod of Shop.
func (t *Terminal) Exec(ctx context.Context, pod string, args ...string) (string, error) {
	return t.P.Lab.Kubectl(ctx, append([]string{"exec", "-n", Shop, pod, "--"}, args...)...)
}

// Load is what the pod "load" of Shop, which runs the command traffic, has seen so far.
type Load struct {
	OK          int            `json:"ok"`
	Failed      int            `json:"failed"`
	Errors      map[string]int `json:"errors"`
	WorstMillis int            `json:"worstMillis"`
	Ended       bool           `json:"ended"` // the connection of traffic hold
}

// Load reads the last line of its log.
func (t *Terminal) Load(ctx context.Context) (Load, error) {
	var l Load
	out, err := t.P.Lab.Kubectl(ctx, "logs", "-n", Shop, "load", "--tail=1")
	if err == nil {
		err = json.Unmarshal([]byte(out), &l)
	}
	return l, err
}

// Hold makes the pod "load", on a node: it holds a connection to the pod "echo", on which bytes go there and back and are
// checked.
func (t *Terminal) Hold(ctx context.Context, n *lab.Node) error {
	echo, err := t.Address(ctx, "echo")
	if err != nil {
		return err
	}
	return t.P.Lab.Apply(ctx, Pod("load", n, product.Traffic, "/usr/bin/traffic", "hold", echo+":7000", "--interval=100ms", "--bytes=16384"))
}

// LoadGrows waits until the load has done more than before, none of it wrong, and notes it as a check.
func (t *Terminal) LoadGrows(ctx context.Context, what string, before *Load) {
	t.Eventually(ctx, what, func() (string, error) {
		now, err := t.Load(ctx)
		switch {
		case err != nil:
			return "", err
		case now.Failed > 0:
			return "", fmt.Errorf("%v", now.Errors)
		case now.OK < before.OK+20:
			return "", fmt.Errorf("only %d exchanges so far", now.OK)
		}
		done := now.OK - before.OK
		*before = now
		return fmt.Sprintf("%d exchanges with checked bytes; the slowest so far took %d ms", done, now.WorstMillis), nil
	})
}
