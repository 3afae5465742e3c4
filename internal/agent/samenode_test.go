// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/cni"
	"github.com/smcr-io/kube-smcr/internal/records"
)

// TestHold_otherNetwork: a pod on this node that has the destination's address in another network, which has the same range, is
// not the destination.
func TestHold_otherNetwork(t *testing.T) {
	l := newHoldLab(t, preferAll)
	other := newSpace(t)
	must(t, cni.NewStore(l.a.dir).Write(cni.Attachment{
		ContainerID: "other", IfName: "net1", NetNS: other.path, NetNSID: other.ns.ID(), Network: "storage",
		Pod: records.Pod{Namespace: "test", Name: "other"}, IPs: []netip.Prefix{netip.MustParsePrefix(podB + "/24")},
	}))
	l.a.start(t)
	l.b.start(t)
	serve(t, l.b.pod.listen(t, podB+":80"), echo)
	l.carried(t, podB+":80")
	if n := l.a.status(t).Reasons[agentapi.CodeSameNode]; n != 0 {
		t.Errorf("%d connections were said to be to a pod on this node", n)
	}
	if e := value(l.a.client.Explain(t.Context(), podA, podB+":81"))(t); e.Code == agentapi.CodeSameNode {
		t.Errorf("explanation %+v", e)
	}
}

// TestIsReached: an address in another network is reached by a route, unless it is one of a subnet of one's own.
func TestIsReached(t *testing.T) {
	at := func(network, prefix string) cni.Attachment {
		return cni.Attachment{Network: network, IPs: []netip.Prefix{netip.MustParsePrefix(prefix)}}
	}
	other := at("storage", "10.2.0.9/16")
	for _, tt := range []struct {
		name string
		from []cni.Attachment
		want bool
	}{
		{"nothing is known", nil, true},
		{"the same network", []cni.Attachment{at("storage", "10.2.0.1/16")}, true},
		{"the same range in another network", []cni.Attachment{at("pods", "10.2.0.1/24")}, false},
		{"another range", []cni.Attachment{at("pods", "10.3.0.1/16")}, true},
		{"an address without a subnet", []cni.Attachment{at("pods", "10.2.0.1/32")}, true},
		{"both", []cni.Attachment{at("pods", "10.2.0.1/24"), at("storage", "10.2.0.2/16")}, true},
	} {
		if got := isReached(tt.from, other, other.IPs[0].Addr()); got != tt.want {
			t.Errorf("%s: %t", tt.name, got)
		}
	}
}

// TestKernelPath_sameNodeAtOnce: pods that come in one round, as at the agent's start, know of each other at once, and not of one whose
// record was left: a pod on another node may have its address.
func TestKernelPath_sameNodeAtOnce(t *testing.T) {
	b, s := newKernelBench(t, kernelAll)
	want := []netip.Addr{netip.MustParseAddr("192.0.2.1")} // the node's
	for i := range 4 {
		name, addr := fmt.Sprint("p", i), netip.AddrFrom4([4]byte{192, 0, 2, byte(10 + i)})
		if i < 3 {
			b.kernel.add("/netns/"+name, uint64(1+i))
			want = append(want, addr)
		}
		must(t, b.store.Write(cni.Attachment{
			ContainerID: name, IfName: "eth0", NetNS: "/netns/" + name, NetNSID: uint64(1 + i), Network: "n",
			Pod: records.Pod{Namespace: "test", Name: name}, IPs: []netip.Prefix{netip.PrefixFrom(addr, 24)},
		}))
	}
	b.start()
	s.change(func() {
		if len(s.asked) < 3 {
			t.Errorf("attached %d times", len(s.asked))
		}
		for i, cfg := range s.asked {
			if !slices.Equal(cfg.Filter.Never, want) {
				t.Errorf("filter %d of the start lets connections with %v be TCP, want %v", i, cfg.Filter.Never, want)
			}
		}
	})
}
