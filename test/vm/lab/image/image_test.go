// SPDX-License-Identifier: Apache-2.0

package image

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/smcr-io/kube-smcr/internal/testenv/clustertools"
)

func TestCutSignature(t *testing.T) {
	const mark = "~Module signature appended~\n"
	info := func(length byte) string { return "\x00\x00\x02\x00\x00\x00\x00\x00\x00\x00\x00" + string(length) }
	for _, c := range []struct{ name, text, want, err string }{
		{name: "signed", text: "module" + "SIGNATURE" + info(9) + mark, want: "module"},
		{name: "not signed", text: "module", want: "module"},
		{name: "only a mark", text: mark, want: mark},
		{name: "too long", text: "m" + info(9) + mark, err: "a signature of 9 bytes"},
	} {
		t.Run(c.name, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "m.ko")
			if err := os.WriteFile(file, []byte(c.text), 0o600); err != nil {
				t.Fatal(err)
			}
			err := cutSignature(file)
			if c.err != "" {
				if err == nil || !strings.Contains(err.Error(), c.err) {
					t.Errorf("error %v, want one with %q", err, c.err)
				}
				return
			}
			got, err2 := os.ReadFile(file)
			if err != nil || err2 != nil || string(got) != c.want {
				t.Errorf("%q is left, %v, %v; want %q", got, err, err2, c.want)
			}
		})
	}
}

// Without the programs' mirror the error says what was tried, and nothing half
// done is left in the cache.
func TestGet_withoutMirror(t *testing.T) {
	cache := t.TempDir()
	t.Setenv(clustertools.CacheEnv, cache)
	if _, err := files(cache); !errors.Is(err, ErrNotBuilt) {
		t.Errorf("an empty cache: %v", err)
	}
	t.Setenv("PATH", t.TempDir()) // no program is found
	var progress bytes.Buffer
	if _, err := Get(t.Context(), "6.1.0", &progress); err == nil || !strings.Contains(err.Error(), `no kernel "6.1.0"`) {
		t.Errorf("a kernel that nobody knows: %v", err)
	}
	if _, err := Get(t.Context(), SMC, &progress); err == nil || !strings.Contains(err.Error(), "build the guests' image") {
		t.Errorf("without programs: %v", err)
	}
	left, err := filepath.Glob(filepath.Join(cache, "vm", "*"))
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range left {
		if !strings.HasSuffix(name, ".lock") {
			t.Errorf("%s is left", name)
		}
	}
}
