// SPDX-License-Identifier: Apache-2.0

// Package kubectltest is an API server for tests of package kubectl. It has objects, and a
// function that executes commands. It supports only the selectors that package kubectl
// uses, stores nothing, and refuses only the paths that it is told to refuse.
package kubectltest
