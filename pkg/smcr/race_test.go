// SPDX-License-Identifier: Apache-2.0

//go:build race

package smcr_test

// underRaceDetector: what a hostile peer does to memory while it is read would
// be reported, as it is a race; it is one with the peer.
const underRaceDetector = true
