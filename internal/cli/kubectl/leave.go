// SPDX-License-Identifier: Apache-2.0

package kubectl

import (
	"context"
	"errors"
	"fmt"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
)

// Leave takes kube-smcr off a node, and waits until the node is clean: the label
// smcr.io/leave of the Node ends its agent, and an agent that no other one follows removes
// everything from the node, its SMCRNode last.
func (c *Cluster) Leave(ctx context.Context, node string) error {
	if err := c.label(ctx, node, `"true"`); err != nil {
		return err
	}
	for {
		had, err := c.hasSMCRNode(ctx, node)
		if err == nil && !had {
			return nil
		}
		select {
		case <-ctx.Done():
			if errors.Is(ctx.Err(), context.DeadlineExceeded) {
				return fmt.Errorf("node %s is not clean yet: its SMCRNode is still there: does an agent run there that can leave? kubectl get pods -A -o wide -l %s", node, agentLabels)
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

// hasSMCRNode says whether a node has its SMCRNode.
func (c *Cluster) hasSMCRNode(ctx context.Context, node string) (bool, error) {
	gv := v1alpha1.GroupVersion()
	err := c.client.Discovery().RESTClient().Get().AbsPath("apis", gv.Group, gv.Version, "smcrnodes", node).Do(ctx).Error()
	if apierrors.IsNotFound(err) {
		return false, nil
	}
	return err == nil, err
}
