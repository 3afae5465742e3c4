// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"strings"
	"testing"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/kernelpath"
	"github.com/smcr-io/kube-smcr/internal/smcnl"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
)

// The metrics have what kernels counted while the agent had the pods, also of those that are gone.
func TestKernelStats(t *testing.T) {
	b, s := newKernelBench(t, kernelAll)
	old := smcnl.Counters{ClientV2: 1000, ServerFallbacks: 1000, Fallbacks: map[smcnl.Fallback]uint64{{Side: smcnl.Server, Reason: clc.ReasonNoDev}: 1000}}
	count := func(inode uint64, c smcnl.Counters) {
		s.change(func() {
			if s.witness.count == nil {
				s.witness.count = map[uint64]smcnl.Counters{}
			}
			s.witness.count[inode] = c
		})
	}
	expect := func(when string, want ...string) {
		t.Helper()
		text := value(b.client.Metrics(t.Context()))(t)
		for _, line := range want {
			if !strings.Contains(text, "\nkube_smcr_kernel_"+line+"\n") {
				t.Errorf("%s: no %s", when, line)
			}
		}
	}
	count(1, old)
	b.attach("a", 1)
	b.attach("b", 2)
	b.start()
	expect("nothing happened here yet", `connections_total{direction="outbound",mode="SMC-R"} 0`)
	now := old
	now.ClientV2, now.ServerFallbacks = 1003, 1002
	now.Fallbacks = map[smcnl.Fallback]uint64{{Side: smcnl.Server, Reason: clc.ReasonNoDev}: 1001, {Side: smcnl.Server, Reason: clc.ReasonPeerNoSMC}: 1}
	count(1, now)
	count(2, smcnl.Counters{ClientV1: 1, ServerV1: 2, ServerV2: 3, ClientFallbacks: 4})
	for range 2 {
		expect("of two pods",
			`connections_total{direction="outbound",mode="SMC-R"} 4`, `connections_total{direction="inbound",mode="SMC-R"} 5`,
			`connections_total{direction="outbound",mode="TCP"} 4`, `connections_total{direction="inbound",mode="TCP"} 2`,
			`fallbacks_total{reason="NOSMCDEV"} 1`, `fallbacks_total{reason="PEERNOSMC"} 1`)
	}
	s.change(func() {
		connecting, plain := kernelConn(3, smcnl.Client, "127.0.0.1:40001", "198.51.100.1:80"), kernelConn(4, smcnl.Client, "127.0.0.1:40002", "198.51.100.1:80")
		connecting.State, plain.Mode = smcnl.StateInit, smcnl.ModeTCP
		s.witness.all = map[uint64][]kernelpath.Conn{1: {kernelConn(2, smcnl.Server, "127.0.0.1:80", "198.51.100.1:40000"), connecting}, 2: {plain}}
	})
	st := b.status()
	sums := st.Conns.Kernel
	if want := (agentapi.KernelSums{Pods: 2, Live: 3, LiveSMCR: 1, TotalSMCR: 9, TotalTCP: 6}); sums == nil || *sums != want || st.Conns.Live != 0 {
		t.Errorf("status %+v of %+v, want %+v", sums, st.Conns, want)
	}
	s.change(func() { s.witness.failed = errors.New("no module smc_diag") })
	if st := b.status(); !strings.Contains(strings.Join(st.Problems, " "), "connections of test/a: no module smc_diag") {
		t.Errorf("problems %q", st.Problems)
	}
	s.change(func() { s.witness.failed = nil })
	count(1, smcnl.Counters{ClientV2: 5}) // the module was loaded anew
	expect("counters went back", `connections_total{direction="outbound",mode="SMC-R"} 9`, `connections_total{direction="inbound",mode="TCP"} 2`)
	count(1, smcnl.Counters{ServerFallbacks: 5}) // and once more, with as many connections since
	expect("counters went back and on", `connections_total{direction="outbound",mode="SMC-R"} 9`, `connections_total{direction="inbound",mode="TCP"} 7`)
	count(2, smcnl.Counters{ClientV1: 1, ServerV1: 2, ServerV2: 7, ClientFallbacks: 4})
	must(t, b.store.Delete("b", "eth0"))
	b.sync()
	expect("one of them is gone", `connections_total{direction="inbound",mode="SMC-R"} 9`)
}
