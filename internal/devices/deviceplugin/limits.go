// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import "time"

const (
	// maxDevices bounds the devices that kubelet is told of: no node's RNICs have 1024
	// VFs.
	maxDevices = 1024
	// maxIDLen bounds an ID from kubelet.
	maxIDLen = 256

	// checkEvery is how often the devices, kubelet's socket and our own one are checked
	// if no event tells of a change. Health has to follow a port within 2 s.
	checkEvery = time.Second
	// registerTimeout bounds one registration, during which kubelet connects back.
	registerTimeout = 5 * time.Second
	// The pause after a registration that failed, or did not last, doubles from
	// firstPause to maxPause. When an earlier plugin of the same resource ends, kubelet
	// drops the registration of the present one: then the first try helps.
	firstPause = 50 * time.Millisecond
	maxPause   = 5 * time.Second
	// streamGrace is how long a plugin waits for kubelet's ListAndWatch before it
	// registers again.
	streamGrace = 2 * time.Second
	// complainEvery is how often a registration, or another thing that is tried again, is
	// logged while it does not work.
	complainEvery = time.Minute
	// stopTimeout is how long a plugin that ends waits for the calls that it is answering.
	stopTimeout = time.Second

	// askTimeout bounds one question to kubelet about pods, which kubelet answers from
	// memory. An answer is used for freshFor. Without an answer, kubelet is asked again
	// after askAgain, so that a hung kubelet delays the callers little.
	askTimeout = 500 * time.Millisecond
	freshFor   = 900 * time.Millisecond
	askAgain   = 5 * time.Second
	// askSoon and askTimeoutNew replace askAgain and askTimeout for a new pod whose
	// devices are not certain yet: its first connections would be carried on the devices
	// of the node, and reset when its own devices are known. After newFor a pod is not
	// new any more.
	askSoon       = 100 * time.Millisecond
	askTimeoutNew = 2 * time.Second
	newFor        = 10 * time.Second
	// forgetAfter is how long a pod keeps its devices while kubelet answers that it has
	// none: a kubelet that starts knows its pods only after some seconds, and a pod that
	// loses its devices loses its connections.
	forgetAfter = 30 * time.Second
	// maxAnswerBytes bounds kubelet's answer about all pods: 500 pods of 16
	// devices with their names are 1 MiB.
	maxAnswerBytes = 16 << 20
	// maxRecordBytes bounds the record of pods' devices, which is shorter than kubelet's
	// answer.
	maxRecordBytes = maxAnswerBytes
)
