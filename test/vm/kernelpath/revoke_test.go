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

// hold opens a connection from the client's pod to a port of the server, which holds on until somebody ends
// it. The program's last word is the time of that.
func (b *bed) hold(t *testing.T, name string, port int, socat string) {
	t.Helper()
	b.client.sh(t, fmt.Sprintf("rm -f /tmp/ended-%[1]s; (%[2]s; date +%%s%%N >/tmp/ended-%[1]s) >/run/%[1]s.log 2>&1 </dev/null & echo $! >/run/%[1]s.pid",
		name, b.client.inPod(fmt.Sprintf("socat %s:%s:%d%s", socat, b.server.addr, port, map[bool]string{true: ",linger=600"}[port == stuck]))))
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
	b.server.sh(t, b.server.inPod(fmt.Sprintf("socat -u TCP4-LISTEN:%d,reuseaddr SYSTEM:'sleep 600'", stuck))+` >/run/stuck.log 2>&1 </dev/null & echo $! >/run/stuck.pid
		for i in $(seq 100); do nsenter --net=/run/netns/server ss -Hltn "sport = :`+strconv.Itoa(stuck)+`" | grep -q . && exit 0; sleep 0.1; done; exit 1`)
	before := b.client.counters(t)
	b.hold(t, "idle", selected, "PIPE TCP4")
	b.hold(t, "stuck", stuck, "-u /dev/zero TCP4")
	b.hold(t, "allowed", clientOnly, "PIPE TCP4")
	b.hold(t, "plain", unselected, "PIPE TCP4")
	b.client.eventually(t, "three connections are on SMC-R, one is not, and one waits for room", func() error {
		if d := b.client.counters(t).Sub(before); d.ClientV2 != 3 || d.ClientFallbacks != 1 || d.Tx.PeerFull+d.Tx.Full == 0 {
			return fmt.Errorf("%+v", d)
		}
		return nil
	})

	b.seen(t)
	b.mustEnd(t, b.client.changeAt(t, kernelPolicy(clientOnly)), "idle", "stuck")
	b.mustLive(t, "allowed", "plain")
	b.client.mustExplain(t, "demo/client", fmt.Sprintf("%s:%d", b.server.addr, selected))
	// The clocks of the guests are not the same, but that of the client's is what the end is told by.
	asked := nanoseconds(t, b.client.sh(t, "date +%s%N"))
	b.server.changeAt(t, kernelPolicy(selected))
	b.mustEnd(t, asked, "allowed")
	b.mustLive(t, "plain")
	b.server.mustExplain(t, b.client.addr, fmt.Sprintf("%s:%d", b.server.addr, clientOnly))

	b.client.sh(t, "kill $(pidof socat)")
	b.server.sh(t, "kill $(pidof socat) || true")
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
