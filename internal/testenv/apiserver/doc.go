// SPDX-License-Identifier: Apache-2.0

// Package apiserver gives tests a real Kubernetes API server with etcd, and the
// custom resource definitions of this project in it. There are no controllers,
// no scheduler and no kubelet: a test writes what they would write.
//
//	var server apiserver.Shared // one for all tests of the package
//
//	func TestMain(m *testing.M) { os.Exit(server.Main(m)) }
//
//	func TestX(t *testing.T) {
//		config := server.Config(t) // starts it, once; needs testenv.ClusterTools
//
// A [Proxy] stands between a client and the API server to take it away, to slow
// it down or to let it answer with errors.
//
// Limitations: objects outlive the test that made them, so every test uses a
// namespace and names of its own. Without garbage collection owned objects stay.
package apiserver
