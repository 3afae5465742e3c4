// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import "github.com/prometheus/client_golang/prometheus"

// Metrics are the Prometheus metrics of a plugin.
type Metrics struct {
	devices       *prometheus.GaugeVec // resource, health
	registered    *prometheus.GaugeVec // resource
	registrations *prometheus.CounterVec
	allocations   *prometheus.CounterVec // resource, result
}

const (
	resultDone    = "done"
	resultRefused = "refused"
)

// NewMetrics makes the metrics. They keep their values when Run is called again.
func NewMetrics() *Metrics {
	const namespace = "kube_smcr"
	return &Metrics{
		devices: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Namespace: namespace, Name: "plugin_devices", Help: "Devices that kubelet was told of, by resource and health.",
		}, []string{"resource", "health"}),
		registered: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Namespace: namespace, Name: "plugin_registered", Help: "Whether kubelet watches the devices of a resource.",
		}, []string{"resource"}),
		registrations: prometheus.NewCounterVec(prometheus.CounterOpts{
			Namespace: namespace, Name: "plugin_registrations_total", Help: "Registrations of a resource with kubelet.",
		}, []string{"resource"}),
		allocations: prometheus.NewCounterVec(prometheus.CounterOpts{
			Namespace: namespace, Name: "plugin_allocations_total", Help: "Containers that asked for devices of a resource.",
		}, []string{"resource", "result"}),
	}
}

func (m *Metrics) offered(resource string, o offer) {
	healthy := 0
	for i := range o.devices {
		if o.devices[i].Why == "" {
			healthy++
		}
	}
	m.devices.WithLabelValues(resource, "healthy").Set(float64(healthy))
	m.devices.WithLabelValues(resource, "unhealthy").Set(float64(len(o.devices) - healthy))
}

// Describe implements prometheus.Collector.
func (m *Metrics) Describe(ch chan<- *prometheus.Desc) {
	m.devices.Describe(ch)
	m.registered.Describe(ch)
	m.registrations.Describe(ch)
	m.allocations.Describe(ch)
}

// Collect implements prometheus.Collector.
func (m *Metrics) Collect(ch chan<- prometheus.Metric) {
	m.devices.Collect(ch)
	m.registered.Collect(ch)
	m.registrations.Collect(ch)
	m.allocations.Collect(ch)
}
