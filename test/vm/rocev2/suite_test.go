// SPDX-License-Identifier: Apache-2.0

package rocev2

import (
	"bytes"
	"context"
	"fmt"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/internal/testenv"
	"github.com/smcr-io/kube-smcr/test/vm/lab"
)

const (
	suite = "github.com/smcr-io/kube-smcr/test/vm/rocev2/suite"
	// suiteTimeout bounds one call of its program.
	suiteTimeout = 8 * time.Minute
	// softNS is the network namespace of the software device in the second guest.
	softNS = "soft"
)

// local are the cases of the conformance suite that are about one device and not
// about what two say to each other. Each device passes them elsewhere.
const local = "Attributes|States|IllegalTransitions|Destruction|QueueFull|Overrun|Notify.*|OnNotify|IdlePoll"

// testSuite runs package suite in the second guest.
func testSuite(t *testing.T, l *lab.Lab) {
	g := l.Guest(1)
	// The second NIC goes to the namespace with its addresses.
	if _, err := g.Shell(t.Context(), fmt.Sprintf(`
		ip netns list | grep -q '^%[1]s' && exit # guests that stay have it
		ip netns add %[1]s
		ip link set %[2]s netns %[1]s
		ip -n %[1]s addr add %[3]v/24 dev %[2]s
		ip -n %[1]s addr add %[4]v/64 dev %[2]s nodad
		ip -n %[1]s link set lo up
		ip -n %[1]s link set %[2]s up
		ping -c 1 -W 5 %[3]v
		ping -c 1 -W 5 %[4]v`, softNS, g.NetDev(1), g.Addr(1), g.Addr6(1))); err != nil {
		t.Fatal(err)
	}
	program, err := l.Build(t.Context(), suite, lab.BuildOptions{CGO: true, Test: true})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name, run, skip string
		v6              bool
		fault           string
		least           int // tests that pass
	}{
		{name: "conformance", run: "^TestConformance$", skip: "^TestConformance$/^(" + local + ")$", least: 70},
		{name: "peers", run: "^(TestPeers|TestRNRStorm)$", least: 20},
		{name: "ipv6", run: "^TestConformance$/^(Operations4096|BothDirections)$", v6: true, least: 6},
		{
			name: "loss", run: "^TestConformance$/^(Operations4096|BothDirections|ManyQueuePairs|ReceiverNotReady|PSNWraps)$",
			fault: "loss 2%", least: 15,
		},
		{name: "reordering", run: "^TestConformance$/^(Operations1024|BothDirections)$", fault: "delay 1ms reorder 80% 30%", least: 6},
		{name: "duplication", run: "^TestConformance$/^(Operations1024|BothDirections)$", fault: "duplicate 20%", least: 6},
	} {
		t.Run(c.name, func(t *testing.T) {
			from, to := g.Addr(1), g.Addr(0)
			if c.v6 {
				from, to = g.Addr6(1), g.Addr6(0)
			}
			env := []string{
				testenv.RDMADeviceEnv + "=rxe0", testenv.RequireEnv + "=" + string(testenv.RDMADevice),
				"ROCEV2_SOFT_NETNS=/run/netns/" + softNS, "ROCEV2_SOFT_ADDR=" + from.String(), "ROCEV2_RXE_ADDR=" + to.String(),
			}
			if c.fault != "" {
				env = append(env, "ROCEV2_PACKETS=1")
				disturbSuite(t, g, c.fault)
			}
			ctx, cancel := context.WithTimeout(t.Context(), suiteTimeout)
			defer cancel()
			p, err := g.StartIn(ctx, "/", env, program, "-test.v", "-test.run="+c.run, "-test.skip="+c.skip, fmt.Sprintf("-test.timeout=%v", suiteTimeout*3/4))
			if err != nil {
				t.Fatal(err)
			}
			var out bytes.Buffer
			err = p.Stream(nil, &out, &out)
			passed := strings.Count(out.String(), "--- PASS: ")
			if err == nil && passed < c.least {
				err = fmt.Errorf("%d tests passed, want %d or more", passed, c.least)
			}
			if err != nil {
				t.Errorf("%v\n%s", err, out.String())
				return
			}
			t.Logf("%d tests passed\n%s", passed, strings.Join(notes.FindAllString(out.String(), -1), "\n"))
		})
	}
}

// notes are what a test of the suite says.
var notes = regexp.MustCompile(`(?m)^ +(--- PASS: \S+ \S+|\w+_test\.go:.*)$`)

// disturbSuite is disturb for packets between the devices of the suite, both ways.
func disturbSuite(t *testing.T, g *lab.Guest, fault string) {
	t.Helper()
	for _, in := range []string{"", "-n " + softNS} {
		dev := g.NetDev(0)
		if in != "" {
			dev = g.NetDev(1)
		}
		t.Cleanup(func() {
			if _, err := g.Shell(context.WithoutCancel(t.Context()), fmt.Sprintf("tc %s qdisc delete dev %s root", in, dev)); err != nil {
				t.Error(err)
			}
		})
		if _, err := g.Shell(t.Context(), fmt.Sprintf("tc %s qdisc replace dev %s root netem limit 100000 %s", in, dev, fault)); err != nil {
			t.Fatal(err)
		}
	}
}
