// SPDX-License-Identifier: Apache-2.0

package soft

import (
	"net/netip"
	"os"
	"path/filepath"
	"testing"
)

func names(t *testing.T, dir string) (out []string) {
	t.Helper()
	es, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range es {
		out = append(out, e.Name())
	}
	return out
}

// A place is one device's at a time, of each address, and the last one that leaves removes
// its files.
func TestPlace_entries(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "devices")
	cfg := Config{Addr: netip.MustParseAddr("192.0.2.1"), Port: 4791, Dir: dir}
	enter := func(cfg Config) *place {
		t.Helper()
		p, err := enterPlace(cfg, 0)
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	first := enter(cfg)
	if mine, err := first.take(0); !mine || err != nil {
		t.Fatalf("the first generation: %v, %v", mine, err)
	}
	ln, err := first.listen(0)
	if err != nil {
		t.Fatal(err)
	}
	other := cfg
	other.Port++
	elsewhere := enter(other) // does not wait
	if err := elsewhere.leave(false, 0); err != nil {
		t.Error(err)
	}

	waited := make(chan *place)
	go func() {
		p, err := enterPlace(cfg, 0)
		if err != nil {
			t.Error(err)
		}
		waited <- p
	}()
	select {
	case <-waited:
		t.Fatal("two are entering")
	default:
	}
	if err := first.endEntry(); err != nil {
		t.Fatal(err)
	}
	second := <-waited
	if mine, err := second.take(0); mine || err != nil {
		t.Errorf("the first generation is taken twice: %v, %v", mine, err)
	}
	if mine, err := second.take(1); !mine || err != nil {
		t.Errorf("the second generation: %v, %v", mine, err)
	}
	if err := second.endEntry(); err != nil {
		t.Error(err)
	}

	_ = ln.Close()
	if err := first.leave(true, 0); err != nil {
		t.Error(err)
	}
	if got := names(t, dir); len(got) != 1 {
		t.Errorf("files %q while a device is there, want the lock alone", got)
	}
	if err := second.leave(true, 1); err != nil {
		t.Error(err)
	}
	if got := names(t, dir); len(got) != 0 {
		t.Errorf("files %q after the last device has left", got)
	}
}
