// SPDX-License-Identifier: Apache-2.0

package report

import "time"

const (
	// collectEvery is the time between two snapshots of the agent without a call of
	// Poke: a link that changes calls nobody. collectPause is the least time between two
	// snapshots, however often Poke is called.
	collectEvery = time.Second
	collectPause = 100 * time.Millisecond

	// recheckEvery is the time between two calls of Config.Recheck. The check asks the kernel a
	// dozen questions, and somebody who mounts or loads what was missing can wait a minute to
	// see it.
	recheckEvery = time.Minute

	// objectPause is the least time between two writes of one object. The first
	// change is written at once.
	objectPause = time.Second

	// An object is written for its counters when a counter went from or to zero, doubled
	// or halved. countersMost after the last write it is written for any change. The pause
	// between two writes of one object for its counters begins with countersFirst and
	// doubles up to countersMost, so that a counter that goes up and down for ever costs
	// one write per countersMost. For example: 0 -> 1 connection at 0 s is written at once,
	// 1 -> 2 at 1 s is written at 5 s, 2 -> 4 at 6 s is written at 15 s. After
	// countersForget without such a write the pause is countersFirst again.
	countersFirst  = 5 * time.Second
	countersMost   = 5 * time.Minute
	countersForget = 2 * countersMost

	// writesPerSecond and writesBurst bound all writes and events of a node together. 20
	// writes are those of a node with its links when an agent starts, or of one link group
	// of each of 20 pods when a switch fails. With 500 nodes the API server gets 500 such
	// bursts at once.
	writesPerSecond = 5
	writesBurst     = 20

	// These bound the events of a node, and those of one object. An event about the same object
	// with the same reason is sent again after eventAgain at the earliest.
	eventsPerSecond   = 1
	eventsBurst       = 20
	objectEventsPer   = 20 * time.Second // one per
	objectEventsBurst = 5
	eventAgain        = 10 * time.Minute
	// outageNoted is how long the API server must have been out of an agent's reach for an event:
	// longer than the restart of one.
	outageNoted        = time.Minute
	maxEvents          = 64 // events that wait to be sent; further ones are lost
	maxEventAge        = 10 * time.Minute
	maxEventNote       = 1024 // bytes, what the API server takes
	maxRememberedEvent = 4096 // objects and reasons

	// callTimeout ends a call to the API server that hangs.
	callTimeout = 10 * time.Second

	// renewEvery is the time between two renewals of the agent's Lease. After a renewal
	// that failed, or did not end within renewTimeout, the pause is renewRetry and doubles up
	// to renewEvery. The controller takes the agent for gone when it has seen no renewal for
	// 7 s (silentAfter there), and people are to see within 10 s after the end of an agent that
	// it is gone. Two renewals in a row can get lost:
	//
	//	0.0 s   renewed
	//	2.5 s   lost
	//	5.0 s   lost
	//	7.0 s   without another renewal the controller takes the agent for gone
	//
	// leaseDuration says the same 7 s in the Lease.
	renewEvery    = 2500 * time.Millisecond
	renewRetry    = 500 * time.Millisecond
	renewTimeout  = 2 * time.Second
	leaseDuration = 7 * time.Second

	// After an error of the API server as a whole all writes wait, for awayFirst up to
	// awayMost. After an error that is about one object, only the writes of this object wait,
	// for objectFirst up to objectMost. After an internal error (500) it is not known which of
	// the two it was: see queue.broke.
	awayFirst   = time.Second
	awayMost    = time.Minute
	objectFirst = 5 * time.Second
	objectMost  = 10 * time.Minute

	// repliedOnly is how long every call must have had an answer for an outage to be over, if all
	// answers are internal errors. There are at least two calls in that time.
	repliedOnly = 2 * awayMost

	// refusalLogPause is the least time between two log records about objects of
	// one kind that the API server refuses.
	refusalLogPause = time.Minute

	// repairFirst is how soon an object that somebody else changed is written again.
	// The pause doubles up to repairMost if somebody changes the object again, so that
	// two writers of one object do not fill the API server.
	repairFirst = 2 * time.Second
	repairMost  = 5 * time.Minute

	// A pod without an attachment gets that status after attachGrace, and an event after
	// attachWarn: the reporter sees most pods before their network is made, and some pods wait
	// for a volume.
	attachGrace = 5 * time.Second
	attachWarn  = time.Minute

	// drainGrace is how long an agent may drain before the pods are told that their new
	// connections are plain TCP. There is no other agent until it has ended, unless it is
	// updated; then it does not drain, but hands over.
	drainGrace = 5 * time.Second

	// A pod is Fallback because of its connections when none of them was on SMC-R for
	// fallbackAfter, and its last connection without SMC-R is younger than fallbackMemory.
	// fallbackMemory is longer than destinations stay in the negative cache.
	fallbackAfter  = 10 * time.Second
	fallbackMemory = 15 * time.Minute

	// policyDelay is how long a change of policies may take to be in force.
	policyDelay = 2 * time.Second

	// maxLinkObjects bounds the SMCRLinks of a node. The oldest link groups get one each;
	// smcrctl links lists all link groups.
	maxLinkObjects = 512

	// These are the limits in the definitions of the CRDs, except maxMessage, which is lower,
	// and Kubernetes' limits of a label's value and an object's name.
	maxLinks        = 8
	maxDevices      = 8
	maxAddresses    = 16 // of one device, besides the one of its links
	maxPodDevices   = 256
	maxCapabilities = 64
	maxLastError    = 1024
	maxDetail       = 1024
	maxMessage      = 4096
	maxLabelValue   = 63
	maxObjectName   = 253
)
