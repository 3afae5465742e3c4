// SPDX-License-Identifier: Apache-2.0

// Package cluster tests kube-smcr from end to end: on a real Kubernetes of
// two nodes (package lab), installed by its Helm chart (package product), with
// pods that know nothing of it (command traffic).
//
//	make test-cluster
//	make test-cluster ARGS='-run=TestCluster/(optIn|upgrade)'
//
// One cluster serves all scenarios. They run in the order of the table in
// cluster_test.go, each in a Kubernetes namespace of its own, and each leaves
// the cluster as it found it, so that any of them can run alone. The last two
// uninstall the product; the scenario uninstall also installs it, with the commands
// of README.md. Assertions are about what users see: kubectl get, annotations,
// events, kubectl smcr, and whether their connections work.
//
// When a scenario fails, the state of the cluster is in its output, and the logs
// of everything in out/test-cluster.
//
// # Limitations
//
// It needs root, the programs of a cluster (make cluster-tools) and a core or
// two. The tests wait half of the time, so guests or other tests may run beside them. Beside a
// dozen programs that compute they take twice as long, and still pass.
package cluster
