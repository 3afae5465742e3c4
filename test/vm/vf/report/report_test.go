// SPDX-License-Identifier: Apache-2.0

package report

import "testing"

func TestHost_Differences_macs(t *testing.T) {
	const own, assigned = "42:8e:9a:f0:1d:e1", "02:00:00:00:00:77"
	for _, tt := range []struct {
		name     string
		was, now VF
		same     bool
	}{
		{"the driver has not told the PF yet", VF{MAC: own, Own: own}, VF{MAC: noMAC, Own: own}, true},
		{"the driver has told the PF", VF{MAC: noMAC, Own: own}, VF{MAC: own, Own: own}, true},
		{"it was assigned", VF{MAC: own, Own: own}, VF{MAC: assigned, Own: own}, false},
		{"the assignment was lost", VF{MAC: assigned, Own: own}, VF{MAC: own, Own: own}, false},
		{"in a pod, as before", VF{MAC: assigned}, VF{MAC: assigned}, true},
		{"another VLAN", VF{MAC: own, Own: own}, VF{MAC: own, Own: own, VLAN: 100}, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			diffs := Host{VFs: map[string]VF{"pf0 0": tt.was}}.Differences(Host{VFs: map[string]VF{"pf0 0": tt.now}})
			if (len(diffs) == 0) != tt.same {
				t.Errorf("differences %q", diffs)
			}
		})
	}
}
