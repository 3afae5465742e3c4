// SPDX-License-Identifier: Apache-2.0

// Package cni is the CNI plugin smcr-cni and what it shares with the node
// agent: the attachment records.
//
// The plugin works in one of two ways; the configuration and the previous result decide
// which. Chained behind the plugin that makes the pod's interface, it changes nothing in
// the pod: ADD writes one record, which names the interface, the pod, its network
// namespace, and the device if the configuration names one. DEL removes the record. The
// node agent does the rest. The previous result passes through byte for byte.
//
// # Wiring
//
// If the configuration has a deviceID, and no plugin before made the interface, the
// plugin makes the interface itself: package vf moves the device into the pod, or makes
// a child of the device there; the IPAM plugin, executed at the same time, gives the
// addresses; package linux sets them; and all of it is in the result. Devices that a
// pod claimed (package claims) become further interfaces of the pod.
//
// Each step of ADD puts a function that takes the step back on a stack, so an ADD that
// fails leaves nothing. If the plugin is killed during ADD, the journal of package vf
// still has the device and its owner, so DEL and GC find the device without a record. A
// lock per attachment keeps a second call from taking back what the first one made; it
// is a file in the directory locks below the data directory, which exists only while a
// call runs.
//
// Wiring does not fail open: a pod that was to get a device and cannot have it does not
// start. Only the record of a chained attachment may be missing.
//
// # Records
//
// A [Store] is the directory attachments below the data directory. A record,
// an [Attachment], is the file "<containerID>-<ifname>.json"; it appears and
// disappears in one step (write aside, sync, rename, sync the directory), so a
// reader sees a whole record or none, also after a power cut. Files that are no
// records are reported by [Store.List] and never make it fail.
//
// # The agent
//
// What the agent does depends on the records alone. [Notify] only tells the agent to
// read them now, so that a pod has its redirection before its processes start. ADD
// waits a bounded time for the agent's answer, and goes on without it unless the
// network's configuration says "required"; if there is no socket, ADD does not wait. DEL
// goes on in any case.
//
// # Failing open
//
// A pod without a record, or without an agent, is on plain TCP. So ADD succeeds without
// either, also on a full disk, and says so on stderr, unless the configuration says
// "required". STATUS never fails unless the configuration says "reportStatus", because
// its error makes the node NotReady. "required" alone does not make STATUS fail:
// otherwise each restart of the agent would make the node NotReady, and take the traffic
// from its working pods.
//
// # Who owns what
//
// The plugin writes records. The agent reads them, and writes records of its own for
// pods that are older than the plugin; these have a network whose name no CNI network can
// have. The container runtime serializes the calls for one attachment; calls for
// different attachments share no file.
//
// # Limitations
//
// Two attachments whose container ID and interface name join to the same text
// cannot exist at once; the second ADD is refused. The identifiers of
// container runtimes do not contain hyphens.
package cni
