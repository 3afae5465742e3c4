// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"context"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"sync"
	"testing"
	"time"

	"k8s.io/client-go/rest"
)

// Proxy stands between a client and the API server, and does what networks and
// overloaded API servers do. It speaks plain HTTP to the client.
type Proxy struct {
	server   *httptest.Server
	upstream http.RoundTripper

	mu      sync.Mutex
	away    bool
	delay   time.Duration
	status  int // answers every request if not 0
	conns   map[net.Conn]bool
	writes  int
	cut     chan struct{} // closed to end the requests that are under way
	refused int
}

// NewProxy returns a proxy to the API server and how to connect through it. It
// ends with the test.
func (s *Shared) NewProxy(t testing.TB) (*Proxy, *rest.Config) {
	t.Helper()
	config := s.Config(t)
	target, err := url.Parse(config.Host)
	if err != nil {
		t.Fatalf("address of the API server: %v", err)
	}
	upstream, err := rest.TransportFor(config)
	if err != nil {
		t.Fatalf("connect to the API server: %v", err)
	}
	p := &Proxy{upstream: upstream, conns: map[net.Conn]bool{}, cut: make(chan struct{})}
	reverse := &httputil.ReverseProxy{
		Rewrite:       func(r *httputil.ProxyRequest) { r.SetURL(target) },
		Transport:     upstream,
		FlushInterval: -1, // watches
		ErrorHandler:  func(w http.ResponseWriter, _ *http.Request, _ error) { w.WriteHeader(http.StatusBadGateway) },
	}
	p.server = httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { p.serve(reverse, w, r) }))
	p.server.Config.ConnState = p.track
	p.server.Start()
	t.Cleanup(p.close)
	through := &rest.Config{Host: p.server.URL, QPS: config.QPS, Burst: config.Burst}
	return p, through
}

func (p *Proxy) serve(next http.Handler, w http.ResponseWriter, r *http.Request) {
	p.mu.Lock()
	away, delay, status, cut := p.away, p.delay, p.status, p.cut
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		p.writes++
	}
	if away {
		p.refused++
	}
	p.mu.Unlock()
	if away {
		panic(http.ErrAbortHandler) // closes the connection without an answer
	}
	if delay > 0 {
		select {
		case <-time.After(delay):
		case <-cut:
			panic(http.ErrAbortHandler)
		case <-r.Context().Done():
			return
		}
	}
	if status != 0 {
		w.WriteHeader(status)
		return
	}
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	done := make(chan struct{})
	defer close(done)
	go func() {
		select {
		case <-cut:
			cancel()
		case <-done:
		}
	}()
	next.ServeHTTP(w, r.WithContext(ctx))
}

func (p *Proxy) track(c net.Conn, state http.ConnState) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch state {
	case http.StateNew:
		p.conns[c] = true
	case http.StateClosed, http.StateHijacked:
		delete(p.conns, c)
	case http.StateActive, http.StateIdle:
	}
}

// TakeAway ends all connections and lets every new request end without an
// answer, until GiveBack.
func (p *Proxy) TakeAway() {
	p.mu.Lock()
	p.away = true
	close(p.cut)
	p.cut = make(chan struct{})
	var conns []net.Conn
	for c := range p.conns {
		conns = append(conns, c)
	}
	p.mu.Unlock()
	for _, c := range conns {
		c.Close() //nolint:errcheck // it is to be gone
	}
}

// GiveBack undoes TakeAway, Delay and Answer.
func (p *Proxy) GiveBack() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.away, p.delay, p.status = false, 0, 0
}

// Delay lets each new request wait.
func (p *Proxy) Delay(d time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.delay = d
}

// Answer answers each new request with an HTTP status, such as 500.
func (p *Proxy) Answer(status int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.status = status
}

// Writes returns how many requests so far were not for reading.
func (p *Proxy) Writes() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.writes
}

// Refused returns how many requests came while the server was away.
func (p *Proxy) Refused() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.refused
}

func (p *Proxy) close() {
	p.TakeAway()
	p.server.Close()
	if t, ok := p.upstream.(interface{ CloseIdleConnections() }); ok {
		t.CloseIdleConnections()
	}
}
