// SPDX-License-Identifier: Apache-2.0

// Package cni is the CNI plugin smcr-cni and what it shares with the node
// agent: the attachment records.
//
// The plugin has two ways, and the configuration and the previous result decide
// which. Behind the plugin that makes the pod's interface it changes nothing in
// the pod: ADD writes one record that says which interface of which pod in which
// network namespace, and with which device if the configuration names one; DEL
// removes it, and the node agent does the rest. The previous result passes
// through byte for byte.
//
// # Wiring
//
// With a deviceID, and nobody before it that made the interface, it makes the
// interface itself: package vf moves the device into the pod or gives it a
// child, the IPAM plugin, executed at the same time, says the addresses, package
// linux sets them, and the result has all of it. Devices that a pod claimed
// (package claims) become further interfaces beside its first one.
//
// Each step puts what takes it back on a stack, and an ADD that fails leaves
// nothing. When it is killed, the journal of package vf knows the device and its
// owner, so DEL and GC find it without a record. A lock per attachment, a file in
// locks below the data directory that is there while a call runs, keeps a second
// call from taking back what the first one made.
//
// Failing open ends here: a pod that was to get a device and cannot have it does
// not start. Only the record of a chained attachment may be missing.
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
// The directory is the truth. [Notify] is a nudge to read it now, so that a pod
// has its redirection before its processes start. ADD waits for the answer for
// a bounded time, and goes on without it unless the network's configuration
// says "required"; without a socket it does not wait at all. DEL goes on in any
// case.
//
// # Failing open
//
// A pod without a record, or without an agent, is a pod on plain TCP. So ADD
// succeeds without either, also on a full disk, and says so on stderr, unless
// the configuration says "required". STATUS reports nothing unless it says
// "reportStatus": an error there makes the node NotReady. That holds for
// "required" too: the start of an agent would take the traffic from all pods of
// the node that work.
//
// # Who owns what
//
// The plugin writes records. The agent reads them, and writes ones of its own for
// pods that are older than the plugin, of a network that has no such name. The container runtime
// serializes the calls for one attachment; calls for different ones do not
// meet.
//
// # Limitations
//
// Two attachments whose container ID and interface name join to the same text
// cannot exist at once; the second ADD is refused. The identifiers of
// container runtimes do not contain hyphens.
package cni
