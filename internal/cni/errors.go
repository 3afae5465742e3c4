// SPDX-License-Identifier: Apache-2.0

package cni

import (
	"errors"
	"fmt"
	"io/fs"
	"syscall"

	"github.com/containernetworking/cni/pkg/types"
)

// Error codes of this plugin; CNI leaves the numbers from 100 to plugins.
const (
	// CodeStoreFull means that the disk of the data directory is full, or a
	// quota used up. Nothing was written.
	CodeStoreFull uint = 100
	// CodeRecord means that CHECK found no record, or one that says something
	// else than the container runtime.
	CodeRecord uint = 101
)

// ErrNoAttachment means that the store has no such record.
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

// storeError is the CNI error for what the store said.
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
