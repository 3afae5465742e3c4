// SPDX-License-Identifier: Apache-2.0

package kernelpath

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/smcnl"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
	"github.com/smcr-io/kube-smcr/test/vm/lab"
	"github.com/smcr-io/kube-smcr/test/vm/peer/drive"
)

// Pods with a VF each, of an emulated NIC, are on their kernels' SMC-R by the RDMA device of that function, from the first
// connection on.
func TestKernelPath_function(t *testing.T) {
	l := lab.ForTest(t, lab.Config{PFs: 1})
	build(t, l)
	if err := drive.Build(t.Context(), l); err != nil {
		t.Fatal(err)
	}
	add := func(p *lab.Pod, ctx context.Context) error {
		vfs, err := p.Guest.MakeVFs(ctx, p.Guest.PF(0), 1)
		if err != nil {
			return err
		}
		return p.AddFunction(ctx, vfs[0].NetDev)
	}
	for i := range l.Guests() {
		if err := l.Guest(i).LoadRXE(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := drive.SetUpKernel(t.Context(), l.Guest(i), 0); err != nil {
			t.Fatal(err)
		}
	}
	b := &bed{newNode(t, l.Guest(0), "server", 50, add), newNode(t, l.Guest(1), "client", 51, add)}
	b.server.configure(t, kernelPolicy(selected))
	b.client.configure(t, kernelPolicy(selected, clientOnly))
	b.startAgents(t)
	b.startRedis(t)
	b.firstConnection(t)
	b.expect(t, map[int]bool{selected: true, clientOnly: false, unselected: false})
	for _, n := range []*node{b.client, b.server} {
		links := ask[agentapi.Links](t, n, "links")
		if !slices.ContainsFunc(links.LinkGroups, func(g agentapi.LinkGroup) bool {
			return g.Datapath == "Kernel" && g.State == "ACTIVE" && len(g.Links) > 0 && g.Links[0].Device == n.PF(0)+"v0" && g.Links[0].LocalGID == n.addr
		}) {
			t.Errorf("%s: link groups %+v", n.Name(), links)
		}
	}
	b.server.endAgent(t, unix.SIGKILL)
	b.expect(t, map[int]bool{selected: true, clientOnly: false})
}

// firstConnection has the client's pod open its first connection, which must be on SMC-R. A rendezvous of which the kernels say
// that it took too long is tried again: first contact takes longest, and guests stand still at times. Nothing else may keep a
// connection from SMC-R.
func (b *bed) firstConnection(t *testing.T) {
	t.Helper()
	b.client.eventually(t, "the first connection is on SMC-R", func() error {
		c, s := b.client.counters(t), b.server.counters(t)
		out, failed := b.client.Shell(t.Context(), b.client.inPod(fmt.Sprintf("redis-cli -h %s -p %d PING 2>&1", b.server.addr, selected)))
		dc, ds := b.client.counters(t).Sub(c), b.server.counters(t).Sub(s)
		if failed == nil && dc.ClientV2 == 1 && ds.ServerV2 == 1 {
			return nil
		}
		what := fmt.Sprintf("%q, %v; client %+v, server %+v", out, failed, dc, ds)
		if !tookTooLong(dc) && !tookTooLong(ds) && !strings.Contains(out, "Connection timed out") {
			t.Fatalf("%s\nclient's agent: %s\nserver's agent: %s", what, b.client.log(), b.server.log())
		}
		t.Log(what)
		return errors.New(what)
	})
}

// tookTooLong tells whether a kernel counted a rendezvous that it gave up for the time that it took.
func tookTooLong(c smcnl.Counters) bool {
	for f := range c.Fallbacks {
		if f.Reason == clc.ReasonTimeoutCL || f.Reason == clc.ReasonTimeoutAL {
			return true
		}
	}
	return false
}
