// SPDX-License-Identifier: Apache-2.0

package linkgroup_test

import (
	"errors"
	"testing"

	"github.com/smcr-io/kube-smcr/pkg/smcr/linkgroup"
)

// The shell may not ask a group for a snapshot before it has taken the group's outputs.
func TestSnapshot_wantsNoOutputs(t *testing.T) {
	r := newRigOf(t, 1, linkgroup.Config{}, false)
	r.g.ConnectPeer(r.now, peerEnd)
	defer func() {
		if recover() == nil {
			t.Error("a snapshot leaves outputs behind")
		}
	}()
	r.g.Snapshot(r.now)
}

// The error that ended a group keeps its text and what errors.Is says of it, after one snapshot and after
// a snapshot of what was restored.
func TestSnapshot_error(t *testing.T) {
	r := ready(t, linkgroup.Client)
	r.g.HandleLinkFailure(r.now, 0, errors.New("retry counter exceeded"))
	r.poll()
	want := r.g.Err()
	for range 2 {
		r.encodeEach = 1
		r.move()
		if err := r.g.Err(); err == nil || err.Error() != want.Error() || !errors.Is(err, linkgroup.ErrLink) || errors.Is(err, linkgroup.ErrStalled) {
			t.Errorf("error %v, was %v", err, want)
		}
	}
}
