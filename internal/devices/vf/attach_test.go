// SPDX-License-Identifier: Apache-2.0

package vf

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/internal/linux"
	"github.com/smcr-io/kube-smcr/internal/testenv"
)

func ptr[T any](v T) *T { return &v }

// modes are the two ways of wiring.
var modes = []Mode{ModeMove, ModeIPVlan}

func TestAttach(t *testing.T) {
	for _, mode := range modes {
		t.Run(string(mode), func(t *testing.T) {
			e := newEnv(t, 1, 1)
			before := e.look()
			r := e.request(0, 0)
			r.Mode, r.Settings = mode, Settings{MTU: ptr(4000), MAC: ptr("02:00:00:00:09:09"), Trust: ptr(true)}
			w, err := e.h.Attach(t.Context(), r)
			must(t, err)
			gid, mac := "net0", "02:00:00:00:09:09"
			if mode == ModeIPVlan {
				gid, mac = device(0), w.MAC // a macvlan child here, which has its own
			}
			want := Wiring{
				Device: w.Device, Owner: w.Owner, Mode: mode, IfName: "net0", MAC: mac, MTU: 4000,
				RDMA:     []RDMADevice{{Name: "rxe0", GIDNetDev: gid, Soft: kindRXE}},
				Settings: Settings{MTU: ptr(4000), MAC: ptr("02:00:00:00:09:09")},
				Warnings: []Warning{{Setting: SettingTrust, Text: "setting trust was not made: the driver refuses it: the device is not a VF"}},
				Original: Original{
					Name: "roce0", MAC: "02:00:00:00:01:00", MTU: 1500, Up: true, Alias: "port of rack 7",
					Addresses: []string{"10.1.0.1/24"}, RDMA: []string{"rxe0"}, Traits: &Traits{AltNames: []string{slot(0)}},
				},
			}
			if diff := cmp.Diff(want, w); diff != "" {
				t.Errorf("wiring (-want +got):\n%s", diff)
			}
			must(t, e.h.Check(t.Context(), w))
			kept, err := e.h.Wiring("container0", "net0", device(0))
			must(t, err)
			if diff := cmp.Diff(w, kept); diff != "" {
				t.Errorf("journal (-attached +read):\n%s", diff)
			}
			must(t, e.pods[0].Do(func() error {
				b, err := os.ReadFile("/proc/sys/net/ipv6/conf/net0/accept_ra")
				if err == nil && strings.TrimSpace(string(b)) != "0" {
					t.Errorf("accept_ra is %s", b)
				}
				return err
			}))
			d, err := e.h.Device(device(0))
			must(t, err)
			if d.State != StatePod || d.Owner == nil || d.Owner.Pod.Name != "pod-0" || d.Mode != mode {
				t.Errorf("device says %+v", d)
			}
			for range 2 { // it may be called again
				must(t, e.h.Detach(t.Context(), e.detachment(0, 0)))
				e.same(before)
			}
		})
	}
}

