// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"
)

// An agent whose metrics port another program has carries connections and says so; it serves
// metrics as soon as it can.
func TestMetricsPortInUse(t *testing.T) {
	other := value(net.Listen("tcp", "127.0.0.1:0"))(t)
	defer other.Close()
	b := newBench(t, "", preferAll)
	b.cfg.ableEvery = 10 * time.Millisecond
	b.cfg.Node.MetricsAddress = addrPort(other.Addr())
	p := b.attach("a", 1)
	p.dst = b.server()
	b.start()
	exchange(t, b.dial(p, 0), 10)
	s := b.status()
	want := "no metrics: listen tcp " + other.Addr().String() + ": bind: address already in use"
	if !s.Metrics || !strings.HasPrefix(s.NoMetrics, want) || !strings.Contains(strings.Join(s.Problems, "\n"), want) {
		t.Errorf("metrics %v, %q, problems %q; want %q", s.Metrics, s.NoMetrics, s.Problems, want)
	}

	must(t, other.Close())
	eventually(t, func() string {
		resp, err := http.Get("http://" + other.Addr().String() + "/metrics") //nolint:noctx // a test
		if err != nil {
			return err.Error()
		}
		defer resp.Body.Close()
		if text, err := io.ReadAll(resp.Body); err != nil || !strings.Contains(string(text), "kube_smcr_connections_total") {
			return "no metrics there"
		}
		return b.status().NoMetrics
	})
}

// A port that is not open yet is closed at once, and opens no more.
func TestMetricsPort_close(t *testing.T) {
	other := value(net.Listen("tcp", "127.0.0.1:0"))(t)
	p := openMetricsPort(t.Context(), addrPort(other.Addr()), time.Hour, func(string) {})
	accepted := make(chan error)
	go func() {
		_, err := p.Accept()
		accepted <- err
	}()
	must(t, p.Close())
	if err := <-accepted; err == nil {
		t.Error("Accept of a closed port has a connection")
	}
	must(t, other.Close())
	if p.open() != nil {
		t.Error("a closed port was opened")
	}
	if p.Addr().String() != other.Addr().String() {
		t.Errorf("address %v, want %v", p.Addr(), other.Addr())
	}
}
