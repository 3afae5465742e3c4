// SPDX-License-Identifier: Apache-2.0

package linkgroup_test

import (
	"bytes"
	"encoding/json"
	"math/rand/v2"
	"os"
	"reflect"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/internal/testenv"
	"github.com/smcr-io/kube-smcr/pkg/smcr/linkgroup"
)

// move replaces the group with what Restore makes of its snapshot, which must be the same
// in all fields.
func (r *rig) move() {
	r.t.Helper()
	if r.acting || r.g.HasOutputs() {
		return // the shell is still to take outputs, or to carry them out
	}
	s := r.g.Snapshot(r.now)
	r.moves++
	if r.moves%r.encodeEach == 0 {
		s = encoded(r.t, s)
	}
	g, err := linkgroup.Restore(r.now, r.cfg, s)
	if err != nil {
		r.t.Fatalf("%v\n%v", err, r.log)
	}
	if err := linkgroup.Same(r.g, g); err != nil {
		r.t.Fatalf("after Restore: %v\n%v", err, r.log)
	}
	for name, c := range r.conns {
		if moved := g.ConnAt(c.Slot()); r.g.ConnAt(c.Slot()) == c {
			delete(r.names, c)
			r.conns[name], r.names[moved] = moved, name
		}
	}
	r.g = g
}

// encoded is a snapshot that went through JSON.
func encoded(t testing.TB, s linkgroup.Snapshot) linkgroup.Snapshot {
	t.Helper()
	b, err := json.Marshal(s)
	if err != nil {
		t.Fatal(err)
	}
	var read linkgroup.Snapshot
	if err := json.Unmarshal(b, &read); err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(read, s) {
		t.Fatalf("encoded and decoded:\n%+v\nwas\n%+v", read, s)
	}
	return read
}

// Each script has the same outcome when the group is replaced before and after each
// thing that it is told.
func TestSnapshot_scripts(t *testing.T) { scripts(t, 4) }

// So has what any order of events leads to.
func TestSnapshot_anyOrderOfEvents(t *testing.T) {
	seed := testenv.Seed(t)
	rng := rand.New(rand.NewPCG(seed, 0))
	for range 100 {
		b := make([]byte, 50+rng.IntN(400))
		for i := range b {
			b[i] = byte(rng.Uint32())
		}
		playMoved(t, byte(rng.Uint32()), byte(rng.Uint32()), b, 32)
	}
}

// snapshots are those of groups in the middle of much: what a run of random events leads to.
func snapshots(t testing.TB, n int) []linkgroup.Snapshot {
	t.Helper()
	rng := rand.New(rand.NewPCG(3, 4))
	var list []linkgroup.Snapshot
	for mode := range n {
		b := make([]byte, 300)
		for i := range b {
			b[i] = byte(rng.Uint32())
		}
		c := newChaos(t, byte(mode), byte(mode>>5*3), b)
		for range 40 {
			c.step()
			c.poll()
			if c.g.State() == linkgroup.Dead && len(list)%8 != 0 {
				break
			}
		}
		list = append(list, c.g.Snapshot(c.now))
	}
	return list
}

// each calls f with all values of a snapshot, also with those that have parts. The path
// has no numbers.
func each(v reflect.Value, path string, f func(path string, v reflect.Value)) {
	f(path, v)
	switch v.Kind() {
	case reflect.Struct:
		for i := range v.NumField() {
			each(v.Field(i), path+"."+v.Type().Field(i).Name, f)
		}
	case reflect.Slice, reflect.Array:
		for i := range min(v.Len(), 2) {
			each(v.Index(i), path+"[]", f)
		}
	default:
	}
}

// leaves calls f with those that have no parts.
func leaves(v reflect.Value, path string, f func(path string, v reflect.Value)) {
	each(v, path, func(path string, v reflect.Value) {
		if k := v.Kind(); k != reflect.Struct && k != reflect.Slice && k != reflect.Array {
			f(path, v)
		}
	})
}

// A snapshot that was kept when version 4 was made is read, and written again to the byte:
// neither names of fields nor numbers of states have changed.
func TestSnapshot_ofVersion4(t *testing.T) {
	const name = "testdata/snapshots/version4.json"
	b, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	var s linkgroup.Snapshot
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if err := d.Decode(&s); err != nil {
		t.Fatal(err)
	}
	now := time.Unix(1000, 0)
	g, err := linkgroup.Restore(now, linkgroup.Config{}, s)
	if err != nil {
		t.Fatal(err)
	}
	again, err := json.MarshalIndent(g.Snapshot(now), "", " ")
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(append(again, '\n'), b) {
		t.Errorf("%s comes out as\n%s", name, again)
	}
	if s.State != linkgroup.Active || len(s.Conns.List) < 2 || len(s.Requests.Line) == 0 || s.Adding.Step == 0 {
		t.Errorf("%s has little to say", name)
	}
}