// TestAttach_killed ends Attach after each of its changes, and lets each of those
// who may come next clean up.
func TestAttach_killed(t *testing.T) {
	next := map[string]func(*env) error{
		"detach":  func(e *env) error { return e.h.Detach(e.t.Context(), e.detachment(0, 0)) },
		"collect": func(e *env) error { return e.h.Collect(e.t.Context(), func(Owner) bool { return false }) },
		"attach": func(e *env) error {
			if _, err := e.h.Attach(e.t.Context(), e.request(0, 1)); err != nil {
				var busy *BusyError
				if errors.As(err, &busy) { // everything had been done
					return e.h.Detach(e.t.Context(), e.detachment(0, 0))
				}
				return err
			}
			return e.h.Detach(e.t.Context(), e.detachment(0, 1))
		},
		"detach, with the journal lost": func(e *env) error {
			must(e.t, e.h.forget(device(0)))
			return e.h.Detach(e.t.Context(), e.detachment(0, 0))
		},
	}
	for _, mode := range modes {
		for who, clean := range next {
			t.Run(fmt.Sprintf("%s, %s", mode, who), func(t *testing.T) {
				e := newEnv(t, 1, 2)
				before := e.look()
				steps := 0
				for n := 1; ; n++ {
					r := e.request(0, 0)
					r.Mode, r.Settings = mode, Settings{MTU: ptr(4000), MAC: ptr("02:00:00:00:09:09")}
					done, at := 0, ""
					e.h.hooks.after = func(step string) error {
						e.rdma.look() // a device dies with the move, and not when it is looked for
						if done++; done == n {
							at = step
							return errKilled
						}
						return nil
					}
					_, err := e.h.Attach(t.Context(), r)
					e.h.hooks.after = nil
					if at == "" {
						must(t, err)
						break
					}
					steps++
					must(t, clean(e))
					if diff := cmp.Diff(before, e.withoutAddressesIf(who, before)); diff != "" {
						t.Fatalf("killed after %q: not as it was (-before +after):\n%s", at, diff)
					}
				}
				must(t, e.h.Detach(t.Context(), e.detachment(0, 0)))
				e.same(before)
				if want := map[Mode]int{ModeMove: 9, ModeIPVlan: 8}[mode]; steps != want {
					t.Errorf("%d steps, want %d: does the test still see all?", steps, want)
				}
			})
		}
	}
}

// withoutAddressesIf looks; with the journal lost, what the alias has no room for
// is brought back by hand.
func (e *env) withoutAddressesIf(who string, before []string) []string {
	if !strings.Contains(who, "lost") || cmp.Equal(before, e.look()) {
		return e.look()
	}
	must(e.t, in(e.home, func(h *netlink.Handle) error {
		l, err := h.LinkByName(device(0))
		if err != nil {
			return err
		}
		a, err := netlink.ParseAddr("10.1.0.1/24")
		if err != nil {
			return err
		}
		if !slices.Contains(l.Attrs().AltNames, slot(0)) {
			err = h.LinkAddAltName(l, slot(0))
		}
		return errors.Join(err, h.AddrReplace(l, a), h.LinkSetAlias(l, "port of rack 7"))
	}))
	return e.look()
}

// TestDetach_killed ends Detach after each of its changes.
func TestDetach_killed(t *testing.T) {
	for _, mode := range modes {
		t.Run(string(mode), func(t *testing.T) {
			e := newEnv(t, 1, 1)
			before := e.look()
			for n := 1; ; n++ {
				r := e.request(0, 0)
				r.Mode, r.Settings = mode, Settings{MTU: ptr(4000), MAC: ptr("02:00:00:00:09:09")}
				_, err := e.h.Attach(t.Context(), r)
				must(t, err)
				done, at := 0, ""
				e.h.hooks.after = func(step string) error {
					e.rdma.look() // a device dies with the move, and not when it is looked for
					if done++; done >= n {
						at = step
						return errKilled
					}
					return nil
				}
				err = e.h.Detach(t.Context(), e.detachment(0, 0))
				e.h.hooks.after = nil
				if at == "" {
					must(t, err)
					break
				}
				must(t, e.h.Detach(t.Context(), e.detachment(0, 0)))
				if diff := cmp.Diff(before, e.look()); diff != "" {
					t.Fatalf("killed after %q: not as it was (-before +after):\n%s", at, diff)
				}
			}
			e.same(before)
		})
	}
}

// TestAttach_fails fails each step in turn: Attach itself takes everything back.
func TestAttach_fails(t *testing.T) {
	for _, mode := range modes {
		t.Run(string(mode), func(t *testing.T) {
			e := newEnv(t, 1, 1)
			before := e.look()
			broken := errors.New("broken")
			for n := 1; ; n++ {
				r := e.request(0, 0)
				r.Mode, r.Settings = mode, Settings{MTU: ptr(4000)}
				done, at := 0, ""
				e.h.hooks.after = func(step string) error {
					e.rdma.look() // a device dies with the move, and not when it is looked for
					if done++; done == n {
						at = step
						return broken
					}
					return nil
				}
				_, err := e.h.Attach(t.Context(), r)
				e.h.hooks.after = nil
				if at == "" {
					must(t, err)
					return
				}
				if !errors.Is(err, broken) {
					t.Fatalf("failed after %q: error %v", at, err)
				}
				if diff := cmp.Diff(before, e.look()); diff != "" {
					t.Fatalf("failed after %q: not as it was (-before +after):\n%s", at, diff)
				}
			}
		})
	}
}

