// SPDX-License-Identifier: Apache-2.0

package softiwarp_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/softiwarp"
)

// Who waits for the end of a connection hears of it when both halves have ended, and not before.
func TestDevice_AwaitEnd(t *testing.T) {
	x, _ := connected(t, softiwarp.ConnectOptions{}, 4096)
	d := x.Dev.(*softiwarp.Device)
	soon, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if err := d.AwaitEnd(soon, x.QP); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("connection stands: %v", err)
	}
	if err := d.Disconnect(x.QP); err != nil {
		t.Fatal(err)
	}
	later, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	for range 2 { // also one that has ended before
		if err := d.AwaitEnd(later, x.QP); err != nil {
			t.Error(err)
		}
	}
	if err := x.QP.Close(); err != nil {
		t.Error(err)
	}
	if err := d.AwaitEnd(later, x.QP); !errors.Is(err, rdma.ErrClosed) {
		t.Errorf("queue pair is closed: %v", err)
	}
}
