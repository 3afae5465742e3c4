// SPDX-License-Identifier: Apache-2.0

package image

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// What is a setting becomes a parameter, where it is declared and where it is defined, and
// nothing else changes.
func TestSIWSettable(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{
		"siw.h": "extern const bool peer_to_peer;\nextern const bool loopback_enabled;\n", "siw_main.c": "const bool peer_to_peer;\n",
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := siwSettable(dir); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{
		"siw.h": "extern bool peer_to_peer;\nextern const bool loopback_enabled;\n", "siw_main.c": "bool peer_to_peer;\nmodule_param(mpa_crc_required, bool, 0644);\n",
	} {
		text, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil || !strings.HasPrefix(string(text), want) {
			t.Errorf("%s is %q, %v; want it to begin with %q", name, text, err, want)
		}
	}
}
