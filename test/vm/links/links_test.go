// SPDX-License-Identifier: Apache-2.0

package links

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/test/vm/lab"
	"github.com/smcr-io/kube-smcr/test/vm/peer/drive"
	"github.com/smcr-io/kube-smcr/test/vm/peer/report"
)

// What nft matches in packets: the opcode of the BTH, behind 8 bytes of UDP, and the type of the
// LLC message, behind the BTH, in version 2.
const (
	bthOpcode       = "@th,64,8"
	bthAck, bthSend = 0x11, 0x04

	llcType                                      = "@th,160,8"
	llcAddLink, llcDeleteLink, llcRequestAddLink = 0x22, 0x24, 0x25
)

// setUpTimeout is for building, modules and devices.
const setUpTimeout = 5 * time.Minute

// Bounds for how long a connection may stand still. What a link's loss costs is
// StallTimeout of our engine, or what the kernel needs to hear of its carrier;
// the rest is room for two emulated machines on busy cores.
const (
	quietStall = 5 * time.Second
	cutStall   = 10 * time.Second
	// blackholeStall has the kernel's TEST LINK and its wait for the answer: it
	// learns of a path that is dead in one direction by nothing else.
	blackholeStall = testLinkSeconds*time.Second + 2*time.Second + cutStall
	// rebootTime is for our engine to find that a peer is gone: all retries of two
	// links, one after the other.
	rebootTime = 30 * time.Second
)

// A blackhole swallows lostAnswers packets after we have given the link up, if so many
// come within lostTime.
const (
	lostAnswers = 3
	lostTime    = 2 * time.Second
)

// refusedTime is for two tries to get another link. They come 1, 2, 4 and so on seconds apart, and the first ones
// may be over when the counter begins.
const refusedTime = 2 * time.Minute

func TestLinks(t *testing.T) {
	l := lab.ForTest(t, lab.Config{})
	b := &bed{lab: l, kernel: l.Guest(0), engine: l.Guest(1)}
	ctx, cancel := context.WithTimeout(t.Context(), setUpTimeout)
	defer cancel()
	if err := drive.Build(ctx, l); err != nil {
		t.Fatal(err)
	}
	b.setUpKernel(t)
	t.Run("soft", func(t *testing.T) { b.testProvider(t, soft) })
	t.Run("fuzz", b.testFuzz)
	t.Run("verbs", func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), setUpTimeout)
		defer cancel()
		if err := b.engine.AddRXE(ctx, 0, 1); err != nil {
			t.Fatal(err)
		}
		b.testProvider(t, verbs)
	})
}

// testProvider runs the scenarios that a provider's devices take part in. Those
// that are about the engine only, software devices do.
func (b *bed) testProvider(t *testing.T, p provider) {
	two, one := b.devices(p, 0, 1), b.devices(p, 0)
	every, ours, hard := []provider{soft, verbs}, []provider{soft}, []provider{verbs}
	for _, s := range []struct {
		name  string
		of    []provider
		roles []role
		test  func(t *testing.T, e role)
	}{
		{"asymmetric", ours, both, func(t *testing.T, e role) { b.testAsymmetric(t, e, one) }},
		{"refused", ours, both, func(t *testing.T, e role) { b.testRefused(t, e, two) }},
		{"cut", every, both, func(t *testing.T, e role) { b.testCut(t, e, two) }},
		{"blackhole", every, both, func(t *testing.T, e role) { b.testBlackhole(t, e, two) }},
		{"weEndTheGroup", ours, []role{serves}, func(t *testing.T, _ role) { b.testIdleGroup(t, two) }},
		{"killed", hard, []role{serves}, func(t *testing.T, e role) { b.testKilled(t, e, two) }},
		{"kernelUnloaded", ours, []role{serves}, func(t *testing.T, _ role) { b.testUnloaded(t, two) }},
		// Behind kernelUnloaded: a kernel that has lost both devices keeps a socket now and
		// then, and with it the module.
		{"deviceRemoved", ours, both, func(t *testing.T, e role) { b.testDeviceRemoved(t, e, two) }},
		{"kernelRebooted", ours, []role{dials}, func(t *testing.T, e role) { b.testReboot(t, e, two) }},
		{"weGiveUp", every, both, func(t *testing.T, e role) { b.testGivenUp(t, e, two) }},
	} {
		if !slices.Contains(s.of, p) {
			continue
		}
		for _, e := range s.roles {
			t.Run(s.name+"/"+string(e), func(t *testing.T) { s.test(t, e) })
			if t.Failed() {
				return // a kernel's side that is spoilt tells nothing about the next
			}
		}
	}
}

