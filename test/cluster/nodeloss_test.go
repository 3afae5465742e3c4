// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
	"github.com/smcr-io/kube-smcr/test/cluster/lab"
)

// synRetries makes TCP give a destination that says nothing up after 7 s: 1, 2 and 4.
const synRetries = 2

// openFor is how long an open connection to the lost node is looked at: on SMC-R it is reset after some 3 s, with
// data under way. It is less than the program's own patience with an answer.
const openFor = 9 * time.Second

// toLost is what became of what one pod had with the node that was lost.
type toLost struct {
	pod pod
	// What a new connect() came to, and after how many milliseconds.
	connect    string
	took       int
	connectErr error
	// What an open connection came to until openFor, and when it ended.
	open    sum
	after   time.Duration
	openErr error
}

// loseNode takes a node's network and power away while pods of the other one are under load: connections there, with
// SMC-R and without, go on. New ones to the lost node end in a pod that is opted in as in one that is not. One that was
// open on SMC-R is reset; plain TCP goes on trying. The function that it returns waits for all of them, and prints what
// became of them.
func (c *cluster) loseNode(ns string, n, stays *lab.Node) (wait func()) {
	c.Helper()
	// Two pods of one node use SMC-R where a policy requires it.
	c.policy(ns, "on-one-node", fmt.Sprintf("{mode: Required, podSelector: {matchLabels: {%s: smcr}}}", loadOn))
	servers := c.start(ns, podSpec{name: "far", node: n}, podSpec{name: "near", node: stays})
	far, near := servers[0], servers[1]
	plain := map[string]string{v1alpha1.AnnotationEnabled: "false"}
	hold := []string{"hold", far.address()}
	holders := c.start(ns,
		podSpec{name: "holder", node: stays, args: hold},
		podSpec{name: "holder-plain", node: stays, args: hold, annotations: plain})
	c.onSMCR(holders[0], far.address())
	// One that has nothing to do with SMC-R, to know what the machine adds.
	control := c.start(ns, podSpec{
		name: "control", node: stays, annotations: plain,
		args: []string{"load", near.address(), "--interval=10ms", "--workers=4"},
	})[0]
	l := c.startLoads(near, stays)
	for _, nic := range []string{"eth0", "eth1"} { // the kernel of a node that ends would say goodbye
		c.must(n.SetPort(c.Context(), nic, false))
	}
	c.must(n.PowerOff(c.Context()))

	began := time.Now()
	var lost [2]toLost
	var group sync.WaitGroup
	for i, p := range holders {
		lost[i].pod = p
		t := &lost[i]
		group.Go(func() {
			t.connect, t.took, t.connectErr = c.tryConnect(p, far.address(), "--timeout=60s", fmt.Sprintf("--syn-retries=%d", synRetries))
		})
		group.Go(func() {
			for t.openErr == nil && !t.open.Ended && t.after < openFor {
				time.Sleep(200 * time.Millisecond) // polls the pod's log
				t.open, t.openErr = c.last(p)
				t.after = time.Since(began)
			}
		})
	}
	return func() {
		c.Helper()
		group.Wait()
		for _, t := range lost {
			c.must(errors.Join(t.connectErr, t.openErr))
			c.Logf("%-12s to the lost node: connect() %s after %d ms; an open connection after %v has ended: %t %v",
				t.pod.name, t.connect, t.took, t.after.Round(100*time.Millisecond), t.open.Ended, t.open.Errors)
		}
		if !lost[0].open.Ended {
			c.Errorf("an open connection on SMC-R to the lost node has not ended after %v", lost[0].after)
		}
		if lost[0].connect != lost[1].connect || lost[0].took > lost[1].took+held {
			c.Errorf("connect() to the lost node in a pod that is opted in: %s after %d ms; in another one: %s after %d ms",
				lost[0].connect, lost[0].took, lost[1].connect, lost[1].took)
		}
		if reset := l.end("another node lost"); reset > 0 {
			c.Errorf("%d connections with SMC-R were reset on the node that stays", reset)
		}
		s, err := c.last(control)
		c.must(err)
		c.Logf("meanwhile from a pod that is not opted in: %d connections, the slowest good one took %d ms %v", s.OK+s.Failed, s.WorstMillis, s.Errors)
	}
}
