// SPDX-License-Identifier: Apache-2.0

//go:build !linux || !cgo

package verbs

import (
	"fmt"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/cm"
)

// Built says that this build has no libibverbs.
const Built = false

// Device is an RDMA device of the kernel; there are none in this build.
type Device struct{ rdma.Device }

// Open returns [ErrNotBuilt].
func Open(cfg Config) (*Device, error) {
	return nil, fmt.Errorf("open RDMA device %q: %w", cfg.Name, ErrNotBuilt)
}

// Close does nothing.
func (d *Device) Close() error { return nil }

// IWARP is an RDMA device of the kernel that speaks iWARP; there are none in this build.
type IWARP struct{ cm.Device }

// OpenIWARP returns [ErrNotBuilt].
func OpenIWARP(cfg IWARPConfig) (*IWARP, error) {
	return nil, fmt.Errorf("open iWARP device %q: %w", cfg.Name, ErrNotBuilt)
}

// Close does nothing.
func (d *IWARP) Close() error { return nil }
