// SPDX-License-Identifier: Apache-2.0

package linkgroup

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr/llc"
)

// The answer to a DELETE RKEY of version 2 has room for few keys, and says how many more
// there were.
func TestAnswerDeleteV2(t *testing.T) {
	var keys []rdma.RKey
	for i := range rdma.RKey(llc.ShortDeleteRKeysV2 + 3) {
		keys = append(keys, i)
	}
	a := answerDeleteV2(llc.DeleteRKeyV2{RKeys: keys}, 2)
	want := llc.DeleteRKeyV2{Header: llc.Header{Response: true}, Negative: true, Invalid: 2, Omitted: 3, RKeys: keys[:llc.ShortDeleteRKeysV2]}
	if d := cmp.Diff(want, a); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
	if a := answerDeleteV2(llc.DeleteRKeyV2{RKeys: keys[:1]}, 0); a.Negative || a.Omitted != 0 || len(a.RKeys) != 1 {
		t.Errorf("%+v", a)
	}
}

// RFC 7609 A.3.7: of the keys of a DELETE RKEY those that we do not know are in the mask.
func TestPeerKeys_handleDelete(t *testing.T) {
	g := New(Config{Role: Server})
	l := g.links.first()
	g.links.becomeForming(l, Endpoint{})
	g.keys.learn(0, RToken{RKey: 5})
	m := llc.DeleteRKey{Count: 3}
	copy(m.RKeys[:], []rdma.RKey{4, 5, 5})
	g.peerKeys.handleDelete(g, l, m)
	got, ok := sentOn(t, l)[0].(llc.DeleteRKey)
	if !ok || !got.Response || !got.Negative || got.ErrorMask != 0b1010_0000 || len(g.keys.peers) != 0 {
		t.Errorf("%+v, %d RMBs are left", got, len(g.keys.peers))
	}
}
