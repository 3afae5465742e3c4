// SPDX-License-Identifier: Apache-2.0

// Package clustertools builds the programs of a real Kubernetes cluster from
// their Go modules, once, and says where they are. The modules are
// tools/cluster/tools (etcd, the Kubernetes programs, helm, kwok) and
// tools/cluster/tools/runtime (containerd and the standard CNI plugins); each
// pins its versions in go.mod and go.sum. No registry of images, no package of
// a distribution and no downloaded binary is involved, but for runc.
//
//	dir, err := clustertools.Dir(ctx, os.Stderr) // builds what is missing: minutes, then 0 s
//	exec.Command(filepath.Join(dir, "kubectl"), ...)
//
// The directory holds:
//
//	kube                         one binary; etcd kube-apiserver kube-controller-manager
//	                             kube-scheduler kubelet kube-proxy kubectl are links to it
//	helm kwok                    as in their releases
//	containerd ctr containerd-shim-runc-v2
//	runc                         a link to the distribution's
//	cni/                         bridge host-local loopback portmap
//
// It is $KUBE_SMCR_TOOLS if that is set, and otherwise a directory under the
// user's cache directory ($KUBE_SMCR_CACHE overrides where), named by a hash of
// the modules, the Go version and how they are built, so that a changed
// version is built beside the old one and a checkout of yesterday finds its
// own. A directory is built under another name and renamed when complete; two
// processes do not build at once: the second waits for the first.
//
// Directories of former versions stay until somebody removes them: about
// 400 MB each.
package clustertools
