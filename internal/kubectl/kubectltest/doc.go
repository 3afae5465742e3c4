// SPDX-License-Identifier: Apache-2.0

// Package kubectltest is an API server for tests of package kubectl: it has
// objects, and executes commands by a function. It knows no selectors but those
// that the package uses, keeps nothing and checks no rights but those it is told
// to refuse.
package kubectltest