const killEnv = "VF_TEST_KILLED_CHILD"

// killedChild attaches and dies like a process whose machine loses patience.
func killedChild(file string) {
	b, err := os.ReadFile(file)
	var c struct {
		Host    Host
		Request Request
		Step    string
	}
	if err == nil {
		err = json.Unmarshal(b, &c)
	}
	if err == nil {
		c.Host.hooks = hooks{macvlan: true, caps: &Capabilities{IPVlan: true}, rdma: deadRDMA{}, after: func(step string) error {
			if step == c.Step {
				return unix.Kill(os.Getpid(), unix.SIGKILL)
			}
			return nil
		}}
		_, err = c.Host.Attach(context.Background(), c.Request)
	}
	fmt.Println("still alive:", err)
	os.Exit(1)
}

// deadRDMA is for a child that does not come that far.
type deadRDMA struct{ rdmaKernel }

// TestAttach_sigkill is TestAttach_killed with a process that really ends: the
// lock ends with it.
func TestAttach_sigkill(t *testing.T) {
	e := newEnv(t, 1, 1)
	before := e.look()
	r := e.request(0, 0)
	r.Mode = ModeIPVlan
	b, err := json.Marshal(map[string]any{"Host": e.h, "Request": r, "Step": "child"})
	must(t, err)
	file := filepath.Join(e.dir, "child.json")
	must(t, os.WriteFile(file, b, 0o600))
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), killEnv+"="+file)
	out, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
		t.Fatalf("child ended with %v:\n%s", err, out)
	}
	if cmp.Equal(before, e.look()) {
		t.Fatal("the child left nothing behind: the test proves nothing")
	}
	must(t, e.h.Detach(t.Context(), e.detachment(0, 0)))
	e.same(before)
}

// TestDetach_otherOwner leaves a device alone that meanwhile is another pod's.
func TestDetach_otherOwner(t *testing.T) {
	e := newEnv(t, 1, 2)
	_, err := e.h.Attach(t.Context(), e.request(0, 1))
	must(t, err)
	before := e.look()
	must(t, e.h.Detach(t.Context(), e.detachment(0, 0)))
	must(t, e.h.Collect(t.Context(), func(o Owner) bool { return o.ContainerID == "container1" }))
	e.same(before)
}

// TestCollect_busy leaves a device alone that another call works on, and does not wait for it: the runtime waits
// for Collect, and there may be many such devices.
func TestCollect_busy(t *testing.T) {
	e := newEnv(t, 2, 2)
	before := e.look()
	for i := range 2 {
		_, err := e.h.Attach(t.Context(), e.request(i, i))
		must(t, err)
	}
	unlock, err := e.h.lock(t.Context(), device(0))
	must(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), lockWait/2)
	defer cancel()
	nobody := func(Owner) bool { return false }
	must(t, e.h.Collect(ctx, nobody))
	for i, inPod := range []bool{true, false} {
		d, err := e.h.Device(device(i))
		must(t, err)
		if d.State == StatePod != inPod {
			t.Errorf("device %d is %v", i, d.State)
		}
	}
	unlock()
	must(t, e.h.Collect(t.Context(), nobody))
	e.same(before)
}

// TestDetach_returned is for an interface that came back by itself, as those of
// hardware do when their namespace ends: with the pod's name, and down.
func TestDetach_returned(t *testing.T) {
	for _, journal := range []string{"kept", "lost"} {
		t.Run("journal "+journal, func(t *testing.T) {
			e := newEnv(t, 1, 1)
			before := e.look()
			e.rdma.linger = 20 // looks that the pod's RDMA device is still listed for
			r := e.request(0, 0)
			r.Settings.MTU = ptr(4000)
			_, err := e.h.Attach(t.Context(), r)
			must(t, err)
			must(t, in(e.pods[0], func(h *netlink.Handle) error {
				l, err := h.LinkByName("net0")
				if err != nil {
					return err
				}
				return errors.Join(h.LinkSetDown(l), moveLink(l, "dev17", e.home))
			}))
			d := e.detachment(0, 0)
			if journal == "lost" {
				must(t, e.h.forget(device(0)))
				d.NetNSPath = ""
			}
			deleteNS(t, e.pods[0].Path())
			must(t, e.h.Detach(t.Context(), d))
			if diff := cmp.Diff(before, e.withoutAddressesIf(journal, before)); diff != "" {
				t.Fatalf("not as it was (-before +after):\n%s", diff)
			}
		})
	}
}

