// SPDX-License-Identifier: Apache-2.0

//go:build !linux || !cgo

package verbs

import (
	"errors"
	"testing"
)

func TestOpen_notBuilt(t *testing.T) {
	if _, err := Open(Config{Name: "mlx5_0"}); Built || !errors.Is(err, ErrNotBuilt) {
		t.Errorf("built %v, open: %v, want ErrNotBuilt", Built, err)
	}
	if _, err := Devices(); err != nil {
		t.Errorf("devices: %v", err)
	}
}
