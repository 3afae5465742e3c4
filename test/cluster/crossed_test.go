// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
)

// crossing is a case of two programs that connect to each other at the same moment, each from the
// port to which the other connects: both open the connection (RFC 9293 §3.5).
type crossing struct {
	ends [2]pod
	ipv6 bool
	// bothLost: SYNs are lost in the beginning, and later ones meet an end that waits for an answer to its
	// own. Else all of the first end's are lost, and it waits when the other's comes.
	bothLost bool
}

// crossed is what a crossing came to at both ends.
type crossed struct {
	what [2]string
	took [2]int
}

func (x crossed) String() string {
	return fmt.Sprintf("%s after %d ms, %s after %d ms", x.what[0], x.took[0], x.what[1], x.took[1])
}

// sameCrossed prints what becomes of programs that connect to each other, in pods that are not opted in and
// in pods of which one or both are, and fails if that differs. onOneNode are pods on one node, across on two.
func (c *cluster) sameCrossed(across, onOneNode crossingPods) {
	c.Helper()
	type row struct {
		name         string
		plain, opted [2]pod
		ipv6         bool
	}
	rows := []row{
		{"both opted in", across.plain, across.both, false},
		{"both opted in, IPv6", across.plain, across.both, true},
		{"one opted in", across.plain, across.first, false},
		{"the other opted in", across.plain, across.second, false},
		{"both opted in, on one node", onOneNode.plain, onOneNode.both, false},
		{"one opted in, on one node", onOneNode.plain, onOneNode.first, false},
		{"the other opted in, on one node", onOneNode.plain, onOneNode.second, false},
	}
	var names []string
	var all []crossing
	for _, bothLost := range []bool{false, true} {
		for _, r := range rows {
			names = append(names, map[bool]string{false: "one waits: ", true: "both wait: "}[bothLost]+r.name)
			all = append(all, crossing{r.plain, r.ipv6, bothLost}, crossing{r.opted, r.ipv6, bothLost})
		}
	}
	results := c.cross(7200, all)
	var table strings.Builder
	for i, name := range names {
		plain, opted := results[2*i], results[2*i+1]
		fmt.Fprintf(&table, "%-42s %-50s %s\n", name, plain, opted)
		for k := range opted.what {
			if plain.what[k] != "connected" {
				c.Errorf("%s: in pods that are not opted in %s: no connection that both open", name, plain)
			}
			if opted.what[k] != plain.what[k] || opted.took[k] > plain.took[k]+held {
				c.Errorf("%s: %s, in pods that are not opted in %s", name, opted, plain)
			}
		}
	}
	c.Logf("two programs that connect to each other, in pods that are not opted in, and in others:\n%s", table.String())
}

// refusedCrossed: where SMC-R is required, neither end is connected: not the pod that must have it, although its
// peer's SYN comes while it waits, nor the peer.
func (c *cluster) refusedCrossed(must, other pod) {
	c.Helper()
	for i, x := range c.cross(7700, []crossing{{[2]pod{must, other}, false, true}, {[2]pod{other, must}, true, true}}) {
		c.Logf("where SMC-R is required: %s", x)
		if refused := "connection refused"; x.what != [2]string{refused, refused} {
			c.Errorf("crossing %d, where SMC-R is required: %s, want that both are refused", i, x)
		}
	}
}

// crossingPods are pairs of pods: which of them is opted in.
type crossingPods struct{ plain, both, first, second [2]pod }

const (
	crossLead = 3 * time.Second // until the programs run
	// Programs connect within 250 ms of the moment for it, or say that they are too late. After crossAfter
	// one waits, whose SYN is still held then. After crossHear nothing is lost any more, and TCP repeats after
	// a second what was.
	crossAfter, crossHear, crossRepeat = 300 * time.Millisecond, 500 * time.Millisecond, 900 * time.Millisecond
	crossTries                         = 5 // on a machine that is too busy for these times
)

// cross lets the programs of all crossings connect at one moment, at ports from the first one on.
func (c *cluster) cross(firstPort int, all []crossing) []crossed {
	c.Helper()
	pods := map[pod]*crossingPod{}
	for _, x := range all {
		for _, p := range x.ends {
			if pods[p] == nil {
				pods[p] = &crossingPod{}
			}
		}
	}
	c.must(eachPod(pods, func(p pod, a *crossingPod) (err error) {
		if a.netns, err = c.p.PodNetNS(c.Context(), p.node, p.ip); err != nil {
			return err
		}
		a.ipv6, err = c.p.Lab.Kubectl(c.Context(), "get", "pod", "-n", p.ns, p.name, "-o", "jsonpath={.status.podIPs[1].ip}")
		return err
	}))
	for try := range crossTries {
		results, err := c.crossOnce(all, pods, firstPort+try*len(all)) // connection tracking remembers ports that were used
		if errors.Is(err, errTooLate) {
			c.Logf("again: %v", err)
			continue
		}
		c.must(err)
		return results
	}
	c.Fatalf("this machine was too busy %d times for programs that connect at one moment", crossTries)
	return nil
}

