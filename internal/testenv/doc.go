// SPDX-License-Identifier: Apache-2.0

// Package testenv says what a test needs from the machine it runs on.
//
//	func TestRedirect(t *testing.T) {
//		testenv.Need(t, testenv.Root, testenv.NetAdmin, testenv.Nftables)
//		...
//	}
//
// A test whose needs are not met is skipped, with the reason. A skip must not
// hide a hole in continuous integration: there KUBE_SMCR_CI_REQUIRE lists,
// separated by commas, the requirements the machine is known to meet ("root",
// "bpf", "program:tshark", or "all"), and an unmet requirement of that list
// fails the test.
//
// Every skip of this repository goes through this package.
//
// What all runs of tests on a machine share comes from here, too: [UDPPort].
package testenv
