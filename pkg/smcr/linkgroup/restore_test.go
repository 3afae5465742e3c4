// SPDX-License-Identifier: Apache-2.0

package linkgroup_test

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"math/rand/v2"
	"reflect"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/internal/testenv"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr/linkgroup"
	"github.com/smcr-io/kube-smcr/pkg/smcr/llc"
)

// editSize is what one change of a snapshot takes: which value, and what it becomes.
const editSize = 10

// edit changes values of a snapshot, and the lengths of its lists.
func edit(s *linkgroup.Snapshot, edits []byte) {
	for ; len(edits) >= editSize; edits = edits[editSize:] {
		var values []reflect.Value
		each(reflect.ValueOf(s).Elem(), "", func(_ string, v reflect.Value) {
			if k := v.Kind(); k != reflect.Struct && k != reflect.Array {
				values = append(values, v)
			}
		})
		n := binary.BigEndian.Uint64(edits[2:])
		switch v := values[int(binary.BigEndian.Uint16(edits))%len(values)]; v.Kind() {
		case reflect.Slice:
			if v.Len() > 0 && n%2 == 0 {
				v.Set(v.Slice(0, v.Len()-1))
			} else {
				v.Set(reflect.Append(v, reflect.Zero(v.Type().Elem())))
			}
		case reflect.Bool:
			v.SetBool(!v.Bool())
		case reflect.Int, reflect.Int64:
			v.SetInt(int64(n))
		case reflect.String:
			v.SetString(v.String() + "x")
		default:
			v.SetUint(n)
		}
	}
}

// FuzzRestore: whatever the snapshot, there is an error that names a field, or a group that
// says the same of itself, holds what every group holds, and comes to its end.
func FuzzRestore(f *testing.F) {
	rng := rand.New(rand.NewPCG(5, 6))
	for i, s := range snapshots(f, 64) {
		b, err := json.Marshal(s)
		if err != nil {
			f.Fatal(err)
		}
		edits := make([]byte, i%4*editSize)
		for k := range edits {
			if edits[k] = byte(rng.Uint32()); k%editSize > 1 && k%editSize < 9 && i%2 == 0 {
				edits[k] = 0
			}
		}
		f.Add(b, edits)
	}
	f.Fuzz(func(t *testing.T, b, edits []byte) {
		var s linkgroup.Snapshot
		if json.Unmarshal(b, &s) != nil {
			return
		}
		edit(&s, edits)
		restoreAny(t, s)
	})
}

// TestRestore_anyValue is FuzzRestore with more changes than its seeds have.
func TestRestore_anyValue(t *testing.T) {
	seed := testenv.Seed(t)
	rng := rand.New(rand.NewPCG(seed, 0))
	list := snapshots(t, 32)
	accepted := 0
	for range 2000 {
		b, err := json.Marshal(list[rng.IntN(len(list))])
		if err != nil {
			t.Fatal(err)
		}
		var s linkgroup.Snapshot
		if err := json.Unmarshal(b, &s); err != nil {
			t.Fatal(err)
		}
		for range 1 + rng.IntN(2) {
			e := binary.BigEndian.AppendUint16(nil, uint16(rng.Uint32()))
			edit(&s, binary.BigEndian.AppendUint64(e, rng.Uint64()>>rng.IntN(64)))
		}
		if restoreAny(t, s) {
			accepted++
		}
	}
	t.Logf("%d of 2000 were accepted", accepted)
	if accepted < 500 {
		t.Errorf("%d of 2000 were accepted: too few to say anything of the groups", accepted)
	}
}

func restoreAny(t *testing.T, s linkgroup.Snapshot) bool {
	t.Helper()
	now := time.Unix(1000, 0)
	g, err := linkgroup.Restore(now, linkgroup.Config{Rand: rand.New(rand.NewPCG(1, 2))}, s)
	if err != nil {
		var bad *linkgroup.SnapshotError
		if !errors.As(err, &bad) || g != nil {
			t.Fatal(err)
		}
		return false
	}
	again, err := linkgroup.Restore(now, linkgroup.Config{}, g.Snapshot(now))
	if err != nil {
		t.Fatalf("a second time: %v", err)
	}
	if err := linkgroup.Same(g, again); err != nil {
		t.Fatalf("a second time: %v", err)
	}
	if err := g.Check(); err != nil {
		t.Fatal(err)
	}
	drive(g, now)
	return true
}

