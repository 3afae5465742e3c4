// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"bufio"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func TestServe(t *testing.T) {
	reqIn, reqOut := io.Pipe()
	respIn, respOut := io.Pipe()
	done := make(chan error, 1)
	go func() {
		done <- Serve(reqIn, respOut, func(n int) (a Answer[string], err error) {
			if n < 0 {
				return a, errors.New("negative")
			}
			a.Result.Ops, a.State = n, "fine"
			return a, nil
		})
		_ = respOut.Close()
	}()
	out := bufio.NewReader(respIn)
	if a, err := Ask[int, string](reqOut, out, 7); err != nil || a.Result.Ops != 7 || a.State != "fine" {
		t.Errorf("%+v, %v", a, err)
	}
	var gone *GoneError
	if _, err := Ask[int, string](reqOut, out, -1); err == nil || err.Error() != "negative" || errors.As(err, &gone) {
		t.Errorf("a request that failed: %v", err)
	}
	_ = reqOut.Close()
	if err := <-done; err != nil {
		t.Errorf("serve: %v", err)
	}
	if _, err := Ask[int, string](io.Discard, out, 1); !errors.As(err, &gone) || !errors.Is(err, io.EOF) {
		t.Errorf("a worker that ended: %v", err)
	}
}

func TestProfile(t *testing.T) {
	var p Profile
	name := filepath.Join(t.TempDir(), "cpu.pprof")
	for _, file := range []string{name, "", ""} { // begin, end, nothing to end
		if err := p.Set(file); err != nil {
			t.Fatal(err)
		}
	}
	if info, err := os.Stat(name); err != nil || info.Size() == 0 {
		t.Errorf("the profile: %v, %v", info, err)
	}
}

func TestOpened(t *testing.T) {
	var o Opened
	var closed []string
	for _, name := range []string{"device", "stack", "listener"} {
		o.Add(func() error {
			closed = append(closed, name)
			return errors.New(name)
		})
	}
	err := o.Close()
	want := []string{"listener", "stack", "device"}
	if !slices.Equal(closed, want) || err == nil || err.Error() != strings.Join(want, "\n") {
		t.Errorf("closed %q: %v", closed, err)
	}
}
