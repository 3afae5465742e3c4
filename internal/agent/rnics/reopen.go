// SPDX-License-Identifier: Apache-2.0

package rnics

import (
	"errors"
	"fmt"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/verbs"
)

// errReopen means that a device is there, but has to be opened again.
var errReopen = errors.New("it is opened again")

// outdated says why a device has to be opened again, though it works; nil: it need not.
func (p *Pool) outdated(d *device, dev rdma.Device) error {
	if dev.Port().State != rdma.PortActive {
		return p.moved(d)
	}
	return betterGID(d, dev.GIDs())
}

// moved is the error of a device whose network interface went into the pod, or came back, after it
// was opened: its GIDs are of the other namespace now, and its port counts as down. Another plugin than
// ours may wire a device of which only the ID is known, and may do so later than the pod is seen.
func (p *Pool) moved(d *device) error {
	own, inPod := p.placeOf(d)
	if !own.LookUp || p.cfg.InPod(&own) == inPod {
		return nil
	}
	if inPod {
		return fmt.Errorf("%w: its network interface is on the host again", errReopen)
	}
	return fmt.Errorf("%w: its network interface went into the pod", errReopen)
}

// placeOf is what is known of a pod's own device, and where its interface was when it was opened.
func (p *Pool) placeOf(d *device) (own Own, inPod bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if d.own != nil {
		own = *d.own
	}
	return own, d.inPod
}

// betterGID is the error of a device that was opened before its network interface had an address. A
// device keeps the GID that it chose; a link-local one does not reach beyond the segment, and nobody
// asked for it. The first of the table is the one that the device has.
func betterGID(d *device, table []rdma.GIDEntry) error {
	if d.cfg.GIDAddress.IsValid() || len(table) == 0 || !table[0].GID.Addr().IsLinkLocalUnicast() {
		return nil
	}
	held := table[0]
	var others []rdma.GIDEntry
	for _, g := range table {
		// Without an interface it may be that of a child of ours in a pod.
		if g.NetDev != "" && (d.own == nil || g.NetDev == held.NetDev) {
			others = append(others, g)
		}
	}
	g, why, err := verbs.ChooseGID(others, verbs.GIDWish{Type: held.Type})
	if err == nil && !g.GID.Addr().IsLinkLocalUnicast() {
		return fmt.Errorf("%w: instead of its link-local GID there is %s", errReopen, why)
	}
	return nil // there is still no better one
}
