// SPDX-License-Identifier: Apache-2.0

package cni

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"syscall"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/smcr-io/kube-smcr/internal/devices/vf"
	"github.com/smcr-io/kube-smcr/internal/linux"
	"github.com/smcr-io/kube-smcr/internal/records"
)

// Error codes of this plugin. CNI leaves the numbers from 100 on to plugins.
const (
	// CodeStoreFull means that the disk of the data directory is full, or a
	// quota used up. Nothing was written.
	CodeStoreFull uint = 100
	// CodeRecord means that CHECK found no record, or one that differs from what the
	// container runtime says.
	CodeRecord uint = 101
	// CodeDevice means that the device cannot be given to a pod: there is none,
	// it is a PF, it has the wrong driver, or the host needs it.
	CodeDevice uint = 102
	// CodeDeviceBusy means that the device belongs to another attachment, or has not
	// come back from one that ended.
	CodeDeviceBusy uint = 103
	// CodeInterface means that the interface could not be made as it should
	// be: its name is in use, or an address or route could not be set.
	CodeInterface uint = 104
	// CodeSetting means that the device does not take a setting.
	CodeSetting uint = 105
	// CodeWiring means that CHECK found the device, its interface, its
	// addresses or routes other than ADD left them.
	CodeWiring uint = 106
)

// ErrNoAttachment means that the store has no record of the attachment.
var ErrNoAttachment = errors.New("no such attachment")

// A JunkError tells why a file of the store is not a record.
type JunkError struct {
	Name string // the file's name
	Err  error
}

// Error implements error.
func (e *JunkError) Error() string { return fmt.Sprintf("attachment file %q: %v", e.Name, e.Err) }

// Unwrap returns the reason.
func (e *JunkError) Unwrap() error { return e.Err }

// confError is the CNI error for a field of the network configuration.
func confError(field, format string, args ...any) *types.Error {
	return types.NewError(types.ErrInvalidNetworkConfig, "network configuration: "+field, fmt.Sprintf(format, args...))
}

// envError is the CNI error for an environment variable.
func envError(name, format string, args ...any) *types.Error {
	return types.NewError(types.ErrInvalidEnvironmentVariables, name, fmt.Sprintf(format, args...))
}

// deviceError is the CNI error for an error about a device. If id is "", the error is
// about all devices of the attachment.
func deviceError(id string, err error) *types.Error {
	var busy *vf.BusyError
	code, remedy := CodeDevice, ""
	switch {
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		code, remedy = CodeStoreFull, "free space in dataDir"
	case errors.As(err, &busy):
		code, remedy = CodeDeviceBusy, "wait until the runtime calls DEL for its owner, or GC; if the owner still runs, find out who allocated the device twice"
	case errors.Is(err, vf.ErrNotReturned):
		code, remedy = CodeDeviceBusy, "end the process that keeps the ended pod's network namespace"
	case errors.Is(err, vf.ErrNotFound):
		remedy = "see which devices there are with smcrctl devices, and correct the resource that handed this one out"
	case errors.Is(err, vf.ErrIsPF):
		remedy = "make VFs (sriov_numvfs) and use one of them"
	case errors.Is(err, vf.ErrVFIO), errors.Is(err, vf.ErrUnbound):
		remedy = "bind the device to the driver of its network interface"
	case errors.Is(err, vf.ErrPFDown):
		remedy = "set the interface of its PF up"
	case errors.Is(err, vf.ErrInUse):
		remedy = "use a device that the host does not need"
	case errors.Is(err, vf.ErrNameTaken):
		code, remedy = CodeInterface, "choose another interface name for this network in the pod"
	case errors.Is(err, vf.ErrSetting):
		code, remedy = CodeSetting, "take the setting out of the network, or of its requiredSettings, or use another NIC"
	case errors.Is(err, linux.ErrGone):
		code, remedy = types.ErrUnknownContainer, "the pod ended meanwhile"
	case records.IsShortage(err):
		code, remedy = types.ErrTryAgainLater, "the node is short of file descriptors or memory"
	case errors.Is(err, context.DeadlineExceeded):
		code, remedy = types.ErrTryAgainLater, "another plugin works on the device, or the kernel is slow"
	}
	what := "device " + id
	if id == "" {
		what = "devices of the attachment"
	}
	if remedy != "" {
		what += ": " + remedy
	}
	return types.NewError(code, what, err.Error())
}

// storeError is the CNI error for an error of the store.
func storeError(err error) *types.Error {
	switch {
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		return types.NewError(CodeStoreFull, "attachment store is full: free space in dataDir", err.Error())
	case errors.Is(err, fs.ErrPermission), errors.Is(err, syscall.EROFS):
		return types.NewError(types.ErrIOFailure, "attachment store is not writable: make dataDir writable for the container runtime", err.Error())
	default:
		return types.NewError(types.ErrIOFailure, "attachment store", err.Error())
	}
}
