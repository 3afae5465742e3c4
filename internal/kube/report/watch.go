// SPDX-License-Identifier: Apache-2.0

package report

import (
	"context"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
)

// sight is an object as the API server has it, or that it no longer has it.
type sight struct {
	key     key
	target  target
	version string // the resource version
	agent   string // of an SMCRLink: the agent that has the link group
	uid     types.UID
}

// watch tells what becomes of the node's objects until ctx ends. see is called
// by two goroutines.
func (c *client) watch(ctx context.Context, node, label string, see func(sight)) {
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() {
		watchOne(ctx, c.smcr, resourceSMCRNodes, &v1alpha1.SMCRNode{}, func(o *metav1.ListOptions) {
			o.FieldSelector = "metadata.name=" + node
		}, see)
	})
	wg.Go(func() {
		watchOne(ctx, c.smcr, resourceSMCRLinks, &v1alpha1.SMCRLink{}, func(o *metav1.ListOptions) {
			o.LabelSelector = v1alpha1.LabelNode + "=" + label
		}, see)
	})
}

func watchOne(ctx context.Context, c rest.Interface, resource string, of runtime.Object, narrow func(*metav1.ListOptions), see func(sight)) {
	// The informer keeps the objects only to tell what was deleted while it was
	// not connected: their metadata are enough.
	seen := func(obj any) {
		if s, ok := sightOf(obj); ok {
			see(s)
		}
	}
	_, informer := cache.NewInformerWithOptions(cache.InformerOptions{
		ListerWatcher: cache.NewFilteredListWatchFromClient(c, resource, metav1.NamespaceAll, narrow),
		ObjectType:    of,
		Transform:     trim,
		Handler: cache.ResourceEventHandlerFuncs{
			AddFunc:    seen,
			UpdateFunc: func(_, obj any) { seen(obj) },
			DeleteFunc: func(obj any) {
				if gone, ok := obj.(cache.DeletedFinalStateUnknown); ok {
					obj = gone.Obj
				}
				if s, ok := sightOf(obj); ok {
					s.target = target{}
					see(s)
				}
			},
		},
	})
	informer.RunWithContext(ctx)
}

// trim drops what is never looked at.
func trim(obj any) (any, error) {
	if o, ok := obj.(metav1.Object); ok {
		o.SetManagedFields(nil)
	}
	return obj, nil
}

func sightOf(obj any) (sight, bool) {
	switch o := obj.(type) {
	case *v1alpha1.SMCRNode:
		return sight{key: key{kind: kindNode, name: o.Name}, target: readNode(o), version: o.ResourceVersion}, true
	case *v1alpha1.SMCRLink:
		return sightOfLink(o), true
	}
	return sight{}, false
}

func sightOfLink(o *v1alpha1.SMCRLink) sight {
	return sight{
		key: key{kind: kindLink, name: o.Name}, target: linkTarget(o), version: o.ResourceVersion,
		agent: o.Labels[v1alpha1.LabelAgent], uid: o.UID,
	}
}

// readNode is an SMCRNode without what others write.
func readNode(o *v1alpha1.SMCRNode) target {
	mine := *o
	mine.Status.Conditions = ownConditions(o.Status.Conditions)
	return nodeTarget(&mine)
}

// seen takes into account what the API server has of an object. It tells
// whether the SMCRNode was deleted: perhaps the node was, and made anew.
func (p *planner) seen(s sight, now time.Time) (nodeDeleted bool) {
	e := p.queue.entries[s.key]
	switch {
	case e == nil && s.key.kind == kindLink && s.agent != p.id.agentLabel():
		p.others[s.key.name] = s
		if !s.target.present {
			delete(p.others, s.key.name)
		}
		return false
	case e == nil, s.key.kind == kindNode && p.uninstalled:
		return false
	case older(s.version, e.version):
		return false // it was written here meanwhile
	case s.target.present == e.wrote.present && e.wrote.same(&s.target):
		return false
	}
	p.queue.known(s.key, s.target, now)
	return s.key.kind == kindNode && !s.target.present
}

// older tells whether a resource version is not newer than another one.
func older(a, b string) bool {
	c, err := resourceversion.CompareResourceVersion(a, b)
	return err == nil && c <= 0
}
