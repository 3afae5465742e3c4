// SPDX-License-Identifier: Apache-2.0

package cdc_test

import (
	"encoding/json"
	"errors"
	"reflect"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"

	"github.com/smcr-io/kube-smcr/pkg/smcr/cdc"
)

// moved replaces a connection with the one that Restore makes of its snapshot. All fields must be the same.
func moved(t testing.TB, c *cdc.Conn, encode bool) {
	t.Helper()
	s := c.Snapshot()
	if encode {
		b, err := json.Marshal(s)
		if err != nil {
			t.Fatal(err)
		}
		var read cdc.Snapshot
		if err := json.Unmarshal(b, &read); err != nil {
			t.Fatal(err)
		}
		if !reflect.DeepEqual(read, s) {
			t.Fatalf("encoded and decoded:\n%+v\nwas\n%+v", read, s)
		}
		s = read
	}
	r, err := cdc.Restore(s)
	if err != nil {
		t.Fatalf("%v: %+v", err, s)
	}
	if !cdc.Same(c, &r) {
		t.Fatalf("restored:\n%+v\nwas\n%+v", r, *c)
	}
	*c = r
}

// Connections that are restored from a snapshot after each step pass the same models and scenarios as other
// connections.
func TestSnapshot_model(t *testing.T) {
	steps := 0
	move := func(e *end) {
		steps++
		moved(t, &e.c, steps%64 == 0)
	}
	model(t, modelled{rounds: 50}, move)
	model(t, modelled{rounds: 50, failovers: true}, move)
	modelEnds(t, 500, move)
}

func TestSnapshot_scenarios(t *testing.T) {
	datadriven.Walk(t, "testdata/scenarios", func(t *testing.T, path string) {
		l := &ladder{t: t}
		l.moved = func(e *end) { moved(l.t, &e.c, true) }
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			l.t, l.lines = t, nil
			l.run(d)
			return strings.Join(l.lines, "\n")
		})
	})
}

// busy is a snapshot with most of its fields set.
func busy(t testing.TB) cdc.Snapshot {
	t.Helper()
	ring := cdc.Ring{Origin: cdc.OriginRFC, Size: 1004}
	c := cdc.NewConn(cdc.Config{Local: ring, SendBuffer: 2000})
	c.Activate(ring, 7)
	if _, err := c.HandleMessage(cdc.Message{Seq: 1, Token: 1, Prod: ring.Cursor(600), Cons: ring.Cursor(0)}); err != nil {
		t.Fatal(err)
	}
	c.Consume(500)
	for pos := uint64(100); pos <= 1000; pos += 300 {
		c.Urgent(pos)
		c.Produce(pos)
		if c.Pending() {
			c.Next()
		}
	}
	c.HandleSent()
	c.Shutdown()
	return c.Snapshot()
}

// A snapshot of a state that cannot be is refused, and the error names the field.
func TestRestore_refuses(t *testing.T) {
	for field, spoil := range map[string]func(*cdc.Snapshot){
		"Version":              func(s *cdc.Snapshot) { s.Version++ },
		"Local":                func(s *cdc.Snapshot) { s.Local.Size = 4 },
		"Peer":                 func(s *cdc.Snapshot) { s.Peer.Origin = 3 },
		"Token":                func(s *cdc.Snapshot) { s.Peer = cdc.Ring{} },
		"State":                func(s *cdc.Snapshot) { s.State = cdc.ProcessAbort + 1 },
		"End.SentFlags":        func(s *cdc.Snapshot) { s.End.SentFlags = s.End.SentFlags.WithWriterBlocked() },
		"End.PeerFlags":        func(s *cdc.Snapshot) { s.End.PeerFlags = 1 },
		"Send.Completed":       func(s *cdc.Snapshot) { s.Send.Completed = s.Send.Sent + 1 },
		"Send.PeerConsumed":    func(s *cdc.Snapshot) { s.Send.PeerConsumed = s.Send.Sent + 1 },
		"Send.Sent":            func(s *cdc.Snapshot) { s.Send.Sent = s.Send.AnnouncedTo + 1 },
		"Send.AnnouncedTo":     func(s *cdc.Snapshot) { s.Send.AnnouncedTo = s.Send.Produced + 1 },
		"Send.Produced":        func(s *cdc.Snapshot) { s.Send.Produced += 2000 },
		"Send.Urgent":          func(s *cdc.Snapshot) { s.Send.Urgent = s.Send.AnnouncedTo - 1 },
		"Send.UrgentSent":      func(s *cdc.Snapshot) { s.Send.UrgentSent = s.Send.AnnouncedTo - 1 },
		"Send.Flushed":         func(s *cdc.Snapshot) { s.Send.Flushed = s.Send.Produced + 1 },
		"Send.Told":            func(s *cdc.Snapshot) { s.Send.Told = make([]cdc.SentSnapshot, cdc.MaxInflight+1) },
		"Send.Told[0].Pos":     func(s *cdc.Snapshot) { s.Send.Told = []cdc.SentSnapshot{{Pos: s.Send.Sent + 1}} },
		"Receive.Announced":    func(s *cdc.Snapshot) { s.Receive.Announced = s.Receive.Consumed + 1 },
		"Receive.Consumed":     func(s *cdc.Snapshot) { s.Receive.Consumed = s.Receive.PeerProduced + 1 },
		"Receive.PeerProduced": func(s *cdc.Snapshot) { s.Receive.PeerProduced = s.Receive.Announced + 1001 },
		"Receive.UrgentEnd":    func(s *cdc.Snapshot) { s.Receive.UrgentEnd = s.Receive.PeerProduced + 1 },
	} {
		s := busy(t)
		if _, err := cdc.Restore(s); err != nil {
			t.Fatal(err)
		}
		spoil(&s)
		_, err := cdc.Restore(s)
		var bad *cdc.SnapshotError
		if !errors.As(err, &bad) || bad.Field != field {
			t.Errorf("%s is wrong, error: %v", field, err)
		}
	}
}

// For any snapshot, Restore returns either an error or a connection whose snapshot is the same and which can be
// used to its end.
func FuzzRestore(f *testing.F) {
	add := func(s cdc.Snapshot) {
		b, err := json.Marshal(s)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	add(busy(f))
	for _, name := range []string{"43-v1-abnormal-close-unread-data", "07-oob-urgent", "21-failover-client-netdev-down"} {
		msgs, _ := conversation(f, name)
		c := cdc.NewConn(cdc.Config{Local: cdc.Ring{Size: 1 << 16}, SendBuffer: 1 << 16})
		c.Activate(cdc.Ring{Size: 1 << 16}, 1)
		for i, m := range msgs[:min(len(msgs), 20)] {
			_, _ = c.HandleMessage(m)
			if c.State() == cdc.Active {
				c.Produce(uint64(100 * i))
			}
			if c.Pending() {
				c.Next()
			}
			add(c.Snapshot())
		}
		c.Failover()
		add(c.Snapshot())
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		var s cdc.Snapshot
		if json.Unmarshal(b, &s) != nil {
			return
		}
		c, err := cdc.Restore(s)
		if err != nil {
			return
		}
		moved(t, &c, false)
		for range 2 * cdc.MaxInflight {
			if c.Pending() {
				tr, _ := c.Next()
				c.WriteSpans(tr)
			}
			if c.InFlight() > 0 && !c.Repeats() {
				c.HandleSent()
			}
		}
		c.Failover()
		c.Close()
		c.Fail()
	})
}
