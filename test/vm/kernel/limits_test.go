// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"context"
	"strings"
	"testing"

	"github.com/smcr-io/kube-smcr/internal/smcnl"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
)

// limits are numbers in which the two sides differ.
func (b *bed) limits(t *testing.T) {
	each(t, "pathMTU", b.testPathMTU)
	each(t, "buffers", b.testBuffers)
	each(t, "groupLimits", b.testGroupLimits)
	t.Run("ueidCharacters", b.testUEIDCharacters)
}

// The link has the smaller path MTU; the kernel's is 4096.
func (b *bed) testPathMTU(t *testing.T, r role) {
	p := plan{engine: r, do: "duplex:bytes=200000", ours: "-mtu 512"}
	got := b.play(t, p)
	got.wantSMCR(t, p, 1)
	for _, g := range got.ours.Groups {
		for _, l := range g.Links {
			if l.MTU != 512 {
				t.Errorf("link %d has MTU %d, want 512", l.ID, l.MTU)
			}
		}
	}
}

// The kernel's buffers may be larger than any of ours, or smaller.
func (b *bed) testBuffers(t *testing.T, r role) {
	for _, size := range []int{16 << 10, 1 << 20} {
		b.sysctl(t, "net.smc.rmem", size)
		b.sysctl(t, "net.smc.wmem", size)
		p := plan{engine: r, do: "duplex:bytes=2200K,slow:bytes=1200K:size=64K:pause=100ms", ours: "-rmbe 65536"}
		got := b.play(t, p)
		got.wantSMCR(t, p, 2)
		for _, c := range got.ours.Conns {
			if c.Engine.PeerRMBE != size || c.Engine.RMBE != 65536 {
				t.Errorf("receive buffers of %d bytes at the kernel and %d at ours, want %d and 65536", c.Engine.PeerRMBE, c.Engine.RMBE, size)
			}
		}
	}
}

// Both sides say how many links and connections they take in a group; the
// kernel's 2 and 255 are more than ours here.
func (b *bed) testGroupLimits(t *testing.T, r role) {
	const conns = 20
	var groups []smcnl.Group
	p := plan{
		engine: r, do: "hold", dial: "-conns 20", ours: "-links 1 -conns-per-group 16",
		during: func(t *testing.T, r *round) {
			groups = b.ask(t).Groups
			if err := r.client.Enough(); err != nil {
				t.Error(err)
			}
		},
	}
	got := b.play(t, p)
	got.wantSMCR(t, p, conns)
	if len(groups) != 2 || got.firstContacts() != 2 {
		t.Errorf("%d first contacts and the kernel's link groups %+v, want 2", got.firstContacts(), groups)
	}
	for _, g := range groups {
		if g.MaxConns != 16 || g.MaxLinks != 1 || g.Conns > 16 || len(g.Links) != 1 {
			t.Errorf("the kernel's link group is %+v, want at most 16 connections and 1 link", g)
		}
	}
}

// What the kernel takes for an enterprise ID, we do, and nothing else; but for
// white space at the end, which the kernel leaves away.
func (b *bed) testUEIDCharacters(t *testing.T) {
	ids := []string{
		"A", "KUBE.SMCR-1", "9LIVES", "A.B-C", strings.Repeat("A", clc.EIDLen),
		"lower", "WITH BLANK", "UNDER_SCORE", "-FIRST", ".FIRST", "TWO..DOTS", "LAST.", "SLASH/", "Ü", strings.Repeat("A", clc.EIDLen+1),
	}
	// One program for all: starting one is what takes time.
	const script = `for id in "$@"; do if kernelsmc ueid add "$id" 2>/dev/null; then echo yes; kernelsmc ueid del "$id"; else echo no; fi; done`
	out, err := b.kernel.Run(context.Background(), append([]string{"bash", "-euc", script, "ueids"}, ids...)...)
	if err != nil {
		t.Fatal(err)
	}
	answers := strings.Fields(out)
	if len(answers) != len(ids) {
		t.Fatalf("%d answers for %d IDs", len(answers), len(ids))
	}
	for i, id := range ids {
		_, err := clc.ParseUEID(id)
		if (answers[i] == "yes") != (err == nil) {
			t.Errorf("%q: does the kernel take it: %s; we say %v", id, answers[i], err)
		}
	}
}
