// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"errors"
	"fmt"
)

// Decisions of this package.
var (
	// ErrGone means that the network namespace has disappeared: the pod ended.
	ErrGone = errors.New("network namespace is gone")
	// ErrClosed means that the handle was closed before.
	ErrClosed = errors.New("handle is closed")
	// ErrNoTable means that somebody deleted the table kube-smcr; Update puts
	// it back.
	ErrNoTable = errors.New("nftables table " + tableName + " does not exist")
	// ErrBypassFull means that the negative cache has no room for another entry.
	ErrBypassFull = errors.New("negative cache is full")
	// ErrNotRedirected means that a connection came to the agent's listener without
	// being diverted: a program connected to the listener itself.
	ErrNotRedirected = errors.New("connection was not redirected")
	// ErrNoPort means that DialFrom finds no free port of the client's address.
	ErrNoPort = errors.New("no free local port under the client's address")
)

// A FeatureError names a feature that this kernel does not have or this process may not
// use, and what to do about it.
type FeatureError struct {
	Feature string // for example "nftables: match on a TCP option"
	Remedy  string // what an administrator does about it
	Err     error  // what the kernel said
}

// Error implements error.
func (e *FeatureError) Error() string {
	return fmt.Sprintf("%s: %v: %s", e.Feature, e.Err, e.Remedy)
}

// Unwrap returns what the kernel said.
func (e *FeatureError) Unwrap() error { return e.Err }

// A ConfigError names the field of a configuration that cannot be used.
type ConfigError struct {
	Field  string
	Reason string
}

// Error implements error.
func (e *ConfigError) Error() string { return fmt.Sprintf("redirect: %s: %s", e.Field, e.Reason) }
