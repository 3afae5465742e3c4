// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"fmt"

	"github.com/smcr-io/kube-smcr/internal/config"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/soft"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
	"github.com/smcr-io/kube-smcr/pkg/smcr/synopt"
)

// openDevice picks the provider. This is the only place that knows providers.
func openDevice(cfg config.Device) (rdma.Device, func() error, error) {
	if !cfg.Soft() {
		return nil, nil, fmt.Errorf("device %s: this build has no provider for RDMA devices of the kernel: use node.device.soft", cfg.RDMA)
	}
	var mtu rdma.MTU // 0: what fits the interface
	for m := rdma.MTU256; m <= rdma.MTU4096; m++ {
		if m.Bytes() == cfg.SoftMTU {
			mtu = m
		}
	}
	d, err := soft.Open(soft.Config{Name: "soft0", Addr: cfg.SoftAddress, MTU: mtu})
	if err != nil {
		return nil, nil, err
	}
	return d, d.Close, nil
}

// openOption attaches the program that writes the TCP option.
func openOption() (smcr.Option, func() error, error) {
	o, err := synopt.Open(synopt.Config{Mark: markWire})
	if err != nil {
		return nil, nil, err
	}
	return o, o.Close, nil
}