// drive lets a group go on without a peer, up to its end.
func drive(g *linkgroup.Group, now time.Time) {
	for n := range 100 {
		for range 100 {
			if g.Idle() {
				break
			}
			for _, o := range g.Poll(now, nil) {
				switch {
				case o.Kind == linkgroup.OutSend:
					g.HandleSent(now, o.Link, o.ID)
				case o.Kind == linkgroup.OutEvent && o.Event == linkgroup.EventWantLink:
					g.NoLink(now, o.Link)
				case o.Kind == linkgroup.OutEvent && o.Event == linkgroup.EventConnDone:
					o.Conn.Release(now)
				}
			}
		}
		next, ok := g.NextTimeout()
		if !ok {
			return
		}
		if next.After(now) {
			now = next
		}
		g.HandleTimeout(now)
		link, h := linkgroup.LinkIndex(n%linkgroup.MaxLinks), llc.Header{Version: g.Version(), Response: n%3 > 0}
		switch n % 10 {
		case 1:
			_ = g.HandleRecv(now, link, llc.DeleteLink{Header: h, Link: llc.LinkID(n % 4)}.Append(nil))
		case 2:
			_ = g.HandleRecv(now, link, llc.ConfirmRKey{Header: h}.Append(nil))
		case 3:
			_ = g.HandleRecv(now, link, llc.AddLink{Header: h, Dialect: g.Dialect(), Link: 9, MTU: rdma.MTU1024}.Append(nil))
		case 4:
			_ = g.HandleRecv(now, link, llc.ConfirmRKeyContinuation{Header: h}.Append(nil))
		case 5:
			g.HandlePort(now, uint8(n%3), n%20 == 5)
		case 6:
			var m llc.Message = llc.DeleteRKey{Header: h, Count: 1}
			if g.Version() == llc.Version2 {
				m = llc.DeleteRKeyV2{Header: h, RKeys: make([]rdma.RKey, 1)}
			}
			_ = g.HandleRecv(now, link, m.Append(nil))
		case 7:
			if n > 40 {
				g.HandleLinkFailure(now, link, errors.New("fuzz"))
			}
		}
		if n == 70 {
			g.Terminate(now, llc.DeleteOperator)
		}
	}
}

// Each value of a snapshot comes out of the restored group as it went in, or is refused by
// the name of a field.
func TestRestore_keepsEveryValue(t *testing.T) {
	kept, refused := map[string]bool{}, map[string]bool{}
	for _, s := range snapshots(t, 32) {
		leaves(reflect.ValueOf(&s).Elem(), "", func(path string, v reflect.Value) {
			old := reflect.ValueOf(v.Interface())
			switch v.Kind() {
			case reflect.Bool:
				v.SetBool(!v.Bool())
			case reflect.String:
				v.SetString(v.String() + "x")
			case reflect.Int, reflect.Int64:
				v.SetInt(v.Int() + 1)
			default:
				v.SetUint(v.Uint() ^ 1)
			}
			g, err := linkgroup.Restore(time.Unix(1, 0), linkgroup.Config{}, s)
			var bad *linkgroup.SnapshotError
			switch {
			case err == nil:
				kept[path] = true
				if again := g.Snapshot(time.Unix(1, 0)); !reflect.DeepEqual(again, s) && !same(again, s) {
					t.Errorf("%s is lost:\n%+v\nof\n%+v", path, again, s)
				}
			case !errors.As(err, &bad):
				t.Errorf("%s: %v", path, err)
			default:
				refused[path] = true
			}
			v.Set(old)
		})
		if t.Failed() {
			return
		}
	}
	if len(kept) < 150 || len(refused) < 30 {
		t.Errorf("%d values were kept, %d refused: too few to say anything", len(kept), len(refused))
	}
	t.Logf("%d values were kept, %d refused", len(kept), len(refused))
}

// same compares snapshots as their encodings: an Instant that is not known has no time.
func same(a, b linkgroup.Snapshot) bool {
	forget := func(_ string, v reflect.Value) {
		if i, ok := v.Addr().Interface().(*linkgroup.Instant); ok && !i.Known {
			i.In = 0
		}
	}
	x, err := json.Marshal(a)
	if err != nil {
		return false
	}
	var c linkgroup.Snapshot
	y, err := json.Marshal(b)
	if err != nil || json.Unmarshal(y, &c) != nil {
		return false
	}
	each(reflect.ValueOf(&c).Elem(), "", forget)
	y, err = json.Marshal(c)
	return err == nil && bytes.Equal(x, y)
}

