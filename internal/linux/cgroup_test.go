// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/internal/testenv"
)

// openCgroups opens the hierarchy, and makes a cgroup for the test below that of this process, whose path it returns.
func openCgroups(t *testing.T) (*Cgroups, string) {
	t.Helper()
	testenv.Need(t, testenv.Root, testenv.NetAdmin, testenv.BPF)
	all, err := OpenCgroups()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { mustDo(t, all.Close()) })
	own := strings.TrimSuffix(ownCgroup(t), "/")
	name := fmt.Sprintf("%s/kube-smcr-test-%08x", own, rand.Uint32())
	makeCgroups(t, all, name)
	return all, name
}

// ownCgroup is the path of this process's cgroup from the root.
func ownCgroup(t *testing.T) string {
	t.Helper()
	var text []byte
	mustDo(t, inNodesCgroups(func() (err error) {
		text, err = os.ReadFile("/proc/thread-self/cgroup")
		return err
	}))
	for line := range strings.Lines(string(text)) {
		if name, ok := strings.CutPrefix(strings.TrimSpace(line), "0::"); ok {
			return name
		}
	}
	t.Fatalf("no cgroup v2 in %q", text)
	return ""
}

// makeCgroups makes cgroups, which are removed in the reverse order.
func makeCgroups(t *testing.T, all *Cgroups, names ...string) {
	t.Helper()
	for _, name := range names {
		mustDo(t, os.Mkdir(all.dir(name), 0o755))
		t.Cleanup(func() { _ = os.Remove(all.dir(name)) })
	}
}

// moveTo moves this process to a cgroup, and returns what takes it back.
func moveTo(t *testing.T, all *Cgroups, name string) (back func()) {
	t.Helper()
	was := ownCgroup(t)
	to := func(name string) {
		mustDo(t, os.WriteFile(filepath.Join(all.dir(name), "cgroup.procs"), []byte(strconv.Itoa(os.Getpid())), 0))
	}
	to(name)
	moved := true
	back = func() {
		if moved {
			moved = false
			to(was)
		}
	}
	t.Cleanup(back)
	return back
}

func mustOpenCgroup(t *testing.T, all *Cgroups, name string) *Cgroup {
	t.Helper()
	g, err := all.Open(name)
	if err != nil {
		t.Fatal(err)
	}
	return g
}

func TestCgroups_Open(t *testing.T) {
	all, name := openCgroups(t)
	g := mustOpenCgroup(t, all, name)
	if g.ID() == 0 || g.Path() != name || g.String() != "cgroup "+name || g.Gone() {
		t.Errorf("%v with ID %d at %s, gone: %t", g, g.ID(), g.Path(), g.Gone())
	}
	if again := mustOpenCgroup(t, all, name); again.ID() != g.ID() {
		t.Errorf("IDs %d and %d", g.ID(), again.ID())
	}
	for _, bad := range []string{"", "/", "x", name + "/", name + "/../x"} {
		if got, err := all.Open(bad); err == nil || errors.Is(err, ErrGone) {
			t.Errorf("%q: %v, %v", bad, got, err)
		}
	}
	if got, err := all.Open(name + "/none"); !errors.Is(err, ErrGone) {
		t.Errorf("%v, %v", got, err)
	}
	if got, err := all.Open(name + "/cgroup.procs"); err == nil || errors.Is(err, ErrGone) {
		t.Errorf("%v, %v", got, err)
	}
	mustDo(t, os.Remove(all.dir(name)))
	if !g.Gone() {
		t.Error("a cgroup that was removed is there")
	}
	mustDo(t, os.Mkdir(all.dir(name), 0o755))
	if !g.Gone() {
		t.Error("another one with its path is taken for it")
	}
}

func TestCgroup_Family(t *testing.T) {
	all, name := openCgroups(t)
	makeCgroups(t, all, name+"/a", name+"/a/b", name+"-other")
	g := mustOpenCgroup(t, all, name)
	ids, err := g.Family()
	if err != nil || len(ids) != 3 || !ids[g.ID()] || !ids[mustOpenCgroup(t, all, name+"/a/b").ID()] {
		t.Errorf("%v, %v", ids, err)
	}
}

