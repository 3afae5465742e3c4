// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/client-go/tools/leaderelection"
)

// TestLimits: what the comments of limits.go say of two limits together.
func TestLimits(t *testing.T) {
	const renewals = 2500 * time.Millisecond // of agents: renewEvery of internal/kube/report
	for what, holds := range map[string]bool{
		"two renewals of an agent may get lost":                           silentAfter > 2*renewals,
		"people see within 10 s that an agent is gone":                    silentAfter+renewals+minLeaseCheck < 10*time.Second,
		"a restart is shorter than the start of a node":                   agentGrace < startGrace,
		"another replica leads within 10 s":                               leaseDuration+retryPeriod+coalesce < 10*time.Second,
		"the leader gives up before another replica leads":                renewDeadline < leaseDuration,
		"client-go takes the times of the election":                       time.Duration(leaderelection.JitterFactor*float64(retryPeriod)) < renewDeadline,
		"the clock of the Leases goes on while the leader renews its own": maxLeaseGap > 2*retryPeriod,
		"a silent agent is looked at more than once":                      minLeaseCheck < silentAfter,
		"a pod that the cache lacks is looked for more than once":         podRetry < podWait,
		"an event waits for its pod before it is too old":                 podWait < maxEventAge,
		"the name of an event fits":                                       maxEventName+len(".")+len("123e4567e89b12d3a456426614174000") <= validation.DNS1123SubdomainMaxLength,
		"the pause before a restart grows":                                minRestart < maxRestart,
		"headers arrive before an idle client is sent away":               headerTimeout < idleTimeout,
	} {
		if !holds {
			t.Errorf("not so: %s", what)
		}
	}
}
