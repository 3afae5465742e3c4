// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"maps"
	"strings"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/linux"
	"github.com/smcr-io/kube-smcr/internal/synqueue"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
)

// metrics are the agent's Prometheus metrics. No metric has a label per pod; the API tells about
// pods.
type metrics struct {
	registry *prometheus.Registry

	conns        *prometheus.CounterVec // direction, mode
	fallbacks    *prometheus.CounterVec // reason
	resets       *prometheus.CounterVec // reason
	ended        *prometheus.CounterVec // reason
	setup        prometheus.Histogram
	malformed    prometheus.Counter
	failures     prometheus.Counter
	trespasses   prometheus.Counter
	acceptErrors prometheus.Counter
	undiverted   *prometheus.CounterVec // door
	renewErrors  prometheus.Counter
	podErrors    prometheus.Counter
	apiDenied    prometheus.Counter
	reloads      *prometheus.CounterVec // result
	// device, change
	deviceChanges  *prometheus.CounterVec
	deviceRefusals prometheus.Counter
	pauses         *prometheus.CounterVec // reason
	pendingWaits   prometheus.Counter

	sums sums

	// The status needs the values of some counters, and a Prometheus counter cannot be read.
	mu     sync.Mutex // guards what is below
	totals totals
}

// totals are sums since the start.
type totals struct {
	connsSMCR, connsTCP, resets, bytesSMCR, bytesTCP uint64
	reasons                                          map[agentapi.Code]uint64
}

// gauges are the values that a scrape asks the agent for.
type gauges struct {
	sessionsSMCR, sessionsTCP int
	undecided                 int            // sessions that are neither yet
	bytesSMCR                 uint64         // of live sessions
	groups                    map[string]int // by redundancy
	degraded                  int            // of these
	ready, idle, failed       int
	kernel                    int // of the ready ones, whose kernel carries them
	paused, meshed, unheld    int // of the ready ones
	budget                    agentapi.Budget
	devicesUp                 map[string]int    // 1: the device is open and its port active
	unsent                    map[string]uint64 // by software device
	wire                      agentapi.Wire
	held                      linux.HolderCounters
}

// linkGroups is the number of link groups.
func (g *gauges) linkGroups() int {
	n := 0
	for _, k := range g.groups {
		n += k
	}
	return n
}

// redundancies are the values of the label "redundancy", as in SMCRLink objects.
var redundancies = [...]string{"Single", "Symmetric", "Asymmetric"}

// redundancyLabel is the redundancy of a link group without the side that has only one RNIC, which
// is in the API.
func redundancyLabel(s string) string {
	switch {
	case s == "SYMMETRIC":
		return redundancies[1]
	case strings.HasPrefix(s, "ASYMMETRIC"):
		return redundancies[2]
	default:
		return redundancies[0]
	}
}

const namespace = "kube_smcr"

// Values of the label "result" of reloads.
const (
	reloadDone    = "done"
	reloadRefused = "refused"
)

