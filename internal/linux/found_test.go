// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"encoding/binary"
	"errors"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/nftables"

	"github.com/smcr-io/kube-smcr/internal/undo"
)

func sysctlNow(t testing.TB, ns *NetNS, s sysctl) uint32 {
	t.Helper()
	var v uint32
	mustDo(t, ns.Do(func() (err error) {
		v, err = s.read()
		return err
	}))
	return v
}

// TestSysctls_goBack: sysctls get back the values that were found, whichever process removes the redirection.
// Values that another program set meanwhile stay.
func TestSysctls_goBack(t *testing.T) {
	f := families[0]
	untracked := testConfig(f)
	untracked.Untracked = true
	for _, c := range []struct {
		name string
		do   func(t *testing.T, ns *NetNS)
		want map[sysctl]uint32
	}{
		{"removed", func(t *testing.T, ns *NetNS) {
			r := install(t, ns, testConfig(f))
			mustDo(t, r.Update(untracked))
			mustDo(t, r.Remove())
		}, map[sysctl]uint32{closeTimeout: 7, looseTracking: 1, closeWaitTimeout: 60}},
		{"the agent dies", func(t *testing.T, ns *NetNS) {
			mustDo(t, install(t, ns, untracked).Close())
		}, map[sysctl]uint32{closeTimeout: 7, looseTracking: 1, closeWaitTimeout: 60}},
		{"it dies before there is more than the record", func(t *testing.T, ns *NetNS) {
			r := &Redirect{ns: ns, cfg: untracked}
			steps := r.installSteps()
			for i, s := range steps {
				if strings.HasPrefix(s.Name, "replace") {
					steps = steps[:i]
					break
				}
			}
			var u undo.Stack
			mustDo(t, u.Run(steps...))
			u.Keep()
			mustDo(t, r.Close())
		}, map[sysctl]uint32{closeTimeout: 7, looseTracking: 1, closeWaitTimeout: 60}},
		{"another agent takes over, and dies", func(t *testing.T, ns *NetNS) {
			for range 3 {
				mustDo(t, install(t, ns, untracked).Close())
			}
		}, map[sysctl]uint32{closeTimeout: 7, looseTracking: 1, closeWaitTimeout: 60}},
		{"another agent takes over, maybe of an earlier version", func(t *testing.T, ns *NetNS) {
			mustDo(t, install(t, ns, untracked).Release(time.Second))
			for s, want := range map[sysctl]uint32{fwmarkAccept: 1, fwmarkReflect4: 0, fwmarkReflect6: 0} {
				if v := sysctlNow(t, ns, s); v != want {
					t.Errorf("%v is %d, want %d", s, v, want)
				}
			}
			mustDo(t, install(t, ns, untracked).Close())
			if v := sysctlNow(t, ns, fwmarkReflect4); v != 1 {
				t.Errorf("%v is %d, want 1", fwmarkReflect4, v)
			}
		}, map[sysctl]uint32{closeTimeout: 7, looseTracking: 1, closeWaitTimeout: 60}},
		{"somebody deletes the table, and the agent repairs it", func(t *testing.T, ns *NetNS) {
			r := install(t, ns, untracked)
			mustDo(t, dropTable(r.conn))
			mustDo(t, r.Update(untracked))
			mustDo(t, r.Close())
		}, map[sysctl]uint32{closeTimeout: 7, looseTracking: 1, closeWaitTimeout: 60}},
		{"tracked again", func(t *testing.T, ns *NetNS) {
			r := install(t, ns, untracked)
			if v := sysctlNow(t, ns, looseTracking); v != 0 {
				t.Errorf("%v is %d, want 0", looseTracking, v)
			}
			mustDo(t, r.Update(testConfig(f)))
			if v := sysctlNow(t, ns, looseTracking); v != 1 {
				t.Errorf("%v is %d, want 1", looseTracking, v)
			}
			mustDo(t, r.Close())
		}, map[sysctl]uint32{closeTimeout: 7, looseTracking: 1, closeWaitTimeout: 60}},
		{"set by somebody else", func(t *testing.T, ns *NetNS) {
			r := install(t, ns, untracked)
			giveSysctl(t, ns, closeTimeout.path(), "33")
			mustDo(t, r.Close())
		}, map[sysctl]uint32{closeTimeout: 33, looseTracking: 1, closeWaitTimeout: 60}},
		{"a smaller record of an earlier version", func(t *testing.T, ns *NetNS) {
			conn, err := openNFT(ns)
			mustDo(t, err)
			set := foundSet(kubeTable())
			set.ID, set.Size = 1, 6
			conn.AddTable(set.Table)
			mustDo(t, conn.AddSet(set, foundElements(map[sysctl]uint32{fwmarkAccept: 0, closeTimeout: 7})))
			mustDo(t, errors.Join(conn.Flush(), conn.CloseLasting()))
			giveSysctl(t, ns, closeTimeout.path(), "0")
			mustDo(t, install(t, ns, untracked).Close())
		}, map[sysctl]uint32{closeTimeout: 7, looseTracking: 1, closeWaitTimeout: 60}},
		{"an agent without a record", func(t *testing.T, ns *NetNS) {
			mustDo(t, install(t, ns, testConfig(f)).Close())
			conn, err := openNFT(ns)
			mustDo(t, err)
			giveSysctl(t, ns, fwmarkReflect4.path(), "0") // such an agent leaves these alone
			giveSysctl(t, ns, fwmarkReflect6.path(), "0")
			giveSysctl(t, ns, closeWaitTimeout.path(), "60")
			conn.DelSet(foundSet(kubeTable()))
			mustDo(t, errors.Join(conn.Flush(), conn.CloseLasting()))
			mustDo(t, install(t, ns, testConfig(f)).Close())
		}, map[sysctl]uint32{closeTimeout: 10, looseTracking: 1, closeWaitTimeout: 60}},
	} {
		t.Run(c.name, func(t *testing.T) {
			ns := newNS(t)
			giveSysctl(t, ns, closeTimeout.path(), "7")
			c.do(t, ns)
			mustDo(t, Sweep(ns))
			got := map[sysctl]uint32{}
			for _, s := range sysctls {
				if v := sysctlNow(t, ns, s); v != 0 {
					got[s] = v
				}
			}
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

// TestSysctls_foreign: values stay that were the wanted ones from the start, and a namespace in which there
// was no redirection is not changed.
func TestSysctls_foreign(t *testing.T) {
	ns := newNS(t)
	giveSysctl(t, ns, fwmarkAccept.path(), "1")
	giveSysctl(t, ns, closeTimeout.path(), "0")
	mustDo(t, Sweep(ns))
	mustDo(t, install(t, ns, testConfig(families[0])).Close())
	mustDo(t, Sweep(ns))
	for s, want := range map[sysctl]uint32{fwmarkAccept: 1, closeTimeout: 0} {
		if v := sysctlNow(t, ns, s); v != want {
			t.Errorf("%v is %d, want %d", s, v, want)
		}
	}
}

// tracked counts the connections that connection tracking knows in a namespace.
func tracked(t testing.TB, ns *NetNS) int {
	t.Helper()
	n := 0
	mustDo(t, ns.Do(func() error {
		b, err := os.ReadFile("/proc/sys/net/netfilter/nf_conntrack_count")
		if errors.Is(err, fs.ErrNotExist) {
			return nil // the kernel has not loaded it
		}
		if err == nil {
			n, err = strconv.Atoi(strings.TrimSpace(string(b)))
		}
		return err
	}))
	return n
}

// TestAttack_conntrack: packets of a pod that are never diverted take no place in the pod's table of tracked
// connections, and diverted connections work. Before, 5,000 datagrams took 5,000 places.
func TestAttack_conntrack(t *testing.T) {
	for _, f := range families {
		t.Run(f.name, func(t *testing.T) {
			pod, peer := newPair(t)
			server := listen(t, peer, nil, f.peer, 0)
			answer(t, server, "server")
			agent := listen(t, pod, marked, f.loopback, testOutPort)
			early := mustDial(t, pod, nil, addrOf(server)) // before there is a table
			cfg := testConfig(f)
			cfg.Outbound = []OutboundRule{{Prefix: f.all(), Ports: []PortRange{{4711, 4712}}}}
			cfg.Untracked = true
			r := install(t, pod, cfg)
			mustDo(t, r.Update(cfg)) // the namespace had no connection tracking before this
			before := tracked(t, pod)

			dst := netip.AddrPortFrom(f.peer, 53)
			mustDo(t, pod.Do(func() error {
				for range 5000 {
					c, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(dst))
					if err != nil {
						return err
					}
					_, _ = c.Write([]byte("x")) // nobody listens
					_ = c.Close()
				}
				return nil
			}))
			want(t, served(t, pod, nil, addrOf(server)), "server")
			_, _ = early.Write([]byte("x"))
			inwards := listen(t, pod, nil, f.pod, 0)
			answer(t, inwards, "program")
			want(t, served(t, peer, nil, addrOf(inwards)), "program")
			want(t, served(t, pod, nil, addrOf(inwards)), "program")
			mustDo(t, r.Bypass(netip.AddrPortFrom(f.peer, 4712), time.Minute))
			want(t, served(t, pod, nil, netip.AddrPortFrom(f.peer, 4712)), "refused")
			if n := tracked(t, pod); n != before {
				t.Errorf("%d connections are tracked, want %d", n, before)
			}

			app := mustDial(t, pod, nil, netip.AddrPortFrom(f.peer, 4711))
			c := mustAccept(t, agent)
			if got, err := OriginalDst(c); err != nil || got != netip.AddrPortFrom(f.peer, 4711) {
				t.Errorf("original destination %v, %v", got, err)
			}
			exchange(t, app, c)
			if n := tracked(t, pod); n != before+1 {
				t.Errorf("%d connections are tracked with a diverted one, want %d", n, before+1)
			}
			// The policy changes, connections go on; and so they do when others come
			// who need connection tracking.
			cfg.Outbound = nil
			mustDo(t, r.Update(cfg))
			exchange(t, app, c)
			cfg.Untracked = false
			mustDo(t, r.Update(cfg))
			exchange(t, app, c)
			want(t, served(t, pod, nil, addrOf(server)), "server")
			if n := tracked(t, pod); n == before+1 {
				t.Error("nothing more is tracked: the test shows nothing")
			}
			mustDo(t, r.Remove())
			exchange(t, app, c)
		})
	}
}

// TestSysctls_ofAnotherVersion: what another version of the agent found of a sysctl that this one does not know stays in the record,
// whatever this one does, so that the other version can restore the sysctl.
func TestSysctls_ofAnotherVersion(t *testing.T) {
	ns := newNS(t)
	mustDo(t, install(t, ns, testConfig(families[0])).Close())
	want, err := readFound(ns)
	mustDo(t, err)
	conn, err := openNFT(ns)
	mustDo(t, err)
	want[99] = 5
	mustDo(t, errors.Join(conn.SetAddElements(foundSet(kubeTable()), []nftables.SetElement{{Key: append(nativeU32(99), nativeU32(5)...)}}),
		conn.Flush(), conn.CloseLasting()))
	untracked := testConfig(families[0])
	untracked.Untracked = true
	r := install(t, ns, untracked)
	mustDo(t, r.Update(testConfig(families[0]))) // takes a sysctl of its own back
	got, err := readFound(ns)
	mustDo(t, err)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("record (-want +got):\n%s", diff)
	}
	mustDo(t, r.Remove())
}

// TestFoundElements: all of a record is written again, but never more than the set has room for, in which what this version knows
// comes first: a program in the pod may have filled the set.
func TestFoundElements(t *testing.T) {
	found := map[sysctl]uint32{fwmarkAccept: 1, looseTracking: 1}
	for s := range sysctl(2 * foundSize) {
		found[200-s] = 1
	}
	var got []uint32
	for _, e := range foundElements(found) {
		got = append(got, binary.NativeEndian.Uint32(e.Key))
	}
	if diff := cmp.Diff([]uint32{1, 3, 177, 178, 179, 180, 181, 182, 183, 184, 185, 186}, got); diff != "" {
		t.Errorf("sysctls (-want +got):\n%s", diff)
	}
}
