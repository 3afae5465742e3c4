// SPDX-License-Identifier: Apache-2.0

package kernelpath

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
)

const (
	// stuck is the port of a program that reads nothing.
	stuck = 6382
	// revokedWithin bounds the end of a connection that a policy no longer allows.
	revokedWithin = 2 * time.Second
)

// hold starts a program in the client's pod whose connection holds until somebody ends it. The time of that
// is written down.
func (b *bed) hold(t *testing.T, name, program string) {
	t.Helper()
	b.client.sh(t, fmt.Sprintf("rm -f /tmp/ended-%[1]s; (%[2]s || true; date +%%s%%N >/tmp/ended-%[1]s) >/run/%[1]s.log 2>&1 </dev/null &",
		name, b.client.in(program)))
}

// changeAt puts other policies in force on a node, and returns when it asked for that, by its clock.
func (n *node) changeAt(t *testing.T, policies string) time.Time {
	t.Helper()
	n.configure(t, policies)
	return nanoseconds(t, n.sh(t, "date +%s%N; kill -HUP $(pidof node-agent)"))
}

func nanoseconds(t *testing.T, text string) time.Time {
	t.Helper()
	n, err := strconv.ParseInt(strings.TrimSpace(text), 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	return time.Unix(0, n)
}

// mustEnd waits for the end of connections, and says how long after a change that was.
func (b *bed) mustEnd(t *testing.T, changed time.Time, names ...string) {
	t.Helper()
	for _, name := range names {
		b.client.eventually(t, name+" ended", func() error {
			_, err := b.client.Shell(t.Context(), "test -s /tmp/ended-"+name)
			return err
		})
		took := nanoseconds(t, b.client.sh(t, "cat /tmp/ended-"+name)).Sub(changed)
		t.Logf("%s: ended %v after the change", name, took.Round(time.Millisecond))
		if took > revokedWithin {
			t.Errorf("%s: ended %v after the change, want %v or less\n%s", name, took, revokedWithin, b.client.log())
		}
	}
}

// mustLive fails if one of the connections has ended.
func (b *bed) mustLive(t *testing.T, names ...string) {
	t.Helper()
	for _, name := range names {
		if out, err := b.client.Shell(t.Context(), "test ! -e /tmp/ended-"+name); err != nil {
			t.Errorf("%s has ended: %v\n%s", name, err, out)
		}
	}
}

// awaitPeers waits until the filter of the pod lets a port be on SMC-R.
func (n *node) awaitPeers(t *testing.T, port int) {
	t.Helper()
	n.eventually(t, fmt.Sprintf("the filter has port %d", port), func() error {
		_, err := n.Shell(t.Context(), fmt.Sprintf("nsenter --net=/run/netns/%s nft list set inet kube-smcr-option peers4 | grep -q %d", n.pod, port))
		return err
	})
}

// revoked: live connections on SMC-R that a changed policy refuses are ended, at the client's node or at the
// server's, and the others are not, whatever carries them.
func (b *bed) revoked(t *testing.T) {
	for _, n := range []*node{b.server, b.client} {
		n.reconfigure(t, kernelPolicy(selected, clientOnly, stuck))
		n.awaitPeers(t, stuck)
	}
	b.server.sh(t, b.server.inPod(fmt.Sprintf("socat -u TCP4-LISTEN:%d,reuseaddr,fork EXEC:'sleep 600'", stuck))+` >/run/stuck.log 2>&1 </dev/null &
		until nsenter --net=/run/netns/server ss -Hltn "sport = :`+strconv.Itoa(stuck)+`" | grep -q .; do kill -0 $!; sleep 0.1; done`)
	before := b.client.counters(t)
	b.hold(t, "idle", fmt.Sprintf("socat PIPE TCP4:%s:%d", b.server.addr, selected))
	// Two that wait for room: in write, for ten minutes if they close, and in epoll.
	b.hold(t, "writes", fmt.Sprintf("socat -u /dev/zero TCP4:%s:%d,linger=600", b.server.addr, stuck))
	b.hold(t, "polls", fmt.Sprintf("peer dial -stack tcp -to %s:%d -do bulk:bytes=1G", b.server.addr, stuck))
	b.hold(t, "allowed", fmt.Sprintf("socat PIPE TCP4:%s:%d", b.server.addr, clientOnly))
	b.hold(t, "plain", fmt.Sprintf("socat PIPE TCP4:%s:%d", b.server.addr, unselected))
	b.client.eventually(t, "four connections are on SMC-R, one is not, and some wait for room", func() error {
		if d := b.client.counters(t).Sub(before); d.ClientV2 != 4 || d.ClientFallbacks != 1 || d.Tx.PeerFull+d.Tx.Full == 0 {
			return fmt.Errorf("%+v", d)
		}
		return nil
	})

	b.seen(t)
	b.mustEnd(t, b.client.changeAt(t, kernelPolicy(clientOnly)), "idle", "writes", "polls")
	b.mustLive(t, "allowed", "plain")
	b.client.mustExplain(t, "demo/client", fmt.Sprintf("%s:%d", b.server.addr, selected))
	// The clocks of the guests are not the same, but that of the client's is what the end is told by.
	asked := nanoseconds(t, b.client.sh(t, "date +%s%N"))
	b.server.changeAt(t, kernelPolicy(selected))
	b.mustEnd(t, asked, "allowed")
	b.mustLive(t, "plain")
	b.server.mustExplain(t, b.client.addr, fmt.Sprintf("%s:%d", b.server.addr, clientOnly))

	b.client.sh(t, "kill $(pidof socat)")
	b.server.sh(t, "kill $(pidof socat sleep)")
	b.client.reconfigure(t, kernelPolicy(selected, clientOnly))
	b.client.awaitPeers(t, selected)
}

// mustExplain looks for a connection that a changed policy ended.
func (n *node) mustExplain(t *testing.T, source, destination string) {
	t.Helper()
	e := ask[agentapi.Explanation](t, n, fmt.Sprintf("explain %s %s", source, destination))
	if !slices.ContainsFunc(e.Recent, func(d agentapi.Decision) bool {
		return d.Mode == agentapi.ModeEnded && d.Reason == agentapi.CodePolicyChange
	}) {
		t.Errorf("%s does not say that the connection was ended: %+v", n.Name(), e)
	}
}