func newMetrics(look func() gauges) *metrics {
	counter := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Namespace: namespace, Name: name, Help: help})
	}
	vec := func(name, help string, labels ...string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Namespace: namespace, Name: name, Help: help}, labels)
	}
	m := &metrics{
		registry:  prometheus.NewRegistry(),
		conns:     vec("connections_total", "Connections that the agent carried.", "direction", "mode"),
		fallbacks: vec("fallbacks_total", "Connections that were selected for SMC-R, or came to the agent, and were not on it.", "reason"),
		resets:    vec("resets_total", "Connections that the agent reset.", "reason"),
		ended:     vec("ended_total", "Connections on the SMC-R of pods' kernels that the agent ended.", "reason"),
		setup: prometheus.NewHistogram(prometheus.HistogramOpts{
			Namespace: namespace, Name: "rendezvous_seconds", Help: "Duration of the rendezvous after the TCP handshake.",
			Buckets: prometheus.ExponentialBuckets(50e-6, 4, 9),
		}),
		malformed:      counter("malformed_messages_total", "Messages of peers that were not understood, or contradicted others."),
		failures:       counter("stack_failures_total", "What failed in SMC-R stacks for want of memory, a route or a peer's answer, and not because of a peer's message."),
		trespasses:     counter("trespasses_total", "Links that ended because the peer asked for memory that is not its own."),
		acceptErrors:   counter("accept_errors_total", "Connections that could not be accepted for want of descriptors or memory."),
		undiverted:     vec("undiverted_connections_total", "Connections to the agent's listeners in pods that were not diverted there, and were reset.", "door"),
		renewErrors:    counter("renew_errors_total", "Renewals of a diversion that did not work, or came when it had lapsed."),
		podErrors:      counter("pod_errors_total", "Set-ups of pods that did not work."),
		apiDenied:      counter("api_denied_total", "Requests to the API by users that may not use it."),
		reloads:        vec("reloads_total", "Reloads of the configuration.", "result"),
		deviceChanges:  vec("device_changes_total", "What happened to RDMA devices of the kernel: gone, back, port_active, port_down, gid_table.", "device", "change"),
		deviceRefusals: counter("device_refusals_total", "Connections that were plain TCP because an RDMA device had no memory, queue pair or other resource for them."),
		pauses:         vec("diversion_pauses_total", "Pauses of a pod's diversion, for all or for one client (BUDGET_SOURCE), because a budget was nearly used up.", "reason"),
		pendingWaits:   counter("pending_waits_total", "Connections that waited because the pod had all its pending places in use."),
		totals:         totals{reasons: map[agentapi.Code]uint64{}},
	}
	m.begin()
	m.sums = sums{look: look, sum: m.sum}
	m.registry.MustRegister(m.conns, m.fallbacks, m.resets, m.ended, m.setup, m.malformed, m.failures, m.trespasses, m.acceptErrors, m.undiverted, m.renewErrors,
		m.podErrors, m.apiDenied, m.reloads, m.deviceChanges, m.deviceRefusals, m.pauses, m.pendingWaits, &m.sums,
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return m
}

// begin makes the series that alerts ask for their increase: one that begins with its first event does not
// increase by it.
func (m *metrics) begin() {
	for _, d := range []agentapi.Direction{agentapi.Outbound, agentapi.Inbound} {
		for _, mode := range []smcr.Mode{smcr.ModeSMCR, smcr.ModeTCP} {
			m.conns.WithLabelValues(string(d), mode.String())
		}
	}
	m.resets.WithLabelValues(string(agentapi.CodeGroupLost))
	m.reloads.WithLabelValues(reloadDone)
	m.reloads.WithLabelValues(reloadRefused)
}

func (m *metrics) opened(d agentapi.Direction, mode smcr.Mode) {
	m.conns.WithLabelValues(string(d), mode.String()).Inc()
	m.mu.Lock()
	defer m.mu.Unlock()
	if mode == smcr.ModeSMCR {
		m.totals.connsSMCR++
	} else {
		m.totals.connsTCP++
	}
}

func (m *metrics) relayed(mode smcr.Mode, bytes uint64) {
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

// sums collects the metrics that are computed at each scrape.
type sums struct {
	look func() gauges
	sum  func() totals

	mu        sync.Mutex // guards what is below
	bytesSMCR uint64     // at the last scrape
}

// carried is the counter of bytes on SMC-R. A session that ends during a scrape is among neither the ended ones, which are summed
// first, nor the live ones: the counter stands still until the next scrape, and must not go back, or Prometheus takes
// it for a restart.
func (s *sums) carried(ended, live uint64) uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.bytesSMCR = max(s.bytesSMCR, ended+live)
	return s.bytesSMCR
}

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc(prometheus.BuildFQName(namespace, "", name), help, labels, nil)
}

// Describe implements prometheus.Collector.
func (s *sums) Describe(ch chan<- *prometheus.Desc) { prometheus.DescribeByCollect(s, ch) }

