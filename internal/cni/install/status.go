// SPDX-License-Identifier: Apache-2.0

package install

import (
	"errors"
	"io/fs"
	"syscall"
	"time"
)

// State is the state of the installation.
type State string

const (
	// StateStarting is the state before the first check.
	StateStarting State = "Starting"
	// StateStandby means that another installer of this node does the work.
	StateStandby State = "Standby"
	// StateWaiting means that there is no network yet to chain to, or that the network's
	// configuration is just being written. This is normal on a new node.
	StateWaiting State = "Waiting"
	// StateInstalled means that the runtime executes the plugin for new pods.
	StateInstalled State = "Installed"
	// StateContested means that another program takes the plugin out of the
	// configuration again and again.
	StateContested State = "Contested"
	// StateBroken means that the plugin cannot be installed; Detail says why.
	StateBroken State = "Broken"
	// StateAbsent means that Uninstall has taken the plugin away.
	StateAbsent State = "Absent"
)

// Status is the state of the installation on this node.
type Status struct {
	State State `json:"state"`
	// Detail says why the state is what it is, and what to do. StateInstalled may have a
	// detail too.
	Detail string `json:"detail,omitempty"`
	// Since is when the state was entered.
	Since time.Time `json:"since"`
	// File is the configuration that the container runtime uses, Network the network's
	// name in it, and CNIVersion its version of CNI.
	File       string `json:"file,omitempty"`
	Network    string `json:"network,omitempty"`
	CNIVersion string `json:"cniVersion,omitempty"`
	// Repairs counts how often the configuration was written, and Copies how often the
	// binary was, the first time included.
	Repairs int `json:"repairs"`
	Copies  int `json:"copies"`
}

// Working tells whether the runtime executes the plugin for new pods.
func (s Status) Working() bool { return s.State == StateInstalled }

// advise is the text of an error of the file system, with what to do about it.
func advise(err error) string {
	switch {
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		return err.Error() + ": free space there; nothing was damaged, and it is tried again"
	case errors.Is(err, syscall.EROFS), errors.Is(err, fs.ErrPermission):
		return err.Error() + ": mount it writable, or set cni.binDir and cni.confDir to the directories that this distribution's container runtime uses"
	case errors.Is(err, fs.ErrNotExist):
		return err.Error() + ": mount the host's directory there, or correct cni.binDir and cni.confDir"
	}
	return err.Error()
}