// TestDetach_oldJournal does nothing after a reboot: nothing holds any more.
func TestDetach_oldJournal(t *testing.T) {
	e := newEnv(t, 1, 1)
	before := e.look()
	w := Wiring{
		Device: Device{ID: device(0), NetDev: device(0)}, Owner: Owner{ContainerID: "container0", IfName: "net0"},
		Mode: ModeMove, IfName: "net0", Original: Original{Name: "eth7", MAC: "02:00:00:00:00:77", MTU: 999},
	}
	b, err := json.Marshal(journal{Version: journalVersion, Boot: "another", Complete: true, Wiring: w})
	must(t, err)
	write(t, e.h.file(device(0)), string(b))
	must(t, e.h.Detach(t.Context(), e.detachment(0, 0)))
	_, err = e.h.Attach(t.Context(), e.request(0, 0))
	must(t, err)
	must(t, e.h.Detach(t.Context(), e.detachment(0, 0)))
	e.same(before)
}

// TestDetach_nameInUse: another interface of the host has the original name by now, and the pod gave its interface a name
// of its own.
func TestDetach_nameInUse(t *testing.T) {
	for _, podName := range []string{"net0", "own", device(0)} {
		t.Run(podName, func(t *testing.T) {
			e := newEnv(t, 1, 1)
			_, err := e.h.Attach(t.Context(), e.request(0, 0))
			must(t, err)
			must(t, in(e.pods[0], func(h *netlink.Handle) error {
				l, err := h.LinkByName("net0")
				return errors.Join(err, h.LinkSetDown(l), h.LinkSetName(l, podName))
			}))
			newLink(t, e.home, device(0), "")
			must(t, e.h.Detach(t.Context(), e.detachment(0, 0)))
			must(t, in(e.home, func(h *netlink.Handle) error {
				l, err := search(h, func(l netlink.Link) bool { return l.Attrs().HardwareAddr.String() == "02:00:00:00:01:00" })
				if l == nil {
					t.Error("the interface is not in the host")
				} else if a := l.Attrs(); a.Name != "vfroce0" || a.Alias != "port of rack 7" || !isUp(l) {
					t.Errorf("%s has alias %q, up %v", a.Name, a.Alias, isUp(l))
				}
				return err
			}))
		})
	}
}

// TestDetach_lowerMTU: the interface that bounds the device's MTU, as a PF does, has a lower one by now.
func TestDetach_lowerMTU(t *testing.T) {
	e := newEnv(t, 1, 1)
	const id = "bounded"
	mtu := func(name string, mtu int) {
		t.Helper()
		must(t, in(e.home, func(h *netlink.Handle) error {
			l, err := h.LinkByName(name)
			return errors.Join(err, h.LinkSetMTU(l, mtu))
		}))
	}
	must(t, in(e.home, func(h *netlink.Handle) error {
		l, err := h.LinkByName("cable0")
		a := netlink.NewLinkAttrs()
		a.Name, a.ParentIndex, a.MTU = id, l.Attrs().Index, 9000
		return errors.Join(err, h.LinkAdd(&netlink.Macvlan{LinkAttrs: a, Mode: netlink.MACVLAN_MODE_PRIVATE}))
	}))
	write(t, filepath.Join(e.h.Sys, classNet, id, "operstate"), "up")
	must(t, e.home.Do(func() error { return e.rdma.Add("rxe9", kindRXE, id) }))
	r, d := e.request(0, 0), e.detachment(0, 0)
	r.Device, d.Device = id, id
	_, err := e.h.Attach(t.Context(), r)
	must(t, err)
	mtu("cable0", 4000)
	must(t, e.h.Detach(t.Context(), d))
	must(t, in(e.home, func(h *netlink.Handle) error {
		l, err := h.LinkByName(id)
		if err == nil && (l.Attrs().MTU != 4000 || l.Attrs().Alias != "") {
			t.Errorf("MTU %d, alias %q, want that of the parent, and none", l.Attrs().MTU, l.Attrs().Alias)
		}
		return err
	}))
}

