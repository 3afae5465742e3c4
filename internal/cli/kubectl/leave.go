// SPDX-License-Identifier: Apache-2.0

package kubectl

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
)

// Leave takes kube-smcr off a node, and waits until the node is clean. The label smcr.io/leave of the
// Node ends the node's agent. As no other agent follows, it removes everything from the node, says
// so in the SMCRNode, and ends.
func (c *Cluster) Leave(ctx context.Context, node string) error {
	if err := c.label(ctx, node, `"true"`); err != nil {
		return err
	}
	for {
		clean, err := c.clean(ctx, node)
		switch {
		case err == nil && clean:
			return nil
		case apierrors.IsForbidden(err):
			return fmt.Errorf("node %s has the label, and its agent leaves it; whether it is clean you may not see: %w", node, err)
		}
		select {
		case <-ctx.Done():
			if errors.Is(ctx.Err(), context.DeadlineExceeded) {
				if err != nil && !errors.Is(err, context.DeadlineExceeded) {
					return fmt.Errorf("node %s has the label; whether it is clean is not known: %w", node, err)
				}
				return fmt.Errorf("node %s is not clean yet: its SMCRNode does not say so, or its agent has not ended: does one run there that can leave? kubectl get pods -A -o wide -l %s", node, agentLabels)
			}
			return ctx.Err()
		case <-time.After(pollEvery):
		}
	}
}

// Return lets agents run on a node again.
func (c *Cluster) Return(ctx context.Context, node string) error { return c.label(ctx, node, "null") }

func (c *Cluster) label(ctx context.Context, node, value string) error {
	patch := fmt.Appendf(nil, `{"metadata":{"labels":{%q:%s}}}`, v1alpha1.LabelLeave, value)
	_, err := c.client.CoreV1().Nodes().Patch(ctx, node, types.MergePatchType, patch, metav1.PatchOptions{FieldManager: "kubectl-smcr"})
	if apierrors.IsNotFound(err) {
		return usage("there is no node %s; kubectl get nodes lists them", node)
	}
	if err != nil {
		return fmt.Errorf("label node %s: %w", node, err)
	}
	return nil
}

// clean says whether no agent is on a node, and its SMCRNode says that the last one left it
// clean. A node without an SMCRNode never had an agent, or one of an earlier version left it.
func (c *Cluster) clean(ctx context.Context, node string) (bool, error) {
	gv := v1alpha1.GroupVersion()
	text, err := c.client.Discovery().RESTClient().Get().AbsPath("apis", gv.Group, gv.Version, "smcrnodes", node).Do(ctx).Raw()
	switch {
	case apierrors.IsNotFound(err):
	case err != nil:
		return false, fmt.Errorf("read SMCRNode %s: %w", node, err)
	default:
		var n v1alpha1.SMCRNode
		if err := json.Unmarshal(text, &n); err != nil {
			return false, fmt.Errorf("read SMCRNode %s: %w", node, err)
		}
		if !meta.IsStatusConditionTrue(n.Status.Conditions, v1alpha1.ConditionUninstalled) {
			return false, nil
		}
	}
	agents, err := c.agents(ctx, node)
	p := agents[node]
	return err == nil && (p == nil || p.Spec.NodeName == ""), err // a pod that is not scheduled has done nothing there
}