// What cannot be is refused as a whole, with the name of the field.
func TestRestore_refuses(t *testing.T) {
	r := newRigOf(t, 2, linkgroup.Config{Role: linkgroup.Server}, true)
	r.two, r.peerMax = true, 2
	r.form(llc.DialectLinux)
	r.second(false)
	r.held = true
	c := r.conns["a"]
	c.Produce(100)
	r.poll()
	c.Close(r.now)
	r.poll()
	for field, spoil := range map[string]func(*linkgroup.Snapshot){
		"Version":                      func(s *linkgroup.Snapshot) { s.Version = 0 },
		"State":                        func(s *linkgroup.Snapshot) { s.State = 9 },
		"Terms.Version":                func(s *linkgroup.Snapshot) { s.Terms.Version = 3 },
		"Terms.MaxConns":               func(s *linkgroup.Snapshot) { s.Terms.MaxConns = 256 },
		"Links.At[1].State":            func(s *linkgroup.Snapshot) { s.Links.At[1].State = 5 },
		"Links.At[1].Local.RNIC":       func(s *linkgroup.Snapshot) { s.Links.At[1].Local.RNIC = linkgroup.MaxRNICs },
		"Links.At[0].Born":             func(s *linkgroup.Snapshot) { s.Links.Births = 0 },
		"Links.At[0].Inflight":         func(s *linkgroup.Snapshot) { s.Links.At[0].Inflight = linkgroup.SendBudget + 1 },
		"Links.At[0].UntilLong":        func(s *linkgroup.Snapshot) { s.Links.At[0].UntilLong = s.Links.At[0].Inflight + 1 },
		"Links.At[0].Queue[0]":         func(s *linkgroup.Snapshot) { s.Links.At[0].Queue = [][]byte{{1}} },
		"Links.At[0].Ready[0]":         func(s *linkgroup.Snapshot) { s.Links.At[0].Ready = []int{7} },
		"Links.At[0].Ready[1]":         func(s *linkgroup.Snapshot) { s.Links.At[0].Ready = []int{0, 0} },
		"Links.At[0].Health.Heard":     func(s *linkgroup.Snapshot) { s.Links.At[0].Health.Heard.In = 1 << 62 },
		"Adding.Via":                   func(s *linkgroup.Snapshot) { s.Adding.Step = 1 },
		"Requests.Sent":                func(s *linkgroup.Snapshot) { s.Requests.Sent = true },
		"Requests.Line[0].RMBs":        func(s *linkgroup.Snapshot) { s.Requests.Line = []linkgroup.ExchangeSnapshot{{}} },
		"Requests.Line[0].Kind":        func(s *linkgroup.Snapshot) { s.Requests.Line = []linkgroup.ExchangeSnapshot{{Kind: 4}} },
		"Side.Spare":                   func(s *linkgroup.Snapshot) { s.Side.Spare = 1 },
		"Keys.RMBs[1].ID":              func(s *linkgroup.Snapshot) { s.Keys.RMBs = append(s.Keys.RMBs, s.Keys.RMBs[0]) },
		"PeerKeys.PeerRMB":             func(s *linkgroup.Snapshot) { s.PeerKeys.PeerRMB = 2 },
		"Conns.List[0].RMB":            func(s *linkgroup.Snapshot) { s.Conns.List[0].RMB++ },
		"Conns.List[0].Element":        func(s *linkgroup.Snapshot) { s.Conns.List[0].Element = 2 },
		"Conns.List[0].Token":          func(s *linkgroup.Snapshot) { s.Conns.List[0].Token++ },
		"Conns.List[0].Link":           func(s *linkgroup.Snapshot) { s.Conns.List[0].Link = 0 },
		"Conns.List[0].PeerRMB":        func(s *linkgroup.Snapshot) { s.Conns.List[0].PeerRMB = -1 },
		"Conns.List[0].Data.Send.Sent": func(s *linkgroup.Snapshot) { s.Conns.List[0].Data.Send.Sent = 101 },
		"Conns.List[1].Slot":           func(s *linkgroup.Snapshot) { s.Conns.List = append(s.Conns.List, s.Conns.List[0]) },
		"Conns.List[0].Deadline":       func(s *linkgroup.Snapshot) { s.Conns.Closing = nil },
		"Conns.Closing[1]":             func(s *linkgroup.Snapshot) { s.Conns.Closing = []int{0, 0} },
		"Last.Inflight[3]":             func(s *linkgroup.Snapshot) { s.Last.Inflight[3] = -1 },
		"":                             func(s *linkgroup.Snapshot) { s.Links.At[0].State, s.Links.At[1].State = 0, 0 },
	} {
		s := r.g.Snapshot(r.now)
		if _, err := linkgroup.Restore(r.now, r.cfg, s); err != nil {
			t.Fatal(err)
		}
		spoil(&s)
		g, err := linkgroup.Restore(r.now, r.cfg, s)
		var bad *linkgroup.SnapshotError
		if !errors.As(err, &bad) || bad.Field != field || g != nil {
			t.Errorf("%s is wrong, error: %v", field, err)
		}
	}
}
