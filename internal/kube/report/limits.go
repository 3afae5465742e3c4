// SPDX-License-Identifier: Apache-2.0

package report

import "time"

const (
	// collectEvery is how often a snapshot of the agent is taken when nobody calls
	// Poke: nobody does when a link changes. collectPause is the least time between two
	// snapshots, however often Poke is called.
	collectEvery = time.Second
	collectPause = 100 * time.Millisecond

	// objectPause is the least time between two writes of one object. The first
	// change is written at once.
	objectPause = time.Second

	// Counters are written when one of them went from or to zero, or doubled or
	// halved; countersMost after the last write, any change is. The pause between
	// writes of one object for its counters begins with countersFirst and doubles up to
	// countersMost, so that a counter that goes up and down for ever costs one write per
	// countersMost. After countersForget without such a write the pause is countersFirst
	// again.
	countersFirst  = 5 * time.Second
	countersMost   = 5 * time.Minute
	countersForget = 2 * countersMost

	// All writes and events of a node together. 20 is a node with its links
	// when an agent starts, or a link group of each of 20 pods when a switch
	// fails; with 500 nodes that is what the API server gets at once.
	writesPerSecond = 5
	writesBurst     = 20

	// Events of a node, and of one object. An event of the same object and
	// reason is worth another one after eventAgain.
	eventsPerSecond    = 1
	eventsBurst        = 20
	objectEventsPer    = 20 * time.Second // one per
	objectEventsBurst  = 5
	eventAgain         = 10 * time.Minute
	maxEvents          = 64 // that wait to be sent; further ones are lost
	maxEventAge        = 10 * time.Minute
	maxEventNote       = 1024 // bytes, what the API server takes
	maxRememberedEvent = 4096 // objects and reasons

	// callTimeout ends a call to the API server that hangs.
	callTimeout = 10 * time.Second

	// renewEvery is the time between two renewals of the agent's Lease, and renewRetry
	// that after one that failed or took renewTimeout, which doubles up to renewEvery. The controller takes the agent for
	// gone when it has seen none for 7 s (silentAfter there), and people are to see that 10 s
	// after the end of the agent. A renewal that hangs until renewTimeout is followed by
	// another one after 6 s, and a container that is killed has 3.5 s to start again. 500
	// nodes make 143 writes a second. leaseDuration is what the Lease says of it.
	renewEvery    = 3500 * time.Millisecond
	renewRetry    = 500 * time.Millisecond
	renewTimeout  = 2 * time.Second
	leaseDuration = 7 * time.Second

	// After an error that is about the API server everything waits, after one
	// that is about an object only that object does.
	awayFirst   = time.Second
	awayMost    = time.Minute
	objectFirst = 5 * time.Second
	objectMost  = 10 * time.Minute

	// refusalLogPause is the least time between two log records about objects of
	// one kind that the API server refuses.
	refusalLogPause = time.Minute

	// repairFirst is how soon an object that somebody else changed is written again.
	// The pause doubles up to repairMost if somebody changes the object again, so that
	// two writers of one object do not fill the API server.
	repairFirst = 2 * time.Second
	repairMost  = 5 * time.Minute

	// attachGrace is how long a pod may be without an attachment before that is
	// worth a write, and attachWarn before it is worth an event: most pods are
	// seen here before their network is made, and some wait for a volume.
	attachGrace = 5 * time.Second
	attachWarn  = time.Minute

	// drainGrace is how long an agent may drain before the pods are told that their new
	// connections are plain TCP. There is no other agent until it has ended, unless it is
	// updated; then it does not drain, but hands over.
	drainGrace = 5 * time.Second

	// A pod is Fallback because of its connections when none of them was on
	// SMC-R for fallbackAfter, and the last that was not is younger than
	// fallbackMemory, which is longer than destinations stay in the negative
	// cache.
	fallbackAfter  = 10 * time.Second
	fallbackMemory = 15 * time.Minute

	// policyDelay is how long a change of policies may take to be in force.
	policyDelay = 2 * time.Second

	// maxLinkObjects bounds the SMCRLinks of a node. The oldest link groups get
	// one; smcrctl links lists all.
	maxLinkObjects = 512

	// What the CRDs take.
	maxLinks        = 8
	maxDevices      = 8
	maxPodDevices   = 256
	maxCapabilities = 64
	maxLastError    = 1024
	maxDetail       = 1024
	maxMessage      = 4096
	maxLabelValue   = 63
	maxObjectName   = 253
)
