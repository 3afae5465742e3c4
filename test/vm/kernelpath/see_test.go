// SPDX-License-Identifier: Apache-2.0

package kernelpath

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
)

// ask asks a node's agent, by smcrctl.
func ask[T any](t *testing.T, n *node, question string) (answer T) {
	t.Helper()
	const notOnSMCR = 4 // what explain ends with then
	out := n.sh(t, fmt.Sprintf("smcrctl --socket=/run/smcr/agent.sock %s -o json || test $? = %d", question, notOnSMCR))
	if err := json.Unmarshal([]byte(out), &answer); err != nil {
		t.Fatal(err)
	}
	return answer
}

// seen: the agents tell of the connections that bed.hold opened what the kernels know of them, at both ends.
func (b *bed) seen(t *testing.T) {
	t.Helper()
	for _, n := range []*node{b.client, b.server} {
		direction := map[*node]agentapi.Direction{b.client: agentapi.Outbound, b.server: agentapi.Inbound}[n]
		conns := ask[agentapi.Conns](t, n, "conns")
		for port, mode := range map[uint16]string{selected: "SMC-R", stuck: "SMC-R", clientOnly: "SMC-R", unselected: "TCP"} {
			i := slices.IndexFunc(conns.Conns, func(c agentapi.Conn) bool { return c.Dest.Port() == port })
			if i < 0 {
				t.Errorf("%s: no connection to port %d: %+v", n.Name(), port, conns)
				continue
			}
			c := conns.Conns[i]
			if c.Mode != mode || c.Datapath != "Kernel" || c.Pod != "demo/"+n.pod || c.Direction != direction ||
				c.Source.Addr().String() != b.client.addr || c.Dest.Addr().String() != b.server.addr {
				t.Errorf("%s: port %d: %+v", n.Name(), port, c)
			}
			if carried := mode == "SMC-R"; carried != (c.LinkGroup != 0 && c.Link != 0 && c.Version == 2 && c.Reason == agentapi.CodeOK) {
				t.Errorf("%s: port %d: %+v", n.Name(), port, c)
			}
			if mode == "TCP" && (c.Reason != agentapi.CodeNoPolicy || !strings.Contains(c.Detail, "0x03010000")) {
				t.Errorf("%s: port %d: reason %s: %s", n.Name(), port, c.Reason, c.Detail)
			}
		}
		links := ask[agentapi.Links](t, n, "links")
		if !slices.ContainsFunc(links.LinkGroups, func(g agentapi.LinkGroup) bool {
			return g.Datapath == "Kernel" && g.State == "ACTIVE" && g.Conns > 0 && len(g.Links) > 0 && g.Links[0].Device == "rxe0" &&
				slices.ContainsFunc(conns.Conns, func(c agentapi.Conn) bool { return c.LinkGroup == g.ID })
		}) {
			t.Errorf("%s: link groups %+v", n.Name(), links)
		}
		e := ask[agentapi.Explanation](t, n, fmt.Sprintf("explain %s %s:%d", b.client.addr, b.server.addr, selected))
		if e.Code != agentapi.CodeOK || len(e.Live) != 1 || !strings.Contains(e.Verdict, "on SMC-R of the pod's kernel") {
			t.Errorf("%s: explanation %+v", n.Name(), e)
		}
		if problem := conns.Problem + links.Problem + e.Problem; problem != "" {
			t.Errorf("%s: %s", n.Name(), problem)
		}
	}
}

// fallback: why a connection with a peer without SMC was plain TCP is known when it is over, whichever side of it
// the pod was.
func (b *bed) fallback(t *testing.T) {
	host := b.server.Addr(0).String()
	plain, err := b.server.Start(t.Context(), "socat", fmt.Sprintf("TCP-LISTEN:%d,bind=%s,fork,reuseaddr", selected, host), "PIPE")
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = plain.Signal(unix.SIGKILL)
		_ = plain.Wait()
	}()
	const ping = "sh -c 'echo PING | socat -t 2 - TCP:%s:%d'"
	for _, tt := range []struct {
		asks             *node
		from, to, script string
		direction        agentapi.Direction
	}{
		{b.client, b.client.addr, host, b.client.inPod(fmt.Sprintf(ping, host, selected)), agentapi.Outbound},
		{b.server, b.client.Addr(0).String(), b.server.addr, fmt.Sprintf(ping, b.server.addr, selected), agentapi.Inbound},
	} {
		b.client.eventually(t, "an answer from "+tt.to, func() error {
			out, err := b.client.Shell(t.Context(), tt.script)
			if err == nil && !strings.Contains(out, "PING") && !strings.Contains(out, "PONG") {
				err = fmt.Errorf("%q", out)
			}
			return err
		})
		tt.asks.eventually(t, "the reason of a connection that is over", func() error {
			e := ask[agentapi.Explanation](t, tt.asks, fmt.Sprintf("explain %s %s:%d", tt.from, tt.to, selected))
			if e.Code != agentapi.CodeOf(clc.ReasonPeerNoSMC) || len(e.Live) > 0 || !strings.Contains(e.Verdict, "as the pod's kernel found") {
				return fmt.Errorf("%+v", e)
			}
			if d := e.Recent[0]; d.Pod != "demo/"+tt.asks.pod || d.Direction != tt.direction || d.Mode != "TCP" {
				t.Errorf("%s: %+v", tt.asks.Name(), d)
			}
			return nil
		})
	}
}
