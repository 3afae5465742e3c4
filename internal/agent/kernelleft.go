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
