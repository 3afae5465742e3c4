// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"os/signal"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/smcr-io/kube-smcr/internal/linux"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/soft"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
	"github.com/smcr-io/kube-smcr/pkg/smcr/synopt"
)

// attackerEnv makes the test binary an attacker: a program in one pod, and a peer
// of that pod, which is a machine without an agent.
const attackerEnv = "KUBE_SMCR_TEST_ATTACKER"

// attackSaid comes before the name of what an attacker begins, each time.
const attackSaid = "attack: "

// ground is what an attacker is told, as JSON.
type ground struct {
	Seed uint64
	// Pod is the namespace of the pod, Peer that of its peer.
	Pod, Peer         string
	PodAddr, PeerAddr netip.Addr
	// Host is a namespace that reaches the nodes' RoCE addresses, where the peer
	// has RoCE for its own. VictimGID is the address of a node that it hurts.
	Host            string
	RoCE, VictimGID netip.Addr
	// Service is a port of the pod that is listened on, and Ports are of the peer.
	Service uint16
	Ports   []uint16
	Budget  int // of connections of any kind
	// Spin makes it take its processor, and do nothing else.
	Spin bool
}

// villain attacks.
type villain struct {
	ground
	pod, peer *linux.NetNS
	option    smcr.Option
	dev       rdma.Device
}

// attacks are the ways to hurt an agent that are known. Each does it once, for
// as long as ctx lasts.
func (v *villain) attacks() map[string]func(context.Context, *rand.Rand) {
	return map[string]func(context.Context, *rand.Rand){
		"selfConnects": v.selfConnects,
		"plain flood":  v.plainFlood,
		"dials":        v.dials,
		"silence":      v.silence,
		"garbage":      v.garbage,
		"churn":        v.churn,
		"peers":        v.peers,
		"deaf peers":   v.deafPeers,
		"hijack":       v.hijack,
		"declines":     v.declines,
	}
}

// attack is the life of an attacker's process.
func attack(text string) error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	v := &villain{}
	if err := json.Unmarshal([]byte(text), &v.ground); err != nil {
		return err
	}
	if v.Spin {
		fmt.Fprintf(os.Stderr, "%sspin\n", attackSaid)
		for ctx.Err() == nil {
			runtime.Gosched() // to nobody
		}
		return nil
	}
	var err error
	if v.pod, err = linux.OpenNetNS(v.Pod); err != nil {
		return err
	}
	if v.peer, err = linux.OpenNetNS(v.Peer); err != nil {
		return err
	}
	host, err := linux.OpenNetNS(v.Host)
	if err != nil {
		return err
	}
	if v.option, err = synopt.Open(synopt.Config{Mark: markWire}); err != nil {
		return err
	}
	err = host.Do(func() (err error) {
		v.dev, err = soft.Open(soft.Config{Name: "villain", Addr: v.RoCE})
		return err
	})
	if err != nil {
		return err
	}
	rnd := rand.New(rand.NewPCG(v.Seed, 2))
	for ctx.Err() == nil {
		v.mix(ctx, rnd)
	}
	return nil
}

// mix runs one to three attacks at a time for a second or two.
func (v *villain) mix(ctx context.Context, rnd *rand.Rand) {
	ctx, cancel := context.WithTimeout(ctx, time.Second+time.Duration(rnd.Int64N(int64(time.Second))))
	defer cancel()
	all := v.attacks()
	names := slices.Sorted(maps.Keys(all)) // so that the seed says which
	var wg sync.WaitGroup
	for range 1 + rnd.IntN(3) {
		name, seed := names[rnd.IntN(len(names))], rnd.Uint64()
		fmt.Fprintf(os.Stderr, "%s%s\n", attackSaid, name)
		wg.Go(func() { all[name](ctx, rand.New(rand.NewPCG(seed, 3))) })
	}
	wg.Wait()
}

