// SPDX-License-Identifier: Apache-2.0

package smcr_test

import (
	"errors"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
)

// slowDevice finds out MAC addresses, of some peers only when a test says so.
type slowDevice struct {
	rdma.Device

	mu    sync.Mutex // guards what follows
	slow  map[rdma.GID]chan error
	asked chan rdma.GID
}

type slowContext struct {
	rdma.Context
	d *slowDevice
}

func (d *slowDevice) Open() (rdma.Context, error) {
	c, err := d.Device.Open()
	return slowContext{c, d}, err
}

// ResolvePath implements [rdma.PathResolver].
func (c slowContext) ResolvePath(p rdma.Path) error {
	c.d.mu.Lock()
	answer := c.d.slow[p.DGID]
	c.d.mu.Unlock()
	if answer == nil {
		return nil
	}
	c.d.asked <- p.DGID
	return <-answer
}

// TestStack_slowPath: a peer whose RNIC does not answer ARP delays its own
// connection and no other.
func TestStack_slowPath(t *testing.T) {
	eachVersion(t, func(t *testing.T, v smcr.VersionSet) {
		for _, tc := range []struct {
			name   string
			answer error
			mode   smcr.Mode
			reason clc.Reason
		}{
			{"answers late", nil, smcr.ModeSMCR, 0},
			{"does not answer", errors.New("no answer"), smcr.ModeTCP, clc.ReasonErrReadyLnk},
		} {
			t.Run(tc.name, func(t *testing.T) {
				f := newFakeFabric()
				lazy := f.device("lazy", 3)
				dev := &slowDevice{
					Device: f.device("c", 1), asked: make(chan rdma.GID, 1),
					slow: map[rdma.GID]chan error{lazy.GIDs()[0].GID: make(chan error, 1)},
				}
				client := newStack(t, dev, versions(v))
				near := &pair{fabric: f, client: client, server: newStack(t, f.device("s", 2), versions(v))}
				far := &pair{fabric: f, client: client, server: newStack(t, lazy, versions(v))}
				near.listen(t)
				far.listen(t)
				a, b := near.dial(t)

				type ends struct{ c, d *smcr.Conn }
				dialed := make(chan ends, 1)
				go func() {
					c, d := far.dial(t)
					dialed <- ends{c, d}
				}()
				gid := <-dev.asked
				exchange(t, a, b)
				c, d := near.dial(t) // on the group that there is
				exchange(t, c, d)
				select {
				case <-dialed:
					t.Error("the connection to the slow peer is there already")
				default:
				}
				dev.slow[gid] <- tc.answer
				e := <-dialed
				if i := e.c.Info(); i.Mode != tc.mode || i.Reason != tc.reason {
					t.Errorf("%v because of %v, want %v, %v", i.Mode, i.Reason, tc.mode, tc.reason)
				}
				exchange(t, e.c, e.d)
				for _, c := range []net.Conn{a, b, c, d, e.c, e.d} {
					_ = c.Close()
				}
			})
		}
	})
}

// TestStack_closeWhileResolving: what was asked for comes when the link is gone.
func TestStack_closeWhileResolving(t *testing.T) {
	f := newFakeFabric()
	server := f.device("s", 2)
	gid := server.GIDs()[0].GID
	answer := make(chan error)
	dev := &slowDevice{Device: f.device("c", 1), asked: make(chan rdma.GID, 1), slow: map[rdma.GID]chan error{gid: answer}}
	p := &pair{fabric: f, client: newStack(t, dev), server: newStack(t, server)}
	p.listen(t)
	go func() {
		if c, err := p.l.Accept(); err == nil {
			_ = c.Close()
		}
	}()
	dialed := make(chan error, 1)
	go func() {
		_, err := (&smcr.Dialer{Stack: p.client}).DialContext(t.Context(), "tcp", p.l.Addr().String())
		dialed <- err
	}()
	<-dev.asked
	closed := make(chan error, 1)
	go func() { closed <- p.client.Close() }()
	if err := <-dialed; err == nil {
		t.Error("dial: no error of a stack that closes")
	}
	select {
	case answer <- nil:
	case <-time.After(10 * time.Second):
		t.Fatal("nobody waits for the answer any more")
	}
	if err := <-closed; err != nil {
		t.Error(err)
	}
}

// TestGroup_removedWhileResolving: a device goes while the way of a link over it is found out. What the group's other link
// has to say does not wait for that any more.
func TestGroup_removedWhileResolving(t *testing.T) {
	f := newFakeFabric()
	server := f.device("s", 2)
	answers := make(chan error, 100)
	gone := &slowDevice{
		Device: f.device("c2", 11), asked: make(chan rdma.GID, cap(answers)),
		slow: map[rdma.GID]chan error{server.GIDs()[0].GID: answers},
	}
	p := &pair{fabric: f, client: newStack(t, f.device("c", 1)), server: newStack(t, server)}
	t.Cleanup(func() { close(answers) }) // before the stacks', which wait for what was asked
	p.listen(t)
	a, b := p.dial(t)
	exchange(t, a, b)
	if err := p.client.AddDevice(gone); err != nil {
		t.Fatal(err)
	}
	<-gone.asked
	p.client.RemoveDevice("c2")
	var conns []net.Conn
	for range 40 { // more than an RMB has room for: the peer is told of another one
		c, d := p.dial(t)
		exchange(t, c, d)
		conns = append(conns, c, d)
		if m := c.Info().Mode; m != smcr.ModeSMCR {
			t.Errorf("connection %d is %v", len(conns)/2, m)
		}
	}
	for _, c := range append(conns, a, b) {
		_ = c.Close()
	}
}

// TestGroup_slowPath: while the way of a second link is found out, the first one
// carries the group's connections; without it the group has one link.
func TestGroup_slowPath(t *testing.T) {
	eachVersion(t, func(t *testing.T, v smcr.VersionSet) {
		for _, tc := range []struct {
			name   string
			answer error
			links  int
			level  string
		}{{"answers late", nil, 2, "ASYMMETRIC LOCAL"}, {"does not answer", errors.New("no answer"), 1, "SINGLE"}} {
			t.Run(tc.name, func(t *testing.T) {
				f := newFakeFabric()
				second := f.device("s2", 12)
				gid := second.GIDs()[0].GID
				answers := make(chan error, 100) // a link that failed is tried again
				dev := &slowDevice{
					Device: f.device("c", 1), asked: make(chan rdma.GID, cap(answers)),
					slow: map[rdma.GID]chan error{gid: answers},
				}
				p := &pair{
					fabric: f,
					client: newStack(t, dev, versions(v)),
					server: newStack(t, f.device("s", 2), versions(v)),
				}
				p.listen(t)
				a, b := p.dial(t)
				if err := p.server.AddDevice(second); err != nil {
					t.Fatal(err)
				}
				<-dev.asked
				exchange(t, a, b)
				for range cap(answers) {
					answers <- tc.answer
				}
				waitGroup(t, p.client, tc.level, tc.links)
				waitFor(t, "the server agrees", func() bool { return len(p.server.LinkGroups()[0].Links) == tc.links })
				exchange(t, a, b)
				_, _ = a.Close(), b.Close()
			})
		}
	})
}
