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

// observation is an object as the API server has it. If the target is not present, the
// object was deleted.
type observation struct {
	key     key
	target  target
	version string // the resource version
	agent   string // of an SMCRLink: the agent that has the link group
	uid     types.UID
}

// watch implements server. Two goroutines call see.
func (c *client) watch(ctx context.Context, node, label string, see func(observation)) {
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

func watchOne(ctx context.Context, c rest.Interface, resource string, of runtime.Object, narrow func(*metav1.ListOptions), see func(observation)) {
	// The informer keeps the objects only to find out which ones were deleted while it was
	// not connected.
	_, informer := cache.NewInformerWithOptions(cache.InformerOptions{
		ListerWatcher: cache.NewFilteredListWatchFromClient(c, resource, metav1.NamespaceAll, narrow),
		ObjectType:    of,
		Transform:     trim,
		Handler:       handler(see),
	})
	informer.RunWithContext(ctx)
}

// handler makes observations of the events of an informer.
func handler(see func(observation)) cache.ResourceEventHandlerFuncs {
	seen := func(obj any) {
		if s, ok := observationOf(obj); ok {
			see(s)
		}
	}
	return cache.ResourceEventHandlerFuncs{
		AddFunc:    seen,
		UpdateFunc: func(_, obj any) { seen(obj) },
		DeleteFunc: func(obj any) {
			gone, missed := obj.(cache.DeletedFinalStateUnknown)
			if missed {
				obj = gone.Obj
			}
			if s, ok := observationOf(obj); ok {
				s.target = target{}
				if missed {
					s.version = "" // that of the last state that was seen, which may be our own write
				}
				see(s)
			}
		},
	}
}

// trim drops the managed fields, which nobody reads here.
func trim(obj any) (any, error) {
	if o, ok := obj.(metav1.Object); ok {
		o.SetManagedFields(nil)
	}
	return obj, nil
}

func observationOf(obj any) (observation, bool) {
	switch o := obj.(type) {
	case *v1alpha1.SMCRNode:
		return observation{key: key{kind: kindNode, name: o.Name}, target: readNode(o), version: o.ResourceVersion}, true
	case *v1alpha1.SMCRLink:
		return observationOfLink(o), true
	}
	return observation{}, false
}

func observationOfLink(o *v1alpha1.SMCRLink) observation {
	return observation{
		key: key{kind: kindLink, name: o.Name}, target: linkTarget(o), version: o.ResourceVersion,
		agent: o.Labels[v1alpha1.LabelAgent], uid: o.UID,
	}
}

// readNode is the target of an SMCRNode as it was read, without the conditions that
// others write.
func readNode(o *v1alpha1.SMCRNode) target {
	mine := *o
	mine.Status.Conditions = ownConditions(o.Status.Conditions)
	return nodeTarget(&mine)
}

// seen takes an observation into account. It tells whether the SMCRNode was deleted:
// perhaps the Node was deleted and made anew, with another UID.
func (p *planner) seen(s observation, now time.Time) (nodeDeleted bool) {
	e := p.queue.entries[s.key]
	switch {
	case e == nil && s.key.kind == kindLink && s.agent != p.id.agentLabel():
		p.others[s.key.name] = s
		if !s.target.present {
			delete(p.others, s.key.name)
		}
		return false
	case e == nil && s.key.kind == kindLink && s.target.present:
		// An old SMCRLink appeared: an earlier write arrived late, or a backup was restored. The next plan
		// deletes it if its link group is gone.
		p.takeLink(s, now)
		return false
	case e == nil, s.key.kind == kindNode && p.uninstalled:
		return false
	case older(s.version, e.version):
		return false // the object was written here since: the observation is old
	case s.target.present == e.wrote.present && e.wrote.same(&s.target):
		return false
	case s.key.kind == kindLink && p.links[s.key.name] == nil: // the SMCRLink is to be deleted, or is not planned yet
		p.queue.drop(s.key)
		delete(p.uids, s.key.name)
		if s.target.present {
			p.takeLink(s, now)
		}
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
