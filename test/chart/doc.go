// SPDX-License-Identifier: Apache-2.0

// Package chart tests charts/kube-smcr: it renders the chart with helm and looks
// at what comes out.
//
//   - What is rendered is that of testdata, for the default values, for
//     everything switched on, and for each profile; `go test ./test/chart
//     -update` writes it anew.
//   - Every object is one that Kubernetes' types can read, without a field that
//     they do not know, and every container is confined.
//   - The agent understands its configuration, the alerts and the dashboard use
//     metrics that exist, and the CRDs are those of config/crd.
//   - Values that do not exist or contradict each other are refused in words
//     that name them.
//   - The admission policy, in a real API server, keeps an agent away from what
//     is not of its node.
//
// It needs helm, and for the last point a kube-apiserver: testenv.ClusterTools.
// The chart on a real cluster is tested in test/cluster.
package chart
