// SPDX-License-Identifier: Apache-2.0

package cdc

import (
	"reflect"
	"testing"
)

// snapshotFields says where a snapshot has each field of a connection and of its parts.
var snapshotFields = map[string]string{
	"token":     "Token",
	"send.ring": "Peer", "send.buffer": "SendBuffer", "send.produced": "Send.Produced", "send.sent": "Send.Sent",
	"send.completed": "Send.Completed", "send.peerConsumed": "Send.PeerConsumed",
	"send.announcedTo": "Send.AnnouncedTo", "send.blocked": "Send.Blocked", "send.askUpdate": "Send.AskUpdate",
	"coalesce.below": "Send.Coalesce", "coalesce.flushed": "Send.Flushed",
	"urgentOut.next": "Send.Urgent", "urgentOut.told": "Send.UrgentTold", "urgentOut.sent": "Send.UrgentSent",
	"sentMsgs.seq": "Send.Seq", "sentMsgs.written": "Send.Written", "sentMsgs.told": "Send.Told",
	"recv.ring": "Local", "recv.peerProduced": "Receive.PeerProduced", "recv.consumed": "Receive.Consumed",
	"recv.announced": "Receive.Announced", "recv.peerBlocked": "Receive.Blocked",
	"recv.updateAsked": "Receive.UpdateAsked",
	"urgentIn.pending": "Receive.Urgent", "urgentIn.end": "Receive.UrgentEnd",
	"recvMsgs.seq": "Receive.Seq", "recvMsgs.replaying": "Receive.Replaying",
	"failover.validate": "Send.Validate", "failover.repeat": "Send.Repeat",
	"end.state": "State", "end.wantDone": "End.WantDone", "end.wantClose": "End.WantClose",
	"end.wantAbort": "End.WantAbort", "end.failed": "End.Failed", "end.sentFlags": "End.SentFlags",
	"end.peerFlags": "End.PeerFlags",
}

// A field of Conn, or of one of its parts, that is new must be in the snapshot.
func TestSnapshot_hasEveryField(t *testing.T) {
	paths := map[string]bool{"Version": true}
	leaves(reflect.TypeFor[Conn](), "", func(field string) {
		path, ok := snapshotFields[field]
		if !ok {
			t.Errorf("Conn.%s is not in Snapshot, or not in the table of this test", field)
		}
		paths[path] = true
	})
	if len(paths) != len(snapshotFields)+1 {
		t.Errorf("%d places of Snapshot for %d fields", len(paths)-1, len(snapshotFields))
	}
	leaves(reflect.TypeFor[Snapshot](), "", func(path string) {
		if !paths[path] {
			t.Errorf("Snapshot.%s is of no field of Conn", path)
		}
		delete(paths, path)
	})
	for path := range paths {
		t.Errorf("there is no Snapshot.%s", path)
	}
	if m, s := reflect.TypeFor[sentMessage](), reflect.TypeFor[SentSnapshot](); m.NumField() != s.NumField() {
		t.Errorf("a message in flight has %d fields, its snapshot %d", m.NumField(), s.NumField())
	}
	if n := reflect.TypeFor[inflight]().NumField(); n != 3 {
		t.Errorf("the queue of messages in flight has %d fields; Same knows of 3", n)
	}
}

// leaves calls f with each field of a connection, or of a snapshot, that is not a part with
// fields of its own.
func leaves(s reflect.Type, prefix string, f func(path string)) {
	for field := range s.Fields() {
		if field.Type.Kind() == reflect.Struct && field.Type != reflect.TypeFor[Ring]() && field.Type != reflect.TypeFor[inflight]() {
			leaves(field.Type, prefix+field.Name+".", f)
			continue
		}
		f(prefix + field.Name)
	}
}
