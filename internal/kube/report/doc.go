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
// The snapshot goes through pure functions: nodeStatus, linkStatus and statusOf say
// what the objects are to be, podEvent, decisionEvent and linkEvents what is worth an
// event, and the queue what is written when. The goroutine of Run owns all state, and
// makes one request at a time. The agent never waits for it. Whatever the API server
// does, no more is kept than the wanted state of each object and maxEvents events.
//
// The node's own SMCRNode and SMCRLinks are watched: what somebody else changes
// or deletes is written again, with growing pauses. For example, the controller deletes the
// SMCRLinks of an agent that it does not hear of, and the agent, back again, makes them anew.
// Conditions that the controller writes (AgentAlive) are left alone.
//
// When an agent starts, it reads what an earlier one left, and deletes the
// SMCRLinks of link groups that are gone, but not before it knows its pods. An agent
// that handed the node over goes on reporting the link groups that it still has
// ([Config.LinksOnly]); its SMCRLinks have its pod as a label, and the new agent
// leaves them alone until that pod is gone. When an agent is told to uninstall, it
// takes the annotations off the pods, deletes its SMCRLinks, sets the condition
// Uninstalled of the SMCRNode, and does not write the SMCRNode any more. When it leaves
// its node while the product goes on to be installed ([Snapshot.Left]), the SMCRNode and the
// annotations say that there is no agent.
//
// # The status of a pod
//
//   - Enabled: connections that a policy selects try SMC-R.
//   - Pending: NOT_ATTACHED: no attachment, longer than it takes to make one.
//     Pending: POD_FAILED: the set-up in the pod failed and is tried again.
//     A pod in the node's network is carried by its kernel or by nobody: it is Enabled: KERNEL, or
//     one of these until its cgroup is there and chosen.
//   - Fallback with a reason code: nothing can be on SMC-R (NO_OPTION,
//     NOSMCDEV, TRANSPORT, VERSMISMAT), or nothing was: for fallbackAfter no
//     connection of the pod was on SMC-R, though a policy selected it. Then the
//     reason is that of the last connection, most often PEERNOSMC. One
//     connection on SMC-R, fallbackMemory without another fallback, or a change
//     of the pod's policies ends this status.
//   - Refused with a reason code: as Fallback, but the last such connection was
//     reset, because a policy requires SMC-R.
//   - Fallback: NO_AGENT: the agent has left the node. If an agent is gone without having left
//     its node, the controller writes the same; but it writes "Enabled: KERNEL, no agent" for
//     pods whose kernel carries their connections, because these go on. They also go on while an
//     agent drains, and keep their status.
//
// # How much is written
//
// Everything is written by server-side apply as field manager smcr-agent, and only if it
// changed. The one exception is the Lease of the agent, which only the controller watches: it is
// renewed every renewEvery, and so shows that the agent lives.
//
// A change of an object's state is written at once, and further changes of the same object with
// objectPause between them. Counters (connections, bytes, used budgets, pods) are written along
// with such a change, with the time at which they were counted (countedAt). A change of counters
// alone is written when one of them went to or from zero, doubled or halved, with pauses that
// grow from countersFirst to countersMost; any other change of counters is written countersMost
// after the last write. For example, a change from 100 connections to 200 is first written
// within 5 seconds, one from 100 to 150 within 5 minutes.
//
// So with 500 nodes the API server gets, in writes per second, besides 200 renewals of
// Leases (TestReporter_writesPerSecond counts them with a clock of its own):
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
// The controller passes events about pods on to the pods; while no controller runs,
// events are not passed on.
//
// An event is always a new object, not a higher count of an old one; there is at most
// one per object and reason in eventAgain. An event that could not be sent for
// maxEventAge is lost. An agent writes at most maxLinkObjects SMCRLinks.
package report
