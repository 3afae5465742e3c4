// SPDX-License-Identifier: Apache-2.0

// Package cniinstall puts the CNI plugin smcr-cni on a node and into the
// configuration of the node's network, keeps it there, and takes it away again.
//
//	in, err := cniinstall.New(cniinstall.Config{
//		BinSource: "/usr/bin/smcr-cni",
//		BinDir:    "/host/opt/cni/bin",
//		ConfDir:   "/host/etc/cni/net.d",
//		Log:       log,
//	})
//	...
//	err = in.Run(ctx) // installs, watches and repairs until ctx ends
//
// The end of [Installer.Run] leaves everything in place: pods are made while an
// agent restarts, and a plugin that comes and goes would leave some without a
// record. [Installer.Uninstall] undoes what was installed, [Installer.Status]
// says how it stands, and [Inspect] looks without touching anything.
//
// # The network's configuration
//
// Container runtimes take the first file of the directory, in the order of the
// names. Its owner is another program (kindnet, flannel, Calico, Cilium, ...)
// that writes it again whenever it likes. There are two ways to chain:
//
//   - A configuration list (.conflist) gets the plugin as its last one. Not a
//     byte of the rest changes. Once there, the plugin may stand anywhere but
//     first: another program may want to be last too.
//   - A single plugin (.conf, .json), and a file that is a symbolic link, stay as
//     they are: a list derived from it is written beside it, with a name that
//     sorts right before it. It follows its source, and goes with it.
//
// What this package writes is marked (smcr.io/managed, smcr.io/derivedFrom), and
// only what is marked is changed or removed. A plugin that somebody chained by
// hand is good as it is.
//
// A file is replaced in one step, by exchanging it with the new one. What comes
// out must be what was read; otherwise the owner wrote at the same time, its file
// is put back, and all begins anew. An owner that takes the plugin out whenever it
// sees it gets a few repairs a minute and no more: then the state is Contested.
//
// # Pods must start
//
// A list that names a plugin which is not there, or which does not speak its
// version, makes no pods. So the binary comes before the list; a list without a
// binary that could be installed is unchained; a list of a version of CNI that
// the plugin does not know is left alone; and a new field is written only behind
// a binary that knows it. A full disk damages nothing.
//
// # Who owns what
//
// [Installer.Run] owns everything but the status. Of several installers on one
// node, as during an upgrade, one works at a time: it holds a lock (flock) on the
// directory of the configurations, which ends with its process. The others stand
// by.
//
// # Limitations
//
// An owner that opened its file before it is replaced, and writes into it more
// than 30 ms later, loses that change. Lists whose plugins are all in a directory
// of their own (CNI 1.1) are not chained. A derived list does not follow its
// source while no agent runs. Runtimes that delete pods by the configuration
// these were made with (CRI-O) look for the binary also after Uninstall removed
// it: drain a node of such pods first.
package cniinstall