// TestAttach_deadOwner takes a device back whose pod ended without saying so. The
// interface of software ended with it, so that only the journal is left; a child
// leaves its parent.
func TestAttach_deadOwner(t *testing.T) {
	e := newEnv(t, 1, 2)
	before := e.look()
	r := e.request(0, 0)
	r.Mode = ModeIPVlan
	_, err := e.h.Attach(t.Context(), r)
	must(t, err)
	var busy *BusyError
	if _, err := e.h.Attach(t.Context(), e.request(0, 1)); !errors.As(err, &busy) || busy.Owner.ContainerID != "container0" {
		t.Fatalf("error %v, want that container0 has the device", err)
	}
	deleteNS(t, e.pods[0].Path())
	_, err = e.h.Attach(t.Context(), e.request(0, 1))
	must(t, err)
	must(t, e.h.Detach(t.Context(), e.detachment(0, 1)))
	must(t, in(e.pods[0], func(h *netlink.Handle) error { // the handle keeps it
		_, err := h.LinkByName("net0")
		if err == nil {
			l, _ := h.LinkByName("net0")
			return h.LinkDel(l)
		}
		return nil
	}))
	e.same(before)
}

// TestAttach_replacedOwner takes a device back from an earlier sandbox of the same pod, although its namespace is still there: kubelet has
// given that sandbox up, and the runtime may never call DEL for it. Without a journal the namespace counts: the alias has no pod.
func TestAttach_replacedOwner(t *testing.T) {
	for _, mode := range modes {
		t.Run(string(mode), func(t *testing.T) {
			e := newEnv(t, 1, 2)
			before := e.look()
			var rs [2]Request
			for p := range rs {
				rs[p] = e.request(0, p)
				rs[p].Mode, rs[p].Pod.UID = mode, "u1"
			}
			_, err := e.h.Attach(t.Context(), rs[0])
			must(t, err)
			var busy *BusyError
			for name, change := range map[string]func(*Request){
				"another pod": func(r *Request) { r.Pod.UID = "u2" }, "no UID": func(r *Request) { r.Pod.UID = "" },
				"the same sandbox": func(r *Request) { r.ContainerID = rs[0].ContainerID },
			} {
				r := rs[1]
				change(&r)
				if _, err := e.h.Attach(t.Context(), r); !errors.As(err, &busy) || busy.Owner.ContainerID != "container0" {
					t.Errorf("%s: error %v, want that container0 has the device", name, err)
				}
			}
			w, err := e.h.Attach(t.Context(), rs[1])
			must(t, err)
			wired := e.look()
			must(t, e.h.Detach(t.Context(), e.detachment(0, 0))) // of the earlier sandbox, at last
			e.same(wired)
			must(t, e.h.Check(t.Context(), w))
			must(t, e.h.Detach(t.Context(), e.detachment(0, 1)))
			e.same(before)
		})
	}
}

// TestAttach_holder waits for the process that has the former RDMA device open.
func TestAttach_holder(t *testing.T) {
	e := newEnv(t, 1, 1)
	e.rdma.busy = map[string]int{"rxe0": 5}
	_, err := e.h.Attach(t.Context(), e.request(0, 0))
	must(t, err)
	if n := e.rdma.busy["rxe0"]; n != 0 {
		t.Errorf("%d tries were not made", n)
	}
}

