// SPDX-License-Identifier: Apache-2.0

package vf

import (
	"errors"
	"os"
	"syscall"
	"testing"
)

// A journal that cannot be read for want of descriptors or memory may be that of the device that DEL is to take back: DEL has to
// come again. One that is broken keeps no other device from coming back.
func TestJournals_unread(t *testing.T) {
	for _, c := range []struct {
		err    error
		unread bool
	}{{syscall.EMFILE, true}, {syscall.ENFILE, true}, {syscall.ENOMEM, true}, {syscall.EIO, false}, {errors.New("junk"), false}} {
		h := Host{DataDir: t.TempDir(), hooks: hooks{read: func(id string) error { return &os.PathError{Op: "open", Path: id, Err: c.err} }}}
		must(t, h.write(&journal{Wiring: Wiring{Device: Device{ID: "eth9"}, Owner: Owner{ContainerID: "c1", IfName: "net0"}}}))
		err := h.Detach(t.Context(), Detachment{ContainerID: "c1", IfName: "net0"})
		if got := errors.Is(err, c.err); got != c.unread || !c.unread && err != nil {
			t.Errorf("%v: detach all devices: %v", c.err, err)
		}
	}
}

// A pod whose namespace cannot be opened for want of descriptors keeps its device.
func TestAlive_noDescriptor(t *testing.T) {
	var limit syscall.Rlimit
	must(t, syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit))
	must(t, syscall.Setrlimit(syscall.RLIMIT_NOFILE, &syscall.Rlimit{Cur: 1, Max: limit.Max})) // those that are open stay
	there := alive(Owner{NetNS: "/proc/self/ns/net"})
	must(t, syscall.Setrlimit(syscall.RLIMIT_NOFILE, &limit))
	if !there {
		t.Error("the pod is gone")
	}
	if alive(Owner{NetNS: "/none/at/all"}) {
		t.Error("a pod whose namespace is gone is alive")
	}
}
