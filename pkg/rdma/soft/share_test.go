// SPDX-License-Identifier: Apache-2.0

package soft_test

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/internal/testenv"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/rdmatest"
	"github.com/smcr-io/kube-smcr/pkg/rdma/soft"
)

func shared(addr netip.Addr, name string) soft.Config {
	return soft.Config{Name: name, Addr: addr, Port: testPort, Share: true}
}

// stream sends from x and back from y until stop is closed, a few times at
// least.
func stream(t testing.TB, x, y *rdmatest.End, stop <-chan struct{}) {
	const (
		size  = 40_000
		least = 5
	)
	for rounds := 0; ; rounds++ {
		select {
		case <-stop:
			if rounds >= least {
				return
			}
		default:
		}
		for _, e := range [][2]*rdmatest.End{{x, y}, {y, x}} {
			e[1].Recv(t, 1, 900_000, 100)
			e[0].Send(t, e[0].Write(2, e[1], 0, size))
			e[0].Send(t, rdma.SendWR{ID: 3, Op: rdma.OpSend, Flags: rdma.SendSignaled, SGL: []rdma.SGE{e[0].SGE(0, 44)}})
			rdmatest.AwaitOne(t, e[1].RecvCQ, 1, rdma.StatusSuccess)
			rdmatest.AwaitOne(t, e[0].SendCQ, 2, rdma.StatusSuccess)
			rdmatest.AwaitOne(t, e[0].SendCQ, 3, rdma.StatusSuccess)
		}
	}
}

// talk runs traffic on a pair until the returned function is called.
func talk(t testing.TB, a, b rdma.Device) (end func()) {
	t.Helper()
	x, y := rdmatest.Pair(t, a, b, rdmatest.Options{})
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() { stream(t, x, y, stop) })
	return func() {
		close(stop)
		wg.Wait()
	}
}

// strays fails the test if a device got packets of another one. Its own may come late,
// when their queue pair is gone.
func strays(t *testing.T, ds ...*soft.Device) {
	t.Helper()
	for _, d := range ds {
		if s := d.Stats(); s.RxOtherDevice != 0 || s.RxWrongSource != 0 {
			t.Errorf("%s got packets of another device: %+v", d.Name(), s)
		}
	}
}

// generations is six devices that follow each other on one address, each with
// traffic to a peer that stays, while its predecessor and its successor have
// theirs.
func generations(t *testing.T, open func(t testing.TB, name string) *soft.Device, peer *soft.Device) {
	var (
		last *soft.Device
		end  func()
	)
	for i := range 6 {
		d := open(t, fmt.Sprintf("generation%d", i))
		before := end
		end = talk(t, d, peer)
		if last == nil {
			last = d
			continue
		}
		both := talk(t, d, last)
		pause(20 * time.Millisecond)
		both()
		before()
		if err := last.Close(); err != nil {
			t.Fatal(err)
		}
		strays(t, last, d)
		last = d
	}
	end()
	strays(t, last)
	if s := peer.Stats(); s.RxUnknownQP != 0 {
		t.Errorf("peer: %+v", s)
	}
}

// pause lets traffic run for a moment.
func pause(d time.Duration) { <-time.After(d) }

func TestShare_generations(t *testing.T) {
	peer := openUDP(t, soft.Config{Name: "peer", Addr: loopB, Port: testPort})
	generations(t, func(t testing.TB, name string) *soft.Device { return openUDP(t, shared(loopA, name)) }, peer)
}

// TestShare_merged has a path on which the receiver's kernel merges packets of
// one flow, as real NICs do: packets for two devices must not be merged.
func TestShare_merged(t *testing.T) {
	testenv.Need(t, testenv.Root, testenv.NetAdmin, testenv.Program("ethtool"))
	for _, family := range []string{"IPv4", "IPv6"} {
		t.Run(family, func(t *testing.T) {
			v := newVethPair(t, 1500)
			run(t, "ip", "netns", "exec", v.a, "ethtool", "-K", "v0", "gro", "on")
			// The kernel merges nothing that a veth could have left whole.
			run(t, "ip", "netns", "exec", v.b, "ethtool", "-K", "v1", "tso", "off")
			// Packets wait so long for others that they can be merged with.
			run(t, "ip", "netns", "exec", v.a, "sh", "-c", "echo 100000 > /sys/class/net/v0/gro_flush_timeout")
			at, peerAt := v.a4, v.b4
			if family == "IPv6" {
				at, peerAt = v.a6, v.b6
			}
			// Packet by packet, so that all merging is the kernel's.
			peer := active(t, v.b, soft.Config{Name: "peer", Addr: peerAt, Port: testPort, Share: true, NoSegmentation: true})
			generations(t, func(t testing.TB, name string) *soft.Device { return active(t, v.a, shared(at, name)) }, peer)
		})
	}
}

