// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/config"
)

// View gives access to a running agent. Its methods return what the API serves by HTTP. Any
// goroutine may call them, even after the agent has ended.
type View struct{ a *agent }

// Decisions are the last decisions about connections, the latest first.
func (v View) Decisions() []agentapi.Decision { return v.a.decisions.list() }

// Applied is the configuration of the last round that was done; nil before the first.
func (v View) Applied() *config.Node { return v.a.manager.applied.Load() }

// CountRefused counts, among the reloads, a changed configuration that the caller did not hand to the agent,
// because the agent would refuse it.
func (v View) CountRefused() { v.a.metrics.reloads.WithLabelValues(reloadRefused).Inc() }
