// SPDX-License-Identifier: Apache-2.0

package claims

const (
	// MaxDevices bounds the devices that a pod may claim for itself, by all its claims: as
	// many as the API allows one claim. Each becomes an interface of the pod.
	MaxDevices = 32

	// maxFileBytes bounds a file that is read. The API allows a claim 32
	// devices and 256 pods, which are 60 KiB with the longest names.
	maxFileBytes = 256 << 10
	// maxClaims bounds what List returns: a node has at most some hundred pods
	// with a few claims each, and a directory that was filled by accident must
	// not fill memory.
	maxClaims = 4096
	// maxUIDBytes bounds a UID; all are shorter, and a file name may be longer.
	maxUIDBytes = 64
)
