// SPDX-License-Identifier: Apache-2.0

package main

import "github.com/smcr-io/kube-smcr/bench/report"

const (
	// podsRoundTrip is in times of the round trip over one haproxy.
	podsRoundTrip = 1.0
	// besideIdle is how much longer one more connection may take beside many idle ones than beside few.
	besideIdle = 1.1
	// idleKiB is what an idle connection may have resident on each side.
	idleKiB = 8
	// idleGoroutines is none for a connection: the agents' own come and go.
	idleGoroutines = 0.01
)

// idleResident is the name of the row of idleKiB.
const idleResident = "resident memory per connection, buffers included as far as they were touched"

// connTargets are the targets of smcr.Conn's streams: the ratio to TCP's throughput, and the UDP sends of a MiB. MTU 1500 has
// four times the packets of MTU 9000, each with an ICRC.
func connTargets(mtu, conns int) []report.Target {
	rate, sends := 1.4, 25.0
	switch {
	case mtu == 1500 && conns == 1:
		rate, sends = 0.95, 30
	case mtu == 1500:
		rate, sends = 0.85, 30
	case conns > 1:
		rate = 1.05
	}
	return []report.Target{
		{Path: pathConn, Against: pathTCP, Limit: rate},
		{Path: pathConn, Cost: report.UDPSends, Limit: sends},
	}
}

// podsTargets are the targets of streams between pods by way of two agents, against one haproxy.
func podsTargets(conns int) []report.Target {
	rate := 1.2
	if conns > 1 {
		rate = 1.0
	}
	return []report.Target{{Path: pathPods, Against: pathHAProxy, Limit: rate}}
}

// connRate is for smcr.Conns on a link group that exists, opened eight at a time.
func connRate() []report.Target {
	return []report.Target{{Path: pathConn, Against: pathTCP, Limit: 0.6}}
}

// podsRate is for connections between pods, opened eight at a time.
func podsRate() []report.Target {
	return []report.Target{{Path: pathPods, Against: pathTCP, Limit: 0.35}}
}

// idleMemory is for what both sides of an idle connection have together.
func idleMemory(path string) []report.Target {
	return []report.Target{{Path: path, Limit: 2 * idleKiB}}
}

// besideTargets are the targets of one more connection, whose time may depend little on how many there are.
func besideTargets(few string, many []string) []report.Target {
	var all []report.Target
	for _, path := range many {
		all = append(all, report.Target{Path: path, Against: few, Limit: besideIdle})
	}
	return all
}
