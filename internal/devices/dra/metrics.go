// SPDX-License-Identifier: Apache-2.0

package dra

import "github.com/prometheus/client_golang/prometheus"

// Metrics are the Prometheus metrics of a driver.
type Metrics struct {
	claims *prometheus.CounterVec // operation, result
}

// NewMetrics makes the metrics. They keep their values when Run is called again.
func NewMetrics() *Metrics {
	return &Metrics{claims: prometheus.NewCounterVec(prometheus.CounterOpts{
		Namespace: "kube_smcr", Name: "dra_claims_total", Help: "ResourceClaims that kubelet asked to prepare or unprepare, by operation and result.",
	}, []string{"operation", "result"})}
}

// count counts one operation. m may be nil.
func (m *Metrics) count(operation string, err error) {
	if m == nil {
		return
	}
	result := "done"
	if err != nil {
		result = "refused"
	}
	m.claims.WithLabelValues(operation, result).Inc()
}

// Describe implements prometheus.Collector.
func (m *Metrics) Describe(ch chan<- *prometheus.Desc) { m.claims.Describe(ch) }

// Collect implements prometheus.Collector.
func (m *Metrics) Collect(ch chan<- prometheus.Metric) { m.claims.Collect(ch) }
