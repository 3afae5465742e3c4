// SPDX-License-Identifier: Apache-2.0

package rocev2

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"regexp"
	"strconv"
	"testing"

	"github.com/smcr-io/kube-smcr/test/vm/lab"
)

// disturb has netem do something to the RoCEv2 packets that leave the guests,
// until the test ends. The programs' TCP connection is left alone. The function that
// it returns fails the test if no packet was hit.
func disturb(t *testing.T, l *lab.Lab, fault string) (check func()) {
	t.Helper()
	for i := range 2 {
		g := l.Guest(i)
		dev := g.NetDev(0)
		t.Cleanup(func() { // t.Context is over by then
			if _, err := g.Run(context.WithoutCancel(t.Context()), "tc", "qdisc", "delete", "dev", dev, "root"); err != nil {
				t.Error(err)
			}
		})
		if _, err := g.Shell(t.Context(), fmt.Sprintf(`
			tc qdisc replace dev %[1]s root handle 1: htb default 1
			tc class add dev %[1]s parent 1: classid 1:1 htb rate 10gbit
			tc class add dev %[1]s parent 1: classid 1:2 htb rate 10gbit
			tc qdisc add dev %[1]s parent 1:2 handle 2: netem limit 100000 %[2]s
			tc filter add dev %[1]s parent 1: protocol ip u32 match ip protocol 17 0xff flowid 1:2`, dev, fault)); err != nil {
			t.Fatal(err)
		}
	}
	return func() {
		t.Helper()
		packets := 0
		for i := range 2 {
			g := l.Guest(i)
			out, err := g.Run(t.Context(), "tc", "-s", "-j", "qdisc", "show", "dev", g.NetDev(0))
			if err != nil {
				t.Fatal(err)
			}
			var all []struct {
				Kind           string
				Packets, Drops int
			}
			if err := json.Unmarshal([]byte(out), &all); err != nil {
				t.Fatalf("read %s: %v", out, err)
			}
			for _, q := range all {
				if q.Kind == "netem" {
					t.Logf("%s: %d packets, %d dropped", g.Name(), q.Packets, q.Drops)
					packets += q.Packets
				}
			}
		}
		if packets == 0 {
			t.Error("netem saw no packet")
		}
	}
}

// counts are rxe's counters by name.
type counts map[string]uint64

var counter = regexp.MustCompile(`"([a-z_]+)": ?(\d+)`)

// counters reads them.
func counters(t *testing.T, g *lab.Guest) counts {
	t.Helper()
	out, err := g.Run(t.Context(), "rdma", "-j", "statistic", "show", "link", "rxe0/1")
	if err != nil {
		t.Fatal(err)
	}
	c := counts{}
	for _, m := range counter.FindAllStringSubmatch(out, -1) {
		c[m[1]], _ = strconv.ParseUint(m[2], 10, 64)
	}
	return c
}

// sub returns what came to c since before, without what did not change.
func (c counts) sub(before counts) counts {
	d := maps.Clone(c)
	for name := range d {
		if d[name] -= before[name]; d[name] == 0 {
			delete(d, name)
		}
	}
	return d
}
