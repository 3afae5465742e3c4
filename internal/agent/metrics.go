// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"maps"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/config"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
)

// metrics are the agent's Prometheus metrics. None has a label per pod: the
// API tells about pods.
type metrics struct {
	registry *prometheus.Registry

	conns        *prometheus.CounterVec // direction, mode
	fallbacks    *prometheus.CounterVec // reason
	resets       *prometheus.CounterVec // reason
	bytes        *prometheus.CounterVec // mode
	setup        prometheus.Histogram
	malformed    prometheus.Counter
	acceptErrors prometheus.Counter
	renewErrors  prometheus.Counter
	podErrors    prometheus.Counter
	apiDenied    prometheus.Counter
	reloads      *prometheus.CounterVec // result

	sums sums

	// The status answer shows these too, and counters cannot be read.
	mu     sync.Mutex // guards what is below
	totals totals
}

// totals are sums since the start.
type totals struct {
	connsSMCR, connsTCP, resets, bytesSMCR, bytesTCP uint64
	reasons                                          map[agentapi.Code]uint64
}

// gauges is what a scrape asks the agent for.
type gauges struct {
	flowsSMCR, flowsTCP, groups, memoryBytes int
	ready, idle, failed                      int
}

const namespace = "kube_smcr"

func newMetrics(look func() gauges) *metrics {
	counter := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Namespace: namespace, Name: name, Help: help})
	}
	vec := func(name, help string, labels ...string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Namespace: namespace, Name: name, Help: help}, labels)
	}
	bytes := vec("relayed_bytes_total", "Bytes of ended connections, both directions together, by what carried them.", "mode")
	m := &metrics{
		registry:  prometheus.NewRegistry(),
		conns:     vec("connections_total", "Connections that the agent carried.", "direction", "mode"),
		fallbacks: vec("fallbacks_total", "Connections that were selected for SMC-R, or came to the agent, and were not on it.", "reason"),
		resets:    vec("resets_total", "Connections that the agent reset.", "reason"),
		bytes:     bytes,
		setup: prometheus.NewHistogram(prometheus.HistogramOpts{
			Namespace: namespace, Name: "rendezvous_seconds", Help: "Duration of the rendezvous after the TCP handshake.",
			Buckets: prometheus.ExponentialBuckets(50e-6, 4, 9),
		}),
		malformed:    counter("malformed_messages_total", "Messages of peers that were not understood."),
		acceptErrors: counter("accept_errors_total", "Connections that could not be accepted for want of descriptors or memory."),
		renewErrors:  counter("renew_errors_total", "Renewals of a diversion that did not work."),
		podErrors:    counter("pod_errors_total", "Set-ups of pods that did not work."),
		apiDenied:    counter("api_denied_total", "Requests to the API by users that may not use it."),
		reloads:      vec("reloads_total", "Reloads of the configuration.", "result"),
		sums:         sums{look: look},
		totals:       totals{reasons: map[agentapi.Code]uint64{}},
	}
	m.registry.MustRegister(m.conns, m.fallbacks, m.resets, bytes, m.setup, m.malformed, m.acceptErrors, m.renewErrors,
		m.podErrors, m.apiDenied, m.reloads, &m.sums,
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return m
}

func (m *metrics) opened(d config.Direction, mode smcr.Mode) {
	m.conns.WithLabelValues(d.String(), mode.String()).Inc()
	m.mu.Lock()
	defer m.mu.Unlock()
	if mode == smcr.ModeSMCR {
		m.totals.connsSMCR++
	} else {
		m.totals.connsTCP++
	}
}

func (m *metrics) relayed(mode smcr.Mode, bytes uint64) {
	m.bytes.WithLabelValues(mode.String()).Add(float64(bytes))
	m.mu.Lock()
	defer m.mu.Unlock()
	if mode == smcr.ModeSMCR {
		m.totals.bytesSMCR += bytes
	} else {
		m.totals.bytesTCP += bytes
	}
}

func (m *metrics) fallback(code agentapi.Code) {
	m.fallbacks.WithLabelValues(string(code)).Inc()
	m.mu.Lock()
	defer m.mu.Unlock()
	m.totals.reasons[code]++
}

func (m *metrics) reset(code agentapi.Code) {
	m.resets.WithLabelValues(string(code)).Inc()
	m.mu.Lock()
	defer m.mu.Unlock()
	m.totals.resets++
}

// sum returns the totals as they are now.
func (m *metrics) sum() totals {
	m.mu.Lock()
	defer m.mu.Unlock()
	t := m.totals
	t.reasons = maps.Clone(t.reasons)
	return t
}

// sums collects gauges at the time of the scrape.
type sums struct{ look func() gauges }

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc(prometheus.BuildFQName(namespace, "", name), help, labels, nil)
}

// Describe implements prometheus.Collector.
func (s *sums) Describe(ch chan<- *prometheus.Desc) { prometheus.DescribeByCollect(s, ch) }

// Collect implements prometheus.Collector.
func (s *sums) Collect(ch chan<- prometheus.Metric) {
	g := s.look()
	gauge := func(d *prometheus.Desc, v int, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, float64(v), labels...)
	}
	conns := desc("connections", "Connections that the agent carries now.", "mode")
	gauge(conns, g.flowsSMCR, smcr.ModeSMCR.String())
	gauge(conns, g.flowsTCP, smcr.ModeTCP.String())
	gauge(desc("link_groups", "SMC-R link groups."), g.groups)
	gauge(desc("registered_memory_bytes", "Memory registered for RDMA."), g.memoryBytes)
	pods := desc("pods", "Attached pods.", "state")
	gauge(pods, g.ready, agentapi.StateReady)
	gauge(pods, g.idle, agentapi.StateIdle)
	gauge(pods, g.failed, agentapi.StateFailed)
}
