// SPDX-License-Identifier: Apache-2.0

// Package cni is the CNI plugin smcr-cni and what it shares with the node
// agent: the attachment records.
//
// The plugin is chained behind the one that makes the pod's interface. It
// changes nothing in the pod: ADD writes one record that says which interface
// of which pod in which network namespace, DEL removes it, and the node agent
// does the rest. The previous result passes through byte for byte.
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
// says "required". DEL goes on in any case.
//
// # Who owns what
//
// The plugin writes records, the agent only reads them. The container runtime
// serializes the calls for one attachment; calls for different ones do not
// meet.
//
// # Limitations
//
// Two attachments whose container ID and interface name join to the same text
// cannot exist at once; the second ADD is refused. The identifiers of
// container runtimes do not contain hyphens.
package cni