func TestAttach_refuses(t *testing.T) {
	e := newEnv(t, 3, 2)
	_, err := e.h.Attach(t.Context(), e.request(2, 1)) // net2 of pod 1
	must(t, err)
	must(t, in(e.home, func(h *netlink.Handle) error { // device 1 is how the host reaches the world
		l, err := h.LinkByName(device(1))
		if err != nil {
			return err
		}
		all := &net.IPNet{IP: net.IPv4zero, Mask: net.CIDRMask(0, 32)}
		return h.RouteAdd(&netlink.Route{LinkIndex: l.Attrs().Index, Scope: netlink.SCOPE_LINK, Dst: all})
	}))
	file := filepath.Join(e.dir, "file")
	write(t, file, "no namespace")
	before := e.look()
	var busy *BusyError
	for _, tt := range []struct {
		name   string
		change func(*Request)
		is     error
		as     any
		text   string
	}{
		{name: "no such device", change: func(r *Request) { r.Device = "eth99" }, is: ErrNotFound, text: "eth99"},
		{name: "no such PCI function", change: func(r *Request) { r.Device = "0000:99:00.1" }, is: ErrNotFound},
		{name: "device is a path", change: func(r *Request) { r.Device = "../../etc/passwd" }, is: ErrNotFound},
		{name: "busy", change: func(r *Request) { r.Device = device(2) }, as: &busy, text: "pod default/pod-1"},
		{name: "twice", change: func(r *Request) { *r = e.request(2, 1) }, as: &busy},
		{name: "name taken", change: func(r *Request) { r.NetNSPath, r.IfName = e.pods[1].Path(), "net2" }, is: ErrNameTaken, text: "net2"},
		{name: "name in the pod taken", change: func(r *Request) { r.NetNSPath, r.PodIfName = e.pods[1].Path(), "net2" }, is: ErrNameTaken},
		{name: "name too long", change: func(r *Request) { r.IfName = "interface0123456" }, text: "interface name"},
		{name: "no namespace", change: func(r *Request) { r.NetNSPath = filepath.Join(e.dir, "nothing") }, is: linux.ErrGone},
		{name: "not a namespace", change: func(r *Request) { r.NetNSPath = file }, is: linux.ErrGone, text: "not a namespace"},
		{name: "the host's namespace", change: func(r *Request) { r.NetNSPath = e.h.NetNS }, text: "hostNetwork"},
		{name: "default route", change: func(r *Request) { r.Device = device(1) }, is: ErrInUse, text: "default route"},
		{name: "VLAN out of range", change: func(r *Request) { r.Settings.VLAN = ptr(4095) }, text: "4095 is not between 0 and 4094"},
		{name: "VLAN of what is no VF", change: func(r *Request) { r.Settings.VLAN = ptr(100) }, text: "not a VF"},
		{name: "QoS without VLAN", change: func(r *Request) { r.Settings.VLANQoS = ptr(3) }, text: "belong to one"},
		{name: "multicast MAC", change: func(r *Request) { r.Settings.MAC = ptr("01:00:5e:00:00:01") }, text: "mac"},
		{name: "MTU that the device refuses", change: func(r *Request) { r.Settings.MTU = ptr(65535 + 1) }, text: "mtu"},
		{name: "required setting that it lacks", change: func(r *Request) {
			r.Settings.Trust, r.Settings.Required = ptr(true), []Setting{SettingTrust}
		}, text: "trust, which is required"},
		{name: "no container", change: func(r *Request) { r.ContainerID = "" }, text: "container ID"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := e.request(0, 0)
			tt.change(&r)
			_, err := e.h.Attach(t.Context(), r)
			switch {
			case err == nil:
				t.Fatal("no error")
			case tt.is != nil && !errors.Is(err, tt.is):
				t.Errorf("error %v is not %v", err, tt.is)
			case tt.as != nil && !errors.As(err, tt.as):
				t.Errorf("error %v is not a %T", err, tt.as)
			case !strings.Contains(err.Error(), tt.text):
				t.Errorf("error %q does not say %q", err, tt.text)
			}
			e.same(before)
		})
	}
}

