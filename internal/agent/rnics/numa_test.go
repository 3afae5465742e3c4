// SPDX-License-Identifier: Apache-2.0

package rnics

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestNodesOf(t *testing.T) {
	dir := t.TempDir()
	for node, cpus := range map[string]string{"node0": "0-3,8", "node1": "4-7", "node2": "", "node3": "junk,9-"} {
		must(t, os.Mkdir(filepath.Join(dir, node), 0o755))
		must(t, os.WriteFile(filepath.Join(dir, node, "cpulist"), []byte(cpus+"\n"), 0o600))
	}
	near := nodesOf(dir, "8,12-13")
	got := map[int]bool{}
	for node := -1; node <= 4; node++ {
		got[node] = near(node)
	}
	want := map[int]bool{-1: true, 0: true, 1: false, 2: false, 3: false, 4: true}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("near nodes (-want +got):\n%s", diff)
	}
	if near := nodesOf(t.TempDir(), "0"); !near(0) {
		t.Error("on a machine without nodes, node 0 is far")
	}
	if near := nodesOf(dir, ""); !near(1) {
		t.Error("node 1 is far, though nobody knows which processors the agent may use")
	}
	_ = nearNodes()
}
