// SPDX-License-Identifier: Apache-2.0

// Package install puts the CNI plugin smcr-cni on a node and into the
// configuration of the node's network, keeps it there, and takes it away again.
//
//	in, err := install.New(install.Config{
//		BinSource: "/usr/bin/smcr-cni",
//		BinDir:    "/host/opt/cni/bin",
//		ConfDir:   "/host/etc/cni/net.d",
//		Log:       log,
//	})
//	...
//	err = in.Run(ctx) // installs, watches and repairs until ctx ends, or the directories are others
//
// The end of [Installer.Run] leaves everything in place: pods are made also while an
// agent restarts, and they need the plugin to get a record. [Installer.Uninstall] removes
// what was installed, and [Installer.Status] is the state of the installation.
//
// # The network's configuration
//
// Container runtimes use the first file of the directory, in the order of the names.
// That file belongs to another program (kindnet, flannel, Calico, Cilium, ...), its
// owner, which may write it again at any time. There are two ways to chain:
//
//   - A configuration list (.conflist) gets the plugin as its last one. No other
//     byte changes. From then on the plugin may be anywhere in the list but first:
//     another program may want to be last too.
//   - A single plugin (.conf, .json), and a file that is a symbolic link, stay as
//     they are. A list derived from the file is written beside it, with a name that
//     sorts right before it. The derived list is written again when its source
//     changes, and removed when its source is gone.
//
// What this package writes has a mark (smcr.io/managed, smcr.io/derivedFrom), and only
// what has the mark is changed or removed. If somebody chained the plugin by hand,
// nothing is done.
//
// A file is replaced in one step, by exchanging it with the new one. If the file that
// comes out is not the one that was read, the owner wrote at the same time:
//
//	owner           installer
//	                reads A
//	                writes A' (A and the plugin) aside
//	writes B
//	                exchanges: A' is in place, B comes out
//	                B is not A: exchanges again, B is in place
//	                begins anew with B
//
// If another program takes the plugin out again and again, the plugin is put back
// only a few times a minute, and the state is Contested.
//
// # Pods must start
//
// No pod can start with a list that names a plugin whose binary is missing, or that does
// not support the list's version of CNI. Therefore the binary is installed before the
// list is changed; if there is no binary and none can be installed, the plugin is taken
// out of the list; a list of a version of CNI that the plugin does not know is left
// alone; and a new field is written into the list only after the binary that knows it
// was installed. A full disk damages nothing.
//
// # Who owns what
//
// [Installer.Run] owns everything but the status. If a node has several installers, as
// during an upgrade, only one works: the one with the lock (flock) on the directory of
// the configurations, which the kernel releases when its process ends. The others wait
// for the lock, in the state Standby.
//
// # Limitations
//
// If an owner opens its file before the file is replaced, and writes into it more than
// 30 ms after that, its change is lost. Lists whose plugins are all in a directory
// of their own (CNI 1.1) are not chained. A derived list does not follow its
// source while no agent runs. CRI-O deletes a pod with the configuration that the pod
// was made with, and so needs the binary also after Uninstall removed it: drain such a
// node first.
package install
