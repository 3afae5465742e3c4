// SPDX-License-Identifier: Apache-2.0

// Package scale measures the controller against a large cluster: a real API
// server with etcd, kwok in place of the kubelets of 500 nodes, 5,000 opted-in
// pods and 5,000 SMCRLinks. It prints what the controller costs and how long it
// takes to converge, at rest and in churn, and fails beyond generous bounds.
//
//	go test -v ./test/scale
//	SCALE_NODES=100 go test -v ./test/scale    a smaller one
//
// Limitations: API server, etcd, kwok and controller share one machine, so the
// times are those of all of them together; CPU time and memory are the
// controller's own. Agents are played by the test: their writes are there, their
// watches are not.
package scale
