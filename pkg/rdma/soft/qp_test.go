// SPDX-License-Identifier: Apache-2.0

package soft

import (
	"errors"
	"net/netip"
	"testing"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// silentWire takes every packet and delivers none.
type silentWire struct {
	done chan struct{}
	see  func(*Message) // what it takes; nil: nobody looks
}

func (w *silentWire) Send(msgs []Message) (int, error) {
	for i := range msgs {
		if w.see != nil {
			w.see(&msgs[i])
		}
	}
	return len(msgs), nil
}

func (w *silentWire) MaxSegments() int { return 1 }
func (w *silentWire) Receive(func([]Message), func() bool) error {
	<-w.done
	return errors.New("closed")
}

func (w *silentWire) Close() error {
	close(w.done)
	return nil
}

// silent is a queue pair of a device whose wire is silent.
func silent(t *testing.T, cfg Config) *qp {
	t.Helper()
	pd, cq := silentPD(t, cfg, nil)
	return silentQP(t, pd, cq)
}

// silentPD is a protection domain of a device whose wire is silent, and a completion queue.
func silentPD(t *testing.T, cfg Config, see func(*Message)) (rdma.PD, rdma.CQ) {
	t.Helper()
	return wiredPD(t, cfg, &silentWire{make(chan struct{}), see})
}

// wiredPD returns a protection domain of a device that has a wire.
func wiredPD(t *testing.T, cfg Config, w Wire) (rdma.PD, rdma.CQ) {
	t.Helper()
	cfg.Name, cfg.Wire = "silent", w
	if !cfg.Addr.IsValid() {
		cfg.Addr = netip.MustParseAddr("192.0.2.1")
	}
	d, err := Open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = d.Close() })
	c, err := d.Open()
	if err != nil {
		t.Fatal(err)
	}
	pd, errPD := c.AllocPD()
	cq, errCQ := c.CreateCQ(4)
	if err := errors.Join(errPD, errCQ); err != nil {
		t.Fatal(err)
	}
	return pd, cq
}

func silentQP(t *testing.T, pd rdma.PD, cq rdma.CQ) *qp {
	t.Helper()
	q, err := pd.CreateQP(rdma.QPConfig{SendCQ: cq, RecvCQ: cq, MaxSendWR: 4, MaxRecvWR: 4})
	if err != nil {
		t.Fatal(err)
	}
	return q.(*qp)
}

// rtr has the attributes that Modify to RTR needs.
func rtr(to string) rdma.QPAttr {
	return rdma.QPAttr{
		State: rdma.QPRTR, Path: rdma.Path{DGID: rdma.GIDFromAddr(netip.MustParseAddr(to))}, DestQPN: 7, MTU: rdma.MTU1024, MinRNRTimer: 12,
	}
}

// Nobody refuses by a queue pair that is closed.
func TestQP_refuseClosed(t *testing.T) {
	q := silent(t, Config{})
	if err := q.Close(); err != nil {
		t.Fatal(err)
	}
	if err := q.Refuse(); !errors.Is(err, rdma.ErrClosed) {
		t.Errorf("refuse: %v", err)
	}
}

// Attributes that the protocol's machine does not know are checked before the queue pair is entered for its
// path.
func TestQP_checkPath(t *testing.T) {
	for _, c := range []struct {
		name string
		edit func(*rdma.QPAttr)
		to   string
		ok   bool
	}{
		{"a neighbour", nil, "192.0.2.2", true},
		{"another row of the GID table", func(a *rdma.QPAttr) { a.Path.SGIDIndex = 1 }, "192.0.2.2", false},
		{"another family", nil, "fd00::2", false},
		{"nobody", nil, "0.0.0.0", false},
		{"everybody", nil, "224.0.0.1", false},
		{"the port's path MTU", func(a *rdma.QPAttr) { a.MTU = rdma.MTU2048 }, "192.0.2.2", true},
		{"a larger path MTU", func(a *rdma.QPAttr) { a.MTU = rdma.MTU4096 }, "192.0.2.2", false},
	} {
		t.Run(c.name, func(t *testing.T) {
			q := silent(t, Config{MTU: rdma.MTU2048})
			if err := q.Modify(rdma.QPAttr{State: rdma.QPInit}); err != nil {
				t.Fatal(err)
			}
			a := rtr(c.to)
			if c.edit != nil {
				c.edit(&a)
			}
			want := rdma.QPInit
			if c.ok {
				want = rdma.QPRTR
			}
			if err := q.Modify(a); (err == nil) != c.ok || !c.ok && !errors.Is(err, rdma.ErrInvalid) || q.State() != want {
				t.Errorf("error %v, state %v", err, q.State())
			}
		})
	}
}
