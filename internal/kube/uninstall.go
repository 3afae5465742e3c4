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

// noteUninstall closes uninstall if the SMCRNode has the annotation and is that of the node. An
// annotation that is in the first list, and was meant for the pod of another agent, may be of an
// uninstallation that did not get to its end, however long ago. Such a one is taken back, and not
// obeyed: no agent of a later installation would stay. Whoever does uninstall looks each second,
// and annotates the SMCRNode again:
//
//	the agent runs, and the annotation appears     it leaves
//	the agent's container ends, and starts again   it leaves
//	the agent is new on the node                   it takes the annotation back, and leaves if that appears again
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

// noteGone notes that there is no SMCRNode any more, and so no annotation: a new one may name the agent's pod.
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

// mayTellPod says whether the SMCRNode may have the name of the agent's pod: not before noteUninstall has read whose pod is there, nor
// while the annotation of an earlier uninstallation is, which a container that starts again would take for its own.
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