// One look has a bound: of more cgroups it is an error, and none is taken for not there.
func TestCgroups_tooMany(t *testing.T) {
	all, name := openCgroups(t)
	makeCgroups(t, all, name+"/a", name+"/b")
	for left, want := range map[int]error{1: ErrTooMuch, 2: nil} {
		seen := 0
		done, err := all.children(name, &left, func(string, uint64) bool { seen++; return false })
		if done || !errors.Is(err, want) || want == nil && seen != 2 {
			t.Errorf("%d seen, done %t: %v, want %v", seen, done, err, want)
		}
	}
}

func TestCgroups_FindPods(t *testing.T) {
	const (
		systemd = "0f0e0d0c-1111-2222-3333-444455556666"
		plain   = "0f0e0d0c-1111-2222-3333-444455557777"
		inPod   = "0f0e0d0c-1111-2222-3333-444455558888"
	)
	all, name := openCgroups(t)
	ofSystemd := name + "/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-burstable.slice"
	ofSystemd += "/kubelet-kubepods-burstable-pod0f0e0d0c_1111_2222_3333_444455556666.slice"
	ofPlain := name + "/kubepods/besteffort/pod" + plain
	for _, leaf := range []string{ofSystemd, ofPlain, ofPlain + "/pod" + inPod} {
		for i := len(name) + 1; i <= len(leaf); i++ {
			if i < len(leaf) && leaf[i] != '/' {
				continue
			}
			if _, err := os.Stat(all.dir(leaf[:i])); err != nil {
				makeCgroups(t, all, leaf[:i])
			}
		}
	}
	got, err := all.FindPods([]string{systemd, plain, inPod, "none"})
	if err != nil || len(got) != 2 || got[systemd] != ofSystemd || got[plain] != ofPlain {
		t.Errorf("%v, %v", got, err)
	}
}

// Who sees its own part of the hierarchy only, as a container without the node's processes, does not take what is elsewhere for gone.
func TestCgroups_partial(t *testing.T) {
	all, name := openCgroups(t)
	makeCgroups(t, all, name+"/own", name+"/own/a", name+"/other")
	id := func(below string) uint64 { return mustOpenCgroup(t, all, name+below).ID() }
	back := moveTo(t, all, name+"/own")
	defer back()
	var part Cgroups
	result := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with this goroutine
		err := unix.Unshare(unix.CLONE_NEWCGROUP)
		if err == nil {
			part.root, err = mountCgroups()
		}
		if err == nil {
			part.partial, err = isOwnPart(part.root)
		}
		result <- err
	}()
	mustDo(t, <-result)
	defer func() { mustDo(t, part.Close()) }()
	if got, err := part.Paths([]uint64{id("/own/a"), id("/other")}); !errors.Is(err, ErrPartial) || len(got) != 1 || got[id("/own/a")] != "/a" {
		t.Errorf("of a part: %v, %v", got, err)
	}
	if got, err := part.Paths([]uint64{id("/own/a")}); err != nil || len(got) != 1 {
		t.Errorf("of a part, what is there: %v, %v", got, err)
	}
	if got, err := all.Paths([]uint64{id("/other"), 1 << 40}); err != nil || len(got) != 1 {
		t.Errorf("of the whole: %v, %v", got, err)
	}
}

// Programs of cgroups that are very deep are the pod's, too.
func TestCgroup_Family_deep(t *testing.T) {
	all, name := openCgroups(t)
	deep := name
	for range 3 * maxCgroupDepth {
		deep += "/a"
		makeCgroups(t, all, deep)
	}
	ids, err := mustOpenCgroup(t, all, name).Family()
	if err != nil || len(ids) != 1+3*maxCgroupDepth || !ids[mustOpenCgroup(t, all, deep).ID()] {
		t.Errorf("%d, %v", len(ids), err)
	}
}

