// SPDX-License-Identifier: Apache-2.0

package linkgroup

import (
	"cmp"
	"fmt"
	"maps"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/smcr/cdc"
)

// snapshotTypes are the types of a snapshot that have the fields of a group's part under the
// same names, where the type's name is not that of the part and "Snapshot": health and
// HealthSnapshot need no line here.
var snapshotTypes = map[string]string{
	"Group": "Snapshot", "linkTable": "LinksSnapshot", "keyTable": "KeysSnapshot", "connTable": "ConnsSnapshot", "pace": "HealthSnapshot",
	"rtoken": "PeerRMBSnapshot", "holdBack": "HoldSnapshot", "client": "SideSnapshot",
}

// elsewhere says where a snapshot has the fields that are not under the same name in the
// type of their part. Those that are in no snapshot follow from the rest, or are what Restore
// is given.
var elsewhere = map[string]string{
	"Group.cfg": "given", "Group.out": "empty",

	"linkTable.present": "derived: from the states of links",
	"link.index":        "derived: its place", "link.asymmetric": "derived: classify",
	"link.conns": "derived: from the connections", "link.awaiting": "derived: from the connections",
	"message.short": "LinkSnapshot.Queue", "message.long": "LinkSnapshot.Queue",
	"connQueue.head": "LinkSnapshot.Ready", "connQueue.tail": "LinkSnapshot.Ready",
	"health.pace": "HealthSnapshot.Slowest",

	"growth.forbids": "GrowthSnapshot.Held", "exchange.notBefore": "ExchangeSnapshot.HoldUntil",

	"server.asked": "SideSnapshot.AskedVia", "wish.via": "SideSnapshot.AskedVia", "wish.gid": "SideSnapshot.AskedGID",

	"rmb.usedCount": "derived: from its elements", "rmb.zombies": "derived: from the connections",
	"element.used":   "derived: a connection has it",
	"announcement.n": "AnnouncementSnapshot.List",
	"peerKeys.token": "PeerKeysSnapshot.PeerRMB",

	"connTable.n": "derived: from the list", "connTable.slots": "derived: from the list", "connTable.zombies": "derived: from the list",
	"clocks.head": "ConnsSnapshot.Closing", "clocks.tail": "ConnsSnapshot.Closing",
	"Conn.g": "derived: its group", "Conn.peerTok": "ConnSnapshot.PeerToken", "Conn.queued": "derived: from the queues of links",
	"Conn.next": "LinkSnapshot.Ready", "Conn.clockPrev": "ConnsSnapshot.Closing", "Conn.clockNext": "ConnsSnapshot.Closing",
}

// notOfFields are the fields of a snapshot that no field of a group stands for.
var notOfFields = []string{
	"Snapshot.Version", "KeysSnapshot.Forgotten", // the RMBs that only connections know
	"ErrorSnapshot.Text", "ErrorSnapshot.Is",
}

// A field of a group or of its parts that is new must be in the snapshot, or in the table
// with the reason why it need not be.
func TestSnapshot_hasEveryField(t *testing.T) {
	// named are the fields of a snapshot that a field of a group names. They are named in lower
	// case: setup.failed and SetupSnapshot.Failed are one name.
	named := map[string]bool{}
	for _, name := range notOfFields {
		named[strings.ToLower(name)] = true
	}
	unseen := maps.Clone(elsewhere)
	parts := map[reflect.Type]bool{}
	for _, part := range []reflect.Type{reflect.TypeFor[Group](), reflect.TypeFor[server](), reflect.TypeFor[client]()} {
		structs(part, parts)
	}
	for part := range parts {
		for field := range part.Fields() {
			name := part.Name() + "." + field.Name
			place, ok := elsewhere[name]
			if !ok {
				place = cmp.Or(snapshotTypes[part.Name()], part.Name()+"Snapshot") + "." + field.Name
			}
			named[strings.ToLower(place)] = true
			delete(unseen, name)
		}
	}
	for field := range unseen {
		t.Errorf("there is no %s", field)
	}
	values := map[reflect.Type]bool{}
	structs(reflect.TypeFor[Snapshot](), values)
	for part := range values {
		for field := range part.Fields() {
			name := part.Name() + "." + field.Name
			if strings.HasSuffix(part.Name(), "Snapshot") && !named[strings.ToLower(name)] {
				t.Errorf("%s is of no field of a group", name)
			}
			delete(named, strings.ToLower(name))
			if k := field.Type.Kind(); k == reflect.Pointer || k == reflect.Func || k == reflect.Chan || k == reflect.Map || k == reflect.Interface || !field.IsExported() {
				t.Errorf("%s is a %v: a snapshot has plain exported values", name, k)
			}
		}
	}
	for name := range named {
		if strings.Contains(name, "snapshot.") {
			t.Errorf("a snapshot has no %s, which a field of a group or the tables of this test name: add it, or say in the table elsewhere why it need not be there", name)
		}
	}
}

