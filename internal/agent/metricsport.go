// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"time"
)

// metricsPort listens on node.metricsAddress as soon as it can. Metrics never keep connections off
// SMC-R: while another program has the port, the agent says so, and tries again.
//
//	listenAPI        open fails: say it, agent runs
//	http.Server      Accept: open again every ableEvery until it succeeds, then Accept of the port
//	retire, the end  Close: ends the attempts and the port
type metricsPort struct {
	address netip.AddrPort
	retry   time.Duration
	tell    func(problem string) // "": metrics are served
	ctx     context.Context      //nolint:containedctx // net.Listener has none; Close ends it
	close   context.CancelFunc

	mu sync.Mutex   // guards ln
	ln net.Listener // nil: not open yet
}

// openMetricsPort opens the port if that is possible now. Close must be called.
func openMetricsPort(ctx context.Context, address netip.AddrPort, retry time.Duration, tell func(string)) *metricsPort {
	p := &metricsPort{address: address, retry: retry, tell: tell}
	p.ctx, p.close = context.WithCancel(context.WithoutCancel(ctx))
	p.open()
	return p
}

// open opens the port, and says so or why not.
func (p *metricsPort) open() net.Listener {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ln != nil {
		return p.ln
	}
	ln, err := (&net.ListenConfig{}).Listen(p.ctx, "tcp", p.address.String())
	if err != nil {
		if p.ctx.Err() == nil {
			p.tell(fmt.Sprintf("no metrics: %v: end the program that has the port (ss -ltnp shows it), or choose another metricsAddress", err))
		}
		return nil
	}
	if p.ctx.Err() != nil { // closed meanwhile
		_ = ln.Close()
		return nil
	}
	p.ln = ln
	p.tell("")
	return ln
}

// Accept implements net.Listener.
func (p *metricsPort) Accept() (net.Conn, error) {
	for {
		if ln := p.open(); ln != nil {
			return ln.Accept()
		}
		select {
		case <-p.ctx.Done():
			return nil, net.ErrClosed
		case <-time.After(p.retry):
		}
	}
}

// Close implements net.Listener.
func (p *metricsPort) Close() error {
	p.close()
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ln == nil {
		return nil
	}
	return p.ln.Close()
}

// Addr implements net.Listener.
func (p *metricsPort) Addr() net.Addr {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ln != nil {
		return p.ln.Addr()
	}
	return net.TCPAddrFromAddrPort(p.address)
}
