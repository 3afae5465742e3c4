// SPDX-License-Identifier: Apache-2.0

// Package rdmatest has what tests of RDMA providers and of their users need.
//
// [TestProvider] is the conformance suite: every provider passes it between
// two of its devices. A test in a synctest bubble, where subtests are not
// allowed, takes the cases from [Cases].
//
// How queue pairs are connected is the provider's: a [Connector]. [ConnectByPath] is that of
// RoCE; one with DeviceAttr.Stream brings its own. What a case expects depends on the
// devices' attributes and on nothing else: the suite imports no provider.
//
// [Pair] connects two queue pairs the short way, for tests of other packages.
package rdmatest