// flood makes connections, ten times the budget if it can, 16 at a time, and
// holds them until ctx ends.
func (v *villain) flood(ctx context.Context, dial func(context.Context, int) (io.Closer, error)) {
	var (
		wg    sync.WaitGroup
		mu    sync.Mutex // guards conns
		conns []io.Closer
	)
	slots := make(chan struct{}, 16)
	for i := 0; i < 10*v.Budget && ctx.Err() == nil; i++ {
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			if c, err := dial(ctx, i); err == nil {
				mu.Lock()
				defer mu.Unlock()
				conns = append(conns, c)
			}
		})
	}
	wg.Wait()
	<-ctx.Done()
	for _, c := range conns {
		_ = c.Close()
	}
}

// fromPod dials as a program in the pod does.
func (v *villain) fromPod(ctx context.Context, local, to netip.Addr, port uint16) (io.Closer, error) {
	return linux.DialInNS(ctx, v.pod, nil, local, netip.AddrPortFrom(to, port))
}

// service connects to the pod's service as a client with SMC-R does.
func (v *villain) service(ctx context.Context) (*net.TCPConn, error) {
	return linux.DialInNS(ctx, v.peer, v.option.ControlDial, netip.Addr{}, netip.AddrPortFrom(v.PodAddr, v.Service))
}

// selfConnects connects to what listens in the pod itself, from many loopback
// addresses: the agent's own listeners.
func (v *villain) selfConnects(ctx context.Context, _ *rand.Rand) {
	ports, err := listening(v.pod)
	if err != nil || len(ports) == 0 {
		return
	}
	loopback := netip.AddrFrom4([4]byte{127, 0, 0, 1})
	v.flood(ctx, func(ctx context.Context, i int) (io.Closer, error) {
		return v.fromPod(ctx, netip.AddrFrom4([4]byte{127, 0, byte(i >> 8), byte(i | 1)}), loopback, ports[i%len(ports)])
	})
}

// listening are the ports that IPv4 sockets in a namespace listen on.
func listening(ns *linux.NetNS) (ports []uint16, err error) {
	err = ns.Do(func() error {
		f, err := os.Open("/proc/thread-self/net/tcp")
		if err != nil {
			return err
		}
		defer f.Close()
		for lines := bufio.NewScanner(f); lines.Scan(); {
			const listen = "0A"
			if fs := strings.Fields(lines.Text()); len(fs) > 3 && fs[3] == listen {
				_, port, _ := strings.Cut(fs[1], ":")
				if n, err := strconv.ParseUint(port, 16, 16); err == nil {
					ports = append(ports, uint16(n))
				}
			}
		}
		return nil
	})
	return ports, err
}

// plainFlood connects to a machine without SMC-R, on many ports, none of which
// the agent has found to be without it.
func (v *villain) plainFlood(ctx context.Context, _ *rand.Rand) {
	v.flood(ctx, func(ctx context.Context, i int) (io.Closer, error) {
		return v.fromPod(ctx, netip.Addr{}, v.PeerAddr, v.Ports[i%len(v.Ports)])
	})
}

// dials connects to addresses that do not answer.
func (v *villain) dials(ctx context.Context, rnd *rand.Rand) {
	seed := rnd.Uint64() // they dial at the same time
	v.flood(ctx, func(ctx context.Context, i int) (io.Closer, error) {
		to := v.PeerAddr.As4()
		to[3] = byte(100 + i%100)
		return v.fromPod(ctx, netip.Addr{}, netip.AddrFrom4(to), uint16(1+rand.New(rand.NewPCG(seed, uint64(i))).IntN(60000)))
	})
}

// silence offers SMC-R and says nothing.
func (v *villain) silence(ctx context.Context, _ *rand.Rand) {
	v.flood(ctx, func(ctx context.Context, _ int) (io.Closer, error) { return v.service(ctx) })
}

// garbage offers SMC-R and says something else.
func (v *villain) garbage(ctx context.Context, rnd *rand.Rand) {
	v.flood(ctx, func(ctx context.Context, i int) (io.Closer, error) {
		c, err := v.service(ctx)
		if err != nil {
			return nil, err
		}
		text := make([]byte, 1+i%200)
		for i := range text {
			text[i] = byte(i)
		}
		_, err = c.Write(append([]byte("\xe2\xd4\xc3\xd9\x01\x00"), text...))
		return c, err
	})
}

