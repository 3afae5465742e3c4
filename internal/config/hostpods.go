// SPDX-License-Identifier: Apache-2.0

package config

import (
	"cmp"
	"fmt"
	"path"
	"slices"
	"strings"
	"unicode"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
)

// hostPods reads the pods in the node's own network, where there is no cluster that knows them.
func (d *decoder) hostPods(f field, n *Node) {
	if d.machine.Cluster {
		d.errorf(f, "are pods in a cluster, which the annotation %s opts in: remove them from the file", v1alpha1.AnnotationEnabled)
		return
	}
	items := d.list(f)
	if len(items) > maxHostPods {
		d.errorf(f, "has %d pods, at most %d are allowed", len(items), maxHostPods)
		return
	}
	for _, item := range items {
		before := len(d.errs)
		p := d.hostPod(item)
		if len(d.errs) > before {
			continue // comparing a pod with errors would only cause further errors
		}
		for _, o := range n.HostPods {
			switch {
			case o.String() == p.String():
				d.errorf(item, "%v is given twice", p)
			case within(p.Cgroup, o.Cgroup) || within(o.Cgroup, p.Cgroup):
				d.errorf(item, "cgroup %s of %v and %s of %v have sockets in common, and a socket is of one pod: name cgroups beside each other", p.Cgroup, p, o.Cgroup, o)
			}
		}
		n.HostPods = append(n.HostPods, p)
		d.hosts = append(d.hosts, item)
	}
}

func (d *decoder) hostPod(f field) HostPod {
	fs := d.mapping(f, "namespace", "name", "cgroup")
	var p HostPod
	d.text(fs, "namespace", &p.Namespace)
	d.text(fs, "name", &p.Name)
	for _, part := range []struct{ key, is string }{{"namespace", p.Namespace}, {"name", p.Name}} {
		if !validName(part.is, "") {
			d.errorf(fs.where(part.key), "%q, want a %s, by which policies select the pod: letters, digits, '-', '_' and '.'", part.is, part.key)
		}
	}
	d.text(fs, "cgroup", &p.Cgroup)
	switch c := p.Cgroup; {
	case !path.IsAbs(c) || path.Clean(c) != c || c == "/" || strings.ContainsFunc(c, unicode.IsControl):
		d.errorf(fs.where("cgroup"), "%q, want the path of the pod's cgroup from the root, without . and .., such as /redis.slice (/proc/PID/cgroup has it behind 0::)", c)
	case len(c) > maxCgroupPath:
		d.errorf(fs.where("cgroup"), "is %d bytes long, at most %d are allowed", len(c), maxCgroupPath)
	case strings.Count(c, "/") > maxCgroupDepth:
		d.errorf(fs.where("cgroup"), "is %d cgroups deep, and sockets are told apart by the first %d: name one above it", strings.Count(c, "/"), maxCgroupDepth)
	}
	return p
}

// hostPolicies checks that the policies put the pods in the node's network on the kernel's datapath: nothing else carries these.
func (d *decoder) hostPolicies(n *Node) {
	if len(d.errs) > 0 {
		return // perhaps the policy is there, and has errors
	}
	for i, p := range n.HostPods {
		id := Pod{Namespace: p.Namespace, Name: p.Name}
		if why := notOnKernel(n.PoliciesFor(id), "policy"); why != "" {
			d.errorf(d.hosts[i], "%v: %s %s (one with pods.interfaces selects no such pod)", p, onlyKernel, why)
		}
	}
	sortHostPods(n.HostPods)
}

// String is NAMESPACE/NAME.
func (p HostPod) String() string { return p.Namespace + "/" + p.Name }

func sortHostPods(ps []HostPod) {
	slices.SortFunc(ps, func(a, b HostPod) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	})
}

// within says whether a cgroup is another one or below it.
func within(cgroup, other string) bool {
	return cgroup == other || strings.HasPrefix(cgroup, other+"/")
}

// onlyKernel begins what is wrong with a pod in the node's network.
const onlyKernel = "in the node's network only datapath Kernel or KernelIfAvailable carries connections:"

// notOnKernel says why policies do not put a pod on the kernel's datapath where it is available, and what to do; "" if they do. ps are those
// that select the pod, by rank, and word is what they are called.
func notOnKernel(ps []Policy, word string) string {
	switch d, overruled := datapathOf(ps); {
	case overruled != "":
		return overruled + ": let that one select other pods"
	case d != DatapathAgent:
		return ""
	case len(ps) == 0 || ps[0].Name == DefaultPolicy:
		return fmt.Sprintf("no %s selects the pod: make one with this datapath", word)
	}
	return fmt.Sprintf("%s %s, the first that selects the pod, has datapath Agent: change that, or let one with this datapath be the first", word, ps[0].Name)
}

// hostOptIn decides whether a pod in the network of its node is opted in. ps are the policies that select it, and cgroups
// how many pods claim a cgroup, by what kubelet names it.
//
// Its own annotation alone opts it in: that of a namespace was meant for pods with a network of their own, and would
// change what the node itself does. The agent cannot divert its connections, so it needs the kernel's datapath.
func hostOptIn(pod PodObject, ps []Policy, cgroups map[string]int) Verdict {
	v := Verdict{Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID, NodeUID: pod.nodeUID(), HostNetwork: true}
	if pod.Enabled != nil && *pod.Enabled != "true" {
		o := optIn(pod, nil)
		v.Because, v.BadAnnotation = o.Because, o.BadAnnotation
		return v
	}
	var lacks []string
	if pod.Enabled == nil {
		lacks = append(lacks, fmt.Sprintf("annotate the pod itself with %s: \"true\", as neither the annotation of its namespace nor a claim counts", v1alpha1.AnnotationEnabled))
	}
	if why := notOnKernel(ps, "SMCRPolicy"); why != "" {
		lacks = append(lacks, why)
	}
	if h := pod.ConfigHash; h != "" && (!validHash(h) || cgroups[h] > 1) {
		lacks = append(lacks, fmt.Sprintf("its annotation kubernetes.io/config.hash, by which kubelet names the cgroup of a static pod, is %q, which names none, or that of another pod, too", clipped(h)))
	}
	if len(lacks) > 0 {
		v.Because, v.Ineffective = onlyKernel+" "+strings.Join(lacks, "; "), pod.Enabled != nil
		return v
	}
	v.OptedIn, v.Because = true, "annotation of the pod, which is in the node's network"
	return v
}

// hostPod is a pod in the network of its node that is opted in.
func (p PodObject) hostPod() HostPod {
	return HostPod{Namespace: p.Namespace, Name: p.Name, UID: p.UID, CgroupUID: cmp.Or(p.ConfigHash, p.UID)}
}

// claimedCgroups is how many pods are named as kubelet names a cgroup. Who may make pods may give one the annotations of a
// static pod, and with them the cgroup of another pod.
func claimedCgroups(pods []PodObject) map[string]int {
	n := make(map[string]int, len(pods))
	for _, p := range pods {
		n[p.UID]++
		if p.ConfigHash != "" && p.ConfigHash != p.UID {
			n[p.ConfigHash]++
		}
	}
	return n
}

// validHash says whether kubelet may have named a cgroup so: by a checksum, or the UID that is in the file of a static pod.
func validHash(s string) bool {
	return validName(s, "") && len(s) <= maxConfigHash && !strings.ContainsAny(s, "._")
}
