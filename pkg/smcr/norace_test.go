// SPDX-License-Identifier: Apache-2.0

//go:build !race

package smcr_test

const underRaceDetector = false
