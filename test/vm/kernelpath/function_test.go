// SPDX-License-Identifier: Apache-2.0

package kernelpath

import (
	"context"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
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
