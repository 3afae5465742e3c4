// SPDX-License-Identifier: Apache-2.0

package verbs

import (
	"errors"
	"fmt"
	"syscall"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// verbError gives an error of libibverbs its meaning among the errors of the
// verbs, nil for none. The errno stays in the chain.
func verbError(err error) error {
	var e syscall.Errno
	if !errors.As(err, &e) {
		return err
	}
	var kind error
	switch e {
	case syscall.ENOMEM, syscall.ENOSPC, syscall.EAGAIN, syscall.ENOBUFS, syscall.EMFILE, syscall.ENFILE, syscall.EDQUOT:
		kind = rdma.ErrNoResources
	case syscall.EINVAL, syscall.EFAULT, syscall.ERANGE:
		kind = rdma.ErrInvalid
	case syscall.EOPNOTSUPP, syscall.ENOSYS, syscall.EPROTONOSUPPORT:
		kind = rdma.ErrNotSupported
	case syscall.EBUSY:
		kind = rdma.ErrBusy
	case syscall.EIO, syscall.ENODEV, syscall.ENXIO:
		kind = rdma.ErrClosed // what the kernel answers for a device that is gone
	default:
		return err
	}
	return fmt.Errorf("%w: %w", kind, err)
}

// isShort reports whether an error is about what the process, or the machine, is short of, and says nothing of the device.
func isShort(err error) bool { return errors.Is(verbError(err), rdma.ErrNoResources) }

// isGone reports whether an error says that the device was removed.
func isGone(err error) bool {
	return errors.Is(err, syscall.EIO) || errors.Is(err, syscall.ENODEV)
}

// isAgain reports whether there was nothing to take, for now.
func isAgain(err error) bool {
	return errors.Is(err, syscall.EAGAIN) || errors.Is(err, syscall.EINTR)
}
