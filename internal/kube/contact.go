// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"cmp"
	"fmt"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/kube/report"
)

// contact says whether the agent has joined its cluster, and whether it reaches the API server.
// An agent is ready only once it has joined: before, no pod can be opted in, and nobody would
// learn that from Kubernetes. What happens to the API server later does not make the agent less
// than ready: it serves its pods all the same, and while an agent is not ready, a rolling update
// would replace agents of other nodes.
func (c *cluster) contact() agentapi.Cluster {
	c.mu.Lock()
	k := c.report.Contact()
	c.mu.Unlock()
	objects, why := c.source.Lacks()
	lacks := cmp.Or(unsent(objects, why, k), untold(k))
	if lacks == "" {
		c.joined.Store(true)
	}
	out := agentapi.Cluster{Joined: c.joined.Load()}
	if !out.Joined {
		out.Lacks = lacks
	}
	if k.Away != nil {
		out.Away, out.AwaySince = k.Away.Error(), k.Since
	}
	return out
}

// unsent is which objects the agent does not have yet, and why; "" if it has all.
func unsent(objects string, why error, k report.Contact) string {
	if objects == "" {
		return ""
	}
	text := fmt.Sprintf("the API server has not sent the %s yet", objects)
	if why = cmp.Or(why, k.Away); why != nil {
		text += ": " + why.Error()
	}
	return text
}

// untold is why the API server does not have the SMCRNode of the agent; "" if it has.
func untold(k report.Contact) string {
	switch {
	case k.Told:
		return ""
	case k.Refused != nil:
		return fmt.Sprintf("the API server refuses the agent's SMCRNode: %v", k.Refused)
	case k.Away != nil:
		return fmt.Sprintf("the agent's SMCRNode is not written: the API server is not reached: %v", k.Away)
	}
	return "the agent's SMCRNode is not written yet"
}

// upMetric is the metric that says whether the API server is reached.
type upMetric struct{ c *cluster }

var upDesc = prometheus.NewDesc("kube_smcr_api_server_up", "1: the agent has joined the cluster, and the API server answers it.", nil, nil)

// Describe implements prometheus.Collector.
func (upMetric) Describe(ch chan<- *prometheus.Desc) { ch <- upDesc }

// Collect implements prometheus.Collector.
func (m upMetric) Collect(ch chan<- prometheus.Metric) {
	up := 1.0
	if k := m.c.contact(); k.Away != "" || !k.Joined {
		up = 0
	}
	ch <- prometheus.MustNewConstMetric(upDesc, prometheus.GaugeValue, up)
}
