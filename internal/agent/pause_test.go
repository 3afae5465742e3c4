// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/linux"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
)

// TestProxy_pauses: the connections of a pod that uses up its relays and pending reservations are not diverted
// for a while, and all answers of the API say so. Connections that were diverted before wait, and are carried
// when others end, as are new ones after the pause.
func TestProxy_pauses(t *testing.T) {
	for _, tt := range []struct {
		name, policies string
		// selections and ports that are diverted during the pause
		wantOutbound, wantInbound int
	}{
		{"prefer", preferAll, 0, 0},
		{"another policy requires", "policies:\n- {name: all, ports: [1-65534]}\n- {name: must, mode: Required, ports: [65535]}\n", 2, 1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b := newBench(t, "  budgets: {pod: {connections: 0, relays: 32, pending: 32}}\n  negativeCacheTTL: 0s\n", tt.policies)
			p := b.attach("a", 1)
			p.dst = b.server()
			b.start()
			var before int
			p.redir.look(func() { before = len(p.redir.cfg.Outbound) })
			var carried, waiting []*net.TCPConn
			for i := range 100 { // one after the other, so that none is pending long
				c := b.dial(p, 0)
				value(c.Write([]byte("x")))(t)
				if i < 2*32 { // these take the pending reservations then
					value(c.Read(make([]byte, 1)))(t)
					carried = append(carried, c)
				} else {
					waiting = append(waiting, c)
				}
			}
			eventually(t, func() string {
				if s := b.status(); s.NodeBudget.RelaysUsed != 32 || s.NodeBudget.PendingUsed != 32 || s.Conns.Reset != 0 || s.Conns.Live != 64 {
					return fmt.Sprintf("%+v, %+v", s.NodeBudget, s.Conns)
				}
				return ""
			})
			eventually(t, func() string {
				var outbound, inbound int
				p.redir.look(func() { outbound, inbound = len(p.redir.cfg.Outbound), len(p.redir.cfg.Inbound) })
				if outbound != tt.wantOutbound || inbound != tt.wantInbound {
					return fmt.Sprintf("%d destinations and %d ports are diverted", outbound, inbound)
				}
				return ""
			})
			if x, s := b.attachment("a"), b.status(); x.Paused != agentapi.CodeBudgetRelays || s.Pods.Paused != 1 || x.Budget.RelaysUsed != 32 || x.State != agentapi.StateReady {
				t.Errorf("attachment %+v, pods %+v", x, s.Pods)
			}
			if e := value(b.client.Explain(t.Context(), "test/a", "127.0.0.1:5"))(t); e.Code != agentapi.CodeBudgetRelays {
				t.Errorf("explanation %+v", e)
			}
			for _, line := range []string{"kube_smcr_paused_pods 1", "kube_smcr_relays 32", `kube_smcr_diversion_pauses_total{reason="BUDGET_RELAYS"} 1`} {
				if _, text := b.get(agentapi.PathMetrics); !strings.Contains(text, line+"\n") {
					t.Errorf("metrics do not have %s", line)
				}
			}
			for _, c := range carried {
				must(t, c.Close())
			}
			for i, c := range waiting {
				if _, err := c.Read(make([]byte, 1)); err != nil {
					t.Fatalf("connection %d of those that waited: %v", i, err)
				}
				must(t, c.Close())
			}
			eventually(t, func() string {
				var after int
				p.redir.look(func() { after = len(p.redir.cfg.Outbound) })
				if after != before || b.attachment("a").Paused != "" {
					return fmt.Sprintf("%d destinations are diverted, %d before", after, before)
				}
				return ""
			})
		})
	}
}

// TestProxy_greedyClient: a client with most of a pod's relays or pending reservations is no longer diverted,
// and all answers of the API say so. The pod's diversion does not pause, and another client is carried.
// Connections of the greedy client that come all the same are reset at three quarters of the pod's budget.
func TestProxy_greedyClient(t *testing.T) {
	for _, tt := range []struct {
		name, policies string
		wantAlways     []linux.PortRange
		wantReset      agentapi.Code
	}{
		{"prefer", preferAll, nil, agentapi.CodeBudgetSource},
		{"some ports required", "policies:\n- {name: all, ports: [1-65534]}\n- {name: must, mode: Required, ports: [65535]}\n", []linux.PortRange{{First: 65535, Last: 65535}}, agentapi.CodeBudgetSource},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b := newBench(t, "  budgets: {pod: {relays: 64, pending: 64}}\n", tt.policies)
			b.stack.set(smcr.ModeTCP, clc.ReasonNoDev, nil)
			p := b.attach("a", 1)
			p.app = b.server()
			b.start()
			dial := func(last byte) (*net.TCPConn, error) {
				d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, last)}}
				c, err := d.DialContext(t.Context(), "tcp", b.agentPort(p, 1).String())
				if err != nil {
					return nil, err
				}
				t.Cleanup(func() { _ = c.Close() })
				return c.(*net.TCPConn), c.SetDeadline(time.Now().Add(waitLimit))
			}
			var carried []*net.TCPConn
			carry := func(last byte, n int) {
				t.Helper()
				for range n {
					c := value(dial(last))(t)
					ask(t, c)
					answered(t, c)
					carried = append(carried, c)
				}
			}
			carry(7, 48)
			eventually(t, func() string {
				var except []netip.Addr
				var always []linux.PortRange
				p.redir.look(func() { except, always = p.redir.cfg.InboundExcept, p.redir.cfg.InboundAlways })
				if len(except) != 1 || except[0] != netip.MustParseAddr("127.0.0.7") || !slices.Equal(always, tt.wantAlways) {
					return fmt.Sprintf("not diverted: %v, but for ports %v", except, always)
				}
				return ""
			})
			if late, err := dial(7); err == nil {
				wantReset(t, late)
			} else if !errors.Is(err, syscall.ECONNRESET) { // the reset came before connect() returned
				t.Error(err)
			}
			carry(8, 4)
			s := b.status()
			if s.Pods.Paused != 0 || s.Conns.Reset != 1 {
				t.Errorf("pods %+v, conns %+v", s.Pods, s.Conns)
			}
			if x := b.attachment("a"); len(x.GreedySources) != 1 || x.Paused != "" {
				t.Errorf("attachment %+v", x)
			}
			for _, line := range []string{`kube_smcr_diversion_pauses_total{reason="BUDGET_SOURCE"} 1`, fmt.Sprintf("kube_smcr_resets_total{reason=%q} 1", tt.wantReset)} {
				if _, text := b.get(agentapi.PathMetrics); !strings.Contains(text, line+"\n") {
					t.Errorf("metrics do not have %s", line)
				}
			}
			if e := value(b.client.Explain(t.Context(), "127.0.0.7", "127.0.0.1:5"))(t); e.Code != agentapi.CodeBudgetSource {
				t.Errorf("explanation %+v", e)
			}
			for _, c := range carried {
				must(t, c.Close())
			}
			eventually(t, func() string {
				if x := b.attachment("a"); len(x.GreedySources) != 0 {
					return fmt.Sprintf("attachment %+v", x)
				}
				return ""
			})
			carry(7, 1)
		})
	}
}