// TestShare_third: two share, a third one waits for the end of the first.
func TestShare_third(t *testing.T) {
	first := openUDP(t, shared(loopA, "first"))
	second := openUDP(t, shared(loopA, "second"))
	if d, err := soft.Open(shared(loopA, "third")); !errors.Is(err, soft.ErrShared) {
		t.Errorf("third device: %v, want ErrShared", err)
		if err == nil {
			_ = d.Close()
		}
	}
	for name, d := range map[string]*soft.Device{"first": first, "second": second} {
		if err := d.Close(); err != nil {
			t.Errorf("close %s: %v", name, err)
		}
	}
	openUDP(t, shared(loopA, "third"))
}

// TestShare_youngerEndsFirst: a successor that fails leaves the older device
// as it was, again and again.
func TestShare_youngerEndsFirst(t *testing.T) {
	peer := openUDP(t, soft.Config{Name: "peer", Addr: loopB, Port: testPort})
	first := openUDP(t, shared(loopA, "first"))
	end := talk(t, first, peer)
	for i := range 5 {
		d := openUDP(t, shared(loopA, fmt.Sprintf("try%d", i)))
		talk(t, d, peer)()
		if err := d.Close(); err != nil {
			t.Fatal(err)
		}
	}
	end()
	strays(t, first, peer)
}

// TestShare_atOnce opens and closes devices from many goroutines: at most two
// are open at a time, and none waits forever.
func TestShare_atOnce(t *testing.T) {
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			for range 20 {
				d, err := soft.Open(shared(loopA, fmt.Sprint("d", i)))
				if errors.Is(err, soft.ErrShared) {
					continue
				}
				if err != nil {
					t.Error(err)
					return
				}
				if err := d.Close(); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	openUDP(t, shared(loopA, "last"))
}

// TestShare_refuses: sharing is for devices that both want it.
func TestShare_refuses(t *testing.T) {
	for _, tt := range []struct {
		name          string
		first, second bool
	}{{"the first shares", true, false}, {"the second shares", false, true}} {
		t.Run(tt.name, func(t *testing.T) {
			first, second := shared(loopA, "first"), shared(loopA, "second")
			first.Share, second.Share = tt.first, tt.second
			openUDP(t, first)
			if d, err := soft.Open(second); !errors.Is(err, syscall.EADDRINUSE) {
				t.Errorf("second device: %v, want EADDRINUSE", err)
				if err == nil {
					_ = d.Close()
				}
			}
			// What the attempt took is free again.
			second.Addr = loopB
			openUDP(t, second)
		})
	}
	if _, err := soft.Open(soft.Config{Name: "x", Addr: loopA, Share: true, Wire: &stubborn{}}); err == nil || !strings.Contains(err.Error(), "only a UDP socket") {
		t.Errorf("shared wire: %v", err)
	}
}

// TestShare_generalServices: a packet to queue pair 1 is one device's, and
// harmless.
func TestShare_generalServices(t *testing.T) {
	first, second := openUDP(t, shared(loopA, "first")), openUDP(t, shared(loopA, "second"))
	c, err := net.Dial("udp", netip.AddrPortFrom(loopA, testPort).String())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	var bth [16]byte
	bth[7] = 1
	if _, err := c.Write(bth[:]); err != nil {
		t.Fatal(err)
	}
	deadline := time.Now().Add(10 * time.Second)
	for first.Stats().RxPackets == 0 { // polls the device's counter
		if time.Now().After(deadline) {
			t.Fatalf("packet not seen: %+v, %+v", first.Stats(), second.Stats())
		}
		pause(time.Millisecond)
	}
	if s := second.Stats(); s.RxPackets != 0 {
		t.Errorf("second device: %+v", s)
	}
}

// TestShare_stoppedProcess: a device whose process does not answer keeps its
// successor from the socket, with a word about why.
func TestShare_stoppedProcess(t *testing.T) {
	ln, err := net.ListenUnix("unix", &net.UnixAddr{Net: "unix", Name: fmt.Sprintf("@smcr-soft/%v/%d/0", loopA, testPort)})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = ln.Close() }()
	if d, err := soft.Open(shared(loopA, "second")); err == nil || !strings.Contains(err.Error(), "is its process stopped?") {
		t.Errorf("open = %v", err)
		if err == nil {
			_ = d.Close()
		}
	}
}