// crossingPod is what a pod has to do with crossings.
type crossingPod struct {
	netns, ipv6 string
	addresses   []string // of its peers
	results     []*crossedEnd
	deaf        [2][]string // ports to which SYNs are lost: in the beginning, all the time
}

// crossedEnd is where the result of one end is put.
type crossedEnd struct {
	what *string
	took *int
}

var errTooLate = errors.New("too late")

func (c *cluster) crossOnce(all []crossing, pods map[pod]*crossingPod, port int) ([]crossed, error) {
	results := make([]crossed, len(all))
	for _, a := range pods {
		a.addresses, a.results, a.deaf = nil, nil, [2][]string{}
	}
	for i, x := range all {
		number := strconv.Itoa(port + i)
		for k, p := range x.ends {
			a, peer := pods[p], x.ends[1-k]
			address := peer.ip
			if x.ipv6 {
				address = pods[peer].ipv6
			}
			address = net.JoinHostPort(address, number)
			a.results = append(a.results, &crossedEnd{&results[i].what[k], &results[i].took[k]})
			if x.bothLost {
				a.deaf[0] = append(a.deaf[0], number)
			} else if k == 1 {
				a.deaf[1] = append(a.deaf[1], number)
				address += "/" + crossAfter.String()
			}
			a.addresses = append(a.addresses, address)
		}
	}
	defer func() {
		err := eachPod(pods, func(p pod, a *crossingPod) error {
			return a.nft(context.WithoutCancel(c.Context()), p, "add table inet deaf; delete table inet deaf")
		})
		if err != nil {
			c.Error(err)
		}
	}()
	if err := eachPod(pods, func(p pod, a *crossingPod) error { return a.nft(c.Context(), p, a.rules()) }); err != nil {
		return nil, err
	}
	at := time.Now().Add(crossLead)
	var programs errgroup.Group
	for p, a := range pods {
		programs.Go(func() error { return c.crossFrom(p, a, at) })
	}
	<-time.After(time.Until(at.Add(crossHear))) // polls nothing: all programs have sent their SYNs then, or say that they have not
	// A chain that is taken away drops the SYNs that are held: its rules are.
	err := eachPod(pods, func(p pod, a *crossingPod) error { return a.nft(c.Context(), p, "flush chain inet deaf begin") })
	heard := time.Now()
	err = errors.Join(err, programs.Wait())
	if err == nil && heard.After(at.Add(crossRepeat)) {
		err = fmt.Errorf("SYNs were lost for %v: %w", heard.Sub(at), errTooLate)
	}
	return results, err
}

// eachPod does something for all pods side by side.
func eachPod(pods map[pod]*crossingPod, do func(p pod, a *crossingPod) error) error {
	var group errgroup.Group
	for p, a := range pods {
		group.Go(func() error { return do(p, a) })
	}
	return group.Wait()
}

// nft runs nft in the pod's network namespace.
func (a *crossingPod) nft(ctx context.Context, p pod, commands string) error {
	_, err := p.node.Run(ctx, "ip", "netns", "exec", a.netns, "nft", commands)
	return err
}

// rules drop SYNs that come to the ports of the pod.
func (a *crossingPod) rules() string {
	var b strings.Builder
	b.WriteString("add table inet deaf")
	for i, chain := range []string{"begin", "always"} {
		fmt.Fprintf(&b, "; add chain inet deaf %s { type filter hook input priority filter; }", chain)
		if len(a.deaf[i]) > 0 {
			fmt.Fprintf(&b, "; add rule inet deaf %s tcp dport { %s } tcp flags & (syn | ack) == syn drop", chain, strings.Join(a.deaf[i], ", "))
		}
	}
	return b.String()
}

// crossFrom runs the programs of a pod.
func (c *cluster) crossFrom(p pod, a *crossingPod, at time.Time) error {
	out, err := c.p.Lab.Kubectl(c.Context(), "exec", "-n", p.ns, p.name, "--",
		"/usr/bin/traffic", "cross", strings.Join(a.addresses, ","), fmt.Sprintf("--at=%d", at.UnixMilli()))
	if err != nil && strings.Contains(err.Error(), errTooLate.Error()) {
		return fmt.Errorf("programs in %s: %w", p, errTooLate)
	}
	if err != nil {
		return err
	}
	said := strings.Split(strings.TrimSpace(out), "\n")
	if len(said) != len(a.results) {
		return fmt.Errorf("traffic cross of %s said %q for %d addresses", p, out, len(a.results))
	}
	for i, r := range a.results {
		what, ms, _ := strings.Cut(said[i], " after ")
		if _, err := fmt.Sscanf(ms, "%d ms", r.took); err != nil {
			return fmt.Errorf("traffic cross of %s said %q", p, said[i])
		}
		*r.what = what
	}
	return nil
}