// Collect implements prometheus.Collector.
func (s *sums) Collect(ch chan<- prometheus.Metric) {
	t := s.sum() // before the live ones: who ends between the two is in neither, and not in both
	g := s.look()
	gauge := func(d *prometheus.Desc, v int, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, float64(v), labels...)
	}
	conns := desc("connections", "Connections that the agent carries now.", "mode")
	gauge(conns, g.sessionsSMCR, smcr.ModeSMCR.String())
	gauge(conns, g.sessionsTCP, smcr.ModeTCP.String())
	bytes := desc("relayed_bytes_total", "Bytes of connections, both directions together, by what carried them; TCP: of ended ones.", "mode")
	counter := func(v uint64, mode smcr.Mode) {
		ch <- prometheus.MustNewConstMetric(bytes, prometheus.CounterValue, float64(v), mode.String())
	}
	counter(s.carried(t.bytesSMCR, g.bytesSMCR), smcr.ModeSMCR)
	counter(t.bytesTCP, smcr.ModeTCP)
	groups := desc("link_groups", "SMC-R link groups, by how many RNICs they can lose.", "redundancy")
	for _, r := range redundancies {
		gauge(groups, g.groups[r], r)
	}
	gauge(desc("degraded_link_groups", "SMC-R link groups that could lose any one RNIC before, and cannot now."), g.degraded)
	gauge(desc("registered_memory_bytes", "Memory registered for RDMA."), g.budget.MemoryUsedBytes)
	gauge(desc("budget_memory_bytes", "Memory that may be registered for RDMA."), g.budget.MemoryBytes)
	gauge(desc("budget_connections", "Connections on SMC-R that the node may have."), g.budget.Conns)
	gauge(desc("relays", "Connections that the agent carries as plain TCP."), g.budget.RelaysUsed)
	gauge(desc("budget_relays", "Connections that the agent may carry as plain TCP."), g.budget.Relays)
	gauge(desc("pending_connections", "Connections for which SMC-R or plain TCP is not decided yet."), g.budget.PendingUsed)
	gauge(desc("budget_pending_connections", "Connections for which that may be undecided."), g.budget.Pending)
	gauge(desc("socket_buffer_bytes", "Memory that the kernel may need for the sockets of carried connections."), g.budget.SocketUsedBytes)
	gauge(desc("budget_socket_buffer_bytes", "Memory that it may need before connections go directly."), g.budget.SocketBytes)
	gauge(desc("paused_pods", "Attached pods none of whose new connections are diverted for now, because a budget is nearly used up."), g.paused)
	up := desc("device_up", "Whether an RDMA device is there and its port active.", "device")
	for name, v := range g.devicesUp {
		gauge(up, v, name)
	}
	unsent := desc("device_send_errors_total", "Sends of a software device that the kernel refused: no route, or larger than the MTU of the interface.", "device")
	for name, v := range g.unsent {
		ch <- prometheus.MustNewConstMetric(unsent, prometheus.CounterValue, float64(v), name)
	}
	filtered := 0
	if g.wire.State == agentapi.WireFiltered {
		filtered = 1
	}
	gauge(desc("wire_filtered", "Whether RoCE packets are taken from known addresses only."), filtered)
	dropped := desc("wire_dropped_packets_total", "RoCE packets of strangers, or by wrong interfaces, that were dropped.", "reason")
	for _, why := range linux.WireReasons() {
		ch <- prometheus.MustNewConstMetric(dropped, prometheus.CounterValue, float64(g.wire.Dropped[why.String()]), why.String())
	}
	verdicts := desc("syn_verdicts_total", "SYNs of pods that went through the agent's queue, by what became of them; TCP may repeat one.", "verdict")
	for d, n := range g.held.Verdicts {
		ch <- prometheus.MustNewConstMetric(verdicts, prometheus.CounterValue, float64(n), synqueue.Decision(d).String())
	}
	unheld := desc("syns_unheld_total", "SYNs of pods for which the agent had no room, or found no answer in time.", "reason")
	ch <- prometheus.MustNewConstMetric(unheld, prometheus.CounterValue, float64(g.held.Full), "full")
	ch <- prometheus.MustNewConstMetric(unheld, prometheus.CounterValue, float64(g.held.Late), "late")
	ch <- prometheus.MustNewConstMetric(unheld, prometheus.CounterValue, float64(g.held.Overrun), "overrun")
	pods := desc("pods", "Attached pods.", "state")
	gauge(pods, g.ready, agentapi.StateReady)
	gauge(pods, g.idle, agentapi.StateIdle)
	gauge(pods, g.failed, agentapi.StateFailed)
	gauge(desc("meshed_pods", "Ready pods in which another program redirects connections, or has rules for the owner, the mark or the tracking of packets."), g.meshed)
}
