// SPDX-License-Identifier: Apache-2.0

package cniinstall

import (
	"errors"
	"io/fs"
	"syscall"
	"time"
)

// State says how the installation stands.
type State string

const (
	// StateStarting is before the first look.
	StateStarting State = "Starting"
	// StateStandby means that another installer of this node does the work.
	StateStandby State = "Standby"
	// StateWaiting means that there is no network yet to chain to, or that its
	// configuration is just being written. That is normal on a new node.
	StateWaiting State = "Waiting"
	// StateInstalled means that new pods get the plugin.
	StateInstalled State = "Installed"
	// StateContested means that another program takes the plugin out as often
	// as it is put in.
	StateContested State = "Contested"
	// StateBroken means that something is in the way; Detail says what.
	StateBroken State = "Broken"
	// StateAbsent is what Inspect says of a node without the plugin.
	StateAbsent State = "Absent"
)

// Status is the state of the installation on this node.
type Status struct {
	State State `json:"state"`
	// Detail says why, and what to do. An installation that works may have one
	// too.
	Detail string `json:"detail,omitempty"`
	// Since is when the state was entered.
	Since time.Time `json:"since"`
	// File is the configuration that the container runtime takes, Network the
	// network's name in it, and CNIVersion its version of CNI.
	File       string `json:"file,omitempty"`
	Network    string `json:"network,omitempty"`
	CNIVersion string `json:"cniVersion,omitempty"`
	// Repairs counts how often the configuration was written, the first time
	// included, and Copies how often the binary was.
	Repairs int `json:"repairs"`
	Copies  int `json:"copies"`
}

// Working tells whether new pods get the plugin.
func (s Status) Working() bool { return s.State == StateInstalled }

// advise adds to an error of the file system what to do about it.
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
