// SPDX-License-Identifier: Apache-2.0

package lab

import "testing"

// testSIW loads both modules, one after the other.
func testSIW(t *testing.T, l *Lab) {
	g := l.Guest(0)
	parameter := func() string {
		t.Helper()
		out, err := g.Shell(limited(t), "if cd /sys/module/siw/parameters; then cat peer_to_peer; fi 2>/dev/null")
		if err != nil {
			t.Fatal(err)
		}
		return out
	}
	for range 2 { // the second time there is nothing to do
		if err := g.AddSIW(limited(t), 0, 1); err != nil {
			t.Fatal(err)
		}
	}
	if got := parameter(); got != "" {
		t.Errorf("siw as Linux has it has a parameter, %q", got)
	}
	if err := g.LoadSIW(limited(t), "peer_to_peer=1", "mpa_version=1"); err != nil {
		t.Fatal(err)
	}
	if err := g.AddSIW(limited(t), 1); err != nil {
		t.Fatal(err)
	}
	if got := parameter(); got != "Y\n" {
		t.Errorf("peer_to_peer is %q", got)
	}
	if _, err := g.Run(limited(t), "ibv_devinfo", "-d", "siw1"); err != nil {
		t.Error(err)
	}
	if _, err := g.Run(limited(t), "rmmod", "siw"); err != nil {
		t.Error(err)
	}
}
