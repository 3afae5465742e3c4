// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/smcr-io/kube-smcr/internal/agent/rnics"
	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
)

// unable is why nothing can be on SMC-R: on the node, with a set of devices, or in a pod. The code
// is empty if SMC-R is possible.
type unable struct {
	why  string
	code agentapi.Code
}

// enable gets what SMC-R needs of the node. What is missing is an error or, with Stay, the reason
// why everything is plain TCP. A missing TCP option is never an error.
func (a *agent) enable(ctx context.Context) (closeOption func() error, err error) {
	cannot := func(code agentapi.Code, err error) {
		if a.unable.code == "" {
			a.unable = unable{err.Error(), code}
		}
		a.cfg.Log.Warn("everything is plain TCP", "reason", code, "err", err)
	}
	if err := a.cfg.preflight(); err != nil {
		err = fmt.Errorf("this node cannot run the agent: %w", err)
		if !a.cfg.Stay {
			return nil, err
		}
		cannot(agentapi.CodeNoOption, err)
	}
	if err := a.rnics.Open(ctx, a.cfg.Node.Devices); err != nil {
		return nil, err
	}
	// A missing device of the kernel is used as soon as it appears, and so is a software device whose
	// address is missing, beside others. If there is none, the agent starts again when there is one.
	node := a.rnics.Node()
	if open, _ := node.Usable(); len(open) == 0 {
		if all := node.States(); len(all) > 0 && all[0].Config.Soft() {
			cannot(agentapi.CodeOf(clc.ReasonNoDev), all[0].Err)
		}
	}
	nothing := func() error { return nil }
	option, closeOption, err := a.cfg.openOption()
	if err != nil {
		cannot(agentapi.CodeNoOption, fmt.Errorf("the SMC-R TCP option cannot be written: %w", err))
		return nothing, nil
	}
	if a.unable.code != "" {
		return nothing, closeOption()
	}
	a.option = option
	return closeOption, nil
}

// awaitAble waits until what was missing for SMC-R is there, and returns true, or until ctx ends.
func (a *agent) awaitAble(ctx context.Context) bool {
	for sleep(ctx, a.cfg.ableEvery) {
		if a.able() {
			a.cfg.Log.Info("what was missing for SMC-R is there; the agent starts again")
			return true
		}
	}
	return false
}

// deviceDir has the device files of RDMA devices. The kernel removes it with the last of them.
const deviceDir = "/dev/infiniband"

// awaitReplaced waits until the agent has to start again, since its container has a directory of
// device files mounted that the node does not have any more, and returns true, or until ctx ends.
func (a *agent) awaitReplaced(ctx context.Context) bool {
	for sleep(ctx, a.cfg.ableEvery) {
		if a.devicesReplaced() {
			a.cfg.Log.Warn("the node has another directory for device files now, or none; the agent drains, ends and is started again", "dir", deviceDir)
			return true
		}
	}
	return false
}

// devicesReplaced says whether an RDMA device is missing and, if it is back, cannot be seen here.
func (a *agent) devicesReplaced() bool {
	missing := func(d rnics.State) bool { return d.Open == nil && !d.Config.Soft() }
	return slices.ContainsFunc(a.rnics.All(), missing) && a.cfg.unlinked(deviceDir)
}

// able tries everything that enable needs, and undoes it.
func (a *agent) able() bool {
	if a.cfg.preflight() != nil {
		return false
	}
	if _, closeOption, err := a.cfg.openOption(); err != nil || closeOption() != nil {
		return false
	}
	return len(a.rnics.Node().States()) == 0 || a.rnics.CanOpen()
}

// unableWith is why nothing can be on SMC-R now with a set of devices: something was missing at the
// start, or no device of the set is open.
func (a *agent) unableWith(set *rnics.Set) unable {
	if a.unable.code != "" {
		return a.unable
	}
	all := set.States()
	code, why := agentapi.CodeOf(clc.ReasonNoDev), errors.New("no RDMA device is open")
	if set.Own() {
		code = agentapi.CodePodDevice
	} else if len(all) == 0 {
		why = errors.New("the node has no RDMA device for all pods (its setting devices is empty), and the pod has none for itself")
	}
	for _, d := range slices.Backward(all) {
		if d.Open != nil {
			return unable{}
		}
		if d.Err != nil {
			why = d.Err // in the end, of the first device
		}
	}
	return unable{why.Error(), code}
}

// unableNode is why nothing can be on SMC-R now in any pod of the node: no device is open, neither
// the node's nor a pod's own.
func (a *agent) unableNode() unable {
	lack := a.unableWith(a.rnics.Node())
	if a.unable.code == "" && slices.ContainsFunc(a.rnics.All(), func(d rnics.State) bool { return d.Open != nil }) {
		return unable{}
	}
	return lack
}
