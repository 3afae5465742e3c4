// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/config"
)

// View looks at a running agent from its own process. It sees what the API
// shows. Its methods may be called by any goroutine, also after the agent ended.
type View struct{ a *agent }

// Status is the agent's status.
func (v View) Status() agentapi.Status {
	s, _ := v.a.apiStatus(nil) // it has no errors, as below
	return s
}

// Links are the link groups of all pods.
func (v View) Links() []agentapi.LinkGroup {
	l, _ := v.a.apiLinks(nil)
	return l.LinkGroups
}

// Attachments are the attached pods.
func (v View) Attachments() []agentapi.Attachment {
	l, _ := v.a.apiAttachments(nil)
	return l.Attachments
}

// Devices are the devices that pods can have for themselves.
func (v View) Devices() []agentapi.PodDevice {
	l, _ := v.a.apiDevices(nil)
	return l.Devices
}

// Decisions are the last decisions about connections, the latest first.
func (v View) Decisions() []agentapi.Decision { return v.a.decisions.list() }

// Applied is the configuration that all pods were last brought in line with; nil
// before the first time.
func (v View) Applied() *config.Node { return v.a.manager.applied.Load() }