// setUpKernel gives the kernel's side two devices of one physical network.
func (b *bed) setUpKernel(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), setUpTimeout)
	defer cancel()
	if err := drive.SetUpKernel(ctx, b.kernel, 0, 1); err != nil {
		t.Fatal(err)
	}
	b.testLinkTime(t)
}

func (b *bed) testLinkTime(t *testing.T) {
	t.Helper()
	if _, err := b.kernel.Run(t.Context(), "sysctl", "-q", "-w", fmt.Sprintf("net.smc.smcr_testlink_time=%d", testLinkSeconds)); err != nil {
		t.Fatal(err)
	}
}

// Our side has one device, the kernel two: the second link shares ours.
func (b *bed) testAsymmetric(t *testing.T, e role, devices string) {
	r := b.start(t, plan{engine: e, devices: devices})
	r.awaitOurs("ASYMMETRIC LOCAL")
	r.awaitGroup("ASYMMETRIC PEER", "rxe0", "rxe1")
	r.wantStall(quietStall)(r.enough())
}

// The kernel's side has one device, ours two. We try again and again to get a link that does
// not share the kernel's, since Linux may have missed that it has another one; it refuses,
// and goes on. When it has got one, there is such a link.
func (b *bed) testRefused(t *testing.T, e role, devices string) {
	r, restore := b.startWithOne(t, plan{engine: e, devices: devices})
	_, err := b.kernel.Shell(t.Context(), fmt.Sprintf("nft 'add table inet asked; add chain inet asked in { type filter hook input priority 0; };"+
		" add rule inet asked in udp dport 4791 %s %#x %s { %#x, %#x } counter'", bthOpcode, bthSend, llcType, llcAddLink, llcRequestAddLink))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if _, err := b.kernel.Run(context.Background(), "nft", "delete", "table", "inet", "asked"); err != nil {
			t.Error(err)
		}
	})
	for end := time.Now().Add(refusedTime); counted(t, b.kernel, "asked") < 2; {
		if time.Now().After(end) {
			t.Fatalf("in %v the kernel was not asked twice for another link", refusedTime)
		}
		time.Sleep(100 * time.Millisecond) // polls what the kernel was asked
	}
	r.note("the kernel has been asked twice")
	r.awaitGroup("ASYMMETRIC LOCAL", "rxe0", "rxe0")
	restore()
	r.note("rxe1 is back")
	r.awaitOurs("ASYMMETRIC PEER", "SYMMETRIC")
	r.awaitGroup("SYMMETRIC", "rxe0", "rxe1")
	r.wantStall(quietStall)(r.enough())
}

