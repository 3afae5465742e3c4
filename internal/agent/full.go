// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"fmt"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/config"
)

// budgetNames are the names of the budgets in configurations.
var budgetNames = [numResources]string{memory: "memory", conns: "connections", relays: "relays", pending: "pending", buffers: "sockets"}

// resourceOf is the resource whose budget a reason is about.
func resourceOf(c agentapi.Code) (r resource, ok bool) {
	switch c {
	case agentapi.CodeBudgetMemory:
		return memory, true
	case agentapi.CodeBudgetConns:
		return conns, true
	case agentapi.CodeBudgetRelays, agentapi.CodeBudgetSource:
		return relays, true
	case agentapi.CodeBudgetPending:
		return pending, true
	case agentapi.CodeBudgetSockets:
		return buffers, true
	}
	return 0, false
}

// besidesRaising is what else than raising the budget helps.
func besidesRaising(c agentapi.Code) string {
	switch c {
	case agentapi.CodeBudgetMemory:
		return "use smaller rmbe and sendBuffer (buffers in the SMCRPolicy)"
	case agentapi.CodeBudgetConns:
		return "narrow the policies"
	case agentapi.CodeBudgetPending:
		return "find out who opens connections and sends nothing"
	case agentapi.CodeBudgetSource:
		return "find out why the client's connections are not on SMC-R"
	}
	return "narrow the policies to peers that have SMC-R"
}

// bound is how a resource is bounded for a pod now: by the pod's own budget, or by the node's.
type bound struct {
	node        bool
	used, limit int
	kept        int // of the node's, for other pods
}

// bound says which of the two budgets bounds a resource for the account now. ofNode says that it
// was the node's when the resource was refused: others may have given it back since.
func (a *account) bound(r resource, ofNode bool) bound {
	l := a.ledger
	l.mu.Lock()
	defer l.mu.Unlock()
	if !ofNode && a.room(r) >= a.limit[r]-a.used[r] {
		return bound{used: a.used[r], limit: a.limit[r]}
	}
	return bound{node: true, used: l.used[r], limit: l.limit[r], kept: l.kept[r] - a.keeps(int(r))}
}

// fullBudget says which budget keeps connections of a pod off SMC-R, how full it is now, and what
// raises it. It is nil if the reason is no budget. detail is that of the last decision.
func (px *proxy) fullBudget(code agentapi.Code, detail string, n *config.Node, pod config.Pod) *agentapi.FullBudget {
	r, ok := resourceOf(code)
	if !ok {
		return nil
	}
	a, whose := px.account, "pod "+pod.String()
	if r == memory && px.memory != px.account {
		a, whose = px.memory, "the pods of namespace "+pod.Namespace+" together"
	}
	b := a.bound(r, detail == nodeFull)
	name := budgetNames[r]
	out := &agentapi.FullBudget{Budget: name, Of: whose, Used: b.used, Limit: b.limit, KeptForOthers: b.kept, Bytes: r == memory || r == buffers}
	if b.node {
		out.Of, out.Field = "node "+n.Name, field("node", name, n)
		return out
	}
	out.Field = field("pod", name, n)
	if policies := n.PoliciesFor(pod); n.InCluster() && (r == memory || r == conns) && len(policies) > 0 {
		if policies[0].Name == config.DefaultPolicy {
			out.Field += fmt.Sprintf(", or spec.budget.%s of an SMCRPolicy that selects the pod", name)
		} else {
			out.Field = fmt.Sprintf("spec.budget.%s of SMCRPolicy %s/%s, up to %s", name, pod.Namespace, policies[0].Name, field("podMax", name, n))
		}
	}
	return out
}

// field is where the agents' configuration has a budget.
func field(whose, name string, n *config.Node) string {
	return setting(fmt.Sprintf("budgets.%s.%s", whose, name), n)
}

// setting is where a setting of the agents is: the chart has it by the same name as the file has it of the node.
func setting(name string, n *config.Node) string {
	if n.InCluster() {
		return fmt.Sprintf("agent.%s of the chart", name)
	}
	return fmt.Sprintf("node.%s of the agent's configuration file", name)
}
