// SPDX-License-Identifier: Apache-2.0

package softiwarp_test

import (
	"bytes"
	"errors"
	"testing"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/iwarp"
	"github.com/smcr-io/kube-smcr/pkg/rdma/rdmatest"
	"github.com/smcr-io/kube-smcr/pkg/rdma/softiwarp"
)

// TestReply_long: a Reply with more private data than Linux's siw survives is refused before a byte of it
// is sent, and the request still waits; who asks for it may send all that MPA has.
func TestReply_long(t *testing.T) {
	portable := bytes.Repeat([]byte{'p'}, iwarp.PortablePrivateData)
	long := bytes.Repeat([]byte{'l'}, iwarp.MaxPrivateData-4)
	for _, c := range []struct {
		name    string
		allowed bool // Config.LongReplies
		refused [][]byte
		taken   []byte
	}{
		{"default", false, [][]byte{append(portable, 'p'), long, append(long, 'l')}, portable},
		{"LongReplies", true, [][]byte{append(long, 'l')}, long},
	} {
		for _, accept := range []bool{true, false} {
			name := c.name + "/reject"
			if accept {
				name = c.name + "/accept"
			}
			t.Run(name, func(t *testing.T) {
				x, _, a, _ := ends(t)
				b, err := softiwarp.Open(softiwarp.Config{Name: "b", Addr: loopB, LongReplies: c.allowed})
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { _ = b.Close() })
				y := rdmatest.NewEnd(t, b, rdmatest.Options{})
				y.Init(t)
				answered := answerWith(t, b, y, accept, c.refused, c.taken)
				got, err := a.Dial(within(t), x.QP, answered.addr, softiwarp.ConnectOptions{})
				if !accept {
					got = connectError(t, err, softiwarp.Rejected).PrivateData
				} else if err != nil {
					t.Fatal(err)
				}
				<-answered.done
				if !bytes.Equal(got, c.taken) {
					t.Errorf("%d bytes of private data arrive, want %d", len(got), len(c.taken))
				}
			})
		}
	}
}

// answer is a listener that answers one request.
type answer struct {
	addr string
	done chan struct{}
}

// answerWith answers a request with private data, after some that are to be errors.
func answerWith(t *testing.T, d *softiwarp.Device, y *rdmatest.End, accept bool, refused [][]byte, taken []byte) *answer {
	t.Helper()
	l, err := d.Listen(":0")
	if err != nil {
		t.Fatal(err)
	}
	a := &answer{addr: l.Addr().String(), done: make(chan struct{})}
	ctx := within(t)
	go func() {
		defer close(a.done)
		defer func() { _ = l.Close() }()
		r, err := l.Accept(ctx)
		if err != nil {
			t.Error(err)
			return
		}
		reply := func(pd []byte) error {
			if accept {
				return r.Accept(ctx, y.QP, softiwarp.ConnectOptions{PrivateData: pd})
			}
			c, err := r.Reject(pd)
			if err == nil {
				err = c.Close()
			}
			return err
		}
		for _, pd := range refused {
			if err := reply(pd); !errors.Is(err, rdma.ErrInvalid) {
				t.Errorf("a Reply with %d bytes: %v, want ErrInvalid", len(pd), err)
			}
		}
		if err := reply(taken); err != nil {
			t.Errorf("a Reply with %d bytes: %v", len(taken), err)
		}
	}()
	return a
}
