// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"fmt"

	"github.com/smcr-io/kube-smcr/internal/kernelpath"
	"github.com/smcr-io/kube-smcr/internal/linux"
)

// mayHave goes by the filter of the option, which a pod gets before its sockets are chosen, and loses when they are not any more and none
// is left. In the node's network others may have flushed it.
func (linuxSMC) mayHave(n podNet) (bool, error) {
	at := placeOf(n)
	if at.Cgroup != nil {
		return true, nil
	}
	return linux.OptionFiltered(at)
}

// untouched returns nil for a pod of which an earlier agent left nothing in the kernel. What another one has cannot be taken back without
// the program, which why keeps away: as where the operator switched this datapath off before its pods had left it.
func (m *manager) untouched(p *pod, why error) error {
	k, err := m.openKernelPod(p)
	if err != nil {
		return err
	}
	has, err := m.a.cfg.smc.mayHave(k.net)
	if err := errors.Join(err, k.net.close()); err != nil {
		return errors.Join(why, err)
	}
	if has {
		return fmt.Errorf("pod not taken off its kernel's SMC-R, on which an earlier agent may have put it: %w", why)
	}
	return nil
}

// noPins tells whether what agents pinned on the node is out of sight, and may be at work: not even its end could be brought about.
func noPins(err error) bool {
	var missing *kernelpath.MissingError
	return errors.As(err, &missing) && missing.Missing == kernelpath.NoPins
}

// errVersion1 is why no pod is on its kernel's SMC-R on a node where the operator wants version 1.
var errVersion1 = errors.New("the kernel's SMC-R uses version 2, and the setting versions of the agent is v1")

// isInherited tells whether an earlier agent may have left a pod, which this one has not looked at yet, on its kernel's SMC-R.
func (m *manager) isInherited(p *pod) bool {
	return p.kernel == nil && !p.noKernel && p.proxy == nil && m.a.cfg.smc.pinned()
}

// staysOnKernel tells whether a pod whose policy prefers its kernel's SMC-R, and that err keeps from being attached, stays as it is: to
// take it off would end its connections. So do pods that this agent attached and, where err may be over soon, those that an earlier agent did.
func (m *manager) staysOnKernel(p *pod, err error) bool {
	if p.kernel != nil {
		return !p.kernel.leaving
	}
	var missing *kernelpath.MissingError
	if errors.As(err, &missing) {
		return false
	}
	for _, unable := range []error{kernelpath.ErrUnfit, kernelpath.ErrUnfitHost, kernelpath.ErrNoVethRNIC, errVersion1} {
		if errors.Is(err, unable) {
			return false
		}
	}
	return m.isInherited(p) && m.untouched(p, err) != nil
}

// clearForKernel ends what an earlier agent diverts to its listeners in a pod that becomes its kernel's. If that agent handed over, it may
// carry connections of the pod on: as in clear, what they need stays, and diverts nothing.
func (m *manager) clearForKernel(n podNet) error {
	if m.a.tookFrom != "" {
		return n.endDiversion()
	}
	return n.sweep()
}
