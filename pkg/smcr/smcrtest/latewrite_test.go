// SPDX-License-Identifier: Apache-2.0

package smcrtest_test

import (
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/smcr/smcrtest"
)

// lateWrite is the schedule of testdata/scenarios/linux_late_write with another seed: a
// Linux server loses a link while the server waits for the answer to CONFIRM RKEY, and so cannot
// send DELETE LINK. The client's RNIC delays RDMA WRITEs on that link. They arrive after their
// connections have moved to another link.
func lateWrite(seed uint64) smcrtest.Schedule {
	const us, ms = time.Microsecond, time.Millisecond
	const linux, engine, all = 0, 1, 1 << 30
	run := func(d time.Duration) smcrtest.Op { return smcrtest.Op{Kind: smcrtest.OpRun, D: d} }
	connect := func(name string) smcrtest.Op { return smcrtest.Op{Kind: smcrtest.OpConnect, Name: name, Peer: engine} }
	write := func(name string, n int) smcrtest.Op {
		return smcrtest.Op{Kind: smcrtest.OpWrite, Name: name, Side: linux, N: n}
	}
	read := func(name string, n int) smcrtest.Op {
		return smcrtest.Op{Kind: smcrtest.OpRead, Name: name, Side: engine, N: n}
	}
	s := smcrtest.Schedule{Config: smcrtest.Config{Seed: seed}, Ops: []smcrtest.Op{
		connect("c1"), run(10 * ms),
		connect("c2"), run(10 * ms),
		{Kind: smcrtest.OpKillLink, Peer: engine, Link: 1, Side: -1},
		run(200 * ms),
		{Kind: smcrtest.OpSlow, Peer: engine, RNIC: 0, D: 50 * ms},
		connect("c3"), run(200 * us),
		write("c1", 10000), write("c2", 10000), run(100 * us),
		{Kind: smcrtest.OpKillLink, Peer: engine, Link: 0, Side: linux},
		run(200 * us),
		read("c1", all), read("c2", all), run(200 * us),
		write("c1", 16000), write("c2", 16000), run(ms),
		read("c1", 9000), read("c2", 9000), run(ms),
		write("c1", 16000), write("c2", 16000), run(100 * ms),
		read("c1", all), read("c2", all),
	}}
	s.Config.RNICs[linux], s.Config.RNICs[engine] = 2, 2
	s.Config.Linux[linux] = true
	return s
}

// RFC 7609 §4.6: data that was on its way over a link that the peer has left must not overwrite data that
// came over another link. The seed decides which RNIC carries which connection.
func TestSection4_6_LateWrite(t *testing.T) {
	for seed := uint64(1); seed <= 200; seed++ {
		if err := lateWrite(seed).Try(); err != nil {
			t.Errorf("seed %d: %v", seed, err)
		}
	}
}
