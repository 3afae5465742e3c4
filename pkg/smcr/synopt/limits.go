// SPDX-License-Identifier: Apache-2.0

package synopt

const (
	// savedSYNBytes fits the SYN of any peer that sends no IPv6 extension
	// headers: 60 bytes of IPv4 header at most and 60 of TCP header.
	savedSYNBytes = 128
	// maxSavedSYNBytes bounds what a peer can make us allocate with IPv6
	// extension headers. A SYN with more than that is not from anyone we want
	// to talk SMC-R to.
	maxSavedSYNBytes = 2048
	// maxIPv6Extensions bounds the walk along IPv6 extension headers. Each kind
	// should occur once (RFC 8200 §4.1), so real packets have at most six.
	maxIPv6Extensions = 8
	// maxProcsBytes bounds the reading of cgroup.procs: as many processes as a
	// default kernel.pid_max of 2^22 allows, eight bytes each.
	maxProcsBytes = 8 << 22
)
