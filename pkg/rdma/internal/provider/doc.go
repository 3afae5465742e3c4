// SPDX-License-Identifier: Apache-2.0

// Package provider has what the providers of RDMA devices share: [Memory],
// mapped outside the Go heap and kept as long as one of its regions lives, and
// [Events], the bounded queue behind the channel of a context.
//
// Both are safe for concurrent use. Linux only.
package provider
