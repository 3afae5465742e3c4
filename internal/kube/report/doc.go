// SPDX-License-Identifier: Apache-2.0

// Package report tells Kubernetes what the agent of a node does: it writes the
// SMCRNode of the node, an SMCRLink for each link group, the annotation
// smcr.io/status of the opted-in pods, and events.
//
//	r, err := report.New(report.Config{Client: restConfig, Node: name, Source: snapshot, Log: log})
//	...
//	go r.Run(ctx)
//	r.Poke() // something changed
//
// [Reporter.Run] looks at the agent about once a second, and when it is poked.
// What it sees goes through functions of values and nothing else: nodeStatus,
// linkStatus and statusOf say what the objects are to be, podEvent,
// decisionEvent and linkEvents what is worth an event, and the queue what is
// written when. The goroutine of Run owns all of it, and makes one request at a
// time. The agent is never blocked by it, and whatever the API server does, no
// more is kept than the last wish for each object and maxEvents events.
//
// The node's own SMCRNode and SMCRLinks are watched: what somebody else changes
// or deletes is written again, with growing pauses. That is also how a link
// group that the controller called Unknown gets its state back. Conditions that
// the controller writes (AgentAlive) are left alone.
//
// When an agent starts, it reads what an earlier one left, and deletes the
// SMCRLinks that are no longer true, but not before it knows its pods. An agent
// that handed the node over goes on reporting the link groups that it still has
// ([Config.LinksOnly]); its SMCRLinks have its pod as a label, and are left to it
// until that pod is gone. When an agent
// is told to uninstall, it takes the annotations off the pods, deletes its
// SMCRLinks, says Uninstalled in the SMCRNode, and leaves that alone from then
// on.
//
// # The status of a pod
//
//   - Enabled: connections that a policy selects try SMC-R.
//   - Pending: NOT_ATTACHED: no attachment, longer than it takes to make one.
//     Pending: POD_FAILED: the set-up in the pod failed and is tried again.
//   - Fallback with a reason code: nothing can be on SMC-R (NO_OPTION,
//     NOSMCDEV, TRANSPORT, VERSMISMAT), or nothing was: for fallbackAfter no
//     connection of the pod was on SMC-R, though a policy selected it. Then the
//     reason is that of the last connection, most often PEERNOSMC. One
//     connection on SMC-R, or fallbackMemory without another fallback, ends it.
//
// # How much is written
//
// Everything is written by server-side apply as field manager smcr-agent, and
// only if it changed. There is no heartbeat: that the agent lives is seen by its
// pod. A change of a state is written at once, further ones of the same object
// with objectPause between them. Counters (connections, bytes, used budgets,
// pods) go along with other changes; by themselves they are written when they
// went to or from zero or doubled or halved, with pauses that grow from
// countersFirst to countersMost, or countersMost after they last were.
//
// So with 500 nodes the API server gets, in writes per second (TestReporter_writesPerSecond
// counts them with a clock of its own):
//
//	nothing changes                                              0
//	10 link groups per node, counters that never rest         18.3
//	a link group made and ended per node every 10 s          100
//	a pod made and deleted per node every 10 s                50, and 50 events
//	the most, whatever happens                              2500, and 500 events
//
// A node writes at most writesPerSecond, with a burst of writesBurst. What has
// to wait waits in this order: the SMCRNode, link groups, pods, counters; then
// the oldest first.
//
// # Limitations
//
// Events about pods reach them by way of the controller, and not while that is away.
//
// Events are not counted up but created, at most one per object and reason in
// eventAgain. An event that could not be sent for maxEventAge is lost. A node
// and agent has at most maxLinkObjects SMCRLinks.
package report
