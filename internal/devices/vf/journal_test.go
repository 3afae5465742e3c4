// SPDX-License-Identifier: Apache-2.0

package vf

import (
	"errors"
	"os"
	"strings"
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

// scarce leaves the process with so many descriptors beside those that are open until plenty is called.
func scarce(t *testing.T, left int) (plenty func()) {
	t.Helper()
	f, err := os.Open(os.DevNull)
	must(t, err)
	lowest := int(f.Fd())
	must(t, f.Close())
	var limit syscall.Rlimit
	must(t, syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit))
	must(t, syscall.Setrlimit(syscall.RLIMIT_NOFILE, &syscall.Rlimit{Cur: uint64(lowest + left), Max: limit.Max}))
	return func() { must(t, syscall.Setrlimit(syscall.RLIMIT_NOFILE, &limit)) }
}

// A journal that may be from before the last boot, which cannot be seen for want of descriptors, is not in force.
func TestReadJournal_bootUnread(t *testing.T) {
	plenty := func() {}
	h := Host{DataDir: t.TempDir(), hooks: hooks{read: func(string) error { plenty = scarce(t, 0); return nil }}}
	must(t, h.write(&journal{Wiring: Wiring{
		Device: Device{ID: "eth9"}, IfName: "net0", Original: Original{Name: "eth9"}, Mode: ModeMove, Owner: Owner{ContainerID: "c1", IfName: "net0"},
	}}))
	j, err := h.readJournal("eth9")
	plenty()
	if !errors.Is(err, syscall.EMFILE) {
		t.Errorf("journal %+v, error %v", j, err)
	}
}

// A pod whose namespace cannot be opened for want of descriptors keeps its device, and the call that asked for it is to
// come again.
func TestAlive_noDescriptor(t *testing.T) {
	plenty := scarce(t, 0)
	_, err := alive(Owner{NetNS: "/proc/self/ns/net"})
	plenty()
	if !errors.Is(err, syscall.EMFILE) {
		t.Errorf("error %v", err)
	}
	if there, err := alive(Owner{NetNS: "/none/at/all"}); there || err != nil {
		t.Errorf("a pod whose namespace is gone is alive: %t, error %v", there, err)
	}
}

// A device whose owner may be alive is not taken from it, nor called busy.
func TestTakeBackLeftover_noDescriptor(t *testing.T) {
	h := Host{DataDir: t.TempDir()}
	must(t, h.write(&journal{Complete: true, Wiring: Wiring{
		Device: Device{ID: "eth9"}, IfName: "net0", Original: Original{Name: "eth9"}, Mode: ModeMove,
		Owner: Owner{ContainerID: "c1", IfName: "net0", NetNS: "/proc/self/ns/net"},
	}}))
	plenty := scarce(t, 1) // for the journal; a namespace takes two
	err := h.takeBackLeftover(t.Context(), "eth9", Owner{ContainerID: "c2"})
	plenty()
	var busy *BusyError
	if !errors.Is(err, syscall.EMFILE) || errors.As(err, &busy) || !strings.Contains(err.Error(), "see whether") {
		t.Errorf("error %v", err)
	}
}
