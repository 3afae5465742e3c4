// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"testing"
)

func TestAddresses(t *testing.T) {
	pod, _ := newPair(t)
	ifs, err := Addresses(pod)
	if err != nil {
		t.Fatal(err)
	}
	found := map[string]int{}
	for name, prefixes := range ifs {
		for _, p := range prefixes {
			found[p.Addr().String()]++
			if p.Addr().IsLoopback() || p.Addr().IsLinkLocalUnicast() {
				t.Errorf("%s has %v", name, p)
			}
		}
	}
	for _, f := range families {
		if found[f.pod.String()] != 1 {
			t.Errorf("%v of the pod is not among %v", f.pod, ifs)
		}
	}
}