// A program that makes very many cgroups below its own keeps nobody from what is less deep.
func TestCgroups_manyBelow(t *testing.T) {
	const uid = "0f0e0d0c-1111-2222-3333-444455559999"
	all, name := openCgroups(t)
	const programs = 8
	for i := range programs { // the kernel lists them in no order
		program := fmt.Sprintf("%s/%d", name, i)
		makeCgroups(t, all, program, program+"/a", program+"/a/b", program+"/a/b/c")
	}
	pods := name + "/kubepods"
	makeCgroups(t, all, pods, pods+"/pod"+uid)
	id := mustOpenCgroup(t, all, pods+"/pod"+uid).ID()
	looks := 0
	mustDo(t, all.walk(name, math.MaxInt, func(_ string, got uint64) (below, done bool) {
		looks++
		return true, got == id
	}))
	if most := 2 * (programs + 1); looks > most {
		t.Errorf("looked at %d until it was found, want at most %d", looks, most)
	}
	if got, err := all.Paths([]uint64{id}); err != nil || got[id] != pods+"/pod"+uid {
		t.Errorf("%v, %v", got, err)
	}
}

func TestFilterOption_cgroup(t *testing.T) {
	all, name := openCgroups(t)
	makeCgroups(t, all, name+"/container")
	o := newOffering(t)
	at := Place{o.pod, mustOpenCgroup(t, all, name)}
	const port = 6379
	expect := func(t *testing.T, f ipFamily, what string, want bool) {
		t.Helper()
		if got := o.arrives(t, o.pod, o.peer, netip.AddrPortFrom(f.peer, port)); got != want {
			t.Errorf("%s: the option to the peer arrives: %t", what, got)
		}
		if got := o.arrives(t, o.peer, o.pod, netip.AddrPortFrom(f.pod, port)); got != want {
			t.Errorf("%s: the option to the pod arrives: %t", what, got)
		}
	}
	inside := func(t *testing.T, f ipFamily, what string, want bool) {
		t.Helper()
		back := moveTo(t, all, name+"/container")
		defer back()
		expect(t, f, what, want)
	}
	for _, f := range families {
		t.Run(f.name, func(t *testing.T) {
			mustDo(t, FilterOption(at, OptionFilterConfig{}))
			expect(t, f, "others", true)
			inside(t, f, "no peers", false)
			mustDo(t, FilterOption(at, OptionFilterConfig{Peers: []OutboundRule{{Prefix: f.all()}}}))
			inside(t, f, "all peers", true)
			mustDo(t, FilterOption(at, OptionFilterConfig{}))
			mustDo(t, SweepOptionFilter(In(o.pod))) // that of the whole namespace
			mustDo(t, SweepOptionFilters(o.pod, at.Cgroup.ID()+1))
			inside(t, f, "tables of others removed", false)
			if got, err := OptionFilters(o.pod); err != nil || !slices.Equal(got, []uint64{at.Cgroup.ID()}) {
				t.Errorf("tables of %d, %v", got, err)
			}
			for range 2 {
				mustDo(t, SweepOptionFilters(o.pod, at.Cgroup.ID()))
			}
			inside(t, f, "its table removed by the ID", true)
			if got, err := OptionFilters(o.pod); err != nil || len(got) != 0 {
				t.Errorf("tables of %d, %v", got, err)
			}
			mustDo(t, FilterOption(at, OptionFilterConfig{}))
			for range 2 {
				mustDo(t, SweepOptionFilter(at))
			}
			inside(t, f, "its table removed", true)
		})
	}
}

func TestTCPSockets(t *testing.T) {
	all, name := openCgroups(t)
	pod, peer := newPair(t)
	id := mustOpenCgroup(t, all, name).ID()
	at := netip.AddrPortFrom(families[0].pod, 7000)
	back := moveTo(t, all, name)
	ln := listen(t, pod, nil, at.Addr(), at.Port())
	back()
	c := mustDial(t, peer, nil, at)
	mustAccept(t, ln)
	there := addrPortOf(t, c.LocalAddr())
	got, err := TCPSockets(pod)
	if err != nil || len(got) != 2 {
		t.Fatalf("%+v, %v", got, err)
	}
	for _, s := range got {
		if s.Local != at || s.Cgroup != id || s.Listens == s.Peer.IsValid() || !s.Listens && s.Peer != there {
			t.Errorf("%+v, want cgroup %d", s, id)
		}
	}
	if got, err := TCPSockets(peer); err != nil || len(got) != 1 || got[0].Cgroup == id || got[0].Cgroup == 0 {
		t.Errorf("at the peer: %+v, %v", got, err)
	}
}