func TestAttach_fullDisk(t *testing.T) {
	e := newEnv(t, 1, 1)
	must(t, os.MkdirAll(e.h.dir(), 0o700))
	must(t, unix.Mount("tmpfs", e.h.dir(), "tmpfs", 0, "size=4k,nr_inodes=20"))
	t.Cleanup(func() { must(t, unix.Unmount(e.h.dir(), unix.MNT_DETACH)) })
	write(t, filepath.Join(e.h.dir(), "full"), strings.Repeat("x", 4000))
	before := e.look()
	if _, err := e.h.Attach(t.Context(), e.request(0, 0)); !errors.Is(err, unix.ENOSPC) {
		t.Errorf("error %v, want that the disk is full", err)
	}
	e.same(before)
}

// TestDetach_fullDisk: a device comes back although nothing can be written.
func TestDetach_fullDisk(t *testing.T) {
	for _, mode := range modes {
		t.Run(string(mode), func(t *testing.T) {
			e := newEnv(t, 1, 1)
			must(t, os.MkdirAll(e.h.dir(), 0o700))
			must(t, unix.Mount("tmpfs", e.h.dir(), "tmpfs", 0, "size=64k,nr_inodes=20"))
			t.Cleanup(func() { must(t, unix.Unmount(e.h.dir(), unix.MNT_DETACH)) })
			before := e.look()
			r := e.request(0, 0)
			r.Mode = mode
			_, err := e.h.Attach(t.Context(), r)
			must(t, err)
			full := filepath.Join(e.h.dir(), "full")
			if err := os.WriteFile(full, make([]byte, 1<<20), 0o600); !errors.Is(err, unix.ENOSPC) {
				t.Fatalf("fill the disk: %v", err)
			}
			must(t, e.h.Detach(t.Context(), e.detachment(0, 0)))
			must(t, os.Remove(full))
			e.same(before)
		})
	}
}

// TestAttach_churn lets many pods want few devices at once.
func TestAttach_churn(t *testing.T) {
	const devices, pods, attachments = 6, 10, 100
	e := newEnv(t, devices, pods)
	before := e.look()
	seed := testenv.Seed(t)
	var wg sync.WaitGroup
	attached := make([]int, attachments)
	for a := range attachments {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(seed, uint64(a)))
			i, p := rng.IntN(devices), a%pods
			r := e.request(i, p)
			r.ContainerID, r.IfName = fmt.Sprintf("container%d", a), fmt.Sprintf("net%d", a)
			r.Mode = modes[rng.IntN(len(modes))]
			w, err := e.h.Attach(t.Context(), r)
			var busy *BusyError
			switch {
			case errors.As(err, &busy):
				return
			case err != nil:
				t.Errorf("seed %d: attach %d: %v", seed, a, err)
				return
			}
			attached[a] = 1
			if err := e.h.Check(t.Context(), w); err != nil {
				t.Errorf("seed %d: check %d: %v", seed, a, err)
			}
			if err := e.h.Detach(t.Context(), Detachment{ContainerID: r.ContainerID, IfName: r.IfName}); err != nil {
				t.Errorf("seed %d: detach %d: %v", seed, a, err)
			}
		})
	}
	wg.Wait()
	n := 0
	for _, one := range attached {
		n += one
	}
	if n < devices {
		t.Errorf("seed %d: only %d pods of %d got a device", seed, n, attachments)
	}
	e.same(before)
}

// TestHost_Devices_movedSoftRoCE: the RDMA device of a pod names an interface that
// is another one in the host.
func TestHost_Devices_movedSoftRoCE(t *testing.T) {
	e := newEnv(t, 1, 1)
	r := e.request(0, 0)
	r.PodIfName = "eth0"
	_, err := e.h.Attach(t.Context(), r)
	must(t, err)
	write(t, filepath.Join(e.h.Sys, classNet, "eth0", "operstate"), "up")
	devices, err := e.h.Devices()
	must(t, err)
	if len(devices) != 1 || devices[0].ID != device(0) || devices[0].State != StatePod || devices[0].NetDev != "eth0" {
		t.Errorf("devices %+v, want the one in the pod", devices)
	}
	if _, err := e.h.Device("eth0"); !errors.Is(err, ErrNotFound) {
		t.Errorf("error %v, want that the host's eth0 is no device", err)
	}
}
