// SPDX-License-Identifier: Apache-2.0

package siw

import (
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"

	"github.com/smcr-io/kube-smcr/pkg/rdma/iwarp"
	"github.com/smcr-io/kube-smcr/pkg/rdma/softiwarp"
)

// testConnect has connections begin in other ways than programs ask for, or not at all.
func (b *bed) testConnect(t *testing.T) {
	t.Run("dial", b.testDial)
	t.Run("siw rejects", b.testRejected)
	t.Run("we reject", b.testReject)
	t.Run("revision 1", b.testRevision1)
	t.Run("many", func(t *testing.T) { b.testUcmatose(t, 32) })
}

// pingBytes is the size of rping's message where that does not matter.
const pingBytes = 64

// testDial dials with options, and asks for what siw can do just so, or not quite.
func (b *bed) testDial(t *testing.T) {
	_, at := b.serve(t, "rping", "-s", "-P")
	works := func(name string, o softiwarp.ConnectOptions) {
		t.Run(name, func(t *testing.T) {
			p := b.newPeer(t, 2, pingInfoBytes)
			b.dial(t, p, at, o)
			p.ping(t, pingBytes, 0)
			b.disconnect(t, p)
		})
	}
	for _, n := range []int{1, 2, 4, 8, 16} {
		works(fmt.Sprintf("%d READs", n), softiwarp.ConnectOptions{ReadsServed: n, ReadsAsked: n, Exact: true})
	}
	works("16 READs served, 1 asked", softiwarp.ConnectOptions{ReadsServed: 16, ReadsAsked: 1})
	works("1 READ served, 16 asked", softiwarp.ConnectOptions{ReadsServed: 1, ReadsAsked: 16})
	for _, n := range []int{1, iwarp.PortablePrivateData} {
		works(fmt.Sprintf("%d bytes of private data", n), softiwarp.ConnectOptions{PrivateData: make([]byte, n)})
	}
	for _, n := range []int{iwarp.PortablePrivateData + 1, 508} {
		t.Run(fmt.Sprintf("%d bytes of private data", n), func(t *testing.T) {
			err := b.tryDial(t, b.newPeer(t, 2, pingInfoBytes), at, softiwarp.ConnectOptions{PrivateData: make([]byte, n)})
			wantReason(t, err, softiwarp.Refused)
		})
	}
}

func wantReason(t *testing.T, err error, want softiwarp.ConnectReason) {
	t.Helper()
	var e *softiwarp.ConnectError
	if !errors.As(err, &e) || e.Reason != want {
		t.Errorf("%v, want that it is %v", err, want)
	}
}

// testRejected: the only thing that siw itself rejects and that we ask for is a CRC, where it is set to do
// without.
func (b *bed) testRejected(t *testing.T) {
	b.set(t, settings{"mpa_crc_strict": "1"})
	_, at := b.serve(t, "rping", "-s", "-P")
	p := b.newPeer(t, 2, pingInfoBytes)
	wantReason(t, b.tryDial(t, p, at, softiwarp.ConnectOptions{}), softiwarp.Rejected)
	b.dial(t, p, at, softiwarp.ConnectOptions{NoCRC: true})
	p.ping(t, pingBytes, 0)
	b.disconnect(t, p)
}

// testReject: after a Reply that rejects, siw ends the connection.
func (b *bed) testReject(t *testing.T) {
	l := b.listen(t)
	for _, n := range []int{0, iwarp.PortablePrivateData} {
		client := b.start(t, "rping", "-c", "-a", b.host.Addr().String(), "-p", portOf(l), "-C", "1")
		r := request(t, l)
		if got := len(r.PrivateData()); got != 0 {
			t.Errorf("rping sends %d bytes of private data", got)
		}
		if served, asked, ok := r.Reads(); served != 1 || asked != 1 || !ok {
			t.Errorf("rping serves %d READs and asks for %d (%t), want 1 and 1", served, asked, ok)
		}
		c, err := r.Reject(make([]byte, n))
		if err != nil {
			t.Fatal(err)
		}
		if rest, err := io.ReadAll(c); len(rest) > 0 {
			t.Errorf("siw sends %x after we have rejected it, and then %v", rest, err)
		}
		_ = c.Close()
		// It ends with 0 all the same.
		if said, err := client.said(); !strings.Contains(said, "RDMA_CM_EVENT_REJECTED, error -104") {
			t.Errorf("%d bytes of private data: rping ended with %v and said\n%swant that it was rejected", n, err, said)
		}
	}
}

// testRevision1 has siw without RFC 6581: there are no READs then, and who has opened the connection sends
// first.
func (b *bed) testRevision1(t *testing.T) {
	b.set(t, settings{"mpa_version": "1"})
	t.Run("server", b.testClient)
	t.Run("client", b.testServer)
}
