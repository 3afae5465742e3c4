// SPDX-License-Identifier: Apache-2.0

package vf

import (
	"os"
	"path/filepath"
	"testing"
)

// TestCapabilities_probeRoCESockets: a kernel that was started without IPv6 has one table less, which is no error. What has errors is
// found out anew for each pod.
func TestCapabilities_probeRoCESockets(t *testing.T) {
	const head = "   sl  local_address rem_address   st\n"
	for _, c := range []struct {
		name   string
		tables map[string]string
		found  bool
	}{
		{"IPv4 alone", map[string]string{"udp": head + "    1: 00000000:12B7 00000000:0000 07\n"}, true},
		{"IPv4 alone, nothing", map[string]string{"udp": head}, false},
		{"in IPv6's", map[string]string{"udp": head, "udp6": head + "    1: 00000000000000000000000000000000:12B7 00000000000000000000000000000000:0000 07\n"}, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			for name, text := range c.tables {
				if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			var got Capabilities
			if got.probeRoCESockets(dir); got.SoftRoCEInPods != c.found || len(got.Errors) > 0 {
				t.Errorf("%+v", got)
			}
		})
	}
}