// startWithOne is start where the kernel has one device, and ours more: the links share the
// kernel's. restore gives the kernel its other device back.
func (b *bed) startWithOne(t *testing.T, p plan) (r *round, restore func()) {
	if err := b.kernel.RemoveRXE(limited(t), 1); err != nil {
		t.Fatal(err)
	}
	restore = sync.OnceFunc(func() {
		if err := b.kernel.AddRXE(context.Background(), 1); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(restore)
	r = b.start(t, p)
	r.awaitOurs("ASYMMETRIC PEER")
	r.awaitGroup("ASYMMETRIC LOCAL", "rxe0", "rxe0")
	return r, restore
}

// Both sides have two devices: there are two links that share none. A NIC of one
// side loses its carrier under load, and gets it back; then one of the other side.
func (b *bed) testCut(t *testing.T, e role, devices string) {
	r := b.start(t, plan{engine: e, devices: devices})
	history := []string{"SYMMETRIC"}
	r.awaitOurs(history...)
	r.awaitGroup("SYMMETRIC", "rxe0", "rxe1")
	for _, of := range []*lab.Guest{b.kernel, b.engine} {
		r.setLink(of, false)
		history = append(history, "SINGLE")
		r.awaitOurs(history...)
		r.awaitWithout(of.Addr(0))
		r.awaitReplacement()
		r.setLink(of, true)
		history = append(history, "SYMMETRIC")
		r.awaitOurs(history...)
		r.awaitGroup("SYMMETRIC", "rxe0", "rxe1")
	}
	r.wantStall(cutStall)(r.enough())
}

// setLink cuts the first NIC's link or restores it.
func (r *round) setLink(of *lab.Guest, up bool) {
	r.t.Helper()
	if err := of.SetLink(0, up); err != nil {
		r.t.Fatal(err)
	}
	r.note(fmt.Sprintf("the link of %s is up: %t", of.Name(), up))
	if !up {
		r.t.Cleanup(func() { // of a test that failed on the way
			if err := of.SetLink(0, true); err != nil {
				r.t.Errorf("restore the link: %v", err)
			}
		})
	}
}

// Nothing comes in on the first link at one side, while its own packets leave; then at
// the other side. The one that sends notices by the acknowledgements that are missing,
// or by TEST LINK.
func (b *bed) testBlackhole(t *testing.T, e role, devices string) {
	r := b.start(t, plan{engine: e, devices: devices, do: drips})
	history := []string{"SYMMETRIC"}
	r.awaitOurs(history...)
	r.awaitGroup("SYMMETRIC", "rxe0", "rxe1")
	for _, of := range []*lab.Guest{b.kernel, b.engine} {
		shell := func(script string) {
			t.Helper()
			if _, err := of.Shell(context.Background(), script); err != nil {
				t.Error(err)
			}
		}
		end := func() { shell("nft delete table inet blackhole 2>/dev/null || true") }
		t.Cleanup(end)
		shell("nft 'add table inet blackhole; add chain inet blackhole in { type filter hook input priority 0; };" +
			" add rule inet blackhole in iif eth0 udp dport 4791 counter drop'")
		r.note("the blackhole is there, at " + of.Name())
		history = append(history, "SINGLE")
		r.awaitOurs(history...)
		b.awaitDropped(t, of)
		end()
		r.note("the blackhole is gone")
		history = append(history, "SYMMETRIC")
		r.awaitOurs(history...)
		r.awaitGroup("SYMMETRIC", "rxe0", "rxe1") // ours may have been a client's view of a link that the kernel gave up
	}
	r.wantStall(blackholeStall)(r.enough())
}

// awaitDropped waits until a guest's blackhole has swallowed more, so that answers to
// what is sent after a link was given up get lost too; but not long: maybe nothing is sent.
func (b *bed) awaitDropped(t *testing.T, of *lab.Guest) {
	t.Helper()
	enough := counted(t, of, "blackhole") + lostAnswers
	for end := time.Now().Add(lostTime); counted(t, of, "blackhole") < enough && time.Now().Before(end); {
		time.Sleep(50 * time.Millisecond) // polls the packets that were dropped
	}
}

// counted is how many packets a guest's chain "in" of a table has counted.
func counted(t *testing.T, of *lab.Guest, table string) (n int) {
	t.Helper()
	out, err := of.Run(t.Context(), "nft", "list", "chain", "inet", table, "in")
	_, counter, _ := strings.Cut(out, "counter packets ")
	if _, err2 := fmt.Sscan(counter, &n); err != nil || err2 != nil {
		t.Fatalf("the chain of %s is %q: %v, %v", table, out, err, err2)
	}
	return n
}

// The kernel's side has one device, ours two: the links share the kernel's. What we ask
// on one of them gets lost, while the kernel's requests and their answers pass. We give
// the link up, the kernel hears of that late, and what it goes on to send until then
// may not end the other link.
func (b *bed) testGivenUp(t *testing.T, e role, devices string) {
	r, _ := b.startWithOne(t, plan{engine: e, devices: devices, do: drips})
	shell := func(script string) {
		t.Helper()
		if _, err := b.kernel.Shell(context.Background(), script); err != nil {
			t.Error(err)
		}
	}
	end := func() { shell("nft delete table inet deaf 2>/dev/null || true") }
	t.Cleanup(end)
	rule := func(of int, format string, args ...any) string {
		return fmt.Sprintf("; add rule inet deaf in ip saddr %v udp dport 4791 ", b.engine.Addr(of)) + fmt.Sprintf(format, args...)
	}
	shell("nft 'add table inet deaf; add chain inet deaf in { type filter hook input priority 0; }" +
		rule(0, "%s != %#x drop", bthOpcode, bthAck) +
		rule(1, "%s %#x %s %#x limit rate 1/minute burst 1 packets drop", bthOpcode, bthSend, llcType, llcDeleteLink) + "'")
	r.note("the kernel does not hear our requests on the first link")
	r.awaitOurs("ASYMMETRIC PEER", "SINGLE")
	end()
	r.note("it hears them again")
	r.wantStall(cutStall)(r.enough())
}

// The kernel's side loses a device under load and gets it back, and then both:
// the connections survive the first, and end with the second.
func (b *bed) testDeviceRemoved(t *testing.T, e role, devices string) {
	r := b.start(t, plan{engine: e, devices: devices, broken: true})
	r.awaitOurs("SYMMETRIC")
	r.awaitGroup("SYMMETRIC", "rxe0", "rxe1")
	if err := b.kernel.RemoveRXE(limited(t), 1); err != nil {
		t.Fatal(err)
	}
	r.note("rxe1 is gone")
	r.awaitOurs("SYMMETRIC", "SINGLE")
	if err := b.kernel.AddRXE(limited(t), 1); err != nil {
		t.Fatal(err)
	}
	r.note("rxe1 is back")
	r.awaitGroup("SYMMETRIC", "rxe0", "rxe1")
	r.wantAlive()
	if err := b.kernel.RemoveRXE(limited(t), 0, 1); err != nil {
		t.Fatal(err)
	}
	r.note("both are gone")
	ours, _ := r.wait()
	r.wantEnds(ours)
	if err := b.kernel.AddRXE(limited(t), 0, 1); err != nil {
		t.Fatal(err)
	}
}

// Our engine ends a link group that carries nothing: the kernel has it no more.
func (b *bed) testIdleGroup(t *testing.T, devices string) {
	r := b.start(t, plan{engine: serves, devices: devices, do: "echo:count=3", ours: "-idle 500ms"})
	if _, err := r.client.Wait(); err != nil {
		t.Fatal(err)
	}
	b.quiesce(t) // while our stack lives on
	r.awaitDead("")
	r.wait()
}

// The kernel's module is unloaded while a link group is idle: ours ends, and the
// next one is made as ever.
func (b *bed) testUnloaded(t *testing.T, devices string) {
	r := b.start(t, plan{engine: serves, devices: devices, do: "echo:count=3", forgotten: true})
	if _, err := r.client.Wait(); err != nil {
		t.Fatal(err)
	}
	b.awaitKernel(t, "no socket", endTimeout, func(k report.Kernel) bool { return len(k.Sockets) == 0 })
	if k := b.ask(t); len(k.Groups) != 1 {
		t.Errorf("the kernel has the link groups %+v, want one that is idle", k.Groups)
	}
	if _, err := b.kernel.Run(limited(t), "rmmod", "smc_diag"); err != nil {
		t.Fatal(err)
	}
	for ctx := limited(t); ; { // a socket that has just gone may still hold the module
		_, err := b.kernel.Run(ctx, "rmmod", "smc")
		if err == nil {
			break
		}
		if ctx.Err() != nil {
			t.Fatal(err)
		}
		time.Sleep(100 * time.Millisecond) // polls the module's users
	}
	r.note("the module is gone")
	r.awaitDead("peer deleted the link group")
	if err := drive.SetUpSMC(limited(t), b.kernel, 0, 1); err != nil {
		t.Fatal(err)
	}
	b.testLinkTime(t)
	r.wait()
	again := b.start(t, plan{engine: serves, devices: devices, do: "echo:count=3"})
	again.wait()
}

// Our process is killed under load, and nobody speaks for it on either link: soft RoCE
// drops what comes for queue pairs that are gone. The kernel ends the link group when
// both its TEST LINKs are without an answer. The next process has another peer ID, so
// that its connections need not wait for that.
func (b *bed) testKilled(t *testing.T, e role, devices string) {
	r := b.start(t, plan{engine: e, devices: devices, broken: true})
	r.awaitOurs("SYMMETRIC")
	r.awaitGroup("SYMMETRIC", "rxe0", "rxe1")
	killed := time.Now()
	if _, err := r.ours.Kill(); err != nil {
		t.Fatal(err)
	}
	r.note("our process is killed")
	again := b.start(t, plan{engine: e, devices: devices, do: "echo:count=3"})
	again.wait()
	took := time.Since(killed)
	t.Logf("nothing is left in the kernel %v after", took.Round(100*time.Millisecond))
	if took > blackholeStall {
		t.Errorf("that is more than %v", blackholeStall)
	}
	theirs, _ := r.theirs.Wait() // the error is that connections failed
	for _, c := range theirs.Conns {
		if c.Err == "" {
			t.Errorf("the kernel's connection %s ended well", c.Local)
		}
	}
}

// The kernel's guest is reset under load, and says nothing. Our side's connections
// end, and new ones are made when it is back.
func (b *bed) testReboot(t *testing.T, e role, devices string) {
	r := b.start(t, plan{engine: e, devices: devices, broken: true, forgotten: true})
	r.awaitOurs("SYMMETRIC")
	start := time.Now()
	reset := make(chan error, 1)
	go func() { reset <- b.kernel.Reset(context.Background()) }()
	ours, _ := r.ours.Wait() // the error is that connections failed
	took := time.Since(start)
	t.Logf("our connections ended %v after the reset", took.Round(time.Millisecond))
	if took > rebootTime {
		t.Errorf("that is more than %v", rebootTime)
	}
	r.wantEnds(ours)
	if err := <-reset; err != nil {
		t.Fatal(err)
	}
	b.setUpKernel(t)
	again := b.start(t, plan{engine: e, devices: devices, do: "echo:count=3"})
	again.wait()
}
