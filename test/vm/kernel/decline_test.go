// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"context"
	"testing"

	"github.com/smcr-io/kube-smcr/internal/smcnl"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
	"github.com/smcr-io/kube-smcr/test/vm/peer/report"
)

// half is enough to see that a connection over TCP is whole, with both ends.
const half = "half:bytes=100000"

// declines are rendezvous that do not lead to SMC-R: each side says no to the
// other, for each reason that this bed can give it, and both say the same.
func (b *bed) declines(t *testing.T) {
	for _, tt := range []struct {
		name  string
		role  role
		ours  string           // flags of the engine
		setUp func(*testing.T) // the kernel's side
		six   bool             // over IPv6
		want  report.Engine
		// kernel is what the kernel counts, peerReason what it was told.
		kernel     smcnl.Fallback
		peerReason clc.Reason
	}{
		{
			name: "noCommonUEID", role: engineDials, ours: "-eid OTHER",
			want: report.Engine{Reason: clc.ReasonNoDev, PeerDeclined: true}, kernel: smcnl.Fallback{Side: smcnl.Server, Reason: clc.ReasonNoDev},
		},
		{
			name: "noCommonUEID", role: engineServes, ours: "-eid OTHER",
			want: report.Engine{Reason: clc.ReasonNoUEID}, kernel: smcnl.Fallback{Side: smcnl.Client, Reason: clc.ReasonPeerDecl}, peerReason: clc.ReasonNoUEID,
		},
		{
			name: "kernelWithoutDevice", role: engineDials, setUp: b.withoutDevice,
			want: report.Engine{Reason: clc.ReasonNoDevR, PeerDeclined: true}, kernel: smcnl.Fallback{Side: smcnl.Server, Reason: clc.ReasonNoDevR},
		},
		{
			name: "kernelWithoutDevice", role: engineServes, setUp: b.withoutDevice,
			want: report.Engine{Reason: clc.ReasonNoDev, PeerDeclined: true}, kernel: smcnl.Fallback{Side: smcnl.Client, Reason: clc.ReasonNoDev},
		},
		{
			name: "engineWithoutDevice", role: engineDials, ours: "-deviceless",
			want: report.Engine{Reason: clc.ReasonNoDevR}, kernel: smcnl.Fallback{Side: smcnl.Server, Reason: clc.ReasonPeerDecl}, peerReason: clc.ReasonNoDevR,
		},
		{
			name: "engineWithoutDevice", role: engineServes, ours: "-deviceless",
			want: report.Engine{Reason: clc.ReasonNoDevR}, kernel: smcnl.Fallback{Side: smcnl.Client, Reason: clc.ReasonPeerDecl}, peerReason: clc.ReasonNoDevR,
		},
		{
			name: "enginesPolicy", role: engineServes, ours: "-decline 0x03020000",
			want: report.Engine{Reason: clc.ReasonIPSec}, kernel: smcnl.Fallback{Side: smcnl.Client, Reason: clc.ReasonPeerDecl}, peerReason: clc.ReasonIPSec,
		},
		{
			name: "engineShortOfMemory", role: engineDials, ours: "-memory 65536",
			want: report.Engine{Reason: clc.ReasonMem, FirstContact: true}, kernel: smcnl.Fallback{Side: smcnl.Server, Reason: clc.ReasonPeerDecl}, peerReason: clc.ReasonMem,
		},
		{
			name: "engineShortOfMemory", role: engineServes, ours: "-memory 65536",
			want: report.Engine{Reason: clc.ReasonMem, FirstContact: true}, kernel: smcnl.Fallback{Side: smcnl.Client, Reason: clc.ReasonPeerDecl}, peerReason: clc.ReasonMem,
		},
		{
			name: "versionOneOnly", role: engineDials, ours: "-versions v1",
			want: report.Engine{Reason: clc.ReasonNoDev, PeerDeclined: true}, kernel: smcnl.Fallback{Side: smcnl.Server, Reason: clc.ReasonNoDev},
		},
		{
			name: "versionOneOnly", role: engineServes, ours: "-versions v1",
			want: report.Engine{Reason: clc.ReasonVersMismat}, kernel: smcnl.Fallback{Side: smcnl.Client, Reason: clc.ReasonPeerDecl}, peerReason: clc.ReasonVersMismat,
		},
		{
			name: "overIPv6", role: engineDials, six: true,
			want: report.Engine{Reason: clc.ReasonNoDevR, PeerDeclined: true}, kernel: smcnl.Fallback{Side: smcnl.Server, Reason: clc.ReasonNoDevR},
		},
		{
			name: "overIPv6", role: engineServes, six: true,
			want: report.Engine{Reason: clc.ReasonNoDev, PeerDeclined: true}, kernel: smcnl.Fallback{Side: smcnl.Client, Reason: clc.ReasonNoDev},
		},
		{
			name: "noRDMAPath", role: engineDials, setUp: b.withoutPath,
			want: report.Engine{Reason: clc.ReasonTimeoutCL, PeerDeclined: true, FirstContact: true}, kernel: smcnl.Fallback{Side: smcnl.Server, Reason: clc.ReasonTimeoutCL},
		},
		{
			name: "noRDMAPath", role: engineServes, setUp: b.withoutPath,
			want: report.Engine{Reason: clc.ReasonTimeoutCL, FirstContact: true}, kernel: smcnl.Fallback{Side: smcnl.Client, Reason: clc.ReasonPeerDecl}, peerReason: clc.ReasonTimeoutCL,
		},
	} {
		t.Run("declines/"+tt.name+"/"+tt.role.String(), func(t *testing.T) {
			if tt.setUp != nil {
				tt.setUp(t)
			}
			p := plan{engine: tt.role, do: half, ours: tt.ours, declines: true}
			if tt.six {
				p.addr = b.kernel.Addr6(0)
				if tt.role == engineServes {
					p.addr = b.engine.Addr6(0)
				}
			}
			r := b.play(t, p)
			r.wantTCP(t, tt.want, map[smcnl.Fallback]uint64{tt.kernel: 1}, tt.peerReason)
		})
	}
}

// withoutDevice takes the kernel's RDMA device away.
func (b *bed) withoutDevice(t *testing.T) {
	if err := b.kernel.RemoveRXE(context.Background(), 0); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := b.kernel.AddRXE(context.Background(), 0); err != nil {
			t.Error(err)
		}
	})
}

// withoutPath drops what comes to the engine by RDMA: the rendezvous goes well,
// and then no queue pair does.
func (b *bed) withoutPath(t *testing.T) {
	b.shell(t, b.engine, "nft add table inet cut; nft add chain inet cut in '{ type filter hook input priority 0; }'; nft add rule inet cut in udp dport 4791 drop")
	t.Cleanup(func() { b.shell(t, b.engine, "nft delete table inet cut") })
}