// structs finds the types of this package that a type consists of. What is whole in a
// snapshot, such as Endpoint, what comes with Restore, and outputs are left out.
func structs(t reflect.Type, found map[reflect.Type]bool) {
	switch t.Kind() {
	case reflect.Pointer, reflect.Slice, reflect.Array:
		structs(t.Elem(), found)
	case reflect.Struct:
		whole := []reflect.Type{reflect.TypeFor[Endpoint](), reflect.TypeFor[RToken](), reflect.TypeFor[Config](), reflect.TypeFor[outbox]()}
		if t.PkgPath() != reflect.TypeFor[Group]().PkgPath() || found[t] {
			return
		}
		for _, w := range whole {
			if t == w {
				return
			}
		}
		found[t] = true
		for field := range t.Fields() {
			structs(field.Type, found)
		}
	default:
	}
}

// Same says where two groups differ, but for what Restore is given; nil: nowhere.
func Same(a, b *Group) error {
	if x, y := snapshotError(a.err), snapshotError(b.err); x != y {
		return fmt.Errorf("err: %+v, %+v", x, y)
	}
	w := walker{a: a, b: b, seen: map[uintptr]uintptr{}}
	return w.compare("Group", reflect.ValueOf(a), reflect.ValueOf(b))
}

// walker compares two groups field by field, also along their pointers.
type walker struct {
	a, b *Group
	seen map[uintptr]uintptr // what stands for what
}

func (w *walker) compare(path string, x, y reflect.Value) error {
	switch x.Kind() {
	case reflect.Pointer:
		if x.IsNil() || y.IsNil() || w.seen[x.Pointer()] != 0 {
			if x.IsNil() != y.IsNil() || !x.IsNil() && w.seen[x.Pointer()] != y.Pointer() {
				return fmt.Errorf("%s names something else", path)
			}
			return nil
		}
		w.seen[x.Pointer()] = y.Pointer()
		return w.compare(path, x.Elem(), y.Elem())
	case reflect.Interface:
		return w.compare(path, x.Elem(), y.Elem())
	case reflect.Slice, reflect.Array:
		for i := range max(x.Len(), y.Len()) {
			switch at := fmt.Sprintf("%s[%d]", path, i); {
			case path == "Group.conns.list" && (i >= x.Len() && y.Index(i).IsNil() || i >= y.Len() && x.Index(i).IsNil()):
			case i >= x.Len() || i >= y.Len():
				return fmt.Errorf("%s: %d, %d", path, x.Len(), y.Len())
			default:
				if err := w.compare(at, x.Index(i), y.Index(i)); err != nil {
					return err
				}
			}
		}
		return nil
	case reflect.Struct:
		return w.compareStruct(path, x, y)
	default:
		if !x.Equal(y) {
			return fmt.Errorf("%s: %v, %v", path, x, y)
		}
		return nil
	}
}

func (w *walker) compareStruct(path string, x, y reflect.Value) error {
	switch x.Type() {
	case reflect.TypeFor[cdc.Conn]():
		return nil // see conns
	case reflect.TypeFor[connQueue](), reflect.TypeFor[clocks]():
		next := map[bool]string{true: "next", false: "clockNext"}[x.Type() == reflect.TypeFor[connQueue]()]
		if p, q := w.line(&w.a.conns, x, next), w.line(&w.b.conns, y, next); p != q {
			return fmt.Errorf("%s: slots%s, slots%s", path, p, q)
		}
		return nil
	case reflect.TypeFor[Conn]():
		slot := int(x.FieldByName("slot").Int())
		c, d := w.a.ConnAt(slot), w.b.ConnAt(slot)
		if c == nil || d == nil || !reflect.DeepEqual(c.data.Snapshot(), d.data.Snapshot()) {
			return fmt.Errorf("%s.data differs", path)
		}
	case reflect.TypeFor[time.Time]():
		for i := range 2 { // not the location
			if err := w.compare(path, x.Field(i), y.Field(i)); err != nil {
				return err
			}
		}
		return nil
	}
	for i := range x.NumField() {
		name := x.Type().Name() + "." + x.Type().Field(i).Name
		switch name {
		case "Group.cfg", "Group.err", "Group.out", "Conn.next", "Conn.clockPrev", "Conn.clockNext":
			continue
		case "message.short":
			if !x.FieldByName("long").IsNil() {
				continue
			}
		case "link.asymmetric":
			if x.FieldByName("state").Uint() == uint64(linkDown) {
				continue
			}
		}
		if err := w.compare(path+"."+x.Type().Field(i).Name, x.Field(i), y.Field(i)); err != nil {
			return err
		}
	}
	return nil
}

// line lists the slots of the connections that wait in a queue.
func (w *walker) line(t *connTable, q reflect.Value, next string) string {
	s := ""
	for c := q.FieldByName("head"); !c.IsNil(); c = c.Elem().FieldByName(next) {
		slot := int(c.Elem().FieldByName("slot").Int())
		if reflect.ValueOf(t.list[slot]).Pointer() == c.Pointer() { // it was not released
			s += fmt.Sprint(" ", slot)
		}
	}
	return s
}
