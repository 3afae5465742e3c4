// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"time"

	"github.com/smcr-io/kube-smcr/internal/agent/rnics"
	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/cni"
	"github.com/smcr-io/kube-smcr/internal/linux"
)

// podState is what the agent has done for a pod.
//
//	      set up            not wanted any more
//	new ---------> ready ---------------------> idle
//	 |  \            |                            |
//	 |   failed <-+  | devices, settings or       | wanted again: set up,
//	 |     |      |  | namespace changed:         | as a new pod
//	 |     +------+  v                            v
//	 |   tried again new                    ready or failed
//	 +--> idle: not wanted, and what an earlier agent left is removed, or diverts nothing
//
// With datapath Kernel a pod is in kernel where it is else in ready. From there it becomes new, or idle
// as long as it has sockets of SMC. With datapath KernelIfAvailable it is so, too, or unavailable is set.
type podState uint8

const (
	podNew    podState = iota // nothing yet
	podIdle                   // nothing is diverted, and nothing is to be done
	podReady                  // the pod has a proxy
	podFailed                 // the set-up failed, and will be tried again
	podKernel                 // the pod's kernel carries its connections
)

// String is the state's name in the API.
func (s podState) String() string {
	switch s {
	case podNew:
	case podIdle:
		return agentapi.StateIdle
	case podReady, podKernel:
		return agentapi.StateReady
	case podFailed:
		return agentapi.StateFailed
	}
	return ""
}

// pod is one network namespace with attachments. A pod in the manager's map never changes: the
// pod's job replaces it by another, so a snapshot of the map may be read without a lock.
type pod struct {
	atts  []cni.Attachment
	state podState
	err   error  // of the last set-up or update
	proxy *proxy // in podReady only
	// kernel is there in podKernel; in podFailed and podIdle if something of it is left in the namespace.
	kernel   *kernelPod
	noKernel bool // nothing of it is, of no agent
	// unavailable is why the agent carries the pod, whose policy wants the kernel's SMC-R where that is
	// available. Without a proxy it is looked at again at lookAgain.
	unavailable error
	lookAgain   time.Time
	// set are the pod's own devices while it is selected, else the node's. While the pod has a
	// proxy, they are the proxy's.
	set   *rnics.Set
	swept bool // nothing of an earlier agent is in the namespace
	// quiet is that what an earlier agent left there diverts nothing. It is of use to connections that this agent
	// carries on.
	quiet bool

	openCount uint64 // Set.Usable's count when the stack got its devices
	addErr    string // why the stack did not get all devices; "" if it did

	retryAt time.Time
	pause   time.Duration
}

// isGone tells whether the pod's namespace was not there when it was last opened. A proxy's, and that of a pod on
// its kernel's SMC-R, is looked at in each round.
func (p *pod) isGone() bool {
	return p.proxy == nil && p.kernel == nil && errors.Is(p.err, linux.ErrGone)
}

// becomeNew is the state after the end of a proxy. swept says that nothing of the proxy, or of an
// earlier agent, is left in the namespace.
func (p *pod) becomeNew(swept bool) {
	p.proxy, p.kernel, p.state, p.swept, p.quiet = nil, nil, podNew, swept, false
}

// becomeIdle means that nothing is diverted, and nothing of this agent is in the namespace.
func (p *pod) becomeIdle() {
	p.proxy, p.state, p.err, p.pause = nil, podIdle, nil, 0
}

// becomeReady gives the pod its proxy.
func (p *pod) becomeReady(px *proxy) {
	p.proxy, p.state, p.err, p.pause, p.swept = px, podReady, nil, 0, true
}

// becomeKernel hands the pod to its kernel.
func (p *pod) becomeKernel(k *kernelPod) {
	p.proxy, p.kernel, p.state, p.err, p.pause, p.swept, p.noKernel = nil, k, podKernel, nil, 0, true, false
}

// becomeLeaving means that the pod's kernel still has sockets of SMC there, or that err kept it from
// leaving the pod. It is tried again after a pause.
func (p *pod) becomeLeaving(err error, now time.Time) {
	p.state, p.err, p.retryAt = podIdle, err, now.Add(leaveEvery)
}

// becomeFailed doubles the pause before the next try.
func (p *pod) becomeFailed(err error, now time.Time) {
	p.proxy, p.state, p.err = nil, podFailed, err
	p.pause = min(max(2*p.pause, retryFirst), retryMost)
	p.retryAt = now.Add(p.pause)
}
