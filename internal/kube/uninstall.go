// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"fmt"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
)

// noteUninstall closes uninstall if the node's SMCRNode has the annotation that tells the agent to
// uninstall. But an annotation that is there when the agent starts, and was meant for the pod of
// another agent, may be left of an uninstallation that did not get to its end, however long ago.
// If agents obeyed it, no agent of a later installation would stay. So the agent takes it back.
// If somebody really uninstalls, they look each second, and annotate the SMCRNode again:
//
//	the agent runs, and the annotation appears     it leaves
//	the agent's container ends, and starts again   it leaves
//	the agent is new on the node                   it takes the annotation back, and leaves if it appears again
func (s *Source) noteUninstall(n *v1alpha1.SMCRNode, first bool) {
	if n.Name != s.cfg.Node {
		return
	}
	told := n.Annotations[v1alpha1.AnnotationUninstall] == "true"
	s.mu.Lock()
	s.outdated = told && (s.outdated || first && n.Status.AgentPod != s.cfg.Pod)
	outdated := s.outdated
	s.mu.Unlock()
	switch {
	case outdated:
		poke(s.takeBack)
	case told:
		s.leave()
	}
}

// noteGone notes that the SMCRNode is gone, and with it the annotation: the agent may make a new
// SMCRNode, which names its pod.
func (s *Source) noteGone(was any) {
	if unknown, ok := was.(cache.DeletedFinalStateUnknown); ok {
		was = unknown.Obj
	}
	if n, ok := was.(*v1alpha1.SMCRNode); ok && n.Name == s.cfg.Node {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.outdated = false
	}
}

// mayTellPod says whether the agent may write the name of its pod into the SMCRNode. It may not
// before noteUninstall has read whose pod is named there. Nor may it while the annotation of an
// earlier uninstallation is there: if the agent's container started again, it would take the
// annotation for one that is meant for its own pod.
func (s *Source) mayTellPod() bool { return s.nodes.HasSynced() && !s.isOutdated() }

// takeBackUninstall takes annotations back that are outdated, until ctx ends.
func (s *Source) takeBackUninstall(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-s.takeBack:
		}
		for s.isOutdated() {
			if err := s.removeAnnotation(ctx); err != nil {
				s.complain.say("annotation of an earlier uninstallation not taken off the SMCRNode, which is tried again: the next one would not reach the agent", err, time.Now())
			}
			select {
			case <-ctx.Done():
				return
			case <-time.After(takeBackEvery):
			}
		}
	}
}

func (s *Source) isOutdated() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.outdated
}

func (s *Source) removeAnnotation(ctx context.Context) error {
	cl, err := restClient(s.cfg.REST, v1alpha1.GroupVersion(), "/apis", v1alpha1.AddToScheme)
	if err != nil {
		return err
	}
	patch := fmt.Appendf(nil, `{"metadata":{"annotations":{%q:null}}}`, v1alpha1.AnnotationUninstall)
	err = cl.Patch(types.MergePatchType).Resource("smcrnodes").Name(s.cfg.Node).Param("fieldManager", v1alpha1.ManagerAgent).Body(patch).Do(ctx).Error()
	if err == nil {
		s.cfg.Log.Warn("an earlier uninstallation did not get to its end; its annotation is taken off the SMCRNode, and the agent stays", "annotation", v1alpha1.AnnotationUninstall)
	}
	if err == nil || apierrors.IsNotFound(err) {
		return nil
	}
	return fmt.Errorf("write SMCRNode %s: %w", s.cfg.Node, err)
}

// leave closes uninstall.
func (s *Source) leave() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.leaving {
		s.leaving = true
		close(s.uninstall)
	}
}

// Uninstall is closed when the agent is to leave the node clean.
func (s *Source) Uninstall() <-chan struct{} { return s.uninstall }
