// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import "time"

const (
	// maxDevices bounds what is told to kubelet, whatever the machine has: 1024
	// VFs are more than any node's RNICs make.
	maxDevices = 1024
	// maxIDLen bounds an ID from kubelet.
	maxIDLen = 256

	// checkEvery is how often the devices, kubelet's socket and our own one are
	// looked at where no event told of a change. Health is to follow a port
	// within 2 s.
	checkEvery = time.Second
	// lockPoll is how soon a plugin follows the one of an agent that handed the
	// node over: kubelet rejects pods that ask for a device in between.
	lockPoll = 20 * time.Millisecond

	// registerPatience bounds one registration: kubelet connects back meanwhile.
	registerPatience = 5 * time.Second
	// The pause after a registration that did not work, or did not last, doubles
	// from firstPause to maxPause. Kubelet takes the end of an earlier plugin of
	// the same resource for the end of the present one: that is mended by the
	// first try.
	firstPause = 50 * time.Millisecond
	maxPause   = 5 * time.Second
	// streamPatience is how long a plugin may be without kubelet's watch before
	// it registers again.
	streamPatience = 2 * time.Second
	// complainEvery is how often a registration that does not work is logged.
	complainEvery = time.Minute
	// stopPatience is how long a plugin that ends waits for its calls.
	stopPatience = time.Second

	// askPatience bounds one question to kubelet about pods, which it answers
	// from memory. An answer is good for freshFor; without one it is asked again
	// after askAgain, so that a kubelet that hangs delays its callers little.
	askPatience = 500 * time.Millisecond
	freshFor    = 900 * time.Millisecond
	askAgain    = 5 * time.Second
	// askSoon is the same for a pod that the last answer had not: it is new, or
	// not kubelet's, and then it is asked for again and again.
	askSoon = 100 * time.Millisecond
	// forgetAfter is how long pods keep what they had while kubelet says that they
	// have nothing: a kubelet that starts knows its pods after some seconds, and
	// a pod whose devices seem gone would lose its connections.
	forgetAfter = 30 * time.Second
	// maxAnswerBytes bounds kubelet's answer about all pods: 500 pods of 16
	// devices with their names are 1 MiB.
	maxAnswerBytes = 16 << 20
	// maxRecordBytes bounds the record of what pods have, which is less than
	// kubelet's answer.
	maxRecordBytes = maxAnswerBytes

	// maxInfoFiles bounds the device information files that are looked at.
	maxInfoFiles = 4096
)
