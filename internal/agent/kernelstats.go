// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/kernelpath"
	"github.com/smcr-io/kube-smcr/internal/linux"
	"github.com/smcr-io/kube-smcr/internal/smcnl"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
)

// kernelStats sums what the kernel counts in the namespaces of its pods. A namespace's counters are as old as
// itself and end with it, so what is counted is how much they grew while the agent had the pod.
type kernelStats struct {
	a *agent

	mu      sync.Mutex // guards what is below
	last    map[uint64]smcnl.Counters
	conns   map[kernelConnKind]uint64
	reasons map[agentapi.Code]uint64
}

// kernelConnKind are the labels of a sum.
type kernelConnKind struct {
	direction agentapi.Direction
	mode      smcr.Mode
}

// begin takes up a pod. What its kernel counted before was of another agent, or of nobody.
func (s *kernelStats) begin(k *kernelPod) {
	c, err := s.a.cfg.smc.counters(k.net)
	if errors.Is(err, errNoCounters) {
		return
	}
	if err != nil {
		k.log.Warn("connections of the pod on its kernel's SMC-R are not counted", "err", err)
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.last == nil {
		s.last = map[uint64]smcnl.Counters{}
		s.conns, s.reasons = map[kernelConnKind]uint64{}, map[agentapi.Code]uint64{}
	}
	s.last[k.net.id()] = c
}

// add counts what happened in a pod since the last time.
func (s *kernelStats) add(k *kernelPod) {
	s.mu.Lock()
	defer s.mu.Unlock()
	before, ok := s.last[k.net.id()]
	if !ok {
		return
	}
	c, err := s.a.cfg.smc.counters(k.net) // with the lock, so that none is older than the last
	switch {
	case errors.Is(err, linux.ErrClosed):
		return // the pod is just going, and counted
	case err != nil:
		k.log.Debug("counters of the pod's kernel's SMC-R not read", "err", err)
		return
	}
	s.last[k.net.id()] = c
	if isNew(&c, &before) { // the module was loaded anew
		before = smcnl.Counters{}
	}
	d := c.Sub(before)
	s.conns[kernelConnKind{agentapi.Outbound, smcr.ModeSMCR}] += d.ClientV1 + d.ClientV2
	s.conns[kernelConnKind{agentapi.Inbound, smcr.ModeSMCR}] += d.ServerV1 + d.ServerV2
	s.conns[kernelConnKind{agentapi.Outbound, smcr.ModeTCP}] += d.ClientFallbacks
	s.conns[kernelConnKind{agentapi.Inbound, smcr.ModeTCP}] += d.ServerFallbacks
	for f, n := range d.Fallbacks {
		s.reasons[agentapi.CodeOf(f.Reason)] += n
	}
}

// isNew reports whether a pod's counters began anew since before: one of them is less.
func isNew(c, before *smcnl.Counters) bool {
	return c.ClientV1 < before.ClientV1 || c.ClientV2 < before.ClientV2 || c.ServerV1 < before.ServerV1 || c.ServerV2 < before.ServerV2 ||
		c.ClientFallbacks < before.ClientFallbacks || c.ServerFallbacks < before.ServerFallbacks
}

// end counts a pod for the last time.
func (s *kernelStats) end(k *kernelPod) {
	s.add(k)
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.last, k.net.id())
}

// sum is the number of connections in a mode.
func (s *kernelStats) sum(mode smcr.Mode) (n uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for k, c := range s.conns {
		if k.mode == mode {
			n += c
		}
	}
	return n
}

// kernelSums counts the connections of pods' kernels, which it asks. The error says why some may be missing.
func (a *agent) kernelSums() (*agentapi.KernelSums, error) {
	var out agentapi.KernelSums
	var errs []error
	for _, p := range a.manager.snapshot() {
		if p.kernel == nil {
			continue
		}
		out.Pods++
		a.kernelStats.add(p.kernel)
		conns, err := a.cfg.smc.conns(p.kernel.net)
		if err != nil && !errors.Is(err, linux.ErrClosed) { // the pod is just going
			errs = append(errs, fmt.Errorf("connections of %v: %w", podOf(p.atts[0]), err))
		}
		for i := range conns {
			out.Live++
			if isOnSMCR(&conns[i]) {
				out.LiveSMCR++
			}
		}
	}
	out.TotalSMCR, out.TotalTCP = a.kernelStats.sum(smcr.ModeSMCR), a.kernelStats.sum(smcr.ModeTCP)
	if out == (agentapi.KernelSums{}) {
		return nil, errors.Join(errs...)
	}
	return &out, errors.Join(errs...)
}

// isOnSMCR tells whether a connection is on SMC-R, with its rendezvous done.
func isOnSMCR(c *kernelpath.Conn) bool { return c.Mode != smcnl.ModeTCP && c.State != smcnl.StateInit }

// Describe implements prometheus.Collector.
func (s *kernelStats) Describe(ch chan<- *prometheus.Desc) {
	conns, reasons := s.descs()
	ch <- conns
	ch <- reasons
}

func (*kernelStats) descs() (conns, reasons *prometheus.Desc) {
	return desc("kernel_connections_total", "Connections of SMC's sockets in pods whose kernel carries them.", "direction", "mode"),
		desc("kernel_fallbacks_total", "Connections of these that were plain TCP, by what the kernel says.", "reason")
}

// Collect implements prometheus.Collector.
func (s *kernelStats) Collect(ch chan<- prometheus.Metric) {
	for _, p := range s.a.manager.snapshot() {
		if p.kernel != nil {
			s.add(p.kernel)
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	conns, reasons := s.descs()
	for k, n := range s.conns {
		ch <- prometheus.MustNewConstMetric(conns, prometheus.CounterValue, float64(n), string(k.direction), k.mode.String())
	}
	for _, code := range slices.Sorted(maps.Keys(s.reasons)) {
		ch <- prometheus.MustNewConstMetric(reasons, prometheus.CounterValue, float64(s.reasons[code]), string(code))
	}
}
