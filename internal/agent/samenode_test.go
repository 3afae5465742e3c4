// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"net/netip"
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
	for network, want := range map[string]bool{"test": false, "storage": true, "": true} {
		if got := isOneNetwork(network, "storage"); got != want {
			t.Errorf("%q is network storage: %t", network, got)
		}
	}
}