// churn connects and goes, as fast as it can.
func (v *villain) churn(ctx context.Context, _ *rand.Rand) {
	for i := 0; ctx.Err() == nil; i++ {
		if c, err := v.fromPod(ctx, netip.Addr{}, v.PeerAddr, v.Ports[i%len(v.Ports)]); err == nil {
			_ = c.Close()
		}
		if c, err := v.service(ctx); err == nil {
			_ = c.Close()
		}
	}
}

// peers are many machines that use SMC-R once each, and stay.
func (v *villain) peers(ctx context.Context, _ *rand.Rand) { v.visits(ctx, true) }

// deafPeers are the same, and have the agent's buffers filled: the pod's service
// echoes what they do not read.
func (v *villain) deafPeers(ctx context.Context, _ *rand.Rand) { v.visits(ctx, false) }

func (v *villain) visits(ctx context.Context, reads bool) {
	var stacks []*smcr.Stack
	defer func() {
		for _, s := range stacks {
			_ = s.Close()
		}
	}()
	for ctx.Err() == nil && len(stacks) < 40 {
		s, err := smcr.NewStack(smcr.Config{Devices: []rdma.Device{v.dev}, Option: v.option, RMBESizeBytes: 16 << 10})
		if err != nil {
			return
		}
		stacks = append(stacks, s)
		tcp, err := v.service(ctx)
		if err != nil {
			continue
		}
		c, err := s.Client(ctx, tcp)
		if err != nil {
			continue
		}
		_ = c.SetDeadline(time.Now().Add(200 * time.Millisecond))
		_, err = c.Write(make([]byte, 512<<10))
		if reads && err == nil {
			_, _ = io.ReadFull(c, make([]byte, 512<<10)) // or as much as comes
		}
	}
	<-ctx.Done()
}

// declines offers SMC-R and declines, each time for another reason that has no name.
func (v *villain) declines(ctx context.Context, rnd *rand.Rand) {
	first := rnd.Uint32()
	for i := range uint32(10 * v.Budget) {
		c, err := v.service(ctx)
		if err != nil {
			return
		}
		_ = c.SetDeadline(time.Now().Add(time.Second))
		if _, err = c.Write(clc.Decline{Version: clc.V1, Reason: clc.Reason(first + i)}.Append(nil)); err == nil {
			_ = c.CloseWrite()
			_, _ = c.Read(make([]byte, 1)) // its end
		}
		_ = c.Close()
	}
}

// hijack proposes under the name of another's node, or of nobody, and then
// declines with the word that ends a link group.
func (v *villain) hijack(ctx context.Context, rnd *rand.Rand) {
	eid, err := clc.ParseUEID(smcr.DefaultEID)
	if err != nil {
		return
	}
	v.flood(ctx, func(ctx context.Context, i int) (io.Closer, error) {
		c, err := v.service(ctx)
		if err != nil {
			return nil, err
		}
		p := clc.Proposal{
			Version: clc.V2, V1: clc.ModeNone, V2: clc.ModeR,
			Ext: clc.V2Extension{EIDs: clc.ListOf(eid), Release: clc.Release1, GID: rdma.GIDFromAddr(v.VictimGID), MaxConns: 255, MaxLinks: 2},
		}
		if i%2 == 1 {
			p.PeerID = clc.PeerID{byte(i), 1}
		}
		_ = c.SetDeadline(time.Now().Add(time.Second))
		if _, err = c.Write(p.Append(nil)); err == nil {
			_, err = io.ReadAtLeast(c, make([]byte, 512), clc.HeaderLen)
		}
		if err == nil && i%3 == 0 {
			_, err = c.Write(clc.Decline{Version: clc.V2, OutOfSync: true, Reason: clc.ReasonSyncErr}.Append(nil))
		}
		return c, err
	})
}
