// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"fmt"
	"maps"
	"testing"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/smcnl"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
)

// counts is what was counted of some connections: by the kernel of node 1, by the
// agent of a node at one end of all of them, and reasons also by the agent of the server.
type counts struct {
	kernel  smcnl.Counters
	conns   agentapi.ConnSums
	reasons map[agentapi.Code]uint64
}

func (s *suite) counts(t *testing.T, agent *node) counts {
	t.Helper()
	st, err := agent.status(t)
	if err != nil {
		t.Fatal(err)
	}
	reasons := map[agentapi.Code]uint64{}
	maps.Copy(reasons, st.Reasons)
	if server := s.server.node; server != agent {
		st, err := server.status(t)
		if err != nil {
			t.Fatal(err)
		}
		for code, n := range st.Reasons {
			reasons[code] += n
		}
	}
	return counts{s.nodes[1].counters(t), st.Conns, reasons}
}

// sub is what was counted since before, of sums.
func (c counts) sub(before counts) counts {
	d := counts{kernel: c.kernel.Sub(before.kernel), conns: c.conns, reasons: map[agentapi.Code]uint64{}}
	d.conns.TotalSMCR -= before.conns.TotalSMCR
	d.conns.TotalTCP -= before.conns.TotalTCP
	for code, n := range c.reasons {
		if n -= before.reasons[code]; n > 0 {
			d.reasons[code] = n
		}
	}
	return d
}

// late reports whether connections were not on SMC-R for one reason only: that a
// message of their rendezvous came later than the other end waits for it.
func (c counts) late() bool {
	// A kernel breaks a connection whose CLC message does not come in time.
	n := c.kernel.ClientErrors + c.kernel.ServerErrors
	for f, times := range c.kernel.Fallbacks {
		switch f.Reason {
		case clc.ReasonTimeoutCL, clc.ReasonTimeoutAL:
			n += times
		case clc.ReasonPeerDecl, clc.ReasonPeerNoSMC: // the agent has the reason of the former, and after it goes directly for a while
		default:
			return false
		}
	}
	for code, times := range c.reasons {
		switch code {
		case agentapi.CodeOf(clc.ReasonTimeoutCL), agentapi.CodeOf(clc.ReasonTimeoutAL), agentapi.CodeRendezvous, agentapi.CodeBacklog:
			n += times
		case agentapi.CodeOf(clc.ReasonInternal): // a server's agent says so when it has BACKLOG
		default:
			return false
		}
	}
	return n > 0
}

// counted runs traffic and judges what was counted of it. If all that is wrong is
// that rendezvous took too long, as on a machine with much other work, it does so
// again, twice at most.
func (s *suite) counted(t *testing.T, agent *node, traffic func() error, judge func(counts) error) {
	t.Helper()
	const most = 3
	for n := 1; ; n++ {
		before := s.counts(t, agent)
		err := traffic()
		got := s.counts(t, agent).sub(before)
		err = errors.Join(err, judge(got))
		switch {
		case err == nil:
			return
		case n == most || !got.late():
			t.Errorf("%v\nin all %+v\n%s", err, got, agent.log(t))
			return
		}
		t.Logf("run %d of %d, and again, because rendezvous took too long: %v\nin all %+v", n, most, err, got)
	}
}

// get gets nginx's file by a command line before curl's, and checks it.
func (n *node) get(t *testing.T, by, url, want string) error {
	t.Helper()
	got, err := n.try(t, fmt.Sprintf("set -o pipefail; %s curl -sS %s/4M | sha256sum", by, url))
	if err == nil && got != want {
		t.Errorf("nginx sent %s, want %s", got, want)
	}
	return err
}

func TestLate(t *testing.T) {
	fallbacks := func(reasons ...clc.Reason) smcnl.Counters {
		c := smcnl.Counters{Fallbacks: map[smcnl.Fallback]uint64{}}
		for _, r := range reasons {
			c.Fallbacks[smcnl.Fallback{Side: smcnl.Client, Reason: r}] = 1
		}
		return c
	}
	why := func(codes ...agentapi.Code) map[agentapi.Code]uint64 {
		m := map[agentapi.Code]uint64{}
		for _, c := range codes {
			m[c] = 1
		}
		return m
	}
	timeout := agentapi.CodeOf(clc.ReasonTimeoutCL)
	for _, c := range []struct {
		name string
		counts
		want bool
	}{
		{"all are on SMC-R", counts{}, false},
		{"the kernel timed out", counts{kernel: fallbacks(clc.ReasonTimeoutAL), reasons: why(timeout)}, true},
		{"the kernel broke a connection", counts{kernel: smcnl.Counters{ClientErrors: 1}}, true},
		{"the agent timed out", counts{kernel: fallbacks(clc.ReasonPeerDecl, clc.ReasonPeerNoSMC), reasons: why(timeout)}, true},
		{"the agent broke a connection", counts{reasons: why(agentapi.CodeRendezvous)}, true},
		{"the application was late", counts{reasons: why(agentapi.CodeBacklog, agentapi.CodeOf(clc.ReasonInternal))}, true},
		{"an internal error", counts{reasons: why(agentapi.CodeOf(clc.ReasonInternal))}, false},
		{"the agent declined", counts{kernel: fallbacks(clc.ReasonPeerDecl)}, false},
		{"no option", counts{kernel: fallbacks(clc.ReasonPeerNoSMC)}, false},
		{"another reason of the kernel, too", counts{kernel: fallbacks(clc.ReasonTimeoutCL, clc.ReasonMem)}, false},
		{"another reason of the agent, too", counts{reasons: why(timeout, agentapi.CodeBudgetMemory)}, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got := c.late(); got != c.want {
				t.Errorf("late is %t", got)
			}
		})
	}
}

// Sums are since before, and what is so now is as it is.
func TestCountsSub(t *testing.T) {
	before := counts{conns: agentapi.ConnSums{Live: 1, TotalSMCR: 3, TotalTCP: 1}, reasons: map[agentapi.Code]uint64{agentapi.CodeMesh: 2, agentapi.CodeLate: 1}}
	after := counts{conns: agentapi.ConnSums{Live: 2, TotalSMCR: 5, TotalTCP: 1}, reasons: map[agentapi.Code]uint64{agentapi.CodeMesh: 2, agentapi.CodeLate: 4}}
	got := after.sub(before)
	if want := (agentapi.ConnSums{Live: 2, TotalSMCR: 2}); got.conns != want || len(got.reasons) != 1 || got.reasons[agentapi.CodeLate] != 3 {
		t.Errorf("got %+v", got)
	}
}
