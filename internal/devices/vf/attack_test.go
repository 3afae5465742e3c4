// SPDX-License-Identifier: Apache-2.0

package vf

import (
	"errors"
	"fmt"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// What a pod with CAP_NET_ADMIN can do to the interface that it got, and to those that it makes itself.

// TestAttack_alias: a pod writes an alias that names another interface of the host, as if the journal of its own device
// were lost: with the interface in the pod for DEL, and with it in the host, where the kernel puts the interface of a
// namespace that the pod made and ended, for GC and the ADD of another pod. Nothing of the host may change.
func TestAttack_alias(t *testing.T) {
	for _, mode := range []Mode{ModeMove, ModeIPVlan} {
		for _, id := range []string{device(0), device(1), "nothing"} {
			for _, where := range []string{"pod", "host"} {
				t.Run(fmt.Sprintf("%s %s in the %s", mode, id, where), func(t *testing.T) {
					e := newEnv(t, 2, 2)
					_, err := e.h.Attach(t.Context(), e.request(0, 0))
					must(t, err)
					uplink := newLink(t, e.home, "uplink", "").Attrs()
					ns, owner := e.pods[0], e.detachment(0, 0)
					if where == "host" {
						ns = e.home
					}
					evil := fmt.Sprintf("%s d=%s c=%s i=%s o=%s n=uplink m=68 a=%s u=0 k=%d p=%s",
						aliasMark, id, owner.ContainerID, owner.IfName, mode, uplink.HardwareAddr, e.home.ID(), e.home.Path())
					newLink(t, ns, "evil", evil)

					must(t, errors.Join(e.h.Detach(t.Context(), owner), e.h.Detach(t.Context(), owner)))
					must(t, e.h.Collect(t.Context(), func(Owner) bool { return true }))
					for i := range 2 {
						_, err = e.h.Attach(t.Context(), e.request(i, 1))
						must(t, err)
					}
					must(t, in(e.home, func(h *netlink.Handle) error {
						l, err := h.LinkByIndex(uplink.Index)
						if err == nil && (l.Attrs().Name != "uplink" || l.Attrs().MTU != 1500 || !isUp(l)) {
							t.Errorf("the host's uplink is %s with MTU %d, up %v", l.Attrs().Name, l.Attrs().MTU, isUp(l))
						}
						if l, err := find(h, "evil"); where == "pod" && (l != nil || err != nil) {
							t.Error("an interface that the pod made is in the host")
						}
						return err
					}))
				})
			}
		}
	}
}

// TestAttack_aliasPath: what the alias calls the path of a namespace is a pipe that nobody writes to.
func TestAttack_aliasPath(t *testing.T) {
	e := newEnv(t, 1, 1)
	pipe := filepath.Join(e.dir, "pipe")
	must(t, unix.Mkfifo(pipe, 0o600))
	must(t, in(e.home, func(h *netlink.Handle) error {
		l, err := h.LinkByName(device(0))
		if err != nil {
			return err
		}
		return h.LinkSetAlias(l, fmt.Sprintf("%s d=%s c=x i=y o=ipvlan n=%s m=1500 a=%s u=1 k=7 p=%s",
			aliasMark, device(0), device(0), l.Attrs().HardwareAddr, pipe))
	}))
	done := make(chan error, 1)
	go func() {
		_, err := e.h.Attach(t.Context(), e.request(0, 0))
		done <- err
	}()
	select {
	case err := <-done:
		must(t, err)
	case <-time.After(10 * time.Second):
		t.Error("ADD waits for the pipe")
		f, err := unix.Open(pipe, unix.O_RDWR, 0) // ends the wait
		must(t, err)
		<-done
		must(t, unix.Close(f))
	}
}

// spoil does to a pod's interface what CAP_NET_ADMIN allows.
func (e *env) spoil(names ...string) {
	e.t.Helper()
	must(e.t, in(e.pods[0], func(h *netlink.Handle) error {
		l, err := h.LinkByName("net0")
		if err != nil {
			return err
		}
		for _, name := range names {
			if err := h.LinkAddAltName(l, name); err != nil {
				return err
			}
		}
		return errors.Join(h.LinkDelAltName(l, slot(0)), h.LinkSetARPOff(l), h.SetPromiscOn(l), h.LinkSetAllmulticastOn(l),
			h.LinkSetMulticastOff(l), h.LinkSetMTU(l, 1280))
	}))
}

// TestAttack_flagsAndNames: a pod leaves flags and further names on its interface. One name is that of an interface of the
// host, so that the kernel does not move the pod's interface there; one is that of each pod's eth0, so that the kernel moves
// it into no other pod. The next pod gets the device as it was.
func TestAttack_flagsAndNames(t *testing.T) {
	for _, how := range []string{"DEL", "DEL, journal lost", "the kernel brought it back"} {
		t.Run(how, func(t *testing.T) {
			e := newEnv(t, 1, 2)
			before := e.look()
			_, err := e.h.Attach(t.Context(), e.request(0, 0))
			must(t, err)
			switch how {
			case "DEL, journal lost":
				must(t, e.h.forget(device(0)))
				fallthrough
			case "DEL":
				e.spoil("cable0", device(0), "eth0")
			default: // without the names that are in use in the host
				e.spoil(device(0), "eth0")
				must(t, in(e.pods[0], func(h *netlink.Handle) error {
					l, err := h.LinkByName("net0")
					return errors.Join(err, moveLink(l, "net0", e.home))
				}))
			}
			must(t, e.h.Detach(t.Context(), e.detachment(0, 0)))
			if diff := cmp.Diff(before, e.withoutAddressesIf(how, before)); diff != "" {
				t.Fatalf("not as it was (-before +after):\n%s", diff)
			}
			newLink(t, e.pods[1], "eth0", "")
			_, err = e.h.Attach(t.Context(), e.request(0, 1))
			must(t, err)
		})
	}
}

// TestAttack_aliasErased: a pod changes all that it can of an interface of hardware, and gives another one its alias.
func TestAttack_aliasErased(t *testing.T) {
	w := marked()
	w.Device.ID, w.Device.PCI, w.Original.Parent = "ens4", "", "virtio3"
	task := &task{j: &journal{Wiring: w}}
	if !task.ours(&netlink.Device{LinkAttrs: netlink.LinkAttrs{Name: "own", ParentDev: "virtio3"}}) {
		t.Error("the interface is not known any more")
	}
	if task.ours(&netlink.Device{LinkAttrs: netlink.LinkAttrs{Name: w.IfName, ParentDev: "virtio4", Alias: w.alias()}}) {
		t.Error("another interface is taken for it")
	}
	if task.ours(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: w.IfName, Alias: w.alias()}}) {
		t.Error("an interface of software is taken for it")
	}
}

// TestDetach_namesInUse: another interface of the host has the further name of the device by now.
func TestDetach_namesInUse(t *testing.T) {
	e := newEnv(t, 1, 1)
	_, err := e.h.Attach(t.Context(), e.request(0, 0))
	must(t, err)
	newLink(t, e.home, slot(0), "")
	before := e.look()
	must(t, e.h.Detach(t.Context(), e.detachment(0, 0)))
	if d, err := e.h.Device(device(0)); err != nil || d.State != StateUp {
		t.Errorf("device is %v, %v; before:\n%s", d.State, err, before)
	}
}
