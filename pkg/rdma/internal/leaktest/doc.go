// SPDX-License-Identifier: Apache-2.0

// Package leaktest fails the tests of a package if they leave something behind, file descriptors among it.
//
//	func TestMain(m *testing.M) {
//		os.Exit(leaktest.Run(m, func() error { return goleak.Find() }))
//	}
//
// # Limitations
//
// It is for tests only, and looks at the whole process: nothing else may run in it.
package leaktest
