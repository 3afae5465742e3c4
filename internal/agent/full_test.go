// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"testing"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/config"
)

// TestFullBudget: explain names the budget that is full, how full it is, and what raises it.
func TestFullBudget(t *testing.T) {
	pod := config.Pod{Namespace: "shop", Name: "web-0"}
	inCluster := func(policy string) *config.Node {
		return &config.Node{Name: "n1", Pods: map[config.PodName]config.PodConfig{
			{Namespace: "shop", Name: "web-0"}: {Policies: []config.Policy{{Name: policy}}},
		}}
	}
	const MiB = 1 << 20
	for _, tt := range []struct {
		name   string
		code   agentapi.Code
		detail string
		node   *config.Node
		shared bool
		want   string // "": none
		field  string
	}{
		{
			name: "memory of the pod, by a policy", code: agentapi.CodeBudgetMemory, detail: podFull, node: inCluster("cache"),
			want: "memory of pod shop/web-0: 3.0 MiB of 4.0 MiB used now", field: "spec.budget.memory of SMCRPolicy shop/cache, up to agent.budgets.podMax.memory of the chart",
		},
		{
			name: "memory of the pod, without a policy", code: agentapi.CodeBudgetMemory, node: inCluster(config.DefaultPolicy),
			want:  "memory of pod shop/web-0: 3.0 MiB of 4.0 MiB used now",
			field: "agent.budgets.pod.memory of the chart, or spec.budget.memory of an SMCRPolicy that selects the pod",
		},
		{
			name: "memory of pods that share a stack", code: agentapi.CodeBudgetMemory, node: inCluster("cache"), shared: true,
			want:  "memory of the pods of namespace shop together: 1.0 MiB of 2.0 MiB used now",
			field: "spec.budget.memory of SMCRPolicy shop/cache, up to agent.budgets.podMax.memory of the chart",
		},
		{
			name: "memory of the node, which was full then", code: agentapi.CodeBudgetMemory, detail: nodeFull, node: inCluster("cache"),
			want: "memory of node n1: 3.0 MiB of 64.0 MiB used now, and 4.0 MiB kept for other pods", field: "agent.budgets.node.memory of the chart",
		},
		{
			name: "connections of the node, which is full now", code: agentapi.CodeBudgetConns, detail: podFull, node: inCluster("cache"),
			want: "connections of node n1: 8 of 10 used now, and 2 kept for other pods", field: "agent.budgets.node.connections of the chart",
		},
		{
			name: "relays, from a file", code: agentapi.CodeBudgetRelays, node: &config.Node{Name: "n1"},
			want: "relays of pod shop/web-0: 0 of 7 used now", field: "node.budgets.pod.relays of the agent's configuration file",
		},
		{name: "pending", code: agentapi.CodeBudgetPending, node: inCluster("cache"), want: "pending of pod shop/web-0: 0 of 5 used now", field: "agent.budgets.pod.pending of the chart"},
		{name: "sockets", code: agentapi.CodeBudgetSockets, node: inCluster("cache"), want: "sockets of pod shop/web-0: 0.0 MiB of 1.0 MiB used now", field: "agent.budgets.pod.sockets of the chart"},
		{name: "no budget", code: agentapi.CodeMesh, node: inCluster("cache")},
	} {
		t.Run(tt.name, func(t *testing.T) {
			l := newLedger(config.Budget{MemoryBytes: 64 * MiB, Conns: 10, Relays: 100, Pending: 100, SocketBytes: 64 * MiB})
			px := &proxy{account: l.open(config.Budget{MemoryBytes: 4 * MiB, Conns: 100, Relays: 7, Pending: 5, SocketBytes: MiB})}
			px.memory = px.account
			l.open(config.Budget{MemoryBytes: 4 * MiB, Conns: 100}) // another pod, of whose shares nobody takes anything
			if tt.shared {
				px.memory = l.openShared(2 * MiB)
				px.memory.join(1)
				px.memory.take(memory, MiB)
			} else {
				px.memory.take(memory, 3*MiB)
			}
			for range 20 {
				px.account.take(conns, 1)
			}
			got := px.fullBudget(tt.code, tt.detail, tt.node, pod)
			if (got != nil) != (tt.want != "") {
				t.Fatalf("budget %+v, want %q", got, tt.want)
			}
			if got != nil && (got.String() != tt.want || got.Field != tt.field) {
				t.Errorf("%q, raised by %q; want %q, %q", got, got.Field, tt.want, tt.field)
			}
		})
	}
}
