// SPDX-License-Identifier: Apache-2.0

// Package clc has the Connection Layer Control messages of SMC-R and the two
// machines of the rendezvous, client and server (RFC 7609 §3.2, §3.5, A.2, C).
package clc
